"""Exact numerics on a CUDA device, part by part: a row's bits at any number of rows, a token's logits in any chunk."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.geometries import GEOMETRIES, with_layers
from engine.attention.triton_backend import TritonAttentionBackend
from engine.config import ModelConfig
from engine.kernels.choose_experts import Routing
from engine.kernels.skinny_linear import skinny_linear
from engine.layers.exact import make_exact
from engine.layers.exact_products import ExactProducts, shape_of
from engine.layers.expert_router import ExpertRouter
from engine.layers.linear import Linear
from engine.layers.moe import RoutedExperts
from engine.layers.norm import RMSNorm
from engine.layers.product_trials import find_library_rows, tilings_for_few_rows
from engine.layers.products import TRIED_ROWS, Activation, Product
from engine.layers.unnormed import normed
from engine.models.base import CausalLM
from engine.models.loader import load_model
from tests.support.paged_forward import PagedForward
from tests.support.tiny_drafters import shared_workshop
from tests.support.tiny_moe import make_tiny_moe

pytestmark = pytest.mark.gpu
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
GATED, TIMES_FACTOR = Activation("silu", is_gated=True), Activation("gelu_tanh", is_gated=False)
ROW_COUNTS = (1, 2, 5, 8, 16, 17, 24, 33, 64, 65, 100, 128, 200, 256, 300, 777, 1024, 1500, 4096, 5000)
SHAPES = {  # out_features, in_features
    "135M qkv": (960, 576),
    "135M down": (576, 1536),
    "135M gate_up": (3072, 576),
    "8B qkv": (6144, 4096),
    "8B down": (4096, 14336),
    "tiny": (32, 64),
    "ragged": (36, 100),
}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=DTYPE, device=DEVICE)


def make_linear(
    shape: tuple[int, int], *, bias: bool = False, activation: Activation | None = None
) -> Linear:
    layer = Linear(shape[1], [("y", shape[0])], bias=bias, activation=activation, dtype=DTYPE, device=DEVICE)
    layer.weight.copy_(random(*shape, seed=1) * shape[1] ** -0.5)
    if layer.bias is not None:
        layer.bias.copy_(random(shape[0], seed=2))
    make_exact(layer)
    return layer


def assert_rows_are_independent(compute: Callable[[slice], torch.Tensor], num_rows: int) -> None:
    """`compute`: the result of these rows of the input alone. All at once are the oracle."""
    expected = compute(slice(0, num_rows))
    for count in ROW_COUNTS:
        for start in {0, num_rows - count}:
            if start >= 0:
                rows = slice(start, start + count)
                assert torch.equal(compute(rows), expected[rows]), f"{count} rows from {start} on"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_products(shape: tuple[int, int], bias: bool) -> None:
    layer, x = make_linear(shape, bias=bias), random(ROW_COUNTS[-1], shape[1])
    assert_rows_are_independent(lambda rows: layer(x[rows]), len(x))


@pytest.mark.parametrize("shape", [(960, 576), (4096, 14336)], ids=str)
def test_products_are_those_of_our_kernel(shape: tuple[int, int]) -> None:
    layer, x = make_linear(shape), random(300, shape[1])
    for count in (1, 16, 40, 300):
        assert torch.equal(layer(x[:count]), skinny_linear(x[:count], layer.weight))


@pytest.mark.parametrize("shape", [(960, 576), (5120, 2560), (512, 10240)], ids=str)
@pytest.mark.parametrize("index", [0, 1])
def test_our_kernel_does_what_follows_as_the_library_does(index: int, shape: tuple[int, int]) -> None:
    """In each of its tilings for more than 16 rows, where it is the faster one, and for up to 16."""
    x, residual = random(200, shape[1]), random(200, shape[0], seed=3)
    runs: dict[Activation | None, Callable[[Linear, slice], torch.Tensor]] = {
        None: lambda layer, rows: layer.add_to(residual[rows], x[rows]),
        GATED: lambda layer, rows: layer.gated(x[rows]),
        TIMES_FACTOR: lambda layer, rows: layer.activated(x[rows], residual[rows]),
    }
    for activation, run in runs.items():
        layer = make_linear(shape, bias=shape[0] == 960, activation=activation)
        expected = torch.cat([run(layer, slice(start, start + 8)) for start in range(0, 200, 8)])
        assert layer.exact is not None
        plan = layer.exact.plan(layer.weight, layer.bias, activation)
        agreed = find_library_rows(layer.weight, layer.bias)
        by_library = replace(plan, counts=tuple(rows if rows in agreed else 0 for rows in TRIED_ROWS))
        tilings = tilings_for_few_rows(Product([layer.weight], layer.bias, activation))
        by_kernel = replace(plan, counts=(0,) * len(TRIED_ROWS), few=tilings[index])
        for forced in (plan, by_library, by_kernel):
            layer.exact._plans[shape_of(layer.weight, layer.bias, activation)] = forced
            for num_rows in (17, 24, 40, 64, 65, 128, 200):
                got = run(layer, slice(0, num_rows))
                assert torch.equal(got, expected[:num_rows]), (activation, num_rows)


@pytest.mark.parametrize("num_rows", [17, 64, 200])
def test_products_in_a_graph(num_rows: int) -> None:
    """The library may not choose another code there."""
    layer, x = make_linear((4096, 14336)), random(num_rows, 14336)
    expected = layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    graph.replay()
    assert torch.equal(y, expected)


def test_products_with_what_follows_them() -> None:
    """Activation and residual sum, in the kernel for few rows and behind the library for many."""
    silu, gelu = (
        make_linear((3072, 576), activation=Activation(name, is_gated=True)) for name in ("silu", "gelu_tanh")
    )
    x = random(600, 576)
    residual, factors = random(600, 960, seed=3), random(600, 256, seed=4)
    plain, narrow = make_linear((960, 576)), make_linear((256, 576), activation=TIMES_FACTOR)
    norm = RMSNorm(960, 1e-5, dtype=DTYPE, device=DEVICE)
    norm.weight.copy_(random(960, seed=5))
    assert_rows_are_independent(lambda rows: silu.gated(x[rows]), 600)
    assert_rows_are_independent(lambda rows: gelu.gated(x[rows]), 600)
    assert_rows_are_independent(lambda rows: narrow.activated(x[rows], factors[rows]), 600)
    assert_rows_are_independent(lambda rows: plain.add_to(residual[rows], x[rows]), 600)
    assert_rows_are_independent(lambda rows: norm.after(residual[rows], plain, x[rows])[0], 600)
    assert_rows_are_independent(lambda rows: normed(norm.after(residual[rows], plain, x[rows])[1]), 600)


@pytest.mark.parametrize("size", [64, 576, 896, 1024])
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_normed_rows(bias: bool, size: int) -> None:
    """Normed in the product for few rows, before it for many."""
    norm, x = RMSNorm(size, 1e-5, dtype=DTYPE, device=DEVICE), random(600, size)
    norm.weight.copy_(random(size, seed=5))
    layer, gated = make_linear((512, size), bias=bias), make_linear((512, size), bias=bias, activation=GATED)
    assert_rows_are_independent(lambda rows: layer(norm.pending(x[rows])), 600)
    assert_rows_are_independent(lambda rows: gated.gated(norm.pending(x[rows])), 600)
    assert torch.equal(layer(norm.pending(x)), layer(norm(x)))


@pytest.mark.parametrize("shape", [(49152, 576), (70000, 1024)], ids=["small", "of many columns"])
def test_heads(shape: tuple[int, int]) -> None:
    products, x, weight = ExactProducts(), random(700, shape[1]), random(*shape, seed=1)
    assert_rows_are_independent(lambda rows: products.linear(x[rows], weight, None), 700)


@pytest.mark.parametrize("num_groups", [1, 4])
@pytest.mark.parametrize("size", [64, 2048])
def test_experts(size: int, num_groups: int) -> None:
    """A row's pairs each for itself, tiles of 16, 32, 64 and 128 rows, by the number of rows."""
    num_experts, choices, num_rows = 24, 3, 1024
    experts = RoutedExperts(num_experts, size, 96, activation="silu", dtype=DTYPE, device=DEVICE)
    for parameter in experts.parameters():
        parameter.copy_(random(*parameter.shape, seed=1) * parameter.shape[-1] ** -0.5)
    router = ExpertRouter(routing(num_experts, choices, num_groups), size, dtype=DTYPE, device=DEVICE)
    router.weight.copy_(random(num_experts, size, seed=2))
    make_exact(torch.nn.ModuleList((experts, router)))
    x = random(num_rows, size)
    assert_rows_are_independent(lambda rows: torch.cat(router(x[rows]), dim=-1), num_rows)
    assert_rows_are_independent(lambda rows: experts(x[rows], *router(x[rows])), num_rows)


