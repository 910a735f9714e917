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
from dataclasses import dataclass

from engine.config import SchedulerConfig
from engine.draft_method import DraftMethod
from engine.errors import InvalidRequestError, QueueFullError, RequestIdInUseError
from engine.kv_spec import KVGroupSpec
from engine.messages import AddRequest, RequestOutput, RequestTimes
from engine.request import Request, RequestStatus, RunCutter
from engine.scheduler import results
from engine.scheduler.chunk_policy import ChunkPolicy
from engine.scheduler.draft_feeds import note_feed
from engine.scheduler.draft_policy import DraftPolicy
from engine.scheduler.host_drafts import HostDrafts
from engine.scheduler.kv_manager import KVManager
from engine.scheduler.row_pool import RowPool
from engine.scheduler.running_set import RunningSet
from engine.scheduler.step_planner import StepPlanner
from engine.scheduler.waiting_queue import WaitingQueue
from engine.stats import EngineStats, StepStats
from engine.step import RowResult, ScheduledRequest, StepOutput, StepPlan

RETRY_AFTER = 1.0  # seconds; a hint for clients of a full queue


@dataclass(slots=True)
class _InFlightStep:
    plan: StepPlan
    requests: list[Request]  # in plan order
    no_drafts_reasons: list[str]
    num_preempted: int  # to make room for it


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
        make_cutter: Callable[[AddRequest], RunCutter],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_waiting = config.max_waiting
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._max_steps_in_flight = max_steps_in_flight
        self._draft_policy = draft_policy
        self._host_drafts = host_drafts
        self._make_cutter = make_cutter
        self._clock = clock
        self._kv = KVManager(groups, num_blocks, block_size, enable_prefix_cache=enable_prefix_cache)
        self._target_groups = tuple(index for index, group in enumerate(groups) if not group.is_drafter)
        self._waiting = WaitingQueue()
        self._running = RunningSet(self._kv, RowPool(config.max_num_seqs))
        self._chunk_policy = ChunkPolicy(config.max_prefill_stall)
        self._planner = StepPlanner(
            config, self._waiting, self._running, draft_policy, self._chunk_policy, host_drafts, max_drafts
        )
        self._requests: dict[str, Request] = {}  # live ones
        self._in_flight: deque[_InFlightStep] = deque()
        self._num_added = 0
        self._num_preemptions_seen = 0  # up to the step scheduled last
        self._completed = StepStats()

    # ---- requests ------------------------------------------------------------------------------------------

    def add(self, message: AddRequest) -> None:
        """Queue a request. Raises InvalidRequestError or QueueFullError; nothing was started then."""
        self._check_fits(message)
        self._draft_policy.validate(message)
        if len(self._waiting) >= self._max_waiting:
            raise QueueFullError(
                f"{len(self._waiting)} requests wait, the limit is {self._max_waiting}", RETRY_AFTER
            )
        params = message.params
        eos_token_ids = () if params.ignore_eos else self._eos_token_ids
        draft_method = self._draft_policy.method_of(message)
        request = Request(
            request_id=message.request_id,
            message=message,
            cutter=self._make_cutter(message),
            order=(message.priority, self._num_added),
            token_limit=self._token_limit(message),
            stop_ids=tuple(dict.fromkeys((*eos_token_ids, *params.stop_token_ids))),
            token_ids=list(message.prompt_token_ids),
            times=RequestTimes(arrival=message.arrival_time or self._clock()),
            draft_method=draft_method,
            kv_groups=self._groups_of(draft_method),
            draft_kv_groups=_draft_groups_of(draft_method),
        )
        self._num_added += 1
        self._requests[message.request_id] = request
        self._waiting.push(request)

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
        self._host_drafts.make(self._running)

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
        self._in_flight.append(
            _InFlightStep(plan, builder.requests, builder.no_drafts_reasons, num_preempted)
        )
        if builder.new_rows:
            self._stamp_first_scheduled(builder.requests)
        return plan

    def complete(self, plan: StepPlan, output: StepOutput) -> list[RequestOutput]:
        """Take in the results of the oldest step in flight."""
        current = self._in_flight.popleft()
        step = current.plan.step
        assert step == plan.step == output.step, f"got step {plan.step} / {output.step}, expected {step}"
        self._running.release(step)
        now = self._clock()
        outputs = []
        reasons: Counter[str] = Counter()
        for request, entry, result, reason in zip(
            current.requests, plan.scheduled, output.rows, current.no_drafts_reasons, strict=True
        ):
            request.num_in_flight_tokens -= entry.num_tokens
            request.num_in_flight_steps -= 1
            request.num_in_flight_samples -= entry.samples
            if request.status is RequestStatus.FINISHED:
                continue
            if not entry.is_prefill:
                self._draft_policy.observe_result(request, result)
                if result.num_drafted == 0:
                    reasons[reason or results.why_nothing_came(request)] += 1
            self._note_drafts(request, entry, result)
            request_output = self._take_result(request, entry, result, now)
            if request_output is not None:
                outputs.append(request_output)
        self._completed = StepStats(
            step=step,
            num_scheduled_tokens=plan.num_scheduled_tokens,
            num_decode_requests=sum(not entry.is_prefill for entry in plan.scheduled),
            num_preempted=current.num_preempted,
            num_not_overlapped=self._num_not_overlapped(plan),
            not_drafted=dict(reasons),
        )
        return outputs

    def observe_step(self, plan: StepPlan, seconds: float, draft_seconds: float = 0.0) -> None:
        """The step took so long, by the wall clock, `draft_seconds` of it for the drafts of the next one."""
        self._draft_policy.observe_step(plan, seconds, draft_seconds)
        num_prefill_tokens = sum(entry.num_tokens for entry in plan.scheduled if entry.is_prefill)
        self._chunk_policy.observe(num_prefill_tokens, seconds)

    # ---- figures -------------------------------------------------------------------------------------------

    def step_stats(self) -> StepStats:
        """Of the step completed last, without times."""
        return self._completed

    def stats(self) -> EngineStats:
        num_used, num_cached, num_blocks = self._kv.occupancy()
        num_prefilling = sum(max(request.num_prefill_tokens_left, 0) for request in self._running)
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_waiting_tokens=self._waiting.num_tokens + num_prefilling,
            num_blocks=num_blocks,
            num_free_blocks=num_blocks - num_cached - num_used,
            num_cached_blocks=num_cached,
            num_preemptions_total=self._planner.num_preemptions,
        )

    def check_invariants(self) -> None:
        """Raise AssertionError when the books do not agree. For tests and debugging: it reads everything."""
        self._running.check_integrity()
        self._waiting.check_integrity()
        assert len(self._requests) == len(self._waiting) + len(self._running), "a live request is nowhere"
        for request in self._running:
            request.check_integrity()
            num_slots = self._kv.num_slots(request)
            bound = min(request.max_num_computed_tokens, request.token_limit)
            assert bound <= num_slots, f"{request.request_id}: {bound} tokens, {num_slots} slots"

    # ---- inside --------------------------------------------------------------------------------------------

    def _token_limit(self, message: AddRequest) -> int:
        return min(len(message.prompt_token_ids) + message.params.max_tokens, self._max_model_len)

    def _groups_of(self, draft_method: DraftMethod | None) -> tuple[int, ...]:
        """The target's groups, and those of a drafter that keeps up."""
        if draft_method is None or not draft_method.keeps_up:
            return self._target_groups
        return (*self._target_groups, *draft_method.kv_groups)

    def _check_fits(self, message: AddRequest) -> None:
        """Raise InvalidRequestError for a request that could never run to its end."""
        num_prompt_tokens = len(message.prompt_token_ids)
        if message.request_id in self._requests:
            raise RequestIdInUseError(message.request_id)
        if num_prompt_tokens == 0:
            raise InvalidRequestError("prompt", "got no tokens, expected at least one")
        if num_prompt_tokens >= self._max_model_len:
            raise InvalidRequestError(
                "prompt",
                f"got {num_prompt_tokens} tokens, expected at most {self._max_model_len - 1}: "
                f"prompt and output together fit {self._max_model_len}",
            )
        capacity = self._kv.longest_request(self._max_model_len)
        if num_prompt_tokens >= capacity:
            raise InvalidRequestError(
                "prompt",
                f"got {num_prompt_tokens} tokens, expected at most {capacity - 1}: the whole KV cache",
            )
        if self._token_limit(message) > capacity:
            raise InvalidRequestError(
                "max_tokens",
                f"got {message.params.max_tokens}, expected at most {capacity - num_prompt_tokens}: with "
                f"{num_prompt_tokens} prompt tokens more does not fit the KV cache of {capacity} tokens",
            )

    def _stamp_first_scheduled(self, requests: list[Request]) -> None:
        now = self._clock()
        for request in requests:
            if request.times.first_scheduled == 0.0:
                request.times = RequestTimes(arrival=request.times.arrival, first_scheduled=now)

    def _note_drafts(self, request: Request, entry: ScheduledRequest, result: RowResult) -> None:
        """What the step left in the row for the next one."""
        if request.status is not RequestStatus.RUNNING:
            return
        if not entry.samples or self._host_drafts.makes(entry.method):
            request.num_known_drafts = None
            return
        request.num_known_drafts = result.num_next_drafts if entry.num_next_drafts else None
        request.has_drafter_failed = result.drafter_error or result.nan_draft

    def _num_not_overlapped(self, plan: StepPlan) -> int:
        """Requests that are in no other step before this one is collected, because of host drafts."""
        if self._max_steps_in_flight == 1:
            return 0
        return sum(
            self._host_drafts.makes(entry.method) for entry in plan.scheduled if entry.num_next_drafts > 0
        )

    def _take_result(
        self, request: Request, entry: ScheduledRequest, result: RowResult, now: float
    ) -> RequestOutput | None:
        if result.nan_target:
            self._end(request, keep_findable=False)
            return results.error_output(request)
        # A request that was preempted since has lost its KV; its tokens count all the same.
        is_running = request.status is RequestStatus.RUNNING
        start = request.num_computed_tokens
        if is_running:
            request.num_computed_tokens += entry.num_tokens if entry.is_prefill else len(result.token_ids)
        output = (
            self._take_run(request, entry, result, now)
            if entry.samples
            else results.chunk_output(request, result)
        )
        if is_running:
            # Of the last confirmed token no KV is needed, and behind a cut none is confirmed.
            num_confirmed = min(request.num_computed_tokens, len(request.token_ids) - 1)
            note_feed(request, entry, result, start, num_confirmed)
            self._kv.commit(request, num_confirmed, self._running.newest_step)
        if output is not None and output.finish is not None:
            self._end(request)
        return output

    def _take_run(
        self, request: Request, entry: ScheduledRequest, result: RowResult, now: float
    ) -> RequestOutput:
        assert result.token_ids, f"{request.request_id}: a step that samples brought no token"
        cut = request.cutter.cut(result.token_ids)
        kept = result.token_ids[: cut.num_kept]
        if request.status is RequestStatus.WAITING:
            self._waiting.append_tokens(request, kept)
        else:
            request.token_ids += kept
        return results.run_output(request, entry, result, cut, now)

    def _end(self, request: Request, *, keep_findable: bool = True) -> None:
        """Give up whatever the request holds; results in flight will be dropped."""
        del self._requests[request.request_id]
        self._draft_policy.forget(request)
        self._host_drafts.finish(request)
        if request.status is RequestStatus.WAITING:
            self._waiting.remove(request)
            request.status = RequestStatus.FINISHED
        else:
            self._running.remove(request, RequestStatus.FINISHED, keep_findable=keep_findable)


def _draft_groups_of(draft_method: DraftMethod | None) -> tuple[int, ...]:
    """Those of a drafter that catches up."""
    return () if draft_method is None or not draft_method.catches_up else draft_method.kv_groups
