"""What each layer of Gemma 4 gets of a token, from its id and from its embedding, mixed: in one launch.

    y[t, l] = (norm(context[t, l] * context_scale) + table[id, l] * table_scale) * MIX

every product, norm and sum rounded to the dtype; the norm is the Gemma form of rms_norm.py. Ids that the table lacks
have those of token 0.

Shapes: token_ids [num_tokens] int64; context [num_tokens, num_layers * size], table [vocab_size, num_layers * size],
weight [size], all dense and of one dtype; y [num_tokens, num_layers, size]. Sums in float32. Grid: (tokens, layers).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.kernels.dependent_launch import begin, launch_options
from engine.kernels.rms_norm import NormForm, rms_norm_reference
from engine.kernels.row_norm import inverse_rms, sum_of_squares, weighted
from engine.kernels.triton_support import has_kernel, jit, next_power_of_2, tl

MIX = 2**-0.5


def layer_inputs(
    token_ids: torch.Tensor,
    context: torch.Tensor,
    table: torch.Tensor,
    weight: torch.Tensor,
    form: NormForm,
    *,
    context_scale: float,
    table_scale: float,
) -> torch.Tensor:
    """See the module docstring. `table_scale`: a number that the dtype holds."""
    return (layer_inputs_triton if has_kernel(context) else layer_inputs_reference)(
        token_ids, context, table, weight, form, context_scale=context_scale, table_scale=table_scale
    )


def layer_inputs_reference(
    token_ids: torch.Tensor,
    context: torch.Tensor,
    table: torch.Tensor,
    weight: torch.Tensor,
    form: NormForm,
    *,
    context_scale: float,
    table_scale: float,
) -> torch.Tensor:
    shape = (len(token_ids), context.shape[1] // len(weight), len(weight))
    known_ids = torch.where(token_ids < len(table), token_ids, 0)
    of_token = (F.embedding(known_ids, table) * table_scale).view(shape)
    of_context = rms_norm_reference((context * context_scale).view(shape), weight, form)
    return (of_context + of_token) * MIX


@jit
def _layer_inputs_kernel(
    token_ids_ptr,
    context_ptr,
    table_ptr,
    weight_ptr,
    y_ptr,
    vocab_size,
    context_scale,
    table_scale,
    mix,
    eps,
    offset,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    token, layer, num_layers = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    columns = tl.arange(0, WIDTH)
    mask = columns < SIZE
    dtype = y_ptr.dtype.element_ty
    token_id = tl.load(token_ids_ptr + token)
    token_id = tl.where(token_id < vocab_size, token_id, 0)
    of_token = tl.load(table_ptr + (token_id * num_layers + layer) * SIZE + columns, mask=mask, other=0.0)
    of_token = (of_token.to(tl.float32) * table_scale).to(dtype)
    place = (token * num_layers + layer) * SIZE + columns
    context = tl.load(context_ptr + place, mask=mask, other=0.0)
    context = (context.to(tl.float32) * context_scale).to(dtype).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    context *= inverse_rms(sum_of_squares(context, WIDTH), eps, SIZE)
    of_context = weighted(context, weight, offset, False, dtype).to(dtype)
    mixed = (of_context.to(tl.float32) + of_token.to(tl.float32)).to(dtype)
    tl.store(y_ptr + place, (mixed.to(tl.float32) * mix).to(dtype), mask=mask)


def layer_inputs_triton(
    token_ids: torch.Tensor,
    context: torch.Tensor,
    table: torch.Tensor,
    weight: torch.Tensor,
    form: NormForm,
    *,
    context_scale: float,
    table_scale: float,
) -> torch.Tensor:
    assert not form.rounds_first
    assert context.is_contiguous()
    assert table.is_contiguous()
    num_tokens, size = len(token_ids), len(weight)
    num_layers = context.shape[1] // size
    y = context.new_empty(num_tokens, num_layers, size)
    if num_tokens:
        _layer_inputs_kernel[(num_tokens, num_layers)](
            token_ids,
            context,
            table,
            weight,
            y,
            len(table),
            context_scale,
            table_scale,
            MIX,
            form.eps,
            form.offset,
            SIZE=size,
            WIDTH=next_power_of_2(size),
            num_warps=1,
            **launch_options(context.device),
        )
    return y
