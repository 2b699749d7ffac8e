"""Where a checkpoint has a table's rows: in another number of shards, or with other rows for the same ids."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from ...engine.checkpoints.objects import ATTRIBUTE, Key, tracked_children
from ...engine.checkpoints.slices import ShardRows


class SavedTable:
    """A table here, and where a checkpoint has it.

    Args:
      table: the `Embedding`.
      checkpoint: the checkpoint's entries, see `RowTable.saved_in`.
      prefixes: the prefix of the checkpoint's keys for each shard.
      admissions: the prefix of the checkpoint's keys for each shard's admission, if ids get other rows here.
      grows: whether the table may have more rows here; those that the checkpoint lacks stay as they are.
    """

    def __init__(
        self, table: Any, checkpoint: Any, prefixes: tuple[str, ...], admissions: tuple[str, ...], grows: bool
    ):
        self.shards, self.prefixes, self.admissions = table.shards, prefixes, admissions
        self._table, self._reader, self._grows = table, checkpoint.reader, grows
        # Once for all shards and slots, and only if the state fits: it reads the keys of the whole table.
        self._placement = functools.cache(functools.partial(table.place_rows, self._saved))

    @property
    def moves_rows(self) -> bool:
        """Whether a shard is not simply read: ids get other rows, or the table may have more."""
        return bool(self.admissions) or self._grows

    def values(self) -> dict[int, Key]:
        """Returns how the variables of admissions are read where ids get other rows, by the variables' ids."""
        if not self.admissions:
            return {}
        return {
            id(variable): functools.partial(self._admission_value, shard, name, variable)
            for shard, admission in enumerate(self._table.admissions)
            for name, variable in tracked_children(admission, is_root=False)
        }

    def fit(self, rows: ShardRows, size: int) -> tuple[ShardRows, int, str]:
        """Fits the checkpoint's rows to a shard, or its slot, of `size` rows.

        Returns:
          The rows to read; the number of rows that the shard should have for them; a note on a shard that grows.
        """
        if self.admissions:
            return rows._replace(place=lambda: self._placement().rows), size, ""
        if self._grows and rows.num_rows < size:
            return rows, size, f" ({rows.num_rows:,} of {size:,} rows)"
        return rows, rows.num_rows, ""

    def initialize_free_rows(self) -> Iterator[tuple[tf.Variable, tf.Tensor]]:
        """Gives rows that no id has got their first values; yields each shard with some of its rows.

        Such a row may hold the former values of an id that has moved.
        """
        if self.admissions:
            for number, (shard, free) in enumerate(zip(self.shards, self._placement().free, strict=True)):
                for rows in self._table.initialize_rows(number, tf.constant(free)):
                    yield shard, rows

    def _saved(self, name: str) -> list[np.ndarray] | None:
        """Reads a variable of each of the checkpoint's admissions; None if it has none."""
        keys = [f"{prefix}{name}/{ATTRIBUTE}" for prefix in self.admissions]
        return [*map(self._reader.get_tensor, keys)] if self._reader.has_tensor(keys[0]) else None

    def _admission_value(self, shard: int, name: str, variable: tf.Variable) -> np.ndarray:
        """The value of an admission's variable; what `place_rows` leaves out, such as counts, begins again at 0."""
        values = self._placement().values[shard]
        return values.get(name, np.zeros(variable.shape, variable.dtype.as_numpy_dtype))


def find(table: Any, checkpoint: Any, key_of: Callable[[tf.Variable], str], may_grow: bool) -> SavedTable | None:
    """Finds where a checkpoint has a table; see `RowTable.saved_in`."""

    def numbered(variable: tf.Variable, ending: str = "") -> tuple[str, ...]:
        """Returns the keys' prefixes of all parts of a list, by a variable under its first one."""
        key = key_of(variable)
        if not key.endswith(end := f"/0/{ending}{ATTRIBUTE}"):
            return ()  # absent, or under another attribute than the table's
        prefixes = (f"{key.removesuffix(end)}/{number}/" for number in itertools.count())
        return tuple(itertools.takewhile(lambda prefix: prefix + ending + ATTRIBUTE in checkpoint.specs, prefixes))

    if not (prefixes := numbered(table.shards[0])):
        return None
    sizes = [checkpoint.specs[prefix + ATTRIBUTE][0][0] for prefix in prefixes]
    admissions = numbered(table.admissions[0].keys, "keys/") if table.admissions else ()
    # In shards of the same sizes each id keeps its row, and nothing has to move.
    if sizes == [shard.shape[0] for shard in table.shards] or len(admissions) != len(prefixes):
        admissions = ()
    return SavedTable(table, checkpoint, prefixes, admissions, may_grow and table.ids_are_rows)
