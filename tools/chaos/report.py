"""What a chaos run found, one JSON file a run (schema `slipstream.chaos/1`)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from server.bench.schema import Environment
from tools.server_state import Held


class ChaosReport(msgspec.Struct, kw_only=True):
    """Empty `faults`: everything was right."""

    schema: Literal["slipstream.chaos/1"] = "slipstream.chaos/1"
    environment: Environment
    seed: int
    seconds: float  # of load
    rate: float  # requests a second
    num_requests: int
    disturbances: dict[str, int]  # what was done to them
    statuses: dict[str, int]  # "disturbance: STATUS REASON" -> requests
    outage_seconds: list[float]  # one for each kill
    before: Held
    after: Held
    bytes_meanwhile: list[int]  # resident, of the frontend
    num_faults: int
    faults: list[str]  # the first ones, in words


def write_report(report: ChaosReport, path: Path) -> None:
    """As indented JSON; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
