"""Products whose rows have the same bits whatever their number: the library's where it agrees with our kernel.

engine/kernels/skinny_linear.py sums a row's products in one order at any number of rows, but is slower than the library
when they are many. The library chooses its code by the shape, and most of what it chooses sums in that same order; some
splits it. So each shape of weights is tried once, at start-up: at which numbers of rows is the library's result ours,
bit for bit? Only these are given to it, with padding up to the next one; what is left computes our kernel. That has
faster tiles for many rows too, which multiply by another instruction (wgmma, on Hopper); they are tried likewise.

The choice depends on the shape alone, so a process gives a row the same bits in every batch, and where the library
agrees less, on another device or in another version of it, steps are slower and nothing else.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import torch

from engine.kernels.skinny_linear import MAX_ROWS, Tiling, fitted, skinny_linear
from engine.kernels.spare_rows import with_spare_rows
from engine.kernels.triton_support import shared_memory_bytes

# Every number up to 64, then steps of an eighth: so many rows more cost nothing, and trials take time at start-up.
TRIED_ROWS = (*range(1, 65), *range(72, 257, 8), *range(288, 1025, 32), *range(1152, 4097, 128))
MAX_TRIED_ELEMENTS = 1 << 27  # of a result; wider products are tried with fewer rows
MIN_COMPARED = 1 << 18  # elements; another order of a sum shows in one of some thousand rounded results
MAX_TRIALS = 16  # inputs of one number of rows
CHEAP_ROWS = 128  # padding up to here costs little: reading the weights takes longer than the product
# Beyond, what a product may have of padding: times its rows, where one tile of our kernel would do, and where not.
MAX_PADDING, MAX_PADDING_OF_MANY = 2, 4

# Of our kernel for 17 to 64 rows (`benchmarks.gpu_kernels --product down --rows 64 --tune` on an H200): while each
# multiprocessor has but one strip of W to read, narrow and deep ones. And for more rows.
NARROW, WIDE, FOR_MANY_ROWS = Tiling(32, 256, 4, 4), Tiling(64, 128, 6, 4), Tiling(128, 64, 4, 4)
NUM_MULTIPROCESSORS = 132  # of an H200

_Shape = tuple[int, int, bool]  # out_features, in_features, has a bias


@dataclass(frozen=True)
class ShapePlan:
    """What may compute the products with weights of one shape, beside our kernel as it is."""

    library_rows: tuple[int, ...]  # ascending
    few: Tiling | None = None  # of our kernel, for more than 16 rows up to one tile
    many: Tiling | None = None  # for more

    def tiling(self, num_rows: int) -> Tiling | None:
        return None if num_rows <= 16 else self.few if num_rows <= MAX_ROWS else self.many


class ExactProducts:
    """Of one model. What is known of each shape."""

    def __init__(self) -> None:
        self.plans: dict[_Shape, ShapePlan] = {}

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x W^T + b. x: [num_rows, in_features]; weight: [out_features, in_features]. Tries a new shape first."""
        plan = self.try_shape(weight, bias)
        counts = plan.library_rows
        x = x.contiguous()
        num_rows, largest = len(x), counts[-1] if counts else 0
        if not num_rows:
            return x.new_empty(0, len(weight))
        if num_rows > largest:
            return self._in_parts(x, weight, bias, plan)
        count = counts[bisect_left(counts, num_rows)]
        most = num_rows * (MAX_PADDING if num_rows <= MAX_ROWS else MAX_PADDING_OF_MANY)
        if count > max(CHEAP_ROWS, most):
            return skinny_linear(x, weight, bias, tiling=plan.tiling(num_rows))
        if count > num_rows:
            x = with_spare_rows(x, count)
        return library_product(x, weight, bias)[:num_rows]

    def try_shape(self, weight: torch.Tensor, bias: torch.Tensor | None) -> ShapePlan:
        """Syncs the first time that the shape comes."""
        shape = (weight.shape[0], weight.shape[1], bias is not None)
        if shape not in self.plans:
            self.plans[shape] = make_plan(weight, bias)
        return self.plans[shape]

    def _in_parts(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plan: ShapePlan
    ) -> torch.Tensor:
        """More rows than the library may have at once."""
        part = plan.library_rows[-1] if plan.library_rows else 0
        if part < CHEAP_ROWS:
            return skinny_linear(x, weight, bias, tiling=plan.tiling(len(x)))
        y = x.new_empty(len(x), len(weight))
        end = len(x) // part * part
        for start in range(0, end, part):
            library_product(x[start : start + part], weight, bias, out=y[start : start + part])
        if end < len(x):
            y[end:] = self.linear(x[end:], weight, bias)
        return y


