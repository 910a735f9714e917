"""What lookup methods would have brought, had they drafted: found out from the text that came, whoever drafted for it.

A replay walks through a request's output as decoding with its method alone would have: draft, compare with the tokens
that followed, go on behind the first wrong one. That takes no verification and no step, only a little time of the host,
and no more than a share of it: what does not fit waits, the oldest first. It draws no conclusions, the draft policy
does. It is where faults of a replay end: a method that raises is not replayed for that request any more.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from engine.request import Request
from engine.spec_decode.replay import LookupReplay

logger = logging.getLogger(__name__)

SHARE = 0.02  # of the time of steps that replays may take
MAX_DELAY = 0.1  # of a step, however much was saved up
READ_CHUNK = 64  # tokens between two looks at the clock


class Replayed(NamedTuple):
    """One verification that might have been. Example: asked for 8, the method has 5 drafts, of which 2 are right;
    before the one ahead of it, 3 drafts had been right in a row: so much is known when drafts are asked for.
    """

    num_asked: int
    num_drafted: int
    num_accepted: int
    run_before: int


class Replay(NamedTuple):
    """What is new of one method for one request. `run`: its drafts that are right in a row, up to the newest token."""

    method: str
    outcomes: list[Replayed]
    run: int


class Replays:
    """`start`: by method, the replay for a new request's cache salt."""

    def __init__(
        self,
        start: Mapping[str, Callable[[str], LookupReplay]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._start = start
        self._clock = clock
        self._allowance = 0.0  # seconds
        self._walks: dict[Request, list[_Walk]] = {}
        self._waiting: dict[Request, None] = {}  # ordered; those with tokens that were not walked through
        self.num_failures: Counter[tuple[str, str]] = Counter()  # (method, class of the exception)

    def follow(self, request: Request, wanted: Mapping[str, int]) -> None:
        """A new request. `wanted`: methods, and the k of each."""
        walks = [
            _Walk(method, k, self._start[method](request.message.cache_salt), request.num_prompt_tokens)
            for method, k in wanted.items()
            if k > 0
        ]
        if walks:
            self._walks[request] = walks

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._walks.pop(request, None)
        self._waiting.pop(request, None)

    def grant(self, seconds: float) -> None:
        """A step took so long: replays may take a share of that."""
        self._allowance = min(self._allowance + SHARE * seconds, MAX_DELAY * seconds)

    def run(self, requests: Iterable[Request]) -> list[tuple[Request, Replay]]:
        """These may have got tokens. Returns what is new, of them or of others."""
        if not self._walks:
            return []
        for request in requests:
            if request in self._walks:
                self._waiting.setdefault(request)
        if not self._waiting:
            return []
        began_at = self._clock()

        def has_time() -> bool:
            return self._clock() - began_at < self._allowance

        news: list[tuple[Request, Replay]] = []
        while self._waiting and has_time():
            request = next(iter(self._waiting))
            news += [(request, replay) for replay in self._advance(request, has_time)]
            if has_time():
                del self._waiting[request]
        self._allowance -= self._clock() - began_at
        return news

    def _advance(self, request: Request, has_time: Callable[[], bool]) -> list[Replay]:
        replays = []
        for walk in list(self._walks[request]):
            try:
                replays.append(walk.advance(request.token_ids, has_time))
            except Exception as error:  # a drafter's fault costs what would be known of it, no more
                self._walks[request].remove(walk)
                self._log(walk.method, error)
        return replays

    def _log(self, method: str, error: Exception) -> None:
        kind = (method, type(error).__name__)
        self.num_failures[kind] += 1
        if self.num_failures[kind] == 1:
            logger.error(
                "draft method %s cannot be replayed. Logged once per kind of exception",
                method,
                exc_info=error,
            )


class _Walk:
    """Of one method through one request's output."""

    def __init__(self, method: str, k: int, text: LookupReplay, num_prompt_tokens: int) -> None:
        self.method = method
        self._k = k
        self._text = text
        longest = text.max_prompt_tokens
        self._num_read = 0 if longest is None else max(num_prompt_tokens - longest, 0)
        self._position = num_prompt_tokens + 1  # of the token to verify; one comes without drafts
        self._drafts: list[int] | None = None  # for this position
        self._run = 0  # up to this position
        self._run_before = 0  # up to the position ahead of it
        self._num_pending = 0  # drafts for this position that are right so far, and more will come

    def advance(self, token_ids: Sequence[int], has_time: Callable[[], bool]) -> Replay:
        """As far as the text is known, and time allows."""
        outcomes: list[Replayed] = []
        while has_time():
            if self._num_read < self._position:
                chunk = token_ids[self._num_read : min(self._num_read + READ_CHUNK, self._position)]
                if not chunk:
                    break
                self._text.read(chunk)
                self._num_read += len(chunk)
                continue
            if self._drafts is None:
                self._drafts = self._text.propose(self._k)
            followed = token_ids[self._position : self._position + len(self._drafts)]
            num_right = _num_equal(self._drafts, followed)
            if num_right == len(followed) < len(self._drafts):
                self._num_pending = num_right
                break
            outcomes.append(self._go_on(len(self._drafts), num_right))
        return Replay(self.method, outcomes, self._run + self._num_pending)

    def _go_on(self, num_drafted: int, num_right: int) -> Replayed:
        outcome = Replayed(self._k, num_drafted, num_right, self._run_before)
        self._run_before = self._run
        self._run = self._run + num_right if 0 < num_right == num_drafted else 0
        self._num_pending = 0
        self._position += num_right + 1
        self._drafts = None
        return outcome


def _num_equal(drafts: Sequence[int], followed: Sequence[int]) -> int:
    """Leading ones."""
    pairs = zip(drafts, followed, strict=False)
    return next(
        (index for index, (draft, token) in enumerate(pairs) if draft != token),
        min(len(drafts), len(followed)),
    )
