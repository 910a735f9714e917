"""Routed experts alone on a GPU, for `python -m benchmarks.gpu_kernels --experts`: by each way of computing them.

Experts are chosen at random. GB/s are the bytes of the weights of those that were chosen, over the time of a layer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.geometries import GEOMETRIES
from engine.layers.moe import RoutedExperts

ROWS = (1, 5, 16, 17, 64, 256, 1024, 4096)
DEEPSEEK = GEOMETRIES["deepseek-v2-lite"]
LAYERS: dict[str, dict[str, int]] = {
    "deepseek-v2-lite": {
        "num_experts": DEEPSEEK["n_routed_experts"],
        "hidden_size": DEEPSEEK["hidden_size"],
        "intermediate_size": DEEPSEEK["moe_intermediate_size"],
        "top_k": DEEPSEEK["num_experts_per_tok"],
    },
    "gemma-4-26b-a4b": {"num_experts": 128, "hidden_size": 2816, "intermediate_size": 704, "top_k": 8},
}
COPIES = 2  # of a layer's weights, each several times the L2 cache
Timer = Callable[[Callable[[Any], Any], list[RoutedExperts]], float]


def measure_experts(name: str, num_rows: int, time_us: Timer) -> dict[str, Any]:
    """As fast and as exact numerics compute them: the latter by one kernel at any number of rows."""
    shape = dict(LAYERS[name])
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
    row: dict[str, Any] = {"layer": name, "rows": num_rows}
    for numerics in ("fast", "exact"):
        for layer in copies:
            layer.is_exact = numerics == "exact"
        row[f"{numerics}_us"] = time_us(lambda layer: layer(x, expert_ids, weights), copies)
        row[f"{numerics}_gb_per_s"] = num_bytes / row[f"{numerics}_us"] / 1e3
    print(json.dumps(row), flush=True)
    return row
