"""From a fused projection to what attention needs: heads normed and rotated, keys and values stored, in one launch.

heads [num_tokens, H_q + H_k + H_v, head_size] holds query, key, value heads side by side. Query and key heads are
normed (if the layer has such norms; forms of engine/kernels/rms_norm.py) and then rotated (engine/kernels/rotary.py) in
their first `rotary_size` features; value heads are normed without a weight if the layer does that. H_v is H_k, or 0:
then the raw key heads are the values too. H_k 0: the layer reads the cache of another, nothing is stored.

Shapes: heads, last dimension dense; cosine, sine [num_tokens, 1, rotary_size / 2]; query [num_tokens, H_q, head_size]
dense; key_cache, value_cache [num_blocks, block_size, H_k, head_size] dense; slot_mapping [num_tokens] int64,
PAD_SLOT_ID stores nothing. Rounding to the dtype happens where the separate operations round, but for the rotation.
Grid: one program a tile of heads of one token, stored values included. The layer alone decides the tile, so the squares
of a head are added in the same order however many tokens a step has, and whatever stands beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.dependent_launch import begin, launch_options
from engine.kernels.rms_norm import NormForm, rms_norm
from engine.kernels.rotary import rotate
from engine.kernels.triton_support import jit, next_power_of_2, sum_type, tl

_TILE = 2048  # features of a program: less, and a prompt waits for programs to be scheduled rather than for memory
_MAX_WARPS = 4  # of a half type two wide loads a thread: one of each half of a head


@dataclass(frozen=True)
class HeadNorm:
    weight: torch.Tensor  # [head_size]
    form: NormForm

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        return rms_norm(heads, self.weight, self.form)


@dataclass(frozen=True, kw_only=True)
class HeadLayout:
    """What stands in a layer's fused projection, and what is done to it."""

    num_heads: int
    num_kv_heads: int  # 0: the layer has no keys and values of its own
    has_value: bool = True  # else the raw key is the value
    query_norm: HeadNorm | None = None
    key_norm: HeadNorm | None = None
    value_eps: float | None = None  # of the value's norm without a weight


