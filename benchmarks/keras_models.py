"""The workloads' models of Keras's own layers, as people write them, which Crankshaft is compared with.

Starts Keras's backend, whichever it is.
"""

from __future__ import annotations

import keras
import numpy as np

from crankshaft.engine.data.run_data import Data

from .workloads import WORKLOADS

_layers = keras.layers


def build(name: str, data: Data) -> keras.Model:
    """Builds a workload's model, for its data; outputs are logits, in float32 whatever the policy is."""
    if name == "wide_deep":
        return _wide_deep(data.train[0]["categories"].shape[1], data.vocabulary["categories"])
    images = _layers.Input(WORKLOADS[name].shape)
    bodies = {"cnn": _cnn, "cnn_bfloat16": _cnn, "resnet20": _resnet20}
    body = bodies[name](images) if name in bodies else _mlp(images, WORKLOADS[name].units)
    return keras.Model(images, _layers.Dense(data.num_classes, dtype="float32")(body))


def compiled(name: str, **settings) -> tuple[keras.Model, Data]:
    """Builds and compiles a workload's model with Adam, its loss and its metric; returns its data, too.

    `settings` are those of `Model.compile`.
    """
    precision = WORKLOADS[name].precision
    keras.config.set_dtype_policy("float32" if precision == "float32" else f"mixed_{precision}")
    keras.utils.set_random_seed(0)
    data = WORKLOADS[name].load()
    if kind := WORKLOADS[name].own_step:
        from . import keras_steps  # of TensorFlow alone

        return keras_steps.model(kind, **settings), data
    model = build(name, data)
    if WORKLOADS[name].metric == "auc":
        loss, metric = keras.losses.BinaryCrossentropy(from_logits=True), keras.metrics.AUC(from_logits=True)
    else:
        loss, metric = keras.losses.SparseCategoricalCrossentropy(from_logits=True), "accuracy"
    model.compile(optimizer="adam", loss=loss, metrics=[metric], **settings)
    return model, data


def _mlp(x, widths: tuple[int, ...]):
    x = _layers.Flatten()(x)
    for units in widths:
        x = _layers.Dense(units, activation="relu")(x)
    return x


def _cnn(x):
    for filters in (32, 64):
        x = _layers.MaxPooling2D(2)(_layers.Conv2D(filters, 3, activation="relu")(x))
    return _layers.Dense(64, activation="relu")(_layers.Flatten()(x))


def _resnet20(x):
    """Builds He et al. 2016, section 4.2, n = 3, shortcuts without parameters (option A), as models/resnet.py does."""
    x = _layers.ReLU()(_normalized(x, 16, 1))
    for filters in (16, 32, 64):
        for block in range(3):
            strides = 2 if filters > 16 and not block else 1
            y = _layers.ReLU()(_normalized(x, filters, strides))
            y = _normalized(y, filters, 1)
            if strides > 1:
                more = filters - x.shape[-1]
                x = keras.ops.pad(x[:, ::strides, ::strides], [[0, 0], [0, 0], [0, 0], [0, more]])
            x = _layers.ReLU()(_layers.Add()([x, y]))
    return _layers.GlobalAveragePooling2D()(x)


def _normalized(x, filters: int, strides: int):
    x = _layers.Conv2D(filters, 3, strides, padding="same", use_bias=False, kernel_initializer="he_normal")(x)
    return _layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)


def _wide_deep(fields: int, rows: int) -> keras.Model:
    """Builds the default of models/wide_deep.py; all fields' ids share a table, as there."""
    categories = _layers.Input([fields], dtype="int64", name="categories")
    ids = categories + np.arange(fields) * rows
    x = _layers.Flatten()(_layers.Embedding(fields * rows, 16)(ids))
    for units in (128, 64):
        x = _layers.Dense(units, activation="relu")(x)
    weights = _layers.Flatten()(_layers.Embedding(fields * rows, 1, embeddings_initializer="zeros")(ids))
    wide = keras.ops.sum(weights, axis=1, keepdims=True)
    return keras.Model({"categories": categories}, _layers.Dense(1, dtype="float32")(x) + wide)
