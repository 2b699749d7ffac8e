"""Steps whose layers compute with values read as a step begins, as around parameter servers, train one device's."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Trainer, Update, make_optimizer, mean, minimize
from crankshaft.engine.errors import UsageError
from crankshaft.engine.layers import recomputed
from crankshaft.engine.step.runner import StepRunner
from crankshaft.parts.parameter_servers.pulled import PulledValues, check_added
from tests.engine.trainers import Squares

pytestmark = pytest.mark.thorough

FEATURES = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
DATA = FEATURES, FEATURES.sum(1)
STEPS = 3


class Pulling:
    """Runs steps of a bench's trainer with all weights read as each begins; counts what is read again."""

    def __init__(self, made):
        self.made, self.runner = made, StepRunner(made.trainer)
        self.start_values: PulledValues | None = None
        self.step = tf.function(self._step, autograph=False)

    def train(self, steps: int) -> None:
        for number in range(steps):
            self.step(tf.constant(number, tf.int64))

    def _step(self, number):
        return self.made.strategy.distribution.run(self._replica_step, (number,))

    def _replica_step(self, number):
        inventory = self.made.trainer.inventory
        pulled = self._read_all(inventory.steady_variables)
        self.start_values = PulledValues(variables=pulled, pull=self._read_all, moved=inventory.moved_variables)
        batch = tuple(map(tf.constant, DATA))
        return self.runner.train_batch(batch, number, tf.constant(True), self.start_values)

    def _read_all(self, variables):
        return [(variable, tf.identity(variable.value)) for variable in variables]


def dense(units=1, **more):
    return tf.keras.layers.Dense(units, use_bias=False, kernel_initializer="ones", **more)


class Critics(Trainer):
    """Three updates of one model and then one of another, which computes with it."""

    repeats = staticmethod(lambda update: [update() for _ in range(3)][-1])

    def build(self):
        self.model, self.critic = (tf.keras.Sequential([tf.keras.Input([3]), dense(units)]) for units in (3, 1))
        self.optimizer = make_optimizer(self, self.model.trainable_variables)
        self.critic_optimizer = make_optimizer(self, self.critic.trainable_variables)

    def critic_losses(self, batch):
        real, made = self.critic(batch[0])[:, 0], self.critic(self.model(batch[0]))[:, 0]
        return {"critic_loss": mean(tf.square(real - 1) + tf.square(made + 1))}

    def losses(self, batch):
        return {"loss": mean(tf.square(self.critic(self.model(batch[0]))[:, 0] - 1))}

    def update_critic(self, batch):
        return minimize(self, batch, self.critic_losses, {"critic_loss": self.critic_optimizer})

    def train_step(self, batch):
        critic = self.repeats(lambda: self.update_critic(batch))
        return {**critic, **minimize(self, batch, self.losses, {"loss": self.optimizer})}


class CriticsInFunction(Critics):
    """A function that is traced once, and called again after what it assigns has changed."""

    def build(self):
        super().build()
        self.update_critic = tf.function(super().update_critic, autograph=False)


class CriticsInLoop(Critics):
    @staticmethod
    def repeats(update):
        def body(i, _):
            return i + 1, tuple(update()["critic_loss"])

        _, (total, count) = tf.while_loop(lambda i, _: i < 3, body, (0, (0.0, 0.0)))
        return {"critic_loss": type(mean([0.0]))(total, count)}


class Sam(Squares):
    def train_step(self, batch):
        variables = self.trainable_variables
        first, metrics = self.compute_gradients(batch)
        first = list(first.over(metrics["loss"].count))
        moves = [0.5 * gradient / tf.linalg.global_norm(first) for gradient in first]
        for variable, move in zip(variables, moves, strict=True):
            variable.assign_add(move)
        second, there = self.compute_gradients(batch)
        for variable, move in zip(variables, moves, strict=True):
            variable.assign_sub(move)
        update = Update(self, second.over(there["loss"].count), variables)
        update.apply(self.optimizer, variables)
        return update.end(metrics)


class ClippedBetween(Critics):
    def update_critic(self, batch):
        metrics = super().update_critic(batch)
        for variable in self.critic.trainable_variables:
            variable.assign(tf.clip_by_value(variable, -0.1, 0.1))
        return metrics


