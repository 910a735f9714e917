"""Routed experts alone on a GPU, for `python -m benchmarks.gpu_kernels --experts`: by each way of computing them.

Experts are chosen at random. GB/s are the bytes of the weights of those that were chosen, over the time of a layer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from triton.runtime.errors import OutOfResources

from benchmarks.geometries import GEOMETRIES
from engine.kernels.gated_activation import ActivationName, gated_activation
from engine.kernels.group_pairs import PairsByExpert, group_pairs, sort_pairs
from engine.kernels.grouped_linear import grouped_linear
from engine.kernels.skinny_linear import Tiling
from engine.kernels.weighted_sum import weighted_sum
from engine.layers.moe import RoutedExperts

ROWS = (1, 5, 8, 16, 32, 64, 256, 1024, 4096)
LAYERS = ("deepseek-v2-lite", "gemma-4-26b-a4b")
COPIES = 2  # of a layer's weights, each several times the L2 cache
Timer = Callable[[Callable[[Any], Any], list[Any]], float]
# By the rows of a tile: columns, steps of K, loads under way, warps.
TILINGS = {
    16: [
        (16, 128, 6, 2),
        (16, 256, 4, 2),
        (16, 512, 3, 2),
        (32, 128, 4, 2),
        (32, 128, 4, 4),
        (32, 256, 3, 2),
    ],
    32: [(32, 64, 6, 2), (32, 128, 4, 2), (64, 64, 4, 2)],
    64: [(32, 64, 4, 2), (64, 64, 3, 2), (128, 64, 3, 2), (64, 64, 4, 4), (128, 64, 3, 4)],
    128: [(64, 64, 3, 4), (128, 64, 3, 4), (128, 64, 3, 8), (128, 64, 4, 8)],
}


def layer_shape(name: str) -> dict[str, int]:
    """num_experts, hidden_size, intermediate_size, top_k."""
    config = GEOMETRIES[name]
    return {
        "num_experts": config.get("n_routed_experts") or config["num_experts"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["moe_intermediate_size"],
        "top_k": config.get("num_experts_per_tok") or config["top_k_experts"],
    }


def tune_experts(name: str, num_rows: int, time_us: Timer) -> Iterator[dict[str, Any]]:
    """Each of the two products by all tilings, fastest first, and which of them have other bits than the chosen one."""
    shape = layer_shape(name)
    num_experts, hidden, intermediate = (
        shape[key] for key in ("num_experts", "hidden_size", "intermediate_size")
    )
    half: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    chosen = torch.rand(num_rows, num_experts, device="cuda").topk(shape["top_k"]).indices
    expert_ids = chosen.flatten()
    activations: dict[str, ActivationName | None] = {"gate_up": "silu", "down": None}
    for product, activation in activations.items():
        rows = num_rows if activation else len(expert_ids)
        columns, in_features = (2 * intermediate, hidden) if activation else (hidden, intermediate)
        x = torch.randn(rows, in_features, **half)
        weights = [torch.randn(num_experts, columns, in_features, **half) * 0.02 for _ in range(COPIES)]
        sort_us = time_us(partial(_sort, expert_ids, num_experts), weights)
        grouped = group_pairs(chosen, num_experts)
        expected = grouped_linear(x, weights[0], grouped, activation=activation)
        times: dict[str, float] = {
            "chosen": time_us(partial(_product, x, grouped, activation, None), weights)
        }
        other_bits = []
        for pairs, tiling in _forms(expert_ids, num_experts):
            key = f"{'sorted' if pairs.ends is not None else 'unsorted'} {pairs.tile}: {tiling}"
            run = partial(_product, x, pairs, activation, tiling)
            try:
                times[key] = time_us(run, weights)
            except OutOfResources:  # of shared memory
                continue
            if not torch.equal(run(weights[0]), expected):
                other_bits.append(key)
        ranking = sorted(times.items(), key=lambda item: item[1])
        row = {
            "layer": name,
            "rows": num_rows,
            "product": product,
            "sort_us": sort_us,
            "other_bits": other_bits,
        }
        row["fastest_us"] = {key: round(value, 1) for key, value in ranking[:6]} | {"chosen": times["chosen"]}
        print(json.dumps(row), flush=True)
        yield row


def _sort(expert_ids: torch.Tensor, num_experts: int, weight: torch.Tensor) -> None:
    sort_pairs(expert_ids, num_experts)


def _product(
    x: torch.Tensor,
    pairs: PairsByExpert,
    activation: ActivationName | None,
    tiling: Tiling | None,
    weight: torch.Tensor,
) -> torch.Tensor:
    return grouped_linear(x, weight, pairs, activation=activation, tiling=tiling)


def _forms(expert_ids: torch.Tensor, num_experts: int) -> Iterator[tuple[PairsByExpert, Tiling]]:
    per_expert = len(expert_ids) / num_experts
    in_order = PairsByExpert(expert_ids, *sort_pairs(expert_ids, num_experts))
    for tile, tilings in TILINGS.items():
        if tile == 16 or tile / 8 <= per_expert:
            for tiling in tilings if tile > 16 or per_expert < 64 else ():
                yield replace(in_order, tile=tile), Tiling(*tiling)
    if len(expert_ids) <= 256:
        for tiling in TILINGS[16]:
            yield PairsByExpert(expert_ids), Tiling(*tiling)


def measure_experts(name: str, num_rows: int, time_us: Timer) -> dict[str, Any]:
    """By our kernels, and by the library's grouped product of sorted rows."""
    shape = layer_shape(name)
    top_k = shape.pop("top_k")
    device = torch.device("cuda")
    copies = [
        RoutedExperts(**shape, activation="silu", dtype=torch.bfloat16, device=device) for _ in range(COPIES)
    ]
    for layer in copies:
        for parameter in layer.parameters():
            parameter.normal_(std=0.02)
    x = torch.randn(num_rows, shape["hidden_size"], dtype=torch.bfloat16, device=device)
    choices = torch.rand(num_rows, shape["num_experts"], device=device).topk(top_k)
    weights, expert_ids = choices.values.softmax(dim=-1), choices.indices.contiguous()
    num_bytes = (
        len(set(expert_ids.flatten().tolist())) * 2 * 3 * shape["hidden_size"] * shape["intermediate_size"]
    )
    us = time_us(lambda layer: layer(x, expert_ids, weights), copies)
    row = {"layer": name, "rows": num_rows, "us": us, "gb_per_s": num_bytes / us / 1e3}
    row["library_us"] = time_us(lambda layer: _library(layer, x, expert_ids, weights), copies)
    print(json.dumps(row), flush=True)
    return row


def _library(
    layer: RoutedExperts, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    in_order, order = expert_ids.flatten().sort()
    experts = torch.arange(layer.num_experts, device=x.device)
    ends = torch.searchsorted(in_order, experts, right=True, out_int32=True)
    rows = x[order // expert_ids.shape[1]]
    hidden = gated_activation(F.grouped_mm(rows, layer.gate_up.transpose(1, 2), offs=ends), "silu")
    outputs = F.grouped_mm(hidden, layer.down.transpose(1, 2), offs=ends)
    outputs = torch.empty_like(outputs).index_copy_(0, order, outputs)
    return weighted_sum(outputs.view(*expert_ids.shape, -1), weights)
