"""Kernels that begin while the one before them ends (programmatic dependent launch, NVIDIA Hopper and later).

A step of few rows is a chain of several hundred short kernels, and between two of them the device idles for about a
microsecond: programs drain, the next ones are scheduled, first loads are answered. A kernel that calls `begin` lets its
successor be scheduled at once, and itself waits there until its predecessor has ended and what it wrote can be read.
What stands before that may only address weights, to have them brought into the L2 cache (`prefetch_rows`) or to hold
them already.

Every program of such a kernel calls `begin` first, before it returns early or reads what others wrote: so when a kernel
has ended, all before it have. Kernels without it, torch's for example, may stand anywhere between: they run alone.
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


def launch_options(device: torch.device, *, wanted: bool = True) -> dict[str, bool]:
    """For the launch of a kernel that calls `begin`: its constant OVERLAPS, and how it is launched."""
    return {"OVERLAPS": True, "launch_pdl": True} if wanted and can_overlap(device) else {"OVERLAPS": False}


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
    """The first half of `begin`, of a kernel that reads weights itself between the two: were it to read them before, no
    kernel behind could do so meanwhile."""
    if OVERLAPS:
        gdc_launch_dependents()


@jit
def wait_for_previous(OVERLAPS: tl.constexpr):
    if OVERLAPS:
        gdc_wait()


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
