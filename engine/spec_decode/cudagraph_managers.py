"""CUDA graphs of drafting, for the steps that are not captured as a whole (engine/worker/step_graphs.py).

Draft prefill: one pass over the step's tokens. Draft decode: the whole loop of k draft steps is one graph, never a part
of it; a request that wants fewer drafts masks its own. Managers know tensors and shapes, the speculator says what runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.attention.metadata import AttentionInputs
from engine.batch.block_tables import BlockTables
from engine.batch.request_rows import RequestRows
from engine.batch.static_inputs import StaticAttentionInputs
from engine.cudagraph import (
    BatchDescriptor,
    BatchLimits,
    CaptureQueue,
    CudaGraphManager,
    smallest_size,
)
from engine.sampling.features import SAMPLING_KINDS, SamplingKind, most_general, uniform_features
from engine.sampling.states import SamplingStates
from engine.spec_decode.speculator import ProposalInputs


@dataclass(frozen=True)
class DraftState:
    """What one draft step leaves for the next, one row per request."""

    for_logits: torch.Tensor  # [num_reqs, draft_hidden_size]
    feedback: torch.Tensor  # [num_reqs, hidden_size]


@dataclass(frozen=True)
class PrefillTokens:
    """What a draft prefill runs over."""

    input_ids: torch.Tensor  # [num_tokens] int64
    hidden_states: torch.Tensor  # [num_tokens, hidden_size], or of any length where the drafter takes none
    attention: AttentionInputs  # of the drafter's own KV groups
    last_rows: torch.Tensor  # [num_reqs] int64; the last valid token of each request


class PrefillSpeculatorCudaGraphManager(CudaGraphManager[BatchDescriptor]):
    """Draft step 0 of a drafter with KV of its own. `prefill`: the pass itself."""

    def __init__(
        self,
        prefill: Callable[[PrefillTokens], DraftState],
        *,
        num_groups: int,
        block_tables: BlockTables,
        limits: BatchLimits,
        captures: CaptureQueue,
    ) -> None:
        super().__init__(captures)
        self._prefill = prefill
        self._limits = limits
        device = block_tables.tables[0].device
        self._input_ids = torch.zeros(limits.num_tokens, dtype=torch.int64, device=device)
        self._last_rows = torch.zeros(limits.num_reqs, dtype=torch.int64, device=device)
        self._hidden_states: torch.Tensor | None = None
        self._attention = StaticAttentionInputs(
            num_groups=num_groups,
            block_size=block_tables.block_size,
            max_blocks=block_tables.max_blocks,
            max_num_reqs=limits.num_reqs,
            max_num_tokens=limits.num_tokens,
            max_context=limits.max_seq_len,
            device=device,
        )
        self._outputs: dict[BatchDescriptor, DraftState] = {}

    def find(self, tokens: PrefillTokens) -> BatchDescriptor | None:
        """The graph that holds the batch; None: launch."""
        query_lens = tokens.attention.query_lens
        has_chunks = max(query_lens) > self._limits.decode_query_len
        shape = self._limits.describe(query_lens, tokens.attention.max_seq_lens, has_chunks)
        if self._hidden_states is None:
            self._hidden_states = tokens.hidden_states.new_zeros(
                self._limits.num_tokens, tokens.hidden_states.shape[-1]
            )
        return None if shape is None else self.dispatch(shape)

    def prefill(self, descriptor: BatchDescriptor, tokens: PrefillTokens) -> DraftState:
        """Replay. Rows behind the batch's are void."""
        num_reqs = tokens.attention.num_reqs
        assert self._hidden_states is not None
        self._input_ids[: len(tokens.input_ids)].copy_(tokens.input_ids)
        num_rows = min(
            len(tokens.hidden_states), len(tokens.input_ids)
        )  # without a meaning beyond the tokens
        self._hidden_states[:num_rows].copy_(tokens.hidden_states[:num_rows])
        self._last_rows[:num_reqs].copy_(tokens.last_rows)
        self._last_rows[num_reqs : descriptor.num_reqs].zero_()
        self._attention.fill(tokens.attention, num_tokens=descriptor.num_tokens, num_reqs=descriptor.num_reqs)
        self.replay(descriptor)
        output = self._outputs[descriptor]
        return DraftState(output.for_logits[:num_reqs], output.feedback[:num_reqs])

    def prepare(self, descriptor: BatchDescriptor) -> None:
        self._attention.clear()
        self._last_rows.zero_()

    def run(self, descriptor: BatchDescriptor) -> None:
        assert self._hidden_states is not None
        attention = self._attention.view(
            num_tokens=descriptor.num_tokens,
            num_reqs=descriptor.num_reqs,
            max_query_len=descriptor.max_query_len,
        )
        self._outputs[descriptor] = self._prefill(
            PrefillTokens(
                self._input_ids[: descriptor.num_tokens],
                self._hidden_states[: descriptor.num_tokens],
                attention,
                self._last_rows[: descriptor.num_reqs],
            )
        )


@dataclass(frozen=True, kw_only=True)
class LoopDescriptor:
    """`num_drafts`: of every request, at most."""

    num_reqs: int
    num_drafts: int
    sampling: SamplingKind

    def covers(self, needed: LoopDescriptor) -> bool:
        return (
            self.num_reqs >= needed.num_reqs
            and self.num_drafts >= needed.num_drafts
            and SAMPLING_KINDS.index(self.sampling) >= SAMPLING_KINDS.index(needed.sampling)
        )

    @property
    def cost(self) -> tuple[int, ...]:
        return self.num_reqs * self.num_drafts, SAMPLING_KINDS.index(self.sampling)


