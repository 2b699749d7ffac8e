"""The training of Crankshaft whose workers `benchmarks.recovery` kills. Runs in a worker.

The command line is that of `crankshaft train`. A hook notes when steps were done, in the folder that `PLAN` names.
"""

from __future__ import annotations

import os

import crankshaft
from crankshaft.engine.hooks import Hook

from ..faults.plan import PLAN, Notes, task_name

NOTED_EVERY_STEPS = 10


class Noting(Hook):
    """Notes the steps of this task. It comes first among the hooks, so that none of theirs delays a note."""

    name = "noting"

    def __init__(self):
        self._notes = Notes(os.environ[PLAN], task_name())
        self._notes.write("starts", os.getpid())

    def begin(self, status):
        self._notes.write("begins", status.step)

    def next_due(self, step, status):
        return step - step % NOTED_EVERY_STEPS + NOTED_EVERY_STEPS

    def __call__(self, status):
        self._notes.write("step", status.step)


if __name__ == "__main__":
    crankshaft.main(hooks=[Noting()])
