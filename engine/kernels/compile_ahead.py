"""Compiles the kernels of a pass together, before it runs.

Triton compiles a kernel when it is first launched, one after another, on one core. Here the pass is run once without
launching any, and what it would have launched is compiled by several threads (`benchmarks.gpu_startup` tells how long
a start takes). Torch's operations do run, on zeros where a kernel would have written. So what a pass leaves behind
means nothing, and no request may be there that it could touch.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from engine.kernels.triton_support import compiling_only, triton

logger = logging.getLogger(__name__)

MAX_THREADS = 16
UNFILLED = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty)


def compile_ahead(run: Callable[[], object]) -> None:
    """Compile and load. A kernel for which that fails is left to its launch, which says why."""
    if triton is None or triton.knobs.runtime.interpret:
        return
    started = time.perf_counter()
    num_threads = min(len(os.sched_getaffinity(0)), MAX_THREADS)
    with ThreadPoolExecutor(num_threads, "compile", *_on_this_device()) as threads:
        compiler = triton.AsyncCompileMode(threads, ignore_errors=True)
        with compiler, compiling_only() as functions, _Zeroed():
            run()
        compiled = [future.kernel for future in compiler.future_kernels.values() if future.kernel is not None]
        list(threads.map(_load, compiled))
    if len(compiled) < len(compiler.future_kernels):
        _forget_failed(functions)
    if compiled:
        logger.info("%d kernels compiled or loaded in %.1f s", len(compiled), time.perf_counter() - started)


def _on_this_device() -> tuple[Callable[..., None], tuple[int, ...]] | tuple[()]:
    """What a thread begins with: another device than the first is a thread's own choice."""
    return (torch.cuda.set_device, (torch.cuda.current_device(),)) if torch.cuda.is_available() else ()


def _load(kernel: Any) -> None:
    """As its first launch does: some versions of Triton have a C compiler make what launches it."""
    try:
        _ = kernel.run
    except Exception:  # its launch says what is wrong
        if kernel.module is None:
            kernel._run = None


def _forget_failed(functions: Iterable[Any]) -> None:
    """Some versions of Triton would raise the error again at every launch, instead of compiling again."""
    for function in functions:
        for kernels, *_ in function.device_caches.values():
            for key in [key for key, kernel in kernels.items() if getattr(kernel, "kernel", kernel) is None]:
                del kernels[key]


class _Zeroed(TorchFunctionMode):
    """Memory that kernels would have written, and kernels and operations behind them read: as indices, say."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func in UNFILLED else result
