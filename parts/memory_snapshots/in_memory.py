"""Snapshots of a run's state in memory: checkpoints that are written there, and to the disk only if needed.

One has what a checkpoint has, and its values are read in the same way (`snapshot.take`). A process keeps all values
that it has, not only those that it would write to a checkpoint: if another's memory is lost, it writes them instead.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import tensorflow as tf

from ...engine import logging
from ...engine.checkpoints import manifest as manifests
from ...engine.checkpoints import slices, snapshot
from ...engine.checkpoints.slices import SlicedVariable
from ...engine.checkpoints.store import Checkpoints
from ...engine.errors import SaveError, reason
from ...engine.internals.variables import CompiledReader
from ...engine.machine import memory, threads
from .snapshot_memory import Slots, StoredSnapshot, newest_whole

_MEMORY_FRACTION = 0.25  # of the available memory, which snapshots may take


class Snapshots:
    """The snapshots of a run, in this process's memory.

    Args:
      exchange: the exchange among all processes that train this state (`Processes.exchange`).
      may_save: whether this process may write its own to the run's folder once the first process is lost.

    Attributes:
      copy_seconds: the seconds of CPU time that the newest snapshot took of a thread of its own.
      is_off: whether there is too little memory.
    """

    def __init__(self, checkpoints: Checkpoints, slots: Slots, exchange: Callable[[Any], list], may_save: bool = True):
        self._checkpoints, self._slots, self._exchange = checkpoints, slots, exchange
        self._may_save = may_save
        self._copying: Future | None = None
        self._using = threading.Lock()  # the slots: none is written while one is read
        self._read_here = CompiledReader(slices.read_on_host)
        self.copy_seconds = 0.0
        self.is_off = False

    @property
    def is_busy(self) -> bool:
        """Whether one is being copied."""
        return self._copying is not None and not self._copying.done()

    def take(self, step: int, host_state: dict) -> None:
        """Takes a snapshot of the current state; returns when the variables may change again. All processes call it.

        Args:
          host_state: plain JSON and NumPy scalars, the same in all processes, read at once.
        """
        self.wait()
        checkpoints = self._checkpoints
        stored = manifests.as_read(checkpoints.about, host_state)
        entries, variables = snapshot.take(checkpoints.state, self._read)
        if self.is_off or self._lacks_memory(entries, variables):
            return
        parts = sorted(frozenset().union(*(entry.writers for entry in entries if entry.is_sharded)))
        record = {
            **stored,
            "variables": variables,
            "parts": parts,
            "run": self._run(),
            "keep": checkpoints.keep,
            "process": checkpoints.writer.process,
            "attempt": checkpoints.writer.attempt,
            "may_save": self._may_save,
        }
        may_change = threading.Event()
        self._copying = threads.call(f"snapshot-{step}", self._copy, step, record, entries, may_change)
        # The thread still reads these from the variables, which the next step changes.
        if any(entry.is_live for entry in entries):
            may_change.wait()

    def wait(self) -> None:
        """Waits until nothing is being copied."""
        if self._copying is not None:
            self._copying.result()
            self._copying = None

    def descriptors(self) -> list[int]:
        """Returns the files of the slots, in which nothing is being written."""
        self.wait()
        return self._slots.descriptors

    def clear(self) -> None:
        """Forgets all snapshots: the run has ended, or has gone back to an earlier state."""
        self.wait()
        with self._using:
            self._slots.clear()

    def close(self) -> None:
        """Waits until nothing is being copied, and frees the memory, if this process has made it."""
        self.wait()
        with self._using:
            self._slots.close()

    def write_newest(self, after: int) -> int | None:
        """Writes the newest complete snapshot as a checkpoint. All processes call it.

        Returns:
          Its step; None if there is none after that of the checkpoint, or the first process can't write it.
        """
        stored = {snapshot.step: snapshot for snapshot in self._snapshots_of_run() if snapshot.step > after}
        # Steps as text, the only keys of JSON.
        parts = self._exchange({str(step): snapshot.part for step, snapshot in stored.items()})
        # All compute the same from these, so that all take part in writing the same step, or none does.
        found = newest_whole([{int(step): part for step, part in its.items()} for its in parts])
        if found is None:
            return None
        step, (first, *more) = found
        process = self._checkpoints.writer.process
        mine = stored[step] if process in (first, *more) else None
        record: Any = mine.record if mine else {}
        if 1 + len(more) < len(parts):  # a process that has lost its own needs the record too
            record = self._exchange(record if process == first else None)[first]
        entries = snapshot_entries(mine, all_of_them=process == first) if mine else []
        others = frozenset(
            {first, *(process for process in more if parts[process][str(step)][1] in record["parts"])} - {0}
        )
        is_written = True
        try:
            self._checkpoints.write(step, entries, others, for_manifest(record))
        except SaveError as error:
            is_written = False
            logging.warning("the snapshot of step %d is lost: %s", step, error)
        # All processes use process 0's decision.
        return step if self._exchange(is_written)[0] else None

    def write_alone(self) -> int | None:
        """Writes this process's newest snapshot as a checkpoint, in a thread beside the run; see `write_newest`.

        Without other processes' shards only: they may have other steps.
        """
        with self._using:
            newest = next(iter(self._snapshots_of_run()), None)
            if newest is None or self._checkpoints.writer.process or {*newest.record["parts"]} - {0}:
                return None
            if newest.step <= manifests.newest_step(self._checkpoints.directory):
                return None  # it is written already
            self._checkpoints.write_beside(newest.step, snapshot_entries(newest), for_manifest(newest.record))
        return newest.step if newest.step == manifests.newest_step(self._checkpoints.directory) else None

    def _snapshots_of_run(self) -> list[StoredSnapshot]:
        here = {"about": manifests.as_read(self._checkpoints.about, {})["about"], "run": self._run()}
        return [snapshot for snapshot in self._slots.read() if _run_identity(snapshot.record) == _run_identity(here)]

    def _run(self) -> list:
        """Identity of the run's folder; a folder that was removed and created again belongs to another run."""
        folder = os.path.dirname(self._checkpoints.directory)
        return [self._checkpoints.directory, os.stat(folder).st_ino if os.path.exists(folder) else 0]

    def _read(self, variables: list[tf.Variable]) -> list[tf.Tensor]:
        """Copies variables to the host; in one call, unless some are on servers."""
        here = slices.host_device(tf.constant(0).device)
        are_here = all(slices.host_device(variable.device) == here for variable in variables)
        return (self._read_here if are_here else slices.read_on_host)(variables)

    def _lacks_memory(self, entries: list[SlicedVariable], variables: Mapping[str, list]) -> bool:
        """Whether there is too little memory for two, one of which is whole while the other is written."""
        needed = 0
        for entry in entries:
            shape, dtype = variables.get(entry.key, ([], "int64"))
            if dtype == "string":  # a stream's position may have 1 GiB
                size = sum(int(tf.reduce_sum(tf.strings.length(piece.read()))) for piece in entry.slices)
            else:
                size = tf.as_dtype(dtype).size * tf.TensorShape(shape).num_elements() // len(entry.writers)
            needed += 2 * size
        more = needed - self._slots.num_bytes
        if more > 0 and more > _MEMORY_FRACTION * (available := memory.available_bytes()):
            self.is_off = True
            logging.warning(
                "no snapshots in memory: two would take %d MB more, and %d MB are available; a failure loses the steps "
                "since the last checkpoint",
                more >> 20,
                int(available) >> 20,
            )
        return self.is_off

    def _copy(self, step: int, record: dict, entries: list[SlicedVariable], may_change: threading.Event) -> None:
        """Copies values to the memory, in the thread, first those that are read from variables."""

        def values() -> Iterator[tuple[Mapping[str, Any], Any]]:
            yield from slices.packed(entry for entry in entries if entry.is_live)
            may_change.set()
            yield from slices.packed(entry for entry in entries if not entry.is_live)

        began = time.thread_time()
        try:
            with self._using:
                self._slots.write(step, record, values())
        except Exception as error:  # the run continues without them
            self.is_off = True
            logging.warning("no snapshots in memory: %s", getattr(error, "strerror", None) or reason(error))
        finally:
            may_change.set()
            self.copy_seconds = time.thread_time() - began


def _run_identity(record: Mapping[str, Any]) -> dict[str, Any]:
    """Identity of the run in a record, without the number of its processes, as a checkpoint fits any."""
    return {"run": record["run"], "about": {**record["about"], "strategy": None, "cpu": None}}


def snapshot_entries(stored: StoredSnapshot, all_of_them: bool = True) -> list[SlicedVariable]:
    """Returns a snapshot's entries, to be written to a checkpoint: all, or only this process's shards."""
    return [
        slices.unpacked(value, lambda value=value: stored.read(value))  # type: ignore[misc]
        for value in stored.values
        if all_of_them or value["is_sharded"]
    ]


def for_manifest(record: Mapping[str, Any]) -> dict:
    """Returns that part of a snapshot's record that a manifest has."""
    return {name: record[name] for name in ("about", "host_state", "variables")}
