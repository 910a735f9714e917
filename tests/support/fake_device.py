"""A device for scheduler tests: rows, block tables and KV slots as plain dicts, a target that is a pure
function of the history, and drafts that are right for a scripted number of tokens. No torch.

It executes a plan as the real runner does and asserts what a kernel would only corrupt: every key that a
query reads must be the one of its own history, wherever blocks were shared, freed, preempted or handed out
again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.messages import PositionLogprobs, TokenLogprob
from engine.params import SamplingParams
from engine.step import NewRow, RowResult, ScheduledRequest, StepOutput, StepPlan

VOCAB_SIZE = 40
_MODULUS = 2**61 - 1


def extend_state(state: int, token: int) -> int:
    """The hash of a history, from that of the history without its last token (0: empty)."""
    return (state * 6364136223846793005 + token * 1442695040888963407 + 1) % _MODULUS


def target_token(state: int) -> int:
    """What the target draws after this history."""
    return (state >> 16) % VOCAB_SIZE


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """Plain decoding, by the definition."""
    state = 0
    for token in prompt:
        state = extend_state(state, token)
    tokens = []
    for _ in range(count):
        tokens.append(target_token(state))
        state = extend_state(state, tokens[-1])
    return tokens


@dataclass
class _Row:
    request_id: str
    params: SamplingParams
    history: list[int]  # confirmed on the device
    num_prompt_tokens: int
    num_computed: int
    token_limit: int
    drafts: list[int] = field(default_factory=list)
    num_asked: int = 0
    method: str = "none"
    uses_drafter: bool = False
    is_lost: bool = False  # its logits were NaN; steps launched before the host knew bring nothing


class FakeDevice:
    """`num_right(k)` scripts how many of k drafts are right, `num_found(k)` how many there are. `nan_requests`: ids
    whose logits are NaN.

    `drafter_group`: the KV group of a drafter whose entry of a token depends on the next token too (as
    EAGLE's does). It keeps up in every step of a request that uses it, and writes behind the confirmed tokens
    while drafting.
    """

    def __init__(
        self,
        *,
        num_groups: int,
        num_blocks: int,
        block_size: int,
        num_right: Callable[[int], int] = lambda k: k,
        num_found: Callable[[int], int] = lambda k: k,
        drafter_group: int | None = None,
        drafts_on_host: bool = False,
    ) -> None:
        self.nan_requests: set[str] = set()
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._num_right = num_right
        self._num_found = num_found
        self._drafter_group = drafter_group
        self._drafts_on_host = drafts_on_host
        self._rows: dict[int, _Row] = {}
        self._tables: list[dict[int, dict[int, int]]] = [{} for _ in range(num_groups)]
        self._kv: list[dict[int, int]] = [
            {} for _ in range(num_groups)
        ]  # slot -> state of the history up to it

    def execute(self, plan: StepPlan) -> StepOutput:
        for new in plan.new_rows:
            self._set_row(new)
        for update in plan.block_table_updates:
            assert all(0 <= block < self._num_blocks for block in update.block_ids)
            table = self._tables[update.group].setdefault(update.row, {})
            for offset, block in enumerate(update.block_ids):
                table[update.start + offset] = block
        for row, drafts in plan.host_drafts.items():
            self._rows[row].drafts = list(drafts)
        self._check_order(plan.scheduled)
        return StepOutput(step=plan.step, rows=[self._run(entry) for entry in plan.scheduled])

    def _set_row(self, new: NewRow) -> None:
        self._rows[new.row] = _Row(
            new.request_id,
            new.params,
            list(new.token_ids),
            new.num_prompt_tokens,
            new.num_computed_tokens,
            new.token_limit,
        )
        for tables in self._tables:
            tables[new.row] = {}

    @staticmethod
    def _check_order(scheduled: Sequence[ScheduledRequest]) -> None:
        rows = [entry.row for entry in scheduled]
        assert len(set(rows)) == len(rows), "a row is scheduled twice in one step"
        is_prefill = [entry.is_prefill for entry in scheduled]
        assert is_prefill == sorted(is_prefill), "a decode stands behind a chunk"

    def _run(self, entry: ScheduledRequest) -> RowResult:
        row = self._rows[entry.row]
        row.uses_drafter = "scripted" in (entry.method, entry.keeps_up)
        if row.is_lost:
            return RowResult(nan_target=True)
        assert entry.num_drafts <= row.num_asked, "more drafts are verified than were asked for"
        drafts = row.drafts[: entry.num_drafts]
        method = row.method if row.num_asked else "none"
        if entry.is_prefill:
            assert entry.start == row.num_computed, "a chunk does not start where the one before it ended"
            assert entry.start + entry.num_tokens <= len(row.history)
            assert entry.samples == (entry.start + entry.num_tokens == len(row.history))
        else:
            assert row.num_computed == len(row.history) - 1, "a decode before the end of the prefill"
            assert entry.num_tokens == 1 + entry.num_drafts
        assert entry.max_seq_len >= row.num_computed + entry.num_tokens
        states = self._write_and_read(entry.row, row, drafts, entry.num_tokens)
        result = RowResult(num_drafted=len(drafts), draft_method=method)
        if entry.is_prefill and row.params.prompt_logprobs is not None:
            count = min(entry.num_tokens, row.num_prompt_tokens - 1 - entry.start)
            tokens = row.history[entry.start + 1 : entry.start + 1 + max(count, 0)]
            result.prompt_logprobs = [_logprob(token) for token in tokens]
        if entry.samples:
            self._sample(row, entry, drafts, states, result)
        else:
            row.num_computed += entry.num_tokens
            self._keep_up(entry.row, row, entry.start)
        return result

    def _write_and_read(self, row_id: int, row: _Row, drafts: list[int], num_tokens: int) -> list[int]:
        """Store the scheduled tokens, then check all keys that they read. Returns the state after each
        position.
        """
        tokens = row.history + drafts
        states, state = [], 0
        for token in tokens:
            state = extend_state(state, token)
            states.append(state)
        first, end = row.num_computed, min(row.num_computed + num_tokens, len(tokens), row.token_limit)
        for group, (tables, kv) in enumerate(zip(self._tables, self._kv, strict=True)):
            if group == self._drafter_group:
                continue
            slots = [self._slot(tables[row_id], position) for position in range(end)]
            for position in range(first, end):
                kv[slots[position]] = states[position]
            for position, slot in enumerate(slots):
                assert kv.get(slot) == states[position], (
                    f"{row.request_id}: foreign key at position {position}"
                )
        return states

    def _slot(self, table: dict[int, int], position: int) -> int:
        index = position // self._block_size
        assert index in table, f"position {position} has no block"
        return table[index] * self._block_size + position % self._block_size

    def _sample(
        self, row: _Row, entry: ScheduledRequest, drafts: list[int], states: list[int], result: RowResult
    ) -> None:
        if row.request_id in self.nan_requests:
            result.nan_target = row.is_lost = True
            return
        num_known, num_computed = len(row.history), row.num_computed
        run = []
        for position in range(num_known - 1, num_known + len(drafts)):
            run.append(target_token(states[position]))
            index = position - (num_known - 1)
            if index >= len(drafts) or drafts[index] != run[-1]:
                break
        result.num_accepted = len(run) - 1
        run = run[: row.token_limit - num_known]
        row.history += run
        row.num_computed = len(row.history) - 1 if entry.is_prefill else row.num_computed + len(run)
        result.token_ids = run
        if row.params.logprobs is not None:
            result.logprobs = [_logprob(token) for token in run]
        self._keep_up(entry.row, row, num_computed)
        self._propose(row, entry)
        result.num_next_drafts = len(row.drafts)

    def _keep_up(self, row_id: int, row: _Row, first: int) -> None:
        """The drafter's entries from position `first` on; checks all that it reads from now on."""
        if self._drafter_group is None or not row.uses_drafter:
            return
        kv, table = self._kv[self._drafter_group], self._tables[self._drafter_group][row_id]
        state = 0
        for position in range(min(row.num_computed, len(row.history) - 1)):
            state = extend_state(state, row.history[position])
            entry = extend_state(state, row.history[position + 1])
            slot = self._slot(table, position)
            if position >= first:
                kv[slot] = entry
            assert kv.get(slot) == entry, f"{row.request_id}: foreign draft key at position {position}"

    def _propose(self, row: _Row, entry: ScheduledRequest) -> None:
        k = entry.num_next_drafts
        row.drafts, row.num_asked, row.method = [], k, entry.method
        if self._drafts_on_host:
            return
        if self._drafter_group is not None and k > 0:
            table = self._tables[self._drafter_group][entry.row]
            for position in range(row.num_computed, min(row.num_computed + k, row.token_limit)):
                self._kv[self._drafter_group][self._slot(table, position)] = -1
        num_right = self._num_right(k)
        row.drafts = continuation(row.history, self._num_found(k))
        if num_right < len(row.drafts):
            row.drafts[num_right] = (row.drafts[num_right] + 1) % VOCAB_SIZE


def _logprob(token: int) -> PositionLogprobs:
    return PositionLogprobs(TokenLogprob(token, -float(token), 1), [])