class MomentumTeacher(Squares):
    """A teacher that follows before it is computed with."""

    def build(self):
        self.teacher = tf.keras.Sequential([tf.keras.Input([3]), dense()])
        super().build()

    def loss(self, outputs, batch):
        return mean(tf.square(outputs - self.teacher(batch[0]))[:, 0] + tf.square(outputs[:, 0] - batch[1]))

    def train_step(self, batch):
        for mine, theirs in zip(self.teacher.variables, self.model.variables, strict=False):
            mine.assign(0.5 * mine + 0.5 * theirs)
        return super().train_step(batch)


class Lookahead(Squares):
    """Goes back half of the way of two steps before it begins the next one."""

    def build(self):
        super().build()
        self.slow = [tf.Variable(variable.value, trainable=False) for variable in self.trainable_variables]
        self.steps = tf.Variable(0, trainable=False)

    def train_step(self, batch):
        self.steps.assign_add(1)
        is_due = self.steps % 2 == 0
        for slow, variable in zip(self.slow, self.trainable_variables, strict=True):
            slow.assign_add(tf.where(is_due, 0.5 * (variable - slow), 0.0))
            variable.assign(tf.where(is_due, slow, variable))
        return super().train_step(batch)


class ReadsItsAverage(tf.keras.layers.Layer):
    """Passes no gradient to what an average is made of, as a variable does not."""

    def build(self, shape):
        self.average = self.add_weight(shape=shape[-1:], initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.average.assign(0.5 * self.average + 0.5 * tf.reduce_mean(x, 0))
        return x - self.average


class Averaging(Squares):
    def build_model(self):
        return tf.keras.Sequential([dense(3), ReadsItsAverage(), dense()])


class SpectralComputedAgain(Squares):
    """A block, computed again in the backward pass, that assigns a trained weight and a state, and reads both again."""

    def build_model(self):
        layers = [dense(3), tf.keras.layers.SpectralNormalization(dense(3)), ReadsItsAverage()]
        return tf.keras.Sequential([tf.keras.Sequential(layers), dense()])

    def forward(self, features, training):
        block, last = self.model.layers
        calls = recomputed if self.run_context.options.recompute else tf.keras.layers.Layer.__call__
        return last(calls(block, features, training=training))


class Spectral(Squares):
    """A layer that assigns its trained weight, as it computes, and then computes with that."""

    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.SpectralNormalization(dense(2)), dense()])


STEP_FORMS = [
    (Critics, {}),
    (CriticsInFunction, {}),
    (CriticsInLoop, {}),
    (Sam, {}),
    (Sam, {"accumulate_steps": 2}),
    (ClippedBetween, {}),
    (MomentumTeacher, {}),
    (Lookahead, {}),
    (Averaging, {}),
    (Spectral, {}),
    (Spectral, {"accumulate_steps": 2}),
    (Spectral, {"accumulate_steps": 3}),
    (SpectralComputedAgain, {"recompute": True}),
]


@pytest.mark.parametrize(("trainer", "options"), STEP_FORMS)
def test_a_variable_has_the_value_that_the_step_last_gave_it(bench, trainer, options):
    """Rounding of 1e-7 in three steps."""
    tf.keras.utils.set_random_seed(0)
    in_one_pass = {**options, "recompute": False} if "recompute" in options else options
    one = bench(trainer(), DATA, 8, shuffle=False, optimizer="sgd", learning_rate=0.05, **in_one_pass)
    pulling = bench(trainer(), DATA, 8, shuffle=False, optimizer="sgd", learning_rate=0.05, **options)
    pairs = list(zip(one.state.variables(), pulling.state.variables(), strict=True))
    for mine, theirs in pairs:
        theirs.assign(mine)
    one.train(STEPS)
    Pulling(pulling).train(STEPS)
    compared = [(mine, theirs) for mine, theirs in pairs if mine.dtype == tf.float32]
    assert len(compared) > 1
    for mine, theirs in compared:
        np.testing.assert_allclose(theirs.numpy(), mine.numpy(), rtol=1e-5, atol=1e-6, err_msg=mine.name)


