"""The engine process with a scripted core: `python -m tests.support.fake_engine_main ADDRESS`."""

import sys

from engine.main import main
from tests.support.fake_core import FakeCore

if __name__ == "__main__":
    sys.exit(main(core_factory=FakeCore))
