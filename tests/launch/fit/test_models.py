"""`crankshaft.fit` of models that differ from what their configuration says, make layers late, or take ragged data."""

from __future__ import annotations

import functools
import random

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


def partly_frozen(block):
    block.second.kernel.trainable = False


@pytest.mark.parametrize("where", [{}, COPIES], ids=["itself", "copy"])
@pytest.mark.parametrize("change", [changed, pytest.param(partly_frozen, marks=pytest.mark.slow)])
def test_what_a_configuration_leaves_out_is_trained_in_a_model_and_its_copy(change, where):
    theirs, ours = model(change), model(change)
    expected = theirs.fit(X, Y, **HOW).history["loss"]
    run = crankshaft.fit(ours, X, Y, **HOW, **where, jit="off")
    np.testing.assert_allclose(run.history.history["loss"], expected, rtol=1e-6)
    assert (run.models["model"] is ours) == (not where)
    assert_close(ours, theirs, 1e-5, 1e-6)
    assert [each.path for each in run.model.weights] == [each.path for each in ours.weights]  # for --freeze


class Scaled(layers.Layer):
    """Needs an attribute that no configuration has."""

    def call(self, inputs):
        return inputs * self.factor


def test_what_cannot_be_copied_is_one_line():
    factor = 3.0
    bound = model(lambda block: setattr(block, "function", lambda x: factor * x))  # its factor may be a weight
    before = bound.get_weights()
    for how in (COPIES, {"ema_decay": 0.9}):  # of which the model gets the averages of a copy
        with pytest.raises(crankshaft.UsageError, match=r"Block sequential.*/block.* has another function"):
            crankshaft.fit(bound, X, Y, **HOW, **how, jit="off")
    np.testing.assert_equal(bound.get_weights(), before)  # before the first step
    scaled = Scaled()
    scaled.factor = 2.0
    with pytest.raises(crankshaft.UsageError, match=r"can't recreate Sequential .* has no attribute 'factor'"):
        crankshaft.fit(compiled(keras.Input([3]), scaled, layers.Dense(1)), X, Y, **HOW, ema_decay=0.9, jit="off")
    crankshaft.fit(bound, X, Y, **HOW, jit="off")


@keras.utils.register_keras_serializable()
class Attending(keras.Model):
    """Makes layers and weights as it is built."""

    def __init__(self, **more):
        super().__init__(**more)
        self.attention, self.head = layers.MultiHeadAttention(2, 3, dropout=0.1), layers.Dense(1)

    def call(self, inputs):
        return self.head(self.attention(inputs[:, None], inputs[:, None])[:, 0])

    def get_config(self):
        return {}


