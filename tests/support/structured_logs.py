"""Logging as it was before a test that configures it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import structlog


@contextmanager
def restored_logging() -> Iterator[None]:
    """Undoes `configure_logs` at the end of the block."""
    root, grpc = logging.getLogger(), logging.getLogger("grpc")
    handlers, levels = list(root.handlers), (root.level, grpc.level)
    try:
        yield
    finally:
        root.handlers, root.level = handlers, levels[0]
        grpc.setLevel(levels[1])
        structlog.reset_defaults()
