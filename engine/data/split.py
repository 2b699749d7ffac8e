"""A split of the data in any of its forms: a nest of arrays, a `Source`, a `tf.data.Dataset` or other `Stream`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from .order import ChunkedOrder, Order
from .source import Source, Spec
from .streamed import is_stream

_CHUNK_EXAMPLES = 1024  # of what reads single examples well, where a window is asked for all the same
_WINDOW_CHUNKS = 64  # where none is: a batch's classes then vary little more than in a shuffle of all (docs/data.md)


def spec_of(split) -> Any:
    """Returns the nest of `Spec` of one example."""
    if isinstance(split, Source):
        return split.element_spec
    if is_stream(split):
        return tf.nest.map_structure(
            lambda x: Spec(x.shape, object if x.dtype == tf.string else x.dtype.as_numpy_dtype), split.element_spec
        )
    return tf.nest.map_structure(lambda x: Spec(x.shape[1:], x.dtype), split)


def num_examples(split) -> int:
    """Returns the number of examples of arrays or a `Source`."""
    return len(split) if isinstance(split, Source) else len(tf.nest.flatten(split)[0])


def example_bytes(split) -> int:
    """Returns the bytes of one example in memory."""
    return sum(spec.nbytes for spec in tf.nest.flatten(spec_of(split)))


def draws(split) -> bool:
    """Returns whether examples differ from epoch to epoch, so that they can't be cached."""
    return isinstance(split, Source) and split.draws


def order_of(
    split,
    batch_size: int,
    block_steps: int,
    seed: int | None,
    shuffle_window: int = 0,
    drop_remainder: bool = False,
) -> Order:
    """Makes the order of arrays or a `Source`: by single examples, or by chunks where these are read better.

    Args:
      split: the data.
      batch_size: see `Order`.
      block_steps: see `Order`.
      seed: see `Order`.
      shuffle_window: chunks in a window of the order by chunks; 0 leaves it to the source whether there are any.
      drop_remainder: see `Order`.
    """
    chunk = split.chunk_examples if isinstance(split, Source) else 1
    common = (num_examples(split), batch_size, block_steps, seed, drop_remainder)
    if chunk == 1 and not shuffle_window:
        return Order(*common)
    return ChunkedOrder(
        *common,
        chunk_examples=_CHUNK_EXAMPLES if chunk == 1 else chunk,
        window_chunks=shuffle_window or _WINDOW_CHUNKS,
    )
