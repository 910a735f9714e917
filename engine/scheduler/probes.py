"""When "auto" tries what it has not chosen: as often as a small share of the speed pays for.

Turns are counted in steps of the engine and fall on multiples of powers of two: requests that probe at all probe
together, so that a drafter is run once for all of them. Knows no methods and no costs.
"""

from __future__ import annotations

from dataclasses import dataclass

BUDGET = 0.005  # of the speed, for the probes of one method
COST_BUDGET = 0.001  # the same where only costs are learnt, as replays tell the rest
MIN_INTERVAL = 8  # steps
MIN_COST_INTERVAL = 32
MAX_INTERVAL = 256
MAX_STREAK = 3  # probes in a row, while they surprise: the method may have become good
EARLY_STEPS = 32  # of a batch size, in which plain decoding is measured at any price
PLAIN_PROBE_STEPS = 2  # the second one verifies no drafts either: that is a plain step


@dataclass(slots=True)
class MethodProbe:
    """Of one method for one request. `offset` keeps the turns of several methods apart."""

    offset: int
    last_step: int  # in which it was asked
    is_replayed: bool = False  # a probe tells what it costs, not how good it is
    interval: int = MIN_INTERVAL
    streak: int = 0

    def is_due(self, num_steps: int) -> bool:
        """Has a turn come since it was asked last? The request need not be in every step."""
        is_next = num_steps > self.last_step
        is_turn = (num_steps - self.offset) // self.interval > (self.last_step - self.offset) // self.interval
        self.last_step = num_steps
        return is_turn or (is_next and self.streak > 0)

    def price(self, loss: float) -> None:
        """`loss`: the share of a step that a probe is expected to cost. Example: 0.12 is worth a probe in 24 steps,
        hence in 32."""
        if self.is_replayed:
            self.interval = max(_interval(loss, COST_BUDGET), MIN_COST_INTERVAL)
        else:
            self.interval = _interval(loss)

    def learn(self, *, is_surprise: bool) -> None:
        """Was a probe much better than expected?"""
        self.streak = self.streak + 1 if is_surprise and self.streak < MAX_STREAK else 0


@dataclass(slots=True)
class PlainProbe:
    """Of plain decoding, by all requests of a batch: only steps in which none verifies drafts tell its cost."""

    first_step: int
    interval: int = MIN_INTERVAL

    def is_due(self, num_steps: int) -> bool:
        return num_steps % self.interval >= self.interval - PLAIN_PROBE_STEPS

    def price(self, num_steps: int, loss: float) -> None:
        """As for methods; a probe is `PLAIN_PROBE_STEPS` long."""
        if num_steps >= self.first_step + EARLY_STEPS:
            self.interval = _interval(PLAIN_PROBE_STEPS * loss)


def _interval(loss: float, budget: float = BUDGET) -> int:
    """A power of two."""
    wanted = min(max(loss / budget, MIN_INTERVAL), MAX_INTERVAL)
    return 1 << (round(wanted) - 1).bit_length()
