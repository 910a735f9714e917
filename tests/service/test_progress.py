"""How a start is shown."""

from __future__ import annotations

import io

from rich.console import Console
from structlog.testing import capture_logs

from engine.messages import LoadProgress
from server.progress import StartProgress


def steps() -> list[LoadProgress]:
    parts = (("load", 0.0), ("load", 0.5), ("warm up", 0.0))
    return [LoadProgress(phase=phase, fraction=fraction) for phase, fraction in parts]


def test_a_log_has_a_line_for_each_phase() -> None:
    with capture_logs() as logs, StartProgress(Console(file=io.StringIO())) as progress:
        for step in steps():
            progress(step)
    assert [(line["event"], line["phase"]) for line in logs] == [
        ("starting", "load"),
        ("starting", "warm up"),
    ]


def test_a_terminal_has_a_bar() -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True)
    with capture_logs() as logs, StartProgress(console) as progress:
        for step in steps():
            progress(step)
    assert not logs
    assert "warm up" in shown.getvalue()
