"""Mistakes in a user's own trainer and hooks, TensorFlow running: one line all the same."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine import Trainer, mean
from crankshaft.engine.hooks import Hook, every_epoch, every_steps
from tests.launch.line import FEATURES, LABELS, RUN, Line, data, location_of


@functools.cache
def metric() -> tf.keras.metrics.Metric:
    """A metric made outside of a step."""
    return tf.keras.metrics.Precision(name="precision")


class Classes(Line):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(2)])

    def loss(self, outputs, batch):
        return mean(tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], outputs))


def test_a_trainer_without_mistakes_trains(inside):
    inside(*RUN, trainer=Line, data=data).ok()


def test_a_loss_that_is_no_pair_is_told_what_to_return(inside):
    class Scalar(Line):
        def loss(self, outputs, batch):
            return tf.reduce_mean(tf.square(outputs[:, 0] - batch[1]))

    outcome = inside(*RUN, trainer=Scalar, data=data)
    assert (
        "Scalar.loss: a SymbolicTensor is not a pair (total, count); return crankshaft.mean(values); a Keras loss "
        "gives values with reduction=None, a Keras metric a pair by crankshaft.KerasMetric" in outcome.mistake
    )


@pytest.mark.parametrize("give", [lambda pair: {"a": pair, "b": pair}, lambda pair: pair + pair], ids=["dict", "sum"])
def test_losses_of_several_outputs_are_to_be_added_up_before(inside, give):
    class Several(Line):
        def loss(self, outputs, batch):
            return give(mean(tf.square(outputs[:, 0] - batch[1])))

    outcome = inside(*RUN, trainer=Several, data=data)
    assert "is not a pair (total, count); add up what belongs to an example, and return one pair: crankshaft.mean(" in (
        outcome.mistake
    )


class Weighing(Line):
    """Learns the scale of its errors, if `trains`: Kendall and Gal 2017."""

    trains = False

    def build_model(self):
        self.log_scale = tf.Variable(0.5, name="log_scale")
        return super().build_model()

    @property
    def trainable_variables(self):
        return [*super().trainable_variables, *([self.log_scale] if self.trains else [])]

    def loss(self, outputs, batch):
        return mean(tf.square(outputs[:, 0] - batch[1]) * tf.exp(-self.log_scale) + self.log_scale)


@pytest.mark.parametrize("trains", [True, False])
def test_a_variable_that_the_loss_uses_and_no_optimizer_updates_is_named(inside, monkeypatch, trains):
    monkeypatch.setattr(Weighing, "trains", trains)
    err = inside(*RUN, "--jit=off", trainer=Weighing, data=data).ok().err
    assert err.count("its step uses log_scale, trainable, that no optimizer updates; to train it, add it to") == (
        not trains
    )


def test_labels_of_text_are_one_line_that_says_what_to_do(inside):
    words = np.where(LABELS > 0, "up", "down")
    outcome = inside(*RUN, trainer=Classes, data=lambda: ((FEATURES, words), None))
    assert "labels holds strings, and Classes.loss computes with them as with numbers; number them before" in (
        outcome.mistake
    )
    outcome = inside(*RUN, trainer=Line, data=lambda: ((FEATURES, words), None))
    assert "labels holds strings, and Line.loss computes with them as with numbers; number them" in outcome.mistake


@pytest.mark.parametrize("label", [7, pytest.param(-1, marks=pytest.mark.slow)])
def test_a_label_out_of_range_is_named_with_the_range(inside, label):
    labels = np.where(LABELS > 0, label, 1).astype(np.int64)
    outcome = inside(*RUN, trainer=Classes, data=lambda: ((FEATURES, labels), None))
    assert f"the loss was given a label of {label} and takes labels from 0 to below 2, as many as" in outcome.mistake
    outcome = inside(*RUN, "--jit=on", trainer=Classes, data=lambda: ((FEATURES, labels), None))  # the step counts
    assert outcome.mistake.startswith(f"step 1: labels from 0 to 1: a number is {label}, out of that range; correct")


def test_what_is_no_model_is_named(inside):
    class Forgot(Line):
        def build_model(self):
            super().build_model()

    outcome = inside(*RUN, trainer=Forgot, data=data)
    assert "Forgot.build_model returned a NoneType; return a Keras model" in outcome.mistake


@pytest.mark.parametrize(
    "several", [lambda x, y: {"image": x, "label": y}, lambda x, y: ((x, x), y)], ids=["named", "pair"]
)
def test_several_features_of_a_sequential_are_named(inside, several):
    class Flat(Line):
        def build_model(self):  # of several arrays Flatten raises a TypeError, Dense a ValueError
            return tf.keras.Sequential([tf.keras.layers.Flatten(), tf.keras.layers.Dense(1)])

    for trainer in (Line, Flat):
        outcome = inside(*RUN, trainer=trainer, data=lambda: (several(FEATURES, LABELS), None))
        assert outcome.code == 2
        assert "model is a tf.keras.Sequential, which takes one array, and features are several: features[" in (
            outcome.error
        )


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        (None, "Wrong.metrics returned a NoneType; return a dictionary of pairs"),
        ({"error": tf.reduce_mean}, "Wrong.metrics['error']: a SymbolicTensor is not a pair (total, count)"),
        ({"error": lambda x: (x, tf.ones_like(x))}, "Wrong.metrics['error']: its total is not a scalar, but of shape"),
        ({"loss": mean}, "Wrong.metrics: 'loss' can't be the name of a metric"),
        ({"skipped": mean}, "Wrong.metrics: 'skipped' can't be the name of a metric"),
        (
            {"p": lambda _: metric()},
            "a Keras metric is not a pair; keep self.precision = crankshaft.KerasMetric(metric)",
        ),
        ({1: mean}, "Wrong.metrics: 1 can't be the name of a metric"),
    ],
    ids=["none", "mean", "vector", "loss", "skipped", "keras", "number"],
)
def test_metrics_that_cannot_be_summed_are_named(inside, metrics, says):
    class Wrong(Line):
        def metrics(self, outputs, batch):
            errors = tf.abs(outputs[:, 0] - batch[1])
            return metrics and {name: make(errors) for name, make in metrics.items()}

    metric()
    assert says in inside(*RUN, trainer=Wrong, data=data).mistake


def test_a_metric_of_whole_numbers_is_summed_as_others_are(inside):
    class Counting(Line):
        def metrics(self, outputs, batch):
            return {"positive": (tf.math.count_nonzero(batch[1] > 0), tf.size(batch[1]))}

    assert "positive 0.5" in inside(*RUN, trainer=Counting, data=data).ok().out


@pytest.mark.parametrize(
    "why",
    ["frozen", pytest.param("no model", marks=pytest.mark.slow), pytest.param("constant", marks=pytest.mark.slow)],
)
def test_a_step_that_would_train_nothing_is_refused(inside, why):
    class Idle(Line):
        def build(self):
            super().build()
            if why == "no model":
                self.line = self.model
                del self.model

        def build_model(self):
            model = super().build_model()
            model.trainable = why != "frozen"
            return model

        def forward(self, features, training):
            outputs = (self.line if why == "no model" else self.model)(features, training=training)
            return tf.stop_gradient(outputs) if why == "constant" else outputs

    outcome = inside(*RUN, trainer=Idle, data=data)
    assert (
        "depends on none of the 2 variables" if why == "constant" else "has no variable to train"
    ) in outcome.mistake


@pytest.mark.parametrize("given", ["adam", None, lambda: "adam"], ids=["name", "none", "function"])
def test_what_is_no_optimizer_is_told_what_is_one(inside, given):
    class Wrong(Line):
        def build_optimizer(self):
            return given

    assert "use one of engine.optimizers or tf.keras.optimizers" in inside(*RUN, trainer=Wrong, data=data).mistake


@pytest.mark.parametrize(
    ("method", "cure"), [("build_model", "return a Keras model"), ("loss", "crankshaft.mean(losses)")]
)
def test_a_method_that_is_not_there_is_named(inside, method, cure):
    class Bare(Trainer):
        if method == "loss":
            build_model = Line.build_model

    outcome = inside(*RUN, trainer=Bare, data=data)
    assert f"Bare has no {method}(self" in outcome.mistake
    assert cure in outcome.error


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (lambda self, batch: {"loss": tf.constant(1.0)}, "its step returned a SymbolicTensor as 'loss'; return pairs"),
        (
            lambda self, batch: tf.constant(1.0),
            "its step returned a SymbolicTensor; return pairs by name, which add up",
        ),
        (lambda self, batch: self.optimizer.apply_gradients([]), "optimizer adam has no apply_gradients, by which no"),
    ],
    ids=["scalar", "no dictionary", "apply_gradients"],
)
def test_a_step_as_others_write_it_is_told_what_to_return(inside, step, says):
    class Own(Line):
        def train_step(self, batch):
            super().train_step(batch)
            return step(self, batch)

    assert says in inside(*RUN, trainer=Own, data=data).mistake


def test_a_build_without_a_model_is_named(inside):
    class Own(Line):
        def build(self):
            super().build()
            self.line = self.model
            del self.model

        @property
        def trainable_variables(self):
            return self.line.trainable_variables if hasattr(self, "line") else super().trainable_variables

    assert "Own.build sets no self.model, which forward calls" in inside(*RUN, trainer=Own, data=data).mistake


def test_a_bug_in_a_users_step_names_its_file_and_line(inside):
    class Buggy(Line):
        def loss(self, outputs, batch):
            return mean(tf.matmul(outputs, tf.ones([7, 7])))

    outcome = inside(*RUN, trainer=Buggy, data=data)
    assert location_of(Buggy.loss) in outcome.mistake
    assert "--debug" in outcome.error


@pytest.mark.parametrize("where", [(), ("--strategy=mirrored", "--num_virtual_devices=2")], ids=["one", "mirrored"])
def test_a_bug_in_an_evaluation_shows_before_the_first_step(inside, where):
    class Buggy(Line):
        def eval_step(self, batch):
            return {"kept": self.kept}

        def loss(self, outputs, batch):
            self.kept = mean(outputs)
            return super().loss(outputs, batch)

    done = []
    outcome = inside(*RUN, *where, trainer=Buggy, data=data, hooks=[every_steps(1, lambda status, _: done.append(1))])
    assert location_of(Buggy.eval_step) in outcome.mistake
    assert not done


def test_a_bug_in_a_users_metric_shows_its_traceback_with_debug(inside):
    class Buggy(Line):
        def metrics(self, outputs, batch):
            return {"wrong": mean(batch["labels"])}

    outcome = inside(*RUN, "--debug", trainer=Buggy, data=data)
    assert outcome.code == 2
    assert location_of(Buggy.metrics) in outcome.err
    assert "Traceback" in outcome.err


def test_a_bug_in_a_users_hook_names_its_file_and_line(inside):
    def buggy(status, means):
        raise KeyError("perplexity")

    outcome = inside(*RUN, trainer=Line, data=data, hooks=[every_steps(1, buggy)])
    assert location_of(buggy) in outcome.mistake
    assert "perplexity" in outcome.error


def test_a_function_that_is_no_hook_is_told_how_to_become_one(inside):
    outcome = inside(*RUN, trainer=Line, data=data, hooks=[print])
    assert "print" in outcome.mistake
    assert "every_epoch" in outcome.error


def test_a_hook_by_itself_is_to_be_put_in_a_list(inside):
    assert "put hooks into one, hooks=[...]" in inside(*RUN, trainer=Line, data=data, hooks=every_epoch(print)).mistake


def test_a_hook_that_is_due_in_the_past_is_named(inside):
    class Backwards(Hook):
        name = "backwards"

        def next_due(self, step, status):
            return 2

    outcome = inside(*RUN, trainer=Line, data=data, hooks=[Backwards()])
    assert "hook backwards says at step 2 that it is next due at step 2" in outcome.mistake


class Taught(Line):
    """A model whose teacher follows it in each step, on each replica by itself."""

    def build(self):
        super().build()
        self.teacher = self.build_model()
        self.teacher.build([None, 1])
        self.teacher.set_weights(self.model.get_weights())
        self.teacher.trainable = False

    def train_step(self, batch):
        metrics = super().train_step(batch)
        for teacher, student in zip(self.teacher.variables, self.model.variables, strict=True):
            teacher.assign(0.9 * teacher + 0.1 * student)
        return metrics


@pytest.mark.parametrize("saves", [True, False], ids=["saves", "ends"])
def test_a_variable_that_drifts_apart_on_replicas_is_named_before_it_is_saved(inside, tmp_path, saves):
    """With a sum in each step students are equal, and so are teachers; with local SGD teachers follow their own."""
    two = (*RUN, "--strategy=mirrored", "--num_virtual_devices=2", "--train_steps=8")
    where = (f"--run_dir={tmp_path}/apart", "--checkpoint_every_steps=4") if saves else ()
    outcome = inside(*two, "--sync_every_steps=2", *where, trainer=Taught, data=data)
    assert f"step {4 if saves else 8}: replica 1" in outcome.error
    assert "kernel" in outcome.error
    assert "reduction.sum(averages=)" in outcome.error
    assert not [*tmp_path.glob("apart/checkpoints/*.index")]
    inside(*two, f"--run_dir={tmp_path}/sum", trainer=Taught, data=data).ok()
