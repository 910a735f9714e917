"""How many prompt tokens a step may compute while other requests decode, so that these do not stall.

The cost of a step is taken as base + rate * prefill tokens. Both are learnt from finished steps: the base
from steps without prefill, the rate from what prefill steps took beyond it. It knows step sizes and seconds,
not requests.
"""

from __future__ import annotations

from collections import deque
from statistics import median

MIN_CHUNK = 16  # tokens; a prefill always goes on by this much, whatever the measurements say
UNMEASURED_CHUNK = 32  # tokens, before the rate is known
MAX_GROWTH = (
    2  # a chunk is at most so many times the largest one measured lately: noise is not believed at once
)
NUM_SAMPLES = 15  # newest measurements; their median ignores a pause, and follows a change in 8 steps


class ChunkPolicy:
    """Deterministic: the same observations give the same limits."""

    def __init__(self, max_prefill_stall: float | None) -> None:
        """`max_prefill_stall`: seconds that prefill may add to a step with decodes; None: no limit."""
        self._max_stall = max_prefill_stall
        self._base_seconds: deque[float] = deque(maxlen=NUM_SAMPLES)
        self._prefills: deque[tuple[int, float]] = deque(maxlen=NUM_SAMPLES)  # tokens, seconds a token

    def max_prefill_tokens(self, budget: int) -> int:
        """Prefill tokens for a step with decodes; at most `budget`.

        Example: a stall of 0.05 s at 0.0001 s a token allows 500 tokens, if 250 were measured before.
        """
        if self._max_stall is None:
            return budget
        if not self._prefills:
            return min(UNMEASURED_CHUNK, budget)
        rate = median(seconds for _, seconds in self._prefills)
        most = min(budget, MAX_GROWTH * max(num_tokens for num_tokens, _ in self._prefills))
        if rate * most <= self._max_stall:
            return most
        return min(max(int(self._max_stall / rate), MIN_CHUNK), most)

    def observe(self, num_prefill_tokens: int, seconds: float) -> None:
        """A step with so many prefill tokens took so long."""
        if num_prefill_tokens == 0:
            self._base_seconds.append(seconds)
        elif num_prefill_tokens >= MIN_CHUNK:
            # Fewer say little: a whole step's noise would be divided by few tokens.
            base = median(self._base_seconds) if self._base_seconds else 0.0
            self._prefills.append((num_prefill_tokens, (seconds - base) / num_prefill_tokens))
