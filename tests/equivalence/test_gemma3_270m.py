"""Gemma 3 270M, a real checkpoint with sliding windows, against transformers. Opt-in: its weights have terms of use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.checkpoint.tokenizer_files import load_hf_tokenizer
from engine.config import ModelConfig
from engine.models.loader import load_model
from tests.support.engine_harness import Harness, make_core, request
from tests.support.gguf_reference import load_gguf_reference
from tests.support.prompts import PROMPTS
from tools.fetch_model import resolve

NUM_PROMPTS = 10
MAX_TOKENS = 48
BLOCK_SIZE = 16
WINDOW = 512


@pytest.mark.full
@torch.inference_mode()
def test_greedy_text_equals_transformers() -> None:
    """10 short prompts, and one that is longer than the window; chunked, all at once."""
    path = Path(resolve("gemma3-270m"))
    config = ModelConfig(model=str(path), dtype="float32")
    tokenizer = load_hf_tokenizer(config)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS[:NUM_PROMPTS]]
    prompts.append(tokenizer(" ".join(PROMPTS * 3))["input_ids"][: WINDOW + 100])
    loaded = load_model(config, device=torch.device("cpu"))
    core = make_core(
        loaded,
        config={"max_model_len": 1024},
        scheduler={"max_prefill_chunk": 64, "max_num_seqs": 16},
        cache={"block_size": BLOCK_SIZE, "num_blocks": 2048 // BLOCK_SIZE},
    )
    requests = [
        request(f"r{index}", prompt, max_tokens=MAX_TOKENS, ignore_eos=True)
        for index, prompt in enumerate(prompts)
    ]
    results = Harness(core).run(requests)
    reference = load_gguf_reference(path)
    for index, prompt in enumerate(prompts):
        tokens = results[f"r{index}"].token_ids
        assert len(tokens) == MAX_TOKENS
        logits = reference(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        top = logits.topk(2, dim=-1)
        margins = (top.values[:, 0] - top.values[:, 1]).tolist()
        expected = top.indices[:, 0].tolist()
        assert tokens == expected, [
            margin for margin, a, b in zip(margins, tokens, expected, strict=True) if a != b
        ]
