"""A step plan while it is put together: entries in plan order, and how much of the budget is left."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.request import Request
from engine.scheduler.draft_policy import DraftChoice
from engine.step import BlockTableUpdate, DraftFeed, NewRow, ScheduledRequest, StepPlan


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
    block_table_updates: list[BlockTableUpdate] = field(default_factory=list)  # up to this step
    needs_host_inputs: bool = False

    @property
    def has_chunks(self) -> bool:
        return bool(self.scheduled) and self.scheduled[-1].is_prefill

    def add_decode(
        self,
        request: Request,
        num_drafts: int,
        drafts: DraftChoice,
        *,
        feed: DraftFeed | None,
        keeps_up: str,
        no_drafts_reason: str,
    ) -> None:
        """Verify `num_drafts` drafts, or none for a reason; ask for `drafts` afterwards, from a drafter that was fed
        `feed`.
        """
        num_tokens = 1 + num_drafts
        if request.host_drafts:
            if num_drafts > 0:
                self.host_drafts[request.row] = request.host_drafts[:num_drafts]
            request.host_drafts = []
        entry = ScheduledRequest(
            row=request.row,
            num_tokens=num_tokens,
            num_drafts=num_drafts,
            max_seq_len=request.max_num_computed_tokens + num_tokens,
            method=drafts.method,
            num_next_drafts=drafts.k,
            keeps_up=keeps_up,
            draft_feed=feed,
        )
        self._add(request, entry, drafts.reason, no_drafts_reason)

    def add_chunk(
        self,
        request: Request,
        num_tokens: int,
        drafts: DraftChoice,
        *,
        feed: DraftFeed | None,
        keeps_up: str,
    ) -> None:
        """Compute the next tokens of a prefill; ask for `drafts` only if it ends here."""
        start = request.max_num_computed_tokens
        is_last = num_tokens == request.num_prefill_tokens_left
        assert is_last or drafts.k == 0, "an unfinished prefill asks for drafts"
        entry = ScheduledRequest(
            row=request.row,
            num_tokens=num_tokens,
            start=start,
            samples=is_last,
            max_seq_len=start + num_tokens,
            method=drafts.method,
            num_next_drafts=drafts.k,
            keeps_up=keeps_up,
            draft_feed=feed,
        )
        self._add(request, entry, drafts.reason, "")

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

    def _add(self, request: Request, entry: ScheduledRequest, next_reason: str, reason: str) -> None:
        self.scheduled.append(entry)
        self.no_drafts_reasons.append(reason)
        self.requests.append(request)
        self.budget -= entry.num_tokens
        if request.message.constraint is not None and entry.samples:
            self.needs_host_inputs = True
        request.num_in_flight_tokens += entry.num_tokens
        request.num_in_flight_steps += 1
        request.num_in_flight_samples += entry.samples
        request.next_method = entry.method
        request.num_next_drafts = entry.num_next_drafts
        request.no_drafts_reason = next_reason
