"""Values made from files that may be replaced while the server runs: certificates, tokens.

A change is found by looking at the files, so a Kubernetes secret (a symbolic link that is swapped) works like an
edited file. What is wrong in a new file goes to the log, and the last good value stays. Knows no meaning of a file.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from engine.errors import ConfigError

Value = TypeVar("Value")
# Inode, size and nanoseconds of the last change of each file; None: it is not there.
_Signature = tuple[tuple[int, int, int] | None, ...]

_log = structlog.get_logger(__name__)


class Reloaded(Generic[Value]):
    """The value of files; may be asked from any thread."""

    def __init__(
        self,
        paths: Sequence[Path],
        read: Callable[[], Value],
        *,
        min_interval: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read` makes the value of all files together; it raises ConfigError. The files are looked at every
        `min_interval` seconds at most. Raises ConfigError when there is no first value.
        """
        self._paths = tuple(paths)
        self._read = read
        self._min_interval = min_interval
        self._clock = clock
        self._lock = threading.Lock()
        self._looked_at = clock()
        self._signature = self._sign()
        self._value = read()

    def current(self) -> Value:
        """The newest good value."""
        with self._lock:
            now = self._clock()
            if now - self._looked_at >= self._min_interval:
                self._looked_at = now
                self._look()
            return self._value

    def _look(self) -> None:
        # Taken before the files are read: what changes meanwhile has another one at the next look.
        signature = self._sign()
        if signature == self._signature:
            return
        self._signature = signature
        try:
            self._value = self._read()
        except ConfigError as error:
            _log.warning("kept what was read before", error=str(error))
        else:
            _log.info("read again", files=[str(path) for path in self._paths])

    def _sign(self) -> _Signature:
        return tuple(_sign(path) for path in self._paths)


def _sign(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
