"""A batch in a step: its examples weighed, counted, and computed in micro-batches, in turn or in parallel.

Gradients of sums add up, so N small batches equal one big one. Each micro-batch samples random numbers of its own.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ..data import form
from ..errors import UsageError
from ..internals.keras import without_missing
from ..metrics.means import as_pair
from ..metrics.pairs import Mean
from .context import step_context


class Unpacked(NamedTuple):
    """A batch's fields, and the batch as metrics and losses get it, without weights: (features, labels), or features.

    In `counted`, which losses get, labels that are not finite and have weight 0 are 0.
    """

    features: Any
    labels: Any
    weights: Any
    unweighted: Any
    counted: Any


def unpack(batch: Any) -> Unpacked:
    """Returns the fields of a batch, a nest of tensors in the form of the data."""
    features, labels, weights = form.fields(batch)
    if labels is None or weights is None:
        unweighted = features if labels is None else batch
        return Unpacked(features, labels, weights, unweighted, unweighted)
    finite = tf.nest.map_structure(lambda y: without_missing(y, weights), labels)
    return Unpacked(features, labels, weights, (features, labels), (features, finite))


def weighed(loss: Callable, outputs: Any, batch: Any) -> Mean | dict[str, Mean]:
    """Calls `loss(outputs, batch)` without the batch's weights, then weights the result by them, if any.

    For a custom step on weighted data; `Trainer.compute_gradients` and the default steps do it themselves.

    Args:
      loss: takes outputs and a batch, and returns the pair of `crankshaft.mean`, with one value per example, or several
        by name.
      outputs: the model's, a nest of tensors [examples, ...].
      batch: in the form of the data: (features, labels[, weights]), of tensors [examples, ...].

    Raises:
      UsageError: there are weights, and the pair was not made by `crankshaft.mean`.

    Example:
      >>> def critic_loss(self, batch):  # in a Trainer with a custom step
      ...     return weighed(self.loss, self.critic(batch[0], training=True), batch)
    """
    _, _, weights, _, counted = unpack(batch)
    returned = loss(outputs, counted)
    if isinstance(returned, dict):
        return {name: as_pair(pair, f"the loss[{name!r}]", weights, is_loss=True) for name, pair in returned.items()}
    return as_pair(returned, "the loss", weights, is_loss=True)


def pad_empty_batch(batch):
    """Returns a batch as trainers get it; an empty one is padded with one example of zeros.

    Kernels can't handle empty batches: TensorFlow 2.21's oneDNN convolutions return a wrong shape, and batch
    normalization's mean is NaN.

    Args:
      batch: nest of tensors whose first axis is examples.

    Returns:
      (batch, whether it had examples): a scalar bool tensor, or None if a batch can't be empty.
    """
    batch = form.measured(batch)
    if isinstance(batch, form.Batches):  # each replica has examples of each (`engine.data.feeds.combined`)
        return batch, None
    first = tf.nest.flatten(batch)[0]
    if tf.distribute.get_replica_context().num_replicas_in_sync == 1 or (first.shape[0] or 0) > 0:
        return batch, None
    has_examples = tf.shape(first)[0] > 0
    missing = tf.where(has_examples, 0, 1)

    def pad(x: tf.Tensor) -> tf.Tensor:
        return tf.concat([x, tf.zeros(tf.concat([[missing], tf.shape(x)[1:]], 0), x.dtype)], 0)

    return tf.nest.map_structure(pad, batch), has_examples


def zero_unless(condition: tf.Tensor, metrics: dict) -> dict:
    """Returns the metrics if a condition is true, otherwise zeros, also for values that are not finite."""

    def masked(x):
        if isinstance(x, tf.IndexedSlices):
            return tf.IndexedSlices(masked(x.values), x.indices, x.dense_shape)
        return tf.where(condition, x, tf.zeros_like(x))

    return tf.nest.map_structure(masked, metrics)


def check_weighed(metrics: dict, batch: Any, trainer: Any) -> dict:
    """Returns a step's metrics, checked.

    Raises:
      UsageError: a custom step's metrics are not pairs, or do not count the examples' weights.
    """
    named = metrics if isinstance(metrics, dict) else {"": metrics}
    for name, pair in named.items():
        if not hasattr(pair, "total") or named is not metrics:
            raise UsageError(
                f"{type(trainer).__name__}: its step returned a {type(pair).__name__}{name and f' as {name!r}'}; "
                'return pairs by name, which add up over replicas and steps: {"loss": crankshaft.mean(losses)}'
            )
    forgotten = [n for n, pair in metrics.items() if getattr(pair, "weigh", None) and not pair.has_weights]
    if forgotten and form.fields(batch).weights is not None:
        raise UsageError(
            f"{type(trainer).__name__}: the data has weights, which {forgotten[0]!r} of its step ignores; "
            "use crankshaft.weighed(self.loss, outputs, batch), or crankshaft.mean(values, weights=batch[2])"
        )
    return metrics


def to_slices(predictions: Any, owner: str) -> Any:
    """Returns values of examples by name so that `sum_micro_batches` joins those of micro-batches.

    Args:
      predictions: nests of tensors [examples, ...] by name.
      owner: the method that returned them.

    Raises:
      UsageError: they are something else.
    """

    def slices(x):
        if x is None:
            raise UsageError(f"{owner} returned None as a value; leave it out, or return a tensor [examples, ...]")
        if isinstance(x, tf.RaggedTensor):  # micro-batches differ in length
            return x
        x = dense(x, f"{owner}: a value")
        return tf.IndexedSlices(x, tf.range(tf.shape(x)[0])) if x.shape.rank else x

    if not isinstance(predictions, dict) or not predictions:
        kind = f"a {type(predictions).__name__}" if not isinstance(predictions, dict) else "no values"
        raise UsageError(f'{owner} returned {kind}; return tensors [examples, ...] by name, {{"scores": outputs}}')

    return tf.nest.map_structure(slices, predictions)


def from_slices(slices: Any) -> Any:
    """Returns the tensors that `to_slices` was called with, of all micro-batches."""
    return tf.nest.map_structure(lambda x: x.values if isinstance(x, tf.IndexedSlices) else x, slices)


def dense(x: Any, title: str) -> tf.Tensor:
    """Returns a tensor; ragged examples are padded with zeros to the longest. `title` is for an error: x is none."""
    if isinstance(x, tf.SparseTensor):
        return tf.sparse.to_dense(x)
    try:
        return x.to_tensor() if isinstance(x, tf.RaggedTensor) else tf.convert_to_tensor(x)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{title} is a {type(x).__name__}, which has no entry per example; return tensors [examples, ...], such "
            "as its parameters, and make it of these in loss"
        ) from error


def accumulate(compute: Callable, batch: Any, steps: int, parallel: int = 1, loops: bool = True) -> Any:
    """Runs `compute` on up to `steps` micro-batches in turn, and adds up the results (gradient accumulation).

    Replica code. The batch is split along its first axis into micro-batches whose sizes differ by one at most; a batch
    of fewer examples than `steps` has one for each. Memory has the activations of one and one set of sums.

    Args:
      compute: batch -> (gradients, metrics): gradients of a *sum* of losses, tensors, `tf.IndexedSlices` or None, as a
        list; metrics are nests of tensors that add up, such as (total, count) pairs.
      steps: number of micro-batches; 1 is a plain call.
      parallel: how many each of them is split into, see `sum_micro_batches`.
      loops: whether `compute` may run in a loop; sums across replicas may not.

    Returns:
      (gradients, metrics) of the whole batch. Slices stay slices: an index occurs once per micro-batch that has it.
    """
    sums = functools.partial(sum_micro_batches, compute, count=parallel) if parallel > 1 else compute
    size = _size(batch)
    inputs = batch.values() if isinstance(batch, form.Batches) else [batch]
    is_uneven = isinstance(size, int) and any(_size(part) % min(steps, size or 1) for part in inputs)
    if steps == 1 or not loops or is_uneven:  # XLA needs equal lengths within a loop, so the loop is unrolled
        return sum_micro_batches(sums, batch, steps, in_turn=not loops)
    micro_batches = max(1, min(steps, size)) if isinstance(size, int) else tf.maximum(1, tf.minimum(steps, size))
    micro_batch_context = step_context().micro_batch_contexts(steps)

    def later_sums(i):
        with micro_batch_context(i):
            return sums(_micro_batch(batch, size, i, micro_batches))

    # The first is traced outside of the loop, which needs its results' shapes.
    with micro_batch_context(0):
        first_sums = sums(_micro_batch(batch, size, 0, micro_batches))
    return _pack_like(first_sums, _sum_in_loop(later_sums, _present_tensors(first_sums), micro_batches))


def sum_micro_batches(compute: Callable, batch: Any, count: int, in_turn: bool = False) -> Any:
    """Runs `compute` on up to `count` micro-batches in parallel, and adds up the results.

    Replica code. If each has a thread (`engine.devices.set_threads_per_micro_batch`), that is less work than
    splitting each operation of the whole batch among threads, which wait for each other after each operation.

    Args:
      compute: batch -> nest of tensors that add up, `tf.IndexedSlices` or None.
      batch: nest of tensors whose first axis is examples.
      count: the number of micro-batches, whose sizes differ by one at most. A batch of fewer examples has one for each,
        or one in all if its size is unknown when it is traced: kernels can't handle empty batches.
      in_turn: run one after the other, to save memory.
    """
    if count == 1:
        return compute(batch)
    size, micro_batch_context = _size(batch), step_context().micro_batch_contexts(count)
    if isinstance(size, int):
        count = max(1, min(count, size))
    traced: list[Any] = []

    def whole():
        with micro_batch_context(0):
            return _present_tensors(compute(batch))

    def sums():
        traced.clear()
        for i in range(count):
            before = tf.nest.flatten(_present_tensors(traced[-1]), expand_composites=True) if traced and in_turn else []
            with tf.control_dependencies(before), micro_batch_context(i):
                traced.append(compute(_micro_batch(batch, size, i, count)))
        return [add(column) for column in zip(*map(_present_tensors, traced), strict=True)]

    flat = sums() if isinstance(size, int) else tf.cond(size < count, whole, sums)
    return _pack_like(traced[0], flat)


def _sum_in_loop(micro_batch_sums: Callable, firsts: list, count: tf.Tensor) -> list:
    """Sums micro-batches' tensors in a loop; `firsts` are those of the first. Slices are joined."""

    def as_arrays(x: tf.IndexedSlices) -> list[tf.TensorArray]:
        # A loop's variable has one shape, and each micro-batch has another number of slices.
        return [
            tf.TensorArray(y.dtype, size=count, infer_shape=False, element_shape=[None, *y.shape[1:]]).write(0, y)
            for y in (x.values, x.indices)
        ]

    def body(i, totals):
        sums = []
        for total, x in zip(totals, _present_tensors(micro_batch_sums(i)), strict=True):
            if isinstance(x, tf.IndexedSlices):
                sums.append([array.write(i, y) for array, y in zip(total, (x.values, x.indices), strict=True)])
            else:
                sums.append(total + x)
        return i + 1, sums

    _, totals = tf.while_loop(
        lambda i, _: i < count,
        body,
        (1, [as_arrays(x) if isinstance(x, tf.IndexedSlices) else x for x in firsts]),
        parallel_iterations=1,
    )
    return [
        tf.IndexedSlices(*(array.concat() for array in t), x.dense_shape) if isinstance(x, tf.IndexedSlices) else t
        for t, x in zip(totals, firsts, strict=True)
    ]


