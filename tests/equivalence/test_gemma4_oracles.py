"""Tiny Gemma 4 pairs against transformers' own classes: greedy text, and what the assistant says at every position.

transformers' assistant knows one position policy ("last_token") and one request at a time; its forward is asked over
clean keys and values, one position after the other. Its generate() is not: after a rejection it reads stale ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config import ModelConfig, SpeculatorConfig
from engine.models.loader import LoadedModel, load_model
from engine.spec_decode.registry import init_speculator
from tests.support.engine_harness import Harness, make_core, request
from tests.support.gemma4_rounds import record_assistant_rounds
from tests.support.tiny_gemma4 import GEMMA4_KINDS, WINDOW, Gemma4Pair, make_tiny_gemma4_pair

METHOD = "gemma4_mtp"
CPU = torch.device("cpu")
MAX_TOKENS = 40
K = 4


@dataclass(frozen=True)
class Oracle:
    """Both models of a pair by transformers, in float32."""

    pair: Gemma4Pair
    target: Any
    assistant: Any

    @torch.inference_mode()
    def generate(self, prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        output = self.target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False
        )
        return list(output[0, len(prompt) :].tolist())

    @torch.inference_mode()
    def draft_logits(self, confirmed: list[int], drafts: list[int]) -> torch.Tensor:
        """Of len(drafts) + 1 steps behind the confirmed tokens, [len(drafts) + 1, vocab_size]."""
        states = self.target(
            torch.tensor([confirmed[:-1]]),
            use_cache=False,
            output_hidden_states=True,
            return_shared_kv_states=True,
        )
        hidden = states.hidden_states[-1][:, -1:]
        steps = []
        for token in (confirmed[-1], *drafts):
            embedded = self.target.get_input_embeddings()(torch.tensor([[token]]))
            output = self.assistant(
                inputs_embeds=torch.cat((embedded, hidden), dim=-1),
                position_ids=torch.tensor([[len(confirmed) - 1]]),
                shared_kv_states=dict(states.shared_kv_states),
            )
            hidden = output.last_hidden_state
            steps.append(output.logits[0, 0])
        return torch.stack(steps)


@pytest.fixture(scope="module", params=GEMMA4_KINDS)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    pair = make_tiny_gemma4_pair(tmp_path_factory.mktemp(request.param), request.param, "float32", steps=20)
    target, assistant = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for path in (pair.target, pair.assistant)
    )
    return Oracle(pair, target, assistant)


@pytest.fixture(scope="module")
def loaded(oracle: Oracle) -> LoadedModel:
    return load_model(ModelConfig(model=str(oracle.pair.target)), device=CPU)


def test_greedy_text_is_that_of_transformers(oracle: Oracle, loaded: LoadedModel) -> None:
    prompts = [
        sequence[:length] for sequence, length in zip(oracle.pair.sequences, (1, 9, 20, 40), strict=True)
    ]
    core = make_core(loaded, scheduler={"max_prefill_chunk": 7}, config={"max_model_len": 128})
    requests = [request(f"r{index}", prompt, max_tokens=MAX_TOKENS) for index, prompt in enumerate(prompts)]
    results = Harness(core).run(requests)
    for prompt, result in zip(prompts, results.values(), strict=True):
        assert result.token_ids == oracle.generate(prompt)


def test_drafts_of_the_engine_are_those_of_transformers_at_every_position(
    oracle: Oracle, loaded: LoadedModel
) -> None:
    """After the prefill of each prefix of a text of five windows."""
    config = SpeculatorConfig(
        method=METHOD, model=str(oracle.pair.assistant), k=K, options={"positions": "last_token"}
    )
    speculator: Any = init_speculator(config, loaded, CPU)
    rounds = record_assistant_rounds(speculator)
    core = make_core(loaded, speculators={METHOD: speculator}, k=K, config={"max_model_len": 128})
    text = oracle.pair.sequences[1]
    ends = range(1, 5 * WINDOW)
    Harness(core).run([request(f"r{end}", text[:end], max_tokens=K + 2, ignore_eos=True) for end in ends])
    firsts = {len(item.confirmed): item for item in rounds if len(item.drafts) == K}
    assert set(firsts) >= {end + 1 for end in ends}
    for item in firsts.values():
        expected = oracle.draft_logits(list(item.confirmed), item.drafts[:-1])
        for step, got in enumerate(item.logits):
            reached = (
                got.isfinite()
            )  # transformers gives tokens that a sparse head does not reach a low value
            assert (got - expected[step])[reached].abs().max() < 1e-3
            assert item.drafts[step] == int(expected[step].argmax())
