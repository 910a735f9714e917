"""The executor's vocabulary: what one step is to do and what it brought. Plain msgspec data, so that a
multi-process executor can broadcast it. Token counts here are per request and step.

A row (request row) is a fixed slot of device state that a running request owns. `StepPlan.scheduled` is ordered:
requests that verify (decode) first, prefill chunks after them.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Literal

import msgspec

from engine.messages import PositionLogprobs
from engine.params import SamplingParams

GraphKind = Literal["full", "eager"]


class NewRow(msgspec.Struct, kw_only=True, frozen=True):
    """Fill a row before the step: a request is admitted, or resumed after preemption."""

    row: int
    request_id: str
    token_ids: list[int]  # prompt, then output so far (resumed)
    num_prompt_tokens: int
    num_computed_tokens: int  # prefix hit
    token_limit: int  # positions >= this write no KV: min(prompt + max_tokens, max_model_len)
    params: SamplingParams
    stop_ids: tuple[int, ...]  # ids masked while fewer than min_tokens were emitted


class BlockTableUpdate(msgspec.Struct, frozen=True):
    """Write `block_ids` into the row's table of one KV group, from block index `start` on."""

    group: int
    row: int
    start: int
    block_ids: list[int]


class DraftFeed(msgspec.Struct, frozen=True):
    """Tokens of a request's history, from position `start` on, that its drafter computes after the step. The device
    leaves out those behind the last one whose KV is valid then.

    Example: the drafter is at 4, 10 tokens are computed, and the step verifies 1 + 2 of which 2 hold: DraftFeed(4, 9)
    feeds positions 4..11, that is what was missed, 4..9, and what the step computed, 10 and 11.
    """

    start: int
    num_tokens: int


class ScheduledRequest(msgspec.Struct, kw_only=True, frozen=True):
    """One request of the step.

    Prefill chunk: `start` is the first position, num_drafts 0, `samples` only for the chunk that ends the prefill.
    Decode: num_tokens = 1 + num_drafts; the device knows the positions (start -1), because tokens of the step
    before may be in flight; `max_seq_len` bounds the length after the step from above.
    """

    row: int
    num_tokens: int
    num_drafts: int = 0
    start: int = -1
    samples: bool = True
    max_seq_len: int  # upper bound of computed + scheduled tokens
    method: str = "none"  # who makes the drafts for the *next* step
    num_next_drafts: int = 0  # k asked of that method
    keeps_up: str = (
        "none"  # a method other than `method` whose state has to follow the request, without drafting
    )
    draft_feed: DraftFeed | None = None  # what `method` computes first; None: the step's tokens

    @property
    def is_prefill(self) -> bool:
        return self.start >= 0


class StepPlan(msgspec.Struct, kw_only=True):
    """One step. `step` numbers are consecutive; block frees are fenced by them."""

    step: int
    scheduled: list[ScheduledRequest]
    new_rows: list[NewRow] = []
    block_table_updates: list[BlockTableUpdate] = []
    host_drafts: dict[int, list[int]] = {}  # row -> drafts made on the host, to be verified in this step
    needs_host_inputs: bool = False  # part B waits for `provide`

    @property
    def num_scheduled_tokens(self) -> int:
        return sum([entry.num_tokens for entry in self.scheduled])

    @property
    def chunks(self) -> list[ScheduledRequest]:
        """The prefill chunks, from the last one on."""
        return list(takewhile(lambda entry: entry.is_prefill, reversed(self.scheduled)))


class HostInputs(msgspec.Struct, kw_only=True):
    """Late host data of a launched step."""

    token_bitmask: bytes | None = None
    """Tokens that may be drawn: [rows, words of 32 tokens] little-endian int32; words beyond the vocabulary are read by
    nobody."""
    masked_rows: list[int] | None = None  # logits rows, in plan order, that the mask is for; None: all


class RowResult(msgspec.Struct, kw_only=True, gc=False):
    """What the step brought for one entry of `StepPlan.scheduled` (same order)."""

    token_ids: list[
        int
    ] = []  # the verifier's run: accepted drafts and the token after them; empty: not sampled
    num_drafted: int = 0  # valid drafts that were verified
    num_accepted: int = 0  # accepted of these, also where the run had no room for them
    draft_method: str = "none"  # who had made them
    logprobs: list[PositionLogprobs] | None = None  # one per token id
    prompt_logprobs: list[PositionLogprobs] | None = None  # of the chunk's positions start + 1 ...
    nan_target: bool = False  # NaN, or nothing left to sample: the request fails
    failure: str = ""  # the step could not be computed, and why: the request fails
    nan_draft: bool = False  # the drafter's output for the next step was unusable: drafts are lost
    drafter_error: bool = False  # the draft method failed: no drafts for the next step
    num_next_drafts: int = 0  # valid drafts that stand in the row for the next step
    next_draft_ids: list[int] = []  # these, if the step waited for host inputs
    num_ruled_out: int = (
        0  # drafts that were lost because a grammar had no place for them; the host fills it in
    )


class StepOutput(msgspec.Struct, kw_only=True):
    step: int
    rows: list[RowResult]
    phase_seconds: dict[str, float] = {}
    graph_kind: GraphKind = "eager"  # how the target ran: replayed as a whole, or launch by launch
    num_padding_tokens: int = 0  # that the replayed graph computed for nobody
