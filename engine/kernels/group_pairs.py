"""Rows and the experts that were chosen for them, brought into the order of the experts.

A row and one of its experts are a pair: pair i is row i // choices. Pairs of one expert stand together, in their own
order, so that a product reads the expert's weight once for all of them (engine/kernels/grouped_linear.py).

Shapes: expert_ids [num_pairs] int64; order [num_pairs] int32, pairs by expert; ends [num_experts] int32, where each
expert's end in `order`. Grid: experts; each program counts the pairs of those before it, then places its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.dependent_launch import begin, launch_options
from engine.kernels.triton_support import jit, next_power_of_2, tl, wide_tiles_sum_alike

SMALLEST_TILE, LARGEST_TILE = 16, 128  # rows
LARGEST_NARROW_TILE = 32  # one that no device multiplies by another instruction
BLOCK = 1024


@dataclass(frozen=True)
class PairsByExpert:
    """Which pairs are computed together."""

    expert_ids: torch.Tensor  # [num_pairs] int64
    order: torch.Tensor | None = None  # [num_pairs] int32; None: each pair is a tile of its own
    ends: torch.Tensor | None = None  # [num_experts] int32
    tile: int = SMALLEST_TILE  # rows of one


def group_pairs(expert_ids: torch.Tensor, num_experts: int) -> PairsByExpert:
    """expert_ids: [num_rows, choices] int64, dense, distinct in a row. Tiles are low where experts have few pairs."""
    num_rows, _ = expert_ids.shape
    pairs = expert_ids.flatten()
    if num_rows <= 1:
        return PairsByExpert(pairs)
    return PairsByExpert(
        pairs, *sort_pairs(pairs, num_experts), tile_rows(len(pairs), num_experts, pairs.device)
    )


def tile_rows(num_pairs: int, num_experts: int, device: torch.device) -> int:
    """About what an expert has, on average."""
    largest = LARGEST_TILE if wide_tiles_sum_alike(device) else LARGEST_NARROW_TILE
    return min(max(next_power_of_2(num_pairs // num_experts + 1), SMALLEST_TILE), largest)


def sort_pairs_reference(expert_ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    in_order, order = expert_ids.sort(stable=True)
    experts = torch.arange(num_experts, device=expert_ids.device)
    return order.int(), torch.searchsorted(in_order, experts, right=True, out_int32=True)


@jit(do_not_specialize=["num_pairs"])
def _sort_pairs_kernel(
    expert_ids_ptr, order_ptr, ends_ptr, num_pairs, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr
):
    begin(OVERLAPS)
    expert = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    place = 0
    for start in range(0, num_pairs, BLOCK):
        valid = start + lanes < num_pairs
        ids = tl.load(expert_ids_ptr + start + lanes, mask=valid, other=0)
        place += tl.sum((valid & (ids < expert)).to(tl.int32), axis=0)
    for start in range(0, num_pairs, BLOCK):
        valid = start + lanes < num_pairs
        ids = tl.load(expert_ids_ptr + start + lanes, mask=valid, other=0)
        is_own = valid & (ids == expert)
        count = tl.cumsum(is_own.to(tl.int32), axis=0)
        tl.store(order_ptr + place + count - 1, start + lanes, mask=is_own)
        place += tl.sum(is_own.to(tl.int32), axis=0)
    tl.store(ends_ptr + expert, place)


def sort_pairs(expert_ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns order and ends."""
    assert expert_ids.is_contiguous()
    num_pairs = len(expert_ids)
    order = torch.empty(num_pairs, dtype=torch.int32, device=expert_ids.device)
    ends = torch.empty(num_experts, dtype=torch.int32, device=expert_ids.device)
    _sort_pairs_kernel[(num_experts,)](
        expert_ids,
        order,
        ends,
        num_pairs,
        BLOCK=min(max(next_power_of_2(num_pairs), 32), BLOCK),
        num_warps=4,
        **launch_options(expert_ids.device),
    )
    return order, ends
