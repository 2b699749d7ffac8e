"""Intervals that numbers have to lie in; those of arguments of optimizers, schedules and models stand here, by name.

Host code that does without TensorFlow, so that what reads a command line can use it before TensorFlow starts.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping
from typing import Any

_INT32 = 2**31 - 1
HUGE = 1e30  # far below float32's end at 3.4e38
_TINY = 1.2e-38  # float32's smallest number of full precision


@dataclasses.dataclass(frozen=True)
class Interval:
    """Numbers between two ends.

    Attributes:
      lower, upper: ends that belong to it.
      above, below: ends that do not; each in place of `lower` or `upper`.
      whole: whether only integers do.
    """

    lower: float | None = None
    upper: float | None = None
    above: float | None = None
    below: float | None = None
    whole: bool = False

    def __post_init__(self):
        if (self.lower is None) == (self.above is None) or (self.upper is None) == (self.below is None):
            raise TypeError(f"{self} needs one lower end and one upper end")

    def __contains__(self, value: Any) -> bool:
        """Returns whether a value is a number of the interval; nan is of none."""
        if isinstance(value, bool) or not isinstance(value, numbers.Integral if self.whole else numbers.Real):
            return False
        number: Any = value  # a type checker does not know that `numbers.Real` compares
        above = number > self.above if self.lower is None else number >= self.lower
        return bool(above and (number < self.below if self.upper is None else number <= self.upper))

    def __str__(self) -> str:
        """Describes the interval: "a number from 0 to below 1", "an integer from 1 to 8"."""
        shown = str if self.whole else "{:g}".format
        low = f"from {shown(self.lower)}" if self.above is None else f"above {shown(self.above)}"
        high = f"to {shown(self.upper)}" if self.below is None else f"to below {shown(self.below)}"
        return f"{'an integer' if self.whole else 'a number'} {low} {high}"


_FROM_ZERO = Interval(lower=0, upper=HUGE)
_POSITIVE = Interval(lower=_TINY, upper=HUGE)
_FINITE = Interval(lower=-HUGE, upper=HUGE)
_DECAY = Interval(lower=0, below=1)  # of an average: with 1 it would never move
_COUNT = Interval(lower=1, upper=_INT32, whole=True)

# Of the engine's rules and of Keras's, which agree on the names. A tuple's or list's is that of each of its numbers.
OPTIMIZER_ARGUMENTS = {
    **dict.fromkeys(("beta_1", "beta_2", "rho", "momentum", "adam_beta_1", "adam_beta_2"), _DECAY),
    **dict.fromkeys(("epsilon", "epsilon_1", "epsilon_2", "clip_threshold", "rms_rate"), _POSITIVE),
    **dict.fromkeys(("initial_accumulator_value", "beta", "adam_weight_decay", "adam_lr_ratio"), _FROM_ZERO),
    **dict.fromkeys(("clipnorm", "clipvalue"), _FROM_ZERO),
    **{f"{kind}_regularization_strength": _FROM_ZERO for kind in ("l1", "l2", "l2_shrinkage")},
    **dict.fromkeys(("muon_a", "muon_b", "muon_c"), _FINITE),
    "learning_rate_power": Interval(lower=-100, upper=0),  # FTRL's
    "beta_2_decay": Interval(lower=-100, below=0),  # Adafactor's: 1 - step ** beta_2_decay is its beta_2
    "ns_steps": Interval(lower=1, upper=1000, whole=True),
    "warmup_steps": Interval(lower=0, upper=_INT32, whole=True),
}
SCHEDULE_ARGUMENTS = {
    **dict.fromkeys(("alpha", "end_learning_rate", "power", "values"), _FROM_ZERO),
    **dict.fromkeys(("decay_rate", "m_mul"), _POSITIVE),
    **dict.fromkeys(("decay_steps", "first_decay_steps"), _COUNT),
    "t_mul": Interval(lower=1, upper=1000),
    "boundaries": Interval(lower=0, upper=_INT32, whole=True),
}
# Of the models that come with Crankshaft.
MODEL_ARGUMENTS = {
    **dict.fromkeys(("dropout", "batch_norm_momentum"), _DECAY),  # with all of it dropped out nothing is left to learn
    **dict.fromkeys(("hidden_units", "bottom_units", "top_units"), _COUNT),
}


def outside(intervals: Mapping[str, Interval], name: str, value: Any) -> str | None:
    """Returns what is wrong with an argument's value, or None: "beta_1=2 is not a number from 0 to below 1".

    Args:
      intervals: those of the arguments that have one.
      name: the argument's.
      value: a number, or a tuple or list of them. None, which leaves the choice to the rule, is in each interval.
    """
    interval = intervals.get(name)
    if interval is None or value is None:
        return None
    if value in ((), []):
        return f"{name}= is empty and not {interval}"
    for each in value if isinstance(value, (tuple, list)) else (value,):
        if each not in interval:
            return f"{name}={each} is not {interval}"
    return None
