"""The sampler by its definition: one row at a time, in Python numbers. The oracle of the sampler tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.batch.request_rows import RequestRows
from engine.kernels.keyed_noise import keyed_gumbel_reference
from engine.params import SamplingParams
from engine.sampling.logprobs import LogprobsTensors
from engine.sampling.sampler import SampleBatch, Sampler, sampled_logprobs
from engine.sampling.states import SamplingStates
from engine.step import NewRow

NEVER = -math.inf
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Request:
    """A request and what stands in its row: prompt, output so far, drafts."""

    params: SamplingParams
    prompt: tuple[int, ...] = (0,)
    output: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()

    @property
    def history(self) -> tuple[int, ...]:
        return self.prompt + self.output


@dataclass(frozen=True)
class Sampled:
    """What `sample` returns: the tokens and, of the rows that ask, their log probabilities."""

    token_ids: torch.Tensor
    is_bad: torch.Tensor
    probs: torch.Tensor
    logprobs: LogprobsTensors | None


def params(**values: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 64, **values})  # type: ignore[arg-type]


def sample(
    requests: Sequence[Request], logits: torch.Tensor, draws: Sequence[tuple[int, int]] | None = None
) -> Sampled:
    """Put each request into the row of its index, on the device of the logits, and draw.

    `draws`: (request, position) of each logits row; None: the position behind each request's history.
    """
    device, vocab_size = logits.device, logits.shape[-1]
    rows = RequestRows(len(requests), max_model_len=64, max_drafts=8, device=device)
    states = SamplingStates(len(requests), vocab_size, device)
    for index, request in enumerate(requests):
        new = NewRow(
            row=index,
            request_id=str(index),
            token_ids=list(request.history),
            num_prompt_tokens=len(request.prompt),
            num_computed_tokens=0,
            token_limit=64,
            params=request.params,
            stop_ids=request.stop_ids,
        )
        rows.set_row(new)
        states.set_row(new)
    if draws is None:
        draws = [(index, len(request.history)) for index, request in enumerate(requests)]
    batch = SampleBatch(
        rows=torch.tensor([row for row, _ in draws], dtype=torch.int64).to(device),
        positions=torch.tensor([position for _, position in draws], dtype=torch.int64).to(device),
        request_rows=rows,
        states=states,
        features=states.features([row for row, _ in draws]),
    )
    result = Sampler().sample(logits, batch, needs_probs=True)
    assert result.probs is not None
    logprobs = sampled_logprobs(logits, result.token_ids, batch.features)
    return Sampled(result.token_ids, result.is_bad, result.probs, logprobs)


def expected_logits(logits: Sequence[float], request: Request, position: int) -> list[float]:
    """After masks, biases and penalties; before temperature."""
    asked = request.params
    past = request.history[:position]
    output = past[len(request.prompt) :]
    result = list(logits)
    for token_id in range(len(result)):
        if asked.allowed_token_ids and token_id not in asked.allowed_token_ids:
            result[token_id] = NEVER
    for *prefix, last in asked.bad_words:
        if len(prefix) <= len(past) and list(past[len(past) - len(prefix) :]) == prefix:
            result[last] = NEVER
    if len(output) < asked.min_tokens:
        for token_id in request.stop_ids:
            result[token_id] = NEVER
    for token_id, bias in asked.logit_bias.items():
        result[token_id] += bias
    for token_id in range(len(result)):
        if token_id in past:
            penalty = asked.repetition_penalty
            result[token_id] *= 1 / penalty if result[token_id] > 0 else penalty
        count = output.count(token_id)
        result[token_id] -= count * asked.frequency_penalty
        result[token_id] -= (count > 0) * asked.presence_penalty
    return result


def expected_distribution(logits: Sequence[float], request: Request, position: int) -> list[float]:
    """What a row with temperature > 0 draws from."""
    asked = request.params
    processed = expected_logits(logits, request, position)
    largest = max(processed)
    weights = [math.exp((value - largest) / asked.temperature) for value in processed]
    order = sorted(range(len(weights)), key=lambda token_id: (-processed[token_id], token_id))
    if 0 < asked.top_k < len(order):
        order = order[: asked.top_k]
    total, mass = sum(weights[token_id] for token_id in order), 0.0
    kept: list[int] = []
    for token_id in order:
        if kept and asked.top_p < 1 and mass >= asked.top_p * total:
            break
        kept.append(token_id)
        mass += weights[token_id]
    kept = [token_id for token_id in kept if weights[token_id] >= asked.min_p * weights[order[0]]]
    total = sum(weights[token_id] for token_id in kept)
    return [weights[token_id] / total if token_id in kept else 0.0 for token_id in range(len(weights))]


def expected_token(logits: Sequence[float], request: Request, position: int) -> int:
    asked = request.params
    vocab_size = len(logits)
    if asked.temperature == 0:
        processed = expected_logits(logits, request, position)
        return processed.index(max(processed))
    noise = keyed_gumbel_reference(
        torch.tensor([asked.seed]), torch.tensor([position]), torch.arange(vocab_size)
    )[0].tolist()
    probs = expected_distribution(logits, request, position)
    scores = [math.log(p) + g if p > 0 else NEVER for p, g in zip(probs, noise, strict=True)]
    return scores.index(max(scores))
