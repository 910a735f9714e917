"""transformers' own generate(use_mtp=True) as the oracle: the same tokens, and in every round that both make the same
logits of the first draft (it runs a layer once a round, so further drafts have no counterpart).
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_layers import MtpModel

from tests.support.draft_rounds import record_rounds
from tests.support.engine_harness import Harness, request
from tests.support.tiny_drafters import Workshop, families_of, shared_workshop
from tests.support.tiny_mtp import MoETarget

METHOD = "mtp"
MAX_TOKENS = 24
TOLERANCE = 1e-5  # its norms and routers compute in float32
Logits = dict[tuple[int, ...], torch.Tensor]  # by the tokens that a draft follows: [vocab_size]


@pytest.fixture(params=families_of(METHOD))
def workshop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return shared_workshop(tmp_path_factory, str(request.param))


def load_oracle(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> Any:
    assert isinstance(workshop.target, MoETarget)
    # It finds the layer by the layer indices of released checkpoints.
    pattern = re.escape(workshop.target.mtp_prefix) + ".*"
    model_class = getattr(transformers, workshop.loaded.architecture)
    monkeypatch.setattr(model_class, "_keys_to_ignore_on_load_unexpected", [pattern])
    return model_class.from_pretrained(
        workshop.target_path, dtype="auto", attn_implementation="eager", experts_implementation="eager"
    ).eval()


def record_oracle(monkeypatch: pytest.MonkeyPatch) -> Logits:
    seen: Logits = {}
    inner = MtpModel.forward

    def forward(self: Any, *args: Any, full_input_ids: torch.Tensor, **kwargs: Any) -> Any:
        output = inner(self, *args, full_input_ids=full_input_ids, **kwargs)
        seen[tuple(full_input_ids[0].tolist())] = output[1][0, 0].to(torch.float64)
        return output

    monkeypatch.setattr(MtpModel, "forward", forward)
    return seen


def test_the_same_tokens_from_the_same_draft_logits(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = workshop.drafter(METHOD)
    oracle, expected = load_oracle(workshop, monkeypatch), record_oracle(monkeypatch)
    speculator = workshop.draft_model(config)
    rounds = record_rounds(speculator)
    core = workshop.core([config], speculators={METHOD: speculator})
    num_compared = 0
    for index in (3, 5, 9, 15):
        prompt = workshop.prompts[index]
        expected.clear()
        rounds.clear()
        ids = torch.tensor([prompt])
        output = oracle.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            use_mtp=True,
        )
        (result,) = Harness(core).run([request(f"r{index}", prompt, k=1, max_tokens=MAX_TOKENS)]).values()
        assert result.token_ids == output[0, len(prompt) :].tolist()
        for item in rounds:
            if item.confirmed in expected:
                assert (item.logits[0] - expected[item.confirmed]).abs().max() < TOLERANCE
                num_compared += 1
    assert num_compared > 40
