"""Rows of an embedding table, scaled, and beside each of them a given row where a drafter pairs the two.

    y[t] = [cast(table[token_ids[t]] * scale), beside[t]]

Shapes: token_ids [num_tokens] int64; table [vocab_size, size], dense; beside [num_tokens, width] of the same dtype,
rows dense; y [num_tokens, size + width]. Grid: (tokens, parts of a row).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.kernels.dependent_launch import begin, launch_options
from engine.kernels.triton_support import has_kernel, jit, tl

BLOCK = 1024


def embed_tokens(
    token_ids: torch.Tensor, table: torch.Tensor, scale: float, beside: torch.Tensor | None = None
) -> torch.Tensor:
    """See the module docstring. `scale`: a number that the table's dtype holds."""
    return (embed_tokens_triton if has_kernel(table) else embed_tokens_reference)(
        token_ids, table, scale, beside
    )


def embed_tokens_reference(
    token_ids: torch.Tensor, table: torch.Tensor, scale: float, beside: torch.Tensor | None = None
) -> torch.Tensor:
    rows = F.embedding(token_ids, table)
    rows = rows if scale == 1.0 else rows * scale
    return rows if beside is None else torch.cat((rows, beside), dim=-1)


@jit
def _embed_tokens_kernel(
    token_ids_ptr,
    table_ptr,
    beside_ptr,
    y_ptr,
    beside_stride,
    scale,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_parts: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    y_start = y_ptr + token * (SIZE + WIDTH)
    if part < num_parts:
        columns = part * BLOCK + tl.arange(0, BLOCK)
        token_id = tl.load(token_ids_ptr + token)
        row = tl.load(table_ptr + token_id * SIZE + columns, mask=columns < SIZE, other=0.0)
        row = (row.to(tl.float32) * scale).to(y_ptr.dtype.element_ty)
        tl.store(y_start + columns, row, mask=columns < SIZE)
    else:
        columns = (part - num_parts) * BLOCK + tl.arange(0, BLOCK)
        row = tl.load(beside_ptr + token * beside_stride + columns, mask=columns < WIDTH, other=0.0)
        tl.store(y_start + SIZE + columns, row, mask=columns < WIDTH)


def embed_tokens_triton(
    token_ids: torch.Tensor, table: torch.Tensor, scale: float, beside: torch.Tensor | None = None
) -> torch.Tensor:
    assert table.is_contiguous()
    assert token_ids.is_contiguous()
    assert beside is None or (beside.stride(-1) == 1 and beside.dtype == table.dtype)
    assert beside is None or len(beside) == len(token_ids)
    size, width = table.shape[1], 0 if beside is None else beside.shape[1]
    y = table.new_empty(len(token_ids), size + width)
    if len(token_ids):
        _embed_tokens_kernel[(len(token_ids), -(-size // BLOCK) + -(-width // BLOCK))](
            token_ids,
            table,
            table if beside is None else beside,
            y,
            0 if beside is None else beside.stride(0),
            scale,
            SIZE=size,
            WIDTH=width,
            BLOCK=BLOCK,
            **launch_options(table.device),
        )
    return y
