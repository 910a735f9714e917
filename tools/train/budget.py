"""How long a training run goes on: so many seconds, or so many steps; and the learning rate that follows from it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

_WARMUP_SHARE = 0.03
_LAST_SHARE = 0.02  # of the learning rate, at the end


@dataclass(frozen=True)
class Limit:
    """Exactly one of both. Seconds are what ends a run on a lent machine; steps make it repeatable."""

    seconds: float | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        if (self.seconds is None) == (self.steps is None):
            raise ValueError(
                f"a limit: got {self.seconds} seconds and {self.steps} steps, expected one of both"
            )


class Budget:
    """Progress of a run from 0 to 1. A run that is taken up again goes on from the seconds it had used."""

    def __init__(
        self, limit: Limit, used_seconds: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit = limit
        self._clock = clock
        self._began = clock() - used_seconds

    @property
    def used_seconds(self) -> float:
        return self._clock() - self._began

    def progress(self, step: int) -> float:
        """Before step `step`; 1 and more: the run is over."""
        if self._limit.steps is not None:
            return step / self._limit.steps
        assert self._limit.seconds is not None
        return self.used_seconds / self._limit.seconds


def learning_rate_scale(progress: float) -> float:
    """A short warm-up, then a straight line down."""
    if progress < _WARMUP_SHARE:
        return (progress + 1e-3) / (_WARMUP_SHARE + 1e-3)
    left = (1.0 - progress) / (1.0 - _WARMUP_SHARE)
    return max(left, _LAST_SHARE)
