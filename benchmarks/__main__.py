"""Run every benchmark, each in a process of its own: `python -m benchmarks [--quick] [more options]`."""

from __future__ import annotations

import subprocess
import sys

BENCHMARKS = ("single_stream", "batch_scaling", "interference", "frontend_rate", "overload", "memory_flat")


def main() -> int:
    """Returns 1 when one of them failed; the others run all the same."""
    failed = []
    for name in BENCHMARKS:
        print(f"== {name}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{name}", *sys.argv[1:]]
        if subprocess.run(command, check=False).returncode != 0:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
