"""What a fuzz run found, one JSON file a run (schema `slipstream.fuzz/1`)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from server.bench.schema import Environment
from tools.server_state import Held


class FuzzReport(msgspec.Struct, kw_only=True):
    """Empty `faults`: everything was right."""

    schema: Literal["slipstream.fuzz/1"] = "slipstream.fuzz/1"
    environment: Environment
    seed: int
    num_cases: int
    cases: dict[str, int]  # "service/method: kind" -> how many
    statuses: dict[str, int]  # "service/method: STATUS" -> how many
    before: Held
    after: Held
    num_faults: int
    faults: list[str]  # the first ones, in words


def write_report(report: FuzzReport, path: Path) -> None:
    """As indented JSON; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
