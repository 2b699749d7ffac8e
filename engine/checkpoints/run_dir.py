"""The layout of a run on disk: only this file knows the names of a run's files. Needs no TensorFlow."""

from __future__ import annotations

import dataclasses
import os

from . import manifest as manifests
from .manifest import Manifest


class _Inside:
    """The path of a file or folder in a run's folder."""

    def __init__(self, name: str):
        self._name = name

    def __get__(self, run_dir: RunDir, _: type) -> str:
        return os.path.join(run_dir.path, self._name)


@dataclasses.dataclass(frozen=True)
class RunDir:
    """A run's folder and the paths within it, which need not exist."""

    path: str
    config = _Inside("config.json")  # the configuration with which the run began
    model = _Inside("model.json")  # the model's architecture, and the data's metadata
    events = _Inside("events.jsonl")  # the record
    result = _Inside("result.json")  # of the last process that trained the run to its end
    plan = _Inside("plan.json")  # written by `crankshaft plan`; the run's page compares the run with it
    checkpoints = _Inside("checkpoints")
    best = _Inside("best")  # the checkpoint of the best evaluation
    tensorboard = _Inside("tensorboard")
    export = _Inside("export")  # a SavedModel per step
    logs = _Inside("logs")  # output of the tasks of `crankshaft local`
    requests = _Inside("ask")  # of `crankshaft ask`
    workers = _Inside("workers")  # an empty file for each address of a worker that serves a coordinator
    lock = _Inside(".lock")  # taken before its process connects to others
    lock_owner = _Inside(".lock.owner")  # instead, if the file system has no `flock` (Lustre may have none)

    @property
    def is_runs(self) -> bool:
        """Whether the folder has anything of a run beside the configuration."""
        names = [name for name, value in vars(RunDir).items() if isinstance(value, _Inside) and name != "config"]
        return any(os.path.lexists(getattr(self, name)) for name in names)

    def remove_links(self, trains: bool) -> dict[str, str]:
        """Replaces links to folders in which a run, or an export, writes by new folders; returns where each led."""
        incomplete = os.path.join(self.checkpoints, manifests.INCOMPLETE)
        trained = (self.tensorboard, self.logs, self.requests, self.workers, incomplete)
        folders = (self.export, *trained) if trains else (self.export,)
        found = {folder: os.readlink(folder) for folder in folders if os.path.islink(folder)}
        for folder in found:
            os.remove(folder)
            os.mkdir(folder)  # what is written there was checked before, and finds its folder
        return found

    def folder(self, which: str | int) -> str:
        """Returns the folder of a checkpoint: "best", "latest", "all" or a step."""
        return self.best if which == "best" else self.checkpoints

    def steps(self, which: str | int = "latest") -> list[int]:
        """Returns the steps of the checkpoints that have a manifest, ascending. Raises OSError."""
        return sorted(manifests.steps(self.folder(which)))

    def newest(self, is_whole: bool = False) -> Manifest | None:
        """Returns the manifest of the newest checkpoint, or of the newest complete one; None if there is none.

        That of the best evaluation is one of them.
        """
        newest, best = (
            next((one for one in manifests.read_all(folder)[0] if not is_whole or one.problem() is None), None)
            for folder in (self.checkpoints, self.best)
        )
        return best if best and best.is_after(newest) else newest


NAMES = RunDir("")  # paths relative to a run's folder
