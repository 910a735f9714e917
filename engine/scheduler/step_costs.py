"""What a step of decodes costs, learnt from finished steps: verifying so many rows a request, drafting k tokens, and
feeding a drafter that is behind.

The first two are tables of what was measured, for each power of two of decoding requests by itself: costs are no lines
(a second row may cost half a step, and the next three nothing). Between entries they are interpolated, beyond them a
prior helps. It knows seconds and counts; where the clock is, and who drafts what, it is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

VERIFY_ELASTICITY = 0.2  # prior: doubling the rows of a request costs a fifth more
DRAFT_ELASTICITY = 0.8  # prior: doubling k nearly doubles the drafting
MIN_OBSERVATIONS = 3  # of a table, before it predicts, and of an entry, before it is trusted
RESOLUTION = 4  # entries per unit of x: rows per request are a mean
MEMORY = 50  # observations that an entry averages over
LEVEL_GAIN = (
    0.05  # share of a deviation that is taken for a change of all costs: contexts grow, clocks change
)
MAX_DEVIATION = 2.0  # a pause counts as no more than this factor
PRIOR_SPREAD = 0.25  # weight of the prior slope against that of two entries, as a squared distance
FEED_FORGETTING = 0.9  # per step in which a drafter catches up
OWN_WEIGHT = 2.0  # observations of a method's own entry that weigh as much as those of the others


@dataclass(slots=True)
class _Entry:
    """An average; `x` too, as an entry holds what was measured near its key."""

    x: float
    cost: float
    count: int = 1

    def observe(self, x: float, cost: float) -> None:
        self.count += 1
        # The first runs of a shape are slow: the second observation replaces the first.
        share = 1.0 / min(max(self.count - 1, 1), MEMORY)
        self.x += share * (x - self.x)
        self.cost += share * (cost - self.cost)


class CostTable:
    """Seconds by a number x and by who drafts, in units of a level that follows the whole. Deterministic."""

    def __init__(self, elasticity: float) -> None:
        self._elasticity = elasticity
        self._level = 1.0
        self._entries: dict[tuple[str, int], _Entry] = {}
        self.num_observations = 0
        self._points: list[
            _Entry
        ] = []  # made of the entries when they are asked for; empty: they have changed

    def observe(self, method: str, x: float, seconds: float) -> None:
        self.num_observations += 1
        self._points = []
        key = (method, round(x * RESOLUTION))
        entry = self._entries.get(key)
        if entry is None:
            self._entries[key] = _Entry(x, seconds / self._level)
            return
        expected = self._level * entry.cost
        if (
            seconds * MAX_DEVIATION < expected
        ):  # steps are slow by accident, never fast: what was seen before was slow
            self._entries[key] = _Entry(x, seconds / self._level, count=2)
            return
        if entry.count >= MIN_OBSERVATIONS and expected > 0.0:
            seconds = min(seconds, expected * MAX_DEVIATION)
            self._level *= (seconds / expected) ** LEVEL_GAIN
        entry.observe(x, seconds / self._level)

    def predict(self, method: str, x: float) -> float:
        """Seconds. Where the method's own steps were measured they count more than those of the others."""
        cost = self._interpolate(x)
        own = self._entries.get((method, round(x * RESOLUTION)))
        if own is not None and own.count >= MIN_OBSERVATIONS:
            # Beside the average of the entry, the others' slope is as good as any.
            measured = own.cost * (cost / max(self._interpolate(own.x), 1e-12))
            cost = (own.count * measured + OWN_WEIGHT * cost) / (own.count + OWN_WEIGHT)
        return self._level * cost

    def _interpolate(self, x: float) -> float:
        """Through the entries of all methods; never below a tenth of the nearest entry."""
        self._points = points = self._points or self._merge()
        right = next((index for index, point in enumerate(points) if point.x >= x), len(points))
        if 0 < right < len(points):
            low, high = points[right - 1], points[right]
            return low.cost + (high.cost - low.cost) * (x - low.x) / (high.x - low.x)
        nearest = points[0] if right == 0 else points[-1]
        slope = self._elasticity * nearest.cost / max(nearest.x, 1.0)
        if len(points) > 1:
            inner = points[1] if right == 0 else points[-2]
            distance = nearest.x - inner.x
            evidence = distance * distance
            slope = (distance * (nearest.cost - inner.cost) + PRIOR_SPREAD * slope) / (
                evidence + PRIOR_SPREAD
            )
        return max(nearest.cost + max(slope, 0.0) * (x - nearest.x), 0.1 * nearest.cost)

    def _merge(self) -> list[_Entry]:
        """One per x, ascending: the entries of all methods there, by their counts. None costs more than
        one behind it: where it seems so, it was measured in the first runs of a shape, which are slow."""
        merged: dict[int, _Entry] = {}
        for (_, key), entry in self._entries.items():
            point = merged.get(key)
            if point is None:
                merged[key] = _Entry(entry.x, entry.cost, entry.count)
                continue
            point.count += entry.count
            share = entry.count / point.count
            point.x += share * (entry.x - point.x)
            point.cost += share * (entry.cost - point.cost)
        points = sorted(merged.values(), key=lambda point: point.x)
        for point, behind in reversed(list(pairwise(points))):
            point.cost = min(point.cost, behind.cost)
        return points


