"""Kinds of example that Keras's pages have, written on made data: `fit` of each is one changed line."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from tests.launch.test_fit import TWO, compare

keras = tf.keras
layers = keras.layers
RANDOM = np.random.default_rng(0)


def images():
    """Convolutions on images, with augmentation and dropout."""
    y = RANDOM.integers(0, 3, 96)
    x = np.eye(3)[y][:, :, None, None].repeat(4, 2).reshape(96, 12, 1, 1) + RANDOM.normal(size=(96, 12, 12, 1)) / 4
    model = keras.Sequential(
        [keras.Input([12, 12, 1]), layers.RandomTranslation(0.0, 0.1), layers.Conv2D(8, 3, activation="relu")]
    )
    for layer in (layers.MaxPooling2D(), layers.Flatten(), layers.Dropout(0.2), layers.Dense(3, "softmax")):
        model.add(layer)
    model.compile("adam", "categorical_crossentropy", metrics=["accuracy"])
    return model, x, np.eye(3)[y]


def text():
    """Words looked up within the model, averaged."""
    y = RANDOM.integers(0, 2, 96).astype("float32")
    x = np.array([" ".join(RANDOM.choice([["bad", "dull"], ["good", "fine"]][int(each)], 4)) for each in y])
    words = layers.TextVectorization(output_sequence_length=6)
    words.adapt(x)
    x = tf.constant(x)
    inputs = keras.Input([], dtype="string")
    hidden = layers.GlobalAveragePooling1D()(layers.Embedding(10, 4)(words(inputs)))
    model = keras.Model(inputs, layers.Dense(1, "sigmoid")(hidden))
    model.compile(keras.optimizers.Adam(0.05), "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC()])
    return model, x, y


class Sampling(layers.Layer):
    """Samples around a mean, and adds the divergence from a normal distribution to the loss."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, inputs):
        mean, log_variance = inputs
        self.add_loss(0.01 * keras.ops.mean(keras.ops.square(mean) + keras.ops.exp(log_variance) - log_variance))
        sampled = keras.random.normal(keras.ops.shape(mean), seed=self.seeds)
        return mean + keras.ops.exp(0.5 * log_variance) * sampled


def variational():
    x = RANDOM.normal(size=(96, 1)).astype("float32") @ RANDOM.normal(size=(1, 6)).astype("float32")
    inputs = keras.Input([6])
    sampled = Sampling()(
        [layers.Dense(2)(inputs), layers.Dense(2, bias_initializer=keras.initializers.Constant(-3))(inputs)]
    )
    model = keras.Model(inputs, layers.Dense(6)(sampled))
    model.compile(keras.optimizers.Adam(0.02), "mse")
    return model, x, x


def contrastive(y_true, y_pred):
    return y_true * tf.square(y_pred) + (1 - y_true) * tf.square(tf.maximum(1.0 - y_pred, 0.0))


def siamese():
    """One tower for two inputs, and a loss of one's own."""
    tower = keras.Sequential([keras.Input([5]), layers.Dense(8, "tanh"), layers.Dense(2)], name="tower")
    pair = [keras.Input([5]), keras.Input([5])]
    away = layers.Subtract()([tower(each) for each in pair])
    distance = layers.Lambda(lambda x: keras.ops.norm(x, axis=1, keepdims=True), output_shape=(1,))(away)
    model = keras.Model(pair, distance)
    model.compile(keras.optimizers.Adam(0.02), contrastive)
    x = RANDOM.normal(size=(96, 5)).astype("float32")
    same = RANDOM.integers(0, 2, [96, 1]).astype("float32")
    other = np.where(same, x + 0.1 * RANDOM.normal(size=x.shape), RANDOM.normal(size=x.shape)).astype("float32")
    return model, [x, other], same


class Positions(layers.Layer):
    def __init__(self, length, words, size):
        super().__init__()
        self.words, self.places = layers.Embedding(words, size), layers.Embedding(length, size)
        self.config = {"length": length, "words": words, "size": size}

    def call(self, x):
        return self.words(x) + self.places(keras.ops.arange(self.config["length"]))

    def get_config(self):
        return self.config


