"""Whether an outcome is right: its status, given what was done to the request and when the engine was down, and its
tokens, given those of the undisturbed run. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from server.pb.slipstream.v1 import generation_pb2 as pb
from tools.chaos.client import Outcome
from tools.chaos.outages import Outage

SLACK = 2.0  # seconds between what the server does and what this process sees of it

# Besides OK, and UNAVAILABLE of a call that an outage fell into.
_STATUSES: dict[str, frozenset[tuple[str, str]]] = {
    "none": frozenset(),
    "cancel": frozenset({("CANCELLED", "")}),
    "abort": frozenset(),
    "deadline": frozenset({("DEADLINE_EXCEEDED", ""), ("RESOURCE_EXHAUSTED", "TOO_LATE")}),
    "slow": frozenset({("RESOURCE_EXHAUSTED", "SLOW_READER")}),
}


@dataclass(frozen=True)
class Answer:
    """What the undisturbed run brought, by choice."""

    tokens: Mapping[int, list[int]]
    texts: Mapping[int, str]
    finished: Mapping[int, int]


def fault_of(outcome: Outcome, answer: Answer, outages: Sequence[Outage]) -> str | None:
    """What is wrong, in words; None: nothing."""
    if outcome.has_given_up:
        return "the call did not end"
    return _status_fault(outcome, outages) or _content_fault(outcome, answer)


def _status_fault(outcome: Outcome, outages: Sequence[Outage]) -> str | None:
    if outcome.status == "OK" or (outcome.status, outcome.reason) in _STATUSES[outcome.attempt.disturbance]:
        return None
    if outcome.status == "UNAVAILABLE" and any(
        outage.began - SLACK <= outcome.ended and outcome.began <= outage.ended + SLACK for outage in outages
    ):
        return None
    return f"got {outcome.status} {outcome.reason}".strip()


def _content_fault(outcome: Outcome, answer: Answer) -> str | None:
    if outcome.status == "OK" and outcome.finished.keys() != answer.finished.keys():
        return f"got the end of choices {sorted(outcome.finished)}, expected {sorted(answer.finished)}"
    for index, tokens in outcome.tokens.items():
        expected = answer.tokens[index]
        reason = outcome.finished.get(index)
        is_cut = reason is None or (
            reason == pb.FINISH_REASON_CANCELLED and outcome.attempt.disturbance == "abort"
        )
        if is_cut:
            if tokens != expected[: len(tokens)]:
                return f"choice {index}: got other tokens than the undisturbed run begins with"
            # A character that was not whole yet when the output ended is shown as U+FFFD.
            if not answer.texts[index].startswith(outcome.texts[index].rstrip("\ufffd")):
                return f"choice {index}: got another text than the undisturbed run begins with"
        elif (tokens, outcome.texts[index], reason) != (
            expected,
            answer.texts[index],
            answer.finished[index],
        ):
            return f"choice {index}: got {len(tokens)} tokens that differ from the undisturbed run's {len(expected)}"
    return None
