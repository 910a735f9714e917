"""Tries a shape of weights at start-up: where the bits of the library are ours, and what is fastest there.

engine/kernels/skinny_linear.py sums a row's products in one order at any number of rows, but is slower than the library
when they are many. The library chooses its code by the shape, and most of what it chooses sums in that same order; some
splits it. What it chooses is not always its fastest either: on an H200, 31B's gate and up take 234 us with 240 rows and
165 with 256 (`python -m benchmarks.gpu_numerics --geometry gemma-4-31b --only products --rows 240 256`). So of the
numbers of rows at which it agrees, bit for bit, each step gets the one that takes least time, with padding, or our
kernel. That has faster tiles for many rows too, which multiply by another instruction (wgmma, on Hopper); they are
tried likewise.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch

from engine.kernels.compile_ahead import compile_ahead
from engine.kernels.skinny_linear import MAX_ROWS, Tiling, fitted, skinny_linear
from engine.kernels.spare_rows import room_for
from engine.kernels.triton_support import shared_memory_bytes

# What the library may be asked for: so many rows more cost little, and trials take time at start-up.
TRIED_ROWS = (1, 2, 4, *range(8, 257, 8), *range(288, 1025, 32), *range(1152, 4097, 128))
MAX_TIMED_ROWS = 1024  # beyond, padding to the next number is a small part
MAX_TRIED_ELEMENTS = 1 << 27  # of a result; wider products are tried with fewer rows
MIN_COMPARED = 1 << 18  # elements; another order of a sum shows in one of some thousand rounded results
MAX_TRIALS = 16  # inputs of one number of rows

NUM_LAUNCHES, NUM_ROUNDS = 2, 2  # of a timing
QUEUE_CYCLES = 20_000_000  # of the device, while the host queues what is timed: 10 ms
NOISE = 0.04  # of a time; for less, no row is added
COPY_US = 3.0  # where rows are added to an input that has no room for them

# Of our kernel for 17 to 64 rows (`benchmarks.gpu_kernels --product down --rows 64 --tune` on an H200): while each
# multiprocessor has but one strip of W to read, narrow and deep ones. And for more rows.
NARROW, WIDE, FOR_MANY_ROWS = Tiling(32, 256, 4, 4), Tiling(64, 128, 6, 4), Tiling(128, 64, 4, 4)
NUM_MULTIPROCESSORS = 132  # of an H200

Run = Callable[[], object]


@dataclass(frozen=True)
class ShapePlan:
    """What computes the products with weights of one shape."""

    counts: tuple[int, ...]  # for up to TRIED_ROWS[i] rows: of the library, so many; 0: our kernel
    few: Tiling | None = None  # of our kernel, for more than 16 rows up to one tile
    many: Tiling | None = None  # for more

    def tiling(self, num_rows: int) -> Tiling | None:
        return None if num_rows <= 16 else self.few if num_rows <= MAX_ROWS else self.many


def library_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x W^T + b by the library, by the same calls whoever asks."""
    if out is None:
        out = x.new_empty(len(x), len(weight))
    if bias is None:
        return torch.mm(x, weight.T, out=out)
    return torch.addmm(bias, x, weight.T, out=out)


