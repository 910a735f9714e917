"""Tries a shape of weights at start-up: where the bits of the library are ours, and what is fastest there.

engine/kernels/skinny_linear.py sums a row's products in one order at any number of rows, but is slower than the library
when they are many. The library chooses its code by the shape, and most of what it chooses sums in that same order; some
splits it. What it chooses is not always its fastest either: on an H200, 31B's gate and up take 226 us with 240 rows and
166 with 256 (`python -m benchmarks.gpu_numerics --geometry gemma-4-31b --only products --rows 240 256`). So of the
numbers of rows at which it agrees, bit for bit, each step gets the one that takes least time, with padding, or our
kernel. That has faster tiles for more than 16 rows too, which multiply by another instruction (wgmma, on Hopper); they
are tried likewise.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress

import torch

from engine.kernels.compile_ahead import compile_ahead
from engine.kernels.dependent_launch import can_overlap
from engine.kernels.skinny_linear import MAX_ROWS, Tiling, fitted, skinny_linear
from engine.kernels.spare_rows import room_for
from engine.kernels.triton_support import shared_memory_bytes
from engine.layers.product_times import random_rows, tile_rows, time_kernel, time_library
from engine.layers.products import TRIED_ROWS, Product, ShapePlan, library_product

MAX_TIMED_ROWS = 1024  # beyond, padding to the next number is a small part
MAX_TRIED_ELEMENTS = 1 << 27  # of a result; wider products are tried with fewer rows
MIN_COMPARED = 1 << 18  # elements; another order of a sum shows in one of some thousand rounded results
MAX_TRIALS = 16  # inputs of one number of rows

NOISE = 0.04  # of a time; for less, no row is added
COPY_US = 3.0  # where rows are added to an input that has no room for them
GAIN_US = 1.0  # that the next kernel is taken to begin earlier behind our product; no timing shows it

# Of our kernel, for 17 to 64 rows (`benchmarks.gpu_kernels --rows 64 --tune` on an H200): the narrower, the fewer
# multiprocessors are without a strip of W; with a gate there are two strips.
NARROW, MEDIUM, WIDE = Tiling(16, 256, 4, 4), Tiling(32, 256, 4, 4), Tiling(64, 128, 6, 4)
GATED_NARROW, GATED_MEDIUM, GATED_WIDE = Tiling(16, 128, 4, 4), Tiling(32, 64, 4, 4), Tiling(64, 128, 4, 4)
MAX_NARROW_COLUMNS = 4096
# And for more rows, where only their times count.
FOR_MANY_ROWS, GATED_FOR_MANY_ROWS = Tiling(128, 64, 4, 4), Tiling(64, 64, 4, 4)
MANY_ROWS = 4 * MAX_ROWS  # that the latter are tried with
LARGER_ROWS = {rows for rows in TRIED_ROWS if MAX_ROWS < rows <= MAX_TIMED_ROWS}  # than a tile's


def make_plans(products: Sequence[Product]) -> list[ShapePlan]:
    """Of each. Syncs."""
    compile_ahead(partial(_launch_first, products))
    agreed = [find_library_rows(product.weight, product.bias) for product in products]
    try_many = [
        bool(LARGER_ROWS.intersection(_tried_with(product.weight)).difference(rows))
        for product, rows in zip(products, agreed, strict=True)
    ]
    compile_ahead(partial(_launch_many_rows, list(compress(products, try_many))))
    return [_make_plan(*known) for known in zip(products, agreed, try_many, strict=True)]


def _launch_first(products: Sequence[Product]) -> None:
    """What all trials launch."""
    for product in products:
        weight = product.weight
        rows = weight.new_zeros(_tried_with(weight)[-1], weight.shape[1])
        skinny_linear(rows, weight, product.bias)
        product.by_kernel(rows[:16], weight, None, product.factors(rows[:16]))
        for tiling in tilings_for_few_rows(product):
            product.by_kernel(rows[:MAX_ROWS], weight, tiling, product.factors(rows[:MAX_ROWS]))


def _launch_many_rows(products: Sequence[Product]) -> None:
    for product in products:
        rows = product.weight.new_zeros(MANY_ROWS, product.weight.shape[1])
        product.by_kernel(rows, product.weight, _tiling_for_many_rows(product), product.factors(rows))


def _make_plan(product: Product, agreed: Sequence[int], tries_many: bool) -> ShapePlan:
    """agreed: numbers of rows, ascending, of the library. tries_many: our kernel, with more rows than a tile's."""
    few = _fastest(product, _with_our_bits(product, tilings_for_few_rows(product), MAX_ROWS))
    many = None
    if tries_many:
        many = next(iter(_with_our_bits(product, [_tiling_for_many_rows(product)], MANY_ROWS)), None)
    plan = ShapePlan((), few, many)
    if not agreed:
        return plan
    max_rows = MAX_TIMED_ROWS if tries_many else MAX_ROWS
    timed = sorted({tile_rows(rows) for rows in _tried_with(product.weight) if rows <= max_rows})
    times = time_kernel(product, [(rows, plan.tiling(rows)) for rows in timed])
    gain = GAIN_US if can_overlap(product.weight.device) else 0.0
    kernel_us = {rows: us - gain for rows, us in zip(timed, times, strict=True)}
    timed_library = [rows for i, rows in enumerate(agreed) if not i or agreed[i - 1] < MAX_TIMED_ROWS]
    library_us = time_library(product, timed_library)
    return replace(plan, counts=choose_counts(agreed, library_us, kernel_us))


