"""The logits of the tokens of chosen clusters, out of the head's own rows; or the first token (token_order.py) alone.

    logits[r, c * M + i] = cast(head[id] . hidden[r]), ids[r, c * M + i] = id = token_ids[clusters[r, c], i]

Sums in float32, each row's in an order of its own: they do not depend on other rows. The first token is the one with
the largest logit, of equal logits the lowest id, and -1 where the largest is not finite or one is NaN.

Shapes: hidden [n, hidden_size], head [vocab_size, hidden_size], dense, of one dtype; token_ids [num_clusters, M] int64,
distinct; clusters [n, num_chosen] int64, distinct in a row. Result: logits [n, num_chosen * M] of that dtype, ids of
the same shape int64; first tokens [n] int64. Grid: (rows, clusters, parts of a cluster), for first tokens then (rows,).
"""

from __future__ import annotations

import torch

from engine.kernels.dependent_launch import begin, launch_options
from engine.kernels.token_order import id_bits, id_of, key_of, value_of
from engine.kernels.triton_support import has_kernel, jit, next_power_of_2, tl

BLOCK_TOKENS, BLOCK_HIDDEN = 32, 256


def cluster_logits(
    hidden: torch.Tensor, head: torch.Tensor, token_ids: torch.Tensor, clusters: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits, ids). See the module docstring."""
    operation = cluster_logits_triton if has_kernel(hidden) else cluster_logits_reference
    return operation(hidden, head, token_ids, clusters)


def first_of_clusters(
    hidden: torch.Tensor, head: torch.Tensor, token_ids: torch.Tensor, clusters: torch.Tensor
) -> torch.Tensor:
    """The first token of each row. See the module docstring."""
    operation = first_of_clusters_triton if has_kernel(hidden) else first_of_clusters_reference
    return operation(hidden, head, token_ids, clusters)


def cluster_logits_reference(
    hidden: torch.Tensor, head: torch.Tensor, token_ids: torch.Tensor, clusters: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    ids = token_ids[clusters].flatten(1)
    return torch.matmul(head[ids], hidden[:, :, None]).squeeze(-1), ids


def first_of_clusters_reference(
    hidden: torch.Tensor, head: torch.Tensor, token_ids: torch.Tensor, clusters: torch.Tensor
) -> torch.Tensor:
    logits, ids = cluster_logits_reference(hidden, head, token_ids, clusters)
    largest = logits.amax(dim=-1, keepdim=True)
    firsts = torch.where(logits == largest, ids, len(head)).amin(dim=-1)
    return torch.where(largest.squeeze(-1).isfinite(), firsts, -1)


@jit
def _cluster_logits_kernel(
    hidden_ptr,
    head_ptr,
    token_ids_ptr,
    clusters_ptr,
    logits_ptr,
    ids_ptr,
    firsts_ptr,
    NUM_CHOSEN: tl.constexpr,
    CLUSTER_SIZE: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr,
    FIRSTS_ONLY: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    row, place, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    cluster = tl.load(clusters_ptr + row * NUM_CHOSEN + place)
    members = part * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    is_member = members < CLUSTER_SIZE
    ids = tl.load(token_ids_ptr + cluster * CLUSTER_SIZE + members, mask=is_member, other=0)
    products = tl.zeros([BLOCK_TOKENS, BLOCK_HIDDEN], tl.float32)
    for start in range(0, HIDDEN_SIZE, BLOCK_HIDDEN):
        features = start + tl.arange(0, BLOCK_HIDDEN)
        is_feature = features < HIDDEN_SIZE
        hidden = tl.load(hidden_ptr + row * HIDDEN_SIZE + features, mask=is_feature, other=0.0)
        weights = tl.load(
            head_ptr + ids[:, None] * HIDDEN_SIZE + features[None, :],
            mask=is_member[:, None] & is_feature[None, :],
            other=0.0,
        )
        products += weights.to(tl.float32) * hidden.to(tl.float32)[None, :]
    logits = tl.sum(products, axis=1).to(logits_ptr.dtype.element_ty)
    if FIRSTS_ONLY:
        values = logits.to(tl.float32)
        values = tl.where(values == values, values, float("inf"))
        keys = tl.where(is_member, key_of(values, ids, ID_BITS), -(1 << 62))
        blocks = (row * NUM_CHOSEN + place) * tl.num_programs(2)
        tl.store(firsts_ptr + blocks + part, tl.max(keys, axis=0))
    else:
        out = (row * NUM_CHOSEN + place) * CLUSTER_SIZE + members
        tl.store(logits_ptr + out, logits, mask=is_member)
        tl.store(ids_ptr + out, ids, mask=is_member)


def _launch(
    hidden: torch.Tensor,
    head: torch.Tensor,
    token_ids: torch.Tensor,
    clusters: torch.Tensor,
    *,
    logits: torch.Tensor,
    ids: torch.Tensor,
    firsts: torch.Tensor | None,
) -> None:
    assert hidden.is_contiguous()
    assert head.is_contiguous()
    (num_rows, num_chosen), cluster_size = clusters.shape, token_ids.shape[1]
    _cluster_logits_kernel[(num_rows, num_chosen, _num_parts(cluster_size))](
        hidden,
        head,
        token_ids,
        clusters,
        logits,
        ids,
        ids if firsts is None else firsts,
        NUM_CHOSEN=num_chosen,
        CLUSTER_SIZE=cluster_size,
        HIDDEN_SIZE=hidden.shape[1],
        FIRSTS_ONLY=firsts is not None,
        ID_BITS=id_bits(len(head)),
        BLOCK_TOKENS=BLOCK_TOKENS,
        BLOCK_HIDDEN=BLOCK_HIDDEN,
        **launch_options(hidden.device),
    )


def _num_parts(cluster_size: int) -> int:
    return -(-cluster_size // BLOCK_TOKENS)


def cluster_logits_triton(
    hidden: torch.Tensor, head: torch.Tensor, token_ids: torch.Tensor, clusters: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = len(hidden), clusters.shape[1] * token_ids.shape[1]
    logits, ids = hidden.new_empty(shape), token_ids.new_empty(shape)
    if len(hidden):
        _launch(hidden, head, token_ids, clusters, logits=logits, ids=ids, firsts=None)
    return logits, ids


@jit
def _first_token_kernel(
    firsts_ptr,
    token_ids_ptr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    ID_BITS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, BLOCKS)
    keys = tl.load(firsts_ptr + row * NUM_BLOCKS + blocks, mask=blocks < NUM_BLOCKS, other=-(1 << 62))
    first = tl.max(keys, axis=0)
    is_usable = tl.abs(value_of(first, ID_BITS)) < float("inf")
    tl.store(token_ids_ptr + row, tl.where(is_usable, id_of(first, ID_BITS), -1))


def first_of_clusters_triton(
    hidden: torch.Tensor, head: torch.Tensor, token_ids: torch.Tensor, clusters: torch.Tensor
) -> torch.Tensor:
    num_blocks = clusters.shape[1] * _num_parts(token_ids.shape[1])
    firsts = clusters.new_empty(len(hidden), num_blocks)
    first_tokens = clusters.new_empty(len(hidden))
    if len(hidden):
        _launch(hidden, head, token_ids, clusters, logits=hidden, ids=token_ids, firsts=firsts)
        _first_token_kernel[(len(hidden),)](
            firsts,
            first_tokens,
            NUM_BLOCKS=num_blocks,
            BLOCKS=next_power_of_2(num_blocks),
            ID_BITS=id_bits(len(head)),
            num_warps=1,
            **launch_options(hidden.device),
        )
    return first_tokens
