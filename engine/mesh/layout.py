"""How replicas are laid out, data x model, and their collectives. Made on the host, used in replica code.

Replica r of a mesh D x M has the data coordinate r // M and the model coordinate r % M: the axis `model` is innermost,
so replicas that exchange activations are neighbours, on one host if they fit.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import tensorflow as tf

from ..errors import UsageError
from ..internals.tensorflow import Collectives, all_replicas_context, ordering_token, replica_id
from . import collectives

DATA, MODEL = "data", "model"
AXES = (DATA, MODEL)

_entered: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("mesh", default=None)
# Two groups of a process must never share a key, and all processes of a run must assign the same keys. TensorFlow's own
# strategies count from 1, and each `MirroredStrategy` from a multiple of 2^16.
_keys = itertools.count(1 << 30)


def current_mesh() -> Mesh:
    """Returns the mesh in whose scope variables are made; outside of one, a mesh along data only."""
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

    def concatenate(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Concatenates the replicas' tensors [n, ...], of any n on each, in their order. Replica code."""
        if self.size == 1:
            return list(values)
        with all_replicas_context() as replica:
            return replica.all_gather(list(values), axis=0)

    def reduce_scatter(self, value: tf.Tensor) -> tf.Tensor:
        """Returns this replica's piece of the sum: [n, ...] of a value [size * n, ...]. Replica code."""
        size = self.size
        if size == 1:
            return value
        return tf.split(self.all_reduce(value), size)[self.rank]

    def all_to_all(self, value: tf.Tensor) -> tf.Tensor:
        """Sends value[i] of [size, ...] to replica i; returns the values sent to this one, in order. Replica code."""
        return self.all_gather(value)[:, self.rank]


class _One(Axis):
    """An axis of one replica: nothing is sent."""

    size = 1
    rank = 0


