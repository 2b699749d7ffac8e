"""Keras layers sharded over a mesh's axis `model`, their weights, and a loss of sharded outputs. Replica code.

On a mesh of one they are ordinary layers.

They take the mesh in whose scope they are made (`current_mesh`), as layers in `Trainer.build_model` are. Each layer's
docstring lists what is sharded and what is sent. Shoeybi et al. 2019, Megatron-LM, https://arxiv.org/abs/1909.08053.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ...engine import hashing
from ...engine.errors import UsageError
from ...engine.internals import keras_scopes
from ...engine.mesh import sharded
from ...engine.mesh.layout import MODEL, Mesh, current_mesh
from ...engine.mesh.sharded import Box, Sharding
from ...engine.step.diagnosis import note_ids, note_labels

_SPLITS = (None, "columns", "rows")


@tf.keras.utils.register_keras_serializable("crankshaft.parallel")
class Dense(tf.keras.layers.Layer):
    """Computes activation(x W + b) for x [..., inputs]; W is [inputs, units].

    | split | x | W, b | result | forward sends | backward sends |
    |---|---|---|---|---|---|
    | `None` | whole | copies | whole | | |
    | `"columns"` | whole | W by columns, b sharded | sharded: [..., units / model] | | inputs values per example |
    | `"rows"` | sharded, as `"columns"` gives it | W by rows, b a copy | whole | units values per example | |

    A value has the bytes of the layer's compute dtype, 4 or 2 (4 on a CPU, whose collectives can't add 16-bit values);
    a ring moves 2 (model - 1) / model times as many. W is float32, sampled by position, the same on any mesh.

    Args:
      units: the number of units of the whole layer; a multiple of the mesh's `model` with `"columns"`.
      split: how the weights are sharded; `"columns"` followed by `"rows"` makes a block that sends once each way.
      activation: an activation as in Keras; with `"rows"` it is applied to the sum.
      use_bias: whether to add b, initially zeros.
      stddev: the standard deviation of W's normal distribution; None is Glorot's, sqrt(2 / (inputs + units)).
      **arguments: as Keras's `Layer`.
    """

    def __init__(
        self,
        units: int,
        split: str | None = None,
        activation: str | Callable | None = None,
        use_bias: bool = True,
        stddev: float | None = None,
        **arguments: Any,
    ):
        super().__init__(**arguments)
        if split not in _SPLITS:
            raise UsageError(f'split={split!r} is unknown; use "columns", "rows" or None')
        self.mesh = current_mesh()
        self.units, self.split, self.use_bias, self.stddev = units, split, use_bias, stddev
        self.activation = tf.keras.activations.get(activation)
        self.own_units = shard_size(units, self.mesh, "units") if split == "columns" else units
        # Now, though the deviation is known only in `build`: seeds are sampled in the order in which layers are made.
        self._initial = Normal(stddev or 0.0)

    def build(self, input_shape: tuple) -> None:
        inputs = input_shape[-1] * (self.mesh.model.size if self.split == "rows" else 1)
        self._initial.stddev = self.stddev or (2 / (inputs + self.units)) ** 0.5
        axis = {"columns": 1, "rows": 0}.get(self.split or "")
        self.kernel = add_weight(self, "kernel", (inputs, self.units), self._initial, axis)
        self.bias = None
        if self.use_bias:
            self.bias = add_weight(self, "bias", (self.units,), "zeros", 0 if self.split == "columns" else None)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        if self.split == "columns":
            x = self.mesh.enter(x)
        y = product(x, tf.convert_to_tensor(self.kernel))
        if self.split == "rows":
            y = self.mesh.leave(y)
        if self.bias is not None:
            y = tf.nn.bias_add(y, tf.convert_to_tensor(self.bias))
        return self.activation(y)

    def compute_output_shape(self, input_shape: tuple) -> tuple:
        return (*input_shape[:-1], self.own_units)

    def get_build_config(self) -> dict[str, Any] | None:
        # Rows take a shard of the inputs, whose shape depends on this mesh: elsewhere the model's call gives it.
        return None if self.split == "rows" else super().get_build_config()

    def get_config(self) -> dict[str, Any]:
        mine = {name: getattr(self, name) for name in ("units", "split", "use_bias", "stddev")}
        return {**super().get_config(), **mine, "activation": tf.keras.activations.serialize(self.activation)}


@tf.keras.utils.register_keras_serializable("crankshaft.parallel")
class Embedding(tf.keras.layers.Layer):
    """Looks up rows of a table [vocabulary, size] by ids, int [...]; `logits` uses the same table.

    With `split="vocabulary"` each replica has vocabulary / model rows, rounded up; the last are padded with zeros. A
    lookup sums `size` values per id over `model` in the forward pass, and sends nothing in the backward pass. Logits
    are sharded by vocabulary, [..., rows of a replica], as `cross_entropy` takes them; they send nothing in the
    forward pass, and sum `size` values per example in the backward pass.

    The table's gradient is dense, like the logits' contribution to it.

    Args:
      vocabulary: number of ids, from 0. Other ids end the run with an error (`engine.step.diagnosis`).
      size: the number of values in a row.
      split: `"vocabulary"`, or None for copies.
      stddev: the standard deviation of the normal distribution that the table is sampled from.
      **arguments: as Keras's `Layer`.
    """

    def __init__(self, vocabulary: int, size: int, split: str | None = None, stddev: float = 0.02, **arguments: Any):
        super().__init__(**arguments)
        if split not in (None, "vocabulary"):
            raise UsageError(f'split={split!r} is unknown; use "vocabulary" or None')
        self.mesh = current_mesh()
        self.vocabulary, self.size, self.split, self.stddev = vocabulary, size, split, stddev
        self._initial = Normal(stddev)

    def build(self, input_shape: tuple) -> None:
        axis = 0 if self.split else None
        self.embeddings = add_weight(self, "embeddings", (self.vocabulary, self.size), self._initial, axis)

    @property
    def is_sharded(self) -> bool:
        return bool(self.split) and self.mesh.is_sharded

    def call(self, inputs: tf.Tensor, transposed: bool = False) -> tf.Tensor:
        table = tf.convert_to_tensor(self.embeddings)
        if transposed:
            return product(self.mesh.enter(inputs) if self.is_sharded else inputs, table, transpose_b=True)
        inputs = tf.cast(inputs, tf.int32)
        if not self.is_sharded:
            return _rows(table, inputs)
        note_ids(inputs, self.vocabulary)
        own = table.shape[0]
        rows = inputs - self.mesh.model.rank * own
        mine = tf.logical_and(rows >= 0, rows < own)
        looked_up = _rows(table, tf.where(mine, rows, 0))
        return self.mesh.leave(tf.where(mine[..., tf.newaxis], looked_up, tf.zeros([], looked_up.dtype)))

    def logits(self, hidden: tf.Tensor) -> tf.Tensor:
        """Computes hidden [..., size] times the transposed table: [..., vocabulary], sharded if the table is."""
        return self(hidden, transposed=True)

    def compute_output_shape(self, input_shape: tuple, transposed: bool = False) -> tuple:
        return (*input_shape[:-1], self.embeddings.shape[0]) if transposed else (*input_shape, self.size)

    def compute_output_spec(self, inputs: tf.Tensor, transposed: bool = False) -> tf.KerasTensor:
        return tf.keras.KerasTensor(self.compute_output_shape(inputs.shape, transposed), dtype=self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        mine = {name: getattr(self, name) for name in ("vocabulary", "size", "split", "stddev")}
        return {**super().get_config(), **mine}


@tf.keras.utils.register_keras_serializable("crankshaft.parallel")
class Dropout(tf.keras.layers.Dropout):
    """Keras's Dropout for tensors sharded over `model`: each replica samples its own mask, for its own shard.

    For whole tensors use Keras's, which samples the same mask on replicas with the same examples.
    """

    def __init__(self, rate: float, **arguments: Any):
        super().__init__(rate, **arguments)
        if rate > 0 and current_mesh().is_sharded:
            self.seed_generator.within_shard = True  # see `engine.step.context.StepContext.seed_layers`


@tf.keras.utils.register_keras_serializable("crankshaft.parallel")
class RMSNorm(tf.keras.layers.Layer):
    """Computes gain x / sqrt(mean(x^2) + epsilon) over the last axis, in float32 (Zhang & Sennrich 2019).

    https://arxiv.org/abs/1910.07467. Each replica has a copy of the gain, initially ones; nothing is sent.
    """

    def __init__(self, epsilon: float = 1e-5, **arguments: Any):
        super().__init__(**arguments)
        self.epsilon = epsilon

    def build(self, input_shape: tuple) -> None:
        self.gain = self.add_weight(name="gain", shape=(input_shape[-1],), initializer="ones", autocast=False)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        wide = tf.cast(x, tf.float32)
        scale = tf.math.rsqrt(tf.reduce_mean(tf.square(wide), -1, keepdims=True) + self.epsilon)
        return tf.cast(wide * scale * tf.convert_to_tensor(self.gain), x.dtype)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "epsilon": self.epsilon}


def product(x: tf.Tensor, w: tf.Tensor, transpose_b: bool = False) -> tf.Tensor:
    """Multiplies x [..., a] by a matrix w [a, b], or [b, a] with `transpose_b`: [..., b]."""
    flat = tf.matmul(tf.reshape(x, [-1, x.shape[-1]]), w, transpose_b=transpose_b)
    sizes = [static or size for static, size in zip(x.shape[:-1], tf.unstack(tf.shape(x)[:-1]), strict=True)]
    return tf.reshape(flat, [*sizes, flat.shape[-1]])


@tf.custom_gradient
def _rows(table: tf.Tensor, ids: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    def gradient(dy: tf.Tensor) -> Any:
        # In float32: the kernel would add 16-bit values in 16 bits, too few for a frequent id's sum.
        by_id = tf.cast(tf.reshape(dy, [-1, dy.shape[-1]]), tf.float32)
        return tf.cast(tf.math.unsorted_segment_sum(by_id, tf.reshape(ids, [-1]), table.shape[0]), dy.dtype), None

    return tf.gather(table, ids), gradient


def cross_entropy(logits: tf.Tensor, labels: tf.Tensor, vocabulary: int, mesh: Mesh | None = None) -> tf.Tensor:
    """Computes -log softmax(logits)[label] of each example, from logits sharded by vocabulary.

    Each replica computes three numbers: its largest logit m, the sum of exp(logit - m), and the label's logit if it is
    its own. They are gathered over `model`, 12 bytes per example and replica, in one message. All replicas compute the
    same bits from them. The backward pass sends nothing.

    Args:
      logits: [..., rows of a replica], as `Embedding.logits` returns them; converted to float32. Columns of padding,
        beyond the vocabulary, don't count, and have gradients of 0.
      labels: int [...]; one below 0 (`input.text` uses -1 for padding) gives some finite loss, to be left out of a
        mean by its weights: `mean(losses, weights=labels >= 0)`; one beyond the vocabulary ends the run.
      vocabulary: number of ids.
      mesh: the logits are sharded over its axis `model`; None is a mesh of one.

    Returns:
      float32 [...], in nats, the same on all replicas with the same examples.
    """
    logits = tf.cast(logits, tf.float32)
    labels = tf.cast(labels, tf.int32)
    if mesh is None or not mesh.is_sharded:
        return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(labels, 0), logits)
    note_labels(labels, vocabulary)
    columns = logits.shape[-1]
    first = mesh.model.rank * columns
    if columns * mesh.model.size > vocabulary:
        logits = tf.where(first + tf.range(columns) < vocabulary, logits, logits.dtype.min)
    return _cross_entropy(logits, tf.maximum(labels, 0) - first, mesh)


def _cross_entropy(logits: tf.Tensor, labels: tf.Tensor, mesh: Mesh) -> tf.Tensor:
    """Computes the losses for labels that count from this replica's first column."""

    @tf.custom_gradient
    def losses(logits: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        largest = tf.reduce_max(logits, -1, keepdims=True)
        exponentials = tf.exp(logits - largest)
        chosen = tf.one_hot(labels, logits.shape[-1])  # all 0 if another replica has the label
        mine = [largest[..., 0], tf.reduce_sum(exponentials, -1), tf.reduce_sum(chosen * logits, -1)]
        maxima, sums, label_logits = tf.unstack(mesh.model.all_gather(tf.stack(mine)), axis=1)
        maximum = tf.reduce_max(maxima, 0)
        total = tf.reduce_sum(sums * tf.exp(maxima - maximum), 0)

        def gradient(dy: tf.Tensor) -> Any:
            to_softmax = tf.exp(largest[..., 0] - maximum) / total  # of all replicas' columns
            return dy[..., tf.newaxis] * (exponentials * to_softmax[..., tf.newaxis] - chosen)

        # In this order: the difference of two large logits is exact; with a logarithm in between it is not.
        return tf.math.log(total) + (maximum - tf.reduce_sum(label_logits, 0)), gradient

    return losses(logits)


@tf.keras.utils.register_keras_serializable("crankshaft.parallel")
class Normal(tf.keras.initializers.Initializer):
    """Samples each value of a weight by its position, so that a shard sampled by itself equals that range of the whole.

    Args:
      stddev: the standard deviation of the normal distribution, whose mean is 0; no sample lies beyond 5.3 times that.
      seed: None takes one from Python's `random`, which `tf.keras.utils.set_random_seed` seeds.

    Example:
      >>> Normal(0.02, seed=1)((4, 3, 5)).shape
      TensorShape([4, 3, 5])
    """

    def __init__(self, stddev: float, seed: int | None = None):
        self.stddev = stddev
        self.seed = random.randrange(1 << 31) if seed is None else seed

    def __call__(self, shape: Sequence[int], dtype: Any = None) -> tf.Tensor:
        shape = tuple(shape)
        return tf.cast(self.sample(Box((0,) * len(shape), shape)), dtype or tf.float32)

    def sample(self, box: Box) -> tf.Tensor:
        """Returns the values of a range of the weight, of any rank, float32 of `box.size`."""
        *leading, (first_column, columns) = [(0, 1)] * (2 - len(box.size)) + list(zip(*box, strict=True))
        numbers = tf.meshgrid(*(tf.range(n, n + count, dtype=tf.int64) for n, count in leading), indexing="ij")
        *before, rows = (tf.reshape(axis, [-1]) for axis in numbers)
        even = tf.reshape(hashing.uniform(rows, columns, self.seed, *before, first=first_column), box.size)
        # In float64: float32's kernel rounds a value differently depending on its position in the array.
        return tf.cast(self.stddev * tf.math.ndtri(tf.cast(even, tf.float64)), tf.float32)

    def get_config(self) -> dict[str, Any]:
        return {"stddev": self.stddev, "seed": self.seed}


def add_weight(
    layer: tf.keras.layers.Layer, name: str, shape: tuple, initial: Normal | str, sharded_axis: int | None = None
) -> tf.keras.Variable:
    """Adds a weight to a layer that has a `mesh`; on a mesh of one replica it is an ordinary weight.

    A replica never has more of a sharded weight than its shard, which is created as zeros and filled piece by piece.

    Args:
      layer: the layer, over whose attribute `mesh` the weight is sharded.
      name: the weight's name.
      shape: the shape of the whole weight.
      initial: a `Normal`, or the name of a Keras initializer that fills with one number, "zeros" or "ones".
      sharded_axis: the weight's axis sharded over the mesh's axis `model`; None makes a copy on each replica.

    Example:
      >>> layer = tf.keras.layers.Layer()
      >>> layer.mesh = current_mesh()
      >>> add_weight(layer, "experts", (4, 3, 5), Normal(0.02), sharded_axis=0).shape
      TensorShape([4, 3, 5])
    """
    if sharded_axis is None or not layer.mesh.is_sharded:
        return layer.add_weight(name=name, shape=shape, initializer=initial)
    sharding = Sharding.over(layer.mesh, shape, {sharded_axis: MODEL})
    normal = initial if isinstance(initial, Normal) else None
    with keras_scopes.eager_variables():
        weight = layer.add_weight(name=name, shape=sharding.local_shape, initializer="zeros" if normal else initial)
        sharded.mark(weight, sharding)
        if normal:
            sharded.fill(weight, normal.sample)
    return weight


def shard_size(count: int, mesh: Mesh, name: str) -> int:
    """Returns how many of `count` each replica along `model` has; raises ValueError if they don't divide."""
    size = mesh.model.size
    if count % size:
        below, above = count // size * size, -(-count // size) * size
        fits = f"{below} or {above}" if below else f"{above}"
        raise UsageError(f"{name}={count} does not divide over the mesh's model:{size}; use {fits}")
    return count // size
