"""A small run that counts, on the servers, how often each example was trained on. --poison: one example is refused.
--enough: a hook that is never due ends the run after so many steps. --files: the examples are read from so many files
in --folder; --chunk, by chunks; --wrong: with them, or some. --stream: the examples are a dataset, or gzip files.
"""

from crankshaft import Trainer  # isort: skip  # first: it imports TensorFlow more quickly than TensorFlow itself does

import itertools
import json
import os
import pathlib
import time
import zlib

import numpy as np
import tensorflow as tf
from absl import flags

import crankshaft
from crankshaft.engine.data import streamed
from crankshaft.engine.errors import BadRecordError
from crankshaft.engine.hooks import Hook
from crankshaft.launch import train

EXAMPLES = 1000
flags.DEFINE_bool("poison", False, "One example raises.")
flags.DEFINE_integer("enough", None, "Steps after which a hook ends the run.")
flags.DEFINE_integer("files", 0, "Files in which the examples are.")
flags.DEFINE_integer("chunk", 1, "Examples that are read at once.")
flags.DEFINE_string("folder", None, "Of the files.")
flags.DEFINE_float("read_seconds", 0.0, "That each read takes, at least.")
flags.DEFINE_string(
    "wrong", None, "What is wrong with the files of worker 0 (fewer, missing), or of all (bad, undecodable)."
)
flags.DEFINE_enum("stream", None, ["dataset", "gzip"], "What the examples are a stream of.")


BAD, UNDECODABLE = -1, -2
LABELS = {"bad": BAD, "undecodable": UNDECODABLE}


def _label(record: bytes) -> int:
    return int(np.frombuffer(record[-16:], np.int64)[0])


