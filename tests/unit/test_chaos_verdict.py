"""What a chaos run calls wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from server.pb.slipstream.v1 import generation_pb2 as pb
from tools.chaos.client import Outcome
from tools.chaos.outages import Outage
from tools.chaos.plan import Attempt, Disturbance, attempts, questions
from tools.chaos.verdict import SLACK, Answer, fault_of
from tools.server_log import errors_in_log
from tools.server_state import MAX_GROWTH, Held, leaks

STOP, CANCELLED = pb.FINISH_REASON_STOP, pb.FINISH_REASON_CANCELLED
ANSWER = Answer(tokens={0: [5, 6, 7]}, texts={0: "abc"}, finished={0: STOP})
HELD = Held(frontend_bytes=10**8, frontend_files=20, processes=2, free_blocks=100)


def outcome(disturbance: Disturbance = "none", **fields: Any) -> Outcome:
    """One that is right: ten seconds long, with the whole answer."""
    whole: dict[str, Any] = {"tokens": {0: [5, 6, 7]}, "texts": {0: "abc"}, "finished": {0: STOP}}
    return Outcome(Attempt(0.0, 0, disturbance), began=100.0, ended=110.0, **whole | fields)


def beginning(disturbance: Disturbance, status: str, reason: str = "", **fields: Any) -> Outcome:
    """One that was cut after two tokens."""
    part: dict[str, Any] = {"tokens": {0: [5, 6]}, "texts": {0: "ab"}, "finished": {}}
    return outcome(disturbance, status=status, reason=reason, **part | fields)


@pytest.mark.parametrize(
    "right",
    [
        outcome(),
        outcome("cancel"),
        beginning("cancel", "CANCELLED"),
        beginning("abort", "OK", finished={0: CANCELLED}),
        beginning("abort", "OK", finished={0: CANCELLED}, texts={0: "a\ufffd"}),  # half of a character
        beginning("deadline", "DEADLINE_EXCEEDED"),
        outcome("deadline", status="RESOURCE_EXHAUSTED", reason="TOO_LATE", tokens={}, texts={}, finished={}),
        beginning("slow", "RESOURCE_EXHAUSTED", "SLOW_READER"),
    ],
)
def test_what_was_done_to_a_request_explains_its_end(right: Outcome) -> None:
    assert fault_of(right, ANSWER, []) is None


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (outcome(has_given_up=True), "did not end"),
        (beginning("none", "CANCELLED"), "got CANCELLED"),
        (beginning("none", "UNAVAILABLE", "ENGINE_UNAVAILABLE"), "got UNAVAILABLE"),
        (beginning("cancel", "INTERNAL"), "got INTERNAL"),
        (beginning("deadline", "RESOURCE_EXHAUSTED", "QUEUE_FULL"), "QUEUE_FULL"),
        (beginning("none", "OK"), "got the end of choices []"),
        (beginning("none", "OK", finished={0: CANCELLED}), "differ"),
        (outcome(tokens={0: [5, 6, 8]}), "differ"),
        (outcome(texts={0: "abd"}), "differ"),
        (outcome(finished={0: pb.FINISH_REASON_LENGTH}), "differ"),
        (beginning("cancel", "CANCELLED", tokens={0: [5, 9]}), "other tokens"),
        (beginning("cancel", "CANCELLED", texts={0: "x"}), "another text"),
    ],
)
def test_what_nothing_explains_is_wrong(wrong: Outcome, words: str) -> None:
    assert words in (fault_of(wrong, ANSWER, []) or "nothing")


@pytest.mark.parametrize(
    ("outage", "is_right"),
    [
        (Outage(began=105.0), True),
        (Outage(began=90.0, ended=101.0), True),
        (Outage(began=90.0, ended=99.0 - SLACK), False),
        (Outage(began=111.0 + SLACK), False),
    ],
)
def test_unavailable_is_right_in_an_outage_only(outage: Outage, is_right: bool) -> None:
    cut = beginning("none", "UNAVAILABLE", "ENGINE_UNAVAILABLE")
    assert (fault_of(cut, ANSWER, [outage]) is None) == is_right


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"free_blocks": 99}, "free blocks: got 99, expected 100"),
        ({"frontend_files": 21}, "file descriptors"),
        ({"processes": 3}, "processes"),
        ({"frontend_bytes": 10**8 + MAX_GROWTH + 1}, "resident bytes"),
    ],
)
def test_what_a_server_keeps_is_a_leak(change: dict[str, int], words: str) -> None:
    after = Held(**{name: getattr(HELD, name) for name in HELD.__struct_fields__} | change)
    (leak,) = leaks(HELD, after)
    assert words in leak
    assert leaks(HELD, HELD) == []


def test_a_plan_is_the_same_for_the_same_seed_and_disturbs_a_third() -> None:
    plan = attempts(10, rate=100.0, seconds=30.0, slow_timeout=2.0, seed=3)
    assert plan == attempts(10, rate=100.0, seconds=30.0, slow_timeout=2.0, seed=3)
    assert questions(10, seed=3) == questions(10, seed=3)
    shares = {kind: sum(a.disturbance == kind for a in plan) / len(plan) for kind in ("none", "deadline")}
    assert shares == pytest.approx({"none": 0.65, "deadline": 0.10}, abs=0.03)


def test_errors_and_tracebacks_in_a_log_are_found(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(
        '{"level": "info", "event": "call ended"}\n'
        '{"level": "error", "event": "engine died, starting another"}\n'
        '{"level": "error", "event": "handler failed", "exception": "ValueError"}\n'
        "Traceback (most recent call last):\n"
    )
    found = errors_in_log(log, expected=("engine died",))
    assert found == ["handler failed ValueError", "Traceback (most recent call last):"]
