"""A model that tells the sum of each batch's numbers: `--model=weighing.py`, on what `write` has written.

Numbers are small enough for float32 means to tell sums apart, and random, so that other examples have another sum.
"""

from __future__ import annotations

import pathlib

import numpy as np
import tensorflow as tf

import crankshaft
from tests.parts.tensorboard.boards import scalars

EXAMPLES, BATCH = 5000, 660  # eight steps an epoch, the last of 380; a batch divides over one, two and three workers
SIZES = (2100, 1, 2899)  # of the files
NUMBERS = np.random.default_rng(5).integers(0, 1 << 10, EXAMPLES)
FEATURES = "--input_arg=features=x:float32:3,label:int64"


class Model(crankshaft.Trainer):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(1)])

    def loss(self, outputs, batch):
        return crankshaft.mean(tf.square(outputs[:, 0] - batch[0][:, 0]))

    def metrics(self, outputs, batch):
        return {"number": crankshaft.mean(tf.cast(batch[1], tf.float32))}


def write(folder: pathlib.Path, compression: str = "") -> None:
    """Writes the examples as TFRecords, in files of `SIZES`."""
    folder.mkdir()
    first = 0
    for index, size in enumerate(SIZES):
        path = folder / f"part-{index}.tfrecord{'.gz' if compression else ''}"
        with tf.io.TFRecordWriter(str(path), compression) as file:
            for number in NUMBERS[first : first + size]:
                values = {
                    "x": tf.train.Feature(float_list=tf.train.FloatList(value=[number / 1e4, 1, 2])),
                    "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[number])),
                }
                file.write(tf.train.Example(features=tf.train.Features(feature=values)).SerializeToString())
        first += size


def flags(folder: pathlib.Path) -> tuple[str, ...]:
    """Of a run on what `write` has written."""
    own = (f"--model={pathlib.Path(__file__)}", "--input=tfrecord", f"--data_dir={folder}", FEATURES)
    own += ("--mode=train", f"--global_batch_size={BATCH}", "--resident_data_mb=0", "--summary_every_steps=1")
    return (*own, "--progress=plain", "--jit=off", "--checkpoint_every_steps=0", "--steps_per_loop=2")


def sums(run_dir: pathlib.Path) -> list[int]:
    """Of each step's batch, of a run with `--summary_every_steps=1`."""
    sizes = [min(BATCH, EXAMPLES - first) for first in range(0, EXAMPLES, BATCH)]
    found = scalars(run_dir / "tensorboard" / "train")["number"]
    assert sorted(found) == list(range(1, len(found) + 1))
    return [round(found[index + 1] * sizes[index % len(sizes)]) for index in range(len(found))]
