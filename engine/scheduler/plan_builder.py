"""A step plan while it is put together: entries in plan order, and how much of the budget is left."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.request import Request
from engine.scheduler.draft_orders import NOTHING, DraftOrder
from engine.scheduler.draft_policy import NO_DRAFTS
from engine.step import BlockTableUpdate, NewRow, ScheduledRequest, StepPlan


@dataclass
class PlanBuilder:
    """Decodes must be added before chunks."""

    step: int
    budget: int  # tokens; a decode counts 1 + its drafts
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)  # of `scheduled`, in order
    no_drafts_reasons: list[str] = field(default_factory=list)  # of `scheduled`; "" where drafts are expected
    host_drafts: dict[int, list[int]] = field(default_factory=dict)
    new_rows: list[NewRow] = field(default_factory=list)
    block_table_updates: list[BlockTableUpdate] = field(default_factory=list)  # of `requests`
    needs_host_inputs: bool = False

    @property
    def has_chunks(self) -> bool:
        return bool(self.scheduled) and self.scheduled[-1].is_prefill

    def add_decode(
        self, request: Request, num_drafts: int, order: DraftOrder, *, num_slots: int, no_drafts_reason: str
    ) -> None:
        """Verify `num_drafts` drafts, or none for a reason, and draft by `order` afterwards. The request has
        `num_slots` slots.

        One that has no drafter decodes by the same entry until these are full.
        """
        num_tokens = 1 + num_drafts
        if request.host_drafts:
            if num_drafts > 0:
                self.host_drafts[request.row] = request.host_drafts[:num_drafts]
            request.host_drafts = []
        max_seq_len = request.max_num_computed_tokens + num_tokens
        # Of the last token that it may have no KV is needed.
        is_plain = num_drafts == 0 and order is NOTHING and request.message.constraint is None
        if is_plain:
            max_seq_len = min(num_slots, request.token_limit - 1)
        entry = ScheduledRequest(
            row=request.row,
            num_tokens=num_tokens,
            num_drafts=num_drafts,
            max_seq_len=max_seq_len,
            method=order.choice.method,
            num_next_drafts=order.choice.k,
            keeps_up=order.keeps_up,
            draft_feed=order.feed,
        )
        request.plain_decode = entry if is_plain else None
        self._ask(request, order)
        self.add(request, entry, no_drafts_reason)

    def add_chunk(self, request: Request, num_tokens: int, order: DraftOrder) -> None:
        """Compute the next tokens of a prefill; drafts are asked for only if it ends here."""
        start = request.max_num_computed_tokens
        is_last = num_tokens == request.num_prefill_tokens_left
        if not is_last:
            order = order._replace(choice=order.choice._replace(k=0))
        entry = ScheduledRequest(
            row=request.row,
            num_tokens=num_tokens,
            start=start,
            samples=is_last,
            max_seq_len=start + num_tokens,
            method=order.choice.method,
            num_next_drafts=order.choice.k,
            keeps_up=order.keeps_up,
            draft_feed=order.feed,
        )
        self._ask(request, order)
        self.add(request, entry, "")

    def repeat(self, requests: list[Request]) -> None:
        """They decode by the entries that they have (`Request.can_repeat`)."""
        self.requests += requests
        self.scheduled += [entry for request in requests if (entry := request.plain_decode) is not None]
        self.no_drafts_reasons += [NO_DRAFTS.reason] * len(requests)
        self.budget -= len(requests)
        for request in requests:
            request.num_in_flight_tokens += 1
            request.num_in_flight_samples += 1

    def add(self, request: Request, entry: ScheduledRequest, no_drafts_reason: str) -> None:
        """What the request was asked for before stays."""
        self.scheduled.append(entry)
        self.no_drafts_reasons.append(no_drafts_reason)
        self.requests.append(request)
        self.budget -= entry.num_tokens
        if request.message.constraint is not None and entry.samples:
            self.needs_host_inputs = True
        request.num_in_flight_tokens += entry.num_tokens
        request.num_in_flight_samples += entry.samples

    def add_row(self, request: Request) -> None:
        """The request was given a row and blocks."""
        new_row = NewRow(
            row=request.row,
            request_id=request.request_id,
            token_ids=list(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens,
            token_limit=request.token_limit,
            params=request.message.params,
            stop_ids=request.stop_ids,
        )
        self.new_rows.append(new_row)

    def build(self) -> StepPlan:
        return StepPlan(
            step=self.step,
            scheduled=self.scheduled,
            new_rows=self.new_rows,
            block_table_updates=self.block_table_updates,
            host_drafts=self.host_drafts,
            needs_host_inputs=self.needs_host_inputs,
        )

    def _ask(self, request: Request, order: DraftOrder) -> None:
        request.next_method = order.choice.method
        request.num_next_drafts = order.choice.k
        request.no_drafts_reason = order.choice.reason
