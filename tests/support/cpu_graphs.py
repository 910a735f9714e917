"""Graphs without a device: what would be captured is run again, on whatever its static buffers hold by then.

So padding, static shapes and what may not be read on the host are tested; that real captures work, on the GPU.
"""

from __future__ import annotations

import itertools

import pytest

from engine.cudagraph import CaptureQueue
from tests.support.reference_backend import ReferenceBackend


def use_graphs(patched: pytest.MonkeyPatch) -> None:
    """Engines that are made from now on capture what they are asked for, before the next step."""
    patched.setattr("engine.assembly.make_attention_backend", lambda *arguments: ReferenceBackend())
    patched.setattr("engine.assembly.make_captures", lambda *arguments: _make_captures())


def _make_captures() -> CaptureQueue:
    ticks = itertools.count(0, 10)  # a capture is due before every step
    return CaptureQueue(lambda run: run, clock=lambda: next(ticks))
