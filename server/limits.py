"""What each token has in use and how much it may use: requests at once and tokens per minute.

Tokens are counted as a bucket that fills steadily and holds a minute's worth. A prompt is paid for when its request
starts, output as it comes: it may leave a debt, which delays the next request. Knows no gRPC and no engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine.errors import CallerLimitError
from server.callers import Caller

RETRY_CONCURRENCY = 1.0  # seconds; nobody knows when one of its requests ends
_SECONDS_PER_MINUTE = 60.0


class TokenBucket:
    """Tokens that may be used now; negative: a debt."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def take(self, num_tokens: int) -> None:
        self._level -= num_tokens

    def wait_for(self, num_tokens: int, per_minute: int, now: float) -> float:
        """Seconds until `num_tokens` may be taken; more than a minute's worth needs a full bucket. `per_minute` is
        the limit of this moment: it changes with the file of tokens.
        """
        self._level = min(self._level + (now - self._at) * self._per_minute / _SECONDS_PER_MINUTE, per_minute)
        self._per_minute, self._at = per_minute, now
        return max(0.0, min(num_tokens, per_minute) - self._level) * _SECONDS_PER_MINUTE / per_minute


class CallerLimits:
    """All tokens of one server."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_running: dict[str, int] = {}  # choices, by key of the token
        self._buckets: dict[str, TokenBucket] = {}

    @contextmanager
    def running(self, caller: Caller, num_choices: int) -> Iterator[None]:
        """Count the choices of a call while they run. Raises CallerLimitError when they are too many."""
        num_before = self._num_running.get(caller.key, 0)
        limit = caller.max_concurrent_requests
        if limit is not None and num_before + num_choices > limit:
            raise CallerLimitError(
                f"got {num_choices} choices while {num_before} of the token run, the limit is {limit}",
                RETRY_CONCURRENCY,
            )
        self._num_running[caller.key] = num_before + num_choices
        try:
            yield
        finally:
            self._num_running[caller.key] -= num_choices
            if not self._num_running[caller.key]:
                del self._num_running[caller.key]

    def charge_prompt(self, caller: Caller, num_tokens: int) -> None:
        """Raises CallerLimitError, and charges nothing, when the token has not as many left."""
        if caller.tokens_per_minute is None:
            # It may have had a limit: what it uses without one is no debt for the next.
            self._buckets.pop(caller.key, None)
            return
        now = self._clock()
        bucket = self._buckets.setdefault(caller.key, TokenBucket(caller.tokens_per_minute, now))
        seconds = bucket.wait_for(num_tokens, caller.tokens_per_minute, now)
        if seconds > 0.0:
            raise CallerLimitError(
                f"got a prompt of {num_tokens} tokens, more than is left of {caller.tokens_per_minute} a minute",
                seconds,
            )
        bucket.take(num_tokens)

    def charge_output(self, caller: Caller, num_tokens: int) -> None:
        bucket = self._buckets.get(caller.key)
        if bucket is not None:
            bucket.take(num_tokens)
