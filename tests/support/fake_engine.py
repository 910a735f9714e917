"""An engine that does what a test says: a real client (streams, refusals) over a scripted engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from engine.client.streaming import StreamingClient
from engine.control import AnyAction, AnyResult
from engine.errors import EngineError
from engine.kv_spec import KVGroupUsage
from engine.messages import (
    AbortRequests,
    AddRequest,
    Control,
    ControlAnswer,
    EngineFailed,
    FinishInfo,
    LoadProgress,
    ModelInfo,
    PositionLogprobs,
    RequestOutput,
    RequestRefused,
    RequestTimes,
    StepMessage,
    ToEngine,
)
from engine.stats import EngineStats, SpecObservation, StepStats

EOS = 2
MODEL_INFO = ModelInfo(
    model_name="tiny",
    architecture="Scripted",
    dtype="float32",
    device="cpu",
    vocab_size=320,
    max_model_len=512,
    eos_token_ids=(EOS,),
    num_parameters=1000,
    weight_bytes=4000,
    kv_bytes_per_token=64,
    kv_cache_bytes=16 * (24 * 100 + 40 * 60),
    num_blocks=100,
    kv_groups=(
        KVGroupUsage(name="full", window=None, bytes_per_token=24, num_blocks=100),
        KVGroupUsage(name="sliding", window=32, bytes_per_token=40, num_blocks=60),
    ),
    block_size=16,
    max_num_seqs=8,
    max_num_batched_tokens=256,
    max_steps_in_flight=1,
    startup_seconds={"load": 1.5},
)


class FakeEngine(StreamingClient):
    """Requests wait in `requests` until the test says what comes of them; with `echo`, they are answered.

    An echo emits the prompt's tokens, one a step, then ends with the end token (`stop`), or at max_tokens.
    """

    def __init__(
        self,
        *,
        echo: bool = False,
        info: ModelInfo = MODEL_INFO,
        max_waiting: int = 100,
        slow_reader_timeout: float = 60.0,
    ) -> None:
        super().__init__(max_waiting, slow_reader_timeout)
        self.requests: dict[str, AddRequest] = {}  # all that came, by engine id
        self.controls: dict[str, AnyAction] = {}  # all that came, by id
        self.aborted: list[str] = []  # in order; closing a stream early is an abort
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.start_error: EngineError | None = None
        self.is_stopped = False
        self._info = info
        self._echo = echo
        self.live: set[str] = set()
        self._changed = asyncio.Event()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until requests or aborts make it true."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def wait_for_request(self, engine_id: str) -> AddRequest:
        await self.wait_for(lambda: engine_id in self.requests)
        return self.requests[engine_id]

    # ---- what the engine says ------------------------------------------------------------------------------

    def step(
        self, *outputs: RequestOutput, stats: EngineStats | None = None, step: StepStats | None = None
    ) -> None:
        """One step message. Requests that finish in it are no longer live."""
        self.live.difference_update(output.request_id for output in outputs if output.finish is not None)
        self._receive(StepMessage(outputs=list(outputs), stats=stats or EngineStats(), step=step))

    def emit(
        self,
        engine_id: str,
        token_ids: Sequence[int] = (),
        *,
        finish: FinishInfo | None = None,
        logprobs: list[PositionLogprobs] | None = None,
        prompt_logprobs: list[PositionLogprobs | None] | None = None,
        spec: Sequence[SpecObservation] = (),
        times: RequestTimes | None = None,
        num_cached_tokens: int = 0,
        num_preemptions: int = 0,
    ) -> None:
        """One step with one output."""
        now = time.monotonic()
        arrival = self.requests[engine_id].arrival_time
        self.step(
            RequestOutput(
                request_id=engine_id,
                token_ids=list(token_ids),
                logprobs=logprobs,
                num_prompt_tokens=len(self.requests[engine_id].prompt_token_ids),
                num_cached_tokens=num_cached_tokens,
                prompt_logprobs=prompt_logprobs,
                finish=finish,
                spec=list(spec),
                num_preemptions=num_preemptions,
                times=times
                or RequestTimes(arrival=arrival, first_scheduled=now, first_token=now, last_token=now),
            )
        )

    def refuse(self, engine_id: str, error: EngineError) -> None:
        self.live.discard(engine_id)
        self._receive(RequestRefused.from_error(engine_id, error))

    def answer(self, outcome: AnyResult | EngineError) -> None:
        """To the control that came last."""
        control_id = list(self.controls)[-1]
        if isinstance(outcome, EngineError):
            self._receive(RequestRefused.from_error(control_id, outcome))
        else:
            self._receive(ControlAnswer(control_id, outcome))

    def die(self, message: str) -> None:
        self._receive(EngineFailed(error="internal", message=message))

    # ---- what the engine hears -----------------------------------------------------------------------------

    async def _launch(self) -> None:
        self._receive(LoadProgress(phase="load", fraction=0.5))
        await self.may_start.wait()
        if self.start_error is not None:
            raise self.start_error
        self._receive(self._info)

    def _send(self, message: ToEngine) -> None:
        match message:
            case AddRequest():
                self.requests[message.request_id] = message
                self.live.add(message.request_id)
                if self._echo:
                    asyncio.get_running_loop().call_soon(self._answer, message)
            case AbortRequests():
                self.aborted += message.request_ids
                for engine_id in message.request_ids:
                    if engine_id in self.live:
                        self.emit(engine_id, finish=FinishInfo(reason="cancelled"))
            case Control():
                self.controls[message.control_id] = message.action
        self._changed.set()

    async def _shut_down(self) -> None:
        self.is_stopped = True

    def _answer(self, request: AddRequest) -> None:
        ids = request.prompt_token_ids[: request.params.max_tokens]
        if len(ids) == request.params.max_tokens:
            *ids, last = ids
            finish = FinishInfo(reason="length")
        else:
            last, finish = EOS, FinishInfo(reason="stop", eos_token_id=EOS, drop_last_token_text=True)
        for token_id in ids:
            self.emit(request.request_id, [token_id])
        self.emit(request.request_id, [last], finish=finish)
