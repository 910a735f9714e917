"""How often drafts come, and how often they are right: moving averages per method and per request, by position.

By position, because drafts are no coin tosses: where the first is right, prompt lookup is mostly right to the end, and
a head that is trained for two steps is not right at the fourth.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import prod

METHOD_FORGETTING = 0.98  # per verification: about 50 count
REQUEST_FORGETTING = 0.94  # about 17 count
METHOD_WEIGHT = 12.0  # trials that the method's rate is worth in the estimate for one request
POOLED_WEIGHT = 2.0  # trials that the rate over all positions is worth at one of them
SURPRISE = 0.25  # probability below which it is one that all drafts are right
PRIOR_RATE = 0.7  # optimistic: a method that is never tried is never known
PRIOR_WEIGHT = 2.0  # trials, forgotten like any other


@dataclass(slots=True)
class _Ratio:
    successes: float = 0.0
    trials: float = 0.0

    def forget(self, forgetting: float) -> None:
        self.successes *= forgetting
        self.trials *= forgetting

    def observe(self, successes: float, trials: float) -> None:
        self.successes += successes
        self.trials += trials

    def estimate(self, prior: float, weight: float) -> float:
        return (self.successes + weight * prior) / (self.trials + weight)


class _History:
    """A verification of 5 drafts of which 2 are accepted is 3 trials, at positions 0, 1 and 2, of which 2 succeed: what
    stands behind the first wrong draft says nothing. Where it is known that more were asked for than came, the position
    behind the last draft has failed too: a method that drafts as much as it is sure of is no better for that.
    """

    def __init__(self, forgetting: float) -> None:
        self._forgetting = forgetting
        self._found = _Ratio()
        self._pooled = _Ratio()
        self._positions: list[_Ratio] = []
        self._drafted: list[_Ratio] = []  # by position: is there a draft, where there is a first one

    def observe(self, num_drafted: int, num_accepted: int, num_asked: int | None = None) -> None:
        """Drafts had been asked for; num_drafted = 0: none came. `num_asked`: how many, where that is known."""
        self._found.forget(self._forgetting)
        self._found.observe(float(num_drafted > 0), 1.0)
        if num_drafted > 0:
            self._forget_drafts()
            num_asked = num_asked or num_drafted
            while len(self._positions) < num_asked:
                self._positions.append(_Ratio())
                self._drafted.append(_Ratio())
            for position in range(num_asked):
                self._drafted[position].observe(float(position < num_drafted), 1.0)
            for position in range(min(num_accepted + 1, num_asked)):
                is_accepted = float(position < num_accepted)
                self._pooled.observe(is_accepted, 1.0)
                self._positions[position].observe(is_accepted, 1.0)

    def _forget_drafts(self) -> None:
        self._pooled.forget(self._forgetting)
        for ratio in (*self._positions, *self._drafted):
            ratio.forget(self._forgetting)

    def _at(self, position: int) -> _Ratio:
        return self._positions[position] if position < len(self._positions) else _Ratio()

    def _drafted_at(self, position: int) -> _Ratio:
        return self._drafted[position] if position < len(self._drafted) else _Ratio()


class MethodAcceptance(_History):
    """Of one method, over all requests."""

    def __init__(self, forgetting: float = METHOD_FORGETTING, prior_weight: float = PRIOR_WEIGHT) -> None:
        super().__init__(forgetting)
        self._found.observe(PRIOR_RATE * prior_weight, prior_weight)
        self._pooled.observe(PRIOR_RATE * prior_weight, prior_weight)

    @property
    def found(self) -> float:
        """Probability that there are drafts when they are asked for."""
        return self._found.estimate(0.0, 0.0)

    def rate(self, position: int) -> float:
        """Probability that the draft is accepted, given that all before it were."""
        return self._at(position).estimate(self._pooled.estimate(0.0, 0.0), POOLED_WEIGHT)

    def has_draft(self, position: int) -> float:
        """Probability that there are so many drafts, if there are any and so many are asked for."""
        return self._drafted_at(position).estimate(1.0, POOLED_WEIGHT)


class RequestAcceptance(_History):
    """Of one method for one request: its own trials, and the method's rates for those it lacks."""

    def __init__(self, method: MethodAcceptance) -> None:
        super().__init__(REQUEST_FORGETTING)
        self._method = method

    def fade(self) -> None:
        """Time went by without trials: what is known grows old, and the method's rates count for more."""
        self._found.forget(self._forgetting)
        self._forget_drafts()

    @property
    def found(self) -> float:
        return self._found.estimate(self._method.found, METHOD_WEIGHT)

    def rate(self, position: int) -> float:
        return self._at(position).estimate(self._method.rate(position), METHOD_WEIGHT)

    def has_draft(self, position: int) -> float:
        return self._drafted_at(position).estimate(self._method.has_draft(position), METHOD_WEIGHT)

    def is_surprise(self, num_drafted: int, num_accepted: int) -> bool:
        """Were all drafts right, although that was not to be expected?"""
        if num_drafted == 0 or num_accepted < num_drafted:
            return False
        return prod(map(self.rate, range(num_drafted))) < SURPRISE


def expected_drafted(acceptance: MethodAcceptance | RequestAcceptance, max_drafts: int) -> list[float]:
    """Drafts that come where any do, when 0, 1, ..., max_drafts are asked for."""
    return [0.0, *accumulate(map(acceptance.has_draft, range(max_drafts)))]


def expected_accepted(acceptance: MethodAcceptance | RequestAcceptance, max_drafts: int) -> list[float]:
    """Accepted drafts of a verification of 0, 1, ..., max_drafts drafts; with rates r0, r1: [0, r0, r0 + r0 r1]."""
    expected, all_right = [0.0], 1.0
    for position in range(max_drafts):
        all_right *= acceptance.rate(position)
        expected.append(expected[-1] + all_right)
    return expected
