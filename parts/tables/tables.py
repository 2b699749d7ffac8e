"""Embedding tables, sharded by rows: each id is looked up once, and gradients have only the rows in use.

Created on the host, in a strategy's scope; called in replica code. No other tensor has a table's size.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ...engine import hashing, logging
from ...engine.checkpoints.slices import RowTable
from ...engine.errors import UsageError
from ...engine.internals.tensorflow import is_only_replica
from ...engine.internals.variables import mark_shard, own_copy
from ...engine.reduction.per_replica import components
from ...engine.reduction.wire import fetch
from ...engine.step.context import step_context
from ...engine.step.gradients import NO_ROW, mark_unique
from . import admission, saved_rows
from .admission import Admission
from .rehash import MOVED, RESERVED_KEY, RowPlacement, by_row, rehash

_PIECE_BYTES = 4 << 20  # initialized at once: temporaries are several times as large
COMBINERS = (None, "sum", "mean", "sqrtn")
MIN_SHARD_BYTES = 256 << 10  # as in TensorFlow's MinSizePartitioner
UNKNOWN = ("row_0", "error")


def uniform(limit: float = 0.05) -> Callable:
    """Returns an initializer: uniform in [-limit, limit). The default one is Keras's."""
    return lambda samples: (2.0 * samples - 1.0) * limit


def zeros() -> Callable:
    """Returns an initializer: all 0."""
    return tf.zeros_like


