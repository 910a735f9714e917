"""How long products take, by the device's clock: for the choice at start-up (product_trials.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle

import torch

from engine.kernels.skinny_linear import MAX_ROWS, Tiling
from engine.layers.products import Product

NUM_LAUNCHES, NUM_ROUNDS = 2, 2  # of a timing
QUEUE_CYCLES = 20_000_000  # of the device, while the host queues what is timed: 10 ms

Run = Callable[[], object]


def random_rows(num_rows: int, weight: torch.Tensor) -> torch.Tensor:
    """[num_rows, in_features], the same ones every time."""
    generator = torch.Generator(weight.device).manual_seed(0)
    shape = (num_rows, weight.shape[1])
    return torch.randn(shape, generator=generator, dtype=weight.dtype, device=weight.device)


def time_library(product: Product, row_counts: Sequence[int]) -> dict[int, float]:
    """By number of rows, ascending: microseconds."""
    if not row_counts:
        return {}
    x, turn = random_rows(row_counts[-1], product.weight), cycle(product.weights)
    y = x.new_empty(len(x), len(product.weight))

    def run(rows: int) -> Run:
        return lambda: product.by_library(x[:rows], next(turn), y[:rows])

    return dict(zip(row_counts, _times([run(rows) for rows in row_counts]), strict=True))


def time_kernel(product: Product, wanted: Sequence[tuple[int, Tiling | None]]) -> list[float]:
    """With so many rows and that tiling: microseconds."""
    x = random_rows(max(rows for rows, _ in wanted), product.weight)
    factors, turn = product.factors(x), cycle(product.weights)

    def run(rows: int, tiling: Tiling | None) -> Run:
        factor = None if factors is None else factors[:rows]
        return lambda: product.by_kernel(x[:rows], next(turn), tiling, factor)

    return _times([run(*pair) for pair in wanted])


def tile_rows(num_rows: int) -> int:
    """What our kernel is timed with for so many. A tile of 32 takes as long as one of 64: it reads the weights."""
    return 16 if num_rows <= 16 else -(-num_rows // MAX_ROWS) * MAX_ROWS


def _times(runs: Sequence[Run]) -> list[float]:
    for load_now in runs:
        load_now()
    return device_us(runs)


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