def library_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x W^T + b by the library, by the same calls whoever asks."""
    if out is None:
        out = x.new_empty(len(x), len(weight))
    if bias is None:
        return torch.mm(x, weight.T, out=out)
    return torch.addmm(bias, x, weight.T, out=out)


def make_plan(weight: torch.Tensor, bias: torch.Tensor | None) -> ShapePlan:
    library_rows = find_library_rows(weight, bias)
    if set(library_rows) >= {rows for rows in TRIED_ROWS if 16 < rows <= 1024}:
        return ShapePlan(library_rows)  # our kernel is not needed
    few, many = (
        tiling if _has_our_bits(weight, bias, tiling, num_rows) else None
        for num_rows, tiling in fast_tilings(len(weight), shared_memory_bytes(weight.device)).items()
    )
    return ShapePlan(library_rows, few, many)


def fast_tilings(out_features: int, shared_bytes: int) -> dict[int, Tiling]:
    """By the rows they are tried with: up to one tile, and more."""
    few = NARROW if out_features <= NARROW.block_n * NUM_MULTIPROCESSORS else WIDE
    tilings = {MAX_ROWS: few, 4 * MAX_ROWS: FOR_MANY_ROWS}
    return {rows: fitted(tiling, MAX_ROWS, False, shared_bytes) for rows, tiling in tilings.items()}


def _has_our_bits(weight: torch.Tensor, bias: torch.Tensor | None, tiling: Tiling, num_rows: int) -> bool:
    x = _inputs(min(MAX_TRIALS * num_rows, MAX_TRIED_ELEMENTS // len(weight)), weight)
    parts = [skinny_linear(part, weight, bias, tiling=tiling) for part in torch.split(x, num_rows)]
    return torch.equal(torch.cat(parts), skinny_linear(x, weight, bias))  # sync: at start-up


def _inputs(num_rows: int, weight: torch.Tensor) -> torch.Tensor:
    """[num_rows, in_features], random, the same ones every time."""
    generator = torch.Generator(weight.device).manual_seed(0)
    shape = (num_rows, weight.shape[1])
    return torch.randn(shape, generator=generator, dtype=weight.dtype, device=weight.device)


def find_library_rows(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[int, ...]:
    """Of the tried numbers of rows those at which the library's product with this weight has our kernel's bits."""
    out_features, in_features = weight.shape
    if (
        out_features % 8 or in_features % 8
    ):  # parts of a result must start where any code of the library can store
        return ()
    tried = [rows for rows in TRIED_ROWS if rows * out_features <= MAX_TRIED_ELEMENTS]
    x = _inputs(tried[-1], weight)
    expected = skinny_linear(x, weight, bias)
    is_equal = torch.empty(len(tried), dtype=torch.bool, device=weight.device)
    for index, rows in enumerate(tried):
        trials = min(-(-MIN_COMPARED // (rows * out_features)), tried[-1] // rows, MAX_TRIALS)
        starts = range(0, trials * rows, rows)
        parts = [library_product(x[start : start + rows], weight, bias) for start in starts]
        torch.all(torch.cat(parts) == expected[: trials * rows], out=is_equal[index])
    return tuple(
        rows for rows, equal in zip(tried, is_equal.tolist(), strict=True) if equal
    )  # sync: start-up
