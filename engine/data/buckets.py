"""Buckets: batches of examples of similar length, in an order that is arithmetic, given each example's length."""

from __future__ import annotations

import dataclasses
import fractions
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from ..errors import UsageError
from ..internals.tensorflow import unconverted
from ..randomness import epoch_seed
from . import form
from .order import Order, permuted

_WINDOW_BATCHES = 16  # batches of a stream that are sorted together


@dataclasses.dataclass(frozen=True)
class LengthBuckets:
    """The lengths by which examples are batched.

    Attributes:
      axis: index of the length among an example's unknown dimensions.
      boundaries: the longest length of each bucket, ascending. Batches are padded to it along the axis, and along each
        other one that has the same length in every example (of a stream, in every one of the batch).
      most: bound on examples times boundary in a batch; None: every bucket has batches of the run's size.
    """

    axis: int
    boundaries: tuple[int, ...]
    most: int | None = None

    def batch_sizes(self, most_examples: int) -> list[int]:
        """Returns each bucket's batch size, at least 1 and at most `most_examples`."""
        return [
            min(most_examples, max(1, (self.most or most_examples * length) // length)) for length in self.boundaries
        ]

    def check(self, longest: int) -> None:
        """Raises `UsageError` if an example belongs to no bucket."""
        if longest > self.boundaries[-1]:
            raise UsageError(f"the longest example is of length {longest:,}, and {_NO_BUCKET}")

    def check_stream(self, order: Order) -> None:
        """Raises `UsageError` if a stream's batches, which have one size, exceed the bound."""
        batch_size = order.batch_size
        if min(self.batch_sizes(batch_size)) < batch_size:
            raise UsageError(
                f"bucket_by allows {self.most:,} positions in a batch, and a stream's batches have one size: "
                f"{batch_size} x {self.boundaries[-1]:,} are more; use global_batch_size of at most "
                f"{min(self.batch_sizes(batch_size))}, or data that is read by index"
            )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class BucketedOrder(Order):
    """An order whose batches each have examples of one bucket, and that bucket's batch size.

    An epoch has the whole batches of each bucket, and a smaller last one where its examples don't divide. Examples are
    permuted within their bucket, and all buckets' batches together, each by (seed, epoch). A block is a batch.

    Attributes:
      lengths: the sizes of each example's unknown dimensions, [num_examples, dimensions] int.
    """

    buckets: LengthBuckets
    lengths: np.ndarray

    def __post_init__(self):
        super().__post_init__()
        self.buckets.check(int(self.lengths[:, self.buckets.axis].max()))

    @functools.cached_property
    def _bucket_numbers(self) -> np.ndarray:
        return np.searchsorted(self.buckets.boundaries, self.lengths[:, self.buckets.axis])

    @functools.cached_property
    def _members(self) -> np.ndarray:
        """All examples, bucket by bucket."""
        return np.argsort(self._bucket_numbers, kind="stable")

    @functools.cached_property
    def _counts(self) -> np.ndarray:
        """Examples of each bucket."""
        return np.bincount(self._bucket_numbers, minlength=len(self.buckets.boundaries))

    @functools.cached_property
    def _batches(self) -> np.ndarray:
        """Each batch's (bucket, index of its first example in the bucket, size), before batches are permuted."""
        batches = []
        for bucket, size in enumerate(self.buckets.batch_sizes(self.batch_size)):
            first = np.arange(0, self._counts[bucket], size)
            sizes = np.minimum(size, self._counts[bucket] - first)
            batches.append(np.stack([np.full_like(first, bucket), first, sizes], 1))
        return np.concatenate(batches)

    @functools.cached_property
    def shapes(self) -> np.ndarray:
        """The sizes to which each bucket's batches are padded, [buckets, dimensions]: few shapes."""
        shapes = np.ones((len(self.buckets.boundaries), self.lengths.shape[1]), np.int64)
        np.maximum.at(shapes, self._bucket_numbers, self.lengths)
        has_length = np.all(self.lengths == self.lengths[:, [self.buckets.axis]], 0)
        return np.where(has_length, np.array(self.buckets.boundaries)[:, np.newaxis], shapes)

    @property
    def without_buckets(self) -> Order:
        """An order of the same examples without buckets."""
        return Order(self.num_examples, self.batch_size, 1, self.seed)

    @property
    def num_shapes(self) -> int:
        """The number of different shapes of batches, with the buckets' smaller last ones."""
        return len({(int(bucket), int(size)) for bucket, _, size in self._batches})

    @property
    def whole_steps(self) -> int:
        return len(self._batches)

    @property
    def remainder(self) -> int:
        return 0

    @property
    def epoch_examples(self) -> int:
        return self.num_examples

    def position(self, step: int) -> tuple[int, int]:
        epoch, in_epoch = divmod(step + self.shift, self.steps_per_epoch)
        return epoch, int(self._examples_before(epoch)[in_epoch])

    def rate_step(self, step):
        # Linear within an epoch, where batches differ in size.
        origin = self.origin
        if not origin.rate_steps:
            return step
        rate = fractions.Fraction(origin.rate_steps * self.num_examples, self.steps_per_epoch * origin.rate_examples)
        # Its product with a step has to fit an int64 tensor. A fraction of larger numbers, as that of two epochs of
        # other lengths, is off by less than a step of the rate in a million steps.
        rate = rate.limit_denominator(1 << 20)
        return origin.rate_step + (step - origin.step) * rate.numerator // rate.denominator

    def steps_of_equal_size(self, step: int) -> float:
        return 1

    def examples_before(self, step):
        epoch, in_epoch = divmod(step + self.shift, self.steps_per_epoch)
        return epoch * self.num_examples + int(self._examples_before(epoch)[in_epoch])

    @functools.cached_property
    def _examples_before(self) -> Callable[[int], np.ndarray]:
        """Maps an epoch to the number of examples before each of its steps."""

        @functools.lru_cache(2)
        def examples_before(epoch: int) -> np.ndarray:
            # Numbers for the host, also while a step is traced.
            with tf.init_scope(), tf.device("CPU:0"):
                steps = tf.range(tf.constant(self.steps_per_epoch, tf.int64))
                batches = self._permuted_batches(steps, tf.constant(epoch, tf.int64)).numpy()
            return np.concatenate([[0], np.cumsum(self._batches[batches, 2])])

        return examples_before

    def block_at(self, step: int) -> tuple[int, int, int]:
        return step + self.shift, 0, 1

    @property
    def blocks_per_epoch(self) -> int:
        return self.steps_per_epoch

    def epochs(self, block: tf.Tensor) -> tf.Tensor:
        return tf.reshape(block // self.steps_per_epoch, [1])

    def examples(self, block: tf.Tensor) -> tf.Tensor:
        epoch, in_epoch = block // self.steps_per_epoch, block % self.steps_per_epoch
        return self._batch_examples(epoch, in_epoch)[tf.newaxis]

    def examples_between(self, first: tf.Tensor, stop: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the examples of step `first`, see `Order.examples_between`; `stop` is the next one."""
        number = first + self.shift
        epoch = number // self.steps_per_epoch
        return self._batch_examples(epoch, number % self.steps_per_epoch), epoch

    def _batch_examples(self, epoch: tf.Tensor, in_epoch: tf.Tensor) -> tf.Tensor:
        batch = self._permuted_batches(in_epoch[tf.newaxis], epoch)[0]
        bucket, first, size = tf.unstack(tf.gather(tf.constant(self._batches), batch), num=3)
        count = tf.gather(tf.constant(self._counts), bucket)
        indices = first + tf.range(size)
        if self.seed is not None:
            shuffled = permuted(indices, self._keys(epoch)[1 + bucket], tf.maximum(count, 2))
            indices = tf.where(count > 1, shuffled, indices)  # a single one can't be permuted
        start = tf.gather(tf.constant(np.cumsum(self._counts) - self._counts), bucket)
        return tf.gather(tf.constant(self._members), start + indices)

    def _permuted_batches(self, in_epoch: tf.Tensor, epoch: tf.Tensor) -> tf.Tensor:
        if self.seed is None or self.steps_per_epoch == 1:
            return in_epoch
        return permuted(in_epoch, self._keys(epoch)[0], self.steps_per_epoch)

    def _keys(self, epoch: tf.Tensor) -> tf.Tensor:
        """Returns [1 + buckets, 3]: the batches' key, and each bucket's."""
        return epoch_seed(self.seed, epoch, [1 + len(self.buckets.boundaries), 3])

    def longest(self, indices: tf.Tensor) -> tf.Tensor:
        """Returns the sizes to which a batch of these examples is padded, int64 [dimensions]. In a graph."""
        bucket = tf.gather(tf.constant(self._bucket_numbers), tf.reshape(indices, [-1])[0])
        return tf.gather(tf.constant(self.shapes), bucket)

    def describe(self) -> str:
        """Describes the buckets, for people."""
        batches = np.bincount(self._batches[:, 0], minlength=len(self._counts))
        sizes = self.buckets.batch_sizes(self.batch_size)
        counts = [
            f"{count:,} of {size} x {[*map(int, shape)]}"
            for count, size, shape in zip(batches, sizes, self.shapes, strict=True)
            if count
        ]
        return f"{self.steps_per_epoch:,} batches per epoch, of {self.num_shapes} shapes: {', '.join(counts)}"


_NO_BUCKET = "bucket_by has no boundary that long; add one, or leave such examples out"


def in_windows(examples: tf.data.Dataset, buckets: LengthBuckets, batch_size: int, seed: int | None, epoch: tf.Tensor):
    """Batches a stream's examples by length, within windows of some batches; an epoch's last may be smaller.

    A window's examples are sorted by length and divided into batches, which are permuted by (seed, epoch, window).

    Args:
      examples: dataset of examples in one of the forms of `engine.data.form`, with `Padded`.
      seed: seed of the permutation; None keeps batches sorted.
      epoch: scalar int64.
    """
    boundaries = tf.constant(buckets.boundaries, tf.int64)

    def batches(number: tf.Tensor, window: Any) -> tf.data.Dataset:
        lengths = form.lengths(window)
        shortest_first = tf.argsort(lengths[:, buckets.axis], stable=True)
        examples = tf.shape(lengths, tf.int64)[0]
        whole = examples // batch_size

        def batch(index: tf.Tensor) -> Any:
            if seed is not None:
                key = epoch_seed(seed, epoch, [3]) + number
                among_whole = tf.clip_by_value(index, 0, tf.maximum(whole - 1, 0))
                moved = permuted(among_whole[tf.newaxis], key, tf.maximum(whole, 2))[0]
                index = tf.where((index < whole) & (whole > 1), moved, index)  # a smaller one stays the last
            in_window = shortest_first[index * batch_size : (index + 1) * batch_size]
            sizes = tf.gather(lengths, in_window)
            longest = tf.maximum(tf.reduce_max(sizes, 0), 1)
            bucket = tf.searchsorted(boundaries, longest[buckets.axis : buckets.axis + 1])[0]
            is_short_enough = bucket < len(buckets.boundaries)
            message = ["an example is of length", longest[buckets.axis], f"and {_NO_BUCKET}"]
            with tf.control_dependencies([tf.debugging.Assert(is_short_enough, message)]):
                has_length = tf.reduce_all(sizes == sizes[:, buckets.axis, tf.newaxis], 0)
                longest = tf.where(has_length, boundaries[bucket], longest)
            return form.padded_to(longest, tf.nest.map_structure(lambda x: tf.gather(x, in_window), window))

        return tf.data.Dataset.range(-(-examples // batch_size)).map(batch)

    return examples.padded_batch(_WINDOW_BATCHES * batch_size).enumerate().flat_map(unconverted(batches))
