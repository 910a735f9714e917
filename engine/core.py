"""The engine core: one synchronous loop body around scheduler and executor.

It knows neither sockets nor gRPC (engine/loop.py and the clients do), neither torch nor draft methods.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from engine.assembly import EngineParts, build_engine
from engine.config import EngineConfig
from engine.control import AnyAction, AnyResult
from engine.controller import Answer, EngineController
from engine.errors import EngineError
from engine.executor import StepHandle
from engine.messages import AbortRequests, AddRequest, LoadProgress, ModelInfo, RequestOutput, StepMessage
from engine.params import validate_token_ids
from engine.stats import StepStats
from engine.step import HostInputs, StepOutput, StepPlan

GRAMMAR_WAIT = 0.02  # seconds, until new messages are looked at


@dataclass
class _InFlight:
    plan: StepPlan
    handle: StepHandle
    launched_at: float
    schedule_seconds: float
    host_draft_seconds: float
    waits_for_host: bool  # its part B is not launched yet

    @property
    def is_unwritten(self) -> bool:
        """Would a step behind it read what it has yet to write, or, as it failed, never will?"""
        return self.waits_for_host or bool(self.handle.failure)


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
        self._draft_policy = parts.draft_policy
        self._controller = EngineController(parts.scheduler, parts.draft_policy, config.profile_directory)
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
            if message.constraint is not None:
                message.constraint.validate()
            self._scheduler.add(self._draft_policy.resolve(message))
            return None
        outputs = self._scheduler.abort(message.request_ids)
        return StepMessage(outputs=outputs, stats=self._scheduler.stats()) if outputs else None

    def control(self, action: AnyAction, answer: Answer) -> None:
        """Do what an administrator asks; `answer` may be called in a later step. Raises EngineError."""

        def done(result: AnyResult | EngineError) -> None:
            default = self._draft_policy.state().default_method
            if default != self.model_info.default_speculator:
                self.model_info = msgspec.structs.replace(self.model_info, default_speculator=default)
            answer(result)

        self._controller.handle(action, done)

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or self._scheduler.has_unfinished

    def step(self) -> StepMessage | None:
        """Launch what may be launched, then collect the oldest step; blocks for the length of a step at most."""
        outputs = self._scheduler.take_compiled()
        self._launch()
        if not self._in_flight:
            return self._idle_step(outputs)
        current = self._in_flight.popleft()
        output = self._executor.collect(current.handle)
        now = time.monotonic()
        # With two steps in flight a step starts when the one before it ends, unless its launch alone took longer.
        began_at = max(current.launched_at, self._last_collected_at)
        phases = output.phase_seconds
        launching = sum(seconds for phase, seconds in phases.items() if phase not in ("wait", "capture"))
        seconds = max(now - began_at, launching) + current.host_draft_seconds
        phases["draft"] = phases.get("draft", 0.0) + current.host_draft_seconds
        self._scheduler.observe_step(current.plan, seconds, phases["draft"])
        self._last_collected_at = now
        outputs += self._scheduler.complete(current.plan, output)
        self._provide()
        if self._check_invariants:
            self._scheduler.check_invariants()
        self._controller.step_ended()
        return StepMessage(
            outputs=outputs,
            stats=self._scheduler.stats(),
            step=self._step_stats(current.schedule_seconds, output, time.monotonic() - now),
        )

    def prepare(self) -> bool:
        """While there is no work: a piece of what later steps profit from. False: there is none."""
        return not self._in_flight and self._executor.prepare()

    def close(self) -> None:
        """Collect what is in flight, so that nothing runs on the device afterwards."""
        while self._in_flight:
            current = self._in_flight.popleft()
            if current.waits_for_host:
                self._executor.provide(current.handle, HostInputs())
            self._executor.collect(current.handle)
        self._controller.close()

    def _launch(self) -> None:
        while self._scheduler.can_launch and not (self._in_flight and self._in_flight[-1].is_unwritten):
            started_at = time.monotonic()
            self._scheduler.make_host_drafts()
            drafted_at = time.monotonic()
            plan = self._scheduler.schedule()
            if plan is None:
                return
            launched_at = time.monotonic()
            handle = self._executor.launch(plan)
            self._in_flight.append(
                _InFlight(
                    plan,
                    handle,
                    launched_at,
                    schedule_seconds=launched_at - drafted_at,
                    host_draft_seconds=drafted_at - started_at,
                    waits_for_host=plan.needs_host_inputs,
                )
            )
            self._provide()

    def _provide(self) -> None:
        """The oldest step in flight goes on: what it waits for follows from the steps before it."""
        if self._in_flight and self._in_flight[0].waits_for_host:
            current = self._in_flight[0]
            self._executor.provide(current.handle, self._scheduler.host_inputs())
            current.waits_for_host = False

    def _idle_step(self, outputs: list[RequestOutput]) -> StepMessage | None:
        """Nothing runs, and nothing can be scheduled: the requests that are left wait for their grammars."""
        if outputs:
            return StepMessage(outputs=outputs, stats=self._scheduler.stats())
        if self._scheduler.has_unfinished:
            self._scheduler.wait_for_grammar(GRAMMAR_WAIT)
        return None

    def _step_stats(self, schedule_seconds: float, output: StepOutput, output_seconds: float) -> StepStats:
        stats = self._scheduler.step_stats()
        phases = output.phase_seconds
        stats.phase_seconds = {"schedule": schedule_seconds, **phases, "output": output_seconds}
        stats.graph_kind, stats.num_padding_tokens = output.graph_kind, output.num_padding_tokens
        return stats
