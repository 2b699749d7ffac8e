"""Gives a table's ids rows in another number of rows or shards, by the hashes and rules of `Admission`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

BUCKET = 16  # rows: 128 bytes of keys, read at once
FREE, RESERVED_KEY = -(2**63), -(2**63) + 1  # keys of free rows, and of rows that no id may get
NEVER = -1  # a stamp
MOVED = ("keys", "tally", "stamps", "freed")  # variables of an `Admission`; the rest begin again


class RowPlacement(NamedTuple):
    """Where the ids of a checkpoint's table have their rows in the table here.

    Attributes:
      rows: for each row of the former table, its row here, or -1 for a row without an id and for an id without a row.
      values: the values of each shard's admission here, by the names of its variables; the others begin again.
      free: the rows of each shard here that have no id.
      num_placed: how many ids have a row.
      num_dropped: how many ids found no row.
    """

    rows: np.ndarray
    values: list[dict[str, np.ndarray]]
    free: list[np.ndarray]
    num_placed: int
    num_dropped: int


def rehash(former: Mapping[str, Sequence[np.ndarray]], rows: int, num_shards: int) -> RowPlacement:
    """Gives ids the rows that training would in an empty table, the ones that were looked up last first.

    Args:
      former: values of each former shard's `Admission`, by the names of its variables, those of `MOVED`; without stamps
        ids are placed in the order of their rows.
    """
    keys = by_row(former["keys"], RESERVED_KEY)
    before = np.flatnonzero(keys > RESERVED_KEY)
    stamps = by_row(former.get("stamps", [np.full(part.size, NEVER) for part in former["keys"]]), NEVER)
    before = before[np.argsort(-stamps[before], kind="stable")]
    owner = mixed(mixed(keys[before])) % np.uint64(num_shards)
    after, values, free = np.full(len(keys), -1), list[dict[str, np.ndarray]](), list[np.ndarray]()
    after[0] = 0  # shared by ids without a row
    for shard in range(num_shards):
        size, reserved = len(range(shard, rows, num_shards)), int(shard == 0)
        mine = before[owner == shard]
        found = _place_in_shard(keys[mine], size, reserved)
        after[mine] = np.where(found < 0, -1, found * num_shards + shard)
        mine, found = mine[found >= 0], found[found >= 0]
        keys_here = np.full(-(-size // BUCKET) * BUCKET, FREE)
        keys_here[:reserved] = keys_here[size:] = RESERVED_KEY
        keys_here[found] = keys[mine]
        free.append(np.flatnonzero(keys_here == FREE))
        stamps_here = np.full_like(keys_here, NEVER)
        stamps_here[found] = stamps[mine]
        # What was counted in all shards is kept in the first.
        tally, freed = ((shard == 0) * np.sum(former.get(name, [0]), 0) for name in ("tally", "freed"))
        tally[0], tally[2] = len(found), 0  # assigned; sighted since the counts began
        values.append({"keys": keys_here.reshape([-1, BUCKET]), "tally": tally, "stamps": stamps_here, "freed": freed})
    placed = int(np.count_nonzero(after > 0))
    return RowPlacement(after, values, free, placed, len(before) - placed)


def mixed(keys: np.ndarray) -> np.ndarray:
    """Hashes int64 or uint64 to uint64, as `hashing.mixed`."""
    x = keys.view(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    return x ^ (x >> np.uint64(31))


def two_buckets(ids: np.ndarray, buckets: int) -> np.ndarray:
    """Returns the two buckets of each id [n] in a shard, int64 [n, 2], as `hashing.hash_columns`."""
    hashes = mixed(ids)
    low, high = hashes & np.uint64(0xFFFFFFFF), hashes >> np.uint64(32)
    return np.stack([low % np.uint64(buckets), (low + high) % np.uint64(buckets)], 1).astype(np.int64)


def by_row(values: Sequence[np.ndarray], filling: int) -> np.ndarray:
    """Returns a value per row of the table: row r is row r // n of shard r % n."""
    joined = np.full([max(part.size for part in values), len(values)], filling)
    for shard, part in enumerate(values):
        joined[: part.size, shard] = part.ravel()
    return joined.ravel()


def _place_in_shard(ids: np.ndarray, rows: int, reserved: int) -> np.ndarray:
    """Returns the row of each id in a shard, or -1.

    Ids are placed in turns of one per bucket, on average; in each round of a turn a bucket gives its next row to the
    first of the ids that choose it.
    """
    buckets = -(-rows // BUCKET)
    used, ends = np.zeros(buckets, np.int64), np.full(buckets, BUCKET)
    used[0], ends[-1] = reserved, rows - (buckets - 1) * BUCKET
    found, first = np.full(len(ids), -1), np.empty(buckets, np.int64)
    for begin in range(0, len(ids), buckets):
        if (used == ends).all():
            break
        pending = np.arange(begin, min(begin + buckets, len(ids)))
        choices = two_buckets(ids[pending], buckets)
        while len(pending):
            free = (ends - used)[choices]
            bucket = np.where(free[:, 1] > free[:, 0], choices[:, 1], choices[:, 0])
            first[bucket[::-1]] = np.arange(len(bucket))[::-1]  # the last one that is assigned stays
            gets = (first[bucket] == np.arange(len(bucket))) & free.any(1)
            found[pending[gets]] = bucket[gets] * BUCKET + used[bucket[gets]]
            used[bucket[gets]] += 1
            waits = free.any(1) & ~gets
            pending, choices = pending[waits], choices[waits]
    return found