def split_heads(
    heads: torch.Tensor, layout: HeadLayout, cosine: torch.Tensor, sine: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(query, key, value) by separate operations, nothing stored; key and value None where the layer has none."""
    num_heads, num_kv_heads = layout.num_heads, layout.num_kv_heads
    rotated = heads[:, : num_heads + num_kv_heads]
    value = None
    if num_kv_heads:
        value = heads[:, -num_kv_heads:]
        if layout.value_eps is not None:
            value = rms_norm(value, None, NormForm(layout.value_eps))
    if layout.query_norm is not None:
        parts = [layout.query_norm(rotated[:, :num_heads])]
        if layout.key_norm is not None and num_kv_heads:
            parts.append(layout.key_norm(rotated[:, num_heads:]))
        rotated = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
    size = 2 * cosine.shape[-1]
    turned = rotate(rotated[..., :size], cosine, sine)
    if size < rotated.shape[-1]:
        turned = torch.cat((turned, rotated[..., size:]), dim=-1)
    return turned[:, :num_heads], turned[:, num_heads:] if num_kv_heads else None, value


@jit
def _normed(
    x,
    scale,
    weight_ptrs,
    has_weight,
    offset,
    HAS_NORM: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """x * scale with the weight that stands behind the pointers, if it has one; rounded to DTYPE, of the dtype of x."""
    y = x * scale
    if HAS_NORM:
        weight = tl.load(weight_ptrs, mask=has_weight, other=0.0).to(x.dtype)
        if ROUNDS_FIRST:
            y = y.to(DTYPE).to(x.dtype) * tl.where(has_weight, weight, 1.0)
        else:
            y *= tl.where(has_weight, weight + offset, 1.0)
    return y.to(DTYPE).to(x.dtype)


@jit
def _store_heads_kernel(
    heads_ptr,
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slots_ptr,
    cosine_ptr,
    sine_ptr,
    query_weight_ptr,
    key_weight_ptr,
    stride_token,
    stride_head,
    qk_eps,
    qk_offset,
    value_eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    FIRST_VALUE_HEAD: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,  # rotary_size / 2
    WIDTH: tl.constexpr,  # the next power of two
    REST_WIDTH: tl.constexpr,  # lanes for the features that do not turn, 0: all do
    TILE_HEADS: tl.constexpr,
    NUM_TILES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    HAS_VALUE_NORM: tl.constexpr,
    COMPUTE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    dtype: tl.constexpr = query_ptr.dtype.element_ty
    token = (tl.program_id(0) // NUM_TILES).to(tl.int64)
    head = (tl.program_id(0) % NUM_TILES) * TILE_HEADS + tl.arange(0, TILE_HEADS)[:, None]
    is_query, is_rotated = head < NUM_HEADS, head < NUM_HEADS + NUM_KV_HEADS
    is_there = head < NUM_HEADS + 2 * NUM_KV_HEADS
    source = tl.where(is_rotated, head, head - (NUM_HEADS + NUM_KV_HEADS) + FIRST_VALUE_HEAD)
    sources = heads_ptr + token * stride_token + source * stride_head
    targets = query_ptr + (token * NUM_HEADS + head) * HEAD_SIZE
    is_stored = is_there
    if NUM_KV_HEADS > 0:
        slot = tl.load(slots_ptr + token)
        is_stored &= is_query | (tl.broadcast_to(slot, head.shape) >= 0)
        kv_head = slot * NUM_KV_HEADS + head - NUM_HEADS
        keys = key_cache_ptr + kv_head * HEAD_SIZE
        values = value_cache_ptr + (kv_head - NUM_KV_HEADS) * HEAD_SIZE
        targets = tl.where(is_query, targets, tl.where(is_rotated, keys, values))

    dims = tl.arange(0, WIDTH)[None, :]
    is_dim = dims < HALF
    first = tl.load(sources + dims, mask=is_there & is_dim, other=0.0).to(COMPUTE)
    second = tl.load(sources + HALF + dims, mask=is_there & is_dim, other=0.0).to(COMPUTE)
    if REST_WIDTH > 0:
        rest_dims = 2 * HALF + tl.arange(0, REST_WIDTH)[None, :]
        is_rest = rest_dims < HEAD_SIZE
        rest = tl.load(sources + rest_dims, mask=is_there & is_rest, other=0.0).to(COMPUTE)
    if HAS_NORM or HAS_VALUE_NORM:
        squares = tl.sum(first * first + second * second, axis=1, keep_dims=True)
        if REST_WIDTH > 0:
            squares += tl.sum(rest * rest, axis=1, keep_dims=True)
        scale = 1.0 / tl.sqrt(squares / HEAD_SIZE + tl.where(is_rotated, qk_eps, value_eps))
        scale = tl.where(is_rotated, scale if HAS_NORM else 1.0, scale if HAS_VALUE_NORM else 1.0)
        weights = tl.where(is_query, query_weight_ptr, key_weight_ptr)
        has_weight = is_rotated & is_dim
        first = _normed(first, scale, weights + dims, has_weight, qk_offset, HAS_NORM, ROUNDS_FIRST, dtype)
        second = _normed(
            second, scale, weights + HALF + dims, has_weight, qk_offset, HAS_NORM, ROUNDS_FIRST, dtype
        )
        if REST_WIDTH > 0:
            has_weight = is_rotated & is_rest
            rest = _normed(
                rest, scale, weights + rest_dims, has_weight, qk_offset, HAS_NORM, ROUNDS_FIRST, dtype
            )

    angles = token * HALF + tl.broadcast_to(dims, (TILE_HEADS, WIDTH))
    cosine = tl.load(cosine_ptr + angles, mask=is_rotated & is_dim, other=1.0).to(COMPUTE)
    sine = tl.load(sine_ptr + angles, mask=is_rotated & is_dim, other=0.0).to(COMPUTE)
    turned = tl.where(is_rotated, first * cosine - second * sine, first)
    tl.store(targets + dims, turned.to(dtype), mask=is_stored & is_dim)
    turned = tl.where(is_rotated, second * cosine + first * sine, second)
    tl.store(targets + HALF + dims, turned.to(dtype), mask=is_stored & is_dim)
    if REST_WIDTH > 0:
        tl.store(targets + rest_dims, rest.to(dtype), mask=is_stored & is_rest)


def store_heads(
    heads: torch.Tensor,
    layout: HeadLayout,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """The query heads, ready for attention; keys and values are in the cache then. See the module docstring."""
    num_tokens, _, head_size = heads.shape
    num_heads, num_kv_heads = layout.num_heads, layout.num_kv_heads
    assert heads.stride(-1) == 1, "the last dimension must be dense"
    query = torch.empty(num_tokens, num_heads, head_size, dtype=heads.dtype, device=heads.device)
    query_norm, key_norm = layout.query_norm, layout.key_norm
    assert (query_norm is None) == (key_norm is None) or not num_kv_heads, "both are normed, or neither"
    assert key_norm is None or query_norm is None or key_norm.form == query_norm.form
    no_norm = NormForm(1.0)  # a scale that nobody uses must still be finite
    form = query_norm.form if query_norm is not None else no_norm
    half, rest = cosine.shape[-1], head_size - 2 * cosine.shape[-1]
    tile_heads, num_tiles, num_warps = _tiling(num_heads + 2 * num_kv_heads, head_size)
    _store_heads_kernel[(num_tokens * num_tiles,)](
        heads,
        query,
        key_cache,
        value_cache,
        slot_mapping,
        cosine.contiguous(),
        sine.contiguous(),
        heads if query_norm is None else query_norm.weight,
        heads if key_norm is None else key_norm.weight,
        heads.stride(0),
        heads.stride(1),
        form.eps,
        form.offset,
        no_norm.eps if layout.value_eps is None else layout.value_eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        FIRST_VALUE_HEAD=num_heads + (num_kv_heads if layout.has_value else 0),
        HEAD_SIZE=head_size,
        HALF=half,
        WIDTH=next_power_of_2(half),
        REST_WIDTH=next_power_of_2(rest) if rest else 0,
        TILE_HEADS=tile_heads,
        NUM_TILES=num_tiles,
        HAS_NORM=query_norm is not None,
        ROUNDS_FIRST=form.rounds_first,
        HAS_VALUE_NORM=layout.value_eps is not None,
        COMPUTE=sum_type(heads.dtype),
        num_warps=num_warps,
        **launch_options(heads.device),
    )
    return query


def _tiling(num_heads: int, head_size: int) -> tuple[int, int, int]:
    """(heads of a program, programs of a token, warps of a program)."""
    width = next_power_of_2(head_size)
    tile_heads = min(max(_TILE // width, 1), next_power_of_2(num_heads))
    return tile_heads, -(-num_heads // tile_heads), min(max(tile_heads * width // 128, 1), _MAX_WARPS)
