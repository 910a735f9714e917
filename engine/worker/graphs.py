"""The target's decode steps as CUDA graphs: embedding to logits in one replay.

Batches with a prefill in them, and contexts beyond MAX_GRAPH_CONTEXT, run without a graph.
"""

from __future__ import annotations

import torch

from engine.attention.backend import AttentionContext
from engine.attention.metadata import AttentionInputs, NeededTokens
from engine.batch.input_batch import InputBatch
from engine.cudagraph import BatchDescriptor, CudaGraphManager, Recorder, decode_descriptors
from engine.kv_spec import PAD_SLOT_ID
from engine.worker.target import EagerTarget, TargetStates

MAX_GRAPH_CONTEXT = 16384  # tokens; what a kernel reserves for the parts of a split context grows with it


class TargetGraphManager(CudaGraphManager):
    """Static buffers at the largest shape; smaller shapes are their leading parts."""

    def __init__(
        self,
        eager: EagerTarget,
        *,
        block_size: int,
        max_blocks: int,
        max_num_seqs: int,
        max_drafts: int,
        device: torch.device,
        recorder: Recorder,
    ) -> None:
        super().__init__(decode_descriptors(max_num_seqs, max_drafts), recorder)
        self._eager = eager
        self._block_size = block_size
        self._max_context = min(max_blocks * block_size, MAX_GRAPH_CONTEXT)
        max_tokens = max_num_seqs * (1 + max_drafts)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._input_ids = zeros(max_tokens)
        self._positions = zeros(max_tokens)
        self._query_start_loc = zeros(max_num_seqs + 1, dtype=torch.int32)
        self._seq_lens = zeros(max_num_seqs, dtype=torch.int32)
        self._block_tables = [zeros(max_num_seqs, max_blocks, dtype=torch.int32) for _ in eager.groups]
        self._slot_mappings = [torch.full_like(self._input_ids, PAD_SLOT_ID) for _ in eager.groups]
        self._outputs: dict[BatchDescriptor, TargetStates] = {}

    def forward(self, batch: InputBatch, needed: NeededTokens | None) -> TargetStates:
        """By a replay where a graph holds the batch; the tokens of a decode all have logits."""
        inputs, num_tokens = batch.attention, len(batch.input_ids)
        descriptor = None
        if batch.is_decode_only and max(inputs.max_seq_lens) <= self._max_context:
            descriptor = self.dispatch(num_tokens, inputs.num_reqs, max(inputs.query_lens))
        if descriptor is None:
            return self._eager.forward(batch, needed)
        self._fill(batch, descriptor)
        self.replay(descriptor)
        static = self._outputs[descriptor]
        return TargetStates(
            hidden_states=static.hidden_states[:num_tokens],
            aux_hidden_states={layer: aux[:num_tokens] for layer, aux in static.aux_hidden_states.items()},
            logits=static.logits[:num_tokens],
            kind="full",
            num_padding_tokens=descriptor.num_tokens - num_tokens,
        )

    def run(self, descriptor: BatchDescriptor) -> None:
        eager, num_tokens = self._eager, descriptor.num_tokens
        context = AttentionContext(
            eager.backend, self._inputs(descriptor), eager.groups, eager.caches, eager.aux_layers
        )
        hidden_states = eager.model(self._input_ids[:num_tokens], self._positions[:num_tokens], context)
        self._outputs[descriptor] = TargetStates(
            hidden_states=hidden_states,
            aux_hidden_states=context.aux_hidden_states,
            logits=eager.model.compute_logits(hidden_states),
        )

    def _inputs(self, descriptor: BatchDescriptor) -> AttentionInputs:
        """The static buffers as a step. Lengths on the host are bounds, and hold for every replay."""
        num_tokens, num_reqs = descriptor.num_tokens, descriptor.num_reqs
        return AttentionInputs(
            query_lens=[descriptor.max_query_len] * num_reqs,
            max_seq_lens=[self._max_context] * num_reqs,
            query_start_loc=self._query_start_loc[: num_reqs + 1],
            seq_lens=self._seq_lens[:num_reqs],
            positions=self._positions[:num_tokens],
            block_tables=tuple(table[:num_reqs] for table in self._block_tables),
            slot_mappings=tuple(slots[:num_tokens] for slots in self._slot_mappings),
            block_size=self._block_size,
        )

    def _fill(self, batch: InputBatch, descriptor: BatchDescriptor) -> None:
        """Copy the batch in; behind it, requests of length 0 and tokens that store nothing."""
        inputs = batch.attention
        num_tokens, num_reqs = len(batch.input_ids), inputs.num_reqs
        self._input_ids[:num_tokens].copy_(batch.input_ids)
        self._positions[:num_tokens].copy_(inputs.positions)
        self._query_start_loc[: num_reqs + 1].copy_(inputs.query_start_loc)
        self._query_start_loc[num_reqs + 1 : descriptor.num_reqs + 1].fill_(num_tokens)
        self._seq_lens[:num_reqs].copy_(inputs.seq_lens)
        self._seq_lens[num_reqs : descriptor.num_reqs].zero_()
        for group in range(len(self._block_tables)):  # the target's come first
            self._block_tables[group][:num_reqs].copy_(inputs.block_tables[group])
            self._slot_mappings[group][:num_tokens].copy_(inputs.slot_mappings[group])
            self._slot_mappings[group][num_tokens : descriptor.num_tokens].fill_(PAD_SLOT_ID)
