"""Id admission: assigns rows to ids seen in training, by a hash table in plain variables beside a shard's rows.

Replica code, run by the shard's host; created on the host, in a strategy's scope, which also frees rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from ...engine import hashing
from ...engine.errors import UsageError
from ...engine.internals.variables import own_copy, server_device, variable_path
from ...engine.reduction.per_replica import components
from ...engine.step.context import step_context
from .rehash import BUCKET, FREE, RESERVED_KEY

MAX_ADMIT_AFTER = 255  # higher counts are not reached between two halvings, in a small table
SHARED_ROW_KEY = RESERVED_KEY  # of row 0, the one of them that is looked up: by all ids without a row
_SKETCH_DEPTH = 4
_SKETCH_CELLS = 2  # per row of the shard; int32, since workers can't initialize smaller types equally
_LEAST_CELLS = 1024


class Tally(NamedTuple):
    """The counts of a shard, int64 scalars.

    Attributes:
      assigned: rows that have an id.
      turned_away: how often an id that should get a row found none free.
      sighted: ids counted since the last halving.
    """

    assigned: tf.Tensor
    turned_away: tf.Tensor
    sighted: tf.Tensor


class Admission(tf.Module):
    """The assignment of one shard's rows to ids, any int64. It never changes, until the row is freed.

    An id's row is one of the 32 in two buckets chosen by hashes, in the emptier one (Azar et al. 1999, Balanced
    Allocations). Ids begin to find none when more than 80 % of the rows are assigned. So a lookup reads 32 keys,
    however full the table is, and nothing moves or grows: the state is variables of fixed size, saved like any others.
    A checkpoint of another size, or number of shards, is read by `rehash`.

    Ids without a row are counted in a count-min sketch (Cormode, Muthukrishnan 2005; updated conservatively: Estan,
    Varghese 2002) of 32 bytes per row. It never underestimates, but may overestimate when full. So all counts are
    halved after 2 occurrences per row of the shard (TinyLFU: Einziger et al. 2017): recent occurrences count most.

    Args:
      admit_after: occurrences until an id gets a row; 1 counts nothing.
      evict_after: the number of steps without a look-up in training after which a row may be freed; None is never.

    Attributes, with `evict_after`:
      stamps: int64 [buckets x 16], the step at which training last looked up each row; -1 for none.
      freed: int64 scalar, how many rows were freed so far.
    """

    optional_in_checkpoint = ("stamps", "freed")  # a run may get `evict_after`, or lose it

    def __init__(self, admit_after: int, evict_after: int | None):
        super().__init__(name="admission")
        self.admit_after, self.evict_after = admit_after, evict_after
        self.stamps: tf.Variable | None = None
        self.freed: tf.Variable | None = None

    def build(self, shard: tf.Variable, reserved: int) -> None:
        """Creates the variables, beside a shard [rows, width]. Its first `reserved` rows are never assigned."""
        rows, path = shard.shape[0], variable_path(shard)
        self._buckets = -(-rows // BUCKET)
        self._cells = max(_LEAST_CELLS, _SKETCH_CELLS * rows)
        if "GPU" in (shard.device or ""):
            raise UsageError(
                f"{path} is on {shard.device}, and admit_after needs its table in a host's memory; train on CPUs, on "
                "parameter servers, or with hashed ids"
            )
        # Workers share a server's variables, and look up and assign rows there in turn.
        self._server = server_device(shard)

        def keys() -> tf.Tensor:
            parts = [(reserved, RESERVED_KEY), (rows - reserved, FREE), (self._buckets * BUCKET - rows, RESERVED_KEY)]
            parts = [tf.fill([length], tf.constant(key, tf.int64)) for length, key in parts]
            return tf.reshape(tf.concat(parts, 0), [self._buckets, BUCKET])

        with tf.distribute.get_strategy().extended.colocate_vars_with(shard):
            self.keys = _variable(keys, f"{path}/keys")
            self.tally = _variable(lambda: tf.zeros([len(Tally._fields)], tf.int64), f"{path}/tally")
            if self.evict_after:
                self.stamps = _variable(lambda: -tf.ones([self._buckets * BUCKET], tf.int64), f"{path}/stamps")
                self.freed = _variable(lambda: tf.zeros([], tf.int64), f"{path}/freed")
            if self.admit_after > 1:
                cells = _SKETCH_DEPTH * self._cells
                self.counts = _variable(lambda: tf.zeros([cells], tf.int32), f"{path}/counts")
        with self._beside_shard():
            self._turn = tf.CriticalSection(name="turn") if self._server else None

    @property
    def undoable(self) -> list[tf.Variable]:
        """This replica's variables, which a skipped step leaves as they were; none on a server, shared by workers."""
        return [] if self._server else [own_copy(variable) for variable in self.variables if variable.shape.rank]

    def look_up(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns the row of each id [n] in this shard, int64 [n], or -1."""
        with self._beside_shard():
            return self._find(ids)

    def admit(self, ids: tf.Tensor, occurrences: tf.Tensor) -> tf.Tensor:
        """Returns rows as `look_up`, after assigning rows to ids that were seen often enough.

        Args:
          ids: [n] int64, each once.
          occurrences: [n] int64, how often each is seen now; 0 keeps its count.
        """
        step = step_context().step if self.evict_after else tf.zeros([], tf.int64)
        message = tf.concat([ids, occurrences, [step]], 0) if self._server else None  # one, not three
        # A step on a server must have read how many rows are freed before it finds rows.
        freed = [] if self.freed is None else step_context().start_values.read_before(self.freed)
        with self._beside_shard(), tf.control_dependencies(freed):
            if message is not None:
                number = (tf.size(message) - 1) // 2
                ids, occurrences, step = message[:number], message[number:-1], message[-1]
            rows = self._find(ids)
            new = (rows < 0) & (occurrences > 0)

            def assign() -> tf.Tensor:
                self._in_turn(lambda: self._assign(tf.boolean_mask(ids, new), tf.boolean_mask(occurrences, new)))
                return self._find(ids)

            rows = tf.cond(tf.reduce_any(new), assign, lambda: rows)
            if self.evict_after:
                indices = tf.maximum(rows, 0)
                updates = tf.where((rows >= 0) & (occurrences > 0), step, -1)  # -1 leaves a stamp as it is
                _note(self.stamps, indices)
                tf.raw_ops.ResourceScatterMax(resource=own_copy(self.stamps).handle, indices=indices, updates=updates)
            return rows

    def read_freed(self) -> tuple[tf.Tensor, tf.Variable] | None:
        """Reads `freed`, and returns it with its variable, if that is on a server; else None."""
        with self._beside_shard():
            return (self.freed.read_value(), self.freed) if self.freed is not None and self._server else None

    def begin_stamps(self, step: int) -> None:
        """Stamps rows with a step that have no stamp yet, or one of another run, not before the step."""
        for stamps in components(self.stamps):
            with tf.device(stamps.device):
                before = stamps.read_value()
                stamps.assign(tf.where((before < 0) | (before >= step), tf.constant(step, tf.int64), before))

    def free_stale(self, step: int) -> tf.Tensor:
        """Frees the rows of ids that none of the last `evict_after` steps before `step` has looked up.

        It does so for all replicas of this process, and returns the rows, int64 [n].
        """
        assert self.evict_after  # else no row is freed
        keys, stamps = own_copy(self.keys), own_copy(self.stamps)
        with tf.device(keys.device):
            is_stale = (tf.reshape(keys, [-1]) > RESERVED_KEY) & (stamps < step - self.evict_after)
            rows = tf.reshape(tf.where(is_stale), [-1])
            free = tf.fill(rows.shape, tf.constant(FREE, tf.int64))
        # No step finds the rows any more once they are counted, and none that has found them updates them.
        for keys, tally, freed in zip(*map(components, (self.keys, self.tally, self.freed)), strict=True):
            with tf.device(keys.device):
                indices = tf.stack([rows // BUCKET, rows % BUCKET], 1)
                tf.raw_ops.ResourceScatterNdUpdate(ref=keys.handle, indices=indices, updates=free)
                tally.assign_add(tf.constant(Tally(-rows.shape[0], 0, 0), tf.int64))
                freed.assign_add(rows.shape[0])
        return rows

    def read_tally(self) -> Tally:
        """Returns the counts, for people."""
        return Tally(*tf.unstack(own_copy(self.tally).read_value()))

    def _find(self, ids: tf.Tensor) -> tf.Tensor:
        buckets = self._sketch_buckets(ids)
        same = tf.reshape(tf.equal(self._keys_in(buckets), ids[:, None, None]), [-1, 2 * BUCKET])
        column = tf.argmax(same, 1)
        bucket = tf.where(column < BUCKET, buckets[:, 0], buckets[:, 1])
        return tf.where(tf.reduce_any(same, 1), bucket * BUCKET + column % BUCKET, -1)

    def _assign(self, ids: tf.Tensor, occurrences: tf.Tensor) -> tf.Tensor:
        """Assigns rows to the ids that should have one. Returns the number of assigned rows."""
        still = self._find(ids) < 0  # another worker may have assigned rows meanwhile
        ids, occurrences = tf.boolean_mask(ids, still), tf.boolean_mask(occurrences, still)
        if self.admit_after > 1:
            ids = tf.boolean_mask(ids, self._count(ids, occurrences) >= self.admit_after)
        # One iteration at a time: each has to find the keys that the one before has written.
        any_length = tf.TensorShape([None])
        tf.while_loop(lambda ids: tf.size(ids) > 0, lambda ids: [self._place(ids)], [ids], [any_length], 1)
        return self.read_tally().assigned

    def _place(self, ids: tf.Tensor) -> tf.Tensor:
        """Assigns one row per bucket to one of the ids that choose it, so that each sees the rows that are left.

        Returns the ids that may still get a row.
        """
        buckets = self._sketch_buckets(ids)
        free = tf.cast(tf.equal(self._keys_in(buckets), FREE), tf.int32)
        emptier = tf.argmax(tf.reduce_sum(free, 2), 1)
        bucket, free = (tf.gather(x, emptier, batch_dims=1) for x in (buckets, free))
        room = tf.reduce_any(free > 0, 1)
        ids, bucket, free = (tf.boolean_mask(x, room) for x in (ids, bucket, free))
        chosen, positions = tf.unique(bucket)
        indices = tf.range(tf.size(ids))
        first = tf.math.unsorted_segment_min(indices, positions, tf.size(chosen))
        _note(self.keys, chosen)
        tf.raw_ops.ResourceScatterNdUpdate(
            ref=own_copy(self.keys).handle,
            indices=tf.stack([chosen, tf.argmax(tf.gather(free, first), 1)], 1),
            updates=tf.gather(ids, first),
        )
        self._add_to_tally(Tally(tf.size(first), tf.math.count_nonzero(~room), 0))
        return tf.boolean_mask(ids, tf.gather(first, positions) != indices)

    def _count(self, ids: tf.Tensor, occurrences: tf.Tensor) -> tf.Tensor:
        """Returns how often each id has been seen, at most 255, int64 [n]."""
        starts = self._cells * tf.range(_SKETCH_DEPTH, dtype=tf.int64)
        cells = hashing.hash_columns(ids, [1, *[self._cells] * _SKETCH_DEPTH])[:, 1:] + starts
        counts = own_copy(self.counts).handle
        before = tf.raw_ops.ResourceGather(resource=counts, indices=cells, dtype=tf.int32)
        seen = tf.minimum(tf.cast(tf.reduce_min(before, 1), tf.int64) + occurrences, MAX_ADMIT_AFTER)
        updates = tf.broadcast_to(tf.cast(seen, tf.int32)[:, None], tf.shape(cells))
        _note(self.counts, tf.reshape(cells, [-1]))
        tf.raw_ops.ResourceScatterMax(resource=counts, indices=cells, updates=updates)
        self._add_to_tally(Tally(0, 0, tf.reduce_sum(occurrences)))
        sighted = self.read_tally().sighted

        def halve() -> None:
            _note(self.counts, tf.range(self.counts.shape[0], dtype=tf.int64))
            all_counts = tf.raw_ops.ReadVariableOp(resource=counts, dtype=tf.int32)
            tf.raw_ops.AssignVariableOp(resource=counts, value=all_counts // 2)
            self._add_to_tally(Tally(0, 0, -(sighted // 2)))

        tf.cond(sighted > self._cells, halve, lambda: None)
        return seen

    def _add_to_tally(self, more: Tally) -> None:
        value = tf.stack([tf.cast(x, tf.int64) for x in more])
        _note(self.tally, tf.range(len(Tally._fields), dtype=tf.int64))
        tf.raw_ops.AssignAddVariableOp(resource=own_copy(self.tally).handle, value=value)

    def _sketch_buckets(self, ids: tf.Tensor) -> tf.Tensor:
        return hashing.hash_columns(ids, [self._buckets] * 2)

    def _keys_in(self, buckets: tf.Tensor) -> tf.Tensor:
        """Returns the keys [..., 16] of buckets [...]."""
        return tf.raw_ops.ResourceGather(resource=own_copy(self.keys).handle, indices=buckets, dtype=tf.int64)

    def _in_turn(self, function: Callable[[], tf.Tensor]) -> None:
        if self._turn is None:
            function()
        else:
            self._turn.execute(function)

    def _beside_shard(self):
        return tf.device(self._server) if self._server else contextlib.nullcontext()


def as_key(ids: tf.Tensor) -> tf.Tensor:
    """Converts ids, integers or strings, to int64 for `Admission`.

    The three smallest integers share a key; two strings do with a probability of 2^-63.
    """
    if ids.dtype == tf.string:
        return hashing.bucket(ids, 2**63 - 1)
    return tf.maximum(tf.cast(ids, tf.int64), RESERVED_KEY + 1)


def _note(variable: tf.Variable, rows: tf.Tensor) -> None:
    """Notes rows that are written next, by their indices, so that a skipped step can undo it."""
    step_context().note_write(own_copy(variable), rows)


def _variable(initial_value: Callable, name: str) -> tf.Variable:
    return tf.Variable(initial_value, trainable=False, name=name)
