"""Whether a request is taken: there is room in the queue for its tenant, and its first token will come in time.

What cannot be served in time is refused at once, while its client can still go elsewhere. Knows the requests that
this frontend sent and that have not started; the engine's own limit of the queue is behind it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from engine.errors import InvalidRequestError, LateError, QueueFullError
from engine.messages import AddRequest, RequestOutput
from engine.stats import EngineStats, StepStats
from server.wait_estimate import WaitEstimator

RETRY_FULL = 1.0  # seconds
MIN_RETRY, MAX_RETRY = 0.1, 60.0  # seconds


@dataclass
class _Share:
    """What waits of one tenant with one priority."""

    num_requests: int = 0
    num_tokens: int = 0


class Admission:
    """Of one engine. Waiting requests of a tenant are at most as many as the queue has places left: one tenant alone
    gets half of it, and a newcomer always finds room. Without tenants the whole queue is everybody's.
    """

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        *,
        max_waiting: int,
        max_running: int,
        max_time_to_first_token: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stats = stats
        self._max_waiting = max_waiting
        self._max_time_to_first_token = max_time_to_first_token
        self._clock = clock
        self._estimator = WaitEstimator(max_running)
        self._waiting: dict[str, AddRequest] = {}  # sent, nothing of it is computed yet
        self._shares: dict[tuple[int, str], _Share] = {}  # by priority and tenant

    def check(
        self, tenant: str, priority: int, *, num_choices: int, num_tokens: int, deadline: float | None
    ) -> None:
        """`num_tokens` of the prompt, 0 while they are not known; `deadline` as of the clock. Raises QueueFullError,
        LateError when the first token would come too late, or InvalidRequestError for more choices than may ever wait.
        """
        self._check_room(tenant, num_choices)
        limits = [] if deadline is None else [deadline - self._clock()]
        if self._max_time_to_first_token is not None:
            limits.append(self._max_time_to_first_token)
        if not limits:
            return
        seconds = self.estimate(tenant, priority, num_choices=num_choices, num_tokens=num_tokens)
        if seconds > min(limits):
            raise LateError(
                f"the first token would come in {seconds:.1f} s, wanted within {max(min(limits), 0.0):.1f} s",
                min(max(seconds - min(limits), MIN_RETRY), MAX_RETRY),
            )

    def estimate(
        self, tenant: str = "", priority: int = 0, *, num_choices: int = 1, num_tokens: int = 0
    ) -> float:
        """Seconds to the first token of a new request; 0 while nothing is known. May be asked from any thread."""
        num_ahead, num_tokens_ahead = self._ahead(tenant, priority)
        return self._estimator.estimate(
            num_running=self._stats().num_running,
            num_ahead=num_ahead + num_choices,
            num_tokens_ahead=num_tokens_ahead + num_tokens,
            own=num_choices,
        )

    @contextmanager
    def waiting(self, requests: Sequence[AddRequest]) -> Iterator[None]:
        """Count them until they start, or until the block ends."""
        for request in requests:
            self._waiting[request.request_id] = request
            share = self._shares.setdefault((request.priority, request.tenant), _Share())
            share.num_requests += 1
            share.num_tokens += len(request.prompt_token_ids)
        try:
            yield
        finally:
            for request in requests:
                self._leave(request.request_id)

    def engine_started(self) -> None:
        """Once for each engine, before its first step."""
        self._estimator.engine_started()

    def on_step(self, outputs: list[RequestOutput], step: StepStats | None) -> None:
        """EngineClient.on_step."""
        num_started = num_prompt_tokens = 0
        for output in outputs:
            if self._leave(output.request_id) and output.times.first_scheduled:
                num_started += 1
                num_prompt_tokens += output.num_prompt_tokens - output.num_cached_tokens
        if step is not None:
            stats = self._stats()
            self._estimator.observe(
                self._clock(),
                num_running=stats.num_running,
                has_waiting=stats.num_waiting > 0,
                num_started=num_started,
                num_prompt_tokens=num_prompt_tokens,
            )

    def _check_room(self, tenant: str, num_choices: int) -> None:
        """For all choices: a request of which the engine refuses some has started in vain."""
        num_waiting, limit = len(self._waiting), self._max_waiting
        most = (limit + 1) // 2 if tenant else limit
        if num_choices > most:
            raise InvalidRequestError(
                "n", f"got {num_choices}, expected 1..{most}: no more may wait on this server"
            )
        if num_waiting + num_choices > limit:
            raise QueueFullError(
                f"got {num_choices} choices while {num_waiting} requests wait, the limit is {limit}",
                RETRY_FULL,
            )
        num_own = sum(share.num_requests for (_, other), share in self._shares.items() if other == tenant)
        num_before = num_choices - 1  # of its own, before the last one
        if tenant and num_own + num_before >= limit - num_waiting - num_before:
            raise QueueFullError(
                f"got {num_choices} choices while {num_own} requests of this tenant wait, "
                f"and {limit - num_waiting} places are left",
                RETRY_FULL,
            )

    def _leave(self, request_id: str) -> bool:
        """False: it does not wait any more."""
        request = self._waiting.pop(request_id, None)
        if request is None:
            return False
        key = request.priority, request.tenant
        share = self._shares[key]
        share.num_requests -= 1
        share.num_tokens -= len(request.prompt_token_ids)
        if not share.num_requests:
            del self._shares[key]
        return True

    def _ahead(self, tenant: str, priority: int) -> tuple[int, int]:
        """Requests and prompt tokens that are served before a new one: the more urgent, its tenant's own, and as
        much of each other tenant, since they take turns.
        """
        shares = list(self._shares.items())  # at once: another thread may ask
        own = next((share for key, share in shares if key == (priority, tenant)), _Share())
        num_requests, num_tokens = own.num_requests, own.num_tokens
        for (other_priority, other), share in shares:
            if other_priority < priority:
                num_requests += share.num_requests
                num_tokens += share.num_tokens
            elif other_priority == priority and other != tenant:
                num_requests += min(share.num_requests, own.num_requests + 1)
                num_tokens += min(share.num_tokens, own.num_tokens + 1)
        return num_requests, num_tokens
