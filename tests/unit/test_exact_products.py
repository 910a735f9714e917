"""Which products the library may compute in exact numerics: a made-up library that agrees at some numbers of rows."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from engine.config import ModelConfig, NumericsName, engine_config
from engine.errors import ConfigError
from engine.kernels.skinny_linear import Tiling
from engine.layers import exact_products, product_trials, products
from engine.layers.exact import inexact_layers, make_exact
from engine.layers.exact_products import ExactProducts
from engine.layers.expert_router import ExpertRouter
from engine.layers.linear import Linear
from engine.layers.product_trials import (
    GATED_MEDIUM,
    GATED_NARROW,
    GATED_WIDE,
    MEDIUM,
    NARROW,
    WIDE,
    choose_counts,
    find_library_rows,
    tilings_for_few_rows,
)
from engine.layers.products import TRIED_ROWS, Activation, Product, ShapePlan
from engine.models.loader import load_model
from engine.worker.numerics import set_numerics
from tests.support.engine_harness import scripted_model
from tests.support.tiny_moe import TinyMoEKind, make_tiny_moe

CPU = torch.device("cpu")


class Library:
    """Its result is another one, in the last bit of one element, unless it agrees at this number of rows."""

    def __init__(self, agrees_at: Collection[int]) -> None:
        self._agrees_at = agrees_at
        self.asked: list[int] = []

    def product(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.asked.append(len(x))
        y = ours(x, weight, bias)
        if len(x) not in self._agrees_at:
            y[-1, -1] = torch.nextafter(y[-1, -1], torch.tensor(torch.inf, dtype=y.dtype))
        return y if out is None else out.copy_(y)


def ours(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: None = None,
    factor: None = None,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """Row by row, so that nothing depends on their number; with tiles of 128 columns another sum."""
    if not len(x):
        raise AssertionError("a launch of no programs")
    y = torch.cat([F.linear(row[None], weight, bias) for row in x])
    return y * (1 + 2**-52) if tiling is not None and tiling.block_n == 128 else y


TRIED = (1, 2, 3, 4, 6, 8, 12, 16, 20)


@pytest.fixture
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    """Every launch takes as long as any other, ours much longer."""
    made = Library(request.param)
    for module in (exact_products, product_trials, products):
        monkeypatch.setattr(module, "library_product", made.product)
        monkeypatch.setattr(module, "skinny_linear", ours)
        monkeypatch.setattr(module, "TRIED_ROWS", TRIED, raising=False)
    monkeypatch.setattr(product_trials, "time_library", lambda product, counts: dict.fromkeys(counts, 1.0))
    monkeypatch.setattr(
        product_trials,
        "time_kernel",
        lambda product, wanted: [3.5 if tiling == NARROW else 4.0 for _, tiling in wanted],
    )
    return made


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


@pytest.mark.parametrize("library", [(), (1,), (2, 6, 16), (3, 4, 12), TRIED], indirect=True, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_library_gets_only_numbers_of_rows_at_which_it_agrees(library: Library, has_bias: bool) -> None:
    weight, bias = random(16, 24), random(16) if has_bias else None
    found = find_library_rows(weight, bias)
    assert found == tuple(rows for rows in TRIED if rows in library._agrees_at)
    exact = ExactProducts()
    exact.try_shapes([Product([weight], bias)])
    library.asked.clear()
    for num_rows in range(50):
        x = random(num_rows, 24)
        y = exact.linear(x, weight, bias)
        assert y.shape == (num_rows, 16)
        if num_rows:
            assert torch.equal(y, ours(x, weight, bias))
    assert set(library.asked) <= set(found)
    assert (max(found, default=0) in library.asked) == bool(found)


@pytest.mark.parametrize(
    ("library_us", "kernel_us", "expected"),
    [
        # the next number of rows, for a gain within the noise too
        ({4: 10.0, 8: 10.0, 16: 9.7}, {}, (4, 4, 4, 4, 8, 8, 16, 16)),
        # one that takes less time for all that it holds
        ({4: 10.0, 8: 13.0, 16: 9.0}, {}, (16,) * 8),
        # our kernel where it is faster
        ({4: 10.0, 8: 10.0, 16: 30.0}, {16: 20.0}, (4, 4, 4, 4, 8, 8, 0, 0)),
        ({20: 10.0}, {16: 11.0, 64: 9.0}, (20,) * 8 + (0,)),
        # without times, the next one
        ({}, {}, (4, 4, 4, 4, 8, 8, 16, 16)),
    ],
)
def test_what_takes_least_time_is_chosen(
    library_us: dict[int, float],
    kernel_us: dict[int, float],
    expected: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(product_trials, "TRIED_ROWS", TRIED)
    assert choose_counts(tuple(library_us) or (4, 8, 16), library_us, kernel_us) == expected


def test_our_kernel_takes_longer_the_more_tiles_it_has() -> None:
    counts = dict(
        zip(TRIED_ROWS, choose_counts((256,), {256: 10.0}, {64: 7.0, 128: 9.0, 192: 11.0}), strict=False)
    )
    assert (counts[64], counts[72], counts[128], counts[136], counts[256]) == (0, 0, 0, 256, 256)


def test_rows_that_need_a_copy_of_their_input_cost_it() -> None:
    """There is room for 128 rows behind one, not for 136."""
    assert choose_counts((64, 136), {64: 20.0, 136: 18.0}, {})[0] == 64
    assert choose_counts((64, 136), {64: 20.0, 136: 16.0}, {})[0] == 136
    assert choose_counts((64, 128), {64: 20.0, 128: 18.0}, {})[0] == 128


@pytest.mark.parametrize("library", [(2, 6)], indirect=True, ids=str)
@pytest.mark.parametrize("excluded", [NARROW, MEDIUM])
def test_few_rows_get_the_fastest_tiling_that_has_our_bits(
    excluded: Tiling, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_kernel(
        self: Product, x: torch.Tensor, weight: torch.Tensor, tiling: Tiling | None, factor: None
    ) -> torch.Tensor:
        return ours(x, weight) * (1 + 2**-52 * (tiling == excluded))

    (plan,) = product_trials.make_plans([Product([random(16, 24)])])
    assert plan.few == NARROW
    monkeypatch.setattr(Product, "by_kernel", by_kernel)
    (plan,) = product_trials.make_plans([Product([random(16, 24)])])
    assert plan.few == (MEDIUM if excluded == NARROW else NARROW)


def test_tilings_follow_the_width_of_the_result_and_fit_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def tilings(num_columns: int, *, is_gated: bool = False) -> list[Tiling]:
        weight = torch.empty(num_columns * (2 if is_gated else 1), 16)
        return tilings_for_few_rows(
            Product([weight], None, Activation("silu", is_gated=True) if is_gated else None)
        )

    assert tilings(4096) == [MEDIUM, NARROW]
    assert tilings(5376) == [MEDIUM, WIDE]
    assert tilings(4096, is_gated=True) == [GATED_MEDIUM, GATED_NARROW]
    assert tilings(5376, is_gated=True) == [GATED_MEDIUM, GATED_WIDE]
    monkeypatch.setattr(product_trials, "shared_memory_bytes", lambda _: 101_376)  # Ada
    assert tilings(5376) == [replace(MEDIUM, num_stages=2), replace(WIDE, num_stages=3)]
    assert tilings(5376, is_gated=True) == [GATED_MEDIUM, replace(GATED_WIDE, num_stages=2)]


def test_a_plan_says_whose_a_product_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "TRIED_ROWS", TRIED)
    monkeypatch.setattr(products, "MIN_PART", 12)
    plan = ShapePlan((2, 2, 0, 4, 0, 0, 12, 16))  # of 1, 2, 3, 4, 6, 8, 12, 16
    assert [rows for rows in range(1, 30) if plan.is_by_kernel(rows)] == [3, 5, 6, 7, 8]
    assert [plan.padded(rows) for rows in (1, 4, 9, 16)] == [2, 4, 12, 16]
    too_small = ShapePlan((2, 2, 0, 4))
    assert [rows for rows in range(1, 8) if too_small.is_by_kernel(rows)] == [3, 5, 6, 7]


@pytest.mark.parametrize("library", [TRIED], indirect=True, ids=str)
def test_many_rows_are_cut_into_parts_of_the_largest_number(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "MIN_PART", 8)
    exact, weight = ExactProducts(), random(16, 24)
    exact._plans[16, 24, False, None] = ShapePlan((8, 8, 8, 8, 8, 8, 12))
    exact.linear(random(29, 24), weight, None)
    assert library.asked == [12, 12, 8]


@pytest.mark.parametrize("library", [TRIED], indirect=True, ids=str)
def test_the_library_gets_no_shape_whose_rows_start_anywhere(library: Library) -> None:
    assert find_library_rows(random(12, 24), None) == ()
    assert find_library_rows(random(16, 20), None) == ()
    assert not library.asked


@pytest.mark.parametrize("library", [(2, 6)], indirect=True, ids=str)
def test_a_model_is_switched_over_with_all_its_linear_layers(library: Library) -> None:
    layers = [
        Linear(24, [("a", 8), ("b", 8)], bias=bias, dtype=torch.float64, device=CPU) for bias in (True, False)
    ]
    for layer in layers:
        layer.weight.copy_(random(16, 24))
        if layer.bias is not None:
            layer.bias.copy_(random(16))
    exact = make_exact(torch.nn.Sequential(*layers))
    assert set(exact._plans) == {(16, 24, True, None), (16, 24, False, None)}
    for plan in exact._plans.values():
        assert plan.counts == (2, 2, 6, 6, 6)
        assert plan.few is not None
        assert plan.many is None  # it sums in another way
    for layer in layers:
        x = random(5, 24)
        expected = ours(x, layer.weight, layer.bias)
        assert torch.equal(layer(x), expected)
        assert torch.equal(layer.add_to(expected, x), expected + expected)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("glm4_moe_norm", []),
        ("glm4_moe", []),
        ("deepseek_v2", ["latent attention"]),
        ("deepseek_v3", ["latent attention"]),
    ],
)
def test_what_has_no_exact_form_is_named(kind: TinyMoEKind, expected: list[str], tmp_path: Path) -> None:
    config = ModelConfig(model=str(make_tiny_moe(tmp_path / "model", kind)))
    assert inexact_layers(load_model(config, device=CPU).model) == expected


@pytest.mark.parametrize("numerics", ["auto", "exact", "fast"])
def test_routers_are_switched_over(
    numerics: NumericsName, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Experts have one form only."""
    monkeypatch.setattr("engine.worker.numerics._obstacle", lambda *_: None)  # as on a device
    monkeypatch.setattr(ExactProducts, "try_shapes", lambda *_: None)
    path = make_tiny_moe(tmp_path / "model", "glm4_moe_norm")
    loaded = load_model(ModelConfig(model=str(path)), device=CPU)
    monkeypatch.setattr(loaded.model, "compute_logits", lambda _: None)
    config = engine_config(model={"model": str(path)}, numerics=numerics)
    assert set_numerics(config, loaded, CPU) == ("fast" if numerics == "fast" else "exact")
    routers = [layer for layer in loaded.model.modules() if isinstance(layer, ExpertRouter)]
    assert [router.is_exact for router in routers] == [numerics != "fast"] * 2


def test_exact_numerics_need_a_device_that_has_them() -> None:
    config = engine_config(model={"model": "m"}, numerics="exact")
    with pytest.raises(ConfigError, match="numerics: got 'exact' on cpu, expected a CUDA device"):
        set_numerics(config, scripted_model(), CPU)
    assert set_numerics(engine_config(model={"model": "m"}), scripted_model(), CPU) == "fast"
