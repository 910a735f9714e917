"""One token for every logits row of a step, by the parameters of its request: verification, decode and the
end of a prefill alike.

The order of the processors is that of `SamplingParams`. A row's token depends on its own logits, parameters,
history and position only: not on its neighbours, not on which step it is drawn in. Which of the tokens become the
emitted run is the verifier's matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.batch.request_rows import RequestRows
from engine.kernels.keyed_noise import TARGET_STREAM, keyed_gumbel
from engine.kernels.largest_logit import largest_logit
from engine.kernels.token_draw import draw_tokens
from engine.kernels.top_k_top_p import top_k_top_p
from engine.kernels.triton_support import has_kernel
from engine.params import MAX_BAD_WORD_TOKENS
from engine.sampling.features import BatchFeatures, RandomGroup
from engine.sampling.logprobs import LogprobsTensors, compute_logprobs
from engine.sampling.penalties import apply_penalties_
from engine.sampling.restrictions import apply_allowed_ids_, apply_bad_words_, apply_bias_
from engine.sampling.states import SamplingStates


@dataclass(frozen=True, kw_only=True)
class SampleBatch:
    """The logits rows of a step. Before position p of row r stand request_rows.token_history[r, :p]."""

    rows: torch.Tensor  # [n] int64; request row
    positions: torch.Tensor  # [n] int64; absolute position of the token to draw
    request_rows: RequestRows
    states: SamplingStates
    features: BatchFeatures


@dataclass(frozen=True)
class SampleResult:
    token_ids: torch.Tensor  # [n] int64; `bad_id` in bad rows
    is_bad: torch.Tensor  # [n] bool; NaN or +inf in the raw logits, or no token is left
    probs: torch.Tensor | None = None
    """[n, vocab_size] float32 or float64, if asked: what the tokens were drawn from. Greedy rows are one-hot;
    bad rows hold anything."""


class Sampler:
    """Has no state: everything is in the batch."""

    def sample(
        self,
        logits: torch.Tensor,
        batch: SampleBatch,
        *,
        stream: int = TARGET_STREAM,
        needs_probs: bool = False,
        bad_id: int = 0,
    ) -> SampleResult:
        """logits: [n, vocab_size] float; not changed. `stream`: of the keyed noise. No host sync."""
        features = batch.features
        assert features.num_logits == len(logits), "features were made for other logits rows"
        processed = logits
        if features.changes_logits:
            processed = _reals(logits, copy=True)
            _restrict_(processed, batch)
            _penalize_(processed, batch)
        if has_kernel(processed) and not needs_probs:
            result = _draw_by_kernels(processed, batch, stream, bad_id=bad_id)
        else:
            result = draw_by_definition(_reals(processed), batch, stream, needs_probs, bad_id=bad_id)
        if features.changes_logits:  # which may have hidden what was wrong
            is_bad = result.is_bad | ~logits.amax(dim=-1).isfinite()
            return SampleResult(result.token_ids.masked_fill(is_bad, bad_id), is_bad, result.probs)
        return result

    def sample_among(
        self,
        logits: torch.Tensor,
        candidate_ids: torch.Tensor,
        batch: SampleBatch,
        *,
        stream: int = TARGET_STREAM,
        bad_id: int = 0,
    ) -> SampleResult:
        """The same where all other tokens have no probability. logits: [n, m] float, candidate_ids: [n, m] int64,
        distinct in a row. For batches whose features change no logits.
        """
        assert not batch.features.changes_logits, "biases and penalties are by token id"
        if has_kernel(logits):
            return _draw_by_kernels(logits, batch, stream, candidate_ids, bad_id=bad_id)
        logits = _reals(logits)
        largest = logits.amax(dim=-1)
        token_ids = _lowest_best(logits, candidate_ids, batch.states.vocab_size)
        for group in batch.features.random_groups:
            values, columns = _candidates(logits, largest, group, batch)
            own_ids = group.rows.take(candidate_ids)
            if columns.dim() > 1:
                own_ids = own_ids.gather(1, columns)
            drawn = _draw(values, own_ids, group, batch, stream)
            group.rows.put_(token_ids, _unless_greedy(drawn, token_ids, group, batch))
        is_bad = ~largest.isfinite()
        return SampleResult(token_ids.masked_fill(is_bad, bad_id), is_bad)


def _draw_by_kernels(
    logits: torch.Tensor,
    batch: SampleBatch,
    stream: int,
    candidate_ids: torch.Tensor | None = None,
    *,
    bad_id: int,
) -> SampleResult:
    token_ids, is_bad = draw_tokens(
        logits,
        batch.rows,
        batch.positions,
        batch.states.draw_tables,
        vocab_size=batch.states.vocab_size,
        draws=batch.features.kind != "greedy",
        truncates=batch.features.kind == "truncated",
        candidate_ids=candidate_ids,
        stream=stream,
        bad_id=bad_id,
    )
    return SampleResult(token_ids, is_bad)


def draw_by_definition(
    logits: torch.Tensor,
    batch: SampleBatch,
    stream: int = TARGET_STREAM,
    needs_probs: bool = False,
    *,
    bad_id: int = 0,
) -> SampleResult:
    """By torch operations: on CPUs, in float64, and where distributions are wanted. logits: float32 or float64."""
    largest, token_ids = largest_logit(logits)
    is_bad = ~largest.isfinite()
    probs = torch.zeros_like(logits).scatter_(1, token_ids[:, None], 1.0) if needs_probs else None
    for group in batch.features.random_groups:
        values, candidates = _candidates(logits, largest, group, batch)
        if probs is not None:
            drawn_from = _spread(values.softmax(dim=-1), candidates, logits.shape[1])
            group.rows.put_(probs, _unless_greedy(drawn_from, probs, group, batch))
        drawn = _draw(values, candidates, group, batch, stream)
        group.rows.put_(token_ids, _unless_greedy(drawn, token_ids, group, batch))
    return SampleResult(token_ids.masked_fill(is_bad, bad_id), is_bad, probs)


def _reals(logits: torch.Tensor, *, copy: bool = False) -> torch.Tensor:
    """In float32 or float64: half types are for storing, not for computing. Maybe the tensor itself, unless `copy`."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32), copy=copy)


