"""What a client may send as a grammar: what is wrong with it is found before it reaches the engine's steps, whatever it
takes."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import Future
from pathlib import Path
from threading import Event

import pytest
from llguidance import LLMatcher

from engine.config import ModelConfig
from engine.errors import CheckpointError, InvalidRequestError
from engine.grammar import compiler as compiler_module
from engine.grammar.checker import GrammarChecker
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.matcher import GrammarMatcher
from engine.grammar.source import native_grammar
from engine.messages import RequestTimes
from engine.params import MAX_CONSTRAINT_CHOICES, Constraint
from engine.request import Request
from engine.scheduler.grammars import Grammars
from engine.text.incremental_decoder import load_tokenizer
from tests.support.scheduler_harness import FakeCutter, make_request
from tests.support.tiny_models import TINY_EOS_TOKEN_ID, TINY_VOCAB_SIZE, make_tiny_tokenizer
from tools.server_process import descendants


def make_compiler(folder: Path) -> GrammarCompiler:
    return GrammarCompiler(
        ModelConfig(model="unused", tokenizer=str(folder)), TINY_VOCAB_SIZE, (TINY_EOS_TOKEN_ID,)
    )


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    """One for all tests: some of them end its process."""
    folder = make_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    (folder / "config.json").write_text("{}")
    return make_compiler(folder)


def waiting_request(name: str) -> Request:
    message = make_request(name, [1])
    return Request(
        request_id=name,
        message=message,
        cutter=FakeCutter(message, 8),
        order=(0, 0, 0),
        token_limit=8,
        stop_ids=(),
        token_ids=[1],
        times=RequestTimes(),
        kv_groups=(),
    )


def chain(num_rules: int) -> str:
    """Rules that are each other, without end for the stack."""
    return "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(num_rules)), f'r{num_rules}: "a"'])


BAD = {
    "broken JSON": (Constraint(kind="json_schema", text="{"), "is not a JSON schema"),
    "no schema": (Constraint(kind="json_schema", text="[1]"), "is not a JSON schema"),
    "unknown type": (Constraint(kind="json_schema", text='{"type": "foo"}'), "Invalid type: foo"),
    "unknown keyword": (Constraint(kind="json_schema", text='{"dependencies": {}}'), "dependencies"),
    "remote": (Constraint(kind="json_schema", text='{"$ref": "http://example.com/a"}'), "does not fetch"),
    "no value": (
        Constraint(kind="json_schema", text='{"type": "array", "minItems": 2, "maxItems": 1}'),
        "Unsatisfiable",
    ),
    "deep": (
        Constraint(kind="json_schema", text='{"items":' * 200 + "{}" + "}" * 200),
        "recursion limit exceeded",
    ),
    "open group": (Constraint(kind="regex", text="(a"), "unclosed group"),
    "look-around": (Constraint(kind="regex", text="(?=a)b"), "look-around"),
    "unknown rule": (Constraint(kind="grammar", text="start: foo"), 'unknown name: "foo"'),
    "unknown GBNF rule": (Constraint(kind="grammar", text="root ::= foo"), "Rule 'foo' not found"),
    "no start": (Constraint(kind="grammar", text='answer: "a"'), "has no rule `start` of Lark"),
    "no grammar": (Constraint(kind="grammar", text="hello"), "cannot be read as GBNF"),
    "nested GBNF": (
        Constraint(kind="grammar", text="root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000),
        "cannot be read as GBNF",
    ),
    "empty choice": (Constraint(kind="choice", choices=("",)), "allows no text"),
    "the whole stack": (Constraint(kind="grammar", text=chain(5000)), "too large or too deeply nested"),
    "minutes": (
        Constraint(kind="json_schema", text=json.dumps({"type": "integer", "multipleOf": 2_000_003})),
        "takes more than 2 s",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_used_is_refused_with_its_field_and_the_reason(
    name: str, compiler: GrammarCompiler
) -> None:
    constraint, reason = BAD[name]
    with pytest.raises(InvalidRequestError) as caught:
        compiler.start(constraint).result()
    assert caught.value.field == constraint.kind
    assert reason in caught.value.description
    assert "\n" not in caught.value.description


def test_after_a_grammar_that_ended_its_process_others_are_compiled(compiler: GrammarCompiler) -> None:
    for index in range(2):
        with pytest.raises(InvalidRequestError):
            compiler.start(Constraint(kind="grammar", text=chain(5001 + index))).result()
        assert not compiler.start(Constraint(kind="regex", text=f"a{index}")).result().is_error()


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_reaches_all_processes_is_no_fault_of_a_grammar(
    tmp_path: Path, signal_number: signal.Signals
) -> None:
    compiler, others = make_compiler(make_tiny_tokenizer(tmp_path)), descendants(os.getpid())
    compiler.start(Constraint(kind="regex", text="a")).result()
    (pid,) = set(descendants(os.getpid())) - set(others)
    os.kill(pid, signal_number)
    compiler.start(Constraint(kind="regex", text="b")).result()


def test_each_of_as_many_choices_as_there_may_be_can_be_written(
    compiler: GrammarCompiler, tmp_path: Path
) -> None:
    choices = tuple(f'{i} of {MAX_CONSTRAINT_CHOICES} \n"é"' for i in range(MAX_CONSTRAINT_CHOICES))
    compiled = compiler.start(Constraint(kind="choice", choices=choices)).result()
    tokenizer = load_tokenizer(make_tiny_tokenizer(tmp_path))
    for choice in choices[::100]:
        matcher = GrammarMatcher(compiled.deep_copy())
        for token_id in tokenizer.encode(choice, add_special_tokens=False).ids:
            assert not matcher.is_complete
            matcher.native.compute_bitmask()
            matcher.advance(token_id)
        assert matcher.is_complete, matcher.error


def test_the_same_grammar_is_compiled_once(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = []

    def check(self: GrammarChecker, constraint: Constraint) -> None:
        checked.append(constraint)

    monkeypatch.setattr(GrammarChecker, "check", check)
    first = Constraint(kind="regex", text="once")
    assert compiler.start(first).result() is compiler.start(Constraint(kind="regex", text="once")).result()
    assert checked == [first]


def test_few_grammars_are_kept(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_KEPT", 2)
    constraints = [Constraint(kind="regex", text=f"kept{index}") for index in range(3)]
    first = compiler.start(constraints[0])
    compiler.start(constraints[1])
    assert compiler.start(constraints[0]) is first  # used last
    compiler.start(constraints[2]).result()  # the last one: nothing of this test goes on behind its end
    assert compiler.start(constraints[0]) is first


def test_grammars_that_nobody_waits_for_any_more_hold_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come and go while the first one's grammar is compiled."""
    compiler = make_compiler(make_tiny_tokenizer(tmp_path))
    checked: list[str] = []
    has_begun, may_end = Event(), Event()

    def check(self: GrammarChecker, constraint: Constraint) -> None:
        checked.append(constraint.text)
        has_begun.set()
        may_end.wait(timeout=10)

    monkeypatch.setattr(GrammarChecker, "check", check)
    grammars = Grammars(compiler.start, TINY_VOCAB_SIZE)

    def come(text: str) -> tuple[Request, Future[LLMatcher]]:
        request, compiled = waiting_request(text), compiler.start(Constraint(kind="regex", text=text))
        grammars.hold(request, compiled)
        return request, compiled

    come("begun")
    assert has_begun.wait(timeout=10)
    gone = [come(text)[0] for text in ("gone1", "gone2", "shared", "back")]
    _, shared = come("shared")
    assert all(map(grammars.forget, gone))
    _, back = come("back")
    may_end.set()
    assert shared.result() is not None
    assert back.result() is not None
    assert checked == ["begun", "shared", "back"]


