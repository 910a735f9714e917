"""Runs `slipstream serve` as a child process, for the demo, the end-to-end tests and the benchmarks.

Knows the command line, health checking and signals; nothing of what is served.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_POLL_SECONDS = 0.1
_STOP_SECONDS = 30.0


class ServerStartError(Exception):
    """The server ended, or was not ready in time; the message holds the end of its log."""


def exit_on_sigterm() -> None:
    """Let SIGTERM unwind this process as Ctrl-C does, so that no server outlives whoever started it."""

    def leave(signum: int, frame: FrameType | None) -> None:
        sys.exit(128 + signum)

    signal.signal(signal.SIGTERM, leave)


def free_port() -> int:
    """A TCP port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def descendants(pid: int) -> list[int]:
    """Process ids of the children of a process, and of theirs (Linux)."""
    found = []
    for listing in Path("/proc").glob(f"{pid}/task/*/children"):
        for child in listing.read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


class ServerProcess:
    """A context manager: the server is SERVING inside the block and gone after it.

    Its log goes to `log_path`. `program` is what Python runs, `arguments` are added to its flags.
    """

    def __init__(
        self,
        model: str | Path,
        log_path: Path,
        *,
        arguments: Sequence[str] = (),
        program: Sequence[str] = ("-m", "server", "serve"),
        ready_timeout: float = 300.0,
    ) -> None:
        self.port = free_port()
        self.metrics_port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.log_path = log_path
        self.command = [sys.executable, *program, "--model", str(model), "--host", "127.0.0.1"]
        self.command += ["--port", str(self.port), "--metrics-port", str(self.metrics_port), *arguments]
        self._ready_timeout = ready_timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._is_terminated = False

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server was not started"
        return self._process.pid

    def start(self) -> None:
        """Start it and wait for health SERVING. Raises ServerStartError."""
        self._log = self.log_path.open("wb")
        self._process = subprocess.Popen(
            self.command, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            self._wait_until_serving()
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def terminate(self) -> None:
        """Send one SIGTERM (a second would cut the draining short) and return at once."""
        assert self._process is not None, "the server was not started"
        if self._process.poll() is None and not self._is_terminated:
            self._is_terminated = True
            self._process.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        """SIGTERM, wait for the orderly end, return the exit status."""
        self.terminate()
        return self.wait()

    def wait(self) -> int:
        """Wait for the end and return the exit status; kill what does not end in 30 s."""
        assert self._process is not None, "the server was not started"
        try:
            return self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            return self._process.wait()
        finally:
            if self._log is not None:
                self._log.close()

    def kill_engine(self) -> None:
        """SIGKILL to every process that the frontend started."""
        for pid in descendants(self.pid):
            os.kill(pid, signal.SIGKILL)

    def log_tail(self, num_lines: int = 20) -> str:
        """The last lines of the log."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-num_lines:])

    def _wait_until_serving(self) -> None:
        start = time.monotonic()
        with grpc.insecure_channel(self.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            while not _is_serving(health):
                waited = time.monotonic() - start
                if self._process is None or self._process.poll() is not None:
                    raise ServerStartError(f"the server ended while starting:\n{self.log_tail()}")
                if waited > self._ready_timeout:
                    raise ServerStartError(f"not serving after {waited:.0f} s:\n{self.log_tail()}")
                time.sleep(_POLL_SECONDS)


def _is_serving(health: health_pb2_grpc.HealthStub) -> bool:
    try:
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=1.0, wait_for_ready=True)
    except grpc.RpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