def sampled_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, features: BatchFeatures
) -> LogprobsTensors | None:
    """Of the rows that ask. logits: [n, vocab_size], raw; token_ids: [n] int64, the tokens that may be emitted."""
    selection = features.logprobs
    if selection is None:
        return None
    return compute_logprobs(
        _reals(selection.take(logits)), selection.take(token_ids), features.max_logprobs, selection.indices
    )


def _restrict_(logits: torch.Tensor, batch: SampleBatch) -> None:
    """Allowed ids; bad words, min_tokens and logit_bias (sums, so their order does not matter)."""
    features, states = batch.features, batch.states
    if features.allowed_ids is not None:
        assert states.allowed_ids is not None
        part = features.allowed_ids.take(logits)
        apply_allowed_ids_(part, states.allowed_ids[features.allowed_ids.take(batch.rows)])
        features.allowed_ids.put_(logits, part)
    if features.bias is not None:
        part, rows = features.bias.take(logits), features.bias.take(batch.rows)
        output_indices = features.bias.take(batch.positions) - batch.request_rows.num_prompt_tokens[rows]
        apply_bias_(
            part,
            states.bias_ids.data[rows],
            states.bias_values.data[rows],
            states.bias_ends.data[rows],
            output_indices,
        )
        features.bias.put_(logits, part)
    if features.bad_words is not None:
        part, rows = features.bad_words.take(logits), features.bad_words.take(batch.rows)
        words = states.bad_words.data[rows].view(len(rows), -1, MAX_BAD_WORD_TOKENS)
        positions = features.bad_words.take(batch.positions)
        apply_bad_words_(part, words, batch.request_rows.token_history, rows, positions)
        features.bad_words.put_(logits, part)


def _penalize_(logits: torch.Tensor, batch: SampleBatch) -> None:
    selection, states = batch.features.penalties, batch.states
    if selection is None:
        return
    part, rows = selection.take(logits), selection.take(batch.rows)
    apply_penalties_(
        part,
        batch.request_rows.token_history[rows],
        selection.take(batch.positions),
        batch.request_rows.num_prompt_tokens[rows],
        states.repetition_penalty[rows].to(logits.dtype),
        states.presence_penalty[rows].to(logits.dtype),
        states.frequency_penalty[rows].to(logits.dtype),
    )
    selection.put_(logits, part)


def _candidates(
    logits: torch.Tensor, largest: torch.Tensor, group: RandomGroup, batch: SampleBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [n, vocab], largest [n] -> what the group's rows draw from: values [m, w], -inf where a token is not
    kept, and token ids [m, w] or, the same for all rows, [w] int64. softmax(values) is the distribution."""
    states, rows = batch.states, group.rows.take(batch.rows)
    # Relative to the largest, so that no temperature overflows: it stays 0, the others go to -inf at worst.
    tiny = torch.finfo(torch.float32).tiny
    temperature = states.temperature[rows].to(logits.dtype).clamp(min=tiny)
    values = (group.rows.take(logits) - group.rows.take(largest)[:, None]).div_(temperature[:, None])
    if group.num_candidates is None:
        token_ids = torch.arange(values.shape[1], device=values.device)
    else:
        top_k, top_p = states.top_k[rows], states.top_p[rows].to(values.dtype)
        num_candidates = min(group.num_candidates, values.shape[1])
        values, token_ids = top_k_top_p(values, top_k, top_p, num_candidates)
    if group.any_min_p:
        # p >= min_p * p_max; the largest value is 0. A row without min_p compares with log 0 = -inf.
        values.masked_fill_(values < states.min_p[rows].to(values.dtype).log()[:, None], float("-inf"))
    return values, token_ids


def _draw(
    values: torch.Tensor, token_ids: torch.Tensor, group: RandomGroup, batch: SampleBatch, stream: int
) -> torch.Tensor:
    """The result of `_candidates` -> [m] int64; overwrites `values`. The lowest id of equal scores."""
    seeds = batch.states.seeds[group.rows.take(batch.rows)]
    noise = keyed_gumbel(seeds, group.rows.take(batch.positions), token_ids, stream)
    return _lowest_best(values.add_(noise), token_ids, batch.states.vocab_size)


def _unless_greedy(
    drawn: torch.Tensor, greedy: torch.Tensor, group: RandomGroup, batch: SampleBatch
) -> torch.Tensor:
    """drawn [m, ...] of the group's rows, but of rows without temperature what `greedy` [n, ...] holds."""
    if not group.any_greedy:
        return drawn
    is_random = batch.states.temperature[group.rows.take(batch.rows)] > 0.0
    return torch.where(is_random.view(-1, *[1] * (drawn.dim() - 1)), drawn, group.rows.take(greedy))


def _lowest_best(scores: torch.Tensor, token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """scores [m, w] of token_ids [m, w] or [w] -> the lowest of the ids with the largest score, [m] int64."""
    is_best = scores == scores.amax(dim=-1, keepdim=True)
    return torch.where(is_best, token_ids, vocab_size).amin(dim=-1)


def _spread(probs: torch.Tensor, token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """probs [m, w] of token_ids [m, w] or [vocab_size] -> [m, vocab_size]."""
    if token_ids.dim() == 1:
        return probs
    return probs.new_zeros(len(probs), vocab_size).scatter_(1, token_ids, probs)