def routing(num_experts: int, choices: int, num_groups: int) -> Routing:
    return Routing(
        num_experts=num_experts,
        top_k=choices,
        num_groups=num_groups,
        num_chosen_groups=1 if num_groups == 1 else 2,
        scoring="softmax",
        normalises=True,
    )


def dummy_model(folder: Path, geometry: str, num_layers: int) -> Path:
    config = {"torch_dtype": "bfloat16", "eos_token_id": 2, **with_layers(GEOMETRIES[geometry], num_layers)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(params=["llama", "gemma4_ple", "gemma4_moe", "glm4_moe", "glm4_moe_norm", "smollm2-135m"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    """Tiny ones, and the geometry of a real one with random weights."""
    if request.param in GEOMETRIES:
        path, load_format = dummy_model(tmp_path_factory.mktemp("dummy"), request.param, 4), "dummy"
    elif request.param.startswith("glm4_moe"):
        path, load_format = make_tiny_moe(tmp_path_factory.mktemp("moe"), request.param), "auto"
    else:
        path, load_format = shared_workshop(tmp_path_factory, request.param).target_path, "auto"
    config = ModelConfig.model_validate(
        {"model": str(path), "load_format": load_format, "dtype": "bfloat16", "seed": 1}
    )
    model = load_model(config, device=DEVICE).model
    make_exact(model)
    return model


def test_logits_do_not_depend_on_chunks_and_neighbours(model: CausalLM) -> None:
    """Whole prompts one by one are the oracle; then all of them together, in chunks of sizes that differ, and at last
    token by token."""
    generator = torch.Generator().manual_seed(0)
    lengths = (300, 140, 33, 17, 5, 259)
    prompts = [torch.randint(3, 300, (length,), generator=generator).tolist() for length in lengths]

    def forward() -> PagedForward:
        return PagedForward(
            model,
            num_requests=len(prompts),
            max_tokens=320,
            block_size=16,
            dtype=DTYPE,
            backend=TritonAttentionBackend(),
            device=DEVICE,
        )

    alone = forward()
    expected = [alone.step([(index, prompt)])[0] for index, prompt in enumerate(prompts)]
    for chunks in ([300] * 6, [64, 7, 16, 17, 1, 33], [16] * 6, [5, 1, 1, 4, 2, 1], [1] * 6):
        together = forward()
        logits: list[list[torch.Tensor]] = [[] for _ in prompts]
        while any(done < len(prompt) for done, prompt in zip(together.num_computed, prompts, strict=True)):
            batch = [
                (index, prompt[done : done + chunk])
                for index, (done, prompt, chunk) in enumerate(
                    zip(together.num_computed, prompts, chunks, strict=True)
                )
                if done < len(prompt)
            ]
            for (index, _), rows in zip(batch, together.step(batch), strict=True):
                logits[index].append(rows)
        for parts, whole in zip(logits, expected, strict=True):
            assert torch.equal(torch.cat(parts), whole), chunks
