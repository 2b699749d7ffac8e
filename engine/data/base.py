"""The contract of a feed: how a step's batch reaches each replica."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from .order import Order


class Run(NamedTuple):
    """The input of one call of the inner loop: steps `start` to `stop` of `operands`."""

    operands: Any
    start: int
    stop: int


class Feed(abc.ABC):
    """One split of the data, on its way to the replicas.

    It has a host side (`reach`: how far the next call of the inner loop can go, `take`: what the call gets), a side in
    the compiled loop (`most_steps`: how many steps there can be, `next_operands`: what a step gets) and a replica side
    (`batch`: one step's batch).

    Attributes:
      order: which examples make which step: sizes, seed, shuffle.
      compilable: whether XLA can compile `next_operands` and `batch`.
      random_access: whether any step's batch can be computed without those before it.
      reads_in_loop: whether it is `next_operands` that may have to wait for input, rather than `take`.
    """

    order: Order
    compilable: bool = False
    random_access: bool = False
    reads_in_loop: bool = False

    @property
    def bytes_read(self) -> int | None:
        """Bytes that this process has read for the split so far; None where it reads none as steps go."""
        return None

    @property
    def steps_ahead(self) -> float | None:
        """Steps whose examples are read and not taken yet; None if unknown."""
        return None

    @abc.abstractmethod
    def reach(self, step: int, limit: int) -> int:
        """Returns how many of `limit` steps from `step` on one call can take; at least 1. Host code."""

    @abc.abstractmethod
    def take(self, step: int, limit: int) -> Run:
        """Returns the operands for at most `limit` steps from `step` on. Host code."""

    def awaited(self, call: Callable[[], Any], moved: Callable[[], Any]) -> Any:
        """Returns what a call returns that may wait for input in the loop (`reads_in_loop`). Host code.

        Args:
          call: runs the loop.
          moved: returns another value when input has come meanwhile.
        """
        return call()

    def look(self, step: int) -> Run:
        """Returns the operands of one step, and leaves training where it stands in the data. Host code."""
        return self.take(step, 1)

    def close(self) -> None:
        """Frees what reads ahead; a later `take` opens it again. Host code.

        Needed before the interpreter ends: a pipeline that calls Python would then wait for the interpreter for ever,
        and whoever frees the pipeline would wait for it.
        """
        return

    def about(self) -> dict[str, Any]:
        """Returns what a run's checkpoints keep of what was found out about the data, plain JSON; {}: nothing."""
        return {}

    def traced(self, operands) -> Any:
        """Returns what a loop is compiled for where it is given these operands: themselves, or specs of more."""
        return operands

    @abc.abstractmethod
    def most_steps(self, operands) -> float:
        """Returns the largest number of steps of a call with operands of this shape."""

    @abc.abstractmethod
    def next_operands(self, operands, offset: tf.Tensor) -> tuple:
        """Returns the arguments of one step's `strategy.run`. In the compiled loop, outside of replicas.

        Args:
          operands: of the call, as `take` returned them.
          offset: scalar int64 or int32, the step's number within them, from the run's `start` on.
        """

    @abc.abstractmethod
    def batch(self, *operands) -> Any:
        """Returns this replica's part of the step's batch, of what `next_operands` has returned. Replica code."""
