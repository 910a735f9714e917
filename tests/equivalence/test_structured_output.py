"""With a grammar, too, drafts change nothing: neither the tokens of its request, nor those of requests beside it.

The target is the tiny one of the registry's tests: it knows no JSON, so every token that fits is the grammar's doing.
The oracle is the engine without speculation, one step in flight.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache, partial

import jsonschema
import msgspec
import pytest
from tokenizers import Tokenizer

from engine.config import engine_config
from engine.core import EngineCore
from engine.errors import InvalidRequestError
from engine.messages import AddRequest
from engine.params import Constraint
from tests.support.engine_harness import Harness, Result, make_core, request, scripted_model
from tests.support.random_schemas import random_schema
from tests.support.tiny_drafters import Workshop, shared_workshop
from tests.support.tiny_models import TINY_EOS_TOKEN_ID

NUM_SCHEMAS = 200
METHODS = ("ngram", "suffix", "draft_model", "eagle")
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
WORDS = r"(the |dog |re)*\d{0,3}"

LARK = """
start: item ("," item)*
item: WORD "=" NUMBER
WORD: /[a-z ]+/
NUMBER: /[0-9]{1,3}/
"""
GBNF = """
root ::= item ("; " item)*
item ::= [a-z ]+ "!" | "(" root ")"
"""


def schema(value: Mapping[str, object]) -> Constraint:
    return Constraint(kind="json_schema", text=json.dumps(value))


TEXT = schema({"type": "string", **COMPACT})
CONSTRAINTS: Sequence[Constraint | None] = (
    TEXT,
    None,
    Constraint(kind="regex", text=WORDS),
    schema({"type": "array", "items": {"type": "string"}, "maxItems": 4, **COMPACT}),
    Constraint(kind="choice", choices=("the dog", "the dog sleeps", "a request", "größer 🙂")),
    None,
    Constraint(kind="grammar", text=LARK),
    Constraint(kind="json_object"),
    Constraint(kind="grammar", text=GBNF),
)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return shared_workshop(tmp_path_factory)


@cache
def tokenizer_of(workshop: Workshop) -> Tokenizer:
    return Tokenizer.from_file(str(workshop.tokenizer_path / "tokenizer.json"))


def text_of(workshop: Workshop, result: Result) -> str:
    """Without an end token."""
    text: str = tokenizer_of(workshop).decode(result.token_ids)
    return text


def constrained(requests: Sequence[AddRequest]) -> list[AddRequest]:
    """The constraints go around."""
    return [
        msgspec.structs.replace(item, constraint=CONSTRAINTS[index % len(CONSTRAINTS)])
        for index, item in enumerate(requests)
    ]


@cache
def plain(workshop: Workshop, setting: str) -> dict[str, Result]:
    return Harness(workshop.core(())).run(constrained(workshop.requests(setting, [(None, None)])))


def core_with(workshop: Workshop, method: str, depth: int, num_blocks: int | None = None) -> EngineCore:
    methods = (method,) if method == "ngram" else (method, "ngram")
    drafters = [workshop.drafter(name) for name in methods]
    return workshop.core(
        drafters, depth=depth, num_blocks=num_blocks, max_prefill_chunk=None if depth == 1 else 7
    )


def check_equal(results: Mapping[str, Result], expected: Mapping[str, Result]) -> None:
    assert results.keys() == expected.keys()
    for request_id, result in results.items():
        other = expected[request_id]
        assert (result.token_ids, result.finish) == (other.token_ids, other.finish), request_id
        assert [entry.token.token_id for entry in result.logprobs] == [
            entry.token.token_id for entry in other.logprobs
        ]
        for one, two in zip(result.logprobs, other.logprobs, strict=True):
            assert one.token.logprob == pytest.approx(two.token.logprob, abs=1e-4)


# ---- random schemas ------------------------------------------------------------------------------------------------


def schema_requests(method: str, seed: int | None) -> list[AddRequest]:
    """Every second one without white space, so that more of them come to an end."""
    draws = {"temperature": 0.0} if seed is None else {"temperature": 0.8, "seed": seed}
    return [
        request(
            f"r{index}",
            [259 + index % 40, 270],
            constraint=schema(random_schema(index) | (COMPACT if index % 2 else {})),
            method=method,
            max_tokens=60,
            **draws,
        )
        for index in range(NUM_SCHEMAS)
    ]


@cache
def plain_schemas(workshop: Workshop, seed: int | None) -> dict[str, Result]:
    return Harness(workshop.core(())).run(schema_requests("none", seed))


@pytest.mark.parametrize("seed", [None, 3], ids=["greedy", "seeded"])
def test_random_schemas_give_valid_json(seed: int | None, workshop: Workshop) -> None:
    reasons: Counter[str] = Counter()
    for index, result in enumerate(plain_schemas(workshop, seed).values()):
        assert result.finish is not None
        reasons[result.finish.reason] += 1
        if result.finish.reason == "stop":
            jsonschema.validate(
                json.loads(text_of(workshop, result)),
                random_schema(index),
                format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER,
            )
        else:
            assert result.finish.reason == "length"
            assert len(result.token_ids) == 60
    assert sum(reasons.values()) == NUM_SCHEMAS
    assert reasons["stop"] > NUM_SCHEMAS / 2


@pytest.mark.parametrize("seed", [None, 3], ids=["greedy", "seeded"])
@pytest.mark.parametrize("method", METHODS)
def test_drafts_change_no_json(method: str, seed: int | None, workshop: Workshop) -> None:
    core = core_with(workshop, method, depth=1 if seed is None else 2)
    results = Harness(core).run(schema_requests(method, seed))
    check_equal(results, plain_schemas(workshop, seed))
    seen = [item for result in results.values() for item in result.spec]
    assert any(item.num_accepted for item in seen)
    assert any(item.num_discarded_by_grammar for item in seen)


# ---- all kinds, beside requests without ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting", ["greedy", "seeded", "penalties", "min_tokens", "stop_strings", "logprobs"]
)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_output_equals_plain_decoding(method: str, depth: int, setting: str, workshop: Workshop) -> None:
    core = core_with(workshop, method, depth)
    requests = constrained(
        workshop.requests(setting, [(method, 5), (method, 3), ("none", None), ("ngram", 2)])
    )
    check_equal(Harness(core).run(requests), plain(workshop, setting))


@pytest.mark.parametrize("setting", ["greedy", "logprobs"])
def test_requests_beside_a_grammar_get_what_they_get_alone(setting: str, workshop: Workshop) -> None:
    results, alone = plain(workshop, setting), workshop.plain(setting)
    free = [index for index in range(len(workshop.prompts)) if CONSTRAINTS[index % len(CONSTRAINTS)] is None]
    assert free
    check_equal({f"r{i}": results[f"r{i}"] for i in free}, {f"r{i}": alone[f"r{i}"] for i in free})


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_preemption_changes_nothing(method: str, depth: int, workshop: Workshop) -> None:
    core = core_with(workshop, method, depth, num_blocks=10)
    results = Harness(core).run(texts(workshop, [(method, 3), (method, 5)]))
    check_equal(results, plain_texts(workshop))
    assert any(result.num_preemptions for result in results.values())


def texts(workshop: Workshop, choices: Sequence[tuple[str | None, int | None]]) -> list[AddRequest]:
    """Each request has a grammar that lets it become long."""
    return [msgspec.structs.replace(item, constraint=TEXT) for item in workshop.requests("seeded", choices)]


@cache
def plain_texts(workshop: Workshop) -> dict[str, Result]:
    return Harness(workshop.core(())).run(texts(workshop, [(None, None)]))


@pytest.mark.parametrize("depth", [1, 2])
def test_aborts_leave_the_others_alone(depth: int, workshop: Workshop) -> None:
    core = core_with(workshop, "eagle", depth)
    harness = Harness(core)
    for item in constrained(workshop.requests("greedy", [("eagle", 4)])):
        harness.add(item)
    harness.abort("r0")  # its grammar is being compiled, or was just compiled
    while not harness.results["r3"].token_ids:
        harness.step()
        assert harness.num_steps < 1000
    harness.abort("r3", "r4")
    results = harness.run()
    for request_id in ("r0", "r3", "r4"):
        finish = results.pop(request_id).finish
        assert finish is not None
        assert finish.reason == "cancelled"
    expected = plain(workshop, "greedy")
    check_equal(results, {request_id: expected[request_id] for request_id in results})


@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_grammar_forces_is_drafted_on_the_host(depth: int, workshop: Workshop) -> None:
    """Each of these characters is a token, and in no other one."""
    core = core_with(workshop, "suffix", depth)
    forced = r"(\?:<=>\{\|\}~@){2}"
    constraint = Constraint(kind="regex", text=f"[0-9]{forced}")
    item = request("r", workshop.prompts[4], constraint=constraint, method="suffix", max_tokens=24)
    result = Harness(core).run([item])["r"]
    assert text_of(workshop, result)[1:] == "?:<=>{|}~@" * 2
    seen = [(entry.num_drafted, entry.num_accepted) for entry in result.spec]
    assert max(seen) == (5, 5)
    assert sum(accepted for _, accepted in seen) >= 15


def test_every_kind_is_kept(workshop: Workshop) -> None:
    """As far as the output came to an end: all of it; else its beginning is not looked at."""
    patterns = {
        2: WORDS,
        4: "the dog|the dog sleeps|a request|größer 🙂",
        6: r"[a-z ]+=[0-9]{1,3}(,[a-z ]+=[0-9]{1,3})*",
    }
    num_ended: Counter[int] = Counter()
    for setting in ("greedy", "seeded"):
        for index, result in enumerate(plain(workshop, setting).values()):
            kind = index % len(CONSTRAINTS)
            assert result.finish is not None
            if result.finish.reason == "stop" and kind in patterns:
                assert re.fullmatch(patterns[kind], text_of(workshop, result))
                num_ended[kind] += 1
            elif result.finish.reason == "stop" and kind in (0, 3, 7):
                json.loads(text_of(workshop, result))
                num_ended[kind] += 1
    assert num_ended[2]
    assert num_ended[4]


# ---- where it ends -------------------------------------------------------------------------------------------------


def run_one(workshop: Workshop, constraint: Constraint, **params: object) -> Result:
    core = workshop.core((workshop.drafter("eagle"),))
    item = request("r", workshop.prompts[4], constraint=constraint, method="eagle", **params)
    return Harness(core).run([item])["r"]


@pytest.mark.parametrize(
    "params", [{}, {"ignore_eos": True}, {"min_tokens": 12}], ids=lambda value: str(value)
)
def test_a_complete_output_ends_without_another_token(params: dict[str, object], workshop: Workshop) -> None:
    """Also where end tokens may not stand."""
    result = run_one(workshop, Constraint(kind="regex", text="(the){3}!"), **params)
    assert text_of(workshop, result) == "thethethe!"
    assert result.finish is not None
    assert result.finish.is_constraint_met
    assert result.finish.eos_token_id is None


def test_completion_beats_the_limit_on_the_same_token(workshop: Workshop) -> None:
    result = run_one(workshop, Constraint(kind="regex", text="a"), max_tokens=1)
    assert result.finish is not None
    assert result.finish.reason == "stop"


def test_what_may_go_on_ends_by_an_end_token(workshop: Workshop) -> None:
    wishes = {"logit_bias": {TINY_EOS_TOKEN_ID: 100.0}}
    result = run_one(workshop, Constraint(kind="regex", text="(re){2}(0[a-z]*)?"), **wishes)
    assert result.finish is not None
    assert result.finish.eos_token_id == TINY_EOS_TOKEN_ID
    assert text_of(workshop, result) == "rere"


def test_min_tokens_go_on_where_the_grammar_can(workshop: Workshop) -> None:
    wishes = {"logit_bias": {TINY_EOS_TOKEN_ID: 100.0}, "min_tokens": 5}
    result = run_one(workshop, Constraint(kind="regex", text="(re){2}(0[a-z]*)?"), **wishes)
    assert len(result.token_ids) == 6
    assert result.token_ids[-1] == TINY_EOS_TOKEN_ID


def test_stop_tokens_of_the_request_end_it_where_the_grammar_lets_it(workshop: Workshop) -> None:
    comma = tokenizer_of(workshop).token_to_id(",")
    wishes = {"logit_bias": {comma: 100.0}, "stop_token_ids": (comma,)}
    result = run_one(workshop, Constraint(kind="regex", text="(re){2}(0[a-z]*)?"), **wishes)
    assert result.finish is not None
    assert result.finish.stop_token_id == comma
    assert text_of(workshop, result) == "rere,"


def test_the_ratio_test_keeps_grammars_too(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has tokens of its own, but only such as the masks leave."""
    settings = partial(engine_config, verification="ratio")
    monkeypatch.setattr("tests.support.tiny_drafters.engine_config", settings)
    core = workshop.core((workshop.drafter("draft_model"),))
    requests = [
        request(
            f"r{index}",
            prompt,
            constraint=Constraint(kind="regex", text="[ -~]*"),
            method="draft_model",
            temperature=1.0,
            seed=index,
        )
        for index, prompt in enumerate(workshop.prompts)
    ]
    results = Harness(core).run(requests)
    assert all(re.fullmatch("[ -~]*", text_of(workshop, result)) for result in results.values())
    assert any(item.num_accepted for result in results.values() for item in result.spec)


def test_synthetic_acceptance_cannot_keep_a_grammar() -> None:
    rates = {"allow_synthetic": True, "synthetic_acceptance": (1.0,)}
    core = make_core(scripted_model(), config=rates)
    with pytest.raises(InvalidRequestError, match="regex: cannot be kept"):
        core.handle(request("r", [5], constraint=Constraint(kind="regex", text="a")))
    assert not core.has_work


def test_a_grammar_that_meets_what_is_not_allowed_fails_its_request_only(workshop: Workshop) -> None:
    core = workshop.core((workshop.drafter("ngram"),))
    only_re = tokenizer_of(workshop).encode("re").ids
    stuck = request(
        "stuck", [270], constraint=Constraint(kind="regex", text="re!"), allowed_token_ids=tuple(only_re)
    )
    results = Harness(core).run([stuck, *workshop.requests("greedy", [(None, None)])])
    finish = results.pop("stuck").finish
    assert finish is not None
    assert (finish.reason, finish.field) == ("error", "")
    check_equal(results, workshop.plain("greedy"))
