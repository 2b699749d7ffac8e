"""A small state to save and restore, and what its checkpoints leave on the disk."""

import logging
import os
from pathlib import Path

import numpy as np
import tensorflow as tf

from crankshaft.engine.checkpoints import Checkpoints, objects


class Slots(tf.Module):
    """As an optimizer's: a variable beside each of the model's, and a count."""

    def __init__(self, variables):
        super().__init__()
        self.moments = [tf.Variable(tf.zeros(variable.shape), name="moment") for variable in variables]
        self.iterations = tf.Variable(0, dtype=tf.int64)


class Training(tf.Module):
    def __init__(self, units=3, slots=True):
        super().__init__()
        self.model = tf.keras.Sequential(
            [
                tf.keras.Input((4,)),
                tf.keras.layers.Dense(units, activation="relu"),
                tf.keras.layers.BatchNormalization(),
                tf.keras.layers.Dropout(0.5, seed=1),
                tf.keras.layers.Dense(2),
            ]
        )
        if slots:
            self.optimizer = Slots(self.model.trainable_variables)


def make_state(units=3, slots=True):
    return tf.train.Checkpoint(
        trainer=Training(units, slots),
        step=tf.Variable(0, dtype=tf.int64),
        half=tf.Variable(tf.zeros([5], tf.bfloat16)),
    )


def variables_of(state):
    return [node for _, node in objects.walk(state) if objects.is_variable(node)]


def fill(state, seed):
    """Other values in every variable, from the whole range of the type's bits."""
    rng = np.random.default_rng(seed)
    for variable in variables_of(state):
        dtype = tf.as_dtype(variable.dtype)
        if dtype.is_integer:
            values = rng.integers(0, dtype.max, variable.shape, dtype=dtype.as_numpy_dtype)
        else:
            values = rng.normal(size=variable.shape) * 10.0 ** rng.integers(-30, 30, variable.shape)
        variable.assign(tf.cast(tf.constant(values), dtype))


def bits(state):
    """Each variable's bytes, of every replica."""
    found = []
    for variable in variables_of(state):
        variable = variable.value if isinstance(variable, tf.keras.Variable) else variable
        found += [copy.numpy().tobytes() for copy in getattr(variable, "values", [variable])]
    return found


def make(directory, state, keep=None):
    return Checkpoints(directory, state, keep=keep, about={"model": "mlp", "units": np.int64(3)})


def saved(directory, steps, keep=None):
    """(state, checkpoints) with each of `steps` saved, filled with its own number as the seed."""
    state = make_state()
    checkpoints = make(directory, state, keep)
    for step in steps:
        fill(state, step)
        checkpoints.save(step, {"best": step})
    checkpoints.wait()
    return state, checkpoints


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def names(directory):
    return sorted(os.listdir(directory))


def data_file(directory, step):
    return Path(directory) / f"ckpt-{step}.data-00000-of-00001"
