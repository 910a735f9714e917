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
GEOMETRIES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
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
}


def make_core(geometry: str, backend: str, folder: Path) -> EngineCore:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
        **GEOMETRIES[geometry],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return EngineCore(
        engine_config(
            model={"model": str(folder), "load_format": "dummy"},
            device="cuda",
            attention_backend=backend,
            scheduler={"max_num_seqs": 256, "max_num_batched_tokens": 16384, "max_prefill_stall": None},
            cache={"enable_prefix_cache": False},
        )
    )


def run_batch(core: EngineCore, batch: int, seed: int) -> float:
    """Median time per output token over the requests, seconds."""
    generator = torch.Generator().manual_seed(seed)
    params = SamplingParams(max_tokens=OUTPUT_LEN, temperature=0.0, ignore_eos=True)
    for index in range(batch):
        prompt = torch.randint(3, 40000, (PROMPT_LEN,), generator=generator).tolist()
        core.handle(AddRequest(request_id=f"{seed}-{index}", prompt_token_ids=prompt, params=params))
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--geometry", nargs="+", default=list(GEOMETRIES), choices=list(GEOMETRIES))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows = []
    for geometry in arguments.geometry:
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            core = make_core(geometry, arguments.backend, Path(folder))
            print(f"{geometry}: start-up {time.perf_counter() - started:.1f} s", flush=True)
        run_batch(core, 2, seed=10_000)  # warm-up: kernels are compiled
        for batch in arguments.batch:
            times = [run_batch(core, batch, seed=100 * batch + index) for index in range(NUM_RUNS)]
            spread = max(times) / min(times) - 1
            row = {
                "geometry": geometry,
                "batch": batch,
                "tpot_ms": statistics.median(times) * 1e3,
                "spread": spread,
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
        core.close()
        del core
        torch.cuda.empty_cache()
    if arguments.output:
        environment = current_environment(device=torch.cuda.get_device_name(), num_threads=None)
        report = {"environment": msgspec.to_builtins(environment), "rows": rows}
        arguments.output.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