class DecodeSpeculatorCudaGraphManager(CudaGraphManager[LoopDescriptor]):
    """All draft steps from a first state on. `loop`: the drafts [num_reqs, k]; `max_drafts`: the most it ever makes."""

    def __init__(
        self,
        loop: Callable[[ProposalInputs, DraftState], torch.Tensor],
        *,
        max_drafts: int,
        block_tables: BlockTables,
        limits: BatchLimits,
        captures: CaptureQueue,
    ) -> None:
        super().__init__(captures)
        self._loop = loop
        self._max_drafts = max_drafts
        self._block_tables = block_tables
        self._limits = limits
        self._padding_row = limits.num_reqs
        device = block_tables.tables[0].device
        self._rows = torch.full((limits.num_reqs,), self._padding_row, dtype=torch.int64, device=device)
        self._num_wanted = torch.zeros(limits.num_reqs, dtype=torch.int64, device=device)
        self._num_sampled = torch.zeros(limits.num_reqs, dtype=torch.int64, device=device)
        self._first: DraftState | None = None
        self._lasting: tuple[RequestRows, SamplingStates] | None = None  # the same for every batch
        self._outputs: dict[LoopDescriptor, torch.Tensor] = {}

    def find(self, inputs: ProposalInputs, first: DraftState) -> LoopDescriptor | None:
        """The graph that holds the batch; None: launch."""
        kinds = [inputs.states.sampling_kind(row) for row in inputs.row_list]
        if None in kinds or max(inputs.attention.max_seq_lens) > self._limits.max_seq_len:
            return None
        if inputs.draft_distributions is not None:
            return None  # the distributions of a batch are recorded where it finds them
        if self._first is None:
            self._lasting = inputs.request_rows, inputs.states
            self._first = DraftState(
                first.for_logits.new_zeros(self._limits.num_reqs, first.for_logits.shape[-1]),
                first.feedback.new_zeros(self._limits.num_reqs, first.feedback.shape[-1]),
            )
        return self.dispatch(
            LoopDescriptor(
                num_reqs=smallest_size(inputs.num_reqs, self._limits.num_reqs),
                num_drafts=smallest_size(max(inputs.wanted), self._max_drafts),
                sampling=most_general(kind for kind in kinds if kind is not None),
            )
        )

    def draft(self, descriptor: LoopDescriptor, inputs: ProposalInputs, first: DraftState) -> torch.Tensor:
        """Replay. Returns the drafts, [num_reqs, descriptor.num_drafts] int64."""
        num_reqs = inputs.num_reqs
        assert self._first is not None
        self._rows[:num_reqs].copy_(inputs.rows)
        self._rows[num_reqs : descriptor.num_reqs].fill_(self._padding_row)
        self._num_wanted[:num_reqs].copy_(inputs.num_wanted)
        self._num_sampled[:num_reqs].copy_(inputs.num_sampled)
        self._first.for_logits[:num_reqs].copy_(first.for_logits)
        self._first.feedback[:num_reqs].copy_(first.feedback)
        self.replay(descriptor)
        return self._outputs[descriptor][:num_reqs]

    def prepare(self, descriptor: LoopDescriptor) -> None:
        self._rows.fill_(self._padding_row)

    def run(self, descriptor: LoopDescriptor) -> None:
        num_reqs = descriptor.num_reqs
        assert self._first is not None
        first = DraftState(self._first.for_logits[:num_reqs], self._first.feedback[:num_reqs])
        self._outputs[descriptor] = self._loop(self._static_inputs(descriptor, first.feedback[:0]), first)

    def _static_inputs(self, descriptor: LoopDescriptor, no_hidden: torch.Tensor) -> ProposalInputs:
        """What the loop reads of a step: its rows, and what follows from them on the device."""
        assert self._lasting is not None
        request_rows, states = self._lasting
        num_reqs, tables = descriptor.num_reqs, self._block_tables
        rows = self._rows[:num_reqs]
        index = torch.arange(num_reqs + 1, device=rows.device)
        attention = AttentionInputs(
            query_lens=[1] * num_reqs,
            max_seq_lens=[self._limits.max_seq_len] * num_reqs,
            query_start_loc=index.to(torch.int32),
            seq_lens=index[:-1].to(torch.int32),  # nobody reads them: a draft step has lengths of its own
            positions=index[:-1],
            block_tables=tuple(table[rows] for table in tables.tables),
            slot_mappings=tuple(index[:-1] for _ in tables.tables),
            block_size=tables.block_size,
        )
        return ProposalInputs(
            row_list=[],
            methods=[],
            wanted=[descriptor.num_drafts] * num_reqs,
            num_wanted=self._num_wanted[:num_reqs],
            rows=rows,
            attention=attention,
            request_rows=request_rows,
            states=states,
            hidden_states=no_hidden,
            aux_hidden_states={},
            num_sampled=self._num_sampled[:num_reqs],
            num_rejected=index[:-1],
            fixed_features=uniform_features(num_reqs, descriptor.sampling, states.vocab_size),
            in_graph=True,
        )
