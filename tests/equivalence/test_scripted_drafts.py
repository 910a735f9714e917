"""Whatever a drafter proposes, the tokens are those of plain decoding: every pattern, k, block size, depth, chunk size
and amount of memory, on a target whose logits notice any wrong KV entry.

The oracle is `reference_continuation`: the definition, without engine or cache.
"""

from __future__ import annotations

import itertools
import random

import pytest

from engine.messages import AddRequest
from engine.spec_decode.speculator import BaseSpeculator
from tests.support.engine_harness import Harness, Result, make_core, request, scripted_model
from tests.support.scripted_speculators import EOS, PATTERNS, VOCAB_SIZE, ScriptedSpeculator, StaleSpeculator
from tests.support.scripted_target import ScriptedTarget, reference_continuation

MAX_TOKENS = 24
TARGET = ScriptedTarget(VOCAB_SIZE)
PROMPT_LENGTHS = (1, 2, 12, 15, 16, 17, 31, 32, 33, 47)  # around block, chunk and draft boundaries


def make_prompts(seed: int = 0) -> list[tuple[int, ...]]:
    generator = random.Random(seed)
    return [tuple(generator.randrange(3, VOCAB_SIZE) for _ in range(length)) for length in PROMPT_LENGTHS]


PROMPTS = make_prompts()
FUTURES = {prompt: reference_continuation(TARGET, list(prompt), MAX_TOKENS + 16) for prompt in PROMPTS}


def expected_tokens(prompt: tuple[int, ...], max_tokens: int = MAX_TOKENS) -> list[int]:
    """The plain continuation, cut at the end token and max_tokens."""
    tokens = FUTURES[prompt][:max_tokens]
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


def make_requests(**params: object) -> list[AddRequest]:
    return [
        request(f"r{index}", prompt, **{"max_tokens": MAX_TOKENS, **params})
        for index, prompt in enumerate(PROMPTS)
    ]


def check(results: dict[str, Result], max_tokens: int = MAX_TOKENS) -> None:
    for index, prompt in enumerate(PROMPTS):
        result = results[f"r{index}"]
        tokens = expected_tokens(prompt, max_tokens)
        assert result.token_ids == tokens, f"prompt of {len(prompt)} tokens"
        assert result.finish is not None
        assert result.finish.reason == ("stop" if tokens[-1] == EOS else "length")
        for observation in result.spec:
            assert observation.num_emitted <= observation.num_accepted + 1
            assert (
                0 <= observation.num_accepted <= observation.num_verifier_accepted <= observation.num_drafted
            )


def scripted(pattern: str) -> dict[str, BaseSpeculator]:
    return {"scripted": ScriptedSpeculator(PATTERNS[pattern], FUTURES)}


LAYOUTS = [
    {"block_size": block_size, "depth": depth, "deferred": deferred, "chunk": chunk}
    for (block_size, depth, deferred, chunk) in [
        (16, 1, False, None),
        (16, 2, True, 7),
        (1, 2, False, 64),
        (1, 1, True, 1),
        (4, 2, True, 1),
    ]
]


def run(
    requests: list[AddRequest],
    layout: dict[str, object],
    *,
    speculators: dict[str, BaseSpeculator] | None = None,
    k: int = 0,
    num_blocks: int | None = None,
    **scheduler: object,
) -> tuple[dict[str, Result], Harness]:
    block_size = layout["block_size"]
    assert isinstance(block_size, int)
    core = make_core(
        scripted_model(max_len=128),
        speculators=speculators,
        k=k,
        deferred=bool(layout["deferred"]),
        config={"max_steps_in_flight": layout["depth"]},
        scheduler={"max_prefill_chunk": layout["chunk"], **scheduler},
        cache={"block_size": block_size, "num_blocks": num_blocks or 2048 // block_size},
    )
    harness = Harness(core)
    return harness.run(requests), harness


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_plain_decoding_equals_the_definition(layout: dict[str, object]) -> None:
    results, _ = run(make_requests(), layout)
    check(results)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=str)
def test_drafts_never_change_the_tokens(pattern: str, k: int, layout: dict[str, object]) -> None:
    results, _ = run(make_requests(), layout, speculators=scripted(pattern), k=k)
    check(results)


@pytest.mark.parametrize("layout", LAYOUTS[3:], ids=str)
@pytest.mark.parametrize("pattern", ["oracle", "always_wrong", "cycling"])
def test_drafts_never_change_the_tokens_in_one_token_chunks(pattern: str, layout: dict[str, object]) -> None:
    results, _ = run(make_requests(), layout, speculators=scripted(pattern), k=3)
    check(results)


def test_stale_drafts_never_change_the_tokens() -> None:
    speculator = StaleSpeculator(ScriptedSpeculator(PATTERNS["oracle"], FUTURES))
    results, _ = run(make_requests(), LAYOUTS[1], speculators={"scripted": speculator}, k=3)
    check(results)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("k", [0, 1, 3, 5])
def test_preemption_does_not_change_the_tokens(k: int, depth: int) -> None:
    """A pool that holds little more than one request of the longest length forces preemption again and again."""
    layout = {"block_size": 4, "depth": depth, "deferred": True, "chunk": 7}
    speculators = scripted("cycling") if k else None
    results, _ = run(make_requests(), layout, speculators=speculators, k=k, num_blocks=36)
    check(results)
    assert sum(result.num_preemptions for result in results.values()) > 0


