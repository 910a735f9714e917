"""The real frontend process before a scripted engine: takes the flags of `slipstream serve` that it needs."""

from __future__ import annotations

import argparse
import asyncio
import sys

from engine.client.process import ProcessEngineClient
from server.app import App
from server.config import load_config
from server.logs import configure_logs


def main() -> int:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    for flag in ("--model", "--host", "--port", "--metrics-port"):
        parser.add_argument(flag, required=True)
    return asyncio.run(_run(vars(parser.parse_args())))


async def _run(flags: dict[str, str]) -> int:
    config = load_config(flags)
    configure_logs("warning", "json")
    engine = (sys.executable, "-m", "benchmarks.scripted_engine")
    return await App(config, ProcessEngineClient(config.engine, command=engine)).run()


if __name__ == "__main__":
    sys.exit(main())