def make_plan(weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> ShapePlan:
    """Of weights [out_features, in_features] of one shape: the more, the less of them a cache holds. Syncs."""
    weight = weights[0]
    agreed = find_library_rows(weight, bias)
    few = many = None
    kernel_us: dict[int, float] = {}
    if not set(agreed) >= {rows for rows in TRIED_ROWS if 16 < rows <= MAX_TIMED_ROWS}:
        tilings = fast_tilings(len(weight), shared_memory_bytes(weight.device))
        compile_ahead(partial(_run_kernels, weight, bias, {16: None, **tilings}))
        few, many = (
            tiling if _has_our_bits(weight, bias, tiling, num_rows) else None
            for num_rows, tiling in tilings.items()
        )
        kernel_us = _time_kernel(weights, bias, ShapePlan((), few, many)) if agreed else {}
    return ShapePlan(choose_counts(agreed, _time_library(weights, bias, agreed), kernel_us), few, many)


def compile_trials(shapes: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    """What trials of these weights, with their biases, launch first: of all of them at once."""

    def run() -> None:
        for weight, bias in shapes:
            _run_kernels(weight, bias, {_tried_with(weight)[-1]: None})

    compile_ahead(run)


def _run_kernels(
    weight: torch.Tensor, bias: torch.Tensor | None, tilings: Mapping[int, Tiling | None]
) -> None:
    """By number of rows."""
    for num_rows, tiling in tilings.items():
        skinny_linear(weight.new_zeros(num_rows, weight.shape[1]), weight, bias, tiling=tiling)


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
        is_ours = kernel_us.get(_tile_rows(rows), math.inf) < least
        counts.append(
            0 if is_ours else min(count for count, us in costs.items() if us <= least * (1 + NOISE))
        )
    return tuple(counts)


def fast_tilings(out_features: int, shared_bytes: int) -> dict[int, Tiling]:
    """By the rows they are tried with: up to one tile, and more."""
    few = NARROW if out_features <= NARROW.block_n * NUM_MULTIPROCESSORS else WIDE
    tilings = {MAX_ROWS: few, 4 * MAX_ROWS: FOR_MANY_ROWS}
    return {rows: fitted(tiling, MAX_ROWS, False, shared_bytes) for rows, tiling in tilings.items()}


def find_library_rows(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[int, ...]:
    """Of the tried numbers of rows those at which the library's product with this weight has our kernel's bits."""
    out_features, in_features = weight.shape
    if out_features % 8 or in_features % 8:  # parts of a result start where not all of its code can store
        return ()
    tried = _tried_with(weight)
    x = _inputs(tried[-1], weight)
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


def _has_our_bits(weight: torch.Tensor, bias: torch.Tensor | None, tiling: Tiling, num_rows: int) -> bool:
    x = _inputs(min(MAX_TRIALS * num_rows, MAX_TRIED_ELEMENTS // len(weight)), weight)
    parts = [skinny_linear(part, weight, bias, tiling=tiling) for part in torch.split(x, num_rows)]
    return torch.equal(torch.cat(parts), skinny_linear(x, weight, bias))  # sync: at start-up


def _inputs(num_rows: int, weight: torch.Tensor) -> torch.Tensor:
    """[num_rows, in_features], random, the same ones every time."""
    generator = torch.Generator(weight.device).manual_seed(0)
    shape = (num_rows, weight.shape[1])
    return torch.randn(shape, generator=generator, dtype=weight.dtype, device=weight.device)


def _time_library(
    weights: Sequence[torch.Tensor], bias: torch.Tensor | None, agreed: Sequence[int]
) -> dict[int, float]:
    """By number of rows, microseconds; of the agreed ones up to the first that holds MAX_TIMED_ROWS."""
    timed = [rows for i, rows in enumerate(agreed) if not i or agreed[i - 1] < MAX_TIMED_ROWS]
    if not timed:
        return {}
    x, turn = _inputs(timed[-1], weights[0]), cycle(weights)
    y = x.new_empty(len(x), len(weights[0]))

    def run(rows: int) -> Run:
        return lambda: library_product(x[:rows], next(turn), bias, out=y[:rows])

    return dict(zip(timed, device_us([run(rows) for rows in timed]), strict=True))


def _time_kernel(
    weights: Sequence[torch.Tensor], bias: torch.Tensor | None, plan: ShapePlan
) -> dict[int, float]:
    """By rows of its tiles, microseconds."""
    timed = sorted({_tile_rows(rows) for rows in _tried_with(weights[0]) if rows <= MAX_TIMED_ROWS})
    x, turn = _inputs(timed[-1], weights[0]), cycle(weights)

    def run(rows: int) -> Run:
        return lambda: skinny_linear(x[:rows], next(turn), bias, tiling=plan.tiling(rows))

    runs = [run(rows) for rows in timed]
    for compile_now in runs:
        compile_now()
    return dict(zip(timed, device_us(runs), strict=True))


def _tile_rows(rows: int) -> int:
    """What our kernel is timed with for so many. A tile of 32 takes as long as one of 64: it reads the weights."""
    return 16 if rows <= 16 else -(-rows // MAX_ROWS) * MAX_ROWS


def device_us(runs: Sequence[Run]) -> list[float]:
    """Of one launch of each, the best of the rounds. The device waits until all are queued: no time is the host's."""
    torch.cuda._sleep(QUEUE_CYCLES)  # type: ignore[no-untyped-call]
    rounds = [[_timed(run) for run in runs] for _ in range(NUM_ROUNDS)]
    torch.cuda.synchronize()
    times = ([start.elapsed_time(end) * 1e3 / NUM_LAUNCHES for start, end in pairs] for pairs in rounds)
    return [min(times_of_run) for times_of_run in zip(*times, strict=True)]


def _timed(run: Run) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(NUM_LAUNCHES):
        run()
    end.record()
    return start, end
