"""A scripted engine core without torch or a model, for tests of the clients and of the service.

Every step emits `TOKENS_PER_STEP` tokens of every live request: `expected_tokens` says which. What else
happens is asked for by the model name of the configuration (at start) or the cache salt of a request (later).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from engine.config import EngineConfig, engine_config
from engine.control import (
    AnyAction,
    AnyResult,
    ConfigureSpeculation,
    GetSpeculation,
    Profile,
    ProfileWritten,
    SpeculationState,
)
from engine.errors import CheckpointError, EngineError, InvalidRequestError, QueueFullError
from engine.messages import (
    AbortRequests,
    AddRequest,
    FinishInfo,
    FinishReason,
    LoadProgress,
    ModelInfo,
    PositionLogprobs,
    RequestOutput,
    StepMessage,
    TokenLogprob,
)
from engine.params import SamplingParams
from engine.stats import EngineStats, SpecObservation, StepStats

TOKENS_PER_STEP = 2
STEP_SECONDS = 0.0005  # so that endless requests do not flood their readers
VOCAB_SIZE = 1000


def fake_config(model: str = "fake", **scheduler: int) -> EngineConfig:
    return engine_config(model={"model": model}, scheduler=scheduler)


def fake_request(
    request_id: str,
    max_tokens: int = 6,
    *,
    does: str = "",
    logprobs: int | None = None,
    prompt: list[int] | None = None,
) -> AddRequest:
    """`does`: "", "refused", "queue_full"; at the second step "error", "crash", "hang"."""
    params = SamplingParams(max_tokens=max_tokens, logprobs=logprobs)
    return AddRequest(
        request_id=request_id, prompt_token_ids=prompt or [7, 8, 9], params=params, cache_salt=does
    )


def expected_tokens(request: AddRequest, start: int = 0, stop: int | None = None) -> list[int]:
    """Output tokens start..stop; all by default."""
    stop = request.params.max_tokens if stop is None else min(stop, request.params.max_tokens)
    return [(sum(request.prompt_token_ids) + index) % VOCAB_SIZE for index in range(start, stop)]


@dataclass
class _Live:
    request: AddRequest
    num_emitted: int = 0
    num_steps: int = 0


class FakeCore:
    """Model names: "no-checkpoint" and "bug" fail at start, "exit" ends the process; anything else serves."""

    def __init__(self, config: EngineConfig, on_progress: Callable[[LoadProgress], None]) -> None:
        for fraction in (0.0, 0.5, 1.0):
            on_progress(LoadProgress(phase="weights", fraction=fraction))
        match config.model.model:
            case "no-checkpoint":
                raise CheckpointError("no-checkpoint: no such file, expected a directory with config.json")
            case "bug":
                raise ZeroDivisionError("a secret of the implementation")
            case "exit":
                os._exit(3)
        self.model_info = _model_info(config)
        self.is_closed = False
        self._max_waiting = config.scheduler.max_waiting
        self._live: dict[str, _Live] = {}
        self._num_steps = 0
        self._profiles: list[tuple[int, Callable[[AnyResult | EngineError], None]]] = []

    def handle(self, message: AddRequest | AbortRequests) -> StepMessage | None:
        if isinstance(message, AddRequest):
            if message.cache_salt == "refused":
                raise InvalidRequestError("prompt", "got what is not liked")
            if message.cache_salt == "queue_full":
                raise QueueFullError("too many wait", retry_after=2.5)
            self._live[message.request_id] = _Live(message)
            return None
        outputs = [
            self._output(live, FinishInfo(reason="cancelled"))
            for request_id in message.request_ids
            if (live := self._live.pop(request_id, None)) is not None
        ]
        return StepMessage(outputs=outputs, stats=self._stats()) if outputs else None

    def control(self, action: AnyAction, answer: Callable[[AnyResult | EngineError], None]) -> None:
        """Profiles are "written" after their number of steps."""
        match action:
            case GetSpeculation():
                answer(SpeculationState(speculators=(), default_method=self.model_info.default_speculator))
            case ConfigureSpeculation(default_method=str(method)):
                self.model_info = msgspec.structs.replace(self.model_info, default_speculator=method)
                answer(SpeculationState(speculators=(), default_method=method))
            case Profile():
                self._profiles.append((self._num_steps + action.num_steps, answer))
            case _:
                raise InvalidRequestError("action", "got what is not scripted")

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def prepare(self) -> bool:
        return False

    def step(self) -> StepMessage | None:
        time.sleep(STEP_SECONDS)
        self._num_steps += 1
        for end, answer in self._profiles:
            if self._num_steps == end:
                answer(ProfileWritten(f"after step {end}"))
        outputs = [self._advance(live) for live in list(self._live.values())]
        for output in outputs:
            if output.finish is not None:
                del self._live[output.request_id]
        return StepMessage(outputs=outputs, stats=self._stats(), step=StepStats(step=self._num_steps))

    def close(self) -> None:
        self.is_closed = True

    def _advance(self, live: _Live) -> RequestOutput:
        live.num_steps += 1
        reason: FinishReason | None = None
        if live.num_steps == 2:
            match live.request.cache_salt:
                case "error":
                    return self._output(live, FinishInfo(reason="error", message="the model produced NaN"))
                case "crash":
                    raise RuntimeError("a secret of the implementation")
                case "hang":
                    time.sleep(3600)
        before = live.num_emitted
        tokens = expected_tokens(live.request, before, before + TOKENS_PER_STEP)
        live.num_emitted += len(tokens)
        if live.num_emitted == live.request.params.max_tokens:
            reason = "length"
        output = self._output(live, None if reason is None else FinishInfo(reason=reason))
        output.token_ids = tokens
        output.spec = [
            SpecObservation(
                method="fake", num_drafted=1, num_verifier_accepted=1, num_accepted=1, num_emitted=2
            )
        ]
        if live.request.params.logprobs is not None:
            output.logprobs = [PositionLogprobs(TokenLogprob(token, -0.5, 1), []) for token in tokens]
        return output

    def _output(self, live: _Live, finish: FinishInfo | None) -> RequestOutput:
        return RequestOutput(
            request_id=live.request.request_id,
            num_prompt_tokens=len(live.request.prompt_token_ids),
            finish=finish,
        )

    def _stats(self) -> EngineStats:
        """As if one request ran and the others waited."""
        num_live = len(self._live)
        return EngineStats(num_running=min(num_live, 1), num_waiting=max(num_live - 1, 0), num_blocks=10)


def _model_info(config: EngineConfig) -> ModelInfo:
    return ModelInfo(
        model_name=config.model.name,
        architecture="FakeForCausalLM",
        dtype="float32",
        device="cpu",
        vocab_size=VOCAB_SIZE,
        max_model_len=1_000_000,
        eos_token_ids=(2,),
        num_parameters=0,
        weight_bytes=0,
        kv_bytes_per_token=1,
        kv_cache_bytes=160,
        num_blocks=10,
        block_size=16,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_steps_in_flight=1,
    )
