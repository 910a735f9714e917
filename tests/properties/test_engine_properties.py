"""Random requests on random engines, with all their parts: what a request gets is what it gets alone on an engine
without speculation, and everything that it held comes back.

The scheduler's property test has a fake device, the equivalence tests have one dimension each. Here these meet: draft
methods, the policy and its administrator, captured steps, the ratio test, preemption, prefix hits, grammars, aborts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from engine.control import ConfigureSpeculation, SpeculatorChange
from engine.core import EngineCore
from engine.messages import AddRequest, PositionLogprobs
from engine.params import Constraint, SpeculationParams
from tests.support.cpu_graphs import use_graphs
from tests.support.engine_harness import Harness, Result, request
from tests.support.tiny_drafters import MAX_DRAFTS, MAX_MODEL_LEN, Workshop, shared_workshop
from tests.support.tiny_models import HABITUAL_TOKENS, TINY_EOS_TOKEN_ID

NUM_ENGINES = 16
NUM_REQUESTS = 8
METHODS = {
    "llama": ("ngram", "suffix", "draft_model", "eagle"),
    "gemma4_ple": ("ngram", "suffix", "gemma4_mtp"),
}
OWN_KV = ("draft_model", "eagle")  # an engine has one of them at most
CONSTRAINTS = (
    Constraint(kind="regex", text=r"(the |dog |re)*\d{0,3}"),
    Constraint(kind="choice", choices=("the dog", "the dog sleeps", "größer 🙂")),
    Constraint(kind="json_object"),
)


class Draws(random.Random):
    """What an engine and its requests are made of."""

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def methods(self, family: str) -> list[str]:
        drawn = [method for method in METHODS[family] if self.chance(0.6)]
        own = [method for method in drawn if method in OWN_KV]
        return [method for method in drawn if method not in own[1:]]

    def engine(self, workshop: Workshop, methods: Sequence[str], verification: str) -> EngineCore:
        block_size = self.choice((1, 4, 16))
        fewest = -(-MAX_MODEL_LEN // block_size)
        return workshop.core(
            [workshop.drafter(method) for method in methods],
            depth=self.choice((1, 2)),
            block_size=block_size,
            num_blocks=self.choice((fewest, fewest + 3, 2 * fewest, 10 * fewest)),
            config={"verification": verification, "draft_policy": self.choice(("auto", "first"))},
            max_num_seqs=self.choice((2, 5, 8)),
            max_num_batched_tokens=self.choice((1, 5, 16, 2048)),
            max_prefill_chunk=self.choice((None, 1, 7)),
        )

    def prompt(self, workshop: Workshop) -> list[int]:
        """The beginning of a text that the target would go on with, often of the same, or of anything."""
        length = self.choice((1, MAX_MODEL_LEN - 1, *self.choices(range(1, MAX_MODEL_LEN), k=6)))
        if self.chance(0.2):
            return self.choices(HABITUAL_TOKENS[1:], k=length)
        text = self.choice(workshop.sequences[:3] if self.chance(0.5) else workshop.sequences)
        return (text * length)[:length]

    def params(self, workshop: Workshop, *, is_plain: bool) -> dict[str, Any]:
        """Plain ones leave a step to be captured as a whole."""
        max_tokens = self.choice((1, 2, 3, 24, 99))
        params: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": self.chance(0.3)}
        if self.chance(0.4):
            params |= {"temperature": self.choice((0.3, 0.8, 1.2)), "seed": self.getrandbits(32)}
            params |= self.choice(({}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}))
        if is_plain or self.chance(0.3):
            return params
        text = self.choice([text for text in workshop.sequences if len(text) > 6])
        start = self.randrange(len(text) - 4)
        more = {
            "min_tokens": self.randint(0, max_tokens),
            "logit_bias": {TINY_EOS_TOKEN_ID: 4.0, self.choice(HABITUAL_TOKENS): -100.0},
            "repetition_penalty": 1.1,
            "frequency_penalty": 0.2,
            "bad_words": (tuple(text[start : start + 2]), (text[start + 3],)),
            "stop_token_ids": tuple(text[start : start + 2]),
            "stop_strings": (tokenizer_of(workshop).decode(text[start : start + 3])[1:4] or "nowhere",),
            "logprobs": self.choice((0, 3)),
            "prompt_logprobs": self.choice((0, 2)),
        }
        return params | {name: more[name] for name in self.sample(sorted(more), k=4)}

    def request(self, name: str, workshop: Workshop, methods: Sequence[str], *, is_plain: bool) -> AddRequest:
        method = self.choice((None, "none", *methods, *methods))
        return request(
            name,
            self.prompt(workshop),
            method=method,
            k=self.choice((None, 0, 1, 3, MAX_DRAFTS)) if method in methods else None,
            priority=self.choice((0, 0, 1)),
            cache_salt=self.choice(("", "", "salt")),
            constraint=self.choice(CONSTRAINTS) if not is_plain and self.chance(0.1) else None,
            **self.params(workshop, is_plain=is_plain),
        )

    def change(self, methods: Sequence[str]) -> ConfigureSpeculation:
        """What an administrator might do."""
        change = SpeculatorChange(
            method=self.choice(methods), is_enabled=self.chance(0.5), k=self.randint(1, MAX_DRAFTS)
        )
        return ConfigureSpeculation(changes=(change,), default_method=self.choice((None, "auto", "none")))


@pytest.mark.parametrize("seed", range(NUM_ENGINES))
def test_a_request_gets_what_it_gets_alone(
    seed: int, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = Draws(seed)
    workshop = shared_workshop(tmp_path_factory, draws.choice(tuple(METHODS)))
    methods, verification = draws.methods(workshop.family), ("ratio" if seed % 4 == 3 else "coupled")
    requests = [
        draws.request(f"r{index}", workshop, methods, is_plain=seed % 5 < 2) for index in range(NUM_REQUESTS)
    ]
    alone = plain_engine(workshop)
    if seed % 3 > 0:
        use_graphs(monkeypatch)
    harness = Harness(draws.engine(workshop, methods, verification))
    aborted = run(harness, requests, methods, draws)
    for item in requests:
        result = harness.results[item.request_id]
        check_counts(result)
        if verification == "coupled" or item.params.is_greedy:  # else only the distribution is the same
            undrafted = msgspec.structs.replace(item, speculation=SpeculationParams())
            expected = Harness(alone).run([undrafted])[item.request_id]
            check_equal(result, expected, is_aborted=item.request_id in aborted)


# ---- helpers ---------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_drafter_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A method that raises would lose its drafts, be logged, and otherwise go unseen."""
    yield
    assert not [record.getMessage() for record in caplog.records]


