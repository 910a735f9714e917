"""Embeddings, per-layer inputs and the sparse head of drafters: the kernels against their references."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed on this platform")

from engine.kernels.cluster_logits import (
    cluster_logits_reference,
    cluster_logits_triton,
    first_of_clusters_reference,
    first_of_clusters_triton,
)
from engine.kernels.embed_tokens import embed_tokens_reference, embed_tokens_triton
from engine.kernels.layer_inputs import layer_inputs_reference, layer_inputs_triton
from engine.kernels.nearest_clusters import nearest_clusters_reference, nearest_clusters_triton
from engine.kernels.norm_pairs import norm_pairs_reference, norm_pairs_triton
from engine.kernels.rms_norm import NormForm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
NAN, INF = float("nan"), float("inf")


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)


def permutation(size: int) -> torch.Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(9)).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize(("num_clusters", "num_chosen"), [(2048, 32), (100, 7), (33, 33), (5, 1)])
def test_nearest_clusters(num_clusters: int, num_chosen: int, dtype: torch.dtype) -> None:
    scores = random(4, num_clusters, dtype=dtype)
    scores[1] = scores[1].round()  # many ties at the edge
    scores[2] = 0.0
    scores[2, ::2] = -0.0
    scores[3] = scores[3] - 1000.0
    expected = nearest_clusters_reference(scores, num_chosen)
    assert torch.equal(nearest_clusters_triton(scores, num_chosen), expected)
    assert expected[2].tolist() == list(range(num_chosen))


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_nearest_clusters_of_unusable_scores_are_clusters(value: float) -> None:
    scores = random(3, 40, dtype=torch.float32)
    scores[0] = value
    scores[1, 5:30] = value
    expected = nearest_clusters_reference(scores, 8)
    assert torch.equal(nearest_clusters_triton(scores, 8), expected)
    assert expected[0].tolist() == list(range(8))


def test_the_nearest_clusters_are_those_of_topk() -> None:
    scores = random(5, 300, dtype=torch.float32)
    assert torch.equal(nearest_clusters_reference(scores, 9), scores.topk(9).indices.sort().values)


HEADS = pytest.mark.parametrize(
    ("num_rows", "hidden_size", "num_clusters", "cluster_size", "num_chosen"),
    [(3, 256, 8, 128, 3), (1, 24, 6, 5, 6), (2, 300, 4, 40, 1)],
)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@HEADS
def test_cluster_logits(
    num_rows: int, hidden_size: int, num_clusters: int, cluster_size: int, num_chosen: int, dtype: torch.dtype
) -> None:
    hidden = random(num_rows, hidden_size, dtype=dtype) / 4
    head = random(num_clusters * cluster_size, hidden_size, dtype=dtype, seed=1)
    token_ids = permutation(len(head)).view(num_clusters, cluster_size)
    clusters = nearest_clusters_reference(
        random(num_rows, num_clusters, dtype=torch.float32, seed=2), num_chosen
    )
    inputs = hidden, head, token_ids, clusters
    logits, ids = cluster_logits_triton(*inputs)
    expected, expected_ids = cluster_logits_reference(*inputs)
    assert torch.equal(ids, expected_ids)
    assert logits.dtype == dtype
    torch.testing.assert_close(logits, expected, rtol=TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])

    largest = logits.amax(dim=-1, keepdim=True)
    firsts = torch.where(logits == largest, ids, len(head)).amin(dim=-1)
    assert torch.equal(first_of_clusters_triton(*inputs), firsts)
    alone, _ = cluster_logits_triton(hidden[-1:], head, token_ids, clusters[-1:])
    assert torch.equal(alone, logits[-1:])


def test_of_equal_logits_the_lowest_id_is_first_and_unusable_rows_have_none() -> None:
    hidden = torch.ones(5, 16, device=DEVICE)
    head = torch.full((64, 16), 0.5, device=DEVICE)
    head[[17, 31, 44]] = 1.0
    hidden[1], hidden[2, 3], hidden[3, 7] = NAN, INF, -INF
    token_ids = permutation(64).view(2, 32)
    clusters = torch.arange(2, device=DEVICE).expand(5, 2).contiguous()
    for first_tokens in (first_of_clusters_reference, first_of_clusters_triton):
        assert first_tokens(hidden, head, token_ids, clusters).tolist() == [17, -1, -1, -1, 17]


def test_no_rows_have_no_clusters_and_no_tokens() -> None:
    hidden, head = random(0, 16, dtype=HALF), random(12, 16, dtype=HALF)
    clusters = nearest_clusters_triton(random(0, 3, dtype=HALF), 2)
    token_ids = permutation(12).view(3, 4)
    logits, ids = cluster_logits_triton(hidden, head, token_ids, clusters)
    assert (logits.shape, ids.shape) == ((0, 8), (0, 8))
    assert first_of_clusters_triton(hidden, head, token_ids, clusters).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("scale", [1.0, 50.5])
@pytest.mark.parametrize(("size", "width"), [(1030, 0), (1024, 24), (48, 2100)])
def test_embed_tokens(size: int, width: int, scale: float, dtype: torch.dtype) -> None:
    table = random(20, size, dtype=dtype)
    token_ids = torch.tensor([3, 19, 3, 0], device=DEVICE)
    beside = random(4, width + 8, dtype=dtype, seed=1)[:, :width] if width else None
    expected = embed_tokens_reference(token_ids, table, scale, beside)
    assert torch.equal(embed_tokens_triton(token_ids, table, scale, beside), expected)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("form", [NormForm(1e-6), NormForm(1e-5, offset=1.0)], ids=["plain", "offset"])
@pytest.mark.parametrize(("num_layers", "size"), [(3, 256), (2, 24)])
def test_layer_inputs(num_layers: int, size: int, form: NormForm, dtype: torch.dtype) -> None:
    width = num_layers * size
    table, context = random(20, width, dtype=dtype), random(4, width, dtype=dtype, seed=1) * 3
    token_ids = torch.tensor([3, 19, 20, 10**6], device=DEVICE)  # the last two are not in the table
    inputs = token_ids, context, table, random(size, dtype=dtype, seed=2), form
    expected = layer_inputs_reference(*inputs, context_scale=0.07, table_scale=16.0)
    actual = layer_inputs_triton(*inputs, context_scale=0.07, table_scale=16.0)
    assert actual.shape == (4, num_layers, size)
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("form", [NormForm(1e-6), NormForm(1e-5, rounds_first=True)], ids=["gemma", "llama"])
@pytest.mark.parametrize("size", [48, 2048])
def test_norm_pairs(size: int, form: NormForm, dtype: torch.dtype) -> None:
    left, right = random(3, size + 4, dtype=dtype)[:, :size], random(3, size, dtype=dtype, seed=1) * 7
    weights = random(2, size, dtype=dtype, seed=2)
    inputs = left, weights[0], right, weights[1], form
    expected = norm_pairs_reference(*inputs)
    torch.testing.assert_close(
        norm_pairs_triton(*inputs), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )
