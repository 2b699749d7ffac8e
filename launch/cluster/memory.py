"""The memory for snapshots that a supervisor holds for its tasks, over their restarts. Host code.

As a program, it writes the newest snapshot that tasks have left as a checkpoint, once none of them runs any more. It
imports TensorFlow then, which the supervisor does not.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from ...engine.checkpoints import manifest as manifests
from ...engine.checkpoints.slots import Held, Slots, are_slots, make, newest_whole

_VARIABLE = "CRANKSHAFT_SNAPSHOTS"  # of a task's environment: its two files


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
        """Returns a task's environment variables."""
        return {_VARIABLE: ",".join(map(str, self._files[index]))} if self._files[index] else {}

    def close(self) -> None:
        """Frees it."""
        for files in self._files:
            for each in files:
                os.close(each)
        self._files = []

    def newest_step(self) -> int:
        """Returns the newest step of which a whole snapshot is there; -1 without one."""
        found = _newest([Slots(files).read() for files in self._files])
        return found[0] if found else -1

    def unsaved(self) -> tuple[int, list[str], tuple[int, ...]] | None:
        """Returns what is not on the disk, if anything: its step, the command that writes it, and its `pass_fds`."""
        held = [Slots(files).read() for files in self._files]
        if (found := _newest(held)) is None:
            return None
        directory = held[found[1]][0].record["run"][0]
        if not os.path.isdir(os.path.dirname(directory)) or found[0] <= max(manifests.steps(directory), default=-1):
            return None
        files = [",".join(map(str, each)) for each in self._files if each]
        command = [sys.executable, "-m", __name__, *files]
        return found[0], command, tuple(each for pair in self._files for each in pair)


def inherited(environment: Mapping[str, str]) -> Slots:
    """Returns this process's slots: those of its supervisor, or its own."""
    descriptors = [int(each) for each in environment.get(_VARIABLE, "").split(",") if each.isdigit()]
    return Slots(descriptors if len(descriptors) == 2 and are_slots(descriptors) else ())


def _newest(held: Sequence[Sequence[Held]]) -> tuple[int, int] | None:
    return newest_whole([{each.step: each.record["parts"] for each in of_task} for of_task in held])


def write(files: Sequence[Sequence[int]]) -> None:
    """Writes the newest snapshot of which every part is in these files as a checkpoint of its run.

    Raises:
      SaveError: it can't be written.
    """
    import tensorflow as tf

    from ...engine.checkpoints.in_memory import entries_of, for_manifest
    from ...engine.checkpoints.store import Checkpoints

    held = [Slots(each).read() for each in files]
    if (found := _newest(held)) is None:
        return
    step, first = found
    whole = [next((each for each in of_task if each.step == step), None) for of_task in held]
    entries = [entry for task, each in enumerate(whole) if each for entry in entries_of(each, task == first)]
    record = whole[first].record
    checkpoints = Checkpoints(record["run"][0], tf.train.Checkpoint(), keep=record["keep"], about=record["about"])
    checkpoints.write(step, entries, frozenset(), for_manifest(record))


if __name__ == "__main__":
    write([[int(each) for each in argument.split(",")] for argument in sys.argv[1:]])
