"""How long a new request would wait for its first token, learnt from how fast the engine took up the ones before it.

Two rates are kept, both only of times in which requests waited: requests that started, and prompt tokens that were
computed, per second. While every row is taken the queue moves as fast as running requests end, else as fast as prompts
are computed. Knows counts and seconds only.
"""

from __future__ import annotations

# An observation counts half after so many seconds of waiting, but not before as many starts: an engine that takes up a
# request a minute is remembered for minutes.
HALF_LIFE_SECONDS = 5.0
HALF_LIFE_STARTS = 8.0
MIN_OBSERVED = 0.25  # seconds of waiting that have to be seen before there is an estimate
MIN_STARTS = 4.0  # before they say how fast prompts are computed: of few, and short ones, it would be a guess


class WaitEstimator:
    """Fed with every step, in order."""

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._seconds = 0.0  # these three fade alike
        self._starts = 0.0
        self._prompt_tokens = 0.0
        self._seconds_since_start = 0.0
        self._last_step_at: float | None = None

    def observe(self, now: float, *, has_waiting: bool, num_started: int, num_prompt_tokens: int) -> None:
        """A step ended. `has_waiting`: requests wait now; the others: what started in it."""
        last, self._last_step_at = self._last_step_at, now if has_waiting else None
        if last is None:
            return
        self._seconds_since_start += now - last
        if num_started:
            half_lives = min(self._seconds_since_start / HALF_LIFE_SECONDS, num_started / HALF_LIFE_STARTS)
            keep = 0.5**half_lives
            self._seconds *= keep
            self._starts *= keep
            self._prompt_tokens *= keep
            self._seconds_since_start = 0.0
        self._seconds += now - last
        self._starts += num_started
        self._prompt_tokens += num_prompt_tokens

    def engine_started(self) -> None:
        """Another one: the time since the last step of the one before it was an outage, no waiting in a queue."""
        self._last_step_at = None

    def estimate(self, *, num_running: int, num_ahead: int, num_tokens_ahead: int) -> float:
        """Seconds until requests and prompt tokens that come first, its own included, have been taken up; 0 while
        nothing is known. No request that started yet counts as one.
        """
        if self._seconds < MIN_OBSERVED:
            return 0.0
        if num_running >= self._max_running or self._starts < MIN_STARTS or not self._prompt_tokens:
            return num_ahead * self._seconds / max(self._starts, 1.0)
        return num_tokens_ahead * self._seconds / self._prompt_tokens
