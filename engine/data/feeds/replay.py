"""Reads an epoch of a stream again, if its position can't be saved: in the same order, or finds that it is another.

Parts of it run in the stream's pipeline.
"""

from __future__ import annotations

import json
import zlib
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ...internals.tensorflow import iterator_state, restore_iterator, unconverted

_PREFIX = b"replay"
_MOST_SEED_BYTES = 1 << 26  # a cache in memory that a shuffle reads is part of its state
_EPOCHS = 16  # more than the pipeline reads ahead


class ReplayPosition(NamedTuple):
    """A position that a checkpoint keeps.

    Attributes:
      shuffles: identifies the stream's shuffles, plain JSON.
      seeds: the shuffles' state at the epoch's beginning; b"" if unknown.
      first_batch: for each component of the epoch's first batch, its checksum and whether its examples differ; or None.
        Of a stream without epochs, of the batch that it began with.
    """

    shuffles: Any
    seeds: bytes
    first_batch: list[list[int]] | None = None

    @classmethod
    def from_bytes(cls, position: bytes) -> ReplayPosition | None:
        """Returns the position; None if it is an iterator's state, or none."""
        if not position.startswith(_PREFIX):
            return None
        values, _, seeds = position[len(_PREFIX) :].partition(b"\n")
        shuffles, first_batch = json.loads(values)
        return cls(shuffles, seeds, first_batch)

    def to_bytes(self) -> bytes:
        return _PREFIX + json.dumps([self.shuffles, self.first_batch]).encode() + b"\n" + self.seeds


class Replay:
    """Notes the shuffles' seeds as each epoch of a pipeline begins, and the epoch's first batch.

    Each reading of a `Dataset.shuffle` takes the next seeds of a generator that all its readings share. The state of
    any iterator over the shuffle includes how many seeds the generator has given, and restoring it sets the generator.
    `unread` is an iterator over the shuffles, from which nothing is read; None without shuffles.
    """

    def __init__(self, unread: tf.data.Iterator | None, shuffles: Any):
        self._unread, self._shuffles = unread, shuffles
        self._is_large = False
        self._before = self._state()
        self._seeds: dict[int, bytes] = {}
        self._first_batches: dict[int, list[list[int]]] = {}

    def begin(self, epoch: int, seeds: bytes) -> bool:
        """Sets the shuffles to an epoch's beginning, before it is read, or else to what they were.

        Returns:
          Whether there are seeds, and they fit.
        """
        # A restore that fails may have set some of the shuffles: those of before are put back.
        for state in filter(None, (seeds, self._before)):
            try:
                restore_iterator(self._unread, state)
            except tf.errors.OpError:  # the state is another pipeline's
                continue
            self._seeds[epoch] = state
            return state == seeds
        return False

    def position(self, epoch: int) -> bytes:
        """Returns the position within an epoch, or at its beginning, for a checkpoint."""
        now = self._state()  # before another thread can begin the epoch
        seeds = self._seeds.get(epoch, now)
        seeds = seeds if len(seeds) <= _MOST_SEED_BYTES else b""
        return ReplayPosition(self._shuffles, seeds, self._first_batches.get(epoch)).to_bytes()

    def agrees(self, epoch: int, position: ReplayPosition) -> bool:
        """Returns whether an epoch that was read again has its examples in the order of the position.

        Its first batch is the same, but for what has changed at random.
        """
        return position.first_batch is None or alike(self.first_batch(epoch), position.first_batch)

    def first_batch(self, epoch: int) -> list[list[int]]:
        """Returns the digest of an epoch's first batch; empty if it has not been read."""
        return self._first_batches.get(epoch, [])

    def note_epoch(self, epoch: tf.Tensor) -> tf.Tensor:
        """Notes the seeds at the beginning of an epoch, and returns its number. In the pipeline."""

        def note(epoch: np.ndarray) -> np.ndarray:
            self._seeds.setdefault(int(epoch), self._state())
            self._seeds.pop(int(epoch) - _EPOCHS, None)
            return epoch

        return tf.ensure_shape(tf.numpy_function(note, [epoch], tf.int64), [])

    def note_first(self, epoch: tf.Tensor, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Notes the first batch of an epoch, and returns its batches. In the pipeline."""

        def note(epoch: np.ndarray, *components: np.ndarray) -> np.ndarray:
            self._first_batches[int(epoch)] = [_checksum(component) for component in components]
            self._first_batches.pop(int(epoch) - _EPOCHS, None)
            return epoch

        def noted(number: tf.Tensor, batch: Any) -> Any:
            arguments = [epoch, *tf.nest.flatten(batch, expand_composites=True)]
            first = tf.cond(
                number == 0, lambda: tf.ensure_shape(tf.numpy_function(note, arguments, tf.int64), []), lambda: epoch
            )
            with tf.control_dependencies([first]):
                return tf.nest.map_structure(tf.identity, batch, expand_composites=True)

        return batches.enumerate().map(unconverted(noted))

    def _state(self) -> bytes:
        if self._unread is None or self._is_large:
            return b""
        try:
            state = iterator_state(self._unread, ignores_functions=True)
        except (tf.errors.OpError, MemoryError):
            return b""
        self._is_large = len(state) > _MOST_SEED_BYTES
        return state


def alike(one: list[list[int]], other: list[list[int]]) -> bool:
    """Returns whether digests are of one batch, or a component that differs by example, such as labels, is the same."""
    return one == other or any(a == b and a[1] for a, b in zip(one, other, strict=False))


def _checksum(values: np.ndarray) -> list[int]:
    content = repr(values.tolist()).encode() if values.dtype == object else np.ascontiguousarray(values).tobytes()
    return [zlib.crc32(content), int((values != values[:1]).any())]
