"""`python -m tools.fuzz`: random and malformed messages to every method of generation, administration, the gateway
protocol, health and reflection, and bytes that are no gRPC to the port, of a real server with a tiny model.

Writes what it found, and ends with 1 where a status was wrong, a process died, an error was logged, or the server
kept blocks, memory or files.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.support.tiny_models import make_tiny_checkpoint, make_tiny_tokenizer
from tools.fuzz.report import write_report
from tools.fuzz.run import SERVER_ARGUMENTS, run
from tools.server_process import ServerProcess, exit_on_sigterm, free_port


def main() -> int:
    """Returns 1 where something was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=15_000, help="about so many; default: %(default)d")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("build/fuzz.json"))
    arguments = parser.parse_args()
    exit_on_sigterm()
    admin_port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_tokenizer(make_tiny_checkpoint(Path(folder) / "tiny", "llama", dtype="float32"))
        flags = (*SERVER_ARGUMENTS, "--admin-port", str(admin_port))
        with ServerProcess(model, Path(folder) / "server.log", arguments=flags) as server:
            report = run(server, admin_port, arguments.cases, arguments.seed)
    write_report(report, arguments.output)
    for status, count in report.statuses.items():
        print(f"{count:6} {status}")
    print(f"{report.num_cases} cases, {report.num_faults} faults", *report.faults, sep="\n")
    print(f"wrote {arguments.output}")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
