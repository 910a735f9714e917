"""How many tokens a second the engine brings at present, for balancers that weigh replicas by it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from engine.messages import RequestOutput
from engine.stats import StepStats

HALF_LIFE_SECONDS = 5.0  # a token counts half after so long


class TokenRate:
    """A fading sum: after a few half-lives of steady work it is the rate of it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sum = 0.0  # tokens, each weighted by its age
        self._at = clock()

    @property
    def per_second(self) -> float:
        self._fade()
        return self._sum * math.log(2) / HALF_LIFE_SECONDS

    def on_step(self, outputs: list[RequestOutput], step: StepStats | None) -> None:
        """EngineClient.on_step."""
        self._fade()
        self._sum += sum(len(output.token_ids) for output in outputs)

    def _fade(self) -> None:
        now = self._clock()
        self._sum *= 0.5 ** ((now - self._at) / HALF_LIFE_SECONDS)
        self._at = now
