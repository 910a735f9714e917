"""The scheduler's face to the core: requests in, step plans out, step results in, request outputs out.
Torch-free.

Three counts are kept apart. Room for KV uses the upper bound of what is in flight; hashes, frees and outputs
use confirmed tokens; whether a request can still use a step or a draft is judged by the lower bound. It knows
no text and no stop rule: the request's cutter says where it ends.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from engine.config import SchedulerConfig
from engine.control import SchedulerState
from engine.draft_method import DraftMethod
from engine.errors import QueueFullError, RequestIdInUseError
from engine.kv_spec import KVGroupSpec
from engine.messages import AddRequest, RequestOutput, RequestTimes
from engine.request import FINISHED, WAITING, Request, RunCutter
from engine.scheduler import results
from engine.scheduler.chunk_policy import ChunkPolicy
from engine.scheduler.draft_orders import DraftOrders
from engine.scheduler.draft_policy import DraftPolicy
from engine.scheduler.dump import dump
from engine.scheduler.fair_order import FairOrder
from engine.scheduler.grammars import Grammars
from engine.scheduler.host_drafts import HostDrafts
from engine.scheduler.intake import LaunchedStep, ResultIntake
from engine.scheduler.kv_manager import KVManager
from engine.scheduler.replays import Replays
from engine.scheduler.request_limits import RequestLimits
from engine.scheduler.row_pool import RowPool
from engine.scheduler.running_set import RunningSet
from engine.scheduler.step_planner import StepPlanner
from engine.scheduler.waiting_queue import WaitingQueue
from engine.stats import EngineStats, StepStats
from engine.step import HostInputs, StepOutput, StepPlan

RETRY_AFTER = 1.0  # seconds; a hint for clients of a full queue


class Scheduler:
    """One per engine. Steps are completed in the order in which they were scheduled."""

    def __init__(
        self,
        *,
        config: SchedulerConfig,
        block_size: int,
        num_blocks: Sequence[int],  # by group
        groups: Sequence[KVGroupSpec],
        enable_prefix_cache: bool,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        max_drafts: int,
        max_steps_in_flight: int,
        draft_policy: DraftPolicy,
        host_drafts: HostDrafts,
        grammars: Grammars,
        replays: Replays,
        make_cutter: Callable[[AddRequest], RunCutter],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_waiting = config.max_waiting
        self._eos_token_ids = eos_token_ids
        self._max_steps_in_flight = max_steps_in_flight
        self._draft_policy = draft_policy
        self._host_drafts = host_drafts
        self._grammars = grammars
        self._replays = replays
        self._make_cutter = make_cutter
        self._clock = clock
        self._kv = KVManager(groups, num_blocks, block_size, enable_prefix_cache=enable_prefix_cache)
        self._limits = RequestLimits(self._kv, max_model_len)
        self._order = FairOrder()
        self._target_groups = tuple(index for index, group in enumerate(groups) if not group.is_drafter)
        self._waiting = WaitingQueue()
        self._running = RunningSet(self._kv, RowPool(config.max_num_seqs))
        self._chunk_policy = ChunkPolicy(config.max_prefill_stall)
        draft_orders = DraftOrders(
            self._kv,
            draft_policy,
            max_drafts=max_drafts,
            max_chunk=config.max_prefill_chunk or config.max_num_batched_tokens,
            budget=config.max_num_batched_tokens,
        )
        self._planner = StepPlanner(
            config, self._waiting, self._running, draft_orders, self._chunk_policy, host_drafts
        )
        self._intake = ResultIntake(self._waiting, self._running, draft_policy, host_drafts, grammars)
        self._requests: dict[str, Request] = {}  # live ones
        self._in_flight: deque[LaunchedStep] = deque()
        self._num_preemptions_seen = 0  # up to the step scheduled last
        self._completed = StepStats()

    # ---- requests ------------------------------------------------------------------------------------------

    def add(self, message: AddRequest) -> None:
        """Queue a request. Raises InvalidRequestError or QueueFullError; nothing was started then."""
        if message.request_id in self._requests:
            raise RequestIdInUseError(message.request_id)
        self._limits.check(message)
        self._draft_policy.validate(message)
        num_waiting = len(self._waiting) + len(self._grammars)
        if num_waiting >= self._max_waiting:
            raise QueueFullError(
                f"{num_waiting} requests wait, the limit is {self._max_waiting}", RETRY_AFTER
            )
        params, constraint = message.params, message.constraint
        compiled = None if constraint is None else self._grammars.compile(constraint)
        eos_token_ids = () if params.ignore_eos else self._eos_token_ids
        draft_method = self._draft_policy.method_of(message)
        request = Request(
            request_id=message.request_id,
            message=message,
            cutter=self._make_cutter(message),
            order=self._order.place(message),
            token_limit=self._limits.token_limit(message),
            stop_ids=tuple(dict.fromkeys((*eos_token_ids, *params.stop_token_ids))),
            token_ids=list(message.prompt_token_ids),
            times=RequestTimes(arrival=message.arrival_time or self._clock()),
            draft_method=draft_method,
            kv_groups=self._groups_of(draft_method),
            draft_kv_groups=draft_method.kv_groups if draft_method and draft_method.catches_up else (),
        )
        if compiled is None:
            self._waiting.push(request)
        else:
            self._grammars.hold(request, compiled)
        self._requests[message.request_id] = request
        self._replays.follow(request, self._draft_policy.replayed(request))

    def take_compiled(self) -> list[RequestOutput]:
        """Let requests be scheduled whose grammar is there by now. Returns the ends of those whose grammar is none."""
        ready, failed = self._grammars.take()
        for request in ready:
            self._waiting.push(request)
        for request, _ in failed:
            self._end(request)
        return [results.refused_output(request, error) for request, error in failed]

    def wait_for_grammar(self, seconds: float) -> None:
        """While there is nothing to schedule: until something may be, at most so long."""
        self._grammars.wait(seconds)

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End these requests as cancelled; ids that are not live are ignored."""
        outputs = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._end(request)
                outputs.append(results.cancelled_output(request))
        return outputs

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    # ---- steps ---------------------------------------------------------------------------------------------

    @property
    def can_launch(self) -> bool:
        """May one more step be in flight?"""
        return len(self._in_flight) < self._max_steps_in_flight

    def make_host_drafts(self) -> None:
        """Before `schedule`: draft for the requests whose method runs on the host. Without it they go on without
        drafts.
        """
        self._host_drafts.make(self._running, self._grammars)

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can be launched before a step in flight is completed."""
        if not self.can_launch:
            return None
        builder = self._planner.plan(self._running.newest_step + 1)
        if not builder.scheduled:
            return None
        self._running.newest_step = builder.step
        plan = builder.build()
        num_preempted = self._planner.num_preemptions - self._num_preemptions_seen
        self._num_preemptions_seen = self._planner.num_preemptions
        self._in_flight.append(LaunchedStep(plan, builder.requests, builder.no_drafts_reasons, num_preempted))
        if builder.new_rows:
            self._stamp_first_scheduled(builder.requests)
        return plan

    def host_inputs(self) -> HostInputs:
        """For the oldest step in flight, which waits for them."""
        oldest = self._in_flight[0]
        return self._grammars.host_inputs(oldest.plan, oldest.requests)

    def complete(self, plan: StepPlan, output: StepOutput) -> list[RequestOutput]:
        """Take in the results of the oldest step in flight."""
        current = self._in_flight.popleft()
        step = current.plan.step
        assert step == plan.step == output.step, f"got step {plan.step} / {output.step}, expected {step}"
        self._running.release(step)
        intake = self._intake.take(current, output, self._clock())
        for request in intake.ended:
            self._end(request)
        for request in intake.failed:
            self._end(request, keep_findable=False)
        for request, replay in self._replays.run(current.requests):
            self._draft_policy.observe_replay(request, replay)
        num_waited_for = self._host_drafts.num_waited_for(plan)
        self._completed = StepStats(
            step=step,
            num_scheduled_tokens=plan.num_scheduled_tokens,
            num_decode_requests=len(plan.scheduled) - len(plan.chunks),
            num_preempted=current.num_preempted,
            num_not_overlapped=num_waited_for if self._max_steps_in_flight > 1 else 0,
            not_drafted=dict(Counter(intake.not_drafted)),
        )
        return intake.outputs

    def observe_step(self, plan: StepPlan, seconds: float, draft_seconds: float = 0.0) -> None:
        """The step took so long, by the wall clock, `draft_seconds` of it for the drafts of the next one."""
        self._draft_policy.observe_step(plan, seconds, draft_seconds)
        self._replays.grant(seconds)
        num_prefill_tokens = sum(entry.num_tokens for entry in plan.chunks)
        self._chunk_policy.observe(num_prefill_tokens, seconds)

    # ---- figures -------------------------------------------------------------------------------------------

    def step_stats(self) -> StepStats:
        """Of the step completed last, without times."""
        return self._completed

    def stats(self) -> EngineStats:
        num_used, num_cached, num_blocks = self._kv.occupancy()
        num_left = sum([request.num_prefill_tokens_left for request in self._running.prefills()])
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting) + len(self._grammars),
            num_waiting_tokens=self._waiting.num_tokens + num_left,
            num_blocks=num_blocks,
            num_free_blocks=num_blocks - num_cached - num_used,
            num_cached_blocks=num_cached,
            num_preemptions_total=self._planner.num_preemptions,
        )

    def dump(self) -> SchedulerState:
        """For an administrator: every live request."""
        return dump(
            self._requests.values(),
            self.stats(),
            num_steps_in_flight=len(self._in_flight),
            now=self._clock(),
        )

    def check_invariants(self) -> None:
        """Raise AssertionError when the books do not agree. For tests and debugging: it reads everything."""
        self._running.check_integrity()
        self._waiting.check_integrity()
        num_placed = len(self._waiting) + len(self._grammars) + len(self._running)
        assert len(self._requests) == num_placed, "a live request is nowhere"
        for request in self._running:
            request.check_integrity()
            num_slots = self._kv.num_slots(request)
            bound = min(request.max_num_computed_tokens, request.token_limit)
            assert bound <= num_slots, f"{request.request_id}: {bound} tokens, {num_slots} slots"

    # ---- inside --------------------------------------------------------------------------------------------

    def _groups_of(self, draft_method: DraftMethod | None) -> tuple[int, ...]:
        """The target's groups, and those of a drafter that keeps up."""
        if draft_method is None or not draft_method.keeps_up:
            return self._target_groups
        return (*self._target_groups, *draft_method.kv_groups)

    def _stamp_first_scheduled(self, requests: list[Request]) -> None:
        now = self._clock()
        for request in requests:
            self._order.started(request)
            if request.times.first_scheduled == 0.0:
                request.times = RequestTimes(arrival=request.times.arrival, first_scheduled=now)

    def _end(self, request: Request, *, keep_findable: bool = True) -> None:
        """Give up whatever the request holds; results in flight will be dropped."""
        del self._requests[request.request_id]
        self._order.ended(request)
        self._draft_policy.forget(request)
        self._replays.forget(request)
        self._host_drafts.finish(request)
        has_place = not self._grammars.forget(request)
        if request.status is WAITING:
            if has_place:
                self._waiting.remove(request)
            request.status = FINISHED
        else:
            self._running.remove(request, FINISHED, keep_findable=keep_findable)
