"""y = activation(gate) * factor, where gate and factor may stand side by side in one product's output.

The activation is computed in float32 (float64 for float64) and rounded to the dtype, as is the product. `silu`: gate *
sigmoid(gate). `gelu_tanh`: 0.5 gate (1 + tanh(sqrt(2 / pi) (gate + 0.044715 gate^3))).

Shapes: gate, factor [num_rows, size], rows dense; y [num_rows, size] dense. Grid: (rows, column blocks).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from engine.kernels.dependent_launch import begin, launch_options
from engine.kernels.spare_rows import empty_with_spare_rows
from engine.kernels.triton_support import jit, next_power_of_2, sum_type, tl

ActivationName = Literal["silu", "gelu_tanh"]
# As kernels take them.
ACTIVATION_CODES: dict[ActivationName | None, int] = {None: 0, "silu": 1, "gelu_tanh": 2}
MAX_BLOCK = 1024  # columns of one program


def gated_activation(gate_up: torch.Tensor, activation: ActivationName) -> torch.Tensor:
    """Of gate and factor side by side, [num_rows, 2 * size]."""
    gate, factor = gate_up.chunk(2, dim=-1)
    return activate_times(gate, factor, activation)


def activate_times(gate: torch.Tensor, factor: torch.Tensor, activation: ActivationName) -> torch.Tensor:
    """See the module docstring."""
    operation = activate_times_triton if gate.is_cuda else activate_times_reference
    return operation(gate, factor, activation)


def activate_times_reference(
    gate: torch.Tensor, factor: torch.Tensor, activation: ActivationName
) -> torch.Tensor:
    return activate(gate, activation).mul_(factor)


def activate(x: torch.Tensor, activation: ActivationName) -> torch.Tensor:
    """The activation alone; a new tensor."""
    return F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh")


@jit
def activated(gate, IS_SILU: tl.constexpr):
    """Part of a kernel: the activation alone, in the type of `gate`."""
    if IS_SILU:
        decay = tl.exp(-tl.abs(gate))
        y = gate * tl.where(gate < 0.0, decay, 1.0) / (1.0 + decay)
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        decay = tl.exp(-2.0 * tl.abs(inner))  # never overflows
        tanh = (1.0 - decay) / (1.0 + decay)
        y = 0.5 * gate * (1.0 + tl.where(inner < 0.0, -tanh, tanh))
    return y


@jit
def _activate_times_kernel(
    gate_ptr,
    factor_ptr,
    y_ptr,
    gate_stride,
    factor_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_SILU: tl.constexpr,
    COMPUTE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    dtype = y_ptr.dtype.element_ty
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=mask, other=0.0).to(COMPUTE)
    factor = tl.load(factor_ptr + row * factor_stride + columns, mask=mask, other=0.0).to(COMPUTE)
    y = activated(gate, IS_SILU).to(dtype).to(COMPUTE) * factor
    tl.store(y_ptr + row * SIZE + columns, y.to(dtype), mask=mask)


def activate_times_triton(
    gate: torch.Tensor, factor: torch.Tensor, activation: ActivationName
) -> torch.Tensor:
    num_rows, size = gate.shape
    assert gate.stride(-1) == factor.stride(-1) == 1, "rows must be dense"
    y = empty_with_spare_rows(num_rows, size, gate)
    block = min(next_power_of_2(size), MAX_BLOCK)
    _activate_times_kernel[(num_rows, -(-size // block))](
        gate,
        factor,
        y,
        gate.stride(0),
        factor.stride(0),
        SIZE=size,
        BLOCK=block,
        IS_SILU=activation == "silu",
        COMPUTE=sum_type(gate.dtype),
        enable_fp_fusion=False,  # as in the products that do it themselves
        **launch_options(gate.device),
    )
    return y
