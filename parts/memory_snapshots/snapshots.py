"""Takes snapshots in memory, so that a failure between two checkpoints costs seconds of steps."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Sequence

from ...engine.hooks.base import AgreedStep, Hook, RequestBit, Status
from ...engine.hooks.saving import state_to_save
from .in_memory import Snapshots

LEAST_SECONDS = 1.0  # between two
COST = 0.005  # the fraction of the time that snapshots may take
NEWEST = 3  # number of the newest snapshots whose cost sets the period


class InMemory(Hook):
    """Takes a snapshot when the first process's clock requests one, at the step at which all processes know it.

    It comes after the hooks that save, so that a snapshot includes the others' changes at the same step. The other
    hooks prepare first: a snapshot has finite weights, equal on all replicas, like a checkpoint.

    Args:
      every_seconds: the period; None: as often as takes 0.5 % of the time, by the cost of the newest ones, except that
        of the first, which compiles; and at most every second.
    """

    name = "in_memory"
    spent_on = "checkpoints"

    def __init__(self, snapshots: Snapshots, every_seconds: float | None, hooks: Sequence[Hook]):
        self.snapshots = snapshots
        self.hooks = hooks
        self._every_seconds = every_seconds
        self._requested_at = 0.0
        self._began_at = 0.0  # workers of parameter servers may wait from here for those that complete their steps
        self._seconds: float | None = None  # that the newest took of the loop
        self._costs: collections.deque[float] = collections.deque(maxlen=NEWEST)  # without the first's
        self._is_first = True
        self._agreed = AgreedStep(RequestBit.SNAPSHOT)

    def begin(self, status: Status) -> None:
        self._requested_at, self._agreed = time.monotonic(), AgreedStep(RequestBit.SNAPSHOT)

    def rewind(self, status: Status) -> None:
        self.begin(status)
        self.snapshots.clear()  # they are of steps that the run has left

    def next_due(self, step: int, status: Status) -> int | None:
        return self._agreed.next_due(step)

    def __call__(self, status: Status) -> None:
        if self._agreed.request(status, self._is_time):
            self._began_at = time.monotonic()
        if self._agreed.is_reached(status):
            self.snapshots.take(status.step, state_to_save(dataclasses.replace(status, in_memory=True), self.hooks))
            self._seconds = time.monotonic() - self._began_at

    def _is_time(self) -> bool:
        """Returns whether the next is due, and if so begins to count again."""
        if self.snapshots.is_off or self.snapshots.is_busy:
            return False
        if self._seconds is not None:  # of the newest snapshot: of the loop, and of the thread that copied
            if not self._is_first:
                self._costs.append(self._seconds + self.snapshots.copy_seconds)
            self._seconds, self._is_first = None, False
        now, every = time.monotonic(), self._every_seconds
        if every is None:  # the least of some: other programs' work is not a snapshot's
            every = max(LEAST_SECONDS, min(self._costs, default=0.0) / COST)
        if now - self._requested_at < every:
            return False
        self._requested_at = now
        return True

    def end(self, status: Status) -> None:
        self.snapshots.clear()  # the end is saved

    def close(self) -> None:
        self.snapshots.close()
