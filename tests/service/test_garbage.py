"""A full collection of garbage holds up a process that serves only for what came since it was loaded."""

from __future__ import annotations

import subprocess
import sys

from engine.client.process import ProcessEngineClient
from server.app import App, ModelFiles
from tests.support.fake_core import fake_config, fake_request
from tests.support.fake_engine import FakeEngine
from tests.support.server_fixture import server_config, tiny_tokenizer

_SPARED = """\
import gc
from engine.garbage import spare_what_is_loaded

loaded = [[] for _ in range(1000)]
spare_what_is_loaded()
assert not any(loaded is kept for kept in gc.get_objects())
late = []
late.append(late)
del late
assert gc.collect() >= 1
"""
_ENGINE = """\
import gc, sys
from engine.main import main
from tests.support.fake_core import FakeCore

class Checking(FakeCore):
    def step(self):
        assert gc.get_freeze_count() > 1000
        return super().step()

sys.exit(main(core_factory=Checking))
"""


def test_what_is_loaded_is_not_collected_and_what_comes_later_is() -> None:
    subprocess.run([sys.executable, "-c", _SPARED], check=True, timeout=60)


async def test_an_engine_process_spares_its_model() -> None:
    client = ProcessEngineClient(fake_config(), command=(sys.executable, "-c", _ENGINE))
    await client.start()
    try:
        stream = client.submit(fake_request("r"))
        while (await stream.next()).finish is None:
            pass
    finally:
        await client.stop()


async def test_a_server_says_once_that_it_is_loaded_before_it_is_ready() -> None:
    engine, told = FakeEngine(), []
    app = App(server_config(), engine, lambda model: ModelFiles(tiny_tokenizer(), {}))

    def loaded() -> None:
        told.append(engine.is_alive)
        app.stop()
        app.stop()

    assert await app.run(on_loaded=loaded) == 0
    assert told == [True]
