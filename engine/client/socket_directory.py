"""The private directory of an engine's socket: only this user may enter it, and no crash leaves one behind for good.

A locked file in it says that its owner lives: the kernel drops the lock with the process, even after SIGKILL. Whoever
starts next removes the directories whose lock is free.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

from engine.errors import ConfigError

log = logging.getLogger(__name__)

SOCKET_NAME = "engine"
MAX_SOCKET_PATH_BYTES = 107  # sockaddr_un.sun_path without its final zero
_LOCK_NAME = "owner"
_PREFIX = "slipstream-"


class SocketDirectory:
    """A new one (mode 0700), until `remove`."""

    def __init__(self) -> None:
        """Raises ConfigError when no path for it is short enough."""
        parent = _parent()
        _remove_abandoned(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        unlocked = self.path / f"{_LOCK_NAME}.new"  # nobody may see the lock while it is free
        self._lock = os.open(unlocked, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unlocked.rename(self.path / _LOCK_NAME)

    @property
    def address(self) -> str:
        """For ZeroMQ."""
        return f"ipc://{self.path / SOCKET_NAME}"

    def remove(self) -> None:
        shutil.rmtree(self.path)
        os.close(self._lock)


def _parent() -> str:
    for parent in (tempfile.gettempdir(), "/tmp"):
        if len(os.fsencode(f"{parent}/{_PREFIX}12345678/{SOCKET_NAME}")) <= MAX_SOCKET_PATH_BYTES:
            return parent
    raise ConfigError(
        f"TMPDIR: got {tempfile.gettempdir()!r}, expected a shorter path: the address of a socket may have "
        f"{MAX_SOCKET_PATH_BYTES} bytes"
    )


def _remove_abandoned(parent: str) -> None:
    for path in Path(parent).glob(f"{_PREFIX}*"):
        if _is_abandoned(path):
            log.warning("removing %s: the server that made it was killed", path)
            shutil.rmtree(path, ignore_errors=True)  # another server may be doing the same


def _is_abandoned(path: Path) -> bool:
    """Ours by owner and mode, with a lock that nobody holds. One that has no lock file yet is being made."""
    try:
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            return False
        lock = os.open(path / _LOCK_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True
