"""Every draft of the MTP layer is drawn from the logits that it gives by definition, over the whole sequence at once,
whatever happened before: its KV cache has no holes, no rejected entries and no foreign ones. On two families, one of
them with a latent cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.attention import latent
from engine.messages import AddRequest
from engine.spec_decode.mtp import MTPSpeculator
from tests.support.draft_rounds import RoundChecker, record_rounds
from tests.support.engine_harness import Harness, Result, request
from tests.support.tiny_drafters import Workshop, families_of, shared_workshop

METHOD = "mtp"


@pytest.fixture(scope="module", params=families_of(METHOD))
def workshop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return shared_workshop(tmp_path_factory, str(request.param))


class Watched:
    """An engine with the layer, whose rounds are recorded and checked."""

    def __init__(self, workshop: Workshop, **core: Any) -> None:
        config = workshop.drafter(METHOD)
        speculator = workshop.draft_model(config)
        assert isinstance(speculator, MTPSpeculator)
        self.speculator = speculator
        self.rounds = record_rounds(speculator)
        self._checker = RoundChecker(workshop, METHOD)
        self.core = workshop.core([config], speculators={METHOD: speculator}, **core)

    def run(self, requests: list[AddRequest]) -> dict[str, Result]:
        self.rounds.clear()
        self.results = Harness(self.core).run(requests)
        self._checker.check(self.rounds)
        return self.results


def check_text(workshop: Workshop, setting: str, results: dict[str, Result]) -> None:
    for request_id, result in results.items():
        assert result.token_ids == workshop.plain(setting)[request_id].token_ids, request_id


@pytest.mark.parametrize(("depth", "block_size"), [(1, 16), (2, 1)])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_after_prefill_and_every_kind_of_acceptance(
    workshop: Workshop, k: int, depth: int, block_size: int
) -> None:
    watched = Watched(workshop, depth=depth, block_size=block_size)
    results = watched.run(workshop.requests("greedy", [(METHOD, k)]))
    check_text(workshop, "greedy", results)
    counts = {
        (item.num_verifier_accepted, item.num_drafted)
        for result in results.values()
        for item in result.spec
        if item.num_drafted == k
    }
    assert counts == {(accepted, k) for accepted in range(k + 1)}
    assert max(len(item.drafts) for item in watched.rounds) == k
    lengths = {len(prompt) for prompt in workshop.prompts}
    assert any(len(item.confirmed) - 1 in lengths for item in watched.rounds), "none right after a prefill"


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 7, 11, 12, 13])
def test_after_chunked_prefill_with_ends_at_every_offset(workshop: Workshop, chunk: int) -> None:
    """The row at a chunk's end is paired with the next prompt token."""
    watched = Watched(workshop, max_prefill_chunk=chunk)
    prompts = [workshop.prompts[index] for index in (4, 5, 6)]  # 12, 13, 14 tokens
    watched.run([request(f"r{i}", prompt, k=3, max_tokens=6) for i, prompt in enumerate(prompts)])


def test_of_prompts_that_are_expanded(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms of attention over a latent cache leave the same cache."""
    monkeypatch.setattr(latent, "MIN_EXPANDED_QUERY_LEN", 9)
    watched = Watched(workshop, depth=2, max_prefill_chunk=11)
    check_text(workshop, "greedy", watched.run(workshop.requests("greedy", [(METHOD, 3), (METHOD, 2)])))


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_after_a_prefix_hit(workshop: Workshop, block_size: int) -> None:
    watched = Watched(workshop, block_size=block_size)
    prompt = workshop.prompts[15]  # 40 tokens
    watched.run([request("first", prompt, k=3, max_tokens=12)])
    again = watched.run([request("again", prompt, k=3, max_tokens=12)])
    assert again["again"].num_cached_tokens > 0
    partly = watched.run([request("other", [*prompt[:35], 260, 261, 262], k=3, max_tokens=12)])
    assert partly["other"].num_cached_tokens >= 35 // block_size * block_size - block_size


@pytest.mark.parametrize("depth", [1, 2])
def test_after_preemption(workshop: Workshop, depth: int) -> None:
    watched = Watched(workshop, depth=depth, block_size=4, num_blocks=36, max_prefill_chunk=7)
    results = watched.run(workshop.requests("greedy", [(METHOD, 3), (METHOD, 2)]))
    assert any(result.num_preemptions for result in results.values())
    check_text(workshop, "greedy", results)


def test_seeded_drafts_beside_requests_without(workshop: Workshop) -> None:
    watched = Watched(workshop, depth=2)
    choices = [(METHOD, 3), ("none", None), (METHOD, 1), (METHOD, 0)]
    check_text(workshop, "seeded", watched.run(workshop.requests("seeded", choices)))


def test_embedding_and_head_are_the_targets(workshop: Workshop) -> None:
    workshop.drafter(METHOD)
    speculator = Watched(workshop).speculator
    own = list(speculator._model.parameters())
    targets = {parameter.data_ptr() for parameter in workshop.loaded.model.parameters()}
    assert not targets & {parameter.data_ptr() for parameter in own}
    assert all(len(parameter) != workshop.loaded.model.vocab_size for parameter in own)


def test_its_cache_is_a_group_of_its_own_like_a_layer_of_the_target(workshop: Workshop) -> None:
    (target,) = workshop.loaded.model.kv_groups()
    (own,) = Watched(workshop).speculator.kv_groups()
    assert own.name == METHOD
    assert (own.num_kv_heads, own.head_size, own.value_size) == (
        target.num_kv_heads,
        target.head_size,
        target.value_size,
    )
    assert own.bytes_per_token * 3 == target.bytes_per_token


def test_one_tensor_serves_the_head_and_the_next_step(workshop: Workshop) -> None:
    speculator = Watched(workshop).speculator
    assert not speculator.model_returns_tuple
    assert speculator.advance_draft_positions
    assert torch.float64 == speculator._model.norm.weight.dtype


# ---- known ways to get the layer wrong: the draft logits are found to be others, and the text is the same all the same


def swaps_embedding_and_hidden(speculator: MTPSpeculator) -> None:
    first, second = speculator._model.fc.weight.chunk(2, dim=1)
    speculator._model.fc.weight.copy_(torch.cat((second, first), dim=1))


def feeds_back_what_the_norm_reads(speculator: Any) -> None:
    """As the head reads the normed output, the first draft is right."""
    seen: list[torch.Tensor] = []
    speculator._model.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    inner = speculator._decode

    def decode(inputs: Any, state: Any, *args: Any) -> Any:
        rows = slice(None) if len(state.feedback) == len(seen[-1]) else inputs.last_row_indices
        return inner(inputs, replace(state, feedback=seen[-1][rows]), *args)

    speculator._decode = decode


def takes_each_row_s_own_token(speculator: MTPSpeculator) -> None:
    """(h_p, x_p) in the draft prefill."""
    speculator.needs = replace(speculator.needs, first_draft_from_prefill=False)


@pytest.mark.parametrize(
    "mutate", [swaps_embedding_and_hidden, feeds_back_what_the_norm_reads, takes_each_row_s_own_token]
)
def test_a_mutant_is_found_and_loses_nothing(
    workshop: Workshop, mutate: Callable[[MTPSpeculator], None]
) -> None:
    watched = Watched(workshop)
    mutate(watched.speculator)
    with pytest.raises(AssertionError, match=r"draft \d of Round"):
        watched.run(workshop.requests("greedy", [(METHOD, 3)]))
    check_text(workshop, "greedy", watched.results)
