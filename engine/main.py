"""The engine process: `python -m engine.main ADDRESS`, with an EngineConfig as one line of JSON on stdin.

Started by engine/client/process.py, which keeps stdin open as long as it lives; serves frontends on the
ZeroMQ address until a frontend sends Shutdown. No signal decides that: Ctrl-C reaches both processes, and so does
the SIGTERM of whoever stops all processes of a service at once (systemd), while the frontend lets streams finish.
The engine never outlives the process that started it.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence

from pydantic import ValidationError

from engine.config import EngineConfig, describe_validation_error
from engine.errors import ConfigError
from engine.frontends import Frontends
from engine.garbage import spare_what_is_loaded
from engine.log_stream import lossy
from engine.loop import Core, run_engine
from engine.messages import LoadProgress

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


CoreBuilder = Callable[[EngineConfig, Callable[[LoadProgress], None]], Core]


def build_core(config: EngineConfig, on_progress: Callable[[LoadProgress], None]) -> Core:
    """The real core, imported here: torch takes seconds, and a failure of it is reported like any other."""
    from engine.core import EngineCore

    return EngineCore(config, on_progress)


def main(arguments: Sequence[str] | None = None, core_factory: CoreBuilder = build_core) -> int:
    """Returns the exit status: 0 after a stop, 1 after a failure that the frontends were told of."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="python -m engine.main", description="The engine of slipstream.")
    parser.add_argument("address", help="ZeroMQ address to bind, ipc://PATH")
    address = parser.parse_args(arguments).address
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        handlers=[lossy(sys.stderr)],
    )
    config_json = sys.stdin.buffer.readline()
    _die_with_parent()
    frontends = Frontends(address)

    def make_core(on_progress: Callable[[LoadProgress], None]) -> Core:
        core = core_factory(_parse_config(config_json), on_progress)
        spare_what_is_loaded()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # only now: while loading, it ends the process at once
        return core

    succeeded = run_engine(make_core, frontends, frontends.publish)
    frontends.close()
    return 0 if succeeded else 1


def _parse_config(config_json: bytes) -> EngineConfig:
    try:
        return EngineConfig.model_validate_json(config_json)
    except ValidationError as error:
        raise ConfigError(describe_validation_error(error)) from None


def _die_with_parent() -> None:
    """Two ways, because each has a gap: the kernel's signal is Linux only and is missed if the parent is gone
    already; the end of stdin is seen by a thread that needs the interpreter. The signal comes when the
    thread that spawned this process ends, which is that of the event loop.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_exit_at_end_of_stdin, name="parent-watch", daemon=True).start()


def _exit_at_end_of_stdin() -> None:
    while os.read(0, 1024):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
