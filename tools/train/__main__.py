"""`python -m tools.train STAGE`: each stage of making small models, one command each.

Every stage writes as it goes, ends by its time limit, and goes on where it was when it is started again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from engine.errors import EngineError
from tools.train import commands


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.train", description=__doc__)
    stages = parser.add_subparsers(required=True, metavar="STAGE")
    for name, stage in commands.STAGES.items():
        stage_parser = stages.add_parser(name, help=stage.help, description=stage.help)
        stage.add_arguments(stage_parser)
        stage_parser.set_defaults(run=stage.run)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except (EngineError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
