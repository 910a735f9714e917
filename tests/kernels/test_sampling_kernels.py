"""Tokens drawn by kernels are those of the definition, whatever else their step launches; in the interpreter with small
blocks, so that every way through them is taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed on this platform")

from engine.batch.request_rows import RequestRows
from engine.kernels import token_draw, truncation
from engine.kernels.keyed_noise import keyed_gumbel_reference, keyed_gumbel_triton
from engine.kernels.softcap import softcap_reference, softcap_triton
from engine.kernels.token_draw import draw_tokens
from engine.params import SamplingParams
from engine.sampling.features import SAMPLING_KINDS, SamplingKind, uniform_features
from engine.sampling.sampler import SampleBatch, Sampler
from engine.sampling.states import SamplingStates
from engine.step import NewRow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
VOCAB = 700 if DEVICE.type == "cpu" else 70_000
GREEDY = {"temperature": 0.0}
RANDOM: list[dict[str, Any]] = [
    {},
    {"min_p": 0.1},
    {"temperature": 1.7},
    {"min_p": 1.0},
    {"temperature": 1e-45},
]
SHORT: list[dict[str, Any]] = [{"top_k": 1}, {"top_k": 7, "temperature": 0.6}, {"top_k": 60, "top_p": 0.8}]
LONG: list[dict[str, Any]] = [
    {"top_p": 0.5},
    {"top_p": 0.97, "min_p": 0.001},
    {"top_p": 1e-9},
    {"top_p": 0.999999, "temperature": 3.0},
    {"top_k": VOCAB - 1},
    {"top_k": 400, "top_p": 0.9, "temperature": 2.0},
    {"top_k": VOCAB + 5},
]
FLAT, PEAKED = 0.05, 4.0  # scales of logits


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if DEVICE.type == "cuda":
        yield
        return
    for module in (token_draw, truncation):
        monkeypatch.setattr(module, "BLOCK", 64)
    monkeypatch.setattr(truncation, "LIST", 8)
    monkeypatch.setattr(truncation, "_CHUNK", 256)
    with np.errstate(over="ignore"):  # a tiny temperature; the device knows no warnings
        yield


def make_batch(params: list[dict[str, Any]], device: torch.device, first: int = 0) -> SampleBatch:
    """Requests in rows of their own, one logits row each. Seeds and positions count up from those of row `first`."""
    count = len(params)
    states = SamplingStates(count, VOCAB, device)
    for index, values in enumerate(params):
        new = NewRow(
            row=index,
            request_id=str(index),
            token_ids=[0],
            num_prompt_tokens=1,
            num_computed_tokens=0,
            params=SamplingParams(max_tokens=8, seed=first + index - 3, **values),
            stop_ids=(),
            token_limit=9,
        )
        states.set_row(new)
    rows = torch.arange(count, device=device)
    return SampleBatch(
        rows=rows,
        positions=(first + rows) * 7 + 1,
        request_rows=RequestRows(count, max_model_len=64, max_drafts=1, device=device),
        states=states,
        features=states.features(range(count)),
    )


def by_definition(params: list[dict[str, Any]], logits: torch.Tensor) -> list[int]:
    """By torch operations on the CPU."""
    batch = make_batch(params, torch.device("cpu"))
    return Sampler().sample(logits.cpu().to(torch.float32), batch).token_ids.tolist()


def by_kernels(
    params: list[dict[str, Any]],
    logits: torch.Tensor,
    kind: SamplingKind = "truncated",
    ids: torch.Tensor | None = None,
    first: int = 0,
    bad_id: int = 0,
) -> tuple[list[int], list[bool]]:
    batch = make_batch(params, DEVICE, first)
    token_ids, is_bad = draw_tokens(
        logits.to(DEVICE),
        batch.rows,
        batch.positions,
        batch.states.draw_tables,
        vocab_size=VOCAB,
        draws=kind != "greedy",
        truncates=kind == "truncated",
        candidate_ids=None if ids is None else ids.to(DEVICE),
        bad_id=bad_id,
    )
    return token_ids.tolist(), is_bad.tolist()


def random_logits(num_rows: int, scale: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(round(scale * 100))
    return (torch.randn(num_rows, VOCAB, generator=generator) * scale).to(dtype)


def test_noise_is_that_of_the_reference_and_the_same_for_some_ids() -> None:
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (3,), generator=generator)
    positions = torch.randint(0, 100_000, (3,), generator=generator)
    ids = torch.randint(0, 2500, (3, 40), generator=generator)
    for stream in range(4):
        expected = keyed_gumbel_reference(seeds, positions, torch.arange(2500), stream)
        on_device = seeds.to(DEVICE), positions.to(DEVICE)
        noise = keyed_gumbel_triton(*on_device, torch.arange(2500, device=DEVICE), stream)
        torch.testing.assert_close(noise.cpu(), expected, rtol=2e-6, atol=2e-6)
        some = keyed_gumbel_triton(*on_device, ids.to(DEVICE), stream)
        assert torch.equal(some, noise.gather(1, ids.to(DEVICE)))


@pytest.mark.parametrize(
    ("scale", "dtype"), [(FLAT, torch.float32), (PEAKED, torch.float32), (PEAKED, HALF)], ids=str
)
def test_tokens_are_those_of_the_definition(scale: float, dtype: torch.dtype) -> None:
    params = [GREEDY, *RANDOM, *SHORT, *LONG]
    logits = random_logits(len(params), scale, dtype)
    token_ids, is_bad = by_kernels(params, logits)
    assert token_ids == by_definition(params, logits)
    assert not any(is_bad)


def test_a_row_draws_the_same_in_a_step_of_any_kind_and_alone() -> None:
    params = [GREEDY, *RANDOM, *SHORT[1:], LONG[0]]
    logits = random_logits(len(params), PEAKED)
    together, _ = by_kernels(params, logits)
    first = {"greedy": 1, "random": 1 + len(RANDOM)}
    for kind, count in first.items():
        assert by_kernels(params[:count], logits[:count], kind)[0] == together[:count]
    for row in (2, 7, 8):
        alone, _ = by_kernels(params[row : row + 1], logits[row : row + 1], first=row)
        assert alone == together[row : row + 1]


def test_ties_at_the_edge_go_to_the_lowest_ids() -> None:
    params: list[dict[str, Any]] = [{"top_k": 100}, {"top_k": 300, "top_p": 0.3}, {"top_k": 9, "min_p": 0.2}]
    params += [{"top_k": 100}, {"top_p": 0.5}]
    logits = random_logits(len(params), 1.0).round()
    logits[3:] = 2.0
    assert by_kernels(params, logits)[0] == by_definition(params, logits)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_of_equal_largest_logits_the_lowest_id_is_the_first_in_any_block_and_order(
    dtype: torch.dtype,
) -> None:
    logits = random_logits(6, 1.0, dtype).clamp_(max=-1.0)
    logits[0, [69, 70, 640, 699]] = 3.0  # of one block, and of several
    logits[1, [VOCAB - 1, 66]] = torch.tensor([0.0, -0.0], dtype=dtype)  # equals
    logits[2] = float("-inf")
    logits[2, VOCAB - 1] = -7.0
    logits[3] = torch.finfo(dtype).min
    logits[4, VOCAB - 1] = 1e-45  # a half type has no such number: 0.0
    expected = [69, 66, VOCAB - 1, 0, VOCAB - 1, logits[5].argmax().item()]
    params = [GREEDY] * len(logits)
    assert by_kernels(params, logits, "greedy") == (expected, [False] * len(logits))
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(9))
    ids = order.expand(len(logits), -1)
    assert by_kernels(params, logits[:, order], "greedy", ids=ids) == (expected, [False] * len(logits))


def test_candidates_draw_as_a_row_without_the_other_tokens() -> None:
    params = [GREEDY, {}, {"min_p": 0.05}, {"top_k": 5}, {"top_k": 90, "top_p": 0.9}, {"top_p": 0.8}]
    generator = torch.Generator().manual_seed(5)
    ids = torch.stack([torch.randperm(VOCAB, generator=generator)[:150] for _ in params])
    logits = random_logits(len(params), 2.0)[:, :150].round(decimals=1).contiguous()
    spread = torch.full((len(params), VOCAB), float("-inf")).scatter_(1, ids, logits)
    assert by_kernels(params, logits, ids=ids)[0] == by_definition(params, spread)
    assert by_kernels(params, spread)[0] == by_definition(params, spread)


@pytest.mark.parametrize("kind", SAMPLING_KINDS)
def test_unusable_rows_are_flagged_and_nothing_outside_of_rows_is_read(kind: SamplingKind) -> None:
    params = [[GREEDY], [GREEDY, {"min_p": 0.1}], [GREEDY, {}, {"top_p": 0.7}]][
        SAMPLING_KINDS.index(kind)
    ] * 5
    poisoned = torch.full((len(params), VOCAB + 68), float("nan"))
    logits = poisoned[:, :VOCAB].copy_(random_logits(len(params), 2.0))
    expected = by_definition(params, logits)
    num_each = len(params) // 5
    for group, value in enumerate((float("nan"), float("inf"))):
        logits[group * num_each : (group + 1) * num_each, 555] = value
    logits[2 * num_each : 3 * num_each] = float("-inf")
    on_device = poisoned.to(DEVICE)[:, :VOCAB]
    token_ids, is_bad = by_kernels(params, on_device, kind)
    assert is_bad == [True] * 3 * num_each + [False] * 2 * num_each
    assert token_ids == [0] * 3 * num_each + expected[3 * num_each :]
    assert by_kernels(params, on_device, kind, bad_id=-1)[0] == [-1] * 3 * num_each + expected[3 * num_each :]


def test_no_rows_draw_nothing() -> None:
    assert by_kernels([], torch.zeros(0, VOCAB)) == ([], [])


def test_the_sampler_draws_the_same_tokens_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also out of logits that are changed before, and for a captured step, which knows the kind only."""
    params = [
        {"logit_bias": {3: 4.0, 5: -100.0}, "top_k": 5},
        {"presence_penalty": 1.5, "temperature": 0.7},
        {"allowed_token_ids": (1, 2, 600), "top_p": 0.9},
        GREEDY,
        {"temperature": 0.0, "bad_words": ((4,),)},
        {"min_p": 0.05},
    ]
    logits = random_logits(len(params), 2.0)
    logits[2, 7] = float("nan")  # where a mask hides it
    expected = Sampler().sample(logits, make_batch(params, torch.device("cpu")))
    monkeypatch.setattr("engine.sampling.sampler.has_kernel", lambda logits: True)
    on_device = logits.to(DEVICE)
    batch = make_batch(params, DEVICE)
    result = Sampler().sample(on_device, batch)
    assert result.token_ids.tolist() == expected.token_ids.tolist()
    assert result.is_bad.tolist() == expected.is_bad.tolist() == [False, False, True, False, False, False]
    plain = [3, 5]
    captured = replace(
        batch,
        rows=batch.rows[plain],
        positions=batch.positions[plain],
        features=uniform_features(2, "truncated", VOCAB),
    )
    again = Sampler().sample(on_device[plain], captured)
    assert again.token_ids.tolist() == [expected.token_ids.tolist()[row] for row in plain]


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_softcap(dtype: torch.dtype) -> None:
    logits = (random_logits(3, 40.0, dtype)).to(DEVICE)
    logits[0, :3] = torch.tensor([float("inf"), float("-inf"), float("nan")])
    torch.testing.assert_close(
        softcap_triton(logits, 30.0), softcap_reference(logits, 30.0), rtol=1e-5, atol=1e-5, equal_nan=True
    )
