"""Times of products at start-up are the device's, however slowly the host launches them."""

from __future__ import annotations

import time

import pytest
import torch

from engine.layers.product_times import device_us
from engine.layers.product_trials import MAX_TIMED_ROWS, make_plans
from engine.layers.products import TRIED_ROWS, Product

pytestmark = pytest.mark.gpu


def test_a_slow_host_is_not_timed() -> None:
    x = torch.zeros(1024, device="cuda")

    def launch_slowly() -> None:
        time.sleep(0.5e-3)
        x.add_(1.0)

    def keep_busy() -> None:
        torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]

    launch_slowly()  # loads what it launches, for which the host waits
    short, long = device_us([launch_slowly, keep_busy])
    assert short < 100
    assert 300 < long < 5000


def test_wide_products_get_rows_at_which_they_take_least_time() -> None:
    """Never many more than asked for, where time grows with the rows."""
    weights = [torch.randn(16384, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    (plan,) = make_plans([Product(weights)])
    for rows, count in zip(TRIED_ROWS, plan.counts, strict=False):
        assert count == 0 or count >= rows
        if 128 < rows <= MAX_TIMED_ROWS:
            assert count <= 1.5 * rows
