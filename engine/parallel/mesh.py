"""How replicas are laid out, data x model, and what they sum with whom. Made on the host, used in replica code.

Replica r of a mesh of D x M has the data coordinate r // M and the model coordinate r % M: the model's axis is the
innermost, so that replicas that exchange activations are neighbours, on one host where they fit.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
from collections.abc import Callable, Iterator

import tensorflow as tf

from crankshaft.engine.internals.tensorflow import Collectives, ordering_token
from crankshaft.engine.parallel import collectives

DATA, MODEL = "data", "model"
AXES = (DATA, MODEL)

_left_out: contextvars.ContextVar[bool] = contextvars.ContextVar("model_sums_left_out", default=False)
_entered: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("mesh", default=None)
# No two groups of a process may share a key, for its life; every process of a run counts alike. TensorFlow's own
# strategies count from 1 and, for each `MirroredStrategy`, from a multiple of 2^16 on.
_keys = itertools.count(1 << 30)


def current_mesh() -> Mesh:
    """Returns the mesh in whose scope variables are being made; outside of one a mesh of data alone. Host code."""
    return _entered.get() or Mesh()


class Axis:
    """Replicas that differ in one coordinate of the mesh alone, or all of them. Here: the whole strategy's replicas.

    Args:
      name: what messages call it.
    """

    def __init__(self, name: str):
        self.name = name

    @property
    def size(self) -> int:
        """How many replicas take part."""
        context = tf.distribute.get_replica_context()
        strategy = context.strategy if context else tf.distribute.get_strategy()
        return strategy.num_replicas_in_sync

    @property
    def rank(self) -> int | tf.Tensor:
        """This replica's number among them: an int where it is known when the step is traced, else scalar int32."""
        return _replica()

    def all_reduce(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the sum over the axis, the same bits on each of its replicas. Replica code."""
        return value if self.size == 1 else collectives.all_reduce(tf.distribute.get_replica_context(), value)

    def all_gather(self, value: tf.Tensor) -> tf.Tensor:
        """Returns each replica's value, of one static shape on all, in their order: [size, ...]. Replica code."""
        if self.size == 1:
            return value[tf.newaxis]
        return collectives.all_gather(tf.distribute.get_replica_context(), value)

    def reduce_scatter(self, value: tf.Tensor) -> tf.Tensor:
        """Returns this replica's piece of the sum: value [size * n, ...] gives [n, ...]. Replica code."""
        size = self.size
        if size == 1:
            return value
        return tf.split(self.all_reduce(value), size)[self.rank]

    def all_to_all(self, value: tf.Tensor) -> tf.Tensor:
        """Sends value[i] of [size, ...] to replica i; returns what this one was sent, in their order. Replica code."""
        return self.all_gather(value)[:, self.rank]


class _One(Axis):
    """An axis of one replica: nothing travels."""

    size = 1
    rank = 0


class _Group(Axis):
    """Some replicas of a strategy, by collectives of their own.

    Args:
      name: of the axis.
      size: of each group.
      rank_of: from a replica's id to its number within its group.
      collectives_of: by the id of each of this process's replicas, its group's.
      distribution: the strategy.
    """

    size = 1

    def __init__(
        self,
        name: str,
        size: int,
        rank_of: Callable[[int], int],
        collectives_of: dict[int, Collectives],
        distribution: tf.distribute.Strategy,
    ):
        super().__init__(name)
        self._distribution = distribution
        self.size = size
        self._rank_of = rank_of
        self._collectives_of = collectives_of

    @property
    def rank(self) -> int:
        return self._rank_of(_replica()) if self._in_replica() else 0

    def all_reduce(self, value):
        if self.size == 1 or not self._travels():  # Keras builds layers outside of replicas: of shapes alone
            return value
        if value.dtype in (tf.bfloat16, tf.float16):  # the kernels on CPUs add neither; rounded once, in the end
            return tf.cast(self._own().all_reduce(tf.cast(value, tf.float32)), value.dtype)
        return self._own().all_reduce(value)

    def all_gather(self, value):
        if not self._travels():
            return tf.repeat(value[tf.newaxis], self.size, axis=0)
        if self.size == 1:
            return value[tf.newaxis]
        gathered = self._own().all_gather(value[tf.newaxis])
        return tf.ensure_shape(gathered, [self.size, *value.shape])

    def reduce_scatter(self, value):
        if self.size == 1:
            return value
        # The kernels have no reduce-scatter: each sends every other its piece, and adds up what it is sent.
        pieces = tf.reshape(value, [self.size, value.shape[0] // self.size, *value.shape[1:]])
        return tf.reduce_sum(self.all_to_all(pieces), 0)

    def all_to_all(self, value):
        return value if self.size == 1 or not self._in_replica() else self._own().all_to_all(value)

    def _travels(self) -> bool:
        return self._in_replica() and not (self.name == MODEL and _left_out.get())

    def _in_replica(self) -> bool:
        """Returns whether a replica of the strategy computes; else a layer is asked for shapes alone.

        Raises:
          RuntimeError: values are computed outside of replicas, where there is but a part of the model.
        """
        context = tf.distribute.get_replica_context()
        if context is not None and context.strategy is self._distribution:
            return True
        if tf.executing_eagerly():
            raise RuntimeError(
                "a model that is cut over a mesh computes in its strategy's steps alone; make it on one device from a "
                "checkpoint to call it elsewhere"
            )
        return False

    def _own(self) -> Collectives:
        return self._collectives_of[_replica()]


class Mesh:
    """Replicas laid out as data x model. Without arguments: those of any strategy, along data alone.

    Args:
      distribution: the `tf.distribute.Strategy` whose replicas they are; mirrored, or of several workers.
      model: how many replicas hold one copy of the model together; the strategy's replicas divide by it.
      shard_optimizer: see below.

    Attributes:
      data: the axis of replicas that hold the same part of the model, and are given different examples.
      model: the axis of replicas that hold different parts of it, and are given the same examples.
      everyone: all replicas.
      shard_optimizer: whether replicas that hold the same values of a variable keep, each, the slots of a piece of it,
        and update that: see `engine.parallel.pieces`.
    """

    def __init__(
        self, distribution: tf.distribute.Strategy | None = None, model: int = 1, shard_optimizer: bool = False
    ):
        self.data: Axis = Axis(DATA)
        self.model: Axis = _One(MODEL)
        self.everyone: Axis = Axis("everyone")
        self._model_size = model
        self.shard_optimizer = shard_optimizer
        if distribution is None or (model == 1 and not shard_optimizer):
            return
        replicas = distribution.num_replicas_in_sync
        if replicas % model:
            raise ValueError(f"model={model} does not divide {replicas} replicas")
        devices = distribution.extended.worker_devices
        local = local_replicas(distribution)
        tokens = [ordering_token(device) for device in devices]

        def groups(size: int, number: int, group_of: Callable[[int], int]) -> dict[int, Collectives]:
            keys = [next(_keys) for _ in range(number)]
            own = zip(local, devices, tokens, strict=True)
            return {r: Collectives(keys[group_of(r)], size, device, token) for r, device, token in own}

        data = replicas // model
        axes = {
            DATA: (data, lambda r: r // model, groups(data, model, lambda r: r % model)),
            MODEL: (model, lambda r: r % model, groups(model, data, lambda r: r // model)),
            "everyone": (replicas, lambda r: r, groups(replicas, 1, lambda r: 0)),
        }
        self.data, self.model, self.everyone = (_Group(name, *axis, distribution) for name, axis in axes.items())

    @property
    def shape(self) -> dict[str, int]:
        """The axes' sizes, by name."""
        return {DATA: self.data.size, MODEL: self.model.size}

    @property
    def is_cut(self) -> bool:
        """Whether the model is cut at all."""
        return self._model_size > 1

    def coordinates(self, replica: int) -> dict[str, int]:
        """Returns a replica's place along each axis, by the axis's name."""
        return {DATA: replica // self._model_size, MODEL: replica % self._model_size}

    def part(self, replica: int, replicas: int) -> tuple[int, int]:
        """Returns (which, of how many) parts of a batch a replica is given, of `replicas` in all. Host code."""
        return replica // self._model_size, replicas // self._model_size

    def once(self, count: tf.Tensor) -> tf.Tensor:
        """Returns the count on one replica of each model axis and 0 on the others: sums have it once. Replica code."""
        return tf.zeros_like(count) if self.is_cut and self.model.rank else count

    @contextlib.contextmanager
    def scope(self) -> Iterator[Mesh]:
        """Has layers that are made within be cut over this mesh."""
        token = _entered.set(self)
        try:
            yield self
        finally:
            _entered.reset(token)

    @contextlib.contextmanager
    def without_model_sums(self) -> Iterator[None]:
        """Leaves sums over `model` out of what is traced within: wrong results, for timing what they cost."""
        token = _left_out.set(True)
        try:
            yield
        finally:
            _left_out.reset(token)

    # Megatron-LM's f and g (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, figure 3): what is whole on each
    # replica of the model's axis goes in between them cut, and comes out whole.

    def enter(self, value: tf.Tensor) -> tf.Tensor:
        """Hands a whole value to a computation that is cut over `model`, and sums its gradient there. Replica code."""
        if not self.is_cut:
            return value
        return tf.custom_gradient(lambda x: (tf.identity(x), self.model.all_reduce))(value)

    def leave(self, value: tf.Tensor) -> tf.Tensor:
        """Sums over `model` what each replica has a term of; the sum's gradient is each term's. Replica code."""
        if not self.is_cut:
            return value
        return tf.custom_gradient(lambda x: (self.model.all_reduce(x), tf.identity))(value)


def _replica() -> int | tf.Tensor:
    """Returns this replica's id in the whole strategy: an int where it is known as the step is traced; 0 outside."""
    context = tf.distribute.get_replica_context()
    if context is None:
        return 0
    known = tf.get_static_value(context.replica_id_in_sync_group)
    return context.replica_id_in_sync_group if known is None else int(known)


def local_replicas(distribution: tf.distribute.Strategy) -> range:
    """Returns the ids of the replicas in this process."""
    first = distribution.experimental_local_results(
        distribution.experimental_distribute_values_from_function(lambda context: context.replica_id_in_sync_group)
    )[0]
    return range(int(first), int(first) + len(distribution.extended.worker_devices))
