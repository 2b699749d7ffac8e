"""What the tasks of a disturbed job and the one who watches it share: the data, and notes in a folder."""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path

EXAMPLES, FEATURES, CLASSES = 1000, 20, 3
BATCH_SIZE = 64  # 16 steps an epoch, the last of 40 examples; on two and on four replicas too
EPOCHS = 10
STEPS = EPOCHS * 16
RECORD = f"x:float32:{FEATURES},label:int64"
PLAN = "CRANKSHAFT_FAULTS"  # the environment variable: a folder, which also marks every process of a job


def task_name() -> str:
    """Returns this task's name as `crankshaft local` prints it."""
    task = _tf_config().get("task", {"type": "worker", "index": 0})
    return task["type"] if task["type"] == "chief" else f"{task['type']} {task['index']}"


def task_port() -> int | None:
    """Returns the port at which this task listens; None for a task that is alone."""
    if not (config := _tf_config()):
        return None
    return int(config["cluster"][config["task"]["type"]][config["task"]["index"]].rpartition(":")[2])


def _tf_config() -> dict:
    return json.loads(os.environ.get("TF_CONFIG", "{}"))


class Notes:
    """What the tasks of a job leave for the one who watches it, in the plan's folder.

    Attributes:
      folder: the folder that has the plan.
      path: the file of this task's lines, each with a clock (the same for all processes), what happened, and the step.
    """

    def __init__(self, folder: str | os.PathLike, task: str):
        self.folder, self._task = Path(folder), task
        self.path = self.folder / f"notes of {task}"
        self._rows: list[tuple[float, str, int]] = []
        self._read_bytes = 0

    def write(self, event: str, step: int) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{time.monotonic():.3f} {event} {step}\n")

    def read(self) -> list[tuple[float, str, int]]:
        """Returns whole lines, of which only new ones are read: who watches must not keep a core busy."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._read_bytes)
                lines = file.read().rpartition(b"\n")[0]  # the last one may be cut
            self._read_bytes += len(lines) + 1 if lines else 0
            rows = [line.split() for line in lines.decode().split("\n")]
            self._rows += [(float(row[0]), row[1], int(row[2])) for row in rows if len(row) == 3]
        return self._rows

    def mark(self, index: int) -> Path:
        """Returns the file that is there once the fault of this index has happened inside a task."""
        return self.folder / f"fault {index} has happened"


def arrays():
    """Returns features [EXAMPLES, FEATURES] float32 and each example's number, [EXAMPLES] int64."""
    import numpy as np

    features = np.random.default_rng(0).random((EXAMPLES, FEATURES), np.float32)
    return features, np.arange(EXAMPLES)


def write_files(folder: Path) -> None:
    """Writes the examples as TFRecords, in files of different sizes."""
    import tensorflow as tf

    folder.mkdir()
    features, numbers = arrays()
    ends = (0, 430, 431, EXAMPLES)
    for number, (first, stop) in enumerate(itertools.pairwise(ends)):
        with tf.io.TFRecordWriter(str(folder / f"part-{number}.tfrecord")) as file:
            for index in range(first, stop):
                values = {
                    "x": tf.train.Feature(float_list=tf.train.FloatList(value=features[index])),
                    "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[numbers[index]])),
                }
                file.write(tf.train.Example(features=tf.train.Features(feature=values)).SerializeToString())
