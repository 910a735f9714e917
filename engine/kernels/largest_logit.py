"""The largest logit of each row and its token, the lowest id of equals.

Shapes: logits [num_rows, vocab_size] float32 or float64, rows dense; largest [num_rows] of the same dtype, token_ids
[num_rows] int64. A row with NaN has a largest that is not finite. Grid: one program a row.
"""

from __future__ import annotations

import torch

from engine.kernels.triton_support import jit, tl

BLOCK = 8192  # logits at a time


def largest_logit(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(largest, token_ids). See the module docstring."""
    return largest_logit_triton(logits) if logits.is_cuda else largest_logit_reference(logits)


def largest_logit_reference(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    largest, token_ids = logits.max(dim=-1)  # the first of equals
    return largest, token_ids


@jit
def _largest_logit_kernel(
    logits_ptr, largest_ptr, token_ids_ptr, stride, VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), logits_ptr.dtype.element_ty)
    best_id = tl.full([BLOCK], VOCAB_SIZE, tl.int32)
    for start in range(0, VOCAB_SIZE, BLOCK):
        ids = start + lanes
        logits = tl.load(logits_ptr + row * stride + ids, mask=ids < VOCAB_SIZE, other=float("-inf"))
        logits = tl.where(logits == logits, logits, float("inf"))  # NaN
        is_better = logits > best
        best = tl.where(is_better, logits, best)
        best_id = tl.where(is_better, ids, best_id)
    largest = tl.max(best, axis=0)
    token_id = tl.min(tl.where(best == largest, best_id, VOCAB_SIZE), axis=0)
    tl.store(largest_ptr + row, largest)
    tl.store(token_ids_ptr + row, tl.minimum(token_id, VOCAB_SIZE - 1).to(tl.int64))


def largest_logit_triton(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, vocab_size = logits.shape
    largest = torch.empty(num_rows, dtype=logits.dtype, device=logits.device)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        _largest_logit_kernel[(num_rows,)](
            logits,
            largest,
            token_ids,
            logits.stride(0),
            VOCAB_SIZE=vocab_size,
            BLOCK=BLOCK,
            num_warps=16,
        )
    return largest, token_ids