class StepCosts:
    """Costs by number of decoding requests; what was never measured is taken from the nearest number that was."""

    def __init__(self) -> None:
        self._verify: dict[int, CostTable] = {}  # bucket -> seconds by rows a request
        self._draft: dict[str, dict[int, CostTable]] = {}  # method -> bucket -> seconds by k
        self._feeds: dict[str, tuple[float, float]] = {}  # method -> seconds, tokens; lately

    def observe_verify(self, num_decoding: int, method: str, rows_per_request: float, seconds: float) -> None:
        """All of the step but the drafting. `method`: who drafts in the step; where launches are not waited for, some
        of its time is in here."""
        table = self._verify.setdefault(bucket(num_decoding), CostTable(VERIFY_ELASTICITY))
        table.observe(method, rows_per_request, seconds)

    def observe_drafts(self, used: Mapping[str, int], num_decoding: int, seconds: float) -> None:
        """`used`: method -> k; 0: it only kept up. What several took together is shared out by what each is known to
        take, or is the one's of whom nothing is known."""
        shares = {method: self.draft(method, num_decoding, k) for method, k in used.items()}
        unknown = [method for method in used if not self._is_known(method)]
        total = sum(shares.values())
        if len(unknown) > 1:
            return
        for method, share in shares.items():
            if unknown == [method]:
                self._observe_draft(method, num_decoding, used[method], max(seconds - total, 0.0))
            elif not unknown and total > 0.0:
                self._observe_draft(method, num_decoding, used[method], seconds * share / total)

    def observe_feed(self, method: str, num_tokens: int, seconds: float, step_seconds: float) -> None:
        """A drafter was fed what it had missed: that took so much longer than the `step_seconds` of a step without."""
        seconds = min(seconds, MAX_DEVIATION * (step_seconds + self.feed(method, num_tokens)))
        old_seconds, old_tokens = self._feeds.get(method, (0.0, 0.0))
        self._feeds[method] = (
            FEED_FORGETTING * old_seconds + seconds,
            FEED_FORGETTING * old_tokens + num_tokens,
        )

    def _observe_draft(self, method: str, num_decoding: int, k: int, seconds: float) -> None:
        tables = self._draft.setdefault(method, {})
        tables.setdefault(bucket(num_decoding), CostTable(DRAFT_ELASTICITY)).observe(method, k, seconds)

    def _is_known(self, method: str) -> bool:
        return _nearest(self._draft.get(method, {}), 1) is not None

    def verify(self, num_decoding: int, method: str, rows_per_request: float) -> float | None:
        """Seconds, or None while too little is known."""
        table = _nearest(self._verify, num_decoding)
        return None if table is None else table.predict(method, rows_per_request)

    def draft(self, method: str, num_decoding: int, k: int) -> float:
        """Seconds; 0 while nothing is known, so that a method gets its first measurements."""
        table = _nearest(self._draft.get(method, {}), num_decoding)
        return 0.0 if table is None else table.predict(method, k)

    def feed(self, method: str, num_tokens: int) -> float:
        """Seconds to catch up with so many tokens; 0 while nothing is known."""
        seconds, tokens = self._feeds.get(method, (0.0, 0.0))
        return max(seconds, 0.0) * num_tokens / tokens if tokens > 0.0 else 0.0


def bucket(num_decoding: int) -> int:
    """1, 2, 3..4, 5..8, ... -> 0, 1, 2, 3, ..."""
    return (max(num_decoding, 1) - 1).bit_length()


def _nearest(tables: dict[int, CostTable], num_decoding: int) -> CostTable | None:
    wanted = bucket(num_decoding)
    known = [number for number, table in tables.items() if table.num_observations >= MIN_OBSERVATIONS]
    return tables[min(known, key=lambda number: (abs(number - wanted), number))] if known else None
