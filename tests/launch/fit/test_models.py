"""`crankshaft.fit` of models that differ from what their configuration says, or make layers late.

Kinds of example that Keras's pages have, written on made data: `fit` of each is one changed line.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from tests.launch.fit.test_fit import TWO, assert_close, compare
from tests.logical_cpus import make_four

keras = tf.keras
layers = keras.layers

make_four()  # before anything touches the devices
RANDOM = np.random.default_rng(5)
X, Y = RANDOM.normal(size=(48, 3)).astype("float32") + 3, RANDOM.normal(size=(48, 1)).astype("float32")
COPIES = {"strategy": "mirrored", "num_virtual_devices": 1}  # makes its variables itself
HOW = {"batch_size": 12, "epochs": 3, "shuffle": False, "verbose": 0}


class Block(layers.Layer):
    """Has layers, a constant and a function of its own, which `get_config` does not return."""

    def __init__(self, units, **more):
        super().__init__(**more)
        self.units, self.scale, self.shifts, self.function = units, 1.0, np.zeros(units, "float32"), tf.identity
        self.first, self.second = layers.Dense(units), layers.Dense(units, use_bias=False)
        self.norm = layers.BatchNormalization(momentum=0.5)

    def build(self, shape):
        for layer in (self.first, self.norm, self.second):
            layer.build(shape)
            shape = (None, self.units)

    def call(self, inputs, training=None):
        hidden = self.norm(self.first(inputs), training=training) * self.scale + self.shifts
        return tf.cast(self.function(self.second(hidden)), tf.float32)

    def get_config(self):
        return {**super().get_config(), "units": self.units}


def model(change=lambda block: None):
    keras.utils.set_random_seed(1)
    block = Block(4)
    made = keras.Sequential([keras.Input([3]), block, layers.Dense(1)])
    change(block)
    made.compile(keras.optimizers.Adam(0.1), "mse", jit_compile=False)
    return made


def changed(block):
    block.first.trainable = block.norm.trainable = False
    block.second.dtype_policy = "mixed_bfloat16"
    block.second.kernel.regularizer = keras.regularizers.L2(0.3)
    block.scale, block.shifts, block.function = 0.5, np.arange(4, dtype="float32"), tf.nn.relu


@pytest.mark.parametrize("where", [{}, COPIES], ids=["itself", "copy"])
@pytest.mark.parametrize("change", [changed, lambda block: setattr(block.second.kernel, "trainable", False)])
def test_what_a_configuration_leaves_out_is_trained_in_the_model_itself_and_in_a_copy(change, where):
    theirs, ours = model(change), model(change)
    expected = theirs.fit(X, Y, **HOW).history["loss"]
    run = crankshaft.fit(ours, X, Y, **HOW, **where, jit="off")
    np.testing.assert_allclose(run.history.history["loss"], expected, rtol=1e-6)
    assert (run.models["model"] is ours) == (not where)
    assert_close(ours, theirs, 1e-5, 1e-6)
    assert [each.path for each in run.model.weights] == [each.path for each in ours.weights]  # for --freeze


def test_what_cannot_be_copied_is_one_line():
    factor = 3.0
    bound = model(lambda block: setattr(block, "function", lambda x: factor * x))  # its factor may be a weight
    with pytest.raises(crankshaft.UsageError, match=r"Block sequential.*/block.* has another function"):
        crankshaft.fit(bound, X, Y, **HOW, **COPIES, jit="off")
    crankshaft.fit(bound, X, Y, **HOW, jit="off")


def test_an_optimizer_goes_on_where_layers_were_frozen_since():
    """Freed again, they need optimizer state that it never had."""
    ours = model()
    crankshaft.fit(ours, X, Y, **HOW, jit="off")
    ours.layers[0].trainable = False
    before, moved = [np.array(layer.weights[0]) for layer in (ours.layers[0].first, ours.layers[1])], []
    crankshaft.fit(ours, X, Y, **HOW, jit="off")
    assert int(ours.optimizer.iterations) == 24
    after = [np.array(layer.weights[0]) for layer in (ours.layers[0].first, ours.layers[1])]
    moved = [float(np.abs(one - other).max()) for one, other in zip(before, after, strict=True)]
    assert moved[0] == 0.0 < moved[1]

    frozen = model(lambda block: setattr(block, "trainable", False))
    frozen.optimizer.build(frozen.trainable_variables)
    frozen.layers[0].trainable = True
    with pytest.raises(crankshaft.UsageError, match=r"without .*, which is trainable now; call compile"):
        crankshaft.fit(frozen, X, Y, **HOW, jit="off")


class Late(keras.Model):
    """Its auxiliary head is called in training alone."""

    def __init__(self, **more):
        super().__init__(**more)
        how = {"kernel_initializer": keras.initializers.RandomUniform(seed=3)}
        self.body, self.head = layers.Dense(5, "tanh", **how), layers.Dense(1, **how)
        self.auxiliary = layers.Dense(2, **how)

    def call(self, inputs, training=None):
        body = self.body(inputs)
        if training:
            self.add_loss(0.7 * tf.reduce_mean(tf.square(self.auxiliary(body))))
        return self.head(body)


def late():
    made = Late()
    made.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    return made


def test_a_head_that_only_training_calls_is_trained():
    theirs, ours = late(), late()
    theirs.fit(X, Y, **HOW)
    crankshaft.fit(ours, X, Y, **HOW, jit="off")
    assert len(ours.get_weights()) == 6
    assert_close(ours, theirs, 1e-5, 1e-6)


def compiled(*parts, loss="mse"):
    made = keras.Sequential(parts)
    made.compile("sgd", loss)
    return made


def of_two(loss=("mse", None)):
    inputs = keras.Input([3])
    made = keras.Model(inputs, [layers.Dense(1, name="a")(inputs), layers.Dense(1, name="b")(inputs)])
    made.compile("sgd", [*loss])
    return made


MISTAKES = {
    r"variable .*kernel is float64, and losses, gradients and updates are float32; make the model": (
        lambda: compiled(keras.Input([3], dtype="float64"), layers.Dense(1, dtype="float64")),
        {},
    ),
    r"y is None for an output that has a loss .*; give its labels, or compile with None as its loss": (
        lambda: of_two(["mse", "mae"]),
        {"y": [Y, None]},
    ),
    r"give the model batch_shape=\[n, \.\.\.\], n being batch_size over .* and accumulate_steps": (
        lambda: compiled(keras.Input(batch_shape=[12, 3, 1]), layers.LSTM(2, stateful=True), layers.Dense(1)),
        {"accumulate_steps": 2, "x": X[..., np.newaxis]},
    ),
    r"BatchNormalization\(synchronized=True\) does with accumulate_steps; leave one out": (
        lambda: compiled(keras.Input([3]), layers.BatchNormalization(synchronized=True), layers.Dense(1)),
        {"accumulate_steps": 2, "strategy": "mirrored", "num_virtual_devices": 2},
    ),
}


@pytest.mark.parametrize("line", MISTAKES)
def test_what_a_model_cannot_be_is_one_line(line):
    make, more = MISTAKES[line]
    with pytest.raises(crankshaft.UsageError, match=line):
        crankshaft.fit(make, **{"x": X, "y": Y, **HOW, "jit": "off", **more})


@pytest.mark.parametrize("labels", [{"a": Y}, (Y, None)], ids=["by name", "None"])
def test_an_output_without_labels_is_left_out(labels):
    theirs, ours = (of_two() for _ in range(2))
    ours.set_weights(theirs.get_weights())
    theirs.fit(X, labels, **HOW)
    crankshaft.fit(ours, X, labels, **HOW, jit="off")
    assert_close(ours, theirs, 1e-5, 1e-6)


class Several(keras.Model):
    """Some of its outputs are None, as those that only training or another task computes."""

    def __init__(self, by_name, **more):
        super().__init__(**more)
        self.by_name = by_name
        self.a, self.b = (layers.Dense(size, "sigmoid", kernel_initializer="ones") for size in (1, 3))

    def get_config(self):
        return {"by_name": self.by_name}

    def call(self, inputs):
        a, b = self.a(inputs), self.b(inputs)
        return {"a": a, "b": b, "none": None} if self.by_name else (None, a, b)


@pytest.mark.parametrize("how", [{}, TWO], ids=["one device", "two replicas"])
@pytest.mark.parametrize("by_name", [True, False], ids=["by name", "in order"])
def test_outputs_and_labels_may_be_none_as_in_keras(by_name, how):
    def trained(fit, **more):
        model = Several(by_name)
        losses = (None, "mse", keras.losses.Dice())  # the last of the whole batch
        names = ("none", "a", "b")
        loss = dict(zip(names[1:], losses[1:], strict=True)) if by_name else [*losses]
        metrics = None if by_name else [None, ["mae"], ["mae"]]
        model.compile(keras.optimizers.SGD(0.1), loss, metrics=metrics)
        y = (None, np.abs(Y), np.eye(3, dtype="float32")[np.arange(len(Y)) % 3])
        given = dict(zip(names, y, strict=True)) if by_name else y
        return model, fit(model, X, given, **{**HOW, "epochs": 2}, validation_data=(X, given), **more)

    (theirs, history), (ours, run) = trained(keras.Model.fit), trained(crankshaft.fit, jit="off", **how)
    compare((theirs, history), (ours, run.history), 1e-5)


def test_prediction_names_what_it_cannot_take_or_give():
    class Warm(keras.layers.Layer):
        def call(self, inputs):
            return {"height": inputs, "temperature": tf.constant(2.0)}

    images = np.ones([12, 6, 6, 1], "float32")
    pooled = (keras.Input([None, None, 1]), layers.Conv2D(2, 3), layers.GlobalAveragePooling2D(), layers.Dense(1))
    how = {**HOW, "epochs": 1, "jit": "off"}
    run = crankshaft.fit(lambda: compiled(*pooled), images, Y[:12], **how)
    with pytest.raises(crankshaft.UsageError, match=r"float32\[8, 8, 1\] .*; model\.predict takes other sizes"):
        run.predict(np.ones([3, 8, 8, 1], "float32"))
    assert run.model.predict(np.ones([3, 8, 8, 1], "float32"), verbose=0).shape == (3, 1)
    several = lambda: compiled(keras.Input([3]), layers.Dense(1), Warm(), loss={"height": "mse"})  # noqa: E731
    run = crankshaft.fit(several, X, {"height": Y}, **how)
    with pytest.raises(crankshaft.UsageError, match=r"output temperature is one number, of no example; leave it out"):
        run.predict(X)


GENERATOR = np.random.default_rng(0)


def images():
    """Convolutions on images, with augmentation and dropout."""
    y = GENERATOR.integers(0, 3, 96)
    x = np.eye(3)[y][:, :, None, None].repeat(4, 2).reshape(96, 12, 1, 1) + GENERATOR.normal(size=(96, 12, 12, 1)) / 4
    model = keras.Sequential(
        [keras.Input([12, 12, 1]), layers.RandomTranslation(0.0, 0.1), layers.Conv2D(8, 3, activation="relu")]
    )
    for layer in (layers.MaxPooling2D(), layers.Flatten(), layers.Dropout(0.2), layers.Dense(3, "softmax")):
        model.add(layer)
    model.compile("adam", "categorical_crossentropy", metrics=["accuracy"])
    return model, x, np.eye(3)[y]


def text():
    """Words looked up within the model, averaged."""
    y = GENERATOR.integers(0, 2, 96).astype("float32")
    x = np.array([" ".join(GENERATOR.choice([["bad", "dull"], ["good", "fine"]][int(each)], 4)) for each in y])
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
    x = GENERATOR.normal(size=(96, 1)).astype("float32") @ GENERATOR.normal(size=(1, 6)).astype("float32")
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
    x = GENERATOR.normal(size=(96, 5)).astype("float32")
    same = GENERATOR.integers(0, 2, [96, 1]).astype("float32")
    other = np.where(same, x + 0.1 * GENERATOR.normal(size=x.shape), GENERATOR.normal(size=x.shape)).astype("float32")
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
    x = GENERATOR.integers(0, 6, [96, 5])
    inputs = keras.Input([5], dtype="int32")
    hidden = Positions(5, 6, 8)(inputs)
    hidden = layers.LayerNormalization()(hidden + layers.MultiHeadAttention(2, 4)(hidden, hidden))
    model = keras.Model(inputs, layers.Dense(2)(layers.Flatten()(hidden)))
    model.compile(keras.optimizers.AdamW(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, x, x[:, 0] // 3


def segmentation():
    """A class for each pixel, by convolutions down and up again."""
    x = GENERATOR.normal(size=(48, 8, 8, 1)).astype("float32")
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
    x = GENERATOR.normal(size=(96, 6)).astype("float32")
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
