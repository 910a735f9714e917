"""How often drafts come, and how often they are right: moving averages per method and per request."""

from __future__ import annotations

from dataclasses import dataclass

METHOD_FORGETTING = 0.98  # per verification: about 50 count
REQUEST_FORGETTING = 0.94  # about 17 count
METHOD_WEIGHT = 4.0  # trials that the method's rate is worth in the estimate for one request
PRIOR_RATE = 0.7  # optimistic: a method that is never tried is never known
PRIOR_WEIGHT = 2.0  # trials, forgotten like any other


@dataclass(slots=True)
class _Ratio:
    forgetting: float
    successes: float
    trials: float

    def observe(self, successes: float, trials: float) -> None:
        self.successes = self.forgetting * self.successes + successes
        self.trials = self.forgetting * self.trials + trials

    def estimate(self, prior: float, weight: float) -> float:
        return (self.successes + weight * prior) / (self.trials + weight)


class MethodAcceptance:
    """Of one method, over all requests. A verification of 5 drafts of which 2 are accepted is 3 trials of which 2
    succeed: what stands behind the first wrong draft says nothing.
    """

    def __init__(self, forgetting: float = METHOD_FORGETTING, prior_weight: float = PRIOR_WEIGHT) -> None:
        self._accepted = _Ratio(forgetting, PRIOR_RATE * prior_weight, prior_weight)
        self._found = _Ratio(forgetting, PRIOR_RATE * prior_weight, prior_weight)

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Drafts had been asked for; num_drafted = 0: none came."""
        self._found.observe(float(num_drafted > 0), 1.0)
        if num_drafted > 0:
            self._accepted.observe(num_accepted, num_accepted + (num_accepted < num_drafted))

    @property
    def rate(self) -> float:
        """Probability that a draft is accepted, given that all before it were."""
        return self._accepted.estimate(0.0, 0.0)

    @property
    def found(self) -> float:
        """Probability that there are drafts when they are asked for."""
        return self._found.estimate(0.0, 0.0)


class RequestAcceptance(MethodAcceptance):
    """Of one method for one request: its own trials, and the method's rate for those it lacks."""

    def __init__(self, method: MethodAcceptance) -> None:
        super().__init__(REQUEST_FORGETTING, prior_weight=0.0)
        self._method = method

    def fade(self) -> None:
        """Time went by without trials: what is known grows old, and the method's rate counts for more."""
        self._accepted.observe(0.0, 0.0)
        self._found.observe(0.0, 0.0)

    @property
    def rate(self) -> float:
        return self._accepted.estimate(self._method.rate, METHOD_WEIGHT)

    @property
    def found(self) -> float:
        return self._found.estimate(self._method.found, METHOD_WEIGHT)


def expected_tokens(rate: float, k: int) -> float:
    """Tokens of a verification of k drafts: 1 + rate + ... + rate ** k. (Leviathan et al. 2022, equation 1.)"""
    return float(k + 1) if rate >= 1.0 else (1.0 - rate ** (k + 1)) / (1.0 - rate)
