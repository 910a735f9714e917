"""Synthetic acceptance: as many drafts are accepted as configured, whatever the target says, and never by accident."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from engine.batch.request_rows import RequestRows
from engine.errors import ConfigError
from engine.kernels.emit_runs import verify_reference as verify
from engine.params import SamplingParams
from engine.sampling.features import batch_features, row_traits
from engine.sampling.sampler import SampleBatch, Sampler
from engine.sampling.states import SamplingStates
from engine.sampling.synthetic_rule import SyntheticRule
from tests.support.engine_harness import Harness, make_core, request, scripted_model
from tests.support.located_drafts import locate_drafts
from tests.support.scripted_speculators import PATTERNS, VOCAB_SIZE, ScriptedSpeculator
from tests.support.scripted_target import ScriptedTarget, reference_continuation

CPU = torch.device("cpu")
NUM_REQUESTS = 30_000
K = 3


def check_rates(counts: Counter[int], rates: tuple[float, ...]) -> None:
    """counts: accepted drafts of a verification -> how often; every verification had len(rates) drafts."""
    for position, rate in enumerate(rates):
        num_tried = sum(count for accepted, count in counts.items() if accepted >= position)
        num_accepted = sum(count for accepted, count in counts.items() if accepted > position)
        if num_tried:
            sigma = math.sqrt(rate * (1 - rate) / num_tried)
            assert abs(num_accepted / num_tried - rate) <= 4 * sigma, (position, counts)


@pytest.mark.parametrize("rates", [(0.9, 0.5, 0.2), (1.0, 1.0, 1.0), (0.0, 1.0, 1.0), (1.0, 0.7, 0.0)])
def test_drafts_are_accepted_at_the_rates(rates: tuple[float, ...]) -> None:
    """Sampled tokens stand behind the accepted drafts; the last row of a request is the plain sampler's."""
    vocab_size, width = 8, K + 1
    states = SamplingStates(NUM_REQUESTS, vocab_size, CPU)
    states.seeds.copy_(torch.arange(NUM_REQUESTS))
    states.temperature.fill_(1.0)
    params = SamplingParams(max_tokens=1, temperature=1.0)
    reqs = torch.arange(NUM_REQUESTS).repeat_interleave(width)
    batch = SampleBatch(
        rows=reqs,
        positions=torch.arange(1, width + 1).repeat(NUM_REQUESTS),
        request_rows=RequestRows(NUM_REQUESTS, 8, K, CPU),
        states=states,
        features=batch_features([row_traits(params, vocab_size)] * len(reqs), CPU),
    )
    fed = torch.randint(vocab_size, (len(reqs),), generator=torch.Generator().manual_seed(0))
    logits_start = torch.arange(NUM_REQUESTS + 1) * width
    drafts = locate_drafts(fed, reqs, logits_start, torch.full((NUM_REQUESTS,), K))
    logits = torch.zeros(len(reqs), vocab_size)
    ruled = SyntheticRule(rates, CPU).apply(logits, batch, drafts)
    result = verify(
        token_ids=ruled.token_ids,
        is_bad=ruled.is_bad,
        is_accepted=ruled.is_accepted,
        logits_start=logits_start,
        max_emitted=torch.full((NUM_REQUESTS,), width),
        max_drafts=K,
    )
    check_rates(Counter(result.num_accepted.tolist()), rates)
    plain = Sampler().sample(logits, batch).token_ids
    assert torch.equal(ruled.token_ids, torch.where(ruled.is_accepted, drafts.token_ids, plain))
    assert not bool(ruled.is_accepted.view(-1, width)[:, -1].any())


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("pattern", ["always_wrong", "oracle"])
def test_the_engine_emits_drafts_at_the_rates_and_says_so(pattern: str, depth: int) -> None:
    rates = (0.8, 0.5)
    prompts = [(3 + index % 50, 3 + index // 50) for index in range(64)]
    future = reference_continuation(ScriptedTarget(VOCAB_SIZE), [5, 6], 120)
    core = make_core(
        scripted_model(),
        speculators={"scripted": ScriptedSpeculator(PATTERNS[pattern], dict.fromkeys(prompts, future))},
        k=2,
        deferred=depth > 1,
        config={
            "allow_synthetic": True,
            "synthetic_acceptance": rates,
            "max_steps_in_flight": depth,
        },
        cache={"num_blocks": 2048},
    )
    assert core.model_info.synthetic_acceptance == rates
    requests = [
        request(str(index), prompt, max_tokens=100, ignore_eos=True, seed=index)
        for index, prompt in enumerate(prompts)
    ]
    results = Harness(core).run(requests)
    counts = Counter(
        seen.num_verifier_accepted
        for result in results.values()
        for seen in result.spec
        if seen.num_drafted == len(rates)
    )
    check_rates(counts, rates)


def test_requests_without_drafts_get_the_tokens_of_plain_decoding() -> None:
    core = make_core(
        scripted_model(),
        speculators={"scripted": ScriptedSpeculator(PATTERNS["nothing"], {(5, 6): []})},
        k=2,
        config={"allow_synthetic": True, "synthetic_acceptance": (1.0, 1.0)},
    )
    result = Harness(core).run([request("r", (5, 6), ignore_eos=True)])["r"]
    assert result.token_ids == reference_continuation(ScriptedTarget(VOCAB_SIZE), [5, 6], 16)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"synthetic_acceptance": (0.5,)}, "synthetic_acceptance: .*allow_synthetic"),
        (
            {"synthetic_acceptance": (0.5,), "allow_synthetic": False},
            "synthetic_acceptance: .*allow_synthetic",
        ),
        (
            {"synthetic_acceptance": (0.5, 1.5), "allow_synthetic": True},
            r"rates from 0 to 1, got \(0.5, 1.5\)",
        ),
        (
            {"synthetic_acceptance": (0.5, math.nan), "allow_synthetic": True},
            "synthetic_acceptance: .*rates from 0 to 1",
        ),
        ({"synthetic_acceptance": (0.5,), "allow_synthetic": True}, "a rate for each of 2 drafts"),
        ({"synthetic_acceptance": (), "allow_synthetic": True}, "a rate for each of 2 drafts"),
        (
            {"synthetic_acceptance": (0.5, 0.5), "allow_synthetic": True, "verification": "ratio"},
            "synthetic_acceptance: .*'coupled'",
        ),
        ({"verification": "typical"}, "verification: .*'coupled' or 'ratio'"),
    ],
)
def test_bad_configurations_are_refused(config: dict[str, object], message: str) -> None:
    speculators = {"scripted": ScriptedSpeculator(PATTERNS["nothing"], {})}
    with pytest.raises(ConfigError, match=message):
        make_core(scripted_model(), speculators=speculators, k=2, config=config)


def test_plain_servers_report_no_synthetic_acceptance() -> None:
    config = {"allow_synthetic": True}
    assert make_core(scripted_model(), config=config).model_info.synthetic_acceptance == ()