def choose_counts(
    agreed: Sequence[int], library_us: Mapping[int, float], kernel_us: Mapping[int, float]
) -> tuple[int, ...]:
    """`ShapePlan.counts`. agreed: ascending; what has no time is taken where nothing that is large enough has one."""
    counts: list[int] = []
    for rows in TRIED_ROWS[: bisect_right(TRIED_ROWS, agreed[-1] if agreed else 0)]:
        costs = {
            count: us + (COPY_US if count > room_for(rows) else 0.0)
            for count, us in library_us.items()
            if count >= rows
        }
        if not costs:
            counts.append(next(count for count in agreed if count >= rows))
            continue
        least = min(costs.values())
        is_ours = kernel_us.get(tile_rows(rows), math.inf) < least
        counts.append(
            0 if is_ours else min(count for count, us in costs.items() if us <= least * (1 + NOISE))
        )
    return tuple(counts)


def find_library_rows(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[int, ...]:
    """Of the tried numbers of rows those at which the library's product with this weight has our kernel's bits."""
    out_features, in_features = weight.shape
    if out_features % 8 or in_features % 8:  # parts of a result start where not all of its code can store
        return ()
    tried = _tried_with(weight)
    x = random_rows(tried[-1], weight)
    expected = skinny_linear(x, weight, bias)
    is_equal = torch.empty(len(tried), dtype=torch.bool, device=weight.device)
    for index, rows in enumerate(tried):
        trials = min(-(-MIN_COMPARED // (rows * out_features)), tried[-1] // rows, MAX_TRIALS)
        starts = range(0, trials * rows, rows)
        parts = [library_product(x[start : start + rows], weight, bias) for start in starts]
        torch.all(torch.cat(parts) == expected[: trials * rows], out=is_equal[index])
    agrees = is_equal.tolist()  # sync: start-up
    return tuple(rows for rows, equal in zip(tried, agrees, strict=True) if equal)


def _tried_with(weight: torch.Tensor) -> list[int]:
    return [rows for rows in TRIED_ROWS if rows * len(weight) <= MAX_TRIED_ELEMENTS]


def tilings_for_few_rows(product: Product) -> list[Tiling]:
    """Of which the fastest one that has our bits is taken. Fitted to the device."""
    if product.is_gated:
        tilings = [GATED_MEDIUM, GATED_NARROW if product.num_columns <= MAX_NARROW_COLUMNS else GATED_WIDE]
    else:
        tilings = [MEDIUM, NARROW if product.num_columns <= MAX_NARROW_COLUMNS else WIDE]
    return [_fitted(tiling, product) for tiling in tilings]


def _tiling_for_many_rows(product: Product) -> Tiling:
    return _fitted(GATED_FOR_MANY_ROWS if product.is_gated else FOR_MANY_ROWS, product)


def _fitted(tiling: Tiling, product: Product) -> Tiling:
    return fitted(tiling, MAX_ROWS, product.is_gated, shared_memory_bytes(product.weight.device))


def _with_our_bits(product: Product, tilings: Sequence[Tiling], num_rows: int) -> list[Tiling]:
    """Those that sum as the kernel for 16 rows does."""
    weight = product.weight
    x = random_rows(min(MAX_TRIALS * num_rows, MAX_TRIED_ELEMENTS // len(weight)), weight)

    def in_parts(part: int, tiling: Tiling | None) -> torch.Tensor:
        parts = torch.split(x, part)
        return torch.cat([product.by_kernel(rows, weight, tiling, product.factors(rows)) for rows in parts])

    expected = in_parts(16, None)
    # sync: at start-up
    return [tiling for tiling in tilings if torch.equal(in_parts(num_rows, tiling), expected)]


def _fastest(product: Product, tilings: Sequence[Tiling]) -> Tiling | None:
    if len(tilings) < 2:
        return next(iter(tilings), None)
    times = time_kernel(product, [(MAX_ROWS, tiling) for tiling in tilings])
    return tilings[times.index(min(times))]
