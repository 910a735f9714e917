"""Plans of exact products with our kernel itself, on CPUs interpreted: whatever follows a product, its trials run, and
what they choose has the bits of few rows. Times are made up; the library's are where a device is.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from engine.kernels.gated_activation import activate_times_triton
from engine.kernels.skinny_linear import skinny_linear
from engine.layers import exact_products, product_times, product_trials, products
from engine.layers.exact_products import ExactProducts
from engine.layers.products import Activation, Product

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16
NUM_COLUMNS, IN_FEATURES = 32, 48
TRIED = (1, 16, 24, 64, 72, 80)


def by_kernel_of_any_size(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """A library that agrees but at the most rows, so that our kernel is tried with many."""
    y = skinny_linear(x, weight, bias)
    if len(x) == TRIED[-1]:
        y += 1.0
    return y if out is None else out.copy_(y)


@pytest.fixture(params=["library", "kernel"])
def faster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for module in (exact_products, product_trials, products):
        monkeypatch.setattr(module, "library_product", by_kernel_of_any_size)
        monkeypatch.setattr(module, "TRIED_ROWS", TRIED, raising=False)
    monkeypatch.setattr(product_trials, "LARGER_ROWS", {72, 80})
    monkeypatch.setattr(product_trials, "MANY_ROWS", 72)
    monkeypatch.setattr(product_trials, "MAX_TRIALS", 1)

    def made_up(runs: Sequence[product_times.Run]) -> list[float]:
        for run in runs:
            run()
        # The library's are those of all numbers of rows at which it agrees, ours fewer.
        is_library = len(runs) == len(TRIED) - 1
        return [10.0 if is_library == (request.param == "library") else 20.0] * len(runs)

    monkeypatch.setattr(product_times, "device_us", made_up)
    name: str = request.param
    return name


def behind(plain: torch.Tensor, activation: Activation | None) -> torch.Tensor:
    """What follows, by a kernel of its own; a factor is all ones."""
    if activation is None:
        return plain
    gate, factor = plain.chunk(2, dim=-1) if activation.is_gated else (plain, torch.ones_like(plain))
    return activate_times_triton(gate, factor, activation.name)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows of padding hold anything, also no numbers
@pytest.mark.parametrize(
    ("activation", "has_bias"),
    [
        (None, True),
        (Activation("silu", is_gated=True), True),
        (Activation("gelu_tanh", is_gated=False), False),
    ],
    ids=["nothing", "gated", "factor"],
)
def test_what_a_plan_chooses_has_the_bits_of_few_rows(
    activation: Activation | None, has_bias: bool, faster: str
) -> None:
    num_rows = NUM_COLUMNS * (2 if activation is not None and activation.is_gated else 1)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, DTYPE)

    weight, bias = random(num_rows, IN_FEATURES) / 8, random(num_rows) if has_bias else None
    exact, product = ExactProducts(), Product([weight], bias, activation)
    exact.try_shapes([product])
    plan = exact.plan(weight, bias, activation)
    assert plan.few is not None
    assert plan.many is not None
    chosen = {rows: plan.is_by_kernel(rows) for rows in (17, 64, 70)}
    assert chosen == dict.fromkeys(chosen, faster == "kernel")
    x = random(70, IN_FEATURES)
    few = torch.cat([product.by_kernel(part, weight, None, product.factors(part)) for part in x.split(5)])
    plain = torch.cat([skinny_linear(part, weight, bias) for part in x.split(5)])
    assert torch.equal(few, behind(plain, activation))
    for rows in chosen:
        part = x[:rows]
        ours = product.by_kernel(part, weight, plan.tiling(rows), product.factors(part))
        assert torch.equal(ours, few[:rows]), rows
        assert torch.equal(exact.linear(part, weight, bias, activation), plain[:rows]), rows
