"""Which requests a chaos run sends, when, and what is done to each of them. Seeded; knows no server."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from server.bench.load import poisson_arrivals
from server.pb.slipstream.v1 import generation_pb2 as pb

Disturbance = Literal["none", "cancel", "abort", "deadline", "slow"]

_SHARES: dict[Disturbance, float] = {"cancel": 0.15, "abort": 0.05, "deadline": 0.10, "slow": 0.05}
_METHODS = (None, "none", "auto", "ngram", "suffix")
_WORDS = ("the", "quick", "dog", "sleeps", "a", "request", "is", "tokens", "sun", "naïve", "東京", "0123")
_SCHEMA = '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": false}'
MAX_TOKENS = 120


@dataclass(frozen=True)
class Attempt:
    """One request of a run."""

    due: float  # seconds from the start
    question: int  # index of what is asked
    disturbance: Disturbance
    after_messages: int = 0  # that are read before a cancel or an abort
    deadline: float | None = None  # seconds
    pause: float = 0.0  # seconds without reading


def questions(num: int, seed: int) -> list[pb.GenerateRequest]:
    """Requests of every kind whose answer is determined: greedy, or with a seed."""
    generator = random.Random(seed)
    return [_question(generator, i) for i in range(num)]


def attempts(
    num_questions: int, rate: float, seconds: float, slow_timeout: float, seed: int
) -> list[Attempt]:
    """Requests at random times, `rate` a second. Half of the slow readers pause for longer than `slow_timeout`."""
    generator = random.Random(seed)
    arrivals = poisson_arrivals(max(1, int(rate * seconds)), rate, seed)
    return [_attempt(generator, due, num_questions, slow_timeout) for due in arrivals]


def _question(generator: random.Random, i: int) -> pb.GenerateRequest:
    request = pb.GenerateRequest(
        sampling=pb.SamplingParams(temperature=generator.choice((0.0, 0.0, 0.7, 1.2)), seed=i),
        stopping=pb.StoppingParams(
            max_tokens=generator.randint(1, MAX_TOKENS), ignore_eos=generator.random() < 0.5
        ),
        priority=generator.choice((0, 0, 0, -1, 1)),
    )
    if generator.random() < 0.5:
        request.text = " ".join(generator.choices(_WORDS, k=generator.randint(1, 40)))
    else:
        request.token_ids.ids.extend(generator.choices(range(3, 320), k=generator.randint(1, 200)))
    method = generator.choice(_METHODS)
    if method is not None:
        request.speculation.method = method
    match generator.randrange(8):
        case 0:
            request.n = 2
        case 1:
            request.output.logprobs = 3
        case 2:
            request.stopping.stop.append(generator.choice("aeiou"))
        case 3:
            request.json_schema = _SCHEMA
        case 4:
            request.sampling.top_p, request.sampling.frequency_penalty = 0.9, 0.5
    return request


def _attempt(generator: random.Random, due: float, num_questions: int, slow_timeout: float) -> Attempt:
    kinds: list[Disturbance] = ["none", *_SHARES]
    weights = [1.0 - sum(_SHARES.values()), *_SHARES.values()]
    (kind,) = generator.choices(kinds, weights)
    question = generator.randrange(num_questions)
    match kind:
        case "cancel" | "abort":
            return Attempt(due, question, kind, after_messages=generator.randrange(20))
        case "deadline":
            return Attempt(due, question, kind, deadline=10 ** generator.uniform(-3.0, -0.3))
        case "slow":
            return Attempt(due, question, kind, pause=slow_timeout * generator.choice((0.05, 3.0)))
        case _:
            return Attempt(due, question, kind)
