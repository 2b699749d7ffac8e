"""When replicas that train by themselves are brought in step again: the host's side of `sync_every_steps`."""

from __future__ import annotations

import tensorflow as tf

from ..reduction import Reduction


class Syncs:
    """Brings replicas in step at the end of each period of so many steps, counted from step 0.

    Within a call of the inner loop the loop does that (`sync`). A period that something due cuts short is ended by
    `after_call`, so that whoever acts there finds replicas in step.

    Attributes:
      period_steps: steps of a period, `sync_every_steps`.
      sync: brings replicas in step; a `tf.function`.
      in_step: whether replicas are in step after the last call.
    """

    def __init__(self, distribution: tf.distribute.Strategy, reduction: Reduction):
        self.period_steps = reduction.sync_every_steps
        self.sync = tf.function(lambda: distribution.run(reduction.sync), autograph=False)
        self.in_step = True
        self._begin = tf.function(lambda: distribution.run(reduction.begin_period), autograph=False)
        self._begun = False

    def before_call(self) -> None:
        """Begins the first period, or one before which hooks have acted, with the weights as they are."""
        if not self._begun:
            self._begin()
            self._begun = True

    def after_call(self, step: int, due: bool) -> None:
        """Brings replicas in step at `step` if something is `due` within a period."""
        at_end = step % self.period_steps == 0
        if due and not at_end:
            self.sync()
        self.in_step = due or at_end
        self._begun = not due
