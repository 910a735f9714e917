"""Writes the dashboards; with `--check`, only compares the files with the code.

Exit status 1 when a file differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from tools.dashboards.fleet import fleet
from tools.dashboards.serving import serving
from tools.dashboards.speculation import speculation

FOLDER = Path(__file__).parents[2] / "deploy" / "grafana" / "dashboards"
DASHBOARDS: dict[str, Callable[[], Dashboard]] = {
    "speculation.json": speculation,
    "serving.json": serving,
    "fleet.json": fleet,
}


def encode(dashboard: Dashboard) -> str:
    """The JSON that Grafana imports."""
    return JSONEncoder(sort_keys=True, indent=2).encode(dashboard) + "\n"


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a file differs")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="default: deploy/grafana/dashboards")
    arguments = parser.parse_args()
    is_check, folder = arguments.check, arguments.folder
    stale = []
    for file_name, build in DASHBOARDS.items():
        path, text = folder / file_name, encode(build())
        if is_check and (not path.exists() or path.read_text(encoding="utf-8") != text):
            stale.append(file_name)
        elif not is_check:
            path.write_text(text, encoding="utf-8")
    if stale:
        print(f"not what the code makes: {', '.join(stale)}; run python -m tools.dashboards", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
