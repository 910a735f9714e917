"""A spawned engine process and the socket to it: made, and freed again. Knows nothing of requests."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Sequence
from contextlib import suppress

import zmq
import zmq.asyncio

from engine.client.socket_directory import SocketDirectory
from engine.errors import EngineUnavailableError

log = logging.getLogger(__name__)

RECONNECT_MS = 10  # until the engine has bound its socket


class EngineProcess:
    """Made by `spawn`, freed by `stop`."""

    def __init__(self, directory: SocketDirectory, process: asyncio.subprocess.Process) -> None:
        self._directory = directory
        self._process = process
        self._context = zmq.asyncio.Context()
        self.socket: zmq.asyncio.Socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self.socket.connect(directory.address)

    @classmethod
    async def spawn(cls, command: Sequence[str], config_json: bytes) -> EngineProcess:
        """Start `command ADDRESS` with the configuration as first line on stdin, which stays open: its end
        tells the engine that this process is gone. Raises EngineUnavailableError.
        """
        directory = SocketDirectory()
        try:
            process = await asyncio.create_subprocess_exec(
                *command, directory.address, stdin=asyncio.subprocess.PIPE
            )
        except BaseException as error:
            directory.remove()
            if isinstance(error, OSError):
                raise EngineUnavailableError(f"cannot start the engine process: {error}") from None
            raise
        assert process.stdin is not None
        process.stdin.write(config_json + b"\n")
        return cls(directory, process)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> str:
        """How it ended, in words."""
        status = await self._process.wait()
        return (
            f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        )

    async def stop(self, timeout: float) -> None:
        """Wait for one that was told to stop, kill it after `timeout` seconds."""
        if self._process.returncode is None:
            self._process.terminate()  # one that still loads does not listen
            try:
                await asyncio.wait_for(self._process.wait(), timeout)
            except TimeoutError:
                log.warning("the engine process did not stop within %g s and is killed", timeout)
                self._process.kill()
                await self._process.wait()

    def kill(self) -> None:
        """At once, if it still runs."""
        if self._process.returncode is None:
            self._process.kill()

    async def close(self) -> None:
        """Free what is left of an ended process."""
        self.socket.close()
        self._context.term()
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(BrokenPipeError, ConnectionResetError):
            await self._process.stdin.wait_closed()
        self._directory.remove()
