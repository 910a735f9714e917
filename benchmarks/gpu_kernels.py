"""Kernels alone on a GPU: products of few rows, the library's against ours, and attention of decodes, by their tiling.

python -m benchmarks.gpu_kernels [--geometry llama-3.1-8b] [--rows 1 8 16 64] [--tune] [--output FILE]
python -m benchmarks.gpu_kernels --attention [--tune]
python -m benchmarks.gpu_kernels --sampling
python -m benchmarks.gpu_kernels --experts [--layer gemma-4-26b-a4b] [--tune]

Each figure is a captured sequence of launches over different weights or caches, more of them than the L2 cache holds,
replayed five times; the best replay counts. GB/s are the bytes of the weight, or of keys and values, over the time.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.geometries import GEOMETRIES
from benchmarks.gpu_attention import HEADS, measure_attention, works
from benchmarks.gpu_engine import write_report
from benchmarks.gpu_experts import LAYERS, measure_experts, tune_experts
from benchmarks.gpu_experts import ROWS as EXPERT_ROWS
from benchmarks.gpu_sampling import ROWS, VOCAB_SIZES, measure_sampling
from engine.kernels.gated_activation import ActivationName, gated_activation
from engine.kernels.resident_linear import MAX_NORMED_FEATURES, resident_linear
from engine.kernels.rms_norm import NormForm, rms_norm
from engine.kernels.skinny_linear import Tiling, row_tile, skinny_linear, stage_bytes
from engine.kernels.triton_support import shared_memory_bytes

BYTES_IN_TURN = 400 << 20  # of weights, several times the L2 cache
MAX_STRIP_BYTES = 200 << 10  # of W, as a program of the resident kernel holds it
RESIDENT_FORMS = list(itertools.product((16, 32), (1, 2, 4)))  # columns of a program, warps
TILINGS = [
    Tiling(block_n, block_k, stages, warps)
    for block_n, block_k, stages, warps in itertools.product(
        (16, 32, 64), (64, 128, 256, 512), (2, 3, 4, 6), (2, 4)
    )
    if 8 << 10 <= block_n * block_k * 2 * stages <= 100 << 10
]


def products_of(geometry: str) -> dict[str, tuple[int, int, bool]]:
    """(out_features, in_features, gated) of a layer's products, and of the head."""
    config = GEOMETRIES[geometry]
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    head_size = config.get("head_dim", hidden // config["num_attention_heads"])
    query = config["num_attention_heads"] * head_size
    return {
        "qkv": (query + 2 * config["num_key_value_heads"] * head_size, hidden, False),
        "output": (hidden, query, False),
        "gate_up": (2 * intermediate, hidden, True),
        "down": (hidden, intermediate, False),
        "head": (config["vocab_size"], hidden, False),
    }


def time_us(run: Callable[[Any], Any], weights: Sequence[Any]) -> float:
    """Of one launch, microseconds."""
    run(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            run(weight)
    times = []
    for _ in range(5):
        start, end = _event(), _event()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) * 1e3 / len(weights))
    return min(times)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def measure(geometry: str, name: str, num_rows: int, tilings: Sequence[Tiling]) -> dict[str, Any]:
    out_features, in_features, is_gated = products_of(geometry)[name]
    num_bytes = out_features * in_features * 2
    count = max(min(BYTES_IN_TURN // num_bytes, 200), 8)
    weights = [
        torch.randn(out_features, in_features, device="cuda", dtype=torch.bfloat16) for _ in range(count)
    ]
    x = torch.randn(num_rows, in_features, device="cuda", dtype=torch.bfloat16)
    activation: ActivationName | None = "silu" if is_gated else None

    def library(weight: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, weight)
        return gated_activation(y, "silu") if is_gated else y

    def with_tiling(tiling: Tiling | None) -> float:
        return time_us(lambda weight: skinny_linear(x, weight, activation=activation, tiling=tiling), weights)

    shared_bytes = shared_memory_bytes(x.device)
    ours = {
        tiling: with_tiling(tiling)
        for tiling in tilings
        if tiling.num_stages * stage_bytes(tiling, row_tile(num_rows), is_gated) <= shared_bytes
    }
    best = min(ours, key=lambda tiling: ours[tiling], default=None)
    chosen = with_tiling(None)
    return {
        "geometry": geometry,
        "product": name,
        "rows": num_rows,
        "library_us": time_us(library, weights),
        "chosen_us": chosen,
        "chosen_gb_per_s": num_bytes / chosen / 1e3,
        "best_us": ours[best] if best else None,
        "best_tiling": str(best) if best else None,
    }


def measure_resident(geometry: str, name: str, *, tunes: bool) -> dict[str, Any]:
    """The kernel whose programs hold their strip of W, alone and with the norm before it; and what it replaces."""
    out_features, in_features, is_gated = products_of(geometry)[name]
    count = max(min(BYTES_IN_TURN // (out_features * in_features * 2), 200), 8)
    half: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    weights = [torch.randn(out_features, in_features, **half) for _ in range(count)]
    x, norm = torch.randn(1, in_features, **half), torch.randn(in_features, **half)
    form = NormForm(1e-5, rounds_first=True)
    activation: ActivationName | None = "silu" if is_gated else None
    figures: dict[str, Any] = {"geometry": geometry, "product": name, "rows": 1, "kernel": "resident"}
    figures["skinny_us"] = time_us(partial(skinny_linear, x, activation=activation), weights)
    figures["norm_then_skinny_us"] = time_us(
        lambda weight: skinny_linear(rms_norm(x, norm, form), weight, activation=activation), weights
    )
    for block_n, num_warps in ((16, None), *(RESIDENT_FORMS if tunes else ())):
        shape: dict[str, Any] = {"block_n": block_n, "num_warps": num_warps, "activation": activation}
        if block_n * in_features * (4 if is_gated else 2) > MAX_STRIP_BYTES:
            continue
        key = f"{block_n} columns, {num_warps or 'chosen'} warps"
        figures[f"{key}: us"] = time_us(partial(resident_linear, x, **shape), weights)
        if in_features <= MAX_NORMED_FEATURES:
            run = partial(resident_linear, x, norm=(norm, form), **shape)
            figures[f"{key}, normed: us"] = time_us(run, weights)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--geometry", nargs="+", default=list(GEOMETRIES), choices=list(GEOMETRIES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 16, 64])
    parser.add_argument("--attention", action="store_true")
    parser.add_argument("--heads", nargs="+", default=list(HEADS), choices=list(HEADS), help="of --attention")
    parser.add_argument("--sampling", action="store_true")
    parser.add_argument("--experts", action="store_true", help="routed ones")
    parser.add_argument("--layer", nargs="+", default=list(LAYERS), choices=list(LAYERS), help="of --experts")
    parser.add_argument("--product", nargs="+", default=["qkv", "output", "gate_up", "down"])
    parser.add_argument(
        "--tune", action="store_true", help="measure every tiling or form, not only the chosen one"
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if arguments.sampling:
        for num_rows, vocab_size in itertools.product(ROWS, VOCAB_SIZES):
            rows += measure_sampling(num_rows, vocab_size, time_us)
    elif arguments.experts:
        for layer, num_rows in itertools.product(arguments.layer, EXPERT_ROWS):
            rows.append(measure_experts(layer, num_rows, time_us))
            if arguments.tune:
                rows += tune_experts(layer, num_rows, time_us)
    elif arguments.attention:
        for work in works(arguments.heads):
            rows += measure_attention(work, time_us, tunes=arguments.tune)
    else:
        names = itertools.product(arguments.geometry, arguments.product, arguments.rows)
        for geometry, name, num_rows in names:
            rows.append(measure(geometry, name, num_rows, TILINGS if arguments.tune else ()))
            print(json.dumps(rows[-1]), flush=True)
            if num_rows == 1:
                rows.append(measure_resident(geometry, name, tunes=arguments.tune))
                print(json.dumps(rows[-1]), flush=True)
    if arguments.output:
        write_report("gpu_kernels", arguments.output, rows, "cuda")


if __name__ == "__main__":
    main()
