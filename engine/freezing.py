"""Which weights a run does not update, and until which step. Host code.

The steps at which that changes are known beforehand. The outer loop ends a call there, and each set of frozen weights
has a compiled program of its own, in which they get no gradient: the backward pass ends where only they are left.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from .internals.errors import UsageError, setting
from .internals.variables import tf_variable

if TYPE_CHECKING:
    from .optimizers import Optimizer


class Freezing:
    """The weights that are frozen, step by step.

    A weight that is frozen keeps its slots and its count of updates (`Optimizer.update_counts`), so its first update is
    that of a new run.

    Args:
      rules: (regular expression, step): a weight in whose path it is found is not updated before that step; None is
        never. Where several find a weight, the last to end decides.
      optimizers: all that update weights.

    Attributes:
      step: returns the run's step, which its `TrainState` sets.

    Raises:
      UsageError: a rule finds no weight, or none is left to train.
    """

    def __init__(self, rules: Sequence[tuple[str, int | None]], optimizers: Iterable[Optimizer]):
        self.step: Callable[[], int] = lambda: 0
        weights = {key: path for each in optimizers for key, path in each.paths.items()}
        until: dict[int, float] = {}
        for pattern, end in rules:
            found = [key for key, path in weights.items() if re.search(pattern, path)]
            if weights and not found:  # without any, the step shows that nothing is frozen
                raise UsageError(
                    f"{setting('freeze', pattern)} is found in the path of none of the {len(weights)} weights, such as "
                    f"{next(iter(weights.values()), '-')}; give a part of one, or a regular expression"
                )
            for key in found:
                until[key] = max(until.get(key, 0), math.inf if end is None else end)
        if until and len(until) == len(weights):
            raise UsageError(
                f"{setting('freeze', rules[0][0])} and all rules together freeze each of the {len(weights)} weights, "
                "and nothing is left to train; leave some out"
            )
        self._ends = sorted({end for end in until.values() if end < math.inf})
        self._sets = [frozenset(key for key, end in until.items() if end > step) for step in (0, *self._ends)]

    def next_change(self, step: int) -> int | None:
        """Returns the next step at which other weights are frozen; None if there is none."""
        return next((int(end) for end in self._ends if end > step), None)

    @property
    def frozen(self) -> frozenset[int]:
        """The `id`s of the tf.Variables that are frozen at the run's step."""
        step = self.step()
        return self._sets[sum(end <= step for end in self._ends)]

    def updates(self, variable) -> bool:
        """Returns whether the run's step may update a variable, Keras's or TensorFlow's: one that is not frozen."""
        return id(tf_variable(variable)) not in self.frozen
