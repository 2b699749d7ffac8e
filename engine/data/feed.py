"""The contract of a feed: how a step's batch reaches each replica."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from .order import Order


class CallInput(NamedTuple):
    """The input of one call of the inner loop: steps `start` to `stop` of `operands`."""

    operands: Any
    start: int
    stop: int


class Feed(abc.ABC):
    """One split of the data, on its way to the replicas.

    It has a host side (`reach`: how far the next call of the inner loop can go; `take`: the call's input), a side in
    the compiled loop (`most_steps`: a call's largest number of steps; `next_operands`: a step's input) and a replica
    side (`batch`: one step's batch).

    Attributes:
      order: assigns examples to steps: sizes, seed, shuffle.
      compilable: whether XLA can compile `next_operands` and `batch`.
      random_access: whether any step's batch can be computed without those before it.
      reads_in_loop: whether `next_operands` may wait for input, rather than `take`.
      num_positions: how many positions in the data a checkpoint keeps, one per process that has its own, see
        `position`; 0 if the step determines it.
      is_endless: whether the data has no known epochs, and `order`'s are nominal.
      pipeline: identifies the pipeline that kept positions fit.
      kept: returns the positions kept at a step, of all processes, or none; set from outside.
    """

    order: Order
    compilable: bool = False
    random_access: bool = False
    reads_in_loop: bool = False
    num_positions: int = 0
    is_endless: bool = False
    pipeline: str = ""
    kept: Callable[[int], Sequence[bytes]] = staticmethod(lambda step: ())  # type: ignore[assignment]

    @property
    def bytes_read(self) -> int | None:
        """Bytes that this process has read for the split so far; None if steps read none."""
        return None

    @property
    def steps_ahead(self) -> float | None:
        """Steps whose examples are read ahead; None if unknown."""
        return None

    def reach(self, step: int, limit: int) -> int:
        """Returns how many of `limit` steps from `step` on one call can take; at least 1. Host code."""
        return limit

    @abc.abstractmethod
    def take(self, step: int, limit: int) -> CallInput:
        """Returns the operands for at most `limit` steps from `step` on. Host code."""

    def awaited(self, call: Callable[[], Any], moved: Callable[[], Any]) -> Any:
        """Runs a call that may wait for input in the loop (`reads_in_loop`), and returns its result. Host code.

        Args:
          call: runs the loop.
          moved: returns another value when input has arrived.
        """
        return call()

    def is_shared(self, step: int, shares: int) -> bool:
        """Returns whether each replica computes all of a step's batch, which has fewer examples than shares.

        The same for all steps of a call. Host code.
        """
        return self.order.size_of(step) < shares

    @property
    def no_exchange_reason(self) -> str:
        """Why no step may use collectives of its own across replicas; "" if each may."""
        return ""

    def keep_batches(self) -> None:
        """Makes each step keep its batch for `kept_batch`, if steps can't be read again. Host code, at the start."""
        return

    @property
    def kept_batch(self) -> Any:
        """This process's share of the batch that a step took last; None before, or if none is kept. Host code."""
        return None

    def look(self, step: int) -> CallInput:
        """Returns the operands of one step for this process without advancing training. Host code."""
        return self.take(step, 1)

    def position(self, step: int) -> bytes | None:
        """Returns this process's position in the data at a step; None if it is at another step. Host code."""
        return None

    def close(self) -> None:
        """Stops reading ahead; a later `take` starts it again. Host code.

        Required before the interpreter ends: a pipeline that calls Python would then wait for the interpreter for ever,
        and freeing it would wait, too.
        """
        return

    def files(self) -> Sequence[str]:
        """Returns the paths of the files that steps read, if the source names them."""
        return ()

    def metadata(self) -> dict[str, Any]:
        """Returns the data's metadata for checkpoints, plain JSON."""
        return {}

    def traced(self, operands) -> Any:
        """Returns what a loop is compiled for with these operands: themselves, or more general specs."""
        return operands

    def most_steps(self, operands) -> float:
        """Returns the largest number of steps of a call with operands of this shape."""
        return math.inf

    def batch_number(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the number of a step's batch in its epoch, scalar int64. In the compiled loop."""
        return step % self.order.steps_per_epoch

    def next_operands(self, operands, offset: tf.Tensor) -> tuple:
        """Returns the arguments of one step's `strategy.run`. In the compiled loop, outside of replicas.

        Args:
          operands: of the call, from `take`.
          offset: scalar int64 or int32, the step's index in them, from the input's `start` on.
        """
        return (*operands, offset)

    @abc.abstractmethod
    def batch(self, *operands) -> Any:
        """Returns this replica's share of the step's batch, of what `next_operands` has returned. Replica code."""
