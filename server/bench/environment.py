"""Finds out where a benchmark runs. Every fact that cannot be had is empty, never guessed."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from server.bench.schema import Environment

_PACKAGES = ("slipstream", "torch", "triton", "transformers", "tokenizers", "grpcio", "protobuf", "numpy")


def current_environment(*, device: str = "", num_threads: int | None = None) -> Environment:
    """Describe this process and machine. `device` and `num_threads` are those of the engine."""
    return Environment(
        command=_command(),
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        python=platform.python_version(),
        platform=platform.platform(),
        cpu=_cpu_model(),
        num_cpus=_num_usable_cpus(),
        git_revision=_git_revision(Path(__file__).parent),
        versions=_installed_versions(),
        device=device,
        num_threads=num_threads,
    )


def _command() -> str:
    """As it was typed, but for the folders of absolute paths: a result file may be published."""
    return shlex.join(Path(word).name if Path(word).is_absolute() else word for word in sys.orig_argv)


def _num_usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 0


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor()


def _git_revision(folder: Path) -> str:
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return described.stdout.strip()


def _installed_versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
