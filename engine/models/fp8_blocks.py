"""Weights stored as 8-bit floats with one scale a block (the released DeepSeek-V3), back to ordinary ones on loading.

w[i, j] = fp8[i, j] * scale_inv[i // block_rows, j // block_columns], as in the reference implementation of
arXiv:2412.19437. This saves nothing at run time: it makes the checkpoint readable.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from engine.errors import CheckpointError
from engine.models.base import CausalLM

logger = logging.getLogger(__name__)

FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALE_SUFFIX = "_scale_inv"  # behind the weight's name
GIB = 2**30


def read_fp8_blocks(raw: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a block; None for an unquantised checkpoint. Raises CheckpointError for other forms."""
    quantization = raw.get("quantization_config")
    if quantization is None:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method != "fp8":
        raise CheckpointError(
            f"quantization_config.quant_method: got {method!r}, expected 'fp8' or no quantisation"
        )
    block = quantization.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        raise CheckpointError(
            f"quantization_config.weight_block_size: got {block!r}, expected two positive whole numbers"
        )
    return block[0], block[1]


def announce_dequantisation(
    model: type[CausalLM], raw: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    """Say what the weights will need, and raise CheckpointError where a GPU cannot hold them."""
    if device.type == "meta":
        return
    num_bytes = sum(parameter.nbytes for parameter in model(raw, dtype, torch.device("meta")).parameters())
    name = str(dtype).removeprefix("torch.")
    logger.info("fp8 weights become %s while loading: %.1f GiB on %s", name, num_bytes / GIB, device)
    if device.type == "cuda" and num_bytes > (free := torch.cuda.mem_get_info(device)[0]):
        raise CheckpointError(
            f"fp8 weights become {name} while loading: got {free / GIB:.1f} GiB free on {device}, expected "
            f"{num_bytes / GIB:.1f} GiB"
        )


def dequantised(
    weights: Iterable[tuple[str, torch.Tensor]], block: tuple[int, int] | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """All weights but the scales, float32 where they were fp8. A weight and its scale may come in any order.

    Raises CheckpointError naming weights without scales and scales without weights.
    """
    waiting: dict[str, torch.Tensor] = {}  # weights and scales whose other half has not come, by its own name
    for name, tensor in weights:
        is_scale = name.endswith(SCALE_SUFFIX)
        if not is_scale and tensor.dtype not in FP8_TYPES:
            yield name, tensor
            continue
        if block is None:
            raise CheckpointError(
                f"{name}: got {tensor.dtype}, expected no fp8 without a quantization_config"
            )
        other = waiting.pop(name.removesuffix(SCALE_SUFFIX) if is_scale else name + SCALE_SUFFIX, None)
        if other is None:
            waiting[name] = tensor
        elif is_scale:
            yield name.removesuffix(SCALE_SUFFIX), _dequantise(name, other, tensor, block)
        else:
            yield name, _dequantise(name, tensor, other, block)
    if waiting:
        raise CheckpointError(
            f"fp8 weights and scales without their other half: {', '.join(sorted(waiting))}"
        )


def _dequantise(
    name: str, weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]
) -> torch.Tensor:
    """weight: [rows, columns] fp8; scales: [ceil(rows / block rows), ceil(columns / block columns)]."""
    expected = [-(-size // step) for size, step in zip(weight.shape, block, strict=True)]
    if list(scales.shape) != expected:
        raise CheckpointError(f"{name}: got scales of shape {list(scales.shape)}, expected {expected}")
    rows, columns = weight.shape
    by_row = scales.to(torch.float32).repeat_interleave(block[0], dim=0)[:rows]
    return weight.to(torch.float32) * by_row.repeat_interleave(block[1], dim=1)[:, :columns]
