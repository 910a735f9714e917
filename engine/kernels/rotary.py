"""Turn every head by its token's rotary angles (arXiv:2104.09864), half-split: feature i with i + head_size / 2.

With x = (first, second), the halves of a head: y = (first * cosine - second * sine, second * cosine + first * sine).
The reference rounds the products and their sum to the dtype; the kernel computes in float32 (float64 for float64) and
may round once. Example, head_size 4, [a, b, c, d] with angles s, t:
[a cos s - c sin s, b cos t - d sin t, c cos s + a sin s, d cos t + b sin t].

Shapes: x [num_tokens, num_heads, head_size], any strides but a dense last dimension; cosine, sine [num_tokens, 1,
head_size / 2] of rotary_tables.py; y dense, of the shape of x. Grid: one program a tile of heads of one token.
"""

from __future__ import annotations

import torch

from engine.kernels.dependent_launch import begin, launch_options
from engine.kernels.triton_support import jit, next_power_of_2, sum_type, tl

_TILE = 1024  # features of the halves of a program's heads


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """See the module docstring."""
    if x.is_cuda:
        return rotate_triton(x, cosine, sine)
    return rotate_reference(x, cosine, sine)


def rotate_reference(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


@jit
def _rotate_kernel(
    x_ptr,
    cosine_ptr,
    sine_ptr,
    y_ptr,
    stride_token,
    stride_head,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    NUM_TILES: tl.constexpr,
    COMPUTE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    token = (tl.program_id(0) // NUM_TILES).to(tl.int64)
    head = (tl.program_id(0) % NUM_TILES) * TILE_HEADS + tl.arange(0, TILE_HEADS)[:, None]
    dims = tl.arange(0, WIDTH)[None, :]
    mask = (head < NUM_HEADS) & (dims < HALF)
    sources = x_ptr + token * stride_token + head * stride_head + dims
    first = tl.load(sources, mask=mask, other=0.0).to(COMPUTE)
    second = tl.load(sources + HALF, mask=mask, other=0.0).to(COMPUTE)
    angles = token * HALF + tl.broadcast_to(dims, (TILE_HEADS, WIDTH))
    cosine = tl.load(cosine_ptr + angles, mask=mask, other=0.0).to(COMPUTE)
    sine = tl.load(sine_ptr + angles, mask=mask, other=0.0).to(COMPUTE)
    targets = y_ptr + (token * NUM_HEADS + head) * (2 * HALF) + dims
    dtype = y_ptr.dtype.element_ty
    tl.store(targets, (first * cosine - second * sine).to(dtype), mask=mask)
    tl.store(targets + HALF, (second * cosine + first * sine).to(dtype), mask=mask)


def rotate_triton(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    num_tokens, num_heads, head_size = x.shape
    assert x.stride(-1) == 1, "the last dimension must be dense"
    assert cosine.shape[-1] * 2 == head_size
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = next_power_of_2(head_size // 2)
    tile_heads = min(max(_TILE // width, 1), next_power_of_2(num_heads))
    num_tiles = -(-num_heads // tile_heads)
    _rotate_kernel[(num_tokens * num_tiles,)](
        x,
        cosine.contiguous(),
        sine.contiguous(),
        y,
        x.stride(0),
        x.stride(1),
        NUM_HEADS=num_heads,
        HALF=head_size // 2,
        WIDTH=width,
        TILE_HEADS=tile_heads,
        NUM_TILES=num_tiles,
        COMPUTE=sum_type(x.dtype),
        num_warps=max(tile_heads * width // 256, 1),
        **launch_options(x.device),
    )
    return y
