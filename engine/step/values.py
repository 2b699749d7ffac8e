"""What a step computes with in place of reading its variables. Replica code."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import tensorflow as tf


class Values:
    """Values of Keras variables, and optimizers' progress, where reading each would take a message; none by default.

    A class of its own, because a list on a `tf.Module` would put the variables into the checkpoint.

    Args:
      pairs: Keras variables with their values.
      progress: by an optimizer's id what its `read_progress` gave.
    """

    def __init__(self, pairs: Sequence[tuple[tf.keras.Variable, tf.Tensor]] = (), progress: dict | None = None):
        self._pairs = pairs
        self._progress = dict(progress or {})

    def take_progress(self, optimizer) -> tf.Tensor | None:
        """Returns an optimizer's progress, if it is here: once, since its first update changes it."""
        return self._progress.pop(id(optimizer), None)

    @contextlib.contextmanager
    def in_use(self, variables: Sequence = (), tape: tf.GradientTape | None = None):
        """Makes Keras layers compute with the values, within. What they assign is assigned in the end.

        Yields:
          What `tape` is to be asked for gradients of: for each of `variables` its value here, or itself.
        """
        if not self._pairs:
            yield variables
            return
        with _Scope(self._pairs) as scope:
            found = {id(variable): value for variable, value in self._pairs}
            sources = [found.get(id(variable), variable) for variable in variables]
            if tape is not None:
                tape.watch([source for source in sources if isinstance(source, tf.Tensor)])
            yield sources
        for variable, value in scope.assigned.values():
            variable.assign(value)


class _Scope(tf.keras.StatelessScope):
    """Keras's way to compute with given values, which keeps what is assigned meanwhile to itself."""

    def __init__(self, pairs):
        super().__init__(pairs, collect_losses=True, initialize_variables=False)
        self.assigned = {}

    def add_update(self, update):
        super().add_update(update)
        self.assigned[id(update[0])] = update
