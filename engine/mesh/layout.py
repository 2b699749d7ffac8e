"""How replicas are laid out, data x model, and their collectives. Made on the host, used in replica code.

Replica r of a mesh D x M has the data coordinate r // M and the model coordinate r % M: the axis `model` is innermost,
so replicas that exchange activations are neighbours, on one host if they fit.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from ..internals.tensorflow import all_replicas_context, replica_id
from . import collectives

DATA, MODEL = "data", "model"
AXES = (DATA, MODEL)

_entered: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("mesh", default=None)


def current_mesh() -> Mesh:
    """Returns the mesh in whose scope variables are made; outside of one, a mesh along data only.

    Example:
      >>> current_mesh().model.size
      1
    """
    return _entered.get() or Mesh()


class Axis:
    """A group of replicas along one axis of the mesh, or all of them. This class: all replicas of the strategy."""

    def __init__(self, name: str):
        self.name = name

    @property
    def size(self) -> int:
        """The number of replicas in the group."""
        context = tf.distribute.get_replica_context()
        strategy = context.strategy if context else tf.distribute.get_strategy()
        return strategy.num_replicas_in_sync

    @property
    def rank(self) -> int | tf.Tensor:
        """This replica's number in the group: an int if it is known when the step is traced, else scalar int32."""
        return replica_id()

    def all_reduce(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the sum over the axis, the same bits on each of its replicas. Replica code."""
        if self.size == 1:
            return value
        with all_replicas_context() as replica:
            return collectives.all_reduce(replica, value)

    def all_gather(self, value: tf.Tensor) -> tf.Tensor:
        """Gathers the replicas' values, of one static shape, in their order: [size, ...]. Replica code."""
        if self.size == 1:
            return value[tf.newaxis]
        with all_replicas_context() as replica:
            return collectives.all_gather(replica, value)

    def all_to_all(self, value: tf.Tensor) -> tf.Tensor:
        """Sends value[i] of [size, ...] to replica i; returns the values sent to this one, in order. Replica code.

        Its gradient returns by the same way.
        """
        return self.all_gather(value)[:, self.rank]

    def concatenate(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Concatenates the replicas' tensors [n, ...], of any n on each, in their order. Replica code."""
        if self.size == 1:
            return list(values)
        with all_replicas_context() as replica:
            return replica.all_gather(list(values), axis=0)


class _One(Axis):
    """An axis of one replica: nothing is sent."""

    size = 1
    rank = 0


class Mesh:
    """The replicas of any strategy, along data only; `parts.sharding.mesh.ShardedMesh` lays them out as data x model.

    Attributes:
      data: the axis of replicas that have the same shard of the model and get different examples.
      model: the axis of replicas that have different shards of it and get the same examples.
      all_replicas: the axis of all replicas.
      is_sharded: whether the model is sharded.
      shard_optimizer: whether replicas that have the same values of a variable each keep the slots of one piece of it
        and update that piece: see `parts.sharding.shards`.
    """

    is_sharded = False
    shard_optimizer = False

    def __init__(self):
        self.data: Axis = Axis(DATA)
        self.model: Axis = _One(MODEL)
        self.all_replicas: Axis = Axis("all_replicas")

    @property
    def shape(self) -> dict[str, int]:
        """The axes' sizes, by name."""
        return {DATA: self.data.size, MODEL: self.model.size}

    def batch_shard(self, replica: int, replicas: int) -> tuple[int, int]:
        """Returns which shard of a batch a replica gets: (its number, how many there are)."""
        return replica, replicas

    def update_shard(self, variable: Any) -> Any:
        """Returns the piece of a variable that this replica updates (`parts.sharding.shards.UpdateShard`).

        None if it updates all of it.
        """
        return None

    def reduction(self, reduction: Any) -> Any:
        """Returns what sums gradients over this mesh, with the settings of a run's `engine.reduction.Reduction`."""
        return reduction

    def place(self) -> Any:
        """Returns where an optimizer updates (`engine.optimizers.base.Place`); None if each replica updates all."""
        return None

    def zero_except_first_model_rank(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the value on the first replica along `model`, else 0, so that sums count it once. Replica code."""
        return value

    def enter(self, value: tf.Tensor) -> tf.Tensor:
        """Passes a whole value to a computation sharded over `model`; sums its gradient over it. Replica code."""
        return value

    def leave(self, value: tf.Tensor) -> tf.Tensor:
        """Sums the replicas' terms over `model`; each term's gradient is the sum's. Replica code."""
        return value

    @contextlib.contextmanager
    def scope(self) -> Iterator[Mesh]:
        """Shards the layers made in this context over this mesh."""
        token = _entered.set(self)
        try:
            yield self
        finally:
            _entered.reset(token)


def local_replicas(distribution: tf.distribute.Strategy) -> range:
    """Returns the ids of the replicas in this process."""
    first = distribution.experimental_local_results(
        distribution.experimental_distribute_values_from_function(lambda context: context.replica_id_in_sync_group)
    )[0]
    return range(int(first), int(first) + len(distribution.extended.worker_devices))
