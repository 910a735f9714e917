"""What a step of decodes costs, learnt from finished steps: verifying so many rows a request, and drafting k tokens.

Both are taken as linear near what was measured, for each power of two of decoding requests by itself. It knows seconds
and counts; where the clock is, and who drafts what, it is told.
"""

from __future__ import annotations

VERIFY_ELASTICITY = 0.2  # prior: doubling the rows of a request costs a fifth more
DRAFT_ELASTICITY = 0.8  # prior: doubling k nearly doubles the drafting
FORGETTING = 0.98  # weight of the measurements so far when one more comes: 50 steps count
MIN_OBSERVATIONS = 4  # before a prediction is made; the first runs of a shape are slow
PRIOR_SPREAD = 0.25  # weight of the prior slope, as a sum of squared deviations of x
MAX_OUTLIER = 3.0  # times the prediction: a pause counts as no more than that


class LinearCost:
    """Seconds as a + b * x, by weighted least squares with a prior for b. Deterministic."""

    def __init__(self, elasticity: float) -> None:
        self._elasticity = elasticity
        self.num_observations = 0
        self._weight = 0.0
        self._x = 0.0  # weighted means
        self._y = 0.0
        self._xx = 0.0
        self._xy = 0.0

    def observe(self, x: float, seconds: float) -> None:
        if self.num_observations >= MIN_OBSERVATIONS:
            seconds = min(seconds, MAX_OUTLIER * self.predict(x))
        self.num_observations += 1
        self._weight = FORGETTING * self._weight + 1.0
        share = 1.0 / self._weight
        self._x += share * (x - self._x)
        self._y += share * (seconds - self._y)
        self._xx += share * (x * x - self._xx)
        self._xy += share * (x * seconds - self._xy)

    def predict(self, x: float) -> float:
        """Seconds; never below a tenth of what was measured on average."""
        variance = max(self._xx - self._x * self._x, 0.0)
        covariance = self._xy - self._x * self._y
        prior = self._elasticity * self._y / max(self._x, 1.0)
        evidence = self._weight * variance
        slope = max((self._weight * covariance + PRIOR_SPREAD * prior) / (evidence + PRIOR_SPREAD), 0.0)
        return max(self._y + slope * (x - self._x), 0.1 * self._y)


class StepCosts:
    """Costs by number of decoding requests; what was never measured is taken from the nearest number that was."""

    def __init__(self) -> None:
        self._verify: dict[int, LinearCost] = {}  # bucket -> seconds by rows a request
        self._draft: dict[str, dict[int, LinearCost]] = {}  # method -> bucket -> seconds by k

    def observe_verify(self, num_decoding: int, rows_per_request: float, seconds: float) -> None:
        """All of the step but the drafting."""
        costs = self._verify.setdefault(_bucket(num_decoding), LinearCost(VERIFY_ELASTICITY))
        costs.observe(rows_per_request, seconds)

    def observe_draft(self, method: str, num_decoding: int, k: int, seconds: float) -> None:
        """k = 0: the method only kept up."""
        buckets = self._draft.setdefault(method, {})
        buckets.setdefault(_bucket(num_decoding), LinearCost(DRAFT_ELASTICITY)).observe(k, seconds)

    def verify(self, num_decoding: int, rows_per_request: float) -> float | None:
        """Seconds, or None while too little is known."""
        cost = _nearest(self._verify, num_decoding)
        return None if cost is None else cost.predict(rows_per_request)

    def draft(self, method: str, num_decoding: int, k: int) -> float:
        """Seconds; 0 while nothing is known, so that a method gets its first measurements."""
        cost = _nearest(self._draft.get(method, {}), num_decoding)
        return 0.0 if cost is None else cost.predict(k)


def _bucket(num_decoding: int) -> int:
    """1, 2, 3..4, 5..8, ... -> 0, 1, 2, 3, ..."""
    return (num_decoding - 1).bit_length()


def _nearest(costs: dict[int, LinearCost], num_decoding: int) -> LinearCost | None:
    wanted = _bucket(max(num_decoding, 1))
    known = [bucket for bucket, cost in costs.items() if cost.num_observations >= MIN_OBSERVATIONS]
    return costs[min(known, key=lambda bucket: (abs(bucket - wanted), bucket))] if known else None