def test_the_oracle_is_fully_accepted_and_the_anti_oracle_never() -> None:
    results, _ = run(make_requests(ignore_eos=True), LAYOUTS[0], speculators=scripted("oracle"), k=3)
    full = [observation for result in results.values() for observation in result.spec]
    assert all(observation.num_verifier_accepted == observation.num_drafted for observation in full)
    results, _ = run(make_requests(ignore_eos=True), LAYOUTS[0], speculators=scripted("always_wrong"), k=3)
    none = [observation for result in results.values() for observation in result.spec]
    assert none
    assert all(observation.num_verifier_accepted == 0 for observation in none)
    assert all(observation.num_emitted == 1 for observation in none)


def test_the_cycling_pattern_has_full_partial_and_zero_acceptance() -> None:
    results, _ = run(make_requests(), LAYOUTS[1], speculators=scripted("cycling"), k=3)
    counts = {observation.num_verifier_accepted for result in results.values() for observation in result.spec}
    assert counts == {0, 1, 2, 3}


@pytest.mark.parametrize("k", [0, 1, 3, 5])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_exactly_max_tokens_are_emitted(k: int, max_tokens: int) -> None:
    results, _ = run(
        make_requests(max_tokens=max_tokens, ignore_eos=True),
        LAYOUTS[1],
        speculators=scripted("oracle") if k else None,
        k=k,
    )
    for index, prompt in enumerate(PROMPTS):
        assert results[f"r{index}"].token_ids == FUTURES[prompt][:max_tokens]


@pytest.mark.parametrize("k", [0, 1, 2, 5])
@pytest.mark.parametrize("room", range(1, 8))
def test_generation_stops_exactly_at_the_context_limit(room: int, k: int) -> None:
    """Drafts near the limit are clipped, never verified beyond it."""
    prompt = PROMPTS[-1]
    speculators = scripted("oracle") if k else None
    core = make_core(
        scripted_model(max_len=len(prompt) + room),
        speculators=speculators,
        k=k,
        deferred=True,
        config={"max_steps_in_flight": 2},
        cache={"block_size": 4, "num_blocks": 64},
    )
    result = Harness(core).run([request("r", prompt, max_tokens=100, ignore_eos=True)])["r"]
    assert result.token_ids == FUTURES[prompt][:room]
    assert result.finish is not None
    assert result.finish.reason == "length"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prefix_hit_does_not_change_the_tokens(depth: int) -> None:
    layout = {"block_size": 4, "depth": depth, "deferred": True, "chunk": None}
    core = make_core(
        scripted_model(max_len=128),
        speculators=scripted("cycling"),
        k=3,
        deferred=True,
        config={"max_steps_in_flight": depth},
        cache={"block_size": layout["block_size"], "num_blocks": 512},
    )
    harness = Harness(core)
    check(harness.run(make_requests()))
    first = {name: result.token_ids for name, result in harness.results.items()}
    harness.results.clear()
    again = harness.run(make_requests())
    assert {name: result.token_ids for name, result in again.items()} == first
    for index, prompt in enumerate(PROMPTS):
        assert again[f"r{index}"].num_cached_tokens == (len(prompt) - 1) // 4 * 4


SETTINGS = {
    "sampled": {"temperature": 0.8, "top_p": 0.9, "seed": 7},
    "top_k": {"temperature": 1.3, "top_k": 5, "seed": 8},
    "min_p": {"temperature": 1.0, "min_p": 0.3, "seed": 9},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    "sampled_penalties": {"temperature": 0.9, "presence_penalty": 2.0, "seed": 3},
    "logit_bias": {"logit_bias": {5: 4.0, 9: -100.0, 11: 3.0}},
    "bad_words": {"bad_words": ((7,), (8, 9), (10, 11, 12))},
    "allowed": {"allowed_token_ids": tuple(range(2, 40))},
    "min_tokens": {"min_tokens": 9, "logit_bias": {EOS: 3.0}},
    "stop_ids": {"stop_token_ids": (20, 21, 22), "min_tokens": 3},
    "logprobs": {"logprobs": 4},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_sampling_parameter_holds_at_every_draft_position(name: str) -> None:
    """The reference is the engine itself one request at a time without drafts; the drafter knows that run."""
    params = SETTINGS[name]
    plain: dict[str, Result] = {}
    for item in make_requests(**params):
        plain |= run([item], LAYOUTS[0])[0]
    futures = {prompt: [*plain[f"r{index}"].token_ids, *([0] * 8)] for index, prompt in enumerate(PROMPTS)}
    for pattern, layout in itertools.product(("oracle", "cycling", "always_wrong"), LAYOUTS[:2]):
        speculator = ScriptedSpeculator(PATTERNS[pattern], futures)
        results, _ = run(make_requests(**params), layout, speculators={"scripted": speculator}, k=4)
        for request_id, reference in plain.items():
            result = results[request_id]
            assert result.token_ids == reference.token_ids, (pattern, request_id)
            assert result.finish == reference.finish
            assert result.logprobs == reference.logprobs


def test_mixed_methods_and_k_in_one_batch() -> None:
    """Requests with k = 0, 1, 3 and with speculation off run side by side."""
    choices = [("scripted", 3), ("none", None), ("scripted", 1), ("scripted", 0), (None, None)]
    requests = [
        request(
            f"r{index}", prompt, max_tokens=MAX_TOKENS, method=choices[index % 5][0], k=choices[index % 5][1]
        )
        for index, prompt in enumerate(PROMPTS)
    ]
    results, _ = run(requests, LAYOUTS[1], speculators=scripted("cycling"), k=5)
    check(results)
    for index in range(len(PROMPTS)):
        drafted = [observation.num_drafted for observation in results[f"r{index}"].spec]
        method, k = choices[index % 5]
        limit = 0 if method == "none" else 5 if k is None else k
        assert max(drafted, default=0) <= limit
        assert bool(drafted) == (limit > 0)
