"""Fills one step: decodes first, then prefill chunks, then new admissions, within the token budget and the
blocks.

Order everywhere is that of engine/scheduler/fair_order.py. Nobody starves: within a priority the head of the queue is
never overtaken, decodes that did not fit go first in the next step, and prefill work has a share of every step. Where a
prefill gets its blocks chunk by chunk (windows), the first one in order always gets one more: it may preempt those
behind it, like a decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from engine.config import SchedulerConfig
from engine.request import RUNNING, WAITING, Request
from engine.scheduler import not_drafted
from engine.scheduler.chunk_policy import MIN_CHUNK, ChunkPolicy
from engine.scheduler.draft_orders import DraftOrders
from engine.scheduler.host_drafts import HostDrafts
from engine.scheduler.plan_builder import PlanBuilder
from engine.scheduler.running_set import RunningSet
from engine.scheduler.waiting_queue import WaitingQueue

_NO_ROOM = -1
WATERMARK = 0.01  # share of the blocks that an admission leaves to the growth of running requests


class StepPlanner:
    """Moves requests between the waiting queue and the running set; nobody else admits or preempts."""

    def __init__(
        self,
        config: SchedulerConfig,
        waiting: WaitingQueue,
        running: RunningSet,
        draft_orders: DraftOrders,
        chunk_policy: ChunkPolicy,
        host_drafts: HostDrafts,
    ) -> None:
        self._budget = config.max_num_batched_tokens
        self._max_chunk = config.max_prefill_chunk or config.max_num_batched_tokens
        self._waiting = waiting
        self._running = running
        self._kv = running.kv
        self._draft_orders = draft_orders
        self._chunk_policy = chunk_policy
        self._host_drafts = host_drafts
        self._num_decoding = 0
        self._watermark = [max(1, int(WATERMARK * count)) for count in self._kv.num_blocks]
        self._last_served = (0, 0, -1)  # order of the last decode served when not all fitted
        self.num_preemptions = 0

    def plan(self, step: int) -> PlanBuilder:
        """The step, possibly empty. Counters of the requests in it include it already."""
        builder = PlanBuilder(step, self._budget)
        self._draft_orders.begin_step()
        self._preempt_for_priority()
        prefills = self._running.prefills()
        # Before decodes take blocks, so that it goes on whatever happens: room for the next token of the first one.
        # False: it waits for blocks, and nobody is admitted.
        has_room = not prefills or self._grow_by_preemption(prefills[0])
        has_room &= self._add_decodes(builder, has_prefills=bool(prefills))
        # Some of them may have been preempted meanwhile.
        prefills = [request for request in prefills if request.status is RUNNING]
        self._add_prefills(builder, prefills, may_admit=has_room)
        if builder.scheduled:
            builder.block_table_updates = self._kv.take_updates(builder.requests)
        return builder

    # ---- decodes -------------------------------------------------------------------------------------------

    def _add_decodes(self, builder: PlanBuilder, *, has_prefills: bool) -> bool:
        """False when a request could not grow: nobody is admitted then, so that it gets the next blocks."""
        decodes = [request for request in self._running if request.can_decode]
        self._num_decoding = len(decodes)
        if self._host_drafts.has_methods:
            decodes = [request for request in decodes if not self._waits_for_host_drafts(request)]
        budget = self._budget - self._prefill_share(has_prefills)
        has_room = True
        for _ in range(-(-len(decodes) // budget)):
            has_room = self._add_turn(builder, self._next_turn(decodes, budget), budget)
            if builder.scheduled:  # else all of this turn wait for blocks that others hold
                break
        return has_room

    def _prefill_share(self, has_prefills: bool) -> int:
        """Tokens of the budget that decodes leave to prefills."""
        can_admit = len(self._waiting) > 0 and self._running.rows.num_free > 0
        return min(MIN_CHUNK, self._budget // 2) if has_prefills or can_admit else 0

    def _next_turn(self, decodes: list[Request], max_count: int) -> list[Request]:
        """All of them, or, round robin, as many as fit, in running order."""
        if len(decodes) <= max_count:
            return decodes
        turn = [request for request in decodes if request.order > self._last_served]
        turn = (turn + decodes)[:max_count]
        self._last_served = turn[-1].order
        return sorted(turn, key=lambda request: request.order)

    def _add_turn(self, builder: PlanBuilder, decodes: list[Request], budget: int) -> bool:
        """In running order, but first those that may need blocks: whoever is preempted is not in the plan yet. False:
        one could not grow.
        """
        num_spare_tokens = budget - len(decodes)  # for drafts
        has_room = True
        repeated: list[Request] = []
        for request in decodes:
            if request.can_repeat:
                repeated.append(request)
                continue
            if request.status is not RUNNING:  # preempted for one before it
                continue
            num_drafts = self._add_decode(builder, request, num_spare_tokens)
            if num_drafts == _NO_ROOM:
                has_room = False
            else:
                num_spare_tokens -= num_drafts
        builder.repeat([request for request in repeated if request.status is RUNNING])
        return has_room

    def _add_decode(self, builder: PlanBuilder, request: Request, num_spare_tokens: int) -> int:
        """Returns how many drafts it verifies; _NO_ROOM when it has to wait for blocks."""
        num_offered = self._num_offered_drafts(request)
        num_drafts = num_offered
        if num_offered > 0:
            num_drafts = min(num_offered, request.num_usable_drafts, num_spare_tokens)
        num_slots = self._kv.num_slots(request)
        if _num_slots_needed(request, num_drafts) > num_slots:
            num_drafts = self._grow(request, num_drafts)
            num_slots = self._kv.num_slots(request)
        if num_drafts == _NO_ROOM:
            return _NO_ROOM
        reason = not_drafted.LIMIT if num_drafts < num_offered else request.no_drafts_reason
        order = self._draft_orders.place(request, 1 + num_drafts, self._num_decoding)
        builder.add_decode(
            request,
            num_drafts,
            order,
            num_slots=num_slots,
            no_drafts_reason="" if num_drafts else reason,
        )
        return num_drafts

    def _waits_for_host_drafts(self, request: Request) -> bool:
        is_waiting = request.num_next_drafts > 0 and request.is_in_flight
        return is_waiting and self._host_drafts.makes(request.next_method)

    def _num_offered_drafts(self, request: Request) -> int:
        """Verification rows worth planning: as many as there are drafts, where that is known. While a step is in
        flight it is not; after a step without drafts they are not expected, but asked for again.
        """
        num_asked, num_known = request.num_next_drafts, request.num_known_drafts
        if num_asked == 0:
            return 0
        if self._host_drafts.makes(request.next_method):
            return len(request.host_drafts)
        if num_known is None or (num_known > 0 and request.is_in_flight):
            return num_asked
        return min(num_asked, num_known)

    def _grow(self, request: Request, num_drafts: int) -> int:
        """Slots for the next token and its drafts. Returns how many drafts may stay; _NO_ROOM when the request has
        to wait for blocks. For the token those served after it are preempted, for drafts nobody.
        """
        num_slots = _num_slots_needed(request, num_drafts)
        if self._kv.try_grow(request, num_slots):
            return num_drafts
        num_fitting = self._kv.num_slots(request) - request.max_num_computed_tokens - 1
        if num_fitting >= 0:
            return min(num_drafts, num_fitting)
        return 0 if self._grow_by_preemption(request) else _NO_ROOM

    def _grow_by_preemption(self, request: Request) -> bool:
        """A slot for the next token, at the cost of those served after the request. False: it has to wait. It never
        gives up its own blocks: whoever is served before it will take them.
        """
        num_slots = request.max_num_computed_tokens + 1
        while max(shortage := self._kv.growth_shortage(request, num_slots)) > 0:
            if _covers(self._kv.num_fenced_blocks(), shortage) or self._running.last() is request:
                return False
            self._preempt(self._running.last())
        self._kv.grow(request, num_slots)
        return True

    # ---- prefills ------------------------------------------------------------------------------------------

    def _add_prefills(self, builder: PlanBuilder, prefills: list[Request], *, may_admit: bool) -> None:
        allowance = builder.budget
        if builder.scheduled:
            allowance = self._chunk_policy.max_prefill_tokens(allowance)
        for request in prefills:
            if may_admit:
                allowance = self._admit(builder, allowance, before_priority=request.priority)
            allowance = self._add_chunk(builder, request, allowance)
        if may_admit:
            self._admit(builder, allowance)

    def _add_chunk(self, builder: PlanBuilder, request: Request, allowance: int) -> int:
        """Returns what is left of the allowance."""
        num_tokens = self._chunk_size(builder, request.num_prefill_tokens_left, allowance)
        if num_tokens == 0:
            return 0
        num_tokens = self._grow_for_chunk(request, num_tokens)
        if num_tokens == 0:
            return allowance
        order = self._draft_orders.place(request, num_tokens, self._num_decoding)
        builder.add_chunk(request, num_tokens, order)
        return allowance - num_tokens

    def _grow_for_chunk(self, request: Request, num_tokens: int) -> int:
        """Slots for the next chunk, as far as blocks are available. Returns how many of its tokens fit."""
        num_computed = request.max_num_computed_tokens
        num_slots = min(num_computed + num_tokens + request.num_lookahead_slots, request.token_limit)
        num_slots = min(num_slots, self._kv.max_slots(request, self._reserve(request)))
        self._kv.grow(request, num_slots)
        return min(num_tokens, self._kv.num_slots(request) - num_computed)

    def _reserve(self, request: Request) -> list[int]:
        """Per group: available blocks that a prefill leaves to the growth of other running requests."""
        is_alone = all(other is request for other in self._running)
        return [0] * len(self._watermark) if is_alone else self._watermark

    def _chunk_size(self, builder: PlanBuilder, num_tokens_left: int, allowance: int) -> int:
        """0: what is left is not worth a chunk. The first chunk of a step takes what there is."""
        wanted = min(num_tokens_left, self._max_chunk)
        if allowance < min(wanted, MIN_CHUNK) and builder.has_chunks:
            return 0
        return min(wanted, allowance)

    def _admit(self, builder: PlanBuilder, allowance: int, *, before_priority: int | None = None) -> int:
        """Admit heads of the queue (of higher priority than `before_priority`) while they fit, each with its
        first chunk. Returns what is left of the allowance.
        """
        while allowance > 0 and self._running.rows.num_free > 0:
            head = self._waiting.head()
            # A preempted request resumes only when its steps in flight are collected: its last token is known
            # then.
            if head is None or head.is_in_flight:
                break
            if before_priority is not None and head.priority >= before_priority:
                break
            num_hit_blocks = self._kv.find_hit(head)
            num_tokens_left = len(head.token_ids) - num_hit_blocks * self._kv.block_size
            if self._chunk_size(builder, num_tokens_left, allowance) == 0:
                break
            if max(self._kv.start_shortage(head, num_hit_blocks, self._reserve(head))) > 0:
                break
            self._waiting.remove(head)
            self._running.admit(head, num_hit_blocks)
            if head.num_preemptions == 0:
                head.num_cached_tokens = head.num_computed_tokens
            builder.add_row(head)
            allowance = self._add_chunk(builder, head, allowance)
            assert builder.requests[-1] is head, f"{head.request_id}: admitted without room for a token"
        return allowance

    # ---- preemption ----------------------------------------------------------------------------------------

    def _preempt_for_priority(self) -> None:
        """Make the room that the head of the queue lacks by preempting requests of strictly lower priority,
        from the last on; nobody is preempted when even that would not be enough, or need not be.
        """
        head = self._waiting.head()
        if head is None or head.is_in_flight:
            return
        lower = list(takewhile(lambda request: request.priority > head.priority, reversed(self._running)))
        if not lower:
            return
        rows = self._running.rows
        num_rows_short = 1 - rows.num_free - rows.num_fenced
        room = self._kv.room_to_make(head)
        if not room.could_be_enough(lower):
            return
        victims: list[Request] = []

        def is_enough() -> bool:
            is_alone = len(victims) == len(self._running)
            reserve = [0] * len(self._watermark) if is_alone else self._watermark
            return len(victims) >= num_rows_short and room.is_enough(reserve)

        for candidate in lower:
            if is_enough():
                break
            victims.append(candidate)
            room.add_victim(candidate)
        if not is_enough():
            return
        # The last one was needed; of the others, those served first are spared first.
        for victim in reversed(victims[:-1]):
            victims.remove(victim)
            room.remove_victim(victim)
            if not is_enough():
                victims.append(victim)
                room.add_victim(victim)
        for victim in victims:
            self._preempt(victim)

    def _preempt(self, victim: Request) -> None:
        """Back to waiting; it resumes as a prefill over prompt and output. Results in flight still count."""
        self._running.remove(victim, WAITING)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.push(victim)


def _num_slots_needed(request: Request, num_drafts: int) -> int:
    """If all that is in flight is accepted, with what the drafter writes then. Behind the token limit nothing
    is stored.
    """
    num_slots = request.max_num_computed_tokens + 1 + num_drafts + request.num_lookahead_slots
    return min(num_slots, request.token_limit)


def _covers(supply: Sequence[int], demand: Sequence[int]) -> bool:
    return all(have >= need for have, need in zip(supply, demand, strict=True))