class AttendingByStep(Attending):
    def train_step(self, data):
        return {"loss": keras.ops.mean(self(data[0], training=True))}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (Attending, {}),
        (AttendingByStep, {}),
        (Attending, COPIES),
    ],
    ids=["itself", "by its step", "copy"],
)
def test_models_that_fit_builds_begin_with_weights_of_their_own_as_by_keras(kind, how):
    def begun(fit, **how):
        keras.utils.set_random_seed(5)
        for _ in range(2):
            model = kind()
            model.compile(keras.optimizers.SGD(0.0), "mse")
            fit(model, X, Y, batch_size=48, verbose=0, **how)
            yield from model.get_weights()
        yield random.random(), np.random.normal(), float(tf.random.normal([]))  # noqa: NPY002

    theirs, ours = [*begun(keras.Model.fit)], [*begun(crankshaft.fit, jit="off", **how)]
    for expected, found in zip(theirs, ours, strict=True):
        np.testing.assert_array_equal(found, expected)
    assert not np.array_equal(ours[0], ours[len(ours) // 2])


class OwnCompile(keras.Model):
    """Takes other arguments of `compile` than Keras's."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1, kernel_initializer="ones")

    def call(self, inputs):
        return self.dense(inputs)

    def get_config(self):
        return {}

    def compile(self, kind):
        self.kind = kind
        super().compile(keras.optimizers.SGD(0.01), kind)


class CopiedCompile(OwnCompile):
    def get_compile_config(self):
        return {"kind": self.kind}

    def compile_from_config(self, config):
        self.compile(**config)


def test_a_compile_of_the_models_own_is_copied_by_its_configuration():
    def own(kind):
        made = kind()
        made.compile("mae")
        return made

    theirs, ours = own(CopiedCompile), own(CopiedCompile)
    theirs.fit(X, Y, **HOW)
    crankshaft.fit(ours, X, Y, **HOW, **COPIES, jit="off")
    assert_close(ours, theirs, 1e-5, 1e-6)
    line = "unexpected keyword .* implement get_config, get_compile_config, compile_from_config, or pass a function"
    with pytest.raises(crankshaft.UsageError, match=line):
        crankshaft.fit(own(OwnCompile), X, Y, **HOW, **COPIES, jit="off")


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


class SeededNoise(layers.Layer):
    """Samples by the step's own seed, in training alone."""

    def call(self, x, training=False):
        if not training:
            return x
        return x + 0.1 * tf.random.stateless_normal(tf.shape(x), crankshaft.step_context().seed())


def test_a_layer_may_sample_by_the_steps_seed():
    model = keras.Sequential([keras.Input([3]), SeededNoise(), layers.Dense(1)])
    model.compile("sgd", "mse")
    before = model.get_weights()[0]
    crankshaft.fit(model, X, Y, **HOW, jit="off")
    assert np.abs(model.get_weights()[0] - before).max() > 0


class MoreInTraining(keras.Model):
    """Has a second output in training alone."""

    def __init__(self, by_name, **more):
        super().__init__(**more)
        self.by_name, how = by_name, {"kernel_initializer": keras.initializers.RandomUniform(seed=3)}
        self.a, self.b = layers.Dense(1, **how), layers.Dense(1, **how)

    def call(self, inputs, training=None):
        outputs = {"a": self.a(inputs), **({"b": self.b(inputs)} if training else {})}
        return outputs if self.by_name else [*outputs.values()]


@pytest.mark.thorough
@pytest.mark.parametrize("by_name", [True, False])
def test_a_model_with_more_outputs_in_training_is_trained_as_by_keras(by_name):
    def made():
        model = MoreInTraining(by_name)
        model.compile("sgd", {"a": "mse", "b": "mae"} if by_name else ["mse", "mae"])
        return model

    theirs, ours, labels = made(), made(), {"a": Y, "b": 2 * Y} if by_name else (Y, 2 * Y)
    expected = theirs.fit(X, labels, **HOW).history
    run = crankshaft.fit(ours, X, labels, **HOW, jit="off")
    assert run.history.history.keys() == expected.keys()
    assert_close(ours, theirs, 1e-5, 1e-6)
    assert len(tf.nest.flatten(run.predict(X))) == 1
    line = "MoreInTraining has 1 output in evaluation, and 2 in training, of which its losses are; return the same"
    with pytest.raises(crankshaft.UsageError, match=line):
        crankshaft.fit(ours, X, labels, **HOW, jit="off", validation_data=(X, labels))


@keras.utils.register_keras_serializable()
class Moving(layers.Layer):
    """Keeps a decaying average of its inputs, over the examples of all replicas."""

    def build(self, shape):
        self.average = self.add_weight(shape=(), initializer="zeros", trainable=False, aggregation="only_first_replica")

    def call(self, inputs, training=False):
        if training:
            sums = tf.stack([tf.reduce_sum(inputs), tf.cast(tf.size(inputs), tf.float32)])
            total, count = tf.unstack(tf.distribute.get_replica_context().all_reduce("sum", sums))
            self.average.assign(0.5 * self.average + 0.5 * total / count)
        return inputs


@pytest.mark.thorough
def test_a_layer_may_sum_across_replicas():
    """While replicas exchange values, the layers keep what each has added to the loss, by examples and in all."""
    # From others the loss may grow two thousandfold, and rounding with it.
    hidden, last = [{"kernel_initializer": keras.initializers.Constant(value)} for value in (1, [[0.5], [-0.25]])]
    models = [
        compiled(keras.Input([3]), layers.Dense(2, **hidden), Endpoint(), Moving(), layers.Dense(1, **last))
        for _ in "ab"
    ]
    for model, how in zip(models, ({}, TWO), strict=True):
        crankshaft.fit(model, X, Y, **HOW, jit="off", **how)
    assert_close(models[1], models[0], 1e-6, 1e-6)


def compiled(*parts, loss="mse"):
    made = keras.Sequential(parts)
    made.compile("sgd", loss)
    return made


def of_two(loss=("mse", None)):
    inputs = keras.Input([3])
    made = keras.Model(inputs, [layers.Dense(1, name="a")(inputs), layers.Dense(1, name="b")(inputs)])
    made.compile("sgd", [*loss])
    return made


class Endpoint(layers.Layer):
    """Adds a loss for each example, as a layer of connectionist temporal classification does."""

    def call(self, inputs):
        self.add_loss(tf.square(inputs - 1.0) / 12)
        self.add_loss(tf.constant([0.5, 0.25]))  # no part of a sum over the batch
        return inputs


def with_endpoint(kind=keras.Sequential):
    return kind([keras.Input([3]), layers.Dense(1), Endpoint()])


class OwnLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.reduce_mean(tf.square(y_pred - y)) + sum(map(tf.reduce_sum, self.losses))


def with_own_loss():
    made = with_endpoint(OwnLoss)
    made.compile("sgd")
    return made


class WithoutTraining(keras.Model):
    """Has no argument `training`, so that Keras's `fit` passes none."""

    def __init__(self, **more):
        super().__init__(**more)
        self.norm, self.drop = layers.BatchNormalization(), layers.Dropout(0.5)
        self.dense = layers.Dense(1, kernel_initializer="ones")

    def call(self, inputs):
        return self.dense(self.drop(self.norm(inputs)))


class OtherNames(keras.Model):
    """Has a loss of its own, with labels by names that are not its outputs'."""

    def __init__(self, **more):
        super().__init__(**more)
        self.dense = layers.Dense(1, kernel_initializer="ones")

    def call(self, inputs):
        return {"a": self.dense(inputs), "b": self.dense(2 * inputs)}

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.reduce_mean(tf.square(y_pred["a"] - y["rating"]) + tf.square(y_pred["b"] - y["clicked"]))


class WrongShape(keras.Model):
    """Has a method that `fit` never calls, and that fails."""

    def __init__(self, **more):
        super().__init__(**more)
        self.dense = layers.Dense(1, kernel_initializer="ones")

    def call(self, inputs):
        return self.dense(inputs["x"])

    def compute_output_shape(self, input_shape):
        return input_shape[0], 1


def of_squeezed_labels(y_true, y_pred):
    return keras.losses.sparse_categorical_crossentropy(tf.squeeze(y_true), y_pred, from_logits=True)


def with_three():
    return keras.Sequential([keras.Input([3]), layers.Dense(3, kernel_initializer="ones")])


A, B = X[:44], Y[:44]  # the last batch is smaller
AS_KERAS = {
    "added array": (with_endpoint, "mse", A, B),
    "call without training": (WithoutTraining, "mse", A, B),
    "labels of its own loss": (OtherNames, None, A, {"rating": B, "clicked": 2 * B}),
    "wrong output shape": (WrongShape, "mse", {"x": A}, B),
    "loss of squeezed labels": (with_three, of_squeezed_labels, X, np.arange(48)[:, None] % 3),
}


@pytest.mark.parametrize("how", [{}, pytest.param(TWO, marks=pytest.mark.thorough)], ids=["one device", "two replicas"])
@pytest.mark.parametrize("case", AS_KERAS)
def test_a_model_is_built_called_and_penalized_as_by_keras(case, how):
    make, loss, x, y = AS_KERAS[case]

    def trained(fit, **more):
        keras.utils.set_random_seed(1)
        model = make()
        model.compile(keras.optimizers.SGD(0.002), loss)
        return model, fit(model, x, y, validation_data=(x, y), **HOW, **more)

    theirs, (ours, run) = trained(keras.Model.fit), trained(crankshaft.fit, jit="off", **how)
    compare(theirs, (ours, run.history), 1e-6)


MISTAKES = {
    r"variable .*kernel is float64, and losses, gradients and updates are float32; make the model": (
        lambda: compiled(keras.Input([3], dtype="float64"), layers.Dense(1, dtype="float64")),
        {},
    ),
    r"y is None for an output that has a loss .*; give its labels, or compile with None as its loss": (
        lambda: of_two(["mse", "mae"]),
        {"y": [Y, None]},
    ),
    r"the batch size of the input sequences must be the same as the batch size of the initial state": (
        lambda: compiled(keras.Input(batch_shape=[12, 3, 1]), layers.LSTM(2, stateful=True), layers.Dense(1)),
        {"accumulate_steps": 2, "x": X[..., np.newaxis]},
    ),
    r"BatchNormalization\(synchronized=True\) does with accumulate_steps; leave one out": (
        lambda: compiled(keras.Input([3]), layers.BatchNormalization(synchronized=True), layers.Dense(1)),
        {"accumulate_steps": 2, "strategy": "mirrored", "num_virtual_devices": 2},
    ),
    r"a layer adds an array to the loss \(add_loss\), which Keras sums over a batch, and micro-batches": (
        lambda: compiled(keras.Input([3]), layers.Dense(1), Endpoint()),
        {"accumulate_steps": 2},
    ),
    r"has its own compute_loss, and a layer adds an array to the loss \(add_loss\), of which each replica": (
        with_own_loss,
        TWO,
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


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("by_name", "how"),
    [(True, {}), (False, TWO), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((True, TWO), (False, {})))],
    ids=["by name, one device", "in order, two replicas", "by name, two replicas", "in order, one device"],
)
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


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "how"),
    [("arrays", TWO), ("dataset", {})]
    + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (("arrays", {}), ("dataset", TWO), ("PyDataset", {}), ("generator", {}))
    ],
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


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "how"),
    [("dataset", {}), ("PyDataset", TWO)]
    + [pytest.param(kind, {}, marks=pytest.mark.slow) for kind in ("generator", "PyDataset")],
    ids=str,
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


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("float16", {}),
        ("bfloat16", {}),
        ("bfloat16", TWO),
    ],
)
def test_weights_of_two_dtypes_are_trained_together(kind, how):
    def made():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input([3]), layers.Dense(4, "relu", dtype=kind), layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), keras.losses.MeanSquaredError(dtype=kind))
        return model

    theirs = made()
    theirs.fit(X, Y, **HOW)
    run = crankshaft.fit(made if how else made(), X, Y, **HOW, **how)
    assert [weight.dtype for weight in run.model.weights] == [kind, kind, "float32", "float32"]
    for ours, other in zip(run.model.get_weights(), theirs.get_weights(), strict=True):
        difference = np.abs(ours.astype("float32") - other.astype("float32")).max()
        assert difference <= (0.02 if how else 0.0)
