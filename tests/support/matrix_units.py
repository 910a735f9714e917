"""Products of Triton's interpreter as matrix units make them: in one order, whatever the shape of a tile.

The interpreter multiplies tiles with numpy, whose sums have another order for other heights of a tile, and reads
bfloat16 as integers. Here K is taken in steps of 16, as by mma.sync m16n8k16; a step is added to the sum at once and
rounded to it. So what a kernel promises of its bits can be checked on a CPU, but for what the compiler does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

STEP = 16


def multiply_as_matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", _create_dot)


def read_scalars_as_newer_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 asks numpy for the number in an array of one element in a way that numpy has given up."""
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)


def _create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    left, right, result = _widened(a), _widened(b), d.data
    for start in range(0, left.shape[-1], STEP):
        steps = slice(start, start + STEP)
        product = np.matmul(left[..., steps], right[..., steps, :])
        result = (result.astype(np.float64) + product).astype(d.data.dtype)
    return interpreter.TensorHandle(result, d.dtype.scalar)


def _widened(tile: Any) -> Any:
    """In float64, where products of half types and sums of 16 of them are exact, or nearly so."""
    if tile.dtype.scalar == tl.bfloat16:
        return (tile.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return tile.data.astype(np.float64)
