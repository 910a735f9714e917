"""`python -m tools.chaos`: load on a tiny model with cancels, deadlines, slow readers and kills of the engine.

Writes what it found, and ends with 1 where a request ended with a wrong status or with other tokens than in an
undisturbed run, or where the server kept blocks, memory, files or processes.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.support.tiny_models import make_tiny_checkpoint, make_tiny_tokenizer
from tools.chaos.report import ChaosReport, write_report
from tools.chaos.run import SERVER_ARGUMENTS, Settings, run
from tools.server_process import ServerProcess, exit_on_sigterm


def main() -> int:
    """Returns 1 where something was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tools.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800.0, help="of load; default: %(default)g")
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second; default: %(default)g")
    parser.add_argument(
        "--kill-every",
        type=float,
        default=300.0,
        help="seconds of service between kills; default: %(default)g",
    )
    parser.add_argument("--questions", type=int, default=200, help="different requests; default: %(default)d")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("build/chaos.json"))
    arguments = parser.parse_args()
    exit_on_sigterm()
    settings = Settings(
        seconds=arguments.seconds,
        rate=arguments.rate,
        kill_every=arguments.kill_every,
        num_questions=arguments.questions,
        seed=arguments.seed,
    )
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_tokenizer(make_tiny_checkpoint(Path(folder) / "tiny", "llama"))
        log = Path(folder) / "server.log"
        with ServerProcess(model, log, arguments=SERVER_ARGUMENTS) as server:
            report = asyncio.run(run(server, settings))
    write_report(report, arguments.output)
    print(_described(report))
    print(f"wrote {arguments.output}")
    return 1 if report.faults else 0


def _described(report: ChaosReport) -> str:
    lines = [f"{count:6} {status}" for status, count in report.statuses.items()]
    lines += [
        f"{report.num_requests} requests, the engine killed {len(report.outage_seconds)} times",
        f"before: {report.before}",
        f"after:  {report.after}",
        f"{report.num_faults} faults",
        *report.faults,
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
