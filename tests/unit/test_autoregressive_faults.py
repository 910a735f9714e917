"""Draft models at their limits: exact drafters, short contexts, block boundaries, unusable logits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import SpeculatorConfig
from engine.spec_decode.speculator import DraftTokens, ProposalInputs
from tests.support.engine_harness import Harness, Result, request
from tests.support.tiny_drafters import MAX_TOKENS, SETTINGS, Workshop, shared_workshop

METHODS = ("draft_model", "eagle", "eagle3")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return shared_workshop(tmp_path_factory)


def exact_drafter(workshop: Workshop) -> SpeculatorConfig:
    """The target drafts for itself."""
    return SpeculatorConfig(method="draft_model", model=str(workshop.target_path), k=5)


def check_text(workshop: Workshop, setting: str, results: dict[str, Result]) -> None:
    for request_id, result in results.items():
        assert result.token_ids == workshop.plain(setting)[request_id].token_ids, request_id


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("setting", SETTINGS)
def test_of_a_drafter_that_is_the_target_every_draft_is_accepted(
    workshop: Workshop, setting: str, depth: int
) -> None:
    """With every sampling parameter: drafts are drawn as the target draws, earlier drafts of the round included."""
    core = workshop.core([exact_drafter(workshop)], depth=depth)
    requests = workshop.requests(setting, [("draft_model", k) for k in (5, 1, 3, 2, 4)])
    results = Harness(core).run(requests)
    check_text(workshop, setting, results)
    for item in requests:
        result = results[item.request_id]
        limit = min(len(item.prompt_token_ids) + MAX_TOKENS, 72)
        num_tokens = len(item.prompt_token_ids) + 1
        for seen in result.spec:
            room = limit - num_tokens - 1  # one token of a verification is the target's own
            num_usable = min(seen.num_drafted, room)
            assert seen.num_verifier_accepted >= num_usable, f"{item.request_id} at {num_tokens}: {seen}"
            if room >= 5:
                assert seen.num_drafted == item.speculation.num_speculative_tokens
                is_cut = num_tokens + seen.num_emitted == len(item.prompt_token_ids) + len(result.token_ids)
                assert seen.num_emitted == seen.num_drafted + 1 or is_cut
            num_tokens += seen.num_emitted


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_drafts_cross_block_boundaries_in_slots_of_their_own(workshop: Workshop, k: int) -> None:
    """known-faults 17: fully accepted drafts, prompts that end on each side of a block's end; no slot is missing, and
    every block comes back (the harness checks it)."""
    prompts = [workshop.prompts[15][:length] for length in range(8 - k, 10)]
    requests = [request(f"r{len(prompt)}", prompt, max_tokens=MAX_TOKENS, k=k) for prompt in prompts]
    for depth in (1, 2):
        plain = Harness(workshop.core((), block_size=8)).run(
            [request(item.request_id, item.prompt_token_ids, max_tokens=MAX_TOKENS) for item in requests]
        )
        results = Harness(workshop.core([exact_drafter(workshop)], block_size=8, depth=depth)).run(requests)
        for request_id, result in results.items():
            assert result.token_ids == plain[request_id].token_ids
            full = [item for item in result.spec if item.num_drafted == item.num_verifier_accepted == k]
            assert len(full) >= (MAX_TOKENS - 1) // (k + 1) - 1


@pytest.mark.parametrize("method", METHODS)
def test_a_drafter_with_a_shorter_context_stops_for_that_request_only(
    workshop: Workshop, method: str, tmp_path: Path
) -> None:
    """known-faults 11: no draft comes from a row at or beyond the drafter's limit; requests below it go on."""
    limit = 30
    speculator = workshop.draft_model(with_config(workshop, method, tmp_path, max_position_embeddings=limit))
    inner = speculator.propose
    counts: list[tuple[int, int]] = []  # tokens before the drafts, drafts

    def propose(inputs: ProposalInputs) -> DraftTokens:
        drafts = inner(inputs)
        lengths = inputs.request_rows.num_tokens[inputs.rows]
        counts.extend(zip(lengths.tolist(), drafts.num_draft_tokens.tolist(), strict=True))
        return drafts

    speculator.propose = propose  # type: ignore[method-assign]
    core = workshop.core([workshop.drafter(method)], speculators={method: speculator})
    results = Harness(core).run(workshop.requests("greedy", [(method, 5)]))
    check_text(workshop, "greedy", results)
    distance = 1 if method == "draft_model" else 2  # of the first draft from the row that it comes from
    assert all(length - distance + count - 1 < limit for length, count in counts if count)
    assert any(length + count >= limit for length, count in counts), "no request came to the limit"
    assert results["r15"].spec == []  # 40 prompt tokens
    assert sum(item.num_emitted for item in results["r0"].spec) >= MAX_TOKENS - 2


@pytest.mark.parametrize("method", METHODS)
def test_drafts_from_nan_are_lost_and_nothing_else(workshop: Workshop, method: str, tmp_path: Path) -> None:
    config = with_config(workshop, method, tmp_path)
    file = tmp_path / method / "model.safetensors"
    weights = load_file(file)
    norm = next(name for name in weights if name.endswith("post_attention_layernorm.weight"))
    weights[norm] = torch.full_like(weights[norm], float("nan"))
    save_file(weights, file)
    results = Harness(workshop.core([config], depth=2)).run(workshop.requests("greedy", [(method, 3)]))
    check_text(workshop, "greedy", results)
    assert all(result.spec == [] for result in results.values())


def test_eagle3_has_no_draft_when_nothing_of_its_vocabulary_is_allowed(workshop: Workshop) -> None:
    """Its logits are -inf wherever the request may draw; the target draws on."""
    core = workshop.core([workshop.drafter("eagle3")])
    offsets = workshop.references["eagle3"].weights["d2t"]
    in_draft_vocabulary = set((torch.arange(len(offsets)) + offsets).tolist())
    allowed = tuple(token for token in range(3, 320) if token not in in_draft_vocabulary)
    prompt = workshop.prompts[5]
    params: dict[str, Any] = {"allowed_token_ids": allowed, "max_tokens": 12}
    drafted = Harness(core).run(
        [request("r", prompt, method="eagle3", k=3, **params), request("free", prompt)]
    )
    plain = Harness(workshop.core(())).run([request("r", prompt, **params)])
    assert drafted["r"].token_ids == plain["r"].token_ids
    assert drafted["r"].spec == []
    assert drafted["free"].spec


def with_config(workshop: Workshop, method: str, folder: Path, **changes: Any) -> SpeculatorConfig:
    """A copy of the method's checkpoint with other config entries."""
    config = workshop.drafter(method)
    assert config.model is not None
    copy = folder / method
    shutil.copytree(config.model, copy)
    raw = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(raw | changes))
    return config.model_copy(update={"model": str(copy)})
