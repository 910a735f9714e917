"""Triton where it is installed. Files whose operation has a torch form too import it from here, so that they can be
used on platforms without Triton.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # pragma: no cover
    triton = tl = None


class _Launching(threading.local):
    """How kernels are launched by this thread."""

    compiled: set[Any] | None = None  # a set: they are compiled only, and stand in it


_launching = _Launching()

if triton is None:  # pragma: no cover

    def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        """The kernel cannot be launched here, and nobody does."""
        return function or jit

elif triton.knobs.runtime.interpret:
    jit = triton.jit
else:

    class Kernel(triton.JITFunction):  # type: ignore[misc]
        """As `triton.jit` makes it; but within `compiling_only`, launching it compiles it, and does not launch it."""

        def __getitem__(self, grid: Any) -> Any:
            if (compiled := _launching.compiled) is not None:
                compiled.add(self)
            return functools.partial(self.run, grid=grid, warmup=compiled is not None)

    def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        return functools.partial(Kernel, **options) if function is None else Kernel(function, **options)


@contextmanager
def compiling_only() -> Iterator[set[Any]]:
    """Launches of this thread compile. Yields the kernels that were to be launched."""
    before, _launching.compiled = _launching.compiled, set()
    try:
        yield _launching.compiled
    finally:
        _launching.compiled = before


@functools.cache
def shared_memory_bytes(device: torch.device) -> int:
    """What one program may use. The interpreter knows no limit."""
    if device.type != "cuda":
        return 1 << 30
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    return int(properties["max_shared_mem"])


@functools.cache
def wide_tiles_sum_alike(device: torch.device) -> bool:
    """Tiles of 64 rows and four warps are multiplied by wgmma on Hopper. It sums in the order of mma.sync
    (tests/kernels on such a device); of the instructions of later devices nothing is known.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < (10, 0)


def has_kernel(x: torch.Tensor) -> bool:
    """For kernels that know half types and float32."""
    return x.is_cuda and x.dtype != torch.float64


def sum_type(dtype: torch.dtype) -> Any:
    """Of Triton: what kernels that know float64 too compute in for tensors of this type."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def next_power_of_2(value: int) -> int:
    return 1 << (value - 1).bit_length()


def draft_width(num_tokens: int) -> int:
    """Lanes for the tokens of a request: seldom another number, because each is compiled for itself."""
    return max(next_power_of_2(num_tokens), 16)


__all__ = [
    "compiling_only",
    "draft_width",
    "has_kernel",
    "jit",
    "next_power_of_2",
    "shared_memory_bytes",
    "sum_type",
    "tl",
    "triton",
    "wide_tiles_sum_alike",
]
