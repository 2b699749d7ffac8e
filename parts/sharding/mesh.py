"""Replicas laid out as data x model, with the groups' own collectives. Made on the host, used in replica code."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from ...engine.errors import UsageError
from ...engine.internals.tensorflow import Collectives, ordering_token, replica_id
from ...engine.mesh.layout import DATA, MODEL, Axis, Mesh, local_replicas
from ...engine.reduction import Reduction
from .in_shards import InShards
from .on_mesh import OnMesh
from .shards import UpdateShard, plan_update_shard

# Two groups of a process must never share a key, and all processes of a run must assign the same keys. TensorFlow's own
# strategies count from 1, and each `MirroredStrategy` from a multiple of 2^16.
_keys = itertools.count(1 << 30)


def lay_out(distribution: tf.distribute.Strategy, sizes: Mapping[str, int], shard_optimizer: bool) -> Mesh:
    """Lays out a strategy's replicas by the axes' sizes. Raises `UsageError` if these do not fit the replicas."""
    model = model_axis(sizes, distribution.num_replicas_in_sync)
    return ShardedMesh(distribution, model, shard_optimizer) if model > 1 or shard_optimizer else Mesh()


def model_axis(sizes: Mapping[str, int], replicas: int) -> int:
    """Returns the size of the axis `model` of a mesh. Raises `UsageError` if its sizes do not lay out the replicas."""
    model = sizes.get("model", 1)
    if sizes.get("data", replicas // model) * model != replicas:
        layout = ",".join(f"{axis}:{size}" for axis, size in sizes.items())
        fitting = [f"data:{replicas // m},model:{m}" for m in range(1, replicas + 1) if replicas % m == 0]
        raise UsageError(f"mesh={layout} does not lay out {replicas} replicas; use {' or '.join(fitting)}")
    return model


class ShardedMesh(Mesh):
    """Replicas laid out as data x model, which share models, or the work of an optimizer.

    Args:
      distribution: the `tf.distribute.Strategy` whose replicas they are; mirrored, or of several workers. None leaves
        the axes to the caller.
      model: number of replicas that share one copy of the model; divides the number of replicas.
      shard_optimizer: see `Mesh`.
    """

    def __init__(self, distribution: tf.distribute.Strategy | None, model: int, shard_optimizer: bool = False):
        super().__init__()
        self._model_size = model
        self.is_sharded, self.shard_optimizer = model > 1, shard_optimizer
        if distribution is None:
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

    def batch_shard(self, replica: int, replicas: int) -> tuple[int, int]:
        return replica // self._model_size, replicas // self._model_size

    def update_shard(self, variable: Any) -> UpdateShard | None:
        return plan_update_shard(variable, self)

    def reduction(self, reduction: Reduction) -> Reduction:
        # One that is not the plain one is of replicas that differ, which no mesh has, or of a mesh already.
        is_plain = type(reduction) is Reduction
        return OnMesh(reduction.reduce_dtype, reduction.bucket_bytes) if is_plain else reduction

    def place(self) -> InShards | None:
        return InShards(self) if self.shard_optimizer else None

    def zero_except_first_model_rank(self, value: tf.Tensor) -> tf.Tensor:
        return tf.zeros_like(value) if self.is_sharded and self.model.rank else value

    # Megatron-LM's f and g (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, figure 3): a whole value
    # enters a computation sharded over `model`, and its result leaves it whole.

    def enter(self, value: tf.Tensor) -> tf.Tensor:
        if not self.is_sharded:
            return value
        return tf.custom_gradient(lambda x: (tf.identity(x), self.model.all_reduce))(value)

    def leave(self, value: tf.Tensor) -> tf.Tensor:
        if not self.is_sharded:
            return value
        return tf.custom_gradient(lambda x: (self.model.all_reduce(x), tf.identity))(value)


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

    def all_reduce(self, value: tf.Tensor) -> tf.Tensor:
        if self.size == 1 or not self._in_replica():  # Keras builds layers outside of replicas for their shapes
            return value
        if value.dtype in (tf.bfloat16, tf.float16):  # CPU kernels can't add them; rounded once, at the end
            return tf.cast(self._own().all_reduce(tf.cast(value, tf.float32)), value.dtype)
        return self._own().all_reduce(value)

    def all_gather(self, value: tf.Tensor) -> tf.Tensor:
        if not self._in_replica():
            return tf.repeat(value[tf.newaxis], self.size, axis=0)
        if self.size == 1:
            return value[tf.newaxis]
        gathered = self._own().all_gather(value[tf.newaxis])
        return tf.ensure_shape(gathered, [self.size, *value.shape])

    def reduce_scatter(self, value: tf.Tensor) -> tf.Tensor:
        """Returns this replica's piece of the sum: [n, ...] of a value [size * n, ...]. Replica code."""
        if self.size == 1:
            return value
        # There is no reduce-scatter kernel: each replica sends every other its piece, and adds up those it receives.
        pieces = tf.reshape(value, [self.size, value.shape[0] // self.size, *value.shape[1:]])
        return tf.reduce_sum(self.all_to_all(pieces), 0)

    def all_to_all(self, value: tf.Tensor) -> tf.Tensor:
        if self.size == 1 or not self._in_replica():
            return value
        return tf.custom_gradient(lambda x: (self._own().all_to_all(x), self.all_to_all))(value)  # its own transpose

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
