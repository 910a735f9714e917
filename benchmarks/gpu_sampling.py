"""Drawing tokens on a GPU: the engine's kernels against the torch operations that define them.

python -m benchmarks.gpu_kernels --sampling [--output FILE]

bfloat16 logits. `zipf` rows fall off with the rank as a language model's do (top_p 0.9 keeps some 60 tokens), `flat`
rows are those of random weights (it keeps most of the vocabulary). The torch operations get float32 logits and the
kernel's noise. GB/s are of the bfloat16 logits, read once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from engine.batch.request_rows import RequestRows
from engine.params import SamplingParams
from engine.sampling.features import SamplingKind, uniform_features
from engine.sampling.sampler import SampleBatch, Sampler, draw_by_definition
from engine.sampling.states import SamplingStates
from engine.step import NewRow

ROWS = (1, 8, 64, 256)
VOCAB_SIZES = (49_152, 128_256, 262_144)
CASES: list[tuple[str, SamplingKind, str, dict[str, Any]]] = [
    ("greedy", "greedy", "zipf", {"temperature": 0.0}),
    ("random", "random", "zipf", {}),
    ("top_k 50", "truncated", "zipf", {"top_k": 50}),
    ("top_k 50, top_p 0.9", "truncated", "zipf", {"top_k": 50, "top_p": 0.9}),
    ("top_p 0.9", "truncated", "zipf", {"top_p": 0.9}),
    ("top_p 0.9", "truncated", "flat", {"top_p": 0.9}),
]
BYTES_IN_TURN = 200 << 20  # of logits
Timer = Callable[[Callable[[Any], Any], list[torch.Tensor]], float]


def make_logits(num_rows: int, vocab_size: int, shape: str) -> torch.Tensor:
    noise = torch.randn(num_rows, vocab_size, device="cuda")
    if shape == "flat":
        return noise.to(torch.bfloat16)
    ranks = torch.rand(num_rows, vocab_size, device="cuda").argsort(dim=-1) + 1
    return (20.0 - 1.5 * ranks.log() + 0.1 * noise).to(torch.bfloat16)


def make_batch(num_rows: int, vocab_size: int, kind: SamplingKind, params: dict[str, Any]) -> SampleBatch:
    device = torch.device("cuda")
    states = SamplingStates(num_rows, vocab_size, device)
    for row in range(num_rows):
        new = NewRow(
            row=row,
            request_id=str(row),
            token_ids=[0],
            num_prompt_tokens=1,
            num_computed_tokens=0,
            params=SamplingParams(max_tokens=1, seed=row, **params),
            stop_ids=(),
            token_limit=2,
        )
        states.set_row(new)
    rows = torch.arange(num_rows, device=device)
    return SampleBatch(
        rows=rows,
        positions=rows + 1,
        request_rows=RequestRows(num_rows, 2, 1, device),
        states=states,
        features=uniform_features(num_rows, kind, vocab_size),
    )


def measure_sampling(num_rows: int, vocab_size: int, time_us: Timer) -> list[dict[str, Any]]:
    """One row of the report for each case."""
    count = min(max(BYTES_IN_TURN // (2 * num_rows * vocab_size), 4), 20)
    sampler, rows = Sampler(), []
    for name, kind, shape, params in CASES:
        logits = [make_logits(num_rows, vocab_size, shape) for _ in range(count)]
        batch = make_batch(num_rows, vocab_size, kind, params)
        kernels_us = time_us(lambda x, batch=batch: sampler.sample(x, batch), logits)  # type: ignore[misc]
        reals = [x.float() for x in logits[:2]]
        torch_us = time_us(lambda x, batch=batch: draw_by_definition(x, batch), reals)  # type: ignore[misc]
        rows.append(
            {
                "sampling": name,
                "logits": shape,
                "rows": num_rows,
                "vocab_size": vocab_size,
                "kernels_us": kernels_us,
                "kernels_gb_per_s": 2 * num_rows * vocab_size / kernels_us / 1e3,
                "torch_us": torch_us,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows
