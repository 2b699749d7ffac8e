"""Where replicas train by themselves and meet again: the host's side of a `Reduction` with `sync_every_steps`."""

from __future__ import annotations

import tensorflow as tf

from crankshaft.engine.reduction import Reduction


class Rounds:
    """Rounds of so many steps, counted from step 0, at the end of each of which replicas are brought in step.

    Within a call of the inner loop the loop does that (`sync`). A round that something due cuts short is ended by
    `after_call`, so that whoever acts there finds replicas in step.

    Attributes:
      steps: of a round.
      sync: brings replicas in step; a `tf.function`.
      in_step: whether replicas are, after the last call.
    """

    def __init__(self, distribution: tf.distribute.Strategy, reduction: Reduction):
        self.steps = reduction.sync_every_steps
        self.sync = tf.function(lambda: distribution.run(reduction.sync), autograph=False)
        self.in_step = True
        self._begin = tf.function(lambda: distribution.run(reduction.begin_round), autograph=False)
        self._begun = False

    def before_call(self) -> None:
        """Begins the first round of this process, from weights that were made, restored or loaded by now."""
        if not self._begun:
            self._begin()
            self._begun = True

    def after_call(self, step: int, due: bool) -> None:
        """Acts at `step`, where something is `due` or not."""
        at_end = step % self.steps == 0
        if due and not at_end:
            self.sync()
        self.in_step = due or at_end
