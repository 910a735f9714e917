"""Generates server/pb from protos/, or checks that what is committed is what would be generated.

The generated files are committed, so that installing and serving need no compiler. They are made with the
lowest grpcio-tools that we support, because generated code refuses an older runtime.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parent.parent
PACKAGE = Path("server/pb")  # protos/x.proto is imported as server.pb.x_pb2
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def main() -> int:
    """Exit status 1 when the compiler fails, or with --check when committed files differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when files would change")
    if not parser.parse_args().check:
        generate(ROOT)
        return 0
    stale = stale_files()
    for path in stale:
        print(f"{path}: differs from what `make protos` writes", file=sys.stderr)
    return 1 if stale else 0


def generate(output: Path) -> list[Path]:
    """Write the generated modules below `output`; returns their paths relative to it."""
    sources = sorted((ROOT / "protos").rglob("*.proto"))
    names = [str(PACKAGE / source.relative_to(ROOT / "protos")) for source in sources]
    arguments = [
        "protoc",
        f"-I{PACKAGE}={ROOT / 'protos'}",
        f"-I{files('grpc_tools') / '_proto'}",
        f"--python_out={output}",
        f"--pyi_out={output}",
        f"--grpc_python_out={output}",
        *names,
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")
    written = [Path(name.removesuffix(".proto") + suffix) for name in names for suffix in SUFFIXES]
    return written + _write_packages(output, written)


def stale_files() -> list[Path]:
    """Generated files that are missing or differ, and files in server/pb that nothing generates."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        generated = set(generate(fresh))
        stale = {
            path
            for path in generated
            if not (ROOT / path).is_file() or (ROOT / path).read_bytes() != (fresh / path).read_bytes()
        }
    present = {path.relative_to(ROOT) for path in (ROOT / PACKAGE).rglob("*.py*") if path.suffix != ".pyc"}
    return sorted(stale | (present - generated))


def _write_packages(output: Path, modules: list[Path]) -> list[Path]:
    """An empty __init__.py in every folder from server/pb down."""
    folders = {parent for module in modules for parent in module.parents if parent.is_relative_to(PACKAGE)}
    written = [folder / "__init__.py" for folder in sorted(folders)]
    for path in written:
        (output / path).write_text("")
    return written


if __name__ == "__main__":
    sys.exit(main())
