"""From a fused projection to what attention needs: heads normed and rotated, keys and values stored, in one launch.

heads [num_tokens, H_q + H_k + H_v, head_size] holds query, key, value heads side by side. Query and key heads are
normed (if the layer has such norms; forms of engine/kernels/rms_norm.py) and then rotated (engine/kernels/rotary.py) in
their first `rotary_size` features; value heads are normed without a weight if the layer does that. H_v is H_k, or 0:
then the raw key heads are the values too. H_k 0: the layer reads the cache of another, nothing is stored.

Shapes: heads, last dimension dense; cosine, signed_sine [num_tokens, 1, rotary_size]; query [num_tokens, H_q,
head_size] dense; key_cache, value_cache [num_blocks, block_size, H_k, head_size] dense; slot_mapping [num_tokens]
int64, PAD_SLOT_ID stores nothing. Rounding to the dtype happens where the separate operations round, but for the
rotation. Grid: one program a token and head, stored values included.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.dependent_launch import begin, launch_options
from engine.kernels.rms_norm import NormForm, rms_norm
from engine.kernels.rotary import rotate
from engine.kernels.triton_support import jit, next_power_of_2, tl


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
    heads: torch.Tensor, layout: HeadLayout, cosine: torch.Tensor, signed_sine: torch.Tensor
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
    size = cosine.shape[-1]
    turned = rotate(rotated[..., :size], cosine, signed_sine)
    if size < rotated.shape[-1]:
        turned = torch.cat((turned, rotated[..., size:]), dim=-1)
    return turned[:, :num_heads], turned[:, num_heads:] if num_kv_heads else None, value


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
    WIDTH: tl.constexpr,
    ROTARY_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    HAS_VALUE_NORM: tl.constexpr,
    COMPUTE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dtype = query_ptr.dtype.element_ty
    dims = tl.arange(0, WIDTH)
    mask = dims < HEAD_SIZE
    if NUM_KV_HEADS > 0:
        slot = tl.load(slots_ptr + token)
        if head >= NUM_HEADS and slot < 0:
            return
        if head >= NUM_HEADS + NUM_KV_HEADS:
            kv_head = head - NUM_HEADS - NUM_KV_HEADS
            source = heads_ptr + token * stride_token + (FIRST_VALUE_HEAD + kv_head) * stride_head
            value = tl.load(source + dims, mask=mask, other=0.0)
            if HAS_VALUE_NORM:
                wide = value.to(COMPUTE)
                scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / HEAD_SIZE + value_eps)
                value = (wide * scale).to(dtype)
            tl.store(value_cache_ptr + (slot * NUM_KV_HEADS + kv_head) * HEAD_SIZE + dims, value, mask=mask)
            return
    half = ROTARY_SIZE // 2
    partners = tl.where(dims < half, dims + half, tl.where(dims < ROTARY_SIZE, dims - half, dims))
    start = heads_ptr + token * stride_token + head * stride_head
    x = tl.load(start + dims, mask=mask, other=0.0).to(COMPUTE)
    partner = tl.load(start + partners, mask=mask, other=0.0).to(COMPUTE)
    if HAS_NORM:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / HEAD_SIZE + qk_eps)
        weights = query_weight_ptr
        if NUM_KV_HEADS > 0:
            weights = query_weight_ptr if head < NUM_HEADS else key_weight_ptr
        weight = tl.load(weights + dims, mask=mask, other=0.0).to(COMPUTE)
        partner_weight = tl.load(weights + partners, mask=mask, other=0.0).to(COMPUTE)
        if ROUNDS_FIRST:
            x = (x * scale).to(dtype).to(COMPUTE) * weight
            partner = (partner * scale).to(dtype).to(COMPUTE) * partner_weight
        else:
            x = (x * scale) * (weight + qk_offset)
            partner = (partner * scale) * (partner_weight + qk_offset)
        x = x.to(dtype).to(COMPUTE)
        partner = partner.to(dtype).to(COMPUTE)
    turns = dims < ROTARY_SIZE
    cosine = tl.load(cosine_ptr + token * ROTARY_SIZE + dims, mask=turns, other=1.0).to(COMPUTE)
    sine = tl.load(sine_ptr + token * ROTARY_SIZE + dims, mask=turns, other=0.0).to(COMPUTE)
    y = (x * cosine + partner * sine).to(dtype)
    if head < NUM_HEADS:
        tl.store(query_ptr + (token * NUM_HEADS + head) * HEAD_SIZE + dims, y, mask=mask)
    else:
        place = (slot if NUM_KV_HEADS > 0 else token) * NUM_KV_HEADS + head - NUM_HEADS
        tl.store(key_cache_ptr + place * HEAD_SIZE + dims, y, mask=mask)


def store_heads(
    heads: torch.Tensor,
    layout: HeadLayout,
    cosine: torch.Tensor,
    signed_sine: torch.Tensor,
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
    assert key_norm is None or query_norm is None or key_norm.form == query_norm.form
    form = query_norm.form if query_norm is not None else NormForm(0.0)
    width = next_power_of_2(head_size)
    _store_heads_kernel[(num_tokens, num_heads + 2 * num_kv_heads)](
        heads,
        query,
        key_cache,
        value_cache,
        slot_mapping,
        cosine.contiguous(),
        signed_sine.contiguous(),
        heads if query_norm is None else query_norm.weight,
        heads if key_norm is None else key_norm.weight,
        heads.stride(0),
        heads.stride(1),
        form.eps,
        form.offset,
        layout.value_eps or 0.0,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        FIRST_VALUE_HEAD=num_heads + (num_kv_heads if layout.has_value else 0),
        HEAD_SIZE=head_size,
        WIDTH=width,
        ROTARY_SIZE=cosine.shape[-1],
        HAS_NORM=query_norm is not None,
        ROUNDS_FIRST=form.rounds_first,
        HAS_VALUE_NORM=layout.value_eps is not None,
        COMPUTE=tl.float64 if heads.dtype == torch.float64 else tl.float32,
        num_warps=1 if width <= 128 else 2,
        **launch_options(heads.device),
    )
    return query
