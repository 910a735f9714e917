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
    spoilt: int | None = None  # first position that a drafter's failure spoilt, until it is fed anew
    is_lost: bool = False  # its logits were NaN; steps launched before the host knew bring nothing


class FakeDevice:
    """`num_right(k)` scripts how many of k drafts are right, `num_found(k)` how many there are. `nan_requests`: ids
    whose logits are NaN.

    `windows`: per group, keys that a query sees, None: all. Whoever drafts on the device reads the target's keys too,
    as seen from the last confirmed token, and `extra_window_keys` older ones than the window's.

    `drafter_group`: the KV group of a drafter whose entry of a token depends on the next token too (as
    EAGLE's does). It keeps up in every step of a request that uses it, and writes behind the confirmed tokens
    while drafting.

    `fed_groups`: the KV groups of a drafter that catches up: it computes what it is fed, in the steps for which it is
    named. `drafter_fails`: it raises, having spoilt what it was about to store.
    """

    def __init__(
        self,
        *,
        num_blocks: Sequence[int],  # by group
        windows: Sequence[int | None],
        block_size: int,
        extra_window_keys: int = 0,
        num_right: Callable[[int], int] = lambda k: k,
        num_found: Callable[[int], int] = lambda k: k,
        drafter_group: int | None = None,
        fed_groups: Sequence[int] = (),
        drafter_fails: Callable[[], bool] = lambda: False,
        drafts_on_host: bool = False,
    ) -> None:
        self.nan_requests: set[str] = set()
        self.touched: list[set[tuple[str, int]]] = []
        """By group: (request id, block) of all that the last step read and wrote."""
        self._num_blocks = num_blocks
        self._windows = windows
        self._extra_window_keys = extra_window_keys
        self._block_size = block_size
        self._num_right = num_right
        self._num_found = num_found
        self._drafter_group = drafter_group
        self._fed_groups = fed_groups
        self._drafter_fails = drafter_fails
        self.num_fed = 0  # tokens that a drafter which catches up was fed
        self.num_failures = 0  # of it
        self.num_void_feeds = 0  # planned before a failure was known, behind it
        self._drafts_on_host = drafts_on_host
        self._rows: dict[int, _Row] = {}
        self._tables: list[dict[int, dict[int, int]]] = [{} for _ in windows]
        self._kv: list[dict[int, int]] = [{} for _ in windows]  # slot -> state of the history up to it

    def execute(self, plan: StepPlan) -> StepOutput:
        self.touched = [set() for _ in self._windows]
        for new in plan.new_rows:
            self._set_row(new)
        for update in plan.block_table_updates:
            assert all(0 <= block < self._num_blocks[update.group] for block in update.block_ids)
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
        self._check_slots(entry, row)
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
            result.drafter_error = not self._feed(entry, row, entry.start)
        return result

    def _check_slots(self, entry: ScheduledRequest, row: _Row) -> None:
        """All lengths that the entry allows have blocks: kernels may read the table that far."""
        last = min(entry.max_seq_len, row.token_limit) - 1
        for group in self._target_groups():
            assert last // self._block_size in self._tables[group][entry.row], (
                f"{row.request_id}: no block of group {group} for a length of {entry.max_seq_len}"
            )

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
        for group in self._target_groups():
            for position in range(first, end):
                self._kv[group][self._slot(group, row_id, position)] = states[position]
        self._read(row_id, range(first, end), states)
        return states

    def _read(self, row_id: int, queries: range, states: list[int], extra_keys: int = 0) -> None:
        """Check all keys that the target's layers, or a drafter in their place, read for these positions."""
        for group in self._target_groups():
            window = self._windows[group]
            first = 0 if window is None else max(queries.start - window + 1 - extra_keys, 0)
            for position in range(first, queries.stop):
                key = self._kv[group].get(self._slot(group, row_id, position))
                assert key == states[position], (
                    f"{self._rows[row_id].request_id}: foreign key at position {position}, group {group}"
                )

    def _target_groups(self) -> list[int]:
        own = (self._drafter_group, *self._fed_groups)
        return [group for group in range(len(self._windows)) if group not in own]

    def _slot(self, group: int, row_id: int, position: int) -> int:
        index = position // self._block_size
        table = self._tables[group][row_id]
        assert index in table, f"position {position} has no block in group {group}"
        self.touched[group].add((self._rows[row_id].request_id, table[index]))
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
        result.drafter_error = not self._feed(entry, row, num_computed)
        self._propose(row, entry, states)
        if result.drafter_error:
            row.drafts = []
        result.num_next_drafts = len(row.drafts)

    def _keep_up(self, row_id: int, row: _Row, first: int) -> None:
        """The drafter's entries from position `first` on; checks all that it reads from now on."""
        if self._drafter_group is None or not row.uses_drafter:
            return
        kv = self._kv[self._drafter_group]
        state = 0
        for position in range(min(row.num_computed, len(row.history) - 1)):
            state = extend_state(state, row.history[position])
            entry = extend_state(state, row.history[position + 1])
            slot = self._slot(self._drafter_group, row_id, position)
            if position >= first:
                kv[slot] = entry
            assert kv.get(slot) == entry, f"{row.request_id}: foreign draft key at position {position}"

    def _feed(self, entry: ScheduledRequest, row: _Row, start: int) -> bool:
        """What the drafter computes of a step from position `start` on; False: it fails. Checks all that it reads."""
        if not self._fed_groups or entry.method != "scripted":
            return True
        feed = entry.draft_feed
        first, end = (start, row.num_computed) if feed is None else (feed.start, feed.start + feed.num_tokens)
        assert first <= start
        assert feed is None or feed.num_tokens > 0
        assert entry.num_next_drafts == 0 or end >= row.num_computed, "it drafts with a hole in its KV"
        end = min(end, row.num_computed)
        self.num_fed += end - first
        is_right = not self._drafter_fails()
        if row.spoilt is not None and first <= row.spoilt:
            row.spoilt = None
        self.num_void_feeds += row.spoilt is not None
        self.num_failures += not is_right
        states, state = [], 0
        for token in row.history[:end]:
            state = extend_state(state, token)
            states.append(state)
        for group in self._fed_groups:
            kv, window = self._kv[group], self._windows[group]
            for position in range(first, end):
                kv[self._slot(group, entry.row, position)] = states[position] if is_right else -2
            if is_right and row.spoilt is None:
                for position in range(0 if window is None else max(first - window + 1, 0), end):
                    assert kv.get(self._slot(group, entry.row, position)) == states[position], (
                        f"{row.request_id}: foreign draft key at position {position}, group {group}"
                    )
        if not is_right and row.spoilt is None:
            row.spoilt = first
        return is_right

    def _propose(self, row: _Row, entry: ScheduledRequest, states: list[int]) -> None:
        k = entry.num_next_drafts
        row.drafts, row.num_asked, row.method = [], k, entry.method
        if self._drafts_on_host:
            return
        if k > 0:
            last = row.num_computed - 1
            self._read(entry.row, range(last, last + 1), states, self._extra_window_keys)
        own_groups = self._fed_groups if self._drafter_group is None else (self._drafter_group,)
        for group in own_groups if entry.method == "scripted" else ():
            for position in range(row.num_computed, min(row.num_computed + k, row.token_limit)):
                self._kv[group][self._slot(group, entry.row, position)] = -1
        num_right = self._num_right(k)
        row.drafts = continuation(row.history, self._num_found(k))
        if num_right < len(row.drafts):
            row.drafts[num_right] = (row.drafts[num_right] + 1) % VOCAB_SIZE


def _logprob(token: int) -> PositionLogprobs:
    return PositionLogprobs(TokenLogprob(token, -float(token), 1), [])
