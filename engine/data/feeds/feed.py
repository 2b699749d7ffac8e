"""The contract of a feed: how a step's batch reaches each replica. Also a feed without values, to trace a step.

The feeds are not one class, since they differ in who reads: the device, a host's threads, or one iterator per process.
One class would ask in each method which of them it is, and no line would serve all.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ..order import Order
from ..streamed import StreamPart


class CallInput(NamedTuple):
    """The input of one call of the inner loop: steps `start` to `stop` of `operands`."""

    operands: Any
    start: int
    stop: int


class FeedStats(NamedTuple):
    """Amounts that a feed has read.

    Attributes:
      bytes_read: bytes that this process has read for the split so far; None if steps read none, or if it is unknown.
      steps_ahead: steps whose examples are read ahead; None if unknown.
    """

    bytes_read: int | None = None
    steps_ahead: float | None = None


class Feed(abc.ABC):
    """One split of the data, on its way to the replicas.

    It has a host side of six methods (`max_steps_per_call`: how far the next call of the inner loop can go;
    `call_input`: the call's input), a side in the compiled loop (`most_steps`: a call's largest number of steps;
    `next_operands`: a step's input) and a replica side (`batch`: one step's batch). Facts of the data are its `order`'s
    and its `part`'s.

    Attributes:
      part: this process's part of a stream, whose positions checkpoints keep, one for each of its counts (see
        `position`); None if the step determines the position.
      compilable: whether XLA can compile `next_operands` and `batch`. An epoch's smaller last batch then has a program
        of its own.
      reads_in_loop: whether `next_operands` may wait for input, rather than `call_input`.
      pipeline: identifies the pipeline that saved positions fit.
      any_size: whether programs are traced for batches of any size, if the feed has smaller ones. Set from outside.
      last_step: the step at which the run ends, if known: a feed that reads ahead reads no batch from there on, unless
        it is asked for it. Set from outside.
      saved_states: returns the positions saved at a step, of all processes; None unless training's. Set from outside.
      processes: the training processes, `engine.strategies.base.Processes`; None unless training's. Set from outside.
    """

    order: Order
    part: StreamPart | None = None
    compilable: bool = False
    reads_in_loop: bool = False
    pipeline: str = ""
    any_size: bool = False
    last_step: int | None = None
    saved_states: Callable[[int], Sequence[bytes] | None] = staticmethod(lambda step: None)  # type: ignore[assignment]

    processes: Any = None

    def max_steps_per_call(self, step: int, limit: int) -> int:
        """Returns how many of `limit` steps from `step` on one call can take; at least 1."""
        return limit

    @abc.abstractmethod
    def call_input(self, step: int, limit: int) -> CallInput:
        """Returns the operands for at most `limit` steps from `step` on."""

    def run_with_timeout(self, call: Callable[[], Any], progress: Callable[[], Any]) -> Any:
        """Runs a call that may wait for input in the loop (`reads_in_loop`), and returns its result.

        Args:
          progress: returns another value when input has arrived.
        """
        return call()

    @property
    def batch_size(self) -> int | None:
        """The number of examples of every global batch; None if they differ, or only reading shows it."""
        step = self.order.origin.step
        return self.order.batch_size_at(step) if math.isinf(self.order.steps_of_equal_size(step)) else None

    def position(self, step: int) -> bytes | None:
        """Returns this process's position in the data at a step; None if it is at another step."""
        return None

    def close(self) -> None:
        """Stops reading ahead; a later `call_input` starts it again.

        Required before the interpreter ends: a pipeline that calls Python would then wait for the interpreter for ever,
        and freeing it would wait, too.
        """
        return

    def stats(self) -> FeedStats:
        """Returns the amounts read so far, for reports."""
        return FeedStats()

    def traced(self, operands) -> Any:
        """Returns the arguments by which a loop is compiled: these operands, or more general specs."""
        return operands

    @property
    def form(self) -> Any:
        """All that a program compiled for this feed depends on, besides its operands; None if unknown."""
        return None

    @property
    def _unseeded_order(self) -> Order:
        return dataclasses.replace(self.order, seed=None)  # the seed reaches no program

    def most_steps(self, operands) -> float:
        """Returns the largest number of steps of a call with operands of this shape."""
        return math.inf

    def batch_number(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the number of a step's batch in its epoch, scalar int64. In the compiled loop."""
        return step % self.order.steps_per_epoch

    def next_operands(self, operands, offset: tf.Tensor) -> tuple:
        """Returns the arguments of one step's `strategy.run`. In the compiled loop, outside of replicas.

        Args:
          operands: operands of the call, which `call_input` returned.
          offset: scalar int64 or int32, the step's index in them, from the input's `start` on.
        """
        return (*operands, offset)

    @abc.abstractmethod
    def batch(self, *operands) -> Any:
        """Returns this replica's shard of the step's batch, from the results of `next_operands`. Replica code."""


class UntakenFeed(Feed):
    """Batches without values, for a program of which a step is traced, and none is run.

    Args:
      specs: nest of the specs of a replica's shard of a batch.
      batch_size: number of examples in a batch, across replicas.
    """

    compilable = True

    def __init__(self, specs, batch_size: int):
        self.order = Order(batch_size, batch_size, block_steps=1)
        self.operand_specs = (specs,)

    def call_input(self, step: int, limit: int) -> CallInput:
        return CallInput(self.operand_specs, step, step + limit)

    def next_operands(self, operands, offset: tf.Tensor):
        return operands

    def batch(self, values):
        return values
