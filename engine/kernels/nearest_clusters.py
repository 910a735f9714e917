"""The clusters with the largest scores, by ascending index; of equal scores the lower index is chosen.

Without sorting: the key (token_order.py) of the last one is found by bisection. NaN counts as +inf, so that there is
always a choice.

Shapes: scores [n, num_clusters] float, dense; result [n, num_chosen] int64; 1 <= num_chosen <= num_clusters. Grid:
rows.
"""

from __future__ import annotations

import torch

from engine.kernels.dependent_launch import begin, launch_options
from engine.kernels.key_search import last_kept
from engine.kernels.token_order import id_bits, key_of, load_tokens
from engine.kernels.triton_support import has_kernel, jit, next_power_of_2, tl


def nearest_clusters(scores: torch.Tensor, num_chosen: int) -> torch.Tensor:
    """See the module docstring."""
    return (nearest_clusters_triton if has_kernel(scores) else nearest_clusters_reference)(scores, num_chosen)


def nearest_clusters_reference(scores: torch.Tensor, num_chosen: int) -> torch.Tensor:
    scores = torch.where(scores.isnan(), float("inf"), scores)
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :num_chosen].sort(dim=-1).values


@jit
def _nearest_clusters_kernel(
    scores_ptr,
    clusters_ptr,
    NUM_CLUSTERS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    GROUPS: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    indices = tl.arange(0, BLOCK)
    is_there = indices < NUM_CLUSTERS
    values, ids = load_tokens(scores_ptr + row * NUM_CLUSTERS, scores_ptr, indices, NUM_CLUSTERS, False)
    keys = tl.where(is_there, key_of(values, ids, ID_BITS), -(1 << 62))
    # At least as many groups as clusters are chosen: the last chosen one is not below all their largest.
    largest = tl.max(tl.reshape(keys, [GROUPS, BLOCK // GROUPS]), axis=1)
    low, high = tl.min(largest, axis=0), tl.max(largest, axis=0) + 1
    needed = tl.full([], NUM_CHOSEN, tl.int32)
    edge = last_kept(keys, is_there.to(tl.int32), needed, low, high, 0, True)
    is_chosen = is_there & (keys >= edge)
    places = tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
    tl.store(clusters_ptr + row * NUM_CHOSEN + places, indices.to(tl.int64), mask=is_chosen)


def nearest_clusters_triton(scores: torch.Tensor, num_chosen: int) -> torch.Tensor:
    num_rows, num_clusters = scores.shape
    assert scores.is_contiguous()
    clusters = torch.empty(num_rows, num_chosen, dtype=torch.int64, device=scores.device)
    if num_rows:
        _nearest_clusters_kernel[(num_rows,)](
            scores,
            clusters,
            NUM_CLUSTERS=num_clusters,
            NUM_CHOSEN=num_chosen,
            GROUPS=next_power_of_2(num_chosen),
            ID_BITS=id_bits(num_clusters),
            BLOCK=next_power_of_2(num_clusters),
            **launch_options(scores.device),
        )
    return clusters
