"""The engine core: one synchronous loop body around scheduler and executor.

It knows neither sockets nor gRPC (engine/loop.py and the clients do), neither torch nor draft methods.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.assembly import EngineParts, build_engine
from engine.config import EngineConfig
from engine.executor import StepHandle
from engine.messages import AbortRequests, AddRequest, LoadProgress, ModelInfo, StepMessage
from engine.params import validate_token_ids
from engine.stats import StepStats
from engine.step import StepOutput, StepPlan


@dataclass
class _InFlight:
    plan: StepPlan
    handle: StepHandle
    launched_at: float
    schedule_seconds: float
    host_draft_seconds: float


class EngineCore:
    """Requests in, step messages out. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        config: EngineConfig,
        on_progress: Callable[[LoadProgress], None] = lambda progress: None,
        *,
        build: Callable[[EngineConfig, Callable[[LoadProgress], None]], EngineParts] = build_engine,
    ) -> None:
        parts = build(config, on_progress)
        self.model_info: ModelInfo = parts.model_info
        self._scheduler = parts.scheduler
        self._executor = parts.executor
        self._check_invariants = config.scheduler.check_invariants
        self._in_flight: deque[_InFlight] = deque()
        self._last_collected_at = 0.0

    def handle(self, message: AddRequest | AbortRequests) -> StepMessage | None:
        """Take one message; returns what it brought at once.

        Raises InvalidRequestError or QueueFullError for a request that is refused; nothing was started then.
        """
        if isinstance(message, AddRequest):
            vocab_size = self.model_info.vocab_size
            validate_token_ids("prompt", message.prompt_token_ids, vocab_size)
            message.params.validate(vocab_size)
            self._scheduler.add(message)
            return None
        outputs = self._scheduler.abort(message.request_ids)
        return StepMessage(outputs=outputs, stats=self._scheduler.stats()) if outputs else None

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or self._scheduler.has_unfinished

    def step(self) -> StepMessage | None:
        """Launch what may be launched, then collect the oldest step; blocks for the length of a step at most."""
        self._launch()
        if not self._in_flight:
            assert not self._scheduler.has_unfinished, (
                "requests wait, nothing runs, and nothing can be scheduled"
            )
            return None
        current = self._in_flight.popleft()
        output = self._executor.collect(current.handle)
        now = time.monotonic()
        # With two steps in flight a step starts when the one before it ends.
        began_at = max(current.launched_at, self._last_collected_at)
        phases = output.phase_seconds
        phases["draft"] = phases.get("draft", 0.0) + current.host_draft_seconds
        self._scheduler.observe_step(
            current.plan, now - began_at + current.host_draft_seconds, phases["draft"]
        )
        self._last_collected_at = now
        outputs = self._scheduler.complete(current.plan, output)
        if self._check_invariants:
            self._scheduler.check_invariants()
        return StepMessage(
            outputs=outputs,
            stats=self._scheduler.stats(),
            step=self._step_stats(current.schedule_seconds, output, time.monotonic() - now),
        )

    def close(self) -> None:
        """Collect what is in flight, so that nothing runs on the device afterwards."""
        while self._in_flight:
            self._executor.collect(self._in_flight.popleft().handle)

    def _launch(self) -> None:
        while self._scheduler.can_launch:
            started_at = time.monotonic()
            self._scheduler.make_host_drafts()
            drafted_at = time.monotonic()
            plan = self._scheduler.schedule()
            if plan is None:
                return
            launched_at = time.monotonic()
            handle = self._executor.launch(plan)
            self._in_flight.append(
                _InFlight(plan, handle, launched_at, launched_at - drafted_at, drafted_at - started_at)
            )

    def _step_stats(self, schedule_seconds: float, output: StepOutput, output_seconds: float) -> StepStats:
        stats = self._scheduler.step_stats()
        phases = output.phase_seconds
        stats.phase_seconds = {"schedule": schedule_seconds, **phases, "output": output_seconds}
        stats.graph_kind, stats.num_padding_tokens = output.graph_kind, output.num_padding_tokens
        return stats
