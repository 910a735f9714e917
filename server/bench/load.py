"""Which requests a load run sends, and when. Seeded: the same plan twice is the same load."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.errors import ConfigError
from server.pb.slipstream.v1 import generation_pb2 as pb


@dataclass(frozen=True)
class OutputPlan:
    """What every request of a run asks for."""

    output_len: int  # max_tokens
    ignore_eos: bool
    temperature: float
    seed: int
    speculation_method: str | None = None


def random_prompts(num: int, length: int, vocab_size: int, seed: int) -> Iterator[pb.GenerateRequest]:
    """`num` prompts of `length` random token ids; they share no prefix."""
    generator = np.random.default_rng(seed)
    for _ in range(num):
        ids = generator.integers(0, vocab_size, size=length)
        yield pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids.tolist()))


def dataset_prompts(path: Path, num: int) -> Iterator[pb.GenerateRequest]:
    """`num` prompts from a JSONL file, from the start again when it is shorter. Raises ConfigError.

    A line is an object with `prompt` (raw text) or `turns` (a list, the first of which is asked as a user's
    message).
    """
    lines = enumerate(_lines(path), start=1)
    prompts = [_dataset_line(line, f"{path}:{i}") for i, line in lines if line.strip()]
    if not prompts:
        raise ConfigError(f"{path}: got no prompts, expected one JSON object per line")
    for i in range(num):
        yield prompts[i % len(prompts)]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split("\n")  # texts may hold what splitlines takes for an end
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a prompt file: {error}") from None


def _dataset_line(line: str, where: str) -> pb.GenerateRequest:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    match entry:
        case {"prompt": str(text)}:
            return pb.GenerateRequest(text=text)
        case {"turns": [str(text), *_]}:
            return pb.GenerateRequest(
                chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=text)])
            )
    raise ConfigError(f"{where}: got neither `prompt` (text) nor `turns` (list of texts)")


def complete(prompts: Iterator[pb.GenerateRequest], plan: OutputPlan) -> list[pb.GenerateRequest]:
    """Add what every request asks for; request i is seeded by seed + i."""
    requests = []
    for i, prompt in enumerate(prompts):
        request = pb.GenerateRequest()
        request.CopyFrom(prompt)
        request.sampling.temperature = plan.temperature
        request.sampling.seed = plan.seed + i
        request.stopping.max_tokens = plan.output_len
        request.stopping.ignore_eos = plan.ignore_eos
        if plan.speculation_method is not None:
            request.speculation.method = plan.speculation_method
        requests.append(request)
    return requests


def poisson_arrivals(num: int, rate: float, seed: int) -> list[float]:
    """`num` arrival times in seconds from the start, `rate` a second on average; the first is 0."""
    gaps = np.random.default_rng(seed).exponential(1.0 / rate, size=num)
    times: list[float] = (np.cumsum(gaps) - gaps[0]).tolist()
    return times