def test_only_what_a_step_has_written_is_read_again(bench):
    def read_again(trainer, **options) -> list[str]:
        pulling = Pulling(bench(trainer, DATA, 8, optimizer="adam", **options))
        pulling.train(1)
        return [variable.path for variable in pulling.start_values.pulled_again]

    assert read_again(Averaging(), accumulate_steps=2) == []
    critics = Critics()
    assert read_again(critics) == [critics.critic.variables[0].path] * 3


class Recomputing(Squares):
    """A block in a function that has a gradient of its own."""

    def build_model(self):
        return tf.keras.Sequential([dense(3), dense(3, activation="tanh"), dense()])

    def hidden(self, first, block, last):
        return last(tf.recompute_grad(block)(first))

    def forward(self, features, training):
        first, block, last = self.model.layers
        return self.hidden(first(features), block, last)


class InFunction(Recomputing):
    def hidden(self, first, block, last):
        return last(tf.function(tf.recompute_grad(block), autograph=False)(first))


class AlsoInTheOpen(Recomputing):
    def hidden(self, first, block, last):
        return last(tf.recompute_grad(block)(first) + block(first))


class ByArguments(Recomputing):
    def hidden(self, first, block, last):
        @tf.custom_gradient
        def doubled(x, kernel):
            y = tf.tanh(tf.matmul(x, kernel))

            def gradient(upstream):
                inner = 2 * upstream * (1 - tf.square(y))
                return tf.matmul(inner, kernel, transpose_b=True), tf.matmul(x, inner, transpose_a=True)

            return y, gradient

        return last(doubled(first, block.kernel))


class Recomputed(Recomputing):
    def hidden(self, first, block, last):
        return last(recomputed(block, first))


class Unused(Recomputing):
    """Ordinary gradients of None: a head that is not used, and a block that a stop_gradient ends."""

    def hidden(self, first, block, last):
        stopped = tf.stop_gradient(tf.recompute_grad(block)(first))
        return tf.recompute_grad(tf.tanh)(first)[:, :1] + tf.reduce_sum(stopped, 1, keepdims=True)


@pytest.mark.parametrize("trainer", [Recomputing, InFunction, AlsoInTheOpen])
def test_a_weight_that_a_custom_gradient_hides_from_the_tape_is_named(bench, trainer):
    made = bench(trainer(), DATA, 8, optimizer="sgd")
    with pytest.raises(UsageError, match=r"dense_\d+/kernel \(3, 3\): .*engine\.layers\.recomputed"):
        Pulling(made).train(1)


@pytest.mark.parametrize("trainer", [ByArguments, Recomputed, Unused])
def test_a_custom_gradient_of_its_arguments_and_gradients_of_none_are_taken(bench, trainer):
    options = {"recompute": True} if trainer is Recomputed else {}
    made = bench(trainer(), DATA, 8, optimizer="sgd", learning_rate=0.05, **options)
    before = [variable.numpy() for variable in made.trainer.model.variables]
    Pulling(made).train(1)
    moved = [np.abs(v.numpy() - x).max() > 0 for v, x in zip(made.trainer.model.variables, before, strict=True)]
    assert moved == ([True, False, False] if trainer is Unused else [True] * 3)


@pytest.mark.parametrize("trainer", [Sam, ClippedBetween, Spectral])
def test_a_weight_that_a_step_assigns_for_a_time_takes_one_worker(bench, trainer):
    made = bench(trainer(), DATA, 8, optimizer="adam")
    pulling = Pulling(made)
    graph = pulling.step.get_concrete_function(tf.constant(0, tf.int64)).graph
    check_added(made.state, graph)
    with pytest.raises(UsageError, match=r"kernel .*the step assigns this weight itself.*train with one worker"):
        check_added(made.state, graph, pulling.start_values)


@pytest.mark.parametrize("trainer", [Critics, MomentumTeacher, Averaging])
def test_weights_that_optimizers_alone_update_take_any_number_of_workers(bench, trainer):
    made = bench(trainer(), DATA, 8, optimizer="adam")
    pulling = Pulling(made)
    check_added(made.state, pulling.step.get_concrete_function(tf.constant(0, tf.int64)).graph, pulling.start_values)
