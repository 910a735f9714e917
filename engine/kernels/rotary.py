"""Turn every head by its token's rotary angles (arXiv:2104.09864), half-split: feature i with i + head_size / 2.

y = x * cosine + roll(x, head_size / 2) * signed_sine. The reference rounds both products and their sum to the dtype;
the kernel computes in float32 (float64 for float64) and may round once.
Example, head_size 4, [a, b, c, d] with angles s, t:
[a cos s - c sin s, b cos t - d sin t, c cos s + a sin s, d cos t + b sin t].

Shapes: x [num_tokens, num_heads, head_size], any strides but a dense last dimension; cosine, signed_sine
[num_tokens, 1, head_size]; y dense, of the shape of x. Grid: one program a token and head.
"""

from __future__ import annotations

import torch

from engine.kernels.dependent_launch import begin, launch_options
from engine.kernels.triton_support import jit, next_power_of_2, tl


def rotate(x: torch.Tensor, cosine: torch.Tensor, signed_sine: torch.Tensor) -> torch.Tensor:
    """See the module docstring."""
    if x.is_cuda:
        return rotate_triton(x, cosine, signed_sine)
    return rotate_reference(x, cosine, signed_sine)


def rotate_reference(x: torch.Tensor, cosine: torch.Tensor, signed_sine: torch.Tensor) -> torch.Tensor:
    return (x * cosine).add_(x.roll(x.shape[-1] // 2, -1) * signed_sine)


@jit
def _rotate_kernel(
    x_ptr,
    cosine_ptr,
    sine_ptr,
    y_ptr,
    stride_token,
    stride_head,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    COMPUTE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    token, head = row // NUM_HEADS, row % NUM_HEADS
    dims = tl.arange(0, WIDTH)
    mask = dims < HEAD_SIZE
    partners = tl.where(dims < HEAD_SIZE // 2, dims + HEAD_SIZE // 2, dims - HEAD_SIZE // 2)
    start = x_ptr + token * stride_token + head * stride_head
    x = tl.load(start + dims, mask=mask, other=0.0).to(COMPUTE)
    partner = tl.load(start + partners, mask=mask, other=0.0).to(COMPUTE)
    cosine = tl.load(cosine_ptr + token * HEAD_SIZE + dims, mask=mask, other=0.0).to(COMPUTE)
    sine = tl.load(sine_ptr + token * HEAD_SIZE + dims, mask=mask, other=0.0).to(COMPUTE)
    y = x * cosine + partner * sine
    tl.store(y_ptr + row * HEAD_SIZE + dims, y.to(y_ptr.dtype.element_ty), mask=mask)


def rotate_triton(x: torch.Tensor, cosine: torch.Tensor, signed_sine: torch.Tensor) -> torch.Tensor:
    num_tokens, num_heads, head_size = x.shape
    assert x.stride(-1) == 1, "the last dimension must be dense"
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rotate_kernel[(num_tokens * num_heads,)](
        x,
        cosine.contiguous(),
        signed_sine.contiguous(),
        y,
        x.stride(0),
        x.stride(1),
        NUM_HEADS=num_heads,
        HEAD_SIZE=head_size,
        WIDTH=next_power_of_2(head_size),
        COMPUTE=tl.float64 if x.dtype == torch.float64 else tl.float32,
        num_warps=1 if head_size <= 128 else 2,
        **launch_options(x.device),
    )
    return y
