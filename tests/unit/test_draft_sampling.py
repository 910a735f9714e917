"""Same noise on both sides: how often a drafter's draw is the target's is a known function of the two distributions,
and what comes out is distributed as the target alone.
"""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch

from engine.batch.request_rows import RequestRows
from engine.kernels.emit_runs import verify_reference as verify
from engine.params import SamplingParams
from engine.sampling.sampler import SampleBatch
from engine.sampling.states import SamplingStates
from engine.sampling.verification_rule import CoupledRule
from engine.spec_decode.draft_sampling import DraftSampler
from engine.spec_decode.speculator import ProposalInputs
from engine.step import NewRow
from tests.support.located_drafts import locate_drafts

NUM_DRAWS = 100_000
VOCAB = 8
CPU = torch.device("cpu")


class Source:
    """One seeded request at temperature 1; each draw has a position of its own, so each is independent."""

    def __init__(self, seed: int) -> None:
        params = SamplingParams(max_tokens=1, temperature=1.0, seed=seed)
        new_row = NewRow(
            row=0,
            request_id="r",
            token_ids=[0],
            num_prompt_tokens=1,
            num_computed_tokens=0,
            token_limit=2,
            params=params,
            stop_ids=(),
        )
        self.rows = RequestRows(1, 2, 0, CPU)
        self.states = SamplingStates(1, VOCAB, CPU)
        self.rows.set_row(new_row)
        self.states.set_row(new_row)

    def batch(self, positions: torch.Tensor) -> SampleBatch:
        """positions: [n] int64"""
        return SampleBatch(
            rows=torch.zeros_like(positions),
            positions=positions,
            request_rows=self.rows,
            states=self.states,
            features=self.states.features([0] * len(positions)),
        )

    def draft(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What a drafter with these logits proposes: [n] int64."""
        return DraftSampler().draw(logits, self.inputs(logits, positions), positions)

    def inputs(self, logits: torch.Tensor, positions: torch.Tensor) -> ProposalInputs:
        count = len(positions)
        return ProposalInputs(
            row_list=[0] * count,
            methods=["any"] * count,
            wanted=[1] * count,
            num_wanted=torch.ones(count, dtype=torch.int64),
            rows=torch.zeros_like(positions),
            attention=cast(Any, None),  # drawing does not look at it
            request_rows=self.rows,
            states=self.states,
            hidden_states=logits,
            aux_hidden_states={},
            num_sampled=torch.ones_like(positions),
            num_rejected=torch.zeros_like(positions),
        )


def test_what_the_requests_ask_for_is_gathered_once_for_all_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It copies to the device, which each draft step would wait for."""
    source = Source(0)
    calls, gather = [], source.states.features
    monkeypatch.setattr(source.states, "features", lambda rows: calls.append(rows) or gather(rows))
    logits, positions = random_logits(2, VOCAB, seed=0), torch.tensor([1, 1])
    inputs = source.inputs(logits, positions)
    sampler = DraftSampler()
    for step in range(3):
        sampler.draw(logits, inputs, positions + step)
    assert calls == [[0, 0]]


def random_logits(*shape: int, seed: int, spread: float = 1.0) -> torch.Tensor:
    return spread * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def coupled_acceptance(p: torch.Tensor, q: torch.Tensor) -> float:
    """P(argmax(log p + g) == argmax(log q + g)) for Gumbel g; p, q: [vocab].

    With e = exp(-g), exponential, both draws are x if e_x <= e_y * min(p_x / p_y, q_x / q_y) for all y; hence
    the sum over x of 1 / sum_y max(p_y / p_x, q_y / q_x).
    """
    ratios = torch.maximum(p[None] / p[:, None], q[None] / q[:, None])  # [x, y]
    return float((1.0 / ratios.sum(dim=1)).sum())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("distance", [0.0, 0.3, 1.0, 3.0])
def test_acceptance_is_that_of_the_coupling(distance: float, seed: int) -> None:
    p_logits = random_logits(VOCAB, seed=seed, spread=1.5)
    q_logits = p_logits + random_logits(VOCAB, seed=100 + seed, spread=distance)
    source = Source(seed)
    positions = torch.arange(1, NUM_DRAWS + 1)
    drafts = source.draft(q_logits.expand(NUM_DRAWS, -1), positions)
    rows = torch.arange(NUM_DRAWS)
    located = locate_drafts(
        drafts.repeat_interleave(2).roll(1), rows.repeat_interleave(2), 2 * rows, torch.ones_like(rows)
    )
    verified = CoupledRule().apply(
        p_logits.expand(2 * NUM_DRAWS, -1), source.batch(positions.repeat_interleave(2)), located
    )
    rate = float(verified.is_accepted[::2].double().mean())
    p, q = p_logits.softmax(-1), q_logits.softmax(-1)
    expected = coupled_acceptance(p, q)
    total_variation = float((p - q).abs().sum() / 2)
    assert (1 - total_variation) / (1 + total_variation) - 1e-12 <= expected <= 1 - total_variation + 1e-12
    assert abs(rate - expected) <= 4 * math.sqrt(expected * (1 - expected) / NUM_DRAWS)


def test_the_closed_form_is_that_of_independent_noise() -> None:
    """Monte Carlo with torch's generator, so that the oracle does not stand on our noise."""
    p_logits, q_logits = random_logits(VOCAB, seed=1), random_logits(VOCAB, seed=2)
    uniform = torch.rand(NUM_DRAWS, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    gumbel = -torch.log(-torch.log(uniform))
    rate = float(((p_logits + gumbel).argmax(-1) == (q_logits + gumbel).argmax(-1)).double().mean())
    expected = coupled_acceptance(p_logits.softmax(-1), q_logits.softmax(-1))
    assert abs(rate - expected) <= 4 * math.sqrt(expected * (1 - expected) / NUM_DRAWS)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("distance", [0.5, 2.0])
def test_emitted_tokens_are_distributed_as_the_target_says(distance: float, k: int) -> None:
    """known-faults 36, 43: chi-square over the transitions of a Markov target, for tokens that ended a run, for
    accepted ones, and at every place of the run."""
    p_logits = random_logits(VOCAB, VOCAB, seed=10 * k)  # [token before, token]
    q_logits = p_logits + random_logits(VOCAB, VOCAB, seed=10 * k + 1, spread=distance)
    source = Source(k)
    num_requests = NUM_DRAWS // k
    fed = torch.zeros(num_requests, k + 1, dtype=torch.int64)  # the last token, then the drafts
    fed[:, 0] = torch.arange(num_requests) % VOCAB
    positions = torch.arange(1, num_requests * (k + 1) + 1).view(num_requests, k + 1)
    for step in range(k):
        fed[:, step + 1] = source.draft(q_logits[fed[:, step]], positions[:, step])
    logits_start = torch.arange(num_requests + 1) * (k + 1)
    located = locate_drafts(
        fed.flatten(),
        torch.arange(num_requests).repeat_interleave(k + 1),
        logits_start,
        torch.full((num_requests,), k),
    )
    ruled = CoupledRule().apply(p_logits[fed.flatten()], source.batch(positions.flatten()), located)
    result = verify(
        token_ids=ruled.token_ids,
        is_bad=ruled.is_bad,
        is_accepted=ruled.is_accepted,
        logits_start=logits_start,
        max_emitted=torch.full((num_requests,), k + 1),
        max_drafts=k,
    )
    before = fed[:, 0]
    for place in range(k + 1):
        is_emitted = place < result.num_emitted
        tokens = result.token_ids[:, place]
        check_transitions(before[is_emitted], tokens[is_emitted], p_logits.softmax(-1))
        before = tokens
    assert {*result.num_emitted.tolist()} == set(range(1, k + 2))


def check_transitions(before: torch.Tensor, tokens: torch.Tensor, p: torch.Tensor) -> None:
    """Chi-square within 4 standard deviations of its mean. before, tokens: [n] int64; p: [vocab, vocab]."""
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    counts.view(-1).index_add_(0, before * VOCAB + tokens, torch.ones(len(tokens), dtype=torch.float64))
    expected = counts.sum(dim=1, keepdim=True) * p
    usable = expected >= 5
    chi_square = float(((counts - expected) ** 2 / expected)[usable].sum())
    freedom = int(usable.sum()) - int(usable.any(dim=1).sum())
    assert len(tokens) > 1000
    assert abs(chi_square - freedom) < 4 * math.sqrt(2 * freedom), (chi_square, freedom)