class _Group(Axis):
    """Some replicas of a strategy, with collectives of their own.

    Args:
      to_rank: maps a replica's id to its number within its group.
      group_collectives: the collectives of a replica's group, by the replica's id, for each replica in this process.
    """

    size = 1  # an attribute that each group sets; `Axis` computes its own

    def __init__(
        self,
        name: str,
        size: int,
        to_rank: Callable[[int], int],
        group_collectives: dict[int, Collectives],
        distribution: tf.distribute.Strategy,
    ):
        super().__init__(name)
        self._distribution = distribution
        self.size = size
        self._to_rank = to_rank
        self._group_collectives = group_collectives

    @property
    def rank(self) -> int:
        return self._to_rank(replica_id()) if self._in_replica() else 0

    def all_reduce(self, value):
        if self.size == 1 or not self._in_replica():  # Keras builds layers outside of replicas for their shapes
            return value
        if value.dtype in (tf.bfloat16, tf.float16):  # CPU kernels can't add them; rounded once, at the end
            return tf.cast(self._own().all_reduce(tf.cast(value, tf.float32)), value.dtype)
        return self._own().all_reduce(value)

    def all_gather(self, value):
        if not self._in_replica():
            return tf.repeat(value[tf.newaxis], self.size, axis=0)
        if self.size == 1:
            return value[tf.newaxis]
        gathered = self._own().all_gather(value[tf.newaxis])
        return tf.ensure_shape(gathered, [self.size, *value.shape])

    def reduce_scatter(self, value):
        if self.size == 1:
            return value
        # There is no reduce-scatter kernel: each replica sends every other its piece, and adds up those it receives.
        pieces = tf.reshape(value, [self.size, value.shape[0] // self.size, *value.shape[1:]])
        return tf.reduce_sum(self.all_to_all(pieces), 0)

    def all_to_all(self, value):
        return value if self.size == 1 or not self._in_replica() else self._own().all_to_all(value)

    def _in_replica(self) -> bool:
        """Returns whether a replica of the strategy is being traced; if not, Keras only computes a layer's shapes.

        Raises:
          RuntimeError: values are computed outside of replicas, where only a shard of the model exists.
        """
        context = tf.distribute.get_replica_context()
        if context is not None and context.strategy is self._distribution:
            return True
        if tf.executing_eagerly():
            raise RuntimeError(
                "a model sharded over a mesh computes only in its strategy's steps; load it on one device from a "
                "checkpoint to call it elsewhere"
            )
        return False

    def _own(self) -> Collectives:
        return self._group_collectives[replica_id()]


class Mesh:
    """Replicas laid out as data x model. Without arguments: the replicas of any strategy, along data only.

    Args:
      distribution: the `tf.distribute.Strategy` whose replicas they are; mirrored, or of several workers.
      model: number of replicas that share one copy of the model; divides the number of replicas.

    Attributes:
      data: the axis of replicas that have the same shard of the model and get different examples.
      model: the axis of replicas that have different shards of it and get the same examples.
      all_replicas: the axis of all replicas.
      shard_optimizer: whether replicas that have the same values of a variable each keep the slots of one piece of it
        and update that piece: see `engine.sharding.shards`.
    """

    def __init__(
        self, distribution: tf.distribute.Strategy | None = None, model: int = 1, shard_optimizer: bool = False
    ):
        self.data: Axis = Axis(DATA)
        self.model: Axis = _One(MODEL)
        self.all_replicas: Axis = Axis("all_replicas")
        self._model_size = model
        self.shard_optimizer = shard_optimizer
        if distribution is None or (model == 1 and not shard_optimizer):
            return
        replicas = distribution.num_replicas_in_sync
        if replicas % model:
            raise UsageError(f"model={model} does not divide {replicas} replicas")
        devices = distribution.extended.worker_devices
        local = local_replicas(distribution)
        # One for all groups of a replica: collectives within a process hang if nothing orders those of its groups.
        tokens = [ordering_token(device) for device in devices]

        def groups(size: int, number: int, to_group: Callable[[int], int]) -> dict[int, Collectives]:
            keys = [next(_keys) for _ in range(number)]
            local_devices = zip(local, devices, tokens, strict=True)
            return {r: Collectives(keys[to_group(r)], size, device, token) for r, device, token in local_devices}

        data = replicas // model
        axes = {
            DATA: (data, lambda r: r // model, groups(data, model, lambda r: r % model)),
            MODEL: (model, lambda r: r % model, groups(model, data, lambda r: r // model)),
            "all_replicas": (replicas, lambda r: r, groups(replicas, 1, lambda r: 0)),
        }
        self.data, self.model, self.all_replicas = (_Group(name, *axis, distribution) for name, axis in axes.items())

    @property
    def shape(self) -> dict[str, int]:
        """The axes' sizes, by name."""
        return {DATA: self.data.size, MODEL: self.model.size}

    @property
    def is_sharded(self) -> bool:
        """Whether the model is sharded."""
        return self._model_size > 1

    def batch_shard(self, replica: int, replicas: int) -> tuple[int, int]:
        """Returns which shard of a batch a replica gets: (its number, how many there are)."""
        return replica // self._model_size, replicas // self._model_size

    def zero_except_first_model_rank(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the value on the first replica along `model`, else 0, so that sums count it once. Replica code."""
        return tf.zeros_like(value) if self.is_sharded and self.model.rank else value

    @contextlib.contextmanager
    def scope(self) -> Iterator[Mesh]:
        """Shards the layers made in this context over this mesh."""
        token = _entered.set(self)
        try:
            yield self
        finally:
            _entered.reset(token)

    # Megatron-LM's f and g (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, figure 3): a whole value
    # enters a computation sharded over `model`, and its result leaves it whole.

    def enter(self, value: tf.Tensor) -> tf.Tensor:
        """Passes a whole value to a computation sharded over `model`; sums its gradient over it. Replica code."""
        if not self.is_sharded:
            return value
        return tf.custom_gradient(lambda x: (tf.identity(x), self.model.all_reduce))(value)

    def leave(self, value: tf.Tensor) -> tf.Tensor:
        """Sums the replicas' terms over `model`; each term's gradient is the sum's. Replica code."""
        if not self.is_sharded:
            return value
        return tf.custom_gradient(lambda x: (self.model.all_reduce(x), tf.identity))(value)


def local_replicas(distribution: tf.distribute.Strategy) -> range:
    """Returns the ids of the replicas in this process."""
    first = distribution.experimental_local_results(
        distribution.experimental_distribute_values_from_function(lambda context: context.replica_id_in_sync_group)
    )[0]
    return range(int(first), int(first) + len(distribution.extended.worker_devices))


def model_axis(sizes: Mapping[str, int], replicas: int) -> int:
    """Returns the size of the axis `model` of a mesh. Raises `UsageError` if its sizes do not lay out the replicas."""
    model = sizes.get("model", 1)
    if sizes.get("data", replicas // model) * model != replicas:
        layout = ",".join(f"{axis}:{size}" for axis, size in sizes.items())
        fitting = [f"data:{replicas // m},model:{m}" for m in range(1, replicas + 1) if replicas % m == 0]
        raise UsageError(f"mesh={layout} does not lay out {replicas} replicas; use {' or '.join(fitting)}")
    return model
