"""Run every benchmark, each in a process of its own: `python -m benchmarks [--quick] [more options]`."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.common import run_in_turn

BENCHMARKS = ("single_stream", "batch_scaling", "interference", "frontend_rate", "overload", "memory_flat")


def main() -> int:
    """Returns 1 when one of them failed."""
    commands = {name: [sys.executable, "-m", f"benchmarks.{name}", *sys.argv[1:]] for name in BENCHMARKS}
    return run_in_turn(commands, lambda command: subprocess.run(command, check=False).returncode == 0)


if __name__ == "__main__":
    sys.exit(main())