@cache
def plain_engine(workshop: Workshop) -> EngineCore:
    return workshop.core(())


@cache
def tokenizer_of(workshop: Workshop) -> Tokenizer:
    return Tokenizer.from_file(str(workshop.tokenizer_path / "tokenizer.json"))


def run(harness: Harness, requests: Sequence[AddRequest], methods: Sequence[str], draws: Draws) -> set[str]:
    """Requests come, and some go, between steps. Returns those that were aborted."""
    pause, abort_rate = draws.choice((0.0, 0.3, 0.8)), draws.choice((0.0, 0.0, 0.05))
    change_rate = draws.choice((0.0, 0.1)) if methods else 0.0
    to_come, aborted = list(requests), set()
    while to_come:
        if not draws.chance(pause):
            harness.add(to_come.pop(0))
        harness.step()
        if draws.chance(change_rate):
            harness.core.control(draws.change(methods), lambda answer: None)
        live = [name for name, result in harness.results.items() if result.finish is None]
        if live and draws.chance(abort_rate):
            aborted.add(draws.choice(live))
            harness.abort(*aborted)
    harness.run()
    return aborted


def check_counts(result: Result) -> None:
    """What is reported of verifications agrees with what came."""
    for item in result.spec:
        assert 0 <= item.num_accepted <= item.num_verifier_accepted <= item.num_drafted <= MAX_DRAFTS
        assert item.num_emitted - item.num_accepted in (0, 1)
        assert item.num_discarded_after_stop >= 0
        assert item.num_discarded_over_limit >= 0
    assert sum(item.num_emitted for item in result.spec) <= max(len(result.token_ids) - 1, 0)


def check_equal(result: Result, expected: Result, *, is_aborted: bool) -> None:
    assert result.token_ids == expected.token_ids[: len(result.token_ids)]
    check_logprobs(result.logprobs, expected.logprobs[: len(result.logprobs)])
    if not is_aborted:
        assert (len(result.token_ids), result.finish) == (len(expected.token_ids), expected.finish)
        assert len(result.logprobs) == len(expected.logprobs)
    if result.token_ids:
        check_logprobs(result.prompt_logprobs or [], expected.prompt_logprobs or [])


def check_logprobs(
    entries: Sequence[PositionLogprobs | None], expected: Sequence[PositionLogprobs | None]
) -> None:
    def flatten(positions: Sequence[PositionLogprobs | None]) -> list[Any]:
        return [entry for position in positions if position for entry in (position.token, *position.top)]

    one, other = flatten(entries), flatten(expected)
    assert [(entry.token_id, entry.rank) for entry in one] == [
        (entry.token_id, entry.rank) for entry in other
    ]
    assert [entry.logprob for entry in one] == pytest.approx([entry.logprob for entry in other], abs=1e-6)