def transformer():
    """Attention over tokens, with a layer of one's own that is registered nowhere."""
    x = RANDOM.integers(0, 6, [96, 5])
    inputs = keras.Input([5], dtype="int32")
    hidden = Positions(5, 6, 8)(inputs)
    hidden = layers.LayerNormalization()(hidden + layers.MultiHeadAttention(2, 4)(hidden, hidden))
    model = keras.Model(inputs, layers.Dense(2)(layers.Flatten()(hidden)))
    model.compile(keras.optimizers.AdamW(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, x, x[:, 0] // 3


def segmentation():
    """A class for each pixel, by convolutions down and up again."""
    x = RANDOM.normal(size=(48, 8, 8, 1)).astype("float32")
    inputs = keras.Input([8, 8, 1])
    down = layers.BatchNormalization()(layers.Conv2D(8, 3, strides=2, padding="same", activation="relu")(inputs))
    up = layers.Concatenate()([inputs, layers.Conv2DTranspose(4, 3, strides=2, padding="same")(down)])
    model = keras.Model(inputs, layers.Conv2D(2, 1, activation="softmax")(up))
    model.compile(
        keras.optimizers.Adam(0.02),
        "sparse_categorical_crossentropy",
        metrics=[keras.metrics.MeanIoU(2, sparse_y_pred=False)],
    )
    return model, x, (x > 0).astype("int32")


def transfer():
    """A new head on frozen layers, which stay as they are."""
    base = keras.Sequential([keras.Input([6]), layers.Dense(8, "relu"), layers.BatchNormalization()], name="base")
    base.trainable = False
    model = keras.Sequential([keras.Input([6]), base, layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05, nesterov=True, momentum=0.9), "mae")
    x = RANDOM.normal(size=(96, 6)).astype("float32")
    return model, x, x[:, :1]


QUICK = (images, text, transfer)
SLOW = (variational, siamese, transformer, segmentation)


@pytest.mark.parametrize("example", [*QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)])
def test_an_example_of_keras_learns_by_one_changed_line(example):
    keras.utils.set_random_seed(3)
    model, x, y = example()
    frozen = [weight.numpy() for weight in model.non_trainable_weights] if example is transfer else []
    run = crankshaft.fit(model, x, y, batch_size=16, epochs=6, verbose=0, jit="off")
    losses = run.history.history["loss"]
    assert losses[-1] < 0.9 * losses[0]
    shown = model.evaluate(x, y, batch_size=16, verbose=0, return_dict=True)
    assert shown["loss"] < losses[0]
    assert set(run.history.history) <= {*shown, "val_loss"}
    for before, after in zip(frozen, model.non_trainable_weights, strict=bool(frozen)):
        np.testing.assert_array_equal(before, after)


ROWS = tf.ragged.constant([[*range(1, 1 + length)] for length in (2, 3, 0, 4, 7, 1, 2, 2, 9)], dtype=tf.int32)
LABELS = np.arange(9, dtype="float32")[:, None]


class Batches(keras.utils.PyDataset):
    """Of ragged tensors."""

    def __len__(self):
        return 3

    def __getitem__(self, number):
        return ROWS[4 * number : 4 * number + 4], LABELS[4 * number : 4 * number + 4]


RAGGED = {
    "arrays": lambda: {"x": ROWS, "y": LABELS, "batch_size": 4},
    "dataset": lambda: {"x": tf.data.Dataset.from_tensor_slices((ROWS, LABELS)).batch(4)},
    "PyDataset": lambda: {"x": Batches()},
    "generator": lambda: {"x": (Batches()[number % 2] for number in range(6)), "steps_per_epoch": 3},
}


class Lengths(keras.Model):
    def __init__(self, **more):
        super().__init__(**more)
        self.embed = layers.Embedding(10, 4, embeddings_initializer="ones")
        self.dense = layers.Dense(1, kernel_initializer="ones")

    def call(self, words):
        sizes = tf.cast(words.row_lengths(), tf.float32)[:, tf.newaxis]  # only a ragged tensor has them
        return self.dense(tf.concat([tf.reduce_sum(self.embed(words), axis=1), sizes], 1))


@pytest.mark.parametrize(
    ("kind", "how"),
    [("arrays", TWO), ("dataset", {}), ("PyDataset", {})]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in (("arrays", {}), ("dataset", TWO), ("generator", {}))],
    ids=str,
)
def test_a_model_gets_ragged_tensors_as_from_keras(kind, how):
    def trained(fit, **more):
        keras.utils.set_random_seed(1)
        model = Lengths()
        model.compile(keras.optimizers.SGD(0.01), "mse")
        validation = (ROWS[:4], LABELS[:4])
        return model, fit(
            model, epochs=2, shuffle=False, verbose=0, validation_data=validation, **RAGGED[kind](), **more
        )

    (model, history), (ours, of_ours) = trained(keras.Model.fit), trained(crankshaft.fit, jit="off", **how)
    compare((model, history), (ours, of_ours.history), 1e-5)
    if not how:
        np.testing.assert_allclose(of_ours.predict(ROWS), ours.predict(ROWS, verbose=0), rtol=1e-6)


def test_labels_and_outputs_may_be_ragged_as_in_keras():
    def error(words, outputs):
        return tf.reduce_mean(tf.square(tf.reduce_mean(outputs.values, -1) - tf.cast(words.values, tf.float32)))

    def trained(fit, **more):
        model = keras.Sequential([layers.Embedding(10, 4, embeddings_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.1), error)
        return model, fit(model, ROWS, ROWS, epochs=2, verbose=0, **more)

    ours, run = trained(crankshaft.fit, jit="off")
    compare(trained(keras.Model.fit), (ours, run.history), 1e-5)


class OfLengths(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, number):
        length = (3, 5, 2)[number]
        return np.full([2, length, 2], length, "float32"), np.ones([2, length, 1], "float32")


@pytest.mark.parametrize(
    ("kind", "how"), [("dataset", {}), ("generator", {}), ("PyDataset", {}), ("PyDataset", TWO)], ids=str
)
def test_batches_may_differ_in_length_as_in_keras(kind, how):
    def batches():
        yield from map(OfLengths().__getitem__, range(3))

    form = tf.TensorSpec([2, None, 2]), tf.TensorSpec([2, None, 1])

    data = {
        "dataset": lambda: tf.data.Dataset.from_generator(batches, output_signature=form),
        "generator": batches,
        "PyDataset": OfLengths,
    }[kind]

    def trained(fit):
        model = keras.Sequential([layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return model, fit(model, data(), shuffle=False, verbose=0)

    ours, run = trained(functools.partial(crankshaft.fit, jit="off", **how))
    compare(trained(keras.Model.fit), (ours, run.history), 1e-6)
