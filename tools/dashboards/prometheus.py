"""A Prometheus of our own, for as long as a block lasts: it scrapes given servers and answers queries.

For the tests of the rules and dashboards and for their picture. Needs the program `prometheus` (on Debian and
Ubuntu: apt install prometheus, which also has promtool). Knows no metric.
"""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import yaml

from tools.server_process import free_port

_POLL_SECONDS = 0.1
_START_SECONDS = 60.0
_STOP_SECONDS = 10.0


class PrometheusError(Exception):
    """Prometheus did not start, or refused a query; the message says why."""


class PrometheusProcess:
    """A context manager: ready inside the block and gone after it. Its files are in `folder`."""

    def __init__(
        self, folder: Path, targets: Sequence[str], *, rules: Sequence[Path] = (), interval: str = "250ms"
    ) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self._folder = folder
        config = {
            "global": {"scrape_interval": interval, "evaluation_interval": interval},
            "rule_files": [str(path) for path in rules],
            "scrape_configs": [{"job_name": "slipstream", "static_configs": [{"targets": list(targets)}]}],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
        # Requests stay on this machine, whatever proxy the environment names.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    def __enter__(self) -> PrometheusProcess:
        self._log = (self._folder / "prometheus.log").open("wb")
        command = [
            "prometheus",
            f"--config.file={self._folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address={self.url.removeprefix('http://')}",
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

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant vector: `metric` is their labels, `value` a pair of time and text."""
        result: list[dict[str, Any]] = self._get("query", query=expression)["result"]
        return result

    def query_range(self, expression: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        """Like `query`, with `values`: pairs from `start` to `end` (Unix times), `step` seconds apart."""
        answer = self._get("query_range", query=expression, start=start, end=end, step=step)
        result: list[dict[str, Any]] = answer["result"]
        return result

    def rules(self) -> list[dict[str, Any]]:
        """Every loaded rule, with its health."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def _get(self, endpoint: str, **parameters: object) -> dict[str, Any]:
        url = f"{self.url}/api/v1/{endpoint}?{urllib.parse.urlencode(parameters)}"
        try:
            with self._opener.open(url) as response:
                data: dict[str, Any] = json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise PrometheusError(f"{parameters}: {error.read().decode()}") from None
        return data

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _START_SECONDS
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                log = (self._folder / "prometheus.log").read_text(errors="replace")
                raise PrometheusError(f"prometheus did not start:\n{log[-2000:]}")
            time.sleep(_POLL_SECONDS)

    def _is_ready(self) -> bool:
        try:
            with self._opener.open(f"{self.url}/-/ready") as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, ConnectionError):
            return False

    def _stop(self) -> None:
        assert self._process is not None
        assert self._log is not None
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
