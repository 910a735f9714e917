"""Node programs of the tests, with the packages that they need."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tools.fetch_model import models_folder


def install_node_program(sources: Path) -> Path:
    """A copy of the folder with its pinned packages, in the cache folder; installed once per content of its files."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources.iterdir()))).hexdigest()[
        :16
    ]
    folder = models_folder().parent / f"{sources.name.replace('_', '-')}-{digest}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        fresh = Path(scratch) / "program"
        shutil.copytree(sources, fresh)
        command = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts"]
        installed = subprocess.run(command, cwd=fresh, capture_output=True, text=True, check=False)
        if installed.returncode != 0:
            pytest.skip(f"npm could not install the packages: {installed.stderr.strip()[-300:]}")
        fresh.rename(folder)
    return folder
