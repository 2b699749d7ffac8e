"""Frees the rows of embedding tables whose ids training no longer sees."""

from __future__ import annotations

import tensorflow as tf

from ...engine.errors import UsageError
from ...engine.hooks.base import Periodic, Status
from ...engine.inventory import Inventory


def make_eviction(inventory: Inventory) -> list[Eviction]:
    """Makes the hook of a trainer's tables; none if no table has `evict_after`."""
    return [Eviction(inventory)] if any(table.evict_after for table in inventory.tables.values()) else []


class Eviction(Periodic):
    """Sweeps tables with `evict_after`=N at multiples of N // 4: frees each row that no lookup of N steps has used.

    It is the first of the hooks, so that what they evaluate and save is what the next step begins with.
    Steps end before a sweep, with parameter servers all leases, as before a checkpoint: a gradient of the id that loses
    a row is applied before it is freed, and never to the id that gets it.
    """

    name = "eviction"

    def __init__(self, inventory: Inventory):
        self.tables = [table for table in inventory.tables.values() if table.evict_after]
        self._optimizers = inventory.optimizers
        super().__init__(0, more={self._period(table) for table in self.tables})

    @staticmethod
    def _period(table):
        return max(1, table.evict_after // 4)

    def begin(self, status: Status) -> None:
        for table in self.tables:
            for shard, admission in zip(table.shards, table.admissions, strict=True):
                admission.begin_stamps(status.step)
                self._reset(shard, tf.zeros([0], tf.int64))  # raises now what it would raise in a sweep

    def act(self, status: Status) -> None:
        for table in self.tables:
            if status.step % self._period(table) == 0:
                with status.state.moving_to(status.step):
                    for shard, rows in table.free_rows(status.step):
                        self._reset(shard, rows)

    def _reset(self, shard: tf.Variable, rows: tf.Tensor) -> None:
        updating = [x for x in self._optimizers.values() if any(shard is v for v in x.all_variables)]
        if not updating:
            raise UsageError(
                f"{shard.name}: evict_after resets the optimizer state of freed rows, and none of the trainer's "
                "optimizers made by make_optimizer has this variable; pass it one, or leave evict_after out"
            )
        for optimizer in updating:
            optimizer.reset_rows(shard, rows)
