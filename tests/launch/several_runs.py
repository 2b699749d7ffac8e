"""Runs of several kinds in one process, by name: python several_runs.py NAME ...; prints a digest of each one's end."""

import hashlib
import json
import sys

import numpy as np
import tensorflow as tf

from crankshaft import Trainer, mean, run

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)


class Samples(Trainer):
    """Samples from generators that a seed of the whole process decides."""

    def build_model(self):
        layers = tf.keras.layers
        return tf.keras.Sequential([layers.Dense(16), layers.Dropout(0.3), layers.Dense(1)])

    def loss(self, outputs, batch):
        noise = tf.random.normal(tf.shape(outputs)) + np.random.normal()  # noqa: NPY002
        return mean(tf.square(outputs - batch[1] + noise))


def data():
    points = np.random.default_rng(0).normal(size=(130, 3)).astype("float32")
    return (points[:100], points[:100, :1]), (points[100:], points[100:, :1])


KINDS = {
    "samples": {"trainer_class": Samples, "data": data, "optimizer": "sgd", "learning_rate": 0.05, "clip_norm": 0.5},
    "halves": {"trainer_class": Samples, "data": data, "precision": "bfloat16", "seed": 3, "weight_decay": 0.1},
    "cnn": {"model": "cnn", "input": "digits", "model_arg": {"batch_norm": True}, "ema_decay": 0.9},
    "mirrored": {"model": "mlp", "model_arg": {"hidden_units": (32,), "dropout": 0.2}, "input": "digits"},
}
KINDS["mirrored"] |= {"strategy": "mirrored", "num_virtual_devices": 2, "check_numerics": True}


def main(names: list[str]) -> None:
    """Runs each, and prints their digests as JSON."""
    digests = []
    for name in names:
        done = run(**KINDS[name], train_steps=12, jit="off", progress="off")
        weights = [variable.numpy() for variable in done.model.weights]
        found = hashlib.sha256(b"".join(value.tobytes() for value in weights))
        found.update(json.dumps([done.result["train"], done.result["eval"]]).encode())
        digests.append(found.hexdigest())
    print(json.dumps(digests))


if __name__ == "__main__":
    main(sys.argv[1:])
