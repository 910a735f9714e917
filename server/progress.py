"""Shows how the start goes on: a bar on a terminal, a log line a phase elsewhere."""

from __future__ import annotations

from types import TracebackType

import structlog
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from engine.messages import LoadProgress

_log = structlog.get_logger(__name__)


class StartProgress:
    """Call it with every LoadProgress, inside a `with` block."""

    def __init__(self, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        self._phase = ""
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task("start", total=1.0)

    def __enter__(self) -> StartProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, progress: LoadProgress) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=progress.phase, completed=progress.fraction)
        elif progress.phase != self._phase:
            _log.info("starting", phase=progress.phase)
        self._phase = progress.phase
