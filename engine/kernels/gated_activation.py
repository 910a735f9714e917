"""y = activation(gate) * up, where gate and up stand side by side in one product's output.

The activation is computed in float32 (float64 for float64) and rounded to the dtype, as is the product. `silu`: gate *
sigmoid(gate). `gelu_tanh`: 0.5 gate (1 + tanh(sqrt(2 / pi) (gate + 0.044715 gate^3))).

Shapes: gate_up [num_rows, 2 * size] dense; y [num_rows, size]. Grid: (rows, column blocks).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from engine.kernels.dependent_launch import begin, launch_options
from engine.kernels.triton_support import jit, next_power_of_2, tl

ActivationName = Literal["silu", "gelu_tanh"]
MAX_BLOCK = 1024  # columns of one program


def gated_activation(gate_up: torch.Tensor, activation: ActivationName) -> torch.Tensor:
    """See the module docstring."""
    if gate_up.is_cuda:
        return gated_activation_triton(gate_up, activation)
    return gated_activation_reference(gate_up, activation)


def gated_activation_reference(gate_up: torch.Tensor, activation: ActivationName) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return activate(gate, activation).mul_(up)


def activate(x: torch.Tensor, activation: ActivationName) -> torch.Tensor:
    """The activation alone; a new tensor."""
    return F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh")


@jit
def _gated_activation_kernel(
    gate_up_ptr,
    y_ptr,
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
    gate = tl.load(gate_up_ptr + row * 2 * SIZE + columns, mask=mask, other=0.0).to(COMPUTE)
    up = tl.load(gate_up_ptr + row * 2 * SIZE + SIZE + columns, mask=mask, other=0.0).to(COMPUTE)
    if IS_SILU:
        decay = tl.exp(-tl.abs(gate))
        activated = gate * tl.where(gate < 0.0, decay, 1.0) / (1.0 + decay)
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        decay = tl.exp(-2.0 * tl.abs(inner))  # never overflows
        tanh = (1.0 - decay) / (1.0 + decay)
        activated = 0.5 * gate * (1.0 + tl.where(inner < 0.0, -tanh, tanh))
    y = activated.to(dtype).to(COMPUTE) * up
    tl.store(y_ptr + row * SIZE + columns, y.to(dtype), mask=mask)


def gated_activation_triton(gate_up: torch.Tensor, activation: ActivationName) -> torch.Tensor:
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous()
    y = torch.empty(num_rows, size, dtype=gate_up.dtype, device=gate_up.device)
    block = min(next_power_of_2(size), MAX_BLOCK)
    _gated_activation_kernel[(num_rows, -(-size // block))](
        gate_up,
        y,
        SIZE=size,
        BLOCK=block,
        IS_SILU=activation == "silu",
        COMPUTE=tl.float64 if gate_up.dtype == torch.float64 else tl.float32,
        **launch_options(gate_up.device),
    )
    return y
