"""The position of streamed input, as part of a run's state: checkpoints keep it, and a resumed run continues there."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ..internals.tensorflow import TrackableNode
from .feed import Feed


class Position(TrackableNode):
    """The state of each process's iterator at one step. Empty where the step says all, as for arrays. Host code.

    Attributes:
      num_bytes: of the states that this process took last.
      step: scalar int64 variable, the step to which the states belong; -1 for none.
      pipeline: scalar string variable, `Feed.pipeline` of the feed whose states they are.
      part_0, ...: scalar string variables, a state of each process that has a share of its own; "" for none.
    """

    optional_in_checkpoint = True  # one that lacks it, or has more, is gone on with: the epoch is read again

    def __init__(self):
        super().__init__()
        self._feed: Any = None
        self._processes: Any = None
        self.num_bytes = 0

    @property
    def variables(self) -> list[tf.Variable]:
        """Its variables, of this process: where all stand at the same position, the chief alone keeps it."""
        return [each for each in vars(self).values() if isinstance(each, tf.Variable)]

    def follow(self, feed: Feed | None, processes) -> None:
        """Sets the feed whose position this is: training's, in these processes (`engine.strategies.base.Processes`)."""
        self._feed = feed if feed and feed.num_positions else None
        self._processes = processes
        if self._feed is None:
            return
        with tf.device("CPU:0"):
            if not hasattr(self, "step"):
                self.step = tf.Variable(-1, dtype=tf.int64, trainable=False)
                self.pipeline = tf.Variable("", trainable=False)
            for number in range(self._feed.num_positions):
                if not hasattr(self, f"part_{number}"):
                    setattr(self, f"part_{number}", tf.Variable("", trainable=False))
        self._feed.kept = self._kept

    def take(self, step: int) -> None:
        """Stores where the feed stands, for the checkpoint of this step. Every process has to call it."""
        if self._feed is None or int(self.step) == step:
            return
        parts = self._feed.num_positions
        if parts == 1 and not self._processes.is_chief:
            return  # all stand at the same position, and the chief writes
        state = self._feed.position(step)
        if state is None:
            return
        states = [state] if parts == 1 else self._processes.exchange_bytes(state)
        for number, each in enumerate(states):
            getattr(self, f"part_{number}").assign(each)
        self.pipeline.assign(self._feed.pipeline)
        self.step.assign(step)
        self.num_bytes = sum(map(len, states))

    def _kept(self, step: int) -> list[bytes]:
        """Returns all processes' states, if they are of this step and of a pipeline like the feed's; else none."""
        if int(self.step) != step or self.pipeline.numpy().decode() != self._feed.pipeline:
            return []
        return [getattr(self, f"part_{number}").numpy() for number in range(self._feed.num_positions)]
