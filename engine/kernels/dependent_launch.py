"""Kernels that begin while the one before them ends (programmatic dependent launch, NVIDIA Hopper and later).

A step of few rows is a chain of several hundred short kernels, and between two of them the device idles for about a
microsecond: programs drain, the next ones are scheduled, first loads are answered. A kernel that calls `begin` lets its
successor be scheduled at once, and itself waits there until its predecessor has ended and what it wrote can be read.
Kernels that read weights do so before they wait. Nothing else may be read there, or written.

Every program of such a kernel waits, before it returns early too: so when a kernel has ended, all before it have.
Kernels without it, torch's for example, may stand anywhere between: they run alone.
"""

from __future__ import annotations

import functools

import torch

from engine.kernels.triton_support import jit, tl

try:
    from triton import knobs
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # pragma: no cover
    knobs = gdc_launch_dependents = gdc_wait = None

_FIRST_CAPABILITY = (9, 0)


def launch_options(device: torch.device) -> dict[str, bool]:
    """For the launch of a kernel that calls `begin`: its constant OVERLAPS, and how it is launched."""
    return {"OVERLAPS": True, "launch_pdl": True} if can_overlap(device) else {"OVERLAPS": False}


@functools.cache
def can_overlap(device: torch.device) -> bool:
    """Do kernels begin early there, if they want to?"""
    if device.type != "cuda" or knobs.runtime.interpret or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY


@jit
def begin(OVERLAPS: tl.constexpr):
    """Let the next kernel be scheduled; wait for the one before."""
    let_next_begin(OVERLAPS)
    wait_for_previous(OVERLAPS)


@jit
def let_next_begin(OVERLAPS: tl.constexpr):
    """For kernels that read weights early. In front of these where the kernel behind is to read its own meanwhile: all
    of them are small. Behind them where the multiprocessors are busy with them."""
    if OVERLAPS:
        gdc_launch_dependents()


@jit
def wait_for_previous(OVERLAPS: tl.constexpr):
    """For kernels that read weights before."""
    if OVERLAPS:
        gdc_wait()


@jit
def zero_after_previous(place, OVERLAPS: tl.constexpr):
    """Zero, which is known when the kernel before has ended: addresses that it is part of are read behind that, also
    where the compiler asks for the loads of several steps of a loop at once. Those of other addresses are asked for in
    the loop's order. place: an int32 of the step, without which the wait would be moved in front of the loop. The wait
    is said to be pure, because no load would be asked for ahead in a loop with anything else."""
    zero = 0
    if OVERLAPS:
        zero = tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.b32 $0, 0;", "=r,r", [place], dtype=tl.int32, is_pure=True, pack=1
        )
    return zero


@jit
def prefetch_rows(row_ptrs, ROW_SIZE: tl.constexpr, OVERLAPS: tl.constexpr):
    """Bring the first ROW_SIZE elements behind each of these pointers, of two bytes each, into the L2 cache. ROW_SIZE:
    a power of two; less than a line of 128 bytes is not worth it."""
    if OVERLAPS and ROW_SIZE >= 64:
        lines = row_ptrs[:, None] + 64 * tl.arange(0, ROW_SIZE // 64)[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [lines],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
