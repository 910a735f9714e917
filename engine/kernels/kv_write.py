"""Store a step's keys and values at their slots of the paged cache.

cache[slot // block_size, slot % block_size] = source[token] for slot = slot_mapping[token]; PAD_SLOT_ID stores
nothing. Shapes: key, value [num_tokens, num_kv_heads, head_size] (any token and head stride, last dimension dense);
key_cache, value_cache [num_blocks, block_size, num_kv_heads, head_size] dense; slot_mapping [num_tokens] int64.
Grid: one program a token. The slots of a step are distinct.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.dependent_launch import begin, launch_options
from engine.kernels.triton_support import jit
from engine.kv_spec import PAD_SLOT_ID


def kv_write_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """By the definition. Syncs."""
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot != PAD_SLOT_ID:
            key_cache.flatten(0, 1)[slot] = key[token]
            value_cache.flatten(0, 1)[slot] = value[token]


@jit
def _kv_write_kernel(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    NUM_VALUES: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    token = tl.program_id(0)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    index = tl.arange(0, WIDTH)
    mask = index < NUM_VALUES
    head = index // HEAD_SIZE
    dim = index % HEAD_SIZE
    key = tl.load(key_ptr + token * key_stride_token + head * key_stride_head + dim, mask=mask)
    value = tl.load(value_ptr + token * value_stride_token + head * value_stride_head + dim, mask=mask)
    tl.store(key_cache_ptr + slot * NUM_VALUES + index, key, mask=mask)
    tl.store(value_cache_ptr + slot * NUM_VALUES + index, value, mask=mask)


def kv_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See the module docstring."""
    num_tokens, num_kv_heads, head_size = key.shape
    num_values = num_kv_heads * head_size
    _kv_write_kernel[(num_tokens,)](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        NUM_VALUES=num_values,
        HEAD_SIZE=head_size,
        WIDTH=triton.next_power_of_2(num_values),
        **launch_options(key.device),
    )