class InFiles(crankshaft.Source):
    """Examples in files of one length a record; a label below zero is bad."""

    def __init__(self, folder, like):
        self.element_spec = tuple(crankshaft.Spec(part.shape[1:], part.dtype) for part in like)
        self.chunk_examples = flags.FLAGS.chunk
        self._record = sum(spec.nbytes for spec in self.element_spec)
        self._paths = sorted(pathlib.Path(folder).glob("part-*"))
        self._starts = np.cumsum([0, *(path.stat().st_size // self._record for path in self._paths)])

    def __len__(self):
        return int(self._starts[-1])

    def read(self, indices):
        time.sleep(flags.FLAGS.read_seconds)
        files = np.searchsorted(self._starts, indices, side="right") - 1
        found = []
        for example, file in zip(indices.tolist(), files.tolist(), strict=True):
            with open(self._paths[file], "rb") as opened:
                opened.seek((example - self._starts[file]) * self._record)
                found.append(opened.read(self._record))
            if _label(found[-1]) == BAD:
                raise BadRecordError(example, f"{self._paths[file].name} has a bad record {example}; write it again")
        return np.frombuffer(b"".join(found), np.uint8).reshape(len(found), -1)

    @property
    def stored_spec(self):
        return crankshaft.Spec((self._record,), np.uint8)

    def decode(self, stored, seeds):
        cut = self.element_spec[0].nbytes
        parts = tuple(
            tf.bitcast(tf.reshape(part, [-1, *spec.shape, spec.dtype.itemsize]), spec.dtype)
            for part, spec in zip((stored[:, :cut], stored[:, cut:]), self.element_spec, strict=True)
        )
        least = tf.constant(UNDECODABLE, tf.int64)
        with tf.control_dependencies([tf.debugging.assert_greater(parts[1][:, 0], least, message="no label")]):
            return tf.nest.map_structure(tf.identity, parts)

    def verify(self, indices, stored):
        for example, record in zip(indices.tolist(), stored, strict=True):
            if _label(record.tobytes()) == UNDECODABLE:
                raise BadRecordError(example, f"record {example} does not decode; write it again")

    def files(self):
        return [*map(str, self._paths)]

    def identity(self):
        return " ".join(f"{path.name} {path.stat().st_size} {zlib.crc32(path.read_bytes())}" for path in self._paths)


def in_files(features, labels):
    """The same examples, from files of sizes that differ, which each task writes for itself, as on hosts of its own."""
    task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {"type": "alone", "index": 0})
    at_worker_0 = (task["type"], task["index"]) == ("worker", 0)
    wrong = flags.FLAGS.wrong if at_worker_0 or flags.FLAGS.wrong in LABELS else None
    folder = pathlib.Path(flags.FLAGS.folder) / f"{task['type']}-{task['index']}"
    folder.mkdir(parents=True, exist_ok=True)
    labels = labels.copy()
    if wrong in LABELS:
        labels[432, 0] = LABELS[wrong]
    records = [x.tobytes() + y.tobytes() for x, y in zip(features, labels, strict=True)]
    ends = [len(records) * each**2 // flags.FLAGS.files**2 for each in range(flags.FLAGS.files + 1)]
    for number, (first, stop) in enumerate(itertools.pairwise(ends)):
        path = folder / f"part-{number}"
        path.with_suffix(".new").write_bytes(b"".join(records[first : stop - (wrong == "fewer")]))
        path.with_suffix(".new").rename(path)
    if wrong == "missing":
        path.unlink()
        raise FileNotFoundError(2, "No such file or directory", "part-6")
    return InFiles(folder, (features, labels))


def in_gzip_files(features, labels):
    """The same examples, as the coordinator alone has them: in seven files."""
    folder = pathlib.Path(flags.FLAGS.folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [str(folder / f"part-{number}.gz") for number in range(7)]
    for number, path in enumerate(paths):
        with tf.io.TFRecordWriter(path, "GZIP") as writer:
            for x, y in zip(features[number::7], labels[number::7], strict=True):
                writer.write(x.tobytes() + y.tobytes())

    def parse(records):
        cut = features[0].nbytes
        x = tf.io.decode_raw(tf.strings.substr(records, 0, cut), tf.float32)
        y = tf.io.decode_raw(tf.strings.substr(records, cut, labels[0].nbytes), tf.int64)
        return tf.ensure_shape(x, [None, features.shape[1]]), tf.ensure_shape(y, [None, 2])

    return streamed.records(paths, parse)


class Moved(tf.keras.layers.Layer):
    """Counts steps and examples, and moves an average towards 1."""

    def build(self, shape):
        self.steps = self.add_weight(shape=(), initializer="zeros", dtype="int64", trainable=False, name="steps")
        self.examples = self.add_weight(shape=(), initializer="zeros", trainable=False, name="examples")
        self.average = self.add_weight(shape=(), initializer="zeros", trainable=False, name="average")

    def call(self, x, training=None):
        if training:
            self.steps.assign_add(1)
            self.examples.assign(tf.cast(tf.shape(x)[0], tf.float32) + self.examples)
            self.average.assign(0.998 * self.average + 0.002)
        return x


class Counting(Trainer):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(32, activation="relu"), Moved(), tf.keras.layers.Dense(3)])

    def build(self):
        super().build()
        self.seen = tf.Variable(tf.zeros([EXAMPLES], tf.int64), trainable=False, name="seen")

    def loss(self, outputs, batch):
        labels = batch[1][:, 0]
        return crankshaft.mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs))

    def metrics(self, outputs, batch):
        return {"example": crankshaft.mean(batch[1][:, 1])}

    def train_step(self, batch):
        read = tf.identity(self.model.trainable_variables[0].value)  # as steps of one's own do, not pulled before
        with tf.control_dependencies([read, tf.debugging.assert_less(batch[0], 50.0, message="a feature is over 50")]):
            found = super().train_step(batch)
        count = tf.math.bincount(tf.cast(batch[1][:, 1], tf.int32), minlength=EXAMPLES, dtype=tf.int64)
        tf.raw_ops.AssignAddVariableOp(resource=self.seen.handle, value=count)
        return found


class Enough(Hook):
    name = "enough"

    def __call__(self, status):
        if flags.FLAGS.enough and status.step >= flags.FLAGS.enough:
            status.stop = "it is enough"


def data():
    random = np.random.RandomState(0)
    features = random.rand(EXAMPLES, 20).astype(np.float32)
    labels = np.stack([features[:, :3].argmax(1), np.arange(EXAMPLES)], 1)
    if flags.FLAGS.poison:
        features[432, 3] = 99
    if flags.FLAGS.files:
        return in_files(features, labels), None, 3
    if flags.FLAGS.stream:
        found = tf.data.Dataset.from_tensor_slices((features, labels))
        train = found if flags.FLAGS.stream == "dataset" else in_gzip_files(features, labels)
        return train, found.skip(900), 3
    return (features, labels), (features[:200] % 50, labels[:200]), 3


if __name__ == "__main__":
    train.main(Counting, data=data, hooks=[Enough()])
