"""How often drafts come, and how often they are right: moving averages per method and per request."""

from __future__ import annotations

from dataclasses import dataclass

METHOD_FORGETTING = 0.95  # per verification: about 20 count
REQUEST_FORGETTING = 0.9  # about 10 count
METHOD_WEIGHT = 6.0  # trials that the method's rate is worth in the estimate for one request
PRIOR_ACCEPTANCE = 0.7  # optimistic: a method that is never tried is never known
PRIOR_WEIGHT = 2.0


@dataclass(slots=True)
class _Ratio:
    forgetting: float
    successes: float = 0.0
    trials: float = 0.0

    def observe(self, successes: float, trials: float) -> None:
        self.successes = self.forgetting * self.successes + successes
        self.trials = self.forgetting * self.trials + trials

    def estimate(self, prior: float, weight: float) -> float:
        return (self.successes + weight * prior) / (self.trials + weight)


class Acceptance:
    """Of one method, over all requests or for one. A verification of 5 drafts of which 2 are accepted is 3 trials of
    which 2 succeed: what stands behind the first wrong draft says nothing.
    """

    def __init__(self, forgetting: float) -> None:
        self._accepted = _Ratio(forgetting)
        self._found = _Ratio(forgetting)

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Drafts had been asked for; num_drafted = 0: none came."""
        self._found.observe(float(num_drafted > 0), 1.0)
        if num_drafted > 0:
            self._accepted.observe(num_accepted, num_accepted + (num_accepted < num_drafted))

    def rate(self, prior: float = PRIOR_ACCEPTANCE, weight: float = PRIOR_WEIGHT) -> float:
        """Probability that a draft is accepted, given that all before it were."""
        return self._accepted.estimate(prior, weight)

    def found(self, prior: float = PRIOR_ACCEPTANCE, weight: float = PRIOR_WEIGHT) -> float:
        """Probability that there are drafts when they are asked for."""
        return self._found.estimate(prior, weight)


def expected_tokens(rate: float, k: int) -> float:
    """Tokens of a verification of k drafts: 1 + rate + ... + rate ** k. (Leviathan et al. 2022, equation 1.)"""
    return float(k + 1) if rate >= 1.0 else (1.0 - rate ** (k + 1)) / (1.0 - rate)
