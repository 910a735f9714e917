"""Attention over a latent cache (MLA; DeepSeek-V2, arXiv:2405.04434, section 2.1): two forms of the same result.

Cached is one row a token for all heads: the compressed keys and values, then the rotated part of the keys.
- Absorbed: the query moves into the latent space, where every head attends to the rows as they are. Nothing is
  expanded, so it suits requests with few query tokens; any backend computes it, as one KV head.
- Expanded: a request's cached rows become keys and values of every head, once for all its query tokens.

Which requests of a step take which form is decided here, by their number of query tokens. This file knows no weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention.metadata import AttentionInputs
from engine.device import to_device

MIN_EXPANDED_QUERY_LEN = 128
"""Query tokens of a request from which on it is expanded. By multiplications a head, in the geometry of DeepSeek-V2 and
V3: 131,072 to expand a cached row, then 320 instead of 1,088 for each query token: even at 171; the plain attention of
the expanded form is the faster code."""


class LatentQuery(NamedTuple):
    """Both parts of each query head."""

    plain: torch.Tensor  # [num_tokens, num_heads, plain_size]
    rotated: torch.Tensor  # [num_tokens, num_heads, rope_size]


class LatentForms(Protocol):
    """The weights of a layer between heads and latent rows, [num_rows, latent_size + rope_size]."""

    def absorb(self, query: LatentQuery) -> torch.Tensor:
        """The query as it meets latent rows: [num_tokens, num_heads, latent_size + rope_size]."""

    def release(self, mixed: torch.Tensor) -> torch.Tensor:
        """From sums of latents [num_tokens, num_heads, latent_size] to [num_tokens, num_heads, value_size]."""

    def expand(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [num_rows, num_heads, plain_size + rope_size] and values [num_rows, num_heads, value_size]."""


@dataclass(frozen=True)
class ExpandedRequest:
    """A request with many query tokens, and where its keys are."""

    tokens: slice  # of the step
    slots: torch.Tensor  # [num_keys] int64
    mask: torch.Tensor | None  # [query_len, num_keys] bool, True: is seen; None: plain causal

    def attend(
        self, query: LatentQuery, cache: torch.Tensor, forms: LatentForms, scale: float
    ) -> torch.Tensor:
        """query: of the step; cache: [num_blocks, block_size, 1, latent_size + rope_size]. Returns [query_len,
        num_heads, value_size]."""
        key, value = forms.expand(cache.flatten(0, 2).index_select(0, self.slots))
        own = torch.cat((query.plain[self.tokens], query.rotated[self.tokens]), dim=-1)
        output = F.scaled_dot_product_attention(
            own.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            attn_mask=self.mask,
            is_causal=self.mask is None,
            scale=scale,
        )
        return output[0].transpose(0, 1)


@dataclass(frozen=True)
class LatentPlan:
    """The requests of a step by form."""

    expanded: list[ExpandedRequest]
    absorbed: tuple[torch.Tensor, list[Any]] | None
    """The tokens of all others, [n] int64, and the metadata of these as a step of their own, by KV group."""
    order: torch.Tensor  # [num_tokens] int64
    """Where a token's result is, when those of expanded requests stand first and all others behind them."""


def plan_latent(
    inputs: AttentionInputs, group: int, prepare: Callable[[AttentionInputs], list[Any]]
) -> LatentPlan | None:
    """Of the KV group with this index; None when nothing is to be expanded, or who has how
    many tokens is not known on the host. `prepare`: the backend's."""
    query_lens, device = inputs.query_lens, inputs.positions.device
    long = [request for request, query_len in enumerate(query_lens) if query_len >= MIN_EXPANDED_QUERY_LEN]
    if inputs.is_captured or not long:
        return None
    short = [request for request, query_len in enumerate(query_lens) if query_len < MIN_EXPANDED_QUERY_LEN]
    starts = [0, *accumulate(query_lens)]
    tokens = {request: np.arange(starts[request], starts[request + 1]) for request in range(len(query_lens))}
    order = np.argsort(np.concatenate([tokens[request] for request in (*long, *short)]))
    absorbed = None
    if short:
        short_tokens = to_device(np.concatenate([tokens[request] for request in short]), device)
        index = to_device(np.array(short, dtype=np.int64), device)
        absorbed = short_tokens, prepare(inputs.select(short, index, short_tokens))
    expanded = [_expand_request(inputs, group, request, starts[request]) for request in long]
    return LatentPlan(expanded, absorbed, to_device(order, device))


def _expand_request(inputs: AttentionInputs, group: int, request: int, start: int) -> ExpandedRequest:
    """Keys behind the request's last one (its length on the host is an upper bound) read that one, and are masked.

    Example, 5 keys at most, 4 in truth, block size 2, block table [7, 3, 9]: slots 14, 15, 6, 7, 7.
    """
    query_len, num_keys = inputs.query_lens[request], inputs.max_seq_lens[request]
    tokens = slice(start, start + query_len)
    last_key = (inputs.seq_lens[request].to(torch.int64) - 1).clamp(min=0)  # [] int64
    keys = torch.arange(num_keys, device=last_key.device)
    stored = torch.minimum(keys, last_key)
    table = inputs.block_tables[group][request]
    blocks = (stored // inputs.block_size).clamp(max=len(table) - 1)
    slots = table[blocks].to(torch.int64) * inputs.block_size + stored % inputs.block_size
    mask = None
    if num_keys != query_len:
        mask = keys[None] <= torch.minimum(inputs.positions[tokens], last_key)[:, None]
    return ExpandedRequest(tokens, slots.clamp(min=0), mask)
