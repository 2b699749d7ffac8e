"""Variables with learning rates of their own, and frozen ones."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Trainer, mean
from crankshaft.engine import optimizers
from crankshaft.parts.tables import Embedding

pytestmark = pytest.mark.thorough

SOURCE = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32), np.zeros(12, np.float32)


class Sloped(Trainer):
    """Gradients that depend on the batch alone: each variable's way depends on nothing but its own rate."""

    def __init__(self, multipliers=None):
        super().__init__()
        self.multipliers = multipliers or {}

    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(2, bias_initializer="ones")])

    def loss(self, outputs, batch):
        return mean(tf.reduce_sum(outputs, 1))

    def learning_rate_multiplier(self, variable):
        return self.multipliers.get(variable.path.split("/")[-1], 1.0)


def weights(made) -> dict[str, np.ndarray]:
    return {v.path.split("/")[-1]: v.numpy() for v in made.trainer.model.weights}


RULES = [
    ("sgd", {}),
    ("momentum", {}),
    ("adam", {}),
    ("adamw", {"weight_decay": 0.1, "weight_decay_exclude": None}),
    ("adagrad", {}),
    ("rmsprop", {"optimizer_arg": {"momentum": 0.9}}),
    ("ftrl", {}),
    ("nadam", {}),  # Keras's own, which does something once a step
    ("lion", {"weight_decay": 0.1, "weight_decay_exclude": None}),
]


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        pytest.param(*each, id=each[0], marks=[] if each[0] in ("adamw", "nadam") else pytest.mark.slow)
        for each in RULES
    ],
)
def test_a_multiplier_is_one_of_the_rate_and_of_its_decay(bench, rule, options):
    """A variable with a multiplier goes the way of one whose rate is as much smaller, to float32's rounding."""

    def run(rate, **multipliers):
        made = bench(Sloped(multipliers), SOURCE, 5, optimizer=rule, learning_rate=rate, **options)
        made.train(6)
        return weights(made)

    full, tenth, mixed = run(0.1), run(0.01), run(0.1, kernel=0.1)
    np.testing.assert_allclose(mixed["kernel"], tenth["kernel"], rtol=2e-6)
    np.testing.assert_array_equal(mixed["bias"], full["bias"])
    assert np.abs(full["kernel"] - tenth["kernel"]).min() > 1e-4


@pytest.mark.parametrize(("rule", "replicas"), [("adam", 2), ("ftrl", 1), ("nadam", 2)])
def test_a_frozen_variable_stays_and_has_no_slots(bench, rule, replicas):
    made = bench(Sloped({"kernel": 0}), SOURCE, 5, replicas, optimizer=rule, weight_decay=0.1, ema_decay=0.9)
    before = weights(made)
    total, count = made.train(1)["gradient_norm"]
    after = weights(made)
    np.testing.assert_array_equal(after["kernel"], before["kernel"])
    assert np.abs(after["bias"] - before["bias"]).min() > 0
    assert total / count == pytest.approx(2**0.5)  # of the bias alone
    assert not [v for v in made.state.variables() if v.shape == [3, 2] and v is not made.trainer.model.weights[0].value]


def test_a_frozen_variable_makes_no_number_that_is_not_finite():
    """FTRL divides by the rate, also of a variable that has none; `check_numerics` would name that."""
    kept, moved = tf.Variable([1.0, 2.0]), tf.Variable([1.0, 2.0])
    optimizer = optimizers.build("ftrl", 0.1)
    optimizer.build([kept, moved], [0.0, 1.0])
    tf.debugging.enable_check_numerics()
    try:
        optimizer.apply([tf.ones(2), tf.ones(2)], [kept, moved])
    finally:
        tf.debugging.disable_check_numerics()
    np.testing.assert_array_equal(kept, [1.0, 2.0])
    assert np.all(moved != kept)


def test_a_step_of_ones_own_leaves_frozen_variables_too(bench):
    class Own(Sloped):
        @property
        def trainable_variables(self):
            return self.model.trainable_variables

    made = bench(Own({"kernel": 0}), SOURCE, 5, optimizer="adam")
    before = weights(made)
    made.train(3)
    after = weights(made)
    np.testing.assert_array_equal(after["kernel"], before["kernel"])
    assert np.abs(after["bias"] - before["bias"]).min() > 0


class Table(Trainer):
    def __init__(self, multiplier):
        super().__init__()
        self.table = Embedding("rows", 6, 2)
        self.multiplier = multiplier

    def build_model(self):
        return tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)])

    def forward(self, features, training):
        return self.model(self.table(features, training=training))

    def loss(self, outputs, batch):
        return mean(outputs[:, 0])

    def learning_rate_multiplier(self, variable):
        return self.multiplier if "rows" in variable.name else 1.0


def test_a_tables_rows_have_their_rate(bench):
    """One step of descent: rows that come twice in the batch move twice as far, each a tenth of what they would."""
    source = np.int64([0, 1, 1, 3]), np.zeros(4, np.float32)
    moved = []
    for multiplier in (1.0, 0.1, 0):
        made = bench(Table(multiplier), source, 4, optimizer="sgd", learning_rate=1.0)
        before = made.trainer.table(np.arange(6)).numpy()
        made.train(1)
        moved.append(made.trainer.table(np.arange(6)).numpy() - before)
    np.testing.assert_allclose(moved[1], 0.1 * moved[0], rtol=1e-4, atol=1e-8)  # differences of rows of 0.05
    np.testing.assert_array_equal(moved[2], 0)
    assert np.all(moved[0][[0, 1, 3]] != 0)


@pytest.mark.parametrize("multiplier", [-1, float("nan"), None, "0.1"])
def test_what_is_no_multiplier_is_named(bench, multiplier):
    with pytest.raises(ValueError, match=r"Sloped.learning_rate_multiplier returns .* for .*/kernel; return a number"):
        bench(Sloped({"kernel": multiplier}), SOURCE, 5)