def test_without_a_tokenizer_there_are_no_grammars(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    compiled = make_compiler(tmp_path).start(Constraint(kind="json_object"))
    with pytest.raises(CheckpointError, match="no tokenizer"):
        compiled.result()


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (Constraint(kind="regex", text=""), "empty text"),
        (Constraint(kind="choice"), "got no choices"),
        (Constraint(kind="choice", choices=("a",) * 1025), "got 1025 choices, expected at most 1024"),
        (
            Constraint(kind="choice", choices=("a" * 40_000,) * 2),
            "got 80000 characters, expected at most 65536",
        ),
        (Constraint(kind="json_schema", text="x" * 65_537), "got 65537 characters"),
    ],
)
def test_sizes_are_looked_at_first(constraint: Constraint, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        constraint.validate()


@pytest.mark.parametrize(
    "text", ['start: "a"', '?start: "a"', 'X: "a"\n  !start : X', "%llguidance {}\nstart: /a/"]
)
def test_lark_is_known_by_its_first_rule(text: str) -> None:
    assert native_grammar(Constraint(kind="grammar", text=text)) == LLMatcher.grammar_from_lark(text)


def test_gbnf_with_a_rule_that_is_called_as_that_of_lark_is_not_taken_for_lark() -> None:
    with pytest.raises(InvalidRequestError, match="cannot be read as GBNF: Rule 'start' already exists"):
        native_grammar(Constraint(kind="grammar", text='root ::= start\nstart ::= "a"'))
