"""An engine process without a model: every step gives every running request one token.

As many run as `max_num_seqs` says, in the order of their arrival; a step takes as long as it is told. Speaks the
engine's protocol through engine.main, so the frontend cannot tell. Started by scripted_server.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import islice

from engine.config import EngineConfig
from engine.control import AnyAction, AnyResult
from engine.errors import EngineError, InvalidRequestError
from engine.main import main
from engine.messages import (
    AbortRequests,
    AddRequest,
    FinishInfo,
    LoadProgress,
    ModelInfo,
    RequestOutput,
    RequestTimes,
    StepMessage,
)
from engine.stats import EngineStats, StepStats

STEP_SECONDS = 0.001  # of a fast device, unless told otherwise; the engine never waits for the frontend
VOCAB_SIZE = 32_000  # ids that every tokenizer of a real model has
_FIRST_TEXT_ID = 1000  # beyond special tokens and single bytes


class ScriptedCore:
    """The part of an EngineCore that the loop drives."""

    def __init__(
        self, config: EngineConfig, on_progress: Callable[[LoadProgress], None], *, step_seconds: float
    ) -> None:
        self.model_info = ModelInfo(
            model_name=config.model.name,
            architecture="Scripted",
            dtype="none",
            device="none",
            vocab_size=VOCAB_SIZE,
            max_model_len=1 << 20,
            eos_token_ids=(0,),
            num_parameters=0,
            weight_bytes=0,
            kv_bytes_per_token=0,
            kv_cache_bytes=0,
            num_blocks=1,
            block_size=16,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            max_steps_in_flight=1,
        )
        self._live: dict[str, _Progress] = {}  # by arrival
        self._max_running = config.scheduler.max_num_seqs
        self._step_seconds = step_seconds
        self._step = 0
        self._next_step_at = 0.0

    def handle(self, message: AddRequest | AbortRequests) -> StepMessage | None:
        match message:
            case AddRequest():
                self._live[message.request_id] = _Progress(message)
                return None
            case AbortRequests():
                outputs = [
                    RequestOutput(request_id=request_id, finish=FinishInfo(reason="cancelled"))
                    for request_id in message.request_ids
                    if self._live.pop(request_id, None) is not None
                ]
                return StepMessage(outputs=outputs, stats=self._stats())

    def control(self, action: AnyAction, answer: Callable[[AnyResult | EngineError], None]) -> None:
        raise InvalidRequestError("action", f"got {type(action).__name__}, a scripted engine has none")

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def prepare(self) -> bool:
        return False

    def step(self) -> StepMessage:
        time.sleep(max(0.0, self._next_step_at - time.monotonic()))
        now = time.monotonic()
        self._next_step_at = now + self._step_seconds
        self._step += 1
        running = islice(self._live.values(), self._max_running)
        outputs = [progress.advance(now) for progress in running]
        for output in outputs:
            if output.finish is not None:
                del self._live[output.request_id]
        step = StepStats(step=self._step, num_scheduled_tokens=len(outputs), num_decode_requests=len(outputs))
        return StepMessage(outputs=outputs, stats=self._stats(), step=step)

    def close(self) -> None:
        self._live.clear()

    def _stats(self) -> EngineStats:
        num_running = min(len(self._live), self._max_running)
        num_waiting = len(self._live) - num_running
        return EngineStats(num_running=num_running, num_waiting=num_waiting, num_blocks=1, num_free_blocks=1)


class _Progress:
    """One request: how far it is."""

    def __init__(self, request: AddRequest) -> None:
        self._request = request
        self._first_token = 0.0
        self._num_tokens = 0

    def advance(self, now: float) -> RequestOutput:
        self._first_token = self._first_token or now
        token_id = _FIRST_TEXT_ID + self._num_tokens * 37 % (VOCAB_SIZE - _FIRST_TEXT_ID)
        self._num_tokens += 1
        request = self._request
        is_last = self._num_tokens == request.params.max_tokens
        return RequestOutput(
            request_id=request.request_id,
            token_ids=[token_id],
            num_prompt_tokens=len(request.prompt_token_ids),
            finish=FinishInfo(reason="length") if is_last else None,
            times=RequestTimes(
                arrival=request.arrival_time,
                first_scheduled=self._first_token,
                first_token=self._first_token,
                last_token=now,
            ),
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-seconds", type=float, default=STEP_SECONDS)
    own, rest = parser.parse_known_args()
    sys.exit(main(rest, core_factory=partial(ScriptedCore, step_seconds=own.step_seconds)))
