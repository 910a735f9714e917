"""The real frontend process before a scripted engine: any setting of the server as `--name value`, and the length of
a step.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from benchmarks.scripted_engine import STEP_SECONDS
from engine.client.process import ProcessEngineClient
from engine.garbage import spare_what_is_loaded
from server.app import App
from server.config import load_config
from server.logs import configure_logs


def main() -> int:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-seconds", type=float, default=STEP_SECONDS)
    own, rest = parser.parse_known_args()
    flags = {
        flag.removeprefix("--").replace("-", "_"): value
        for flag, value in zip(rest[::2], rest[1::2], strict=True)
    }
    return asyncio.run(_run(flags, own.step_seconds))


async def _run(flags: dict[str, str], step_seconds: float) -> int:
    config = load_config(flags)
    configure_logs("warning", "json")
    engine = (sys.executable, "-m", "benchmarks.scripted_engine", "--step-seconds", str(step_seconds))
    app = App(config, ProcessEngineClient(config.engine, command=engine))
    return await app.run(on_loaded=spare_what_is_loaded)


if __name__ == "__main__":
    sys.exit(main())
