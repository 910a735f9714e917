"""How often, and after which pauses, an engine that died is started again. Knows counts and seconds, no engine."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_DELAY, MAX_DELAY = 1.0, 30.0  # seconds; doubled from one to the next
STABLE_AFTER = 300.0  # seconds of service after which earlier deaths do not count


class Restarts:
    """Deaths in a row, and what follows from them."""

    def __init__(self, max_in_a_row: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_in_a_row = max_in_a_row
        self._clock = clock
        self._num_in_a_row = 0
        self._serves_since: float | None = None

    def engine_serves(self) -> None:
        self._serves_since = self._clock()

    def next_delay(self) -> float | None:
        """Seconds until the next start; None: give up. Called for each death and each start that failed."""
        since, self._serves_since = self._serves_since, None
        if since is not None and self._clock() - since >= STABLE_AFTER:
            self._num_in_a_row = 0
        if self._num_in_a_row >= self._max_in_a_row:
            return None
        self._num_in_a_row += 1
        return min(FIRST_DELAY * 2.0 ** (self._num_in_a_row - 1), MAX_DELAY)
