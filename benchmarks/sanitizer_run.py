"""A short run of the engine for compute-sanitizer: prompts in chunks, decodes, drafts, launched and replayed.

compute-sanitizer --tool memcheck --error-exitcode 9 python3 -m benchmarks.sanitizer_run [--method none ngram eagle3]

The engine's own kernels are what is checked; torch's caching allocator hides accesses that stay within its blocks, so
PYTORCH_NO_CUDA_MEMORY_CACHING=1 makes the check sharper for launches (graphs need the allocator's pools).
Every kernel of a decode, of a prompt and of drafting runs a few times: two layers of a small width, in bfloat16.
"""

from __future__ import annotations

import argparse
import time

from benchmarks.geometries import DRAFTERS, GEOMETRIES
from benchmarks.gpu_engine import Setup, capture_asked, make_core, run_batch

WIDTH = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 1024, "num_attention_heads": 4}
LLAMA = {**GEOMETRIES["llama-3.1-8b"], **WIDTH, "num_key_value_heads": 2, "num_hidden_layers": 4}
HEAD = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 256}
BATCH, PROMPT_LEN, OUTPUT_LEN, NUM_DRAFTS = 3, 40, 10, 3
KV_CACHE_BYTES = 64 << 20


def run(method: str, graphs: str, device: str) -> int:
    """Returns the number of tokens that came out."""
    setup = Setup(
        geometry="small",
        speculator=method,
        num_drafts=0 if method == "none" else NUM_DRAFTS,
        device=device,
        graphs=graphs,
        kv_cache_bytes=KV_CACHE_BYTES,
    )
    core = make_core(setup)
    num_tokens = 0
    for seed in range(2):  # the second time with the graphs that the first asked for
        result = run_batch(core, BATCH, seed, prompt_len=PROMPT_LEN, output_len=OUTPUT_LEN)
        num_tokens += sum(map(len, result.arrivals.values()))
        capture_asked(core)
    core.close()
    return num_tokens


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", nargs="+", default=["none", "ngram", "eagle3"])
    parser.add_argument("--graphs", nargs="+", default=["none", "full"])
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args(words)
    GEOMETRIES["small"], DRAFTERS["small", "eagle3"] = LLAMA, HEAD
    for graphs in arguments.graphs:
        for method in arguments.method:
            started = time.perf_counter()
            num_outputs = run(method, graphs, arguments.device)
            print(
                f"graphs {graphs}, {method}: {num_outputs} outputs in {time.perf_counter() - started:.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
