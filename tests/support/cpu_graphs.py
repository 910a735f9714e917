"""Graphs without a device: what would be captured is run once, as in front of a capture, and again for each replay, on
whatever its static buffers hold by then.

So padding, static shapes and what may not be read on the host are tested; that real captures work, on the GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from engine.cudagraph import CaptureQueue
from tests.support.reference_backend import ReferenceBackend


def use_graphs(patched: pytest.MonkeyPatch) -> None:
    """Engines that are made from now on capture what they are asked for, before the next step."""
    patched.setattr("engine.assembly.make_attention_backend", lambda *arguments: ReferenceBackend())
    patched.setattr("engine.assembly.make_captures", lambda *arguments: _make_captures())


def _make_captures() -> CaptureQueue:
    ticks = itertools.count(0, 10)  # a capture is due before every step
    return CaptureQueue(_record, clock=lambda: next(ticks))


def _record(run: Callable[[], None]) -> Callable[[], None]:
    run()
    return run
