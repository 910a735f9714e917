"""Kernels alone on a GPU: products of few rows, the library's against ours, and attention of decodes, by their tiling.

python -m benchmarks.gpu_kernels [--geometry llama-3.1-8b] [--rows 1 8 16 64] [--tune] [--output FILE]
python -m benchmarks.gpu_kernels --attention [--context 300 2000] ...
python -m benchmarks.gpu_kernels --sampling

Each figure is a captured sequence of launches over different weights or caches, more of them than the L2 cache holds,
replayed five times; the best replay counts. GB/s are the bytes of the weight, or of keys and values, over the time.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.geometries import GEOMETRIES
from benchmarks.gpu_engine import write_report
from benchmarks.gpu_sampling import ROWS, VOCAB_SIZES, measure_sampling
from engine.kernels.exact_attention import exact_attention
from engine.kernels.gated_activation import ActivationName, gated_activation
from engine.kernels.paged_attention import MAX_COUNTERS, paged_attention
from engine.kernels.skinny_linear import Tiling, skinny_linear, stage_bytes
from engine.kernels.triton_support import shared_memory_bytes

BYTES_IN_TURN = 400 << 20  # of weights, several times the L2 cache
TILINGS = [
    Tiling(block_n, block_k, stages, warps)
    for block_n, block_k, stages, warps in itertools.product(
        (16, 32, 64), (64, 128, 256, 512), (3, 4, 6), (2, 4)
    )
    if 8 << 10 <= block_n * block_k * 2 * stages <= 100 << 10
]


def products_of(geometry: str) -> dict[str, tuple[int, int, bool]]:
    """(out_features, in_features, gated) of a layer's products."""
    config = GEOMETRIES[geometry]
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    head_size = config.get("head_dim", hidden // config["num_attention_heads"])
    query = config["num_attention_heads"] * head_size
    return {
        "qkv": (query + 2 * config["num_key_value_heads"] * head_size, hidden, False),
        "output": (hidden, query, False),
        "gate_up": (2 * intermediate, hidden, True),
        "down": (hidden, intermediate, False),
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
        if tiling.num_stages * stage_bytes(tiling, num_rows, is_gated) <= shared_bytes
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


def measure_attention(
    geometry: str, batch: int, context: int, query_len: int, *, tunes: bool
) -> list[dict[str, Any]]:
    """Both kernels in all forms. Full attention, every request at the same length."""
    config, block_size = GEOMETRIES[geometry], 16
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_size = config.get("head_dim", config["hidden_size"] // num_heads)
    num_blocks = -(-context // block_size) * batch
    num_bytes = 4 * batch * context * num_kv_heads * head_size
    count = min(max(BYTES_IN_TURN // num_bytes, 8), 100)
    shape = (2, num_blocks, block_size, num_kv_heads, head_size)
    caches = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    num_tokens = batch * query_len
    query = torch.randn(num_tokens, num_heads, head_size, device="cuda", dtype=torch.bfloat16)
    tables = torch.randperm(num_blocks, device="cuda").view(batch, -1).int()
    starts = torch.arange(0, num_tokens + 1, query_len, device="cuda", dtype=torch.int32)
    lens = torch.full((batch,), context, device="cuda", dtype=torch.int32)
    positions = torch.arange(context - query_len, context, device="cuda").repeat(batch)
    counters = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device="cuda")
    rows = []

    def measure_form(kernel: Callable[..., torch.Tensor], **form: Any) -> None:
        def run(cache: torch.Tensor) -> torch.Tensor:
            return kernel(
                query,
                cache[0],
                cache[1],
                tables,
                starts,
                lens,
                positions,
                scale=head_size**-0.5,
                max_query_len=query_len,
                max_seq_len=context,
                counters=counters,
                **form,
            )

        us = time_us(run, caches)
        rows.append(
            {
                "geometry": geometry,
                "kernel": kernel.__name__,
                "batch": batch,
                "context": context,
                "query_len": query_len,
                **form,
                "us": us,
                "gb_per_s": num_bytes / us / 1e3,
            }
        )
        print(json.dumps(rows[-1]), flush=True)

    measure_form(paged_attention)
    for splits in (None, False, True):
        measure_form(exact_attention, splits=splits)
    for segment, tile in itertools.product((64, 128, 256, 512), (32, 64, 128)) if tunes else ():
        if tile <= segment:
            measure_form(paged_attention, segment=segment, tile=tile)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--geometry", nargs="+", default=list(GEOMETRIES), choices=list(GEOMETRIES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 16, 64])
    parser.add_argument("--attention", action="store_true")
    parser.add_argument("--sampling", action="store_true")
    parser.add_argument("--context", nargs="+", type=int, default=[300, 2000])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--query-len", type=int, default=1)
    parser.add_argument("--product", nargs="+", default=["qkv", "output", "gate_up", "down"])
    parser.add_argument("--tune", action="store_true", help="measure every tiling, not only the chosen one")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if arguments.sampling:
        for num_rows, vocab_size in itertools.product(ROWS, VOCAB_SIZES):
            rows += measure_sampling(num_rows, vocab_size, time_us)
    for geometry in () if arguments.sampling else arguments.geometry:
        if arguments.attention:
            for batch, context in itertools.product(arguments.batch, arguments.context):
                rows += measure_attention(geometry, batch, context, arguments.query_len, tunes=arguments.tune)
            continue
        for name, num_rows in itertools.product(arguments.product, arguments.rows):
            rows.append(measure(geometry, name, num_rows, TILINGS if arguments.tune else ()))
            print(json.dumps(rows[-1]), flush=True)
    if arguments.output:
        write_report("gpu_kernels", arguments.output, rows, "cuda")


if __name__ == "__main__":
    main()
