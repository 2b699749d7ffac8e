"""Synchronizes replicas that train independently for some steps (local SGD). Used on the host and in the inner loop."""

from __future__ import annotations

import tensorflow as tf

from ..internals.variables import compiled_once
from ..reduction import Reduction


class Syncs:
    """Synchronizes replicas at the end of each period of steps, counted from step 0.

    Within a call, the inner loop does it (`sync`). If something is due within a period, `after_call` ends the period,
    so that hooks find synchronized replicas.

    Attributes:
      period_steps: steps per period, `sync_every_steps`.
      sync: synchronizes replicas; a `tf.function`.
      in_step: whether replicas are synchronized after the last call.
    """

    def __init__(self, distribution: tf.distribute.Strategy, reduction: Reduction):
        self.period_steps = reduction.sync_every_steps or 1
        self.sync = tf.function(lambda: distribution.run(reduction.sync), autograph=False)
        self.in_step = True
        self._begin = compiled_once(lambda: distribution.run(reduction.begin_period))
        self._begun = False

    def before_call(self) -> None:
        """Begins the first period, or one after hooks have acted, with the present weights."""
        if not self._begun:
            self._begin()
            self._begun = True

    def after_call(self, step: int, due: bool) -> None:
        """Synchronizes replicas at `step` if something is `due` within a period."""
        at_end = step % self.period_steps == 0
        if due and not at_end:
            self.sync.get_concrete_function()()
        self.in_step = due or at_end
        self._begun = not due
