"""y = cap * tanh(x / cap): logits held within (-cap, cap), in float32 also where they come in a half type.

Shapes: logits [num_rows, vocab_size] dense, any float; y the same in float32 (float64 of float64). Grid: blocks of all
elements. The kernel's tanh is (1 - e) / (1 + e) with e = exp(-2 |x| / cap), which never overflows; it differs from the
reference in the last bits.
"""

from __future__ import annotations

import torch

from engine.kernels.triton_support import has_kernel, jit, tl

_BLOCK = 2048


def softcap(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """See the module docstring."""
    if has_kernel(logits):
        return softcap_triton(logits, cap)
    return softcap_reference(logits, cap)


def softcap_reference(logits: torch.Tensor, cap: float) -> torch.Tensor:
    y = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.tanh(y / cap) * cap


@jit
def _softcap_kernel(logits_ptr, y_ptr, num_elements, cap, BLOCK: tl.constexpr):
    elements = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = elements < num_elements
    x = tl.load(logits_ptr + elements, mask=is_there, other=0.0).to(tl.float32)
    decay = tl.exp(-2.0 * tl.abs(x) / cap)
    tanh = (1.0 - decay) / (1.0 + decay)
    tl.store(y_ptr + elements, cap * tl.where(x < 0.0, -tanh, tanh), mask=is_there)


def softcap_triton(logits: torch.Tensor, cap: float) -> torch.Tensor:
    assert logits.is_contiguous()
    y = torch.empty_like(logits, dtype=torch.float32)
    if y.numel():
        grid = (-(-y.numel() // _BLOCK),)
        _softcap_kernel[grid](logits, y, y.numel(), cap, BLOCK=_BLOCK)
    return y
