"""Cosines and sines of a step's rotary angles, for rotary.py and attention_heads.py.

angle = position * frequency, cosine = cast(cos(angle) * magnitude), sine likewise: positions, angles, cosines and sines
in float32, each rounded before the next operation, whatever the dtype of the result. Functions are those for all
arguments, with a full reduction of the range: angles reach the largest position.

Shapes: positions [n] int64; frequencies [size / 2] float32; cosine, sine [n, 1, size / 2] dense. Grid: one program a
block of elements.
"""

from __future__ import annotations

import torch

from engine.kernels.dependent_launch import begin, launch_options
from engine.kernels.triton_support import jit, tl

_BLOCK = 128  # an element a thread: each takes many operations


def rotary_tables(
    positions: torch.Tensor, frequencies: torch.Tensor, magnitude: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cosine, sine). See the module docstring."""
    tables = rotary_tables_triton if positions.is_cuda else rotary_tables_reference
    return tables(positions, frequencies, magnitude, dtype)


def rotary_tables_reference(
    positions: torch.Tensor, frequencies: torch.Tensor, magnitude: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    angles = positions[:, None, None].to(torch.float32) * frequencies
    return (angles.cos() * magnitude).to(dtype), (angles.sin() * magnitude).to(dtype)


@jit
def _rotary_tables_kernel(
    positions_ptr,
    frequencies_ptr,
    cosine_ptr,
    sine_ptr,
    num_elements,
    magnitude,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    elements = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = elements < num_elements
    position = tl.load(positions_ptr + elements // HALF, mask=mask, other=0).to(tl.float32)
    angle = position * tl.load(frequencies_ptr + elements % HALF, mask=mask, other=0.0)
    dtype = cosine_ptr.dtype.element_ty
    tl.store(cosine_ptr + elements, (tl.cos(angle) * magnitude).to(dtype), mask=mask)
    tl.store(sine_ptr + elements, (tl.sin(angle) * magnitude).to(dtype), mask=mask)


def rotary_tables_triton(
    positions: torch.Tensor, frequencies: torch.Tensor, magnitude: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (len(positions), 1, len(frequencies))
    cosine, sine = (torch.empty(shape, dtype=dtype, device=positions.device) for _ in range(2))
    _rotary_tables_kernel[(-(-cosine.numel() // _BLOCK),)](
        positions.contiguous(),
        frequencies,
        cosine,
        sine,
        cosine.numel(),
        magnitude,
        HALF=len(frequencies),
        BLOCK=_BLOCK,
        enable_fp_fusion=False,  # the angle is rounded before its range is reduced
        num_warps=4,
        **launch_options(positions.device),
    )
    return cosine, sine
