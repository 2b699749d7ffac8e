"""Embedding tables, sharded by rows: each id is looked up once, and gradients hold the touched rows alone. Made on the
host, in a strategy's scope; called in replica code. Nothing here is of a table's size but the table."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from engine.wire import fetch

_PIECE_BYTES = 16 << 20  # a table is filled so much at a time: an initializer's temporaries are several times as large
COMBINERS = (None, "sum", "mean", "sqrtn")
UNKNOWN = ("row_0", "error")


def uniform(limit: float = 0.05) -> Callable:
    """An initializer, (shape, seed) -> float32: even in [-limit, limit). The default one is Keras's."""
    return lambda shape, seed: tf.random.stateless_uniform(shape, seed, -limit, limit)


def normal(stddev: float = 0.05) -> Callable:
    """An initializer: Gaussian, of mean 0."""
    return lambda shape, seed: tf.random.stateless_normal(shape, seed, stddev=stddev)


def zeros() -> Callable:
    """An initializer: all 0."""
    return lambda shape, seed: tf.zeros(shape)


class Embedding(tf.Module):
    """A table [rows, width], float32, looked up by ids.

    Row r is row r // n of shard r % n. Ids follow a power law, and vocabularies put the frequent ones first: contiguous
    shards would send most of the traffic to the first server, and here neighbours live on different ones.

    Args:
      name: an identifier; the shards are the variables NAME/shard_0, NAME/shard_1, ...
      rows, width: of the table. `rows` may be None with a `vocabulary`, which says it.
      combiner: how the rows of an example with several ids become one: the sum of w_i e_i, or that divided by the sum
        of w_i ("mean") or by the root of the sum of w_i squared ("sqrtn"); zeros for an example without ids. As
        `tf.nn.embedding_lookup_sparse`. None keeps them apart.
      hash_ids: ids are any integers or strings, and a hash chooses their row. Two ids may share one.
      vocabulary: ids are these integers or strings; the first has row 1, and row 0 is for those that it lacks.
      unknown: ids out of range, or not in the vocabulary: "row_0" sends them there, "error" ends the step.
      padding_id: this one stands for no id; needs a combiner.
      initializer: (shape, seed [2]) -> float32, stateless.
      num_shards: None makes as many as there are servers, but none smaller than `min_shard_bytes`.
      min_shard_bytes: of a shard; 256 KiB is what TensorFlow's MinSizePartitioner has.

    Raises:
      ValueError: an argument is out of range.
    """

    def __init__(
        self,
        name: str,
        rows: int | None,
        width: int,
        *,
        combiner: str | None = None,
        hash_ids: bool = False,
        vocabulary: Sequence | None = None,
        unknown: str = "row_0",
        padding_id: int | str | None = None,
        initializer: Callable | None = None,
        num_shards: int | None = None,
        min_shard_bytes: int = 256 << 10,
    ):
        super().__init__(name=name)
        self.rows = len(vocabulary) + 1 if rows is None and vocabulary is not None else rows
        self.width = width
        self.combiner = combiner
        self.hash_ids = hash_ids
        self.unknown = unknown
        self.padding_id = padding_id
        self.initializer = initializer or uniform()
        self.num_shards = num_shards
        self.min_shard_bytes = min_shard_bytes
        self.shards: list[tf.Variable] = []
        self.wire_dtype = tf.float32  # what looked-up rows travel as from parameter servers
        self._vocabulary = None if vocabulary is None else tuple(vocabulary)
        self._row_of = None
        self._check()

    def _check(self) -> None:
        known = self._vocabulary
        for name, value in {"rows": self.rows, "width": self.width, "num_shards": self.num_shards or 1}.items():
            if value is None or value < 1:
                raise ValueError(f"embedding {self.name}: {name}={value} is no size; use 1 or more")
        if self.combiner not in COMBINERS:
            raise ValueError(f"embedding {self.name}: combiner={self.combiner} is unknown; use sum, mean or sqrtn")
        if self.unknown not in UNKNOWN:
            raise ValueError(f"embedding {self.name}: unknown={self.unknown} is no way; use row_0 or error")
        if self.padding_id is not None and self.combiner is None:
            raise ValueError(f"embedding {self.name}: padding_id={self.padding_id} needs a combiner; use e.g. sum")
        if known is not None and (self.hash_ids or self.rows != len(known) + 1):
            raise ValueError(
                f"embedding {self.name}: rows={self.rows}, hash_ids={self.hash_ids} do not go with a vocabulary of "
                f"{len(known)}; leave hash_ids out and use rows={len(known) + 1} or None"
            )

    def build(self, seed: int, num_servers: int = 1) -> None:
        """Makes and fills the shards. Host code, in the strategy's scope, once.

        The values depend on the seed, the table's name and the row, not on the number of shards. Each shard is filled
        on its own device, piece by piece.
        """
        most = max(1, 4 * self.rows * self.width // max(1, self.min_shard_bytes))
        number = min(self.rows, self.num_shards or min(num_servers, most))
        for shard in range(number):
            shape = [len(range(shard, self.rows, number)), self.width]
            variable = tf.Variable(
                lambda shape=shape: tf.raw_ops.Empty(shape=shape, dtype=tf.float32),
                shape=shape,
                dtype=tf.float32,
                name=f"{self.name}/shard_{shard}",
            )
            if number > 1 and isinstance(variable, tf.distribute.DistributedValues):
                raise ValueError(
                    f"embedding {self.name}: num_shards={number}, and each replica has a copy of all; "
                    "leave it out, or use one device"
                )
            for copy in tf.distribute.get_strategy().experimental_local_results(variable):
                self._fill(copy, shard, number, seed)
            self.shards.append(variable)
        if self._vocabulary is not None:
            keys = tf.convert_to_tensor(self._vocabulary)
            keys = tf.cast(keys, tf.int64) if keys.dtype.is_integer else keys
            values = tf.range(1, self.rows, dtype=tf.int64)
            self._row_of = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), 0)

    def _fill(self, copy: tf.Variable, shard: int, number: int, seed: int) -> None:
        """Every shard draws all of the table's pieces and takes its own rows, so that their number changes no value."""
        with tf.device(copy.device):
            key = tf.constant([seed, zlib.crc32(self.name.encode())], tf.int64)
            step = max(1, _PIECE_BYTES // (4 * self.width))
            for piece, first in enumerate(range(0, self.rows, step)):
                length = min(step, self.rows - first)
                values = self.initializer([length, self.width], tf.random.experimental.stateless_fold_in(key, piece))
                mine = range(first + (shard - first) % number, first + length, number)
                if mine:
                    tf.raw_ops.ResourceScatterUpdate(
                        resource=copy.handle,
                        indices=tf.range(mine[0] // number, mine[0] // number + len(mine)),
                        updates=values[mine[0] - first :: number],
                    )

    @property
    def variables_for_gradients(self) -> list[tf.Variable]:
        """The shards: what a tape is asked for, and what an optimizer updates."""
        return list(self.shards)

    def __call__(self, ids, weights=None):
        """Looks ids up, each different one once. Replica code.

        Args:
          ids: integers or strings: a tensor [batch] or [batch, k], or a `tf.RaggedTensor` of one ragged axis; or a nest
            of such (a dictionary by feature, say): features that share the table, and the one lookup.
          weights: None, or float32 of the same structure and shapes, for the combiner.

        Returns:
          float32 in the structure of `ids`: [batch, width], and without a combiner [batch, k, width] for [batch, k].

        Raises:
          tf.errors.InvalidArgumentError: an unknown id, with `unknown="error"`.
        """
        leaves = [self._flat(*pair) for pair in _pairs(ids, weights)]
        found = self._read(tf.concat([leaf.rows for leaf in leaves], 0))
        parts = tf.split(found, [tf.size(leaf.rows) for leaf in leaves]) if len(leaves) > 1 else [found]
        combined = [self._combine(part, leaf) for part, leaf in zip(parts, leaves, strict=True)]
        return tf.nest.pack_sequence_as(ids, combined)

    def rows_of(self, ids: tf.Tensor, there: tf.Tensor | None = None) -> tf.Tensor:
        """The row of each id, int64; what is not `there`, a bool each, may be anything."""
        if self.hash_ids:
            return _hash(ids, self.rows)
        if ids.dtype == tf.string and self._row_of is None:
            raise ValueError(f"embedding {self.name}: ids are strings; use hash_ids=True or a vocabulary")
        ids = ids if ids.dtype == tf.string else tf.cast(ids, tf.int64)
        if self._row_of is not None:
            rows = self._row_of.lookup(ids)
            outside, lacks = tf.equal(rows, 0), "the vocabulary lacks an id"
        else:
            outside = (ids < 0) | (ids >= self.rows)
            rows, lacks = tf.where(outside, tf.zeros_like(ids), ids), f"an id is not in 0..{self.rows - 1}"
        if self.unknown == "row_0":
            return rows
        outside = outside if there is None else outside & there
        message = f"embedding {self.name}: {lacks}; mend the data, or use unknown=row_0"
        with tf.control_dependencies(
            [tf.debugging.Assert(~tf.reduce_any(outside), [message, tf.boolean_mask(ids, outside)], summarize=3)]
        ):
            return tf.identity(rows)

    def _read(self, rows: tf.Tensor) -> tf.Tensor:
        """[n, width] of rows [n], any of which may occur several times."""
        if not self.shards:
            raise RuntimeError(f"embedding {self.name} is not built; call build_embeddings() in the trainer's build")
        if isinstance(self.shards[0], tf.distribute.DistributedValues):
            # It is here, so nothing is saved by looking up once. And replicas exchange gradients of a known size only:
            # TensorFlow 2.21's collectives take the shape of a loop's first step for that of all.
            return _own_copy(self.shards[0]).sparse_read(rows)
        unique, positions = tf.unique(rows)
        return _expand(self._gather(unique), positions)

    def _gather(self, rows: tf.Tensor) -> tf.Tensor:
        """[n, width] of rows [n]: each server is asked for its own."""
        number = len(self.shards)
        if number == 1:
            return self._fetch(self.shards[0], rows)
        owner = tf.cast(rows % number, tf.int32)
        local = tf.dynamic_partition(rows // number, owner, number)
        places = tf.dynamic_partition(tf.range(tf.size(rows)), owner, number)
        parts = [self._fetch(shard, part) for shard, part in zip(self.shards, local, strict=True)]
        return tf.ensure_shape(tf.dynamic_stitch(places, parts), [None, self.width])

    def _fetch(self, shard: tf.Variable, rows: tf.Tensor) -> tf.Tensor:
        return fetch(shard.sparse_read(rows), shard.device, self.wire_dtype)

    def _flat(self, ids, weights) -> _Leaf:
        flat = tf.reshape(_values(ids), [-1])
        w = None if weights is None else tf.reshape(tf.cast(_values(weights), tf.float32), [-1, 1])
        if self.padding_id is None:
            rows = self.rows_of(flat)
        else:
            there = tf.not_equal(flat, tf.constant(self.padding_id, flat.dtype))
            rows = self.rows_of(flat, there)
            # In the place of no id stands one that is looked up anyway, with no weight: it adds nothing, and no row is
            # touched for it.
            first = tf.concat([tf.boolean_mask(rows, there)[:1], [0]], 0)[0]
            rows = tf.where(there, rows, first)
            w = tf.where(there[:, None], 1.0 if w is None else w, 0.0)
        return _Leaf(ids, rows, w)

    def _combine(self, found: tf.Tensor, leaf: _Leaf):
        """From a row an id, [n, width], in the order of `ids`."""
        ids, w = leaf.ids, leaf.weights
        if self.combiner is None:
            return ids.with_flat_values(found) if _is_ragged(ids) else _shaped(found, ids, self.width)
        if w is None and not _is_ragged(ids) and ids.shape.rank == 1:
            return found
        summed = _total(found if w is None else found * w, ids)
        if self.combiner == "sum":
            return summed
        w = tf.ones_like(found[:, :1]) if w is None else w
        divisor = _total(w, ids) if self.combiner == "mean" else tf.sqrt(_total(tf.square(w), ids))
        return tf.math.divide_no_nan(summed, divisor)


def shards_in(keys: Iterable[str]) -> int:
    """How many shards the most divided table of a checkpoint has, by the keys of its variables; 0 without tables.

    As `num_servers`, it divides all tables as they were: who restores must not go by the servers that there are now.
    """
    found = (re.search(r"/shards/(\d+)/\.ATTRIBUTES/", key) for key in keys)
    return max((1 + int(match[1]) for match in found if match), default=0)


class _Leaf(NamedTuple):
    """One feature's ids as they were given, the row of each [n], and their weights [n, 1] or None."""

    ids: Any
    rows: tf.Tensor
    weights: tf.Tensor | None


def _total(x: tf.Tensor, ids) -> tf.Tensor:
    """[batch, c] of x [n, c]: the sum over each example's ids."""
    if _is_ragged(ids):
        return tf.math.unsorted_segment_sum(x, ids.value_rowids(), ids.nrows())
    k = 1 if ids.shape.rank == 1 else tf.shape(ids)[1]
    return tf.reduce_sum(tf.reshape(x, [tf.shape(ids)[0], k, x.shape[-1]]), 1)


def _values(x) -> tf.Tensor:
    return x.flat_values if _is_ragged(x) else x


def _pairs(ids, weights) -> list[tuple]:
    leaves = [x if _is_ragged(x) else tf.convert_to_tensor(x) for x in tf.nest.flatten(ids)]
    if weights is None:
        return [(leaf, None) for leaf in leaves]
    tf.nest.assert_same_structure(ids, weights)
    return list(zip(leaves, tf.nest.flatten(weights), strict=True))


def _own_copy(shard: tf.Variable) -> tf.Variable:
    """This replica's: a mirrored variable itself can only be read whole."""
    if not isinstance(shard, tf.distribute.DistributedValues):
        return shard
    copies = shard.distribute_strategy.experimental_local_results(shard)
    context = tf.distribute.get_replica_context()  # None where no replica runs: the first one's serves then
    replica = context and tf.get_static_value(context.replica_id_in_sync_group)
    return copies[int(replica or 0) % len(copies)]


def _is_ragged(x) -> bool:
    return isinstance(x, tf.RaggedTensor)


def _shaped(found: tf.Tensor, ids: tf.Tensor, width: int) -> tf.Tensor:
    shaped = tf.reshape(found, tf.concat([tf.shape(ids), [width]], 0))
    return tf.ensure_shape(shaped, [*ids.shape, width])


@tf.custom_gradient
def _expand(rows: tf.Tensor, positions: tf.Tensor):
    """`tf.gather(rows, positions)`, whose gradient is a row for each row at once, not slices to be added up."""
    number = tf.shape(rows)[0]

    def gradient(upstream):
        return tf.math.unsorted_segment_sum(upstream, positions, number), None

    return tf.gather(rows, positions), gradient


def _hash(ids: tf.Tensor, rows: int) -> tf.Tensor:
    """Integers by the finalizer of SplitMix64 (Steele, Lea, Flood 2014), strings by FarmHash: the same everywhere."""
    if ids.dtype == tf.string:
        return tf.strings.to_hash_bucket_fast(ids, rows)
    x = tf.bitcast(tf.cast(ids, tf.int64), tf.uint64) + tf.constant(0x9E3779B97F4A7C15, tf.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, tf.constant(shift, tf.uint64)))
        x *= tf.constant(factor, tf.uint64)
    x = tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, tf.constant(31, tf.uint64)))
    return tf.bitcast(tf.math.floormod(x, tf.constant(rows, tf.uint64)), tf.int64)
