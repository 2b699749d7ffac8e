"""Blocks that are computed again in the backward pass: the same gradients, masks and moving statistics."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Trainer, mean
from crankshaft.engine.errors import UsageError
from crankshaft.engine.layers import recomputed
from crankshaft.engine.step.recompute import computed_after
from crankshaft.models.transformer_lm import Model as LanguageModel
from tests.arrays import assert_close

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 37, (24, 9)).astype(np.int32)
VALUES = RNG.normal(size=(24, 5)).astype(np.float32)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_steps": 2},
        pytest.param({"precision": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param({"jit": True}, marks=pytest.mark.slow),
        pytest.param({"replicas": 2, "model": 2}, marks=pytest.mark.slow),
        pytest.param({"replicas": 4, "model": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_run_is_the_same(bench, options):
    """Within the rounding of gradients, since TensorFlow joins other operations; without the same masks it is not."""
    source = TOKENS[:, :-1], TOKENS[:, 1:]
    shared = {"num_classes": 37, "learning_rate": 0.01, "optimizer": "adam", **options}
    runs = [
        bench(LanguageModel(layers=1, width=16, heads=2, dropout=0.2), source, 8, recompute=each, **shared)
        for each in (False, True)
    ]
    expected, found = (run.curve(8) for run in runs)
    np.testing.assert_allclose(found, expected, rtol=1e-6 if "precision" not in options else 2e-3)


class Block(tf.keras.layers.Layer):
    """Takes and gives several values, and moves statistics.

    Args:
      adds: whether it adds to the loss.
    """

    def __init__(self, adds=False):
        super().__init__()
        self.inner = tf.keras.layers.Dense(5, "tanh", kernel_initializer=tf.keras.initializers.GlorotUniform(1))
        self.norm, self.drop = tf.keras.layers.BatchNormalization(momentum=0.5), tf.keras.layers.Dropout(0.3)
        self.adds = adds

    def build(self, shape):
        self.inner.build(shape)
        self.norm.build(shape)

    def call(self, x, counts, training=None):
        if self.adds:
            self.add_loss(tf.reduce_sum(x))
        return {"x": x + self.drop(self.norm(self.inner(x), training=training), training=training), "n": counts + 1}


class Deep(Trainer):
    def __init__(self, calls=recomputed, adds=False):
        super().__init__()
        self.calls, self.adds = calls, adds

    def build_model(self):
        calls, adds = self.calls if self.run_context.options.recompute else called, self.adds

        class Model(tf.keras.Model):
            def __init__(self):
                super().__init__()
                self.blocks = [Block(adds) for _ in range(3)]

            def build(self, shape):
                for block in self.blocks:
                    block.build(shape)

            def call(self, x, training=None):
                counts = tf.zeros([], tf.int32)
                for block in self.blocks:
                    found = calls(block, x, counts, training=training)
                    x, counts = found["x"], found["n"]
                return x * tf.cast(counts, x.dtype)

        return Model()

    def loss(self, outputs, batch):
        return mean(tf.reduce_sum(outputs**2, 1))


def test_statistics_move_once_and_evaluation_is_as_ever(bench):
    made = {"optimizer": "sgd", "learning_rate": 1e-3, "eval_source": VALUES}
    plain, again = (bench(Deep(), VALUES, 8, recompute=each, **made) for each in (False, True))
    for run in (plain, again):
        run.train(6)
    assert_close(again.trainer.model.variables, plain.trainer.model.variables, rtol=1e-5, atol=1e-6)
    (expected, _), (found, _) = (run.strategy.evaluate().values()["loss"] for run in (plain, again))
    assert found == pytest.approx(expected, rel=1e-5)


def called(layer, *inputs, **arguments):
    return layer(*inputs, **arguments)


@pytest.mark.parametrize(
    ("trainer", "says"),
    [
        (Deep(called), "Deep calls no layer by crankshaft.engine.layers.recomputed"),
        (Deep(adds=True), "adds to the loss"),
    ],
)
def test_what_can_t_be_computed_again_is_said(bench, trainer, says):
    run = bench(trainer, VALUES, 8, recompute=True, optimizer="sgd")
    with pytest.raises(ValueError, match=f"recompute.*{says}"):
        run.train(1)


class CountsOutside(tf.keras.layers.Layer):
    """Counts its calls in what is not its own: a tf.Variable, or a Keras variable of the program."""

    def __init__(self, count):
        super().__init__()
        self.count = lambda: count.assign_add(1.0)

    def call(self, x):
        self.count()
        return x


class Counting(Trainer):
    def __init__(self, variable):
        super().__init__()
        self.variable = variable

    def build_model(self):
        return tf.keras.Sequential([tf.keras.Input([5]), tf.keras.layers.Dense(1)])

    def build(self):
        super().build()
        self.block = CountsOutside(self.variable(0.0, trainable=False))
        self.block.build([None, 1])

    def forward(self, features, training):
        return recomputed(self.block, self.model(features))

    def loss(self, outputs, batch):
        return mean(outputs[:, 0])


@pytest.mark.parametrize("variable", [tf.Variable, tf.keras.Variable])
def test_a_block_that_changes_what_is_not_its_own_is_refused(bench, variable):
    run = bench(Counting(variable), VALUES, 8, recompute=True, optimizer="sgd")
    with pytest.raises(UsageError, match=r"recompute calls counts_outside.* twice, and it changes a variable.*not its"):
        run.train(1)


@pytest.mark.parametrize(("after", "products"), [(lambda tensors, others: tensors, 5), (computed_after, 6)])
def test_xla_computes_again_what_is_to_come_after_others(after, products):
    """Otherwise it merges equal products, and keeps the first one's result."""

    @tf.custom_gradient
    def block(x, w):
        def gradient(dy):
            sources = [*after([x], [dy]), w]
            with tf.GradientTape() as tape:
                tape.watch(sources)
                y = tf.tanh(sources[0] @ w) @ w
            return tape.gradient(y, sources, dy)

        return tf.tanh(x @ w) @ w, gradient

    @tf.function(jit_compile=True)
    def step(x, w):
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            y = block(x, w)
        return tape.gradient(y, [x, w], y)

    x = tf.random.stateless_normal([64, 64], [0, 1])
    hlo = step.experimental_get_compiler_ir(x, 0.1 * x)(stage="optimized_hlo")
    assert hlo.count(" dot(") == products + 1
    plain = tf.function(lambda: step.python_function(x, 0.1 * x))()
    for one, other in zip(step(x, 0.1 * x), plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
