"""What the log of a server (`--log-format json`) holds that nobody should see there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path


def errors_in_log(path: Path, *, expected: Sequence[str] = ()) -> list[str]:
    """Events at level error whose text begins with none of `expected`, and lines that are no events, such as
    tracebacks of libraries.
    """
    found = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            found.append(line)
            continue
        if event.get("level") in ("error", "critical") and not event["event"].startswith(tuple(expected)):
            found.append(" ".join(str(event[key]) for key in ("event", "exception") if key in event))
    return found
