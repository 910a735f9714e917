"""The target's forward pass as CUDA graphs: embedding to the last hidden states in one replay.

For the steps that are no uniform decode (engine/worker/step_graphs.py): those with prompt chunks in them, or with
requests that want more of the sampler. The batch is ragged and copied into static buffers.
"""

from __future__ import annotations

import torch

from engine.attention.backend import AttentionContext
from engine.attention.metadata import NeededTokens
from engine.batch.input_batch import InputBatch
from engine.batch.static_inputs import StaticAttentionInputs
from engine.cudagraph import BatchDescriptor, BatchLimits, CaptureQueue, CudaGraphManager
from engine.worker.target import EagerTarget, TargetStates


class TargetGraphManager(CudaGraphManager[BatchDescriptor]):
    """Static buffers at the largest shape; smaller shapes are their leading parts."""

    def __init__(
        self,
        eager: EagerTarget,
        *,
        limits: BatchLimits,
        block_size: int,
        max_blocks: int,
        device: torch.device,
        captures: CaptureQueue,
    ) -> None:
        super().__init__(captures)
        self._eager = eager
        self._limits = limits
        self._input_ids = torch.zeros(limits.num_tokens, dtype=torch.int64, device=device)
        self._attention = StaticAttentionInputs(
            num_groups=len(eager.groups),
            block_size=block_size,
            max_blocks=max_blocks,
            max_num_reqs=limits.num_reqs,
            max_num_tokens=limits.num_tokens,
            max_context=limits.max_seq_len,
            device=device,
        )
        self._outputs: dict[BatchDescriptor, tuple[torch.Tensor, dict[int, torch.Tensor]]] = {}

    def forward(self, batch: InputBatch, needed: NeededTokens | None) -> TargetStates:
        """By a replay where a graph holds the batch."""
        inputs, num_tokens = batch.attention, len(batch.input_ids)
        shape = self._limits.describe(inputs.query_lens, inputs.max_seq_lens, not batch.is_decode_only)
        descriptor = None if shape is None else self.dispatch(shape)
        if descriptor is None:
            return self._eager.forward(batch, needed)
        self._input_ids[:num_tokens].copy_(batch.input_ids)
        self._attention.fill(inputs, num_tokens=descriptor.num_tokens, num_reqs=descriptor.num_reqs)
        self.replay(descriptor)
        hidden_states, aux_hidden_states = self._outputs[descriptor]
        hidden_states = hidden_states[:num_tokens]
        return TargetStates(
            hidden_states=hidden_states,
            aux_hidden_states={layer: aux[:num_tokens] for layer, aux in aux_hidden_states.items()},
            logits=self._eager.model.compute_logits(batch.of_logits_rows(hidden_states)),
            kind="full",
            num_padding_tokens=descriptor.num_tokens - num_tokens,
        )

    def prepare(self, descriptor: BatchDescriptor) -> None:
        self._attention.clear()

    def run(self, descriptor: BatchDescriptor) -> None:
        eager = self._eager
        attention = self._attention.view(
            num_tokens=descriptor.num_tokens,
            num_reqs=descriptor.num_reqs,
            max_query_len=descriptor.max_query_len,
        )
        context = AttentionContext(eager.backend, attention, eager.groups, eager.caches, eager.aux_layers)
        hidden_states = eager.model(self._input_ids[: descriptor.num_tokens], attention.positions, context)
        self._outputs[descriptor] = hidden_states, dict(context.aux_hidden_states)
