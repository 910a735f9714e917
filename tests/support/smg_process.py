"""The gateway smg as a child process in front of a server, for tests.

Knows how smg is started and stopped, and that it serves once it lists a model.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import IO

from tools.server_process import free_port

SMG = Path(sys.executable).with_name("smg")
_POLL_SECONDS = 0.05
_START_SECONDS = 60.0
_STOP_SECONDS = 20.0


@cache
def why_smg_cannot_run() -> str | None:
    """None: it can."""
    if not SMG.exists():
        return "needs the package smg"
    try:
        probe = subprocess.run([SMG, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"smg does not start: {error}"
    return None if probe.returncode == 0 else f"smg does not start: {probe.stderr[-200:]}"


class SmgProcess:
    """A context manager: the gateway answers at `url` inside the block and is gone after it."""

    def __init__(self, worker_address: str, folder: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._folder = folder
        self._log_path = folder / "smg.log"
        self._command = [str(SMG), "launch", "--worker-urls", f"grpc://{worker_address}"]
        self._command += ["--host", "127.0.0.1", "--port", str(port)]
        self._command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        self._command += ["--shutdown-grace-period-secs", "1"]
        # Requests stay on this machine, whatever proxy the environment names.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    def __enter__(self) -> SmgProcess:
        self._log = self._log_path.open("wb")
        self._process = subprocess.Popen(
            self._command, cwd=self._folder, stdout=self._log, stderr=subprocess.STDOUT
        )
        try:
            self._wait_until_it_lists_a_model()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _wait_until_it_lists_a_model(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _START_SECONDS
        while not self._lists_a_model():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"smg is not ready:\n{self._log_path.read_text(errors='replace')[-2000:]}")
            time.sleep(_POLL_SECONDS)

    def _lists_a_model(self) -> bool:
        try:
            with self._opener.open(f"{self.url}/v1/models", timeout=2.0) as answer:
                return bool(json.load(answer)["data"])
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def _stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._log is not None:
            self._log.close()
