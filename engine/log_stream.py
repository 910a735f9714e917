"""Where log lines go: a handler that loses lines rather than hold up or end the process.

Standard error may be a file on a full disk, a pipe whose reader is gone, or one that nobody reads. A line that cannot
be written at once is lost, and the next one that can be is preceded by how many were. Knows nothing of what is logged.
"""

from __future__ import annotations

import io
import logging
import os
import stat
from contextlib import suppress
from typing import Protocol, TextIO


class RawStream(Protocol):
    """An unbuffered binary file."""

    def write(self, data: bytes, /) -> int | None:
        """How many bytes were taken; None: it would have to wait."""

    def close(self) -> None: ...


class LossyHandler(logging.Handler):
    """Writes each line in one go, to a stream that nothing is buffered for."""

    def __init__(self, stream: RawStream, *, closes_stream: bool = False) -> None:
        super().__init__()
        self._stream = stream
        self._closes_stream = closes_stream
        self._num_lost = 0  # since the last line that was written
        self._is_mid_line = False  # the last one was cut

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # what logging itself does with a message that does not fit its arguments
            self.handleError(record)
            return
        if self._num_lost:
            if not self._write(self.format(_lost_lines(self._num_lost))):
                self._num_lost += 1
                return
            self._num_lost = 0
        if not self._write(line):
            self._num_lost = 1

    def close(self) -> None:
        super().close()
        if self._closes_stream:
            self._stream.close()

    def _write(self, line: str) -> bool:
        """False: it is lost, or cut."""
        data = (line + "\n").encode(errors="backslashreplace")
        if self._is_mid_line:
            data = b"\n" + data
        try:
            num_written = self._stream.write(data) or 0
        except (OSError, ValueError):  # the latter: it is closed
            num_written = 0
        if num_written:
            self._is_mid_line = num_written < len(data)
        return num_written == len(data)


def lossy(stream: TextIO | None) -> logging.Handler:
    """For a stream such as sys.stderr, which is None where it was closed when the process started."""
    if stream is None:
        return logging.NullHandler()
    pipe = _without_waiting(stream)
    if pipe is not None:
        return LossyHandler(pipe, closes_stream=True)
    return LossyHandler(getattr(stream.buffer, "raw", stream.buffer))


def _without_waiting(stream: TextIO) -> io.FileIO | None:
    """A pipe once more, opened so that writing to it never waits; it stays as it is for others. None: it is no pipe."""
    with suppress(OSError):  # also io.UnsupportedOperation, of a stream without a file
        if stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode):
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
            return io.FileIO(os.open(f"/proc/self/fd/{stream.fileno()}", flags), "w")
    return None


def _lost_lines(num: int) -> logging.LogRecord:
    fields = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING"}
    return logging.makeLogRecord(fields | {"msg": "lost %d log lines", "args": (num,)})
