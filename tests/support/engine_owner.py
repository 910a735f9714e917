"""A process that owns an engine process, for tests that kill it: prints the engine's pid when it is ready."""

import asyncio
import sys

from engine.client.process import ProcessEngineClient
from tests.support.fake_core import fake_config


async def run() -> None:
    command = (sys.executable, "-m", "tests.support.fake_engine_main")
    client = ProcessEngineClient(fake_config(), command=command)
    await client.start()
    print(client.pid, flush=True)
    await client.wait_failed()


if __name__ == "__main__":
    asyncio.run(run())
