"""The training that faults disturb: what each task of a job runs. Reads its plan from the folder that `PLAN` names.

A model that a mesh can shard, and a hook that notes every few steps when they were done, and has faults happen inside
this process at their steps. With parameter servers, a variable on them counts how often each example was trained on.
"""

from __future__ import annotations

import json
import math
import os
import time

from .plan import CLASSES, EXAMPLES, PLAN, Notes, arrays, task_name, task_port

if __name__ == "__main__":  # before imports that take seconds, in which it may be struck
    NOTES = Notes(os.environ[PLAN], task_name())
    NOTES.write("starts", os.getpid())
    if port := task_port():
        NOTES.write("listens", port)

import tensorflow as tf

import crankshaft
from crankshaft.engine.hooks import Hook
from crankshaft.parts import sharding as parallel

from ..programs.grammar import program_from_seed
from ..programs.text import script
from .table import FAULTS, NAN, Injection

NOTED_EVERY_STEPS = 4
# Of each NOTED_EVERY_STEPS: a run takes a few seconds, so that faults find it at its steps, and hosts time to return.
_PACE_SECONDS, _ELASTIC_PACE_SECONDS = 0.06, 0.4


class Classifier(crankshaft.Trainer):
    nan_steps = ()  # the steps before the batches of this task that are NaN
    dropout = 0.2

    def build_model(self):
        layers = [parallel.Dense(16, "columns", "relu"), parallel.Dense(8, "rows"), parallel.Dropout(self.dropout)]
        return tf.keras.Sequential([*layers, parallel.Dense(CLASSES)])

    def loss(self, outputs, batch):
        labels = tf.argmax(batch[0][:, :CLASSES], 1)
        logits = tf.cast(outputs, tf.float32)
        return crankshaft.mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))

    def metrics(self, outputs, batch):
        return {"example": crankshaft.mean(tf.cast(batch[1], tf.float32))}

    def train_step(self, batch):
        features, numbers = batch
        for step in self.nan_steps:
            features = tf.where(crankshaft.step_context().step == step, math.nan, features)
        return super().train_step((features, numbers))


class Counting(Classifier):
    """Counts on the servers how often each example was trained on."""

    def build(self):
        super().build()
        self.seen = tf.Variable(tf.zeros([EXAMPLES], tf.int64), trainable=False, name="seen")

    def train_step(self, batch):
        found = super().train_step(batch)
        count = tf.math.bincount(tf.cast(batch[1], tf.int32), minlength=EXAMPLES, dtype=tf.int64)
        tf.raw_ops.AssignAddVariableOp(resource=self.seen.handle, value=count)
        return found


class Faults(Hook):
    """Notes steps, and has faults happen in this process.

    Args:
      notes: this task's notes.
      injections: all of the job's.
      pace_seconds: the least time of `NOTED_EVERY_STEPS` steps.
    """

    name = "faults"

    def __init__(self, notes: Notes, injections: list[Injection], pace_seconds: float):
        self._notes, self._injections, self._pace_seconds = notes, injections, pace_seconds

    def begin(self, status):
        self._notes.write("begins", status.step)

    def next_due(self, step, status):
        steps = [each.step for each in self._injections if each.step > step]
        return min([*steps, step - step % NOTED_EVERY_STEPS + NOTED_EVERY_STEPS])

    def __call__(self, status):
        self._notes.write("step", status.step)
        for index, injection in enumerate(self._injections):
            mark = self._notes.mark(index)
            if is_inside(injection) and injection.step == status.step and not mark.exists():
                mark.touch()
                FAULTS[injection.fault].act(status, injection)
        time.sleep(self._pace_seconds)


def program(seed: int):
    """Returns the trainer class and the data of a drawn program, on as many examples as the other jobs have."""
    path = NOTES.folder / "program.py"  # from which AutoGraph reads the source
    path.write_text(script(program_from_seed(seed, ("trainer",), ("parts",)), {}), encoding="utf-8")
    scope = {"__name__": "program"}
    exec(compile(path.read_text("utf-8"), str(path), "exec"), scope)
    splits = [scope["form"](scope["arrays"](first, n), "arrays") for first, n in ((0, EXAMPLES), (1, 200))]
    return scope["trainer"]("", False), tuple(splits)


def is_inside(injection: Injection) -> bool:
    """Returns whether a fault happens in this process."""
    return FAULTS[injection.fault].inside and injection.target == task_name()


if __name__ == "__main__":
    plan = json.loads((NOTES.folder / "plan.json").read_text(encoding="utf-8"))
    data = None if plan["files"] else (arrays(), tuple(part[:200] for part in arrays()), CLASSES)
    trainer_class = Counting if plan["strategy"] == "servers" else Classifier
    injections = [Injection(**each) for each in plan["injections"]]
    trainer_class.nan_steps = [
        each.step
        for index, each in enumerate(injections)
        if each.fault == NAN and is_inside(each) and not NOTES.mark(index).exists()
    ]
    is_elastic = plan["strategy"] == "hosts"
    if is_elastic:
        trainer_class.dropout = 0.0  # a replica's masks are its own: with fewer workers they are others
    if plan["program"] is not None:
        trainer_class, data = program(plan["program"])
    pace_seconds = _ELASTIC_PACE_SECONDS if is_elastic else _PACE_SECONDS
    crankshaft.main(trainer_class, data=data, hooks=[Faults(NOTES, injections, pace_seconds)])
