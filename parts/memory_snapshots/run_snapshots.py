"""Snapshots in memory of a run: where they are, and what is saved of them once a worker is lost."""

from __future__ import annotations

import os
import threading

from ...engine.machine.threads import end_process
from ...runner.base import BaseRun
from ...runner.failures import print_line
from . import task_memory
from .in_memory import Snapshots

_WRITE_SECONDS = 120.0  # limit of writing what is in memory after a peer's loss


def make_snapshots(run: BaseRun) -> Snapshots:
    """Makes the snapshots of a run that has checkpoints, in slots that its supervisor holds, if it has one."""
    assert run.checkpoints
    # A remote folder's copy belongs to this process alone, so it does not inherit another's snapshots.
    slots = task_memory.inherited({} if run.config.remote else os.environ)
    return Snapshots(run.checkpoints, slots, run.strategy.exchange, run.inputs.lock_holds)


def save_after_loss(run: BaseRun, snapshots: Snapshots, error: BaseException) -> None:
    """Saves what is in memory after a worker's loss, unless that is left to a parent."""
    if task_memory.is_inherited(os.environ):
        return
    if not run.config.writes_run:
        if run.strategy.has_lost_first(error):
            task_memory.save_left(snapshots.descriptors())
        return

    def write() -> None:
        if (step := snapshots.write_alone()) is not None:
            print_line(f"step {step:,} was in memory, and is saved now")

    # A lost worker that still holds a call of TensorFlow's keeps it from beginning an operation of a new kind.
    writing = threading.Thread(target=write, name="saving", daemon=True)
    writing.start()
    writing.join(_WRITE_SECONDS)
    if writing.is_alive():
        print_line(f"what was in memory is lost: it could not be written within {_WRITE_SECONDS:g} s")
        end_process(str(error))
