"""The image and the compose file: lint, and agreement with the server and with each other."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from server.config import ENV_PREFIX, ServerConfig, load_config
from server.health import Health
from tools.health_probe import status

ROOT = Path(__file__).parent.parent.parent
DOCKERFILE = ROOT / "Dockerfile"
COMPOSE = ROOT / "deploy" / "compose" / "compose.yaml"
ENGINE_STOP_SECONDS = 11
NOT_SETTINGS = {"SLIPSTREAM_CACHE"}  # of tools.fetch_model


def instructions() -> list[tuple[str, str]]:
    """Name and arguments of each instruction of the last stage."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    found = [tuple(line.split(maxsplit=1)) for line in lines if line.strip()]
    start = max(index for index, (name, _) in enumerate(found) if name == "FROM")
    return [(name, arguments) for name, arguments in found[start:]]


def arguments_of(name: str) -> str:
    return next(arguments for instruction, arguments in reversed(instructions()) if instruction == name)


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint has wheels for Linux on x86_64 only")
    result = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout


def test_the_image_runs_without_root_and_stops_by_the_signal_that_drains() -> None:
    assert arguments_of("USER") == "10001:10001"
    assert arguments_of("STOPSIGNAL") == "SIGTERM"
    assert json.loads(arguments_of("ENTRYPOINT")) == ["tini", "--", "slipstream"]
    assert json.loads(arguments_of("CMD")) == ["serve"]


def test_the_image_exposes_the_ports_of_the_server() -> None:
    fields = ServerConfig.model_fields
    assert arguments_of("EXPOSE").split() == [
        str(fields["port"].default),
        str(fields["metrics_port"].default),
    ]
    health = json.loads(arguments_of("HEALTHCHECK").split(" CMD ")[1])
    assert health[-1].endswith(f":{fields['port'].default}")


def test_all_that_the_image_takes_is_there_and_not_ignored() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE.read_text(), flags=re.MULTILINE)
    sources = {source for line in copied for source in line.split()[:-1]}
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sources == allowed
    assert all((ROOT / source).exists() for source in sources)


def environment(text: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in shlex.split(text))


def test_the_environment_of_the_image_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(arguments_of("ENV")).items():
        if name.startswith(ENV_PREFIX) and name not in NOT_SETTINGS:
            assert name.removeprefix(ENV_PREFIX).lower() in ServerConfig.model_fields
            monkeypatch.setenv(name, value)
    assert load_config({"model": "m"}).host == "0.0.0.0"


@pytest.fixture
def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())["services"]
    return found


def test_the_server_of_the_compose_file_is_configured_and_has_time_to_drain(
    services: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = services["server"]
    for name, value in server["environment"].items():
        assert name.removeprefix(ENV_PREFIX).lower() in ServerConfig.model_fields
        monkeypatch.setenv(name, value)
    config = load_config({})
    assert [speculator.method for speculator in config.speculators] == ["ngram", "suffix"]
    stop_seconds = int(server["stop_grace_period"].removesuffix("s"))
    assert stop_seconds > config.drain_delay + config.grace + ENGINE_STOP_SECONDS


def test_what_the_compose_file_mounts_is_there(services: dict[str, Any]) -> None:
    mounts = [mount for service in services.values() for mount in service.get("volumes", [])]
    sources = [mount.split(":")[0] for mount in mounts if mount.startswith(".")]
    assert len(sources) == 4
    assert all((COMPOSE.parent / source).exists() for source in sources)


def test_the_containers_of_the_compose_file_are_locked_down(services: dict[str, Any]) -> None:
    for name in ("model", "server"):
        assert services[name]["read_only"] is True
        assert services[name]["cap_drop"] == ["ALL"]
    assert all(
        port.startswith("127.0.0.1:") for service in services.values() for port in service.get("ports", [])
    )


async def test_the_health_probe_tells_serving_from_the_rest() -> None:
    server, health = grpc.aio.server(), Health()
    health.add_to(server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    await health.set_ready(False)
    await health.set_alive(True)
    assert await asyncio.to_thread(status, address, "liveness", timeout=5) == "SERVING"
    assert await asyncio.to_thread(status, address, "readiness", timeout=5) == "NOT_SERVING"
    assert await asyncio.to_thread(status, address, "unheard", timeout=5) == "NOT_FOUND"
    await server.stop(None)
    assert await asyncio.to_thread(status, address, "readiness", timeout=5) == "UNAVAILABLE"
