"""Examples of varying length: sources and streams whose specs have unknown dimensions, and their lengths.

Lengths are read once, before the first epoch, and stored beside the data's index.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from .. import logging
from ..errors import SourceError, UsageError
from ..machine.files import make_cache, new_file, private_cache
from . import form
from .buckets import BucketedOrder, LengthBuckets
from .form import Padded
from .frames import to_array
from .order import Order, even_range, plain_order
from .reader import blank, checked, fits
from .source import Source, Spec, Split, WrappedSource, unknown_dimensions
from .streamed import Stream, Watch, WrappedStream, map_elements, unwatched

_READ_AT_ONCE = 1024  # examples
_FOLDER = ".crankshaft"  # beside the data, as of inputs' own prepared files


def with_lengths(split: Any) -> Any:
    """Wraps a split, once, so that its examples have their lengths if they differ."""
    padded: list[Padded] = []
    form.map_padded(padded.append, split.element_spec)
    if padded or not unknown_dimensions(split.element_spec):
        return split
    return VaryingSource(split) if split.by_index else VaryingStream(split)


def _padded_spec(spec: Any) -> Any:
    """Returns the spec of examples with their lengths: `Padded` for each `Spec` with unknown dimensions.

    Raises:
      UsageError: unknown dimensions are not the first ones.
    """

    def padded(spec: Spec) -> Any:
        if not spec.unknown:
            return spec
        if any(size is not None for size in spec.shape[: spec.unknown]):
            raise UsageError(
                f"an example of shape {spec.shape} has unknown dimensions after known ones; transpose it, so that they "
                "come first"
            )
        return form.padded_by(spec)(spec, Spec((spec.unknown,) if spec.unknown > 1 else (), np.int32))

    return tf.nest.map_structure(padded, spec)


class VaryingSource(WrappedSource):
    """A source of examples of varying length, with their lengths."""

    def __init__(self, source: Source):
        super().__init__(source)
        self.element_spec = _padded_spec(source.element_spec)
        self._dimensions = unknown_dimensions(source.element_spec)

    @property
    def stored_spec(self) -> Any:
        return self.source.stored_spec, Spec((self._dimensions,), np.int32)

    def read(self, indices: np.ndarray) -> Any:
        found: list[np.ndarray] = []
        stored = self._padded(self.source.stored_spec, self.source.read(indices), found)
        stored = checked(self.source, stored, len(indices))
        if self.source.stored_spec == self.source.element_spec:
            return stored, np.concatenate(found, 1)
        lengths = self.source.lengths(indices)
        if lengths is None:
            raise SourceError(
                f"{type(self.source).__name__}.decode makes arrays of unknown length; define "
                "lengths(indices), which returns [n, dimensions]"
            )
        return stored, self._checked(lengths, len(indices))

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        lengths = self.source.lengths(indices)
        return self.read(indices)[1] if lengths is None else self._checked(lengths, len(indices))

    def verify(self, indices: np.ndarray, stored: Any) -> None:
        self.source.verify(indices, stored[0])

    def decode(self, stored: Any, seeds: Any) -> Any:
        stored, lengths = stored
        numbers = iter(tf.unstack(lengths, self._dimensions, 1))

        def add_lengths(values: Any, spec: Spec) -> Any:
            sizes = [next(numbers) for _ in range(spec.unknown)]
            if not sizes:
                return values
            return form.padded_by(spec)(values, sizes[0] if len(sizes) == 1 else tf.stack(sizes, 1))

        return tf.nest.map_structure(add_lengths, self.source.decode(stored, seeds), self.source.element_spec)

    def _checked(self, lengths: Any, examples: int) -> np.ndarray:
        lengths = np.asarray(lengths)
        if lengths.shape != (examples, self._dimensions) or lengths.dtype.kind not in "iu":
            raise SourceError(
                f"{type(self.source).__name__}.lengths returned {lengths.dtype}{[*lengths.shape]} for {examples} "
                f"examples; return whole numbers [{examples}, {self._dimensions}], one for each unknown dimension"
            )
        return lengths.astype(np.int32)

    def _padded(self, spec: Any, returned: Any, found: list[np.ndarray]) -> Any:
        """Pads lists of arrays in what `read` has returned; adds the lengths of each array to `found`."""
        if isinstance(spec, dict) and isinstance(returned, dict) and spec.keys() == returned.keys():
            by_name = {name: self._padded(spec[name], returned[name], found) for name in sorted(spec)}  # as tf.nest
            return {name: by_name[name] for name in returned}
        if isinstance(spec, tuple) and isinstance(returned, (list, tuple)) and len(spec) == len(returned):
            return tuple(self._padded(*pair, found) for pair in zip(spec, returned, strict=True))
        if not isinstance(spec, Spec) or not spec.unknown or not isinstance(returned, (list, tuple, np.ndarray)):
            return returned
        examples = [*map(to_array, returned)]
        if wrong := [example.shape for example in examples if not fits(example.shape, spec)]:
            raise SourceError(
                f"{type(self.source).__name__}.read returned an example of shape {[*wrong[0]]}, and the source's spec "
                f"has {[*spec.shape]}"
            )
        sizes = np.array([example.shape for example in examples], np.int32).reshape(len(examples), len(spec.shape))
        found.append(sizes[:, : spec.unknown])
        dtype = np.dtype(object) if spec.dtype == object else np.result_type(*examples) if examples else spec.dtype
        padded = blank(len(examples), sizes.max(0) if examples else [size or 0 for size in spec.shape], dtype)
        for number, example in enumerate(examples):
            at: Any = (number, *map(slice, example.shape))
            padded[at] = example
        return padded


class VaryingStream(WrappedStream):
    """A stream of examples of varying length, with their lengths; an empty one is padded to 1, as by a source."""

    divides = False  # each worker's batches would be padded to lengths of their own

    def __init__(self, stream: Stream):
        super().__init__(stream)
        self.element_spec = _padded_spec(stream.element_spec)

    def examples(self, seed: int | None, epoch: tf.Tensor) -> tf.data.Dataset:
        def add_lengths(values: tf.Tensor, spec: Spec) -> Any:
            if not spec.unknown:
                return values
            shape = tf.shape(values)[: spec.unknown]
            missing = tf.pad(tf.maximum(1 - shape, 0), [[0, values.shape.rank - spec.unknown]])
            at_least_one = tf.ensure_shape(tf.pad(values, tf.stack([tf.zeros_like(missing), missing], 1)), values.shape)
            return form.padded_by(spec)(at_least_one, shape if spec.unknown > 1 else shape[0])

        examples = self._stream.examples(seed, epoch)
        return map_elements(
            examples, lambda example: tf.nest.map_structure(add_lengths, example, self._stream.element_spec)
        )


def measured(source: Source, processes: Any, watch: Watch = unwatched) -> np.ndarray:
    """Returns the sizes of all examples' unknown dimensions, int32 [examples, dimensions].

    Each process reads a part, once: they are stored in a folder beside the source's first file, if it has files.

    Args:
      processes: the training processes, `engine.strategies.base.Processes`.
    """
    path = _path(source)
    stored = _stored(path, len(source))
    # All use what is stored, or none: those that read exchange their parts, and would wait for the others.
    are_stored = all(processes.exchange(stored is not None))
    if stored is not None and are_stored:
        return stored
    first, stop = even_range(len(source), processes.host, processes.num_hosts)
    at_once = max(source.chunk_examples, _READ_AT_ONCE // source.chunk_examples * source.chunk_examples)
    pieces = [np.arange(at, min(at + at_once, stop)) for at in range(first, stop, at_once)]
    done, parts = 0, []
    # Not in a `with`, which after an error would first read all that is left.
    pool = concurrent.futures.ThreadPoolExecutor(source.read_threads)
    try:
        with watch("reading the examples' lengths", stop - first) as show:
            for part in pool.map(source.lengths, pieces):
                assert part is not None  # a source without its examples' lengths has become a `VaryingSource`
                parts.append(part)
                show(done := done + len(part))
    finally:
        pool.shutdown(cancel_futures=True)
    width = unknown_dimensions(source.element_spec)
    here = np.concatenate([np.zeros([0, width], np.int32), *parts])
    lengths = np.frombuffer(b"".join(processes.exchange_bytes(here.tobytes())), np.int32).reshape(-1, width)
    if path and processes.is_chief:
        try:
            with new_file(path) as file:
                np.save(file, lengths)
        except OSError as error:
            logging.info("the examples' lengths are not stored (%s), and are read again by the next run", error)
    return lengths


def _path(source: Source) -> str:
    """The path at which a source's lengths are stored; "" if its examples can't be identified."""
    inner = source
    while isinstance(inner, WrappedSource):  # whose own identity is not empty where the source's is
        inner = inner.source
    if not source.files() or "://" in source.files()[0] or not inner.identity():
        return ""
    digest = zlib.crc32(f"{source.identity()} {len(source)} {source.element_spec}".encode())
    folder, name = os.path.split(source.files()[0])
    path = os.path.join(folder, _FOLDER, f"{name}.{digest:08x}.lengths")
    try:
        if make_cache(os.path.dirname(path), source.files()[0]):
            return path
        mine = private_cache()
    except OSError as error:
        logging.info("the examples' lengths are not stored (%s), and are read again by the next run", error)
        return ""
    logging.warning("%s is another user's, in a folder in which anybody may make files: %s is used instead", path, mine)
    return os.path.join(mine, os.path.basename(path))


def _stored(path: str, examples: int) -> np.ndarray | None:
    if not path:
        return None
    with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:
        lengths = np.load(file)
        return lengths if lengths.ndim == 2 and len(lengths) == examples and lengths.dtype == np.int32 else None
    return None


def bucketed(split: Split, buckets: LengthBuckets) -> Split:
    """Sets the buckets of a split; returns it. Raises `UsageError` if its examples have no such dimension."""
    if buckets.axis >= (number := unknown_dimensions(split.element_spec)):
        raise UsageError(
            f"bucket_by names axis {buckets.axis}, counted from 0, and an example of the data has {number} unknown "
            "dimensions; give a dataset or a source whose specs have None for dimensions that vary"
        )
    has_lengths: list[bool] = []
    form.map_padded(
        lambda padded: has_lengths.extend([not isinstance(padded, form.Unmeasured)] * padded.values.unknown),
        split.element_spec,
    )
    if not has_lengths[buckets.axis]:
        raise UsageError(
            f"bucket_by names axis {buckets.axis}, and the data came in batches that may be padded, so its examples' "
            "lengths are unknown; give ragged tensors, sparse features, padded_batch(1) or a Source"
        )
    split.buckets = buckets
    return split


class Padding:
    """How a source's batches are padded: to their longest example, or to their bucket's shape.

    Args:
      lengths: lengths of all examples, see `measured`; None if each batch is read as a whole.
    """

    def __init__(self, order: Order, lengths: np.ndarray | None):
        self._order, self._lengths = order, lengths

    @property
    def lines(self) -> list[str]:
        """Describes the buckets, for people."""
        return [f"the data in buckets: {self._order.describe()}"] if isinstance(self._order, BucketedOrder) else []

    def pad(self, indices: tf.Tensor, examples: Any) -> Any:
        """Pads examples of a global batch to its length. In a graph.

        Args:
          indices: indices of all examples of the batch, int64.
          examples: nest of tensors [n, ...], some of the batch's examples.
        """
        if isinstance(self._order, BucketedOrder):
            longest = self._order.longest(indices)
        elif self._lengths is not None:
            all_lengths = tf.gather(tf.constant(self._lengths, tf.int64), tf.reshape(indices, [-1]))
            longest = tf.maximum(tf.reduce_max(all_lengths, 0), 1)
        else:
            longest = form.longest(examples)
        return form.padded_to(longest, examples)


def source_order(
    source: Source,
    batch_size: int,
    seed: int | None,
    shuffle_window: int,
    processes: Any,
    saved_data: Mapping[str, Any] | None,
    *,
    watch: Watch,
    block_steps: int = 1,
    drop_remainder: bool = False,
    shards: int = 1,
) -> tuple[Order, Padding | None]:
    """Returns the order of a source's examples, and how batches are padded if lengths vary.

    By single examples, by chunks if these are read better, or by buckets. By default `shuffle_window`, chunks in a
    window, is the source's. `saved_data` is `Order.resumed`'s, "resumed" also with the `buckets` of the steps before,
    if they were others. A batch is read in so many `shards`.
    """
    examples = len(source)
    if (examples % batch_size and not drop_remainder) or source.varies:  # its blocks don't cross epochs
        block_steps = min(block_steps, max(1, examples // batch_size))  # a larger block would be padding
    order = plain_order(source, batch_size, block_steps, seed, shuffle_window, drop_remainder)
    if not unknown_dimensions(source.element_spec):
        return order.resumed(saved_data), None
    buckets_before = (saved_data or {}).get("resumed", {}).get("buckets", source.buckets)
    needs_lengths = source.buckets or buckets_before or shards > 1
    lengths = measured(source, processes, watch) if needs_lengths else None

    def bucketed_order(buckets: LengthBuckets) -> Order:
        assert lengths is not None  # buckets need them
        return BucketedOrder(examples, batch_size, 1, seed, buckets=buckets, lengths=lengths)

    before = bucketed_order(buckets_before) if buckets_before else order
    order = bucketed_order(source.buckets) if source.buckets else order
    order = order.resumed(saved_data, before)
    return order, Padding(order, lengths)
