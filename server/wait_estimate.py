"""How long a new request would wait for its first token, learnt from how fast the engine took up the ones before it.

Two rates are kept, both only of times in which requests waited: requests that started per second and, of the times in
which a row was free as well, prompt tokens that were computed per second. More requests than there are free rows wait
until running ones end; all of them wait for the prompts in front of theirs. Knows counts and seconds only.
"""

from __future__ import annotations

from dataclasses import dataclass

# An observation counts half after so many seconds of waiting, but not before as many starts: an engine that takes up a
# request a minute is remembered for minutes.
HALF_LIFE_SECONDS = 5.0
HALF_LIFE_STARTS = 8.0
MIN_OBSERVED = 0.25  # seconds of waiting that have to be seen before there is an estimate
MIN_STARTS = 4.0  # before they say how fast prompts are computed: of few, and short ones, it would be a guess


@dataclass
class _Observed:
    """What was seen in times of one kind; all of it fades alike."""

    seconds: float = 0.0
    starts: float = 0.0
    prompt_tokens: float = 0.0
    seconds_since_start: float = 0.0

    def add(self, seconds: float, num_started: int, num_prompt_tokens: int) -> None:
        self.seconds_since_start += seconds
        if num_started:
            half_lives = min(self.seconds_since_start / HALF_LIFE_SECONDS, num_started / HALF_LIFE_STARTS)
            keep = 0.5**half_lives
            self.seconds *= keep
            self.starts *= keep
            self.prompt_tokens *= keep
            self.seconds_since_start = 0.0
        self.seconds += seconds
        self.starts += num_started
        self.prompt_tokens += num_prompt_tokens


class WaitEstimator:
    """Fed with every step, in order."""

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._waiting = _Observed()  # whatever was waited for
        self._prompts = _Observed()  # a row was free: prompts were waited for
        self._last_step_at: float | None = None
        self._had_free_row = False  # at the last step

    def observe(
        self, now: float, *, num_running: int, has_waiting: bool, num_started: int, num_prompt_tokens: int
    ) -> None:
        """A step ended. `num_running`, `has_waiting`: requests now; the others: what started in it."""
        last, self._last_step_at = self._last_step_at, now if has_waiting else None
        had_free_row, self._had_free_row = self._had_free_row, num_running < self._max_running
        if last is None:
            return
        self._waiting.add(now - last, num_started, num_prompt_tokens)
        if had_free_row:
            self._prompts.add(now - last, num_started, num_prompt_tokens)

    def engine_started(self) -> None:
        """Another one: the time since the last step of the one before it was an outage, no waiting in a queue."""
        self._last_step_at = None

    def estimate(self, *, num_running: int, num_ahead: int, num_tokens_ahead: int, own: int = 1) -> float:
        """Seconds until requests and prompt tokens that come first, its own included, have been taken up; 0 while
        nothing is known, and for a request that needs no queue: nothing is ahead but `own` requests, and rows are free.
        No request that started yet counts as one.
        """
        free_rows = max(0, self._max_running - num_running)
        if self._waiting.seconds < MIN_OBSERVED or num_ahead <= min(own, free_rows):
            return 0.0
        per_start = self._waiting.seconds / max(self._waiting.starts, 1.0)
        for_rows = max(0, num_ahead - free_rows) * per_start
        if self._prompts.starts < MIN_STARTS or not self._prompts.prompt_tokens:
            return for_rows
        return max(for_rows, num_tokens_ahead * self._prompts.seconds / self._prompts.prompt_tokens)
