"""The memory for snapshots that a supervisor holds for its tasks, over their restarts.

As a program, it writes the newest snapshot that tasks have left as a checkpoint, once none of them runs any more. It
imports TensorFlow then, which the supervisor does not.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence

from ...engine.checkpoints import manifest as manifests
from ...runner.failures import EXIT_FAILED, CrankshaftError, fail, print_line
from ...runner.host.imports import own_python
from ...runner.host.locks import LOCK_SECONDS, lock
from ...runner.host.startup import quiet_startup
from .snapshot_memory import Slots, StoredSnapshot, are_slots, make, newest_whole

_VARIABLE = "CRANKSHAFT_SNAPSHOTS"  # environment variable with a task's two files


class TaskMemory:
    """The memory of each task's snapshots, by the task's index in its supervisor. No memory is taken before it is used.

    A platform without such files, or too many tasks for the limit on open files, has none.
    """

    def __init__(self, tasks: int):
        self._files: list[list[int]] = []
        try:
            for _ in range(tasks):
                self._files.append(make())
        except (AttributeError, OSError):
            self.close()
            self._files = [[] for _ in range(tasks)]

    def options(self, index: int) -> dict:
        """Returns a task's `pass_fds`, for `Children.start`."""
        return {"pass_fds": tuple(self._files[index])}

    def variables(self, index: int) -> dict[str, str]:
        return {_VARIABLE: ",".join(map(str, self._files[index]))} if self._files[index] else {}

    def close(self) -> None:
        """Frees the memory."""
        for files in self._files:
            for descriptor in files:
                os.close(descriptor)
        self._files = []

    def newest_step(self) -> int:
        """Finds the newest step with a whole snapshot; -1 without one."""
        found = _newest(_stored(self._files))
        return found[0] if found else -1

    def unsaved_step(self) -> int | None:
        """Finds the step of the newest whole snapshot, if it is newer than the run's checkpoints; else None."""
        return _unsaved_step(self._files)

    def writing(self) -> tuple[list[str], tuple[int, ...]]:
        """Returns the command that does `write`, and its `pass_fds`."""
        command = [*own_python(), "-m", __name__, *(",".join(map(str, files)) for files in self._files)]
        return command, tuple(descriptor for files in self._files for descriptor in files)

    def write(self) -> int:
        """Writes the newest whole snapshot as a checkpoint of its run; returns a program's exit code."""
        return _exit_code(_write(self._files))


def written_line(step: int, is_lost: bool) -> str:
    """Describes how the newest snapshot was written."""
    return f"step {step:,} was in memory, and is {'lost, with what followed' if is_lost else 'saved now'}"


def save_left(descriptors: Sequence[int]) -> None:
    """Writes what a process holds in its slots, once the chief is lost, unless that has; prints a line."""
    if (step := _unsaved_step([descriptors])) is not None:
        lost = _write([descriptors], LOCK_SECONDS)
        print_line(written_line(step, bool(lost)) + (lost and f": {lost}"))


def is_inherited(environment: Mapping[str, str]) -> bool:
    """Returns whether a supervisor holds this process's slots."""
    return bool(environment.get(_VARIABLE))


def inherited(environment: Mapping[str, str]) -> Slots:
    """Opens this process's slots: those of its supervisor, or new ones."""
    descriptors = [int(number) for number in environment.get(_VARIABLE, "").split(",") if number.isdigit()]
    return Slots(descriptors if len(descriptors) == 2 and are_slots(descriptors) else ())


def _stored(files: Sequence[Sequence[int]]) -> list[dict[int, StoredSnapshot]]:
    """Reads each task's snapshots, by step, of the run that the first task with a snapshot was in last."""
    stored = [Slots(descriptors).read() for descriptors in files]
    run = next((snapshot.record["run"] for snapshots in stored for snapshot in snapshots), None)
    return [
        {snapshot.step: snapshot for snapshot in snapshots if snapshot.record["run"] == run} for snapshots in stored
    ]


def _newest(stored: Sequence[Mapping[int, StoredSnapshot]]) -> tuple[int, list[int]] | None:
    return newest_whole([{step: snapshot.part for step, snapshot in snapshots.items()} for snapshots in stored])


def _unsaved_step(files: Sequence[Sequence[int]]) -> int | None:
    stored = _stored(files)
    if (found := _newest(stored)) is None:
        return None
    step, (first, *_) = found
    record = stored[first][step].record
    directory, folder = record["run"]
    try:
        # A folder that has replaced the run's since is another's.
        is_in_place = os.stat(os.path.dirname(directory)).st_ino == folder
    except OSError:
        is_in_place = False
    may_save = record["may_save"] or not record["process"]
    return step if is_in_place and may_save and step > manifests.newest_step(directory) else None


def _exit_code(problem: str) -> int:
    return fail(EXIT_FAILED, problem) if problem else 0


def _write(files: Sequence[Sequence[int]], wait_seconds: float = 0.0) -> str:
    """Writes the newest whole snapshot, unless the run has one that is newer; returns why it can't."""
    with quiet_startup():
        import tensorflow as tf

        from ...engine.checkpoints.store import Checkpoints
        from .in_memory import for_manifest, snapshot_entries

    stored = _stored(files)
    if (found := _newest(stored)) is None:
        return "it is gone"
    step, (first, *more) = found
    entries = [entry for task in (first, *more) for entry in snapshot_entries(stored[task][step], task == first)]
    record = stored[first][step].record
    directory = record["run"][0]
    try:
        with lock(os.path.dirname(directory), None, wait_seconds, after_loss=True):
            os.makedirs(directory, exist_ok=True)
            os.rmdir(tempfile.mkdtemp(dir=directory))  # so that NFS does not answer from a cache
            if step > manifests.newest_step(directory):
                checkpoints = Checkpoints(directory, tf.train.Checkpoint(), keep=record["keep"], about=record["about"])
                checkpoints.write(step, entries, frozenset(), for_manifest(record))
    except (CrankshaftError, OSError) as error:  # it can't be written, or another process has the run's folder
        return str(error)
    return ""


if __name__ == "__main__":
    slots = [[int(number) for number in argument.split(",") if number] for argument in sys.argv[1:]]
    sys.exit(_exit_code(_write(slots)))