def num_examples(batch: Any) -> tf.Tensor:
    """Returns the number of examples of a batch, scalar float32."""
    return tf.cast(_size(batch), tf.float32)


def _size(batch):
    """Returns the number of examples, of several inputs the least: an int if known when traced, else scalar int32."""
    if isinstance(batch, form.Batches):
        sizes = list(map(_size, batch.values()))
        return min(sizes) if all(isinstance(size, int) for size in sizes) else tf.reduce_min(tf.stack(sizes))
    first = tf.nest.flatten(batch)[0]
    return tf.shape(first)[0] if first.shape[0] is None else first.shape[0]


def _micro_batch(batch, size, i, count):
    """Returns micro-batch `i` of `count`, of a static shape if all have the same."""
    if isinstance(batch, form.Batches):
        return form.Batches({name: _micro_batch(part, _size(part), i, count) for name, part in batch.items()})
    start, end = i * size // count, (i + 1) * size // count
    even = isinstance(size, int) and isinstance(count, int) and size % count == 0
    length = size // count if even else end - start

    def sliced(x):
        rest = x.shape.rank - 1
        part = tf.slice(x, [start] + [0] * rest, [length] + [-1] * rest)
        part.set_shape([None, *x.shape[1:]])  # lost by a slice of unknown length
        return part

    return tf.nest.map_structure(sliced, batch)


def add(terms: Sequence) -> Any:
    """Returns the sum of tensors; entries of `tf.IndexedSlices` and ragged tensors are listed one after the other."""
    if isinstance(terms[0], tf.RaggedTensor):
        return tf.concat(terms, 0)
    if isinstance(terms[0], tf.IndexedSlices):
        values, indices = (tf.concat([getattr(x, name) for x in terms], 0) for name in ("values", "indices"))
        return tf.IndexedSlices(values, indices, terms[0].dense_shape)
    return functools.reduce(operator.add, terms)


def _present_tensors(sums: Any) -> list:
    """Returns the tensors of a nest, without its Nones (gradients of variables that the loss does not reach)."""
    return [x for x in tf.nest.flatten(sums) if x is not None]


def _pack_like(template: Any, flat: list) -> Any:
    rest = iter(flat)
    return tf.nest.map_structure(lambda x: None if x is None else next(rest), template)
