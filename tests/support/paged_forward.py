"""Runs a model over paged caches with hand-made batches: the worker's job in its simplest form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from engine.attention.backend import AttentionBackend, AttentionContext
from engine.attention.metadata import AttentionInputs, LayerKVCache
from engine.attention.torch_backend import TorchAttentionBackend
from engine.models.base import CausalLM

CPU = torch.device("cpu")


def make_attention_inputs(
    query_lens: Sequence[int],
    num_computed: Sequence[int],
    block_tables: torch.Tensor,
    block_size: int,
    num_groups: int = 1,
) -> AttentionInputs:
    """Inputs of KV groups whose tables are equal. block_tables: [num_reqs, max_blocks] int32."""
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    positions = torch.cat(
        [torch.arange(start, start + count) for start, count in zip(num_computed, query_lens, strict=True)]
    )
    request_of_token = torch.repeat_interleave(torch.arange(len(query_lens)), torch.tensor(query_lens))
    seq_lens = [start + count for start, count in zip(num_computed, query_lens, strict=True)]
    block_ids = block_tables[request_of_token, positions // block_size].to(torch.int64)
    return AttentionInputs(
        query_lens=list(query_lens),
        max_seq_lens=seq_lens,
        query_start_loc=starts.to(torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        positions=positions,
        block_tables=(block_tables,) * num_groups,
        slot_mappings=(block_ids * block_size + positions % block_size,) * num_groups,
        block_size=block_size,
    )


def on_device(inputs: AttentionInputs, device: torch.device) -> AttentionInputs:
    return replace(
        inputs,
        query_start_loc=inputs.query_start_loc.to(device),
        seq_lens=inputs.seq_lens.to(device),
        positions=inputs.positions.to(device),
        block_tables=tuple(table.to(device) for table in inputs.block_tables),
        slot_mappings=tuple(slots.to(device) for slots in inputs.slot_mappings),
    )


class PagedForward:
    """`num_requests` requests over caches of garbage, each with its share of shuffled blocks."""

    def __init__(
        self,
        model: CausalLM,
        *,
        num_requests: int,
        max_tokens: int,
        block_size: int,
        dtype: torch.dtype,
        backend: AttentionBackend | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.model = model
        self.device = device
        self.backend = backend or TorchAttentionBackend()
        self.block_size = block_size
        self.num_computed = [0] * num_requests
        max_blocks = -(-max_tokens // block_size)
        generator = torch.Generator().manual_seed(0)
        num_blocks = num_requests * max_blocks
        blocks = torch.randperm(num_blocks, generator=generator)
        self.block_tables = blocks.view(num_requests, max_blocks).to(torch.int32)
        self.groups = model.kv_groups()
        self.caches: dict[int, LayerKVCache] = {}
        for group in self.groups:
            shape = (num_blocks, block_size, group.num_kv_heads, group.head_size)
            for layer in group.layer_indices:
                # NaN wherever nothing was written: whoever reads it shows it.
                self.caches[layer] = LayerKVCache.of_group(
                    group, partial(torch.full, shape, torch.nan, dtype=dtype, device=device)
                )

    @torch.inference_mode()
    def step(self, tokens: Sequence[tuple[int, Sequence[int]]]) -> list[torch.Tensor]:
        """Compute the next tokens of some requests: (request, token ids). Returns logits [num_tokens,
        vocab] each.
        """
        requests = [request for request, _ in tokens]
        query_lens = [len(ids) for _, ids in tokens]
        inputs = make_attention_inputs(
            query_lens,
            [self.num_computed[request] for request in requests],
            self.block_tables[requests],
            self.block_size,
            len(self.groups),
        )
        inputs = on_device(inputs, self.device)
        context = AttentionContext(self.backend, inputs, self.groups, self.caches)
        input_ids = torch.tensor([token for _, ids in tokens for token in ids], device=self.device)
        logits = self.model.compute_logits(self.model(input_ids, inputs.positions, context))
        for request, count in zip(requests, query_lens, strict=True):
            self.num_computed[request] += count
        return list(torch.split(logits, query_lens))
