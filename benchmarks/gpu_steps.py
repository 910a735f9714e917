"""Time per output token of the engine itself on a GPU: dummy weights of a stated geometry, random prompts, greedy.

python -m benchmarks.gpu_steps [--geometry smollm2-135m llama-3.1-8b] [--batch 1 8 64] [--output FILE]

128 tokens in, 256 out, end tokens ignored, prefix cache off: the peer's settings. Three runs of each row; the median
over requests of (last - first token time) / 255 is printed with the spread over the runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from engine.config import engine_config
from engine.core import EngineCore
from engine.messages import AddRequest
from engine.params import SamplingParams
from server.bench.environment import current_environment

PROMPT_LEN, OUTPUT_LEN, NUM_RUNS = 128, 256, 3
_LLAMA = {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5}
GEOMETRIES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        **_LLAMA,
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "gemma-4-e4b": {
        "architectures": ["Gemma4ForCausalLM"],
        "hidden_size": 2560,
        "num_hidden_layers": 42,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 7,
        "intermediate_size": 10240,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": 512,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 18,
        "max_position_embeddings": 8192,
        "final_logit_softcapping": 30.0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1000000.0,
                "partial_rotary_factor": 0.25,
            },
        },
    },
}


def make_core(geometry: str, backend: str, graphs: str, folder: Path) -> EngineCore:
    config = {"torch_dtype": "bfloat16", "eos_token_id": 2, **GEOMETRIES[geometry]}
    (folder / "config.json").write_text(json.dumps(config))
    return EngineCore(
        engine_config(
            model={"model": str(folder), "load_format": "dummy"},
            device="cuda",
            attention_backend=backend,
            cuda_graphs=graphs,
            scheduler={"max_num_seqs": 256, "max_num_batched_tokens": 16384, "max_prefill_stall": None},
            cache={"enable_prefix_cache": False},
        )
    )


def add_requests(core: EngineCore, batch: int, seed: int) -> None:
    """Random prompts, other ones for every seed."""
    generator = torch.Generator().manual_seed(seed)
    params = SamplingParams(max_tokens=OUTPUT_LEN, temperature=0.0, ignore_eos=True)
    for index in range(batch):
        prompt = torch.randint(3, 40000, (PROMPT_LEN,), generator=generator).tolist()
        core.handle(AddRequest(request_id=f"{seed}-{index}", prompt_token_ids=prompt, params=params))


def run_batch(core: EngineCore, batch: int, seed: int) -> float:
    """Median time per output token over the requests, seconds."""
    add_requests(core, batch, seed)
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    while core.has_work:
        message = core.step()
        now = time.perf_counter()
        for output in message.outputs if message else ():
            if output.token_ids:
                first.setdefault(output.request_id, now)
                last[output.request_id] = now
    return statistics.median((last[name] - first[name]) / (OUTPUT_LEN - 1) for name in first)


def measure(geometry: str, backend: str, graphs: str, batches: list[int]) -> list[dict[str, Any]]:
    """One row a batch size."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        core = make_core(geometry, backend, graphs, Path(folder))
        print(f"{geometry}, graphs {graphs}: start-up {time.perf_counter() - started:.1f} s", flush=True)
    run_batch(core, 2, seed=10_000)  # warm-up: kernels are compiled
    rows = []
    for batch in batches:
        times = [run_batch(core, batch, seed=100 * batch + index) for index in range(NUM_RUNS)]
        row = {
            "geometry": geometry,
            "graphs": graphs,
            "batch": batch,
            "tpot_ms": statistics.median(times) * 1e3,
            "spread": max(times) / min(times) - 1,
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    core.close()
    del core
    torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--geometry", nargs="+", default=list(GEOMETRIES), choices=list(GEOMETRIES))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--graphs", nargs="+", default=["auto"], choices=["auto", "none", "full_decode"])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows = []
    for geometry in arguments.geometry:
        for graphs in arguments.graphs:
            rows += measure(geometry, arguments.backend, graphs, arguments.batch)
    if arguments.output:
        environment = current_environment(device=torch.cuda.get_device_name(), num_threads=None)
        report = {"environment": msgspec.to_builtins(environment), "rows": rows}
        arguments.output.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