class Embedding(RowTable):
    """A table [rows, width], float32, looked up by ids.

    Row r is row r // n of shard r % n. Ids follow a power law, and vocabularies have the frequent ones first:
    contiguous shards would send most of the traffic to the first server; here neighbours are on different ones.

    An update moves only the rows that its batch uses, whatever its rule says of a gradient of 0 (one by a Keras
    optimizer moves those that earlier batches used, too).

    Args:
      name: an identifier; the shards are the variables NAME/shard_0, NAME/shard_1, ...
      rows: the number of rows of the table.
      width: the number of values in a row.
      combiner: how the rows of an example with several ids are combined: "sum", "mean" or "sqrtn", as in
        `tf.nn.embedding_lookup_sparse`; None keeps them apart.
      hash_ids: ids are any integers or strings, and a hash chooses their row, which ids may share.
      unknown: handling of ids out of range: "row_0" uses that row, "error" ends the step.
      admit_after: ids are any integers or strings, and each gets its own row once training has seen it this many times
        (see `Admission`); before, and if no row is left, it shares row 0. 1 assigns a row at once. None uses ids as
        rows.
      evict_after: with `admit_after`, a row that training has not looked up for so many steps is freed, for other ids
        (see `parts.tables.eviction`); None keeps ids for ever.
      padding_id: the id that stands for none; needs a combiner.
      initializer: float32 [n, width] of some rows, from as many uniform samples in (0, 1): the quantile function of a
        distribution. Samples depend on the row, so that each shard can initialize its own rows.
      num_shards: None is one per server, but none smaller than `MIN_SHARD_BYTES`.

    Attributes:
      reduce_dtype: the dtype in which servers send rows in training; in evaluation they are exact.

    Raises:
      UsageError: an argument is out of range.

    Example:
      >>> users = Embedding("users", rows=1000, width=16)  # an attribute of a Trainer, whose model calls users(ids)
    """

    reduce_dtype = tf.float32

    def __init__(
        self,
        name: str,
        rows: int,
        width: int,
        *,
        combiner: str | None = None,
        hash_ids: bool = False,
        unknown: str = "row_0",
        admit_after: int | None = None,
        evict_after: int | None = None,
        padding_id: int | str | None = None,
        initializer: Callable | None = None,
        num_shards: int | None = None,
    ):
        super().__init__(name=name)
        self.rows = rows
        self.width = width
        self.combiner = combiner
        self.hash_ids = hash_ids
        self.unknown = unknown
        self.admit_after, self.evict_after = admit_after, evict_after
        self.padding_id = padding_id
        self.initializer = initializer or uniform()
        self.num_shards = num_shards
        self.shards: list[tf.Variable] = []
        self.admissions: list[Admission] = []
        self._check()

    @property
    def ids_are_rows(self) -> bool:
        return not self.hash_ids and self.admit_after is None

    def _check(self) -> None:
        for name, value in {"rows": self.rows, "width": self.width, "num_shards": self.num_shards or 1}.items():
            if value is None or value < 1:
                raise UsageError(f"embedding {self.name}: {name}={value} is not a size; use 1 or more")
        if self.combiner not in COMBINERS:
            raise UsageError(f"embedding {self.name}: combiner={self.combiner} is unknown; use sum, mean or sqrtn")
        if self.unknown not in UNKNOWN:
            raise UsageError(f"embedding {self.name}: unknown={self.unknown} is not an option; use row_0 or error")
        if self.padding_id is not None and self.combiner is None:
            raise UsageError(f"embedding {self.name}: padding_id={self.padding_id} needs a combiner; use e.g. sum")
        try:
            inspect.signature(self.initializer).bind(None)
        except TypeError:
            raise UsageError(
                f"embedding {self.name}: initializer takes {inspect.signature(self.initializer)}, and is called with "
                "samples [n, width], uniform in (0, 1), to return rows; use e.g. lambda samples: 0.1 * "
                "tf.math.ndtri(samples)"
            ) from None
        if self.evict_after is not None and (self.evict_after < 1 or self.admit_after is None):
            assigns = "set admit_after (of a model that comes with Crankshaft, table_capacity)"
            fix = "use 1 or more steps" if self.evict_after < 1 else assigns
            raise UsageError(f"embedding {self.name}: evict_after={self.evict_after} frees no row; {fix}")
        if self.admit_after is not None:
            self._check_admission(self.admit_after)

    def _check_admission(self, admit_after: int) -> None:
        if not 1 <= admit_after <= admission.MAX_ADMIT_AFTER:
            raise UsageError(
                f"embedding {self.name}: admit_after={self.admit_after} is out of range; use 1 to "
                f"{admission.MAX_ADMIT_AFTER}"
            )
        others = {"hash_ids": self.hash_ids, "unknown": self.unknown != "row_0"}
        if unfit := [name for name, is_set in others.items() if is_set]:
            raise UsageError(
                f"embedding {self.name}: {unfit[0]} can't be combined with admit_after={self.admit_after}, by "
                "which training assigns the rows; leave one of them out"
            )

    def check_accumulation(self, steps: int) -> None:
        """Raises UsageError if this table does not allow `accumulate_steps`. Call it in the strategy's scope."""
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        if self.admit_after and steps > 1 and replicas > 1:
            raise UsageError(
                f"embedding {self.name}: replicas exchange the ids to admit once per step, and there are "
                f"{replicas} with accumulate_steps={steps}; use 1, one replica, or a table without admit_after"
            )

    def build(self, seed: int, num_servers: int = 1) -> None:
        """Creates and initializes the shards. Call it once, in the strategy's scope.

        The values depend on the seed, the table's name and the row, not on the number of shards. Each shard samples
        only its rows, on its own device, piece by piece.
        """
        self._seed = seed
        most = max(1, 4 * self.rows * self.width // MIN_SHARD_BYTES)
        number = min(self.rows, self.num_shards or min(num_servers, most))
        for shard in range(number):
            shape = [len(range(shard, self.rows, number)), self.width]
            # Made without values, which it gets below in pieces: temporaries of all would be several times as large.
            variable = tf.Variable(
                lambda shape=shape: tf.raw_ops.Empty(shape=shape, dtype=tf.float32),
                shape=shape,
                dtype=tf.float32,
                name=f"{self.name}/shard_{shard}",
            )
            if number > 1 and isinstance(variable, tf.distribute.DistributedValues):
                raise UsageError(
                    f"embedding {self.name}: {number} shards, by num_shards or by the checkpoint to read, and each "
                    "replica has a copy of all rows; leave num_shards out, or use one device or parameter servers"
                )
            if tf.executing_eagerly():  # a rehearsal is in a graph that never runs: a large table has many pieces
                for piece in self._pieces(shape[0]):
                    self._initialize(variable, tf.range(piece.start, piece.stop, dtype=tf.int64), shard, number)
            mark_shard(variable, self)
            self.shards.append(variable)
            if self.admit_after is not None:
                self.admissions.append(Admission(self.admit_after, self.evict_after))
                self.admissions[-1].build(variable, reserved=int(shard == 0))

    def _pieces(self, rows: int) -> list[range]:
        """Divides rows into ranges; a range's initial values are sampled at once."""
        at_once = max(1, _PIECE_BYTES // (4 * self.width))
        return [range(first, min(first + at_once, rows)) for first in range(0, rows, at_once)]

    def _initialize(self, variable: tf.Variable, rows: tf.Tensor, shard: int, number: int) -> None:
        """Gives rows [n], int64, of one of `number` shards their first values, on all replicas of this process."""
        for copy in components(variable):
            with tf.device(copy.device):
                # By CRC-32, since Python's own hash of text differs between processes.
                samples = hashing.uniform(rows * number + shard, self.width, self._seed, zlib.crc32(self.name.encode()))
                tf.raw_ops.ResourceScatterUpdate(resource=copy.handle, indices=rows, updates=self.initializer(samples))

    def free_rows(self, step: int) -> Iterator[tuple[tf.Variable, tf.Tensor]]:
        """Frees the rows of ids that training has not looked up for `evict_after` steps, and gives them first values.

        Call it with `evict_after`, while no step computes. Yields (shard, rows [n] int64), some at a time, for the
        caller to reset their optimizer state.
        """
        for number, (shard, assigned) in enumerate(zip(self.shards, self.admissions, strict=True)):
            for rows in self.initialize_rows(number, assigned.free_stale(step)):
                yield shard, rows

    def saved_in(self, checkpoint: Any, key_of: Callable[[tf.Variable], str], may_grow: bool) -> Any:
        return saved_rows.find(self, checkpoint, key_of, may_grow)

    @staticmethod
    def write_rows(export: str, tables: Mapping[str, Any], since: str | None) -> None:
        from . import exported_tables

        exported_tables.write(export, tables, since)

    def initialize_rows(self, shard: int, rows: tf.Tensor) -> Iterator[tf.Tensor]:
        """Gives rows [n], int64, of a shard their first values, and yields them, some at a time."""
        for piece in self._pieces(rows.shape[0]):
            with tf.device(rows.device):
                some = rows[piece.start : piece.stop]
            self._initialize(self.shards[shard], some, shard, len(self.shards))
            yield some

    def place_rows(self, saved: Callable[[str], list[np.ndarray] | None]) -> RowPlacement:
        """Gives a checkpoint's ids rows here; `saved` reads a variable of the former shards' admissions by its name."""
        former = {name: parts for name in MOVED if (parts := saved(name)) is not None}
        placement = rehash(former, self.rows, len(self.shards))
        logging.warning(
            "embedding %s: %s ids move to a table of %s rows (shards: %d); %s get no row and share row 0; the counts "
            "of ids without a row start again from 0",
            *(self.name, f"{placement.num_placed:,}", f"{self.rows:,}", len(self.shards), f"{placement.num_dropped:,}"),
        )
        return placement

    @property
    def variables_for_gradients(self) -> list[tf.Variable]:
        """The shards: the variables of gradients and optimizer updates."""
        return list(self.shards)

    def figures(self) -> dict[str, tf.Tensor]:
        """Returns, with `admit_after`, int64 scalars: rows_given, and turned_away, how often an id found none free.

        With `evict_after` also rows_freed, of the whole run.
        """
        if not self.admissions:
            return {}
        tallies = [shard.read_tally() for shard in self.admissions]
        freed = [own_copy(shard.freed).read_value() for shard in self.admissions if self.evict_after]
        return {
            "rows_given": tf.add_n([tally.assigned for tally in tallies]),
            **({"rows_freed": tf.add_n(freed)} if freed else {}),
            "turned_away": tf.add_n([tally.turned_away for tally in tallies]),
        }

    def __call__(self, ids: Any, weights: Any = None, *, training: bool | None = None) -> Any:
        """Looks up ids, each distinct one once. Replica code.

        Args:
          ids: integers or strings: a tensor [batch] or [batch, k], or a `tf.RaggedTensor` with one ragged axis; or a
            nest of such, e.g. a dictionary by feature: features that share the table and the lookup.
          weights: None, or float32 of the same structure and shapes, for the combiner.
          training: whether these ids may get rows, with `admit_after`; else without effect.

        Returns:
          float32 in the structure of `ids`: [batch, width], and without a combiner [batch, k, width] for [batch, k].

        Raises:
          tf.errors.InvalidArgumentError: an unknown id, with `unknown="error"`.
        """
        if training is None and self.admissions:
            raise UsageError(
                f"embedding {self.name}: with admit_after, a lookup has to know whether it is for training; "
                "call it with training=training, as forward has it"
            )
        leaves = [self._flat(x, factors, training) for x, factors in _pairs(ids, weights)]
        rows = self._read(tf.concat([leaf.rows for leaf in leaves], 0))
        parts = tf.split(rows, [tf.size(leaf.rows) for leaf in leaves]) if len(leaves) > 1 else [rows]
        combined = [_combine(part, leaf, self.combiner) for part, leaf in zip(parts, leaves, strict=True)]
        return tf.nest.pack_sequence_as(ids, combined)

    def admission_keys(self, ids: Any) -> tf.Tensor:
        """Converts ids, integers or strings, to what a table with `admit_after` looks up, int64 of the same shape."""
        return admission.as_key(tf.convert_to_tensor(ids))

    def rows_by_key(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields the rows of a table with `admit_after` in pieces: keys [n], ascending, and vectors [n, width].

        The first row is row 0, shared by ids without one, with the key `SHARED_ROW_KEY`.
        """
        number = len(self.shards)
        keys = by_row([own_copy(shard.keys).numpy() for shard in self.admissions], RESERVED_KEY)
        rows = np.append(0, np.flatnonzero(keys > RESERVED_KEY))
        rows = rows[np.argsort(keys[rows])]

        def lookup(shard: int, rows: tf.Tensor) -> tf.Tensor:
            return tf.raw_ops.ResourceGather(
                resource=own_copy(self.shards[shard]).handle, indices=rows, dtype=tf.float32
            )

        for piece in self._pieces(len(rows)):
            some = rows[piece.start : piece.stop]
            yield keys[some], self._on_shards(some % number, lookup, some // number).numpy()

    def lookup_rows(self, ids: tf.Tensor, there: tf.Tensor | None = None, admits: bool = False) -> tf.Tensor:
        """Returns the row of each id, int64; arbitrary if `there` is False. `admits`: whether ids may get rows."""
        if self.admissions:
            return self._assigned_rows(ids, there, admits)
        if self.hash_ids:
            return hashing.bucket(ids, self.rows)
        if ids.dtype == tf.string:
            raise UsageError(
                f"embedding {self.name}: ids are strings; use hash_ids=True, or look them up before, by "
                "tf.keras.layers.StringLookup"
            )
        ids = tf.cast(ids, tf.int64)
        # TensorFlow's gather raises an error for such an id on a CPU, and gives zeros on a GPU.
        outside = (ids < 0) | (ids >= self.rows)
        rows = tf.where(outside, tf.zeros_like(ids), ids)
        if self.unknown == "row_0":
            return rows
        outside = outside if there is None else outside & there
        message = f"embedding {self.name}: an id is not in 0..{self.rows - 1}; correct the data, or use unknown=row_0"
        with tf.control_dependencies(
            [tf.debugging.Assert(~tf.reduce_any(outside), [message, tf.boolean_mask(ids, outside)], summarize=3)]
        ):
            return tf.identity(rows)

    def _assigned_rows(self, ids: tf.Tensor, there: tf.Tensor | None, admits: bool) -> tf.Tensor:
        keys = self.admission_keys(ids)
        if admits:
            seen = tf.ones_like(keys) if there is None else tf.cast(there, tf.int64)
            if is_only_replica() or step_context().mesh.all_replicas.size == 1:
                return self._sharded(keys, seen)
            if (has_examples := step_context().has_examples) is not None:
                seen *= tf.cast(has_examples, tf.int64)
            # All replicas assign the same rows to the same ids, so that their tables stay equal. An id in examples that
            # replicas share, each computing its shard of the model, is seen once.
            seen = step_context().mesh.zero_except_first_model_rank(seen)
            self._sharded(*step_context().mesh.all_replicas.concatenate([keys, seen]))
        return self._sharded(keys)

    def _sharded(self, keys: tf.Tensor, seen: tf.Tensor | None = None) -> tf.Tensor:
        """Looks up the row of each key, 0 for those without one; `seen`, 0 or 1 each, lets them get one."""
        unique, positions = tf.unique(keys)
        number = len(self.shards)

        def lookup(shard: int, keys: tf.Tensor, *occurrences: tf.Tensor) -> tf.Tensor:
            admitted = self.admissions[shard]
            rows = admitted.admit(keys, *occurrences) if occurrences else admitted.look_up(keys)
            return tf.where(rows < 0, tf.zeros_like(rows), rows * number + shard)

        # Hashed again, so that hashes are uniform within a shard.
        owner = hashing.bucket(tf.bitcast(hashing.mixed(unique), tf.int64), number)
        occurrences = [] if seen is None else [tf.math.unsorted_segment_sum(seen, positions, tf.size(unique))]
        return tf.gather(self._on_shards(owner, lookup, unique, *occurrences), positions)

    def _read(self, rows: tf.Tensor) -> tf.Tensor:
        """Reads rows [n], possibly repeated, as [n, width]; `NO_ROW` is zeros or any row."""
        if not self.shards:
            raise RuntimeError(f"embedding {self.name} is not built; call build_embeddings() in the trainer's build")
        if isinstance(self.shards[0], tf.distribute.DistributedValues) or step_context().mesh.all_replicas.size > 1:
            # The table is local, so looking up once saves nothing. And replicas exchange gradients of a known size
            # only: TensorFlow 2.21's collectives use the shape of a loop's first step for all steps.
            mine = own_copy(self.shards[0])
            if self.padding_id is None:
                return mine.sparse_read(rows)
            mine.sparse_read(rows[:0])  # tapes watch such reads, not handles
            return _read_some(mine.handle, rows)
        if self.padding_id is None:
            unique, positions = tf.unique(rows)
            return _expand(self._gather(unique), positions)
        # No id comes first, with a row of zeros before the table's.
        unique, positions = tf.unique(tf.concat([[tf.constant(NO_ROW, rows.dtype)], rows], 0))
        values = tf.pad(self._gather(unique[1:]), [[1, 0], [0, 0]])
        return _expand(values, positions[1:])

    def _gather(self, rows: tf.Tensor) -> tf.Tensor:
        """Gathers different rows [n] as [n, width], from each server its own."""
        number, dtype = len(self.shards), self.reduce_dtype if step_context().is_training else tf.float32

        def lookup(shard: int, rows: tf.Tensor) -> tf.Tensor:
            shard_rows = self.shards[shard]
            return fetch(shard_rows.sparse_read(mark_unique(rows)), shard_rows.device, dtype)

        # TFLite has no int64 division, which one shard does not need.
        owner, row_there = (rows % number, rows // number) if number > 1 else (rows, rows)
        return tf.ensure_shape(self._on_shards(owner, lookup, row_there), [None, self.width])

    def _on_shards(self, owner: tf.Tensor, lookup: Callable, *tensors: tf.Tensor) -> tf.Tensor:
        """Joins `lookup(shard, *parts)` of each shard's parts of tensors [n, ...], in their order, by `owner` [n]."""
        number = len(self.shards)
        if number == 1:
            return lookup(0, *tensors)
        owner = tf.cast(owner, tf.int32)
        parts = zip(*(tf.dynamic_partition(x, owner, number) for x in tensors), strict=True)
        indices = tf.dynamic_partition(tf.range(tf.size(owner)), owner, number)
        return tf.dynamic_stitch(indices, [lookup(shard, *part) for shard, part in enumerate(parts)])

    def _flat(self, ids: Any, weights: Any, admits: Any) -> _Leaf:
        flat = tf.reshape(_flat_values(ids), [-1])
        w = None if weights is None else tf.reshape(tf.cast(_flat_values(weights), tf.float32), [-1, 1])
        if self.padding_id is None:
            rows = self.lookup_rows(flat, None, admits)
        else:
            there = tf.not_equal(flat, tf.constant(self.padding_id, flat.dtype))
            rows = self.lookup_rows(flat, there, admits)
            rows = tf.where(there, rows, NO_ROW)
            w = tf.where(there[:, None], 1.0 if w is None else w, 0.0)
        return _Leaf(ids, rows, w)


@tf.custom_gradient
def _read_some(handle: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    """Reads rows [n] of a variable by its handle; `NO_ROW` reads any row, without a gradient."""

    def gradient(upstream):
        shape = tf.raw_ops.VariableShape(input=handle, out_type=tf.int64)
        return tf.IndexedSlices(upstream, rows, shape), None

    return tf.raw_ops.ResourceGather(resource=handle, indices=tf.maximum(rows, 0), dtype=tf.float32), gradient


@tf.custom_gradient
def _expand(rows: tf.Tensor, positions: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    """Computes `tf.gather(rows, positions)` with a dense gradient, one row per row, not slices to be added up."""
    number = tf.shape(rows)[0]

    def gradient(upstream):
        return tf.math.unsorted_segment_sum(upstream, positions, number), None

    return tf.gather(rows, positions), gradient


class _Leaf(NamedTuple):
    """One feature's ids as passed, the row of each [n], and their weights [n, 1] or None."""

    ids: Any
    rows: tf.Tensor
    weights: tf.Tensor | None


def _pairs(ids: Any, weights: Any) -> list[tuple]:
    """Returns (ids, weights or None) of each feature of a nest, in its order."""
    leaves = [x if _is_ragged(x) else tf.convert_to_tensor(x) for x in tf.nest.flatten(ids)]
    if weights is None:
        return [(leaf, None) for leaf in leaves]
    tf.nest.assert_same_structure(ids, weights)
    return list(zip(leaves, tf.nest.flatten(weights), strict=True))


def _combine(rows: tf.Tensor, leaf: _Leaf, combiner: str | None) -> Any:
    """Combines rows [n, width], one per id in order, into the lookup's result for this feature.

    `combiner` combines an example's rows: the sum of w_i e_i, divided by the sum of w_i ("mean") or by the root of the
    sum of w_i squared ("sqrtn"); zeros for an example without ids. None keeps them apart.
    """
    ids, w = leaf.ids, leaf.weights
    if combiner is None:
        if _is_ragged(ids):
            return ids.with_flat_values(rows)
        shaped = tf.reshape(rows, tf.concat([tf.shape(ids), [rows.shape[-1]]], 0))
        return tf.ensure_shape(shaped, [*ids.shape, rows.shape[-1]])
    if w is None and not _is_ragged(ids) and ids.shape.rank == 1:
        return rows
    summed = _total(rows if w is None else rows * w, ids)
    if combiner == "sum":
        return summed
    w = tf.ones_like(rows[:, :1]) if w is None else w
    divisor = _total(w, ids) if combiner == "mean" else tf.sqrt(_total(tf.square(w), ids))
    return tf.math.divide_no_nan(summed, divisor)


def _flat_values(x: Any) -> tf.Tensor:
    return x.flat_values if _is_ragged(x) else x


def _total(x: tf.Tensor, ids: Any) -> tf.Tensor:
    """Sums x [n, c] over each example's ids, to [batch, c]."""
    if _is_ragged(ids):
        return tf.math.unsorted_segment_sum(x, ids.value_rowids(), ids.nrows())
    k = 1 if ids.shape.rank == 1 else tf.shape(ids)[1]
    return tf.reduce_sum(tf.reshape(x, [tf.shape(ids)[0], k, x.shape[-1]]), 1)


def _is_ragged(x: Any) -> bool:
    return isinstance(x, tf.RaggedTensor)
