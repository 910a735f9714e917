"""The ratio test keeps the target's distribution: chi-square over long decodes of a Markov target, with drafts drawn
as a drafter draws them. Each decode meets noise keys again and again that were used behind a rejection before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch

from engine.batch.request_rows import RequestRows
from engine.config import SpeculatorConfig
from engine.kernels.emit_runs import Verification
from engine.kernels.emit_runs import verify_reference as verify
from engine.kernels.keyed_noise import ACCEPT_STREAM, DRAFT_STREAM, keyed_uniform_reference
from engine.params import SamplingParams
from engine.sampling import ratio_rule
from engine.sampling.draft_distributions import DraftDistributions
from engine.sampling.ratio_rule import RatioRule
from engine.sampling.sampler import SampleBatch, Sampler
from engine.sampling.states import SamplingStates
from engine.spec_decode.draft_sampling import DraftSampler
from engine.spec_decode.registry import SPECULATORS, init_speculator
from engine.spec_decode.speculator import ProposalInputs
from engine.step import NewRow
from tests.support.cpu_graphs import use_graphs
from tests.support.engine_harness import Harness, make_core, request, scripted_model
from tests.support.located_drafts import locate_drafts
from tests.support.scripted_speculators import PATTERNS, VOCAB_SIZE, ScriptedSpeculator
from tests.support.scripted_target import ScriptedTarget, reference_continuation
from tests.support.tiny_drafters import Workshop, families_of, shared_workshop

VOCAB = 8
NUM_ROWS = 2000
NUM_TOKENS = 51  # of each row, its prompt of one token included: 1e5 draws in all
CPU = torch.device("cpu")

Drafter = Callable[["Decode", torch.Tensor, torch.Tensor], torch.Tensor]
"""(decode, token before [rows], position of the draft [rows]) -> drafts [rows], all int64."""


class Decode:
    """Rows of a Markov target, decoded with k drafts per verification until each has NUM_TOKENS tokens."""

    def __init__(self, p_logits: torch.Tensor, k: int, params: Sequence[SamplingParams]) -> None:
        """p_logits: [token before, token] float64; params go around."""
        self.p_logits = p_logits
        self.k = k
        self.wanted: list[int] = []  # drafts of each row; empty: k
        self.rows = RequestRows(NUM_ROWS, NUM_TOKENS, k, CPU)
        self.states = SamplingStates(NUM_ROWS, VOCAB, CPU)
        self.distributions = DraftDistributions(NUM_ROWS, k, VOCAB, torch.float64, CPU)
        self.row_ids = torch.arange(NUM_ROWS)
        self.num_first_accepted = 0
        self.expected_first_accepted = 0.0  # sum of sum_x min(p(x), q(x)), if `overlap` is set
        self.overlap: torch.Tensor | None = None  # [token before]
        self.num_verified = 0
        for row in range(NUM_ROWS):
            new = NewRow(
                row=row,
                request_id=str(row),
                token_ids=[row % VOCAB],
                num_prompt_tokens=1,
                num_computed_tokens=0,
                token_limit=NUM_TOKENS + 1,  # all k drafts are of use to the end
                params=params[row % len(params)],
                stop_ids=(),
            )
            self.rows.set_row(new)
            self.states.set_row(new)

    def run(self, draft: Drafter) -> torch.Tensor:
        """[rows, NUM_TOKENS] int64"""
        rule = RatioRule(self.distributions)
        while int(self.rows.num_tokens.min()) < NUM_TOKENS:
            self.distributions.clear(self.row_ids)
            num_tokens = self.rows.num_tokens.to(torch.int64)
            for step in range(self.k):
                before = self.rows.token_history[self.row_ids, num_tokens + step - 1].to(torch.int64)
                drafts = draft(self, before, num_tokens + step)
                self.rows.write_tokens(
                    self.row_ids, num_tokens + step, drafts[:, None], torch.ones_like(drafts)
                )
            result = self._verify(rule, num_tokens)
            self.rows.write_tokens(self.row_ids, num_tokens, result.token_ids, result.num_emitted)
            self.rows.num_tokens += result.num_emitted.to(torch.int32)
        return self.rows.token_history[:, :NUM_TOKENS].to(torch.int64)

    def _verify(self, rule: RatioRule, num_tokens: torch.Tensor) -> Verification:
        width = self.k + 1
        places = torch.arange(width)
        fed = self.rows.token_history[self.row_ids[:, None], num_tokens[:, None] - 1 + places].to(torch.int64)
        reqs = self.row_ids.repeat_interleave(width)
        logits_start = torch.arange(NUM_ROWS + 1) * width
        drafts = locate_drafts(fed.flatten(), reqs, logits_start, torch.full((NUM_ROWS,), self.k))
        batch = SampleBatch(
            rows=reqs,
            positions=(num_tokens[:, None] + places).flatten(),
            request_rows=self.rows,
            states=self.states,
            features=self.states.features(reqs.tolist()),
        )
        ruled = rule.apply(self.p_logits[fed.flatten()], batch, drafts)
        result = verify(
            token_ids=ruled.token_ids,
            is_bad=ruled.is_bad,
            is_accepted=ruled.is_accepted,
            logits_start=logits_start,
            max_emitted=(NUM_TOKENS - num_tokens).clamp(min=0),
            max_drafts=self.k,
        )
        live = num_tokens < NUM_TOKENS
        self.num_verified += int(live.sum())
        self.num_first_accepted += int((result.num_accepted[live] > 0).sum())
        if self.overlap is not None:
            self.expected_first_accepted += float(self.overlap[fed[live, 0]].sum())
        return result


def sampling_drafter(q_logits: torch.Tensor) -> Drafter:
    """Draws as draft models do. q_logits: [token before, token]"""

    def draft(decode: Decode, before: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        wanted = decode.wanted or [decode.k] * NUM_ROWS
        inputs = ProposalInputs(
            row_list=decode.row_ids.tolist(),
            methods=["any"] * NUM_ROWS,
            wanted=wanted,
            num_wanted=torch.tensor(wanted),
            rows=decode.row_ids,
            attention=cast(Any, None),  # drawing does not look at it
            request_rows=decode.rows,
            states=decode.states,
            hidden_states=q_logits,
            aux_hidden_states={},
            num_sampled=torch.ones_like(before),
            num_rejected=torch.zeros_like(before),
            draft_distributions=decode.distributions,
        )
        return DraftSampler().draw(q_logits[before], inputs, positions)

    return draft


def argmax_drafter(q_logits: torch.Tensor) -> Drafter:
    """Does not sample, and so records nothing: as prompt lookup."""
    return lambda decode, before, positions: q_logits[before].argmax(dim=-1)


def sampled(**values: Any) -> list[SamplingParams]:
    return [
        SamplingParams(**{"max_tokens": NUM_TOKENS, "temperature": 1.0, "seed": seed, **values})
        for seed in range(NUM_ROWS)
    ]


def random_logits(seed: int, spread: float = 1.2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(VOCAB, VOCAB, dtype=torch.float64, generator=generator)


def deviation(tokens: torch.Tensor, p: torch.Tensor) -> float:
    """The largest chi-square deviation, in standard deviations, of the tokens after each token and after each pair
    of tokens. tokens: [rows, n]; p: [token before, token]."""
    pairs = tokens[:, 1:-1] * VOCAB + tokens[:, :-2]  # the newer one leads
    return max(
        _chi_square(tokens[:, :-1].flatten(), tokens[:, 1:].flatten(), p),
        _chi_square(pairs.flatten(), tokens[:, 2:].flatten(), p.repeat_interleave(VOCAB, dim=0)),
    )


def _chi_square(contexts: torch.Tensor, tokens: torch.Tensor, p: torch.Tensor) -> float:
    counts = torch.zeros(len(p), VOCAB, dtype=torch.float64)
    counts.view(-1).index_add_(0, contexts * VOCAB + tokens, torch.ones(len(tokens), dtype=torch.float64))
    assert counts[p == 0].sum() == 0, "a token that the target cannot draw"
    expected = counts.sum(dim=1, keepdim=True) * p
    usable = expected >= 5
    freedom = int(usable.sum()) - int(usable.any(dim=1).sum())
    assert freedom > VOCAB
    chi_square = float(((counts - expected) ** 2 / expected)[usable].sum())
    return (chi_square - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("distance", [0.5, 2.0])
def test_tokens_are_distributed_as_the_target_says(distance: float, k: int) -> None:
    """known-faults 36"""
    p_logits = random_logits(k)
    q_logits = p_logits + random_logits(10 + k, distance)
    decode = Decode(p_logits, k, sampled())
    decode.overlap = torch.minimum(p_logits.softmax(-1), q_logits.softmax(-1)).sum(-1)
    tokens = decode.run(sampling_drafter(q_logits))
    assert deviation(tokens, p_logits.softmax(-1)) < 4
    mean = decode.expected_first_accepted / decode.num_verified
    sigma = math.sqrt(mean * (1 - mean) * decode.num_verified)
    assert abs(decode.num_first_accepted - decode.expected_first_accepted) < 4 * sigma


@pytest.mark.parametrize("step", [-128, -1, 2, 500])
def test_steps_of_a_pass_that_only_compiles_are_written_somewhere(step: int) -> None:
    """Its positions are zeros, but not what they are compared with."""
    distributions = DraftDistributions(3, 2, VOCAB, torch.float64, CPU)
    rows, probs = torch.tensor([1]), torch.full((1, VOCAB), 1 / VOCAB, dtype=torch.float64)
    distributions.record(rows, torch.tensor([step]), probs, torch.tensor([False]))
    taken = distributions.take(torch.tensor([0, 2]), torch.tensor([0, 1]), torch.tensor([4, 4]))
    assert torch.equal(taken, torch.eye(VOCAB, dtype=torch.float64)[[4, 4]])


@pytest.mark.parametrize("k", [1, 3])
def test_truncated_drafts_are_judged_by_what_they_were_drawn_from(k: int) -> None:
    """known-faults 37: temperature and top_k apply to draft and target alike."""
    p_logits, q_logits = random_logits(1), random_logits(2)
    p = truncated(p_logits)
    tokens = Decode(p_logits, k, sampled(temperature=0.7, top_k=4)).run(sampling_drafter(q_logits))
    assert deviation(tokens, p) < 4


def truncated(logits: torch.Tensor) -> torch.Tensor:
    """Temperature 0.7, top_k 4."""
    kept = logits >= logits.topk(4, dim=-1).values[:, -1:]
    return (logits / 0.7).masked_fill(~kept, -math.inf).softmax(-1)


@pytest.mark.parametrize("k", [1, 3])
def test_drafts_that_were_not_sampled_are_one_hot(k: int) -> None:
    """known-faults 37: accepted with p(d), else p without d."""
    p_logits = random_logits(3)
    decode = Decode(p_logits, k, sampled())
    p, drafts = p_logits.softmax(-1), random_logits(4).argmax(-1)
    decode.overlap = p.gather(1, drafts[:, None])[:, 0]
    tokens = decode.run(argmax_drafter(random_logits(4)))
    assert deviation(tokens, p) < 4
    mean = decode.expected_first_accepted / decode.num_verified
    sigma = math.sqrt(mean * (1 - mean) * decode.num_verified)
    assert abs(decode.num_first_accepted - decode.expected_first_accepted) < 4 * sigma


def test_drafts_that_were_made_by_the_way_are_not_taken_for_those_that_are_verified() -> None:
    """A captured step draws for all of its rows, and some of them get drafts from the host in their place."""
    p_logits, q_logits = random_logits(1), random_logits(2)
    decode = Decode(p_logits, 2, sampled())
    decode.wanted = [row % 3 for row in range(NUM_ROWS)]
    before, after, ones = decode.row_ids % VOCAB, decode.rows.num_tokens.to(torch.int64), torch.ones(NUM_ROWS)
    for step in range(2):
        sampling_drafter(q_logits)(decode, before, after + step)
    for step in range(2):
        q = decode.distributions.take(decode.row_ids, torch.full_like(before, step), 7 - before)
        is_one_hot = q.gather(1, (7 - before)[:, None])[:, 0] == ones
        assert is_one_hot.tolist() == [step >= wanted for wanted in decode.wanted]


def test_disjoint_supports_accept_nothing() -> None:
    p_logits, q_logits = random_logits(5), random_logits(6)
    p_logits[:, ::2] = -math.inf
    q_logits[:, 1::2] = -math.inf
    decode = Decode(p_logits, 2, sampled())
    decode.rows.token_history[:, 0] |= 1
    tokens = decode.run(sampling_drafter(q_logits))
    assert decode.num_first_accepted == 0
    assert bool((tokens % 2 == 1).all())
    assert deviation(tokens, p_logits.softmax(-1)) < 4


def test_equal_distributions_accept_everything() -> None:
    p_logits = random_logits(7)
    decode = Decode(p_logits, 3, sampled(top_p=0.9))
    decode.run(sampling_drafter(p_logits))
    assert decode.num_first_accepted == decode.num_verified
    assert decode.num_verified == NUM_ROWS * math.ceil((NUM_TOKENS - 1) / 4)


def test_greedy_rows_beside_sampled_ones_take_the_argmax() -> None:
    """known-faults 38, and the greedy half of the option: equality."""
    p_logits = random_logits(8)
    q_logits = p_logits + random_logits(9, 0.5)
    params = sampled()
    params[1::2] = sampled(temperature=0.0)[1::2]
    tokens = Decode(p_logits, 3, params).run(sampling_drafter(q_logits))
    greedy = tokens[1::2]
    assert torch.equal(greedy[:, 1:], p_logits.argmax(-1)[greedy[:, :-1]])
    assert deviation(tokens[::2], p_logits.softmax(-1)) < 4


@pytest.mark.parametrize("fault", ["accept_by_residual", "residual_by_draft", "q_before_top_k"])
def test_the_tests_notice_shared_noise_and_a_q_that_was_not_sampled(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p_logits, q_logits = random_logits(1), random_logits(2)
    draft = sampling_drafter(q_logits)
    if fault == "accept_by_residual":
        monkeypatch.setattr(ratio_rule, "RESIDUAL_STREAM", ACCEPT_STREAM)
    elif fault == "residual_by_draft":
        monkeypatch.setattr(ratio_rule, "RESIDUAL_STREAM", DRAFT_STREAM)
    else:
        record = DraftDistributions.record

        def record_raw(
            self: DraftDistributions,
            rows: torch.Tensor,
            steps: torch.Tensor,
            probs: torch.Tensor,
            is_wanted: torch.Tensor,
        ) -> None:
            raw = q_logits[decode.rows.token_history[rows, decode.rows.num_tokens[rows] + steps - 1]]
            record(self, rows, steps, raw.softmax(-1), is_wanted)

        monkeypatch.setattr(DraftDistributions, "record", record_raw)
    decode = Decode(p_logits, 2, sampled(temperature=0.7, top_k=4))
    assert deviation(decode.run(draft), truncated(p_logits)) > 10


def test_uniform_noise_is_uniform_and_a_function_of_its_key() -> None:
    seeds, positions = torch.arange(1000).repeat_interleave(100), torch.arange(100).repeat(1000)
    u = keyed_uniform_reference(seeds, positions, ACCEPT_STREAM)
    assert 0 < float(u.min()) < float(u.max()) < 1
    counts = torch.histc(u, bins=100, min=0, max=1)
    assert abs(float(((counts - 1000) ** 2 / 1000).sum()) - 99) < 4 * math.sqrt(2 * 99)
    assert torch.equal(keyed_uniform_reference(seeds[5:9], positions[5:9], ACCEPT_STREAM), u[5:9])
    assert not torch.equal(keyed_uniform_reference(seeds, positions, DRAFT_STREAM), u)


def test_probs_of_the_sampler_are_what_it_draws_from() -> None:
    """Greedy, plain and truncated rows in one batch, a row of bad logits among them."""
    states, rows = SamplingStates(4, VOCAB, CPU), RequestRows(4, 8, 0, CPU)
    for row, values in enumerate([{"temperature": 0.0}, {}, {"temperature": 0.7, "top_k": 4}, {}]):
        params = SamplingParams(**{"max_tokens": 1, "seed": row, **values})  # type: ignore[arg-type]
        new = NewRow(
            row=row,
            request_id="r",
            token_ids=[1],
            num_prompt_tokens=1,
            num_computed_tokens=0,
            token_limit=8,
            params=params,
            stop_ids=(),
        )
        rows.set_row(new)
        states.set_row(new)
    logits = random_logits(0)[:4]
    logits[3, 0] = math.nan
    batch = SampleBatch(
        rows=torch.arange(4),
        positions=torch.ones(4, dtype=torch.int64),
        request_rows=rows,
        states=states,
        features=states.features([0, 1, 2, 3]),
    )
    result = Sampler().sample(logits, batch, needs_probs=True)
    assert result.probs is not None
    assert result.is_bad.tolist() == [False, False, False, True]
    one_hot = torch.nn.functional.one_hot(logits[0].argmax(), VOCAB).double()
    torch.testing.assert_close(result.probs[0], one_hot)
    torch.testing.assert_close(result.probs[1], logits[1].softmax(-1))
    torch.testing.assert_close(result.probs[2], truncated(logits[2:3])[0])
    plain = Sampler().sample(logits, batch)
    assert plain.probs is None
    assert torch.equal(plain.token_ids, result.token_ids)


# ---- in the engine -------------------------------------------------------------------------------------------------

RATIO = {"verification": "ratio"}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return shared_workshop(tmp_path_factory)


@pytest.fixture(params=["launched", "captured"])
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How the engines of the test run theirs."""
    if request.param == "captured":
        use_graphs(monkeypatch)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_greedy_requests_get_the_tokens_of_plain_decoding(pattern: str, depth: int) -> None:
    prompts = [(5, 6, 7), (9,), tuple(range(3, 30))]
    target = ScriptedTarget(VOCAB_SIZE)
    futures = {prompt: reference_continuation(target, list(prompt), 40) for prompt in prompts}
    core = make_core(
        scripted_model(),
        speculators={"scripted": ScriptedSpeculator(PATTERNS[pattern], futures)},
        k=3,
        deferred=depth > 1,
        config={**RATIO, "max_steps_in_flight": depth},
    )
    requests = [
        request(str(prompt), prompt, max_tokens=24, ignore_eos=True, seed=3, **sampling)
        for prompt, sampling in zip(prompts, [{}, {}, {"temperature": 1.0}], strict=True)
    ]
    results = Harness(core).run(requests)
    for prompt in prompts[:2]:
        assert results[str(prompt)].token_ids == futures[prompt][:24]
    assert len(results[str(prompts[2])].token_ids) == 24


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize("method", SPECULATORS.names())
def test_greedy_requests_get_the_tokens_of_plain_decoding_with_every_method(
    method: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    workshop = shared_workshop(tmp_path_factory, families_of(method)[0])
    core = make_core(
        workshop.loaded,
        speculators={method: init_speculator(workshop.drafter(method), workshop.loaded, CPU)},
        k=5,
        config={**RATIO, "max_model_len": 72},
    )
    results = Harness(core).run(workshop.requests("greedy", [(method, 5), (method, 2), ("none", None)]))
    for request_id, reference in workshop.plain("greedy").items():
        assert results[request_id].token_ids == reference.token_ids


@pytest.mark.usefixtures("steps")
def test_of_a_drafter_that_is_the_target_every_sampled_draft_is_accepted(workshop: Workshop) -> None:
    """In a batch with a method that records nothing, whose drafts are accepted now and then."""
    config = SpeculatorConfig(method="draft_model", model=str(workshop.target_path), k=3)
    exact = init_speculator(config, workshop.loaded, CPU)
    ngram = init_speculator(workshop.drafter("ngram"), workshop.loaded, CPU)
    core = make_core(
        workshop.loaded,
        speculators={"draft_model": exact, "ngram": ngram},
        k=3,
        config={**RATIO, "max_model_len": 72},
    )
    results = Harness(core).run(workshop.requests("seeded", [("draft_model", 3), ("ngram", 3)]))
    by_method: dict[str, list[tuple[int, int]]] = {"draft_model": [], "ngram": []}
    for result in results.values():
        for seen in result.spec:
            by_method[seen.method].append((seen.num_drafted, seen.num_verifier_accepted))
    assert by_method["draft_model"]
    assert all(drafted == accepted for drafted, accepted in by_method["draft_model"])
    assert any(drafted > accepted for drafted, accepted in by_method["ngram"])
