"""The position of streamed input, part of a run's state: checkpoints keep it, and a resumed run continues there."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ...internals.tensorflow import TrackableNode, outside_scopes
from .feed import Feed


class Position(TrackableNode):
    """The state of each process's iterator at one step. Empty if the step determines it, as for arrays.

    Attributes:
      num_bytes: size in bytes of the states that this process stored last.
      step: scalar int64 variable, the step to which the states belong; -1 for none.
      pipeline: scalar string variable, `Feed.pipeline` of the feed whose states they are.
      process_0, ...: scalar string variables, the state of each process with a part of its own; "" for none.
    """

    optional_in_checkpoint = ("",)  # a run without it reads the epoch again

    def __init__(self):
        super().__init__()
        self._feed: Any = None
        self._processes: Any = None
        self.num_bytes = 0

    @property
    def variables(self) -> list[tf.Variable]:
        """This process's variables; if all processes have the same position, only the chief keeps it."""
        return [value for value in vars(self).values() if isinstance(value, tf.Variable)]

    def set_feed(self, feed: Feed | None, processes) -> None:
        """Sets the feed (training's) and the processes (`engine.strategies.base.Processes`)."""
        self._feed = feed if feed and feed.part else None
        self._processes = processes
        if self._feed is None:
            return
        outside_scopes(self._make_variables)  # `fit` may be called within a strategy's scope
        self._feed.saved_states, self._feed.processes = self._saved_states, processes

    def _make_variables(self) -> None:
        with tf.device("CPU:0"):
            if not hasattr(self, "step"):
                self.step = tf.Variable(-1, dtype=tf.int64, trainable=False)
                self.pipeline = tf.Variable("", trainable=False)
            for number in range(len(self._feed.part.counts)):
                if not hasattr(self, f"process_{number}"):
                    setattr(self, f"process_{number}", tf.Variable("", trainable=False))

    def capture(self, step: int) -> None:
        """Stores the feed's position for the checkpoint of this step. Every process must call it."""
        # A checkpoint and a snapshot of one step have the same position: processes exchange it once.
        if self._feed is None or int(self.step) == step:
            return
        parts = len(self._feed.part.counts)
        if parts == 1 and not self._processes.is_chief:
            return  # all have the same position, and the chief writes
        state = self._feed.position(step)
        if state is None:
            return
        states = [state] if parts == 1 else self._processes.exchange_bytes(state)
        for number, process_state in enumerate(states):
            getattr(self, f"process_{number}").assign(process_state)
        self.pipeline.assign(self._feed.pipeline)
        self.step.assign(step)
        self.num_bytes = sum(map(len, states))

    def _saved_states(self, step: int) -> list[bytes]:
        """Returns all processes' states, if they are of this step and the feed's pipeline; else none."""
        if int(self.step) != step or self.pipeline.numpy().decode() != self._feed.pipeline:
            return []
        return [getattr(self, f"process_{number}").numpy() for number in range(len(self._feed.part.counts))]
