"""What the engine's host side knows of one request while it is alive. Plain data: the scheduler decides, this
counts.

Confirmed and in-flight counts are kept apart. Confirmed tokens (`token_ids`) are known here; in-flight tokens
were launched and not collected yet, so their number is an upper bound: a verification of 1 + k tokens
confirms 1..1 + k.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from engine.draft_method import DraftMethod
from engine.messages import AddRequest, FinishInfo, PositionLogprobs, RequestTimes
from engine.step import ScheduledRequest

NO_ROW = -1
NO_METHOD = "none"
Order = tuple[int, int, int]  # priority, virtual start of the tenant's turn, arrival index


class RequestStatus(Enum):
    WAITING = "waiting"  # never admitted, or preempted
    RUNNING = "running"  # owns a row and blocks
    FINISHED = "finished"  # steps in flight may still bring results for it; they are dropped


# For what runs per request and step: in Python 3.11 an attribute of an enum costs as much as a call.
WAITING, RUNNING, FINISHED = RequestStatus


class CutRun(Protocol):
    """What a cutter says of a run: how many tokens stay, all unless the request ends, and whether it ends there."""

    @property
    def num_kept(self) -> int: ...

    @property
    def finish(self) -> FinishInfo | None: ...


class RunCutter(Protocol):
    """The one judge of where a request ends (engine/finish.py)."""

    def cut(self, run: list[int]) -> CutRun: ...


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """Example: prompt of 10, computed; 2 emitted; a verification of 1 + 3 in flight: 12 confirmed
    `token_ids`, num_computed_tokens 11, num_in_flight_tokens 4, min_num_tokens 13, max_num_computed_tokens
    15.
    """

    request_id: str
    message: AddRequest
    cutter: RunCutter
    order: Order  # smaller is served first
    token_limit: int  # min(prompt + max_tokens, max_model_len)
    stop_ids: tuple[int, ...]  # masked while fewer than min_tokens were emitted
    token_ids: list[int]  # confirmed: prompt, then emitted
    times: RequestTimes
    kv_groups: tuple[int, ...]  # KV groups that hold all its tokens, or a window of them
    draft_method: DraftMethod | None = None  # who drafts for it
    draft_kv_groups: tuple[int, ...] = ()  # of a drafter that catches up: they hold what it was fed

    status: RequestStatus = RequestStatus.WAITING
    row: int = NO_ROW
    prefill_end: int = 0  # tokens that were confirmed when it was admitted; computed in chunks
    num_computed_tokens: int = 0  # confirmed: their KV is valid
    draft_watermark: int = 0  # confirmed tokens whose KV is valid in `draft_kv_groups`
    next_draft_start: int | None = 0
    """First token to feed its drafter if the steps in flight go well, from below; None: the first of the next step."""
    num_in_flight_tokens: int = 0  # scheduled in launched, uncollected steps
    num_in_flight_samples: int = 0  # steps in flight that emit at least one token
    next_method: str = NO_METHOD  # who drafts for its next step
    num_next_drafts: int = 0  # asked of it: what the next step may verify
    no_drafts_reason: str = ""  # why nothing was asked
    num_known_drafts: int | None = (
        None  # that the step collected last left in the row; None: it was not asked to
    )
    has_drafter_failed: bool = False  # when it was asked the last time that is known
    host_drafts: list[int] = field(default_factory=list)  # for its next step, made on the host
    plain_decode: ScheduledRequest | None = None  # its decodes without drafts, while its slots last

    next_commit: int = 0  # confirmed tokens from which on its blocks have to be looked at
    num_cached_tokens: int = 0  # prefix hit when first admitted
    num_preemptions: int = 0
    is_announced: bool = False  # the client knows that the prompt is being computed
    prompt_logprobs: list[PositionLogprobs | None] = field(default_factory=list)  # until they are delivered
    block_hashes: list[bytes] = field(default_factory=list)  # of the leading full blocks of `token_ids`
    draft_block_hashes: list[bytes] = field(
        default_factory=list
    )  # of the same, where its drafter names them apart

    @property
    def priority(self) -> int:
        return self.order[0]

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.message.prompt_token_ids)

    @property
    def num_emitted_tokens(self) -> int:
        return len(self.token_ids) - len(self.message.prompt_token_ids)

    @property
    def is_in_flight(self) -> bool:
        """Is it in a step that is not collected?"""
        return self.num_in_flight_tokens > 0

    @property
    def max_num_computed_tokens(self) -> int:
        """Upper bound: all that is in flight gets accepted. Exact while the prefill is not over."""
        return self.num_computed_tokens + self.num_in_flight_tokens

    @property
    def min_num_computed_tokens(self) -> int:
        """Lower bound of the first position of its next step."""
        return self.max_num_computed_tokens if self.num_prefill_tokens_left > 0 else self.min_num_tokens - 1

    @property
    def min_num_tokens(self) -> int:
        """Lower bound of prompt + emitted tokens once the steps in flight are collected."""
        return len(self.token_ids) + self.num_in_flight_samples

    @property
    def can_decode(self) -> bool:
        """Is its prefill launched, and do the steps in flight not finish it for certain?"""
        if self.can_repeat:
            return True
        return self.num_prefill_tokens_left <= 0 and self.num_usable_drafts >= 0

    @property
    def can_repeat(self) -> bool:
        """May its next step be `plain_decode` once more?"""
        entry = self.plain_decode
        return entry is not None and self.num_computed_tokens + self.num_in_flight_tokens < entry.max_seq_len

    @property
    def num_prefill_tokens_left(self) -> int:
        """Tokens of the prefill that no step was launched for; 0 or less in the decode phase."""
        return self.prefill_end - self.num_computed_tokens - self.num_in_flight_tokens

    @property
    def num_usable_drafts(self) -> int:
        """Drafts that its next step can still turn into tokens: one token of the step is the target's own.
        Negative: steps in flight finish it for certain.
        """
        return self.token_limit - self.min_num_tokens - 1

    @property
    def num_lookahead_slots(self) -> int:
        """KV slots behind the confirmed tokens that its drafter may write to."""
        return 0 if self.draft_method is None else self.draft_method.num_lookahead_slots

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.message.params.prompt_logprobs is not None

    def check_integrity(self) -> None:
        """Raise AssertionError unless the counts of a running request agree with each other."""
        assert self.num_emitted_tokens < self.message.params.max_tokens, "emitted max_tokens and goes on"
        assert 0 <= self.num_in_flight_samples <= self.num_in_flight_tokens
        if self.num_prefill_tokens_left > 0:
            assert self.num_in_flight_samples == 0, "a decode was launched before the prefill"
        elif not self.is_in_flight:
            assert self.num_computed_tokens == len(self.token_ids) - 1, "an idle request lacks KV"
        if self.draft_kv_groups:
            self._check_drafter()

    def _check_drafter(self) -> None:
        assert self.draft_watermark <= self.num_computed_tokens, "the drafter is ahead"
        if self.next_draft_start is not None:
            assert self.draft_watermark <= self.next_draft_start <= self.max_num_computed_tokens
        elif not self.is_in_flight:
            assert self.draft_watermark == self.num_computed_tokens, "the drafter has a hole"
