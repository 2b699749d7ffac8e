"""Runs of two workers whose programs are alike, or differ at worker 1: programs.py FOLDER writes what each run found.

A case is words: what the program of both has, and after "|" what that of worker 1 has instead.
"""

import json
import logging
import os
import pathlib
import sys

import numpy as np
import tensorflow as tf

import crankshaft
from crankshaft.engine import version
from crankshaft.engine.hooks import every_steps

ALIKE = [
    "dropout norm evaluation",
    "replica assertion table function dataset",
    "uneven",  # of 5 examples worker 0 evaluates 2, and worker 1 evaluates 3
    "dropout | names",
]
DIFFERENT = ["| scale", "| gelu", "| layer", "| unused", "| hook", "| broken_model", "| broken_loss", "| sgd"]
UPGRADED = "| scale upgraded"
X = np.random.default_rng(0).normal(size=(61, 3)).astype("float32")


class Plane(crankshaft.Trainer):
    words: frozenset = frozenset()

    def build_model(self):
        layers = [tf.keras.layers.Input([3]), tf.keras.layers.Dense(8, "gelu" if "gelu" in self.words else "relu")]
        if "names" in self.words:
            tf.keras.layers.Dense(3).build([None, 3])
        if "dropout" in self.words:
            layers.append(tf.keras.layers.Dropout(0.1))
        if "norm" in self.words:
            layers.append(tf.keras.layers.BatchNormalization(synchronized=True))
        if "layer" in self.words:
            layers.append(tf.keras.layers.Dense(8))
        if "unused" in self.words:
            self.unused = tf.keras.layers.Dense(5)
            self.unused.build([None, 3])
        if "table" in self.words:
            rows = tf.lookup.KeyValueTensorInitializer(tf.constant(["a", "b"]), tf.constant([1, 2]))
            self.table = tf.lookup.StaticHashTable(rows, -1)
        if "broken_model" in self.words:
            raise KeyError("shape")
        return tf.keras.Sequential([*layers, tf.keras.layers.Dense(1)])

    def loss(self, outputs, batch):
        errors = tf.square(outputs - batch[1])[:, 0]
        if "function" in self.words:
            same = tf.numpy_function(lambda x: x, [errors], tf.float32, stateful=False)
            errors += 0.0 * tf.ensure_shape(same, errors.shape)
        if "replica" in self.words:
            number = tf.distribute.get_replica_context().replica_id_in_sync_group
            errors += 0.0 * tf.cast(number, tf.float32)
        if "assertion" in self.words:
            with tf.control_dependencies([tf.debugging.assert_less(outputs, 1e6)]):
                errors = tf.identity(errors)
        if "table" in self.words:
            errors += 0.0 * tf.cast(self.table.lookup(tf.constant(["a"])), tf.float32)
        if "broken_loss" in self.words:
            raise KeyError("weight")
        return crankshaft.mean((100.0 if "scale" in self.words else 1.0) * errors)


def found(case: str, worker: int) -> dict:
    common, _, other = case.partition("|")
    words = {*common.split(), *(other.split() if worker else ())}
    data = (X, X[:, :1])
    if "dataset" in words:
        data = tf.data.Dataset.from_tensor_slices(data).batch(16)
    evaluation = (X[:5], X[:5, :1]) if "uneven" in words else (X[:16], X[:16, :1]) if "evaluation" in words else None
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("crankshaft").addHandler(handler)
    described = version.described
    if "upgraded" in words:
        version.described = lambda: "9.9.9 (build of another day)"
    try:
        run = crankshaft.run(
            type("Plane", (Plane,), {"words": frozenset(words)}),
            data=(data, evaluation),
            strategy="multi_worker",
            train_steps=5,
            global_batch_size=16,
            jit="off",
            progress="off",
            cluster_timeout_seconds=60,
            optimizer="sgd" if "sgd" in words else "adam",
            hooks=[every_steps(7, print)] if "hook" in words else [],
        )
        return {"loss": run.result["train"]["loss"], "lines": lines}
    except Exception as error:  # the program's own too
        return {"error": str(error), "code": getattr(error, "exit_code", None)}
    finally:
        version.described = described
        logging.getLogger("crankshaft").removeHandler(handler)


if __name__ == "__main__":
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    if index:
        os.environ |= {"TF_ENABLE_ONEDNN_OPTS": "1", "XLA_FLAGS": f"--xla_dump_to={sys.argv[1]}"}
    results = {case: found(case, index) for case in (*ALIKE, *DIFFERENT, UPGRADED)}
    (pathlib.Path(sys.argv[1]) / f"found-{index}.json").write_text(json.dumps(results))
