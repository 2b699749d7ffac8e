"""Mistakes in a user's own trainer and hooks, TensorFlow running: one line all the same."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine import Trainer, mean
from crankshaft.engine.hooks import Hook, every_epoch, every_steps
from tests.launch.conftest import assert_says
from tests.launch.line import FEATURES, LABELS, RUN, Line, data, location_of

TWO = ("--strategy=mirrored", "--num_virtual_devices=2")


def own(**methods) -> type[Line]:
    """A trainer with these methods instead of the line's."""
    return type("Own", (Line,), methods)


def loss(outputs, batch):
    return mean(tf.square(outputs[:, 0] - batch[1]))


@functools.cache
def metric() -> tf.keras.metrics.Metric:
    """A metric made outside of a step."""
    return tf.keras.metrics.Precision(name="precision")


def metrics(**made):
    """`metrics` that makes these of the errors."""
    return lambda self, outputs, batch: {name: make(tf.abs(outputs[:, 0] - batch[1])) for name, make in made.items()}


def without_model(self):
    Line.build(self)
    self.line = self.model
    del self.model


def of_the_line(self):
    return (self.line if hasattr(self, "line") else self.model).trainable_variables


def frozen(self):
    model = Line.build_model(self)
    model.trainable = False
    return model


def step(returns):
    return lambda self, batch: [Line.train_step(self, batch), returns(self)][1]


SEVERAL = "is not a pair (total, count); add up what belongs to an example, and return one pair: crankshaft.mean("
OPTIMIZERS = "use one of engine.optimizers or tf.keras.optimizers"
# The methods, and what the line says: what is wrong and the cure.
METHODS = [
    (
        {"loss": lambda self, outputs, batch: tf.reduce_mean(tf.square(outputs[:, 0] - batch[1]))},
        "Own.loss: a SymbolicTensor is not a pair (total, count); return crankshaft.mean(values) ... KerasMetric",
    ),
    (
        {"loss": lambda self, outputs, batch: {"a": loss(outputs, batch)}, "metrics": metrics(a=mean)},
        "Own.metrics: 'a' is a mean of the loss; use another name",
    ),
    ({"loss": lambda self, outputs, batch: loss(outputs, batch) + loss(outputs, batch)}, SEVERAL),
    (
        {"loss": lambda self, outputs, batch: mean(tf.square(outputs - batch[1]))},
        "Own.loss: values [n, 1] and [n] of n examples broadcast to [n, n] ... (outputs are [n, 1], labels [n])",
    ),
    ({"build_model": lambda self: None}, "Own.build_model returned a NoneType; return a Keras model"),
    ({"metrics": lambda *_: None}, "Own.metrics returned a NoneType; return a dictionary of pairs"),
    ({"metrics": metrics(e=tf.reduce_mean)}, "Own.metrics['e']: a SymbolicTensor is not a pair (total, count)"),
    ({"metrics": metrics(e=lambda x: (x, tf.ones_like(x)))}, "Own.metrics['e']: its total is not a scalar, but of"),
    ({"metrics": metrics(loss=mean)}, "Own.metrics: 'loss' can't be the name of a metric"),
    ({"metrics": metrics(skipped=mean)}, "Own.metrics: 'skipped' can't be the name of a metric"),
    (
        {"metrics": metrics(p=lambda _: metric())},
        "a Keras metric is not a pair; keep ... crankshaft.KerasMetric(metric)",
    ),
    ({"metrics": lambda self, outputs, batch: {1: mean(batch[1])}}, "Own.metrics: 1 can't be the name of a metric"),
    ({"build_optimizer": lambda self: "adam"}, OPTIMIZERS),
    ({"build_optimizer": lambda self: None}, OPTIMIZERS),
    ({"build_optimizer": lambda self: lambda: "adam"}, OPTIMIZERS),
    (
        {"train_step": step(lambda self: {"loss": tf.constant(1.0)})},
        "its step returned a SymbolicTensor as 'loss'; return pairs",
    ),
    ({"train_step": step(lambda self: tf.constant(1.0))}, "its step returned a SymbolicTensor; return pairs by name"),
    (
        {"train_step": step(lambda self: self.optimizer.apply_gradients([]))},
        "optimizer adam has no apply_gradients, which would ignore",
    ),
    ({"build_model": frozen}, "has no variable to train"),
    ({"build": without_model, "forward": lambda self, x, training: self.line(x)}, "has no variable to train"),
    (
        {"forward": lambda self, x, training: tf.stop_gradient(self.model(x, training=training))},
        "depends on none of the 2 variables",
    ),
    (
        {"build": without_model, "trainable_variables": property(of_the_line)},
        "Own.build sets no self.model, which forward calls",
    ),
]


@pytest.mark.parametrize("row", range(len(METHODS)), ids=[" ".join(methods) for methods, _ in METHODS])
def test_a_mistake_in_a_trainers_method_is_one_line_with_the_cure(inside, row):
    metric()
    methods, says = METHODS[row]
    inside(*RUN, trainer=own(**methods), data=data).refused(says)


@pytest.mark.parametrize(("method", "cure"), [("build_model", "return a Keras model"), ("loss", "crankshaft.mean(")])
def test_a_method_that_is_not_there_is_named(inside, method, cure):
    bare = type("Bare", (Trainer,), {"build_model": Line.build_model} if method == "loss" else {})
    inside(*RUN, trainer=bare, data=data).refused(f"Bare has no {method}(self ... {cure}")


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
    said = "its step uses log_scale, trainable, that no optimizer updates; to train it, add it to"
    assert err.count(said) == (not trains)


Classes = own(
    build_model=lambda self: tf.keras.Sequential([tf.keras.layers.Dense(2)]),
    loss=lambda self, outputs, batch: mean(tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], outputs)),
)


@pytest.mark.parametrize("trainer", [Classes, own()], ids=["classes", "numbers"])
def test_labels_of_text_are_one_line_with_the_cure(inside, trainer):
    words = np.where(LABELS > 0, "up", "down")
    outcome = inside(*RUN, trainer=trainer, data=lambda: ((FEATURES, words), None))
    outcome.refused("labels holds strings, and Own.loss computes with them as with numbers; number them")


@pytest.mark.parametrize("label", [7, pytest.param(-1, marks=pytest.mark.slow)])
def test_a_label_out_of_range_is_named_with_the_range(inside, label):
    labels = np.where(LABELS > 0, label, 1).astype(np.int64)
    outcome = inside(*RUN, trainer=Classes, data=lambda: ((FEATURES, labels), None))
    outcome.refused(f"the data has a label of {label}, and the loss takes labels from 0 to below 2, as many as")
    outcome = inside(*RUN, "--jit=on", trainer=Classes, data=lambda: ((FEATURES, labels), None))  # the step counts
    assert outcome.mistake.startswith(f"step 1: labels from 0 to 1: a number is {label}, out of that range; correct")


def flat(self):
    """Of several arrays Flatten raises a TypeError, Dense a ValueError."""
    return tf.keras.Sequential([tf.keras.layers.Flatten(), tf.keras.layers.Dense(1)])


@pytest.mark.parametrize(
    ("trainer", "split"), [(Line, {"x": FEATURES, "y": LABELS}), (own(build_model=flat), ((FEATURES,) * 2, LABELS))]
)
def test_several_features_of_a_sequential_are_named(inside, trainer, split):
    outcome = inside(*RUN, trainer=trainer, data=lambda: (split, None))
    outcome.refused("model is a tf.keras.Sequential, which takes one array, and features are several: features[")


def test_a_metric_of_whole_numbers_is_summed_as_others_are(inside):
    counting = own(metrics=lambda self, x, batch: {"up": (tf.math.count_nonzero(batch[1] > 0), tf.size(batch[1]))})
    assert "up 0.5" in inside(*RUN, trainer=counting, data=data).ok().out


def test_a_bug_in_a_users_step_names_its_file_and_line(inside):
    class Buggy(Line):
        def loss(self, outputs, batch):
            return mean(tf.matmul(outputs, tf.ones([7, 7])))

    inside(*RUN, trainer=Buggy, data=data).refused(f"{location_of(Buggy.loss)} ... debug=true")


@pytest.mark.parametrize("where", [pytest.param((), marks=pytest.mark.slow), TWO], ids=["one", "mirrored"])
def test_a_bug_in_an_evaluation_shows_before_the_first_step(inside, where):
    class Buggy(Line):
        def eval_step(self, batch):
            return {"kept": self.kept}

        def loss(self, outputs, batch):
            self.kept = mean(outputs)
            return super().loss(outputs, batch)

    done = []
    outcome = inside(*RUN, *where, trainer=Buggy, data=data, hooks=[every_steps(1, lambda status, _: done.append(1))])
    outcome.refused(location_of(Buggy.eval_step))
    assert not done


def test_a_bug_in_a_users_metric_shows_its_traceback_with_debug(inside):
    class Buggy(Line):
        def metrics(self, outputs, batch):
            return {"wrong": mean(batch["labels"])}

    outcome = inside(*RUN, "--debug", trainer=Buggy, data=data)
    assert outcome.code == 2
    assert_says(outcome.err.replace("\n", " "), f"Traceback ... {location_of(Buggy.metrics)}")


class Backwards(Hook):
    name = "backwards"

    def next_due(self, step, status):
        return 2


def buggy(status, means):
    raise KeyError("perplexity")


@pytest.mark.parametrize(
    ("hooks", "says"),
    [
        ([every_steps(1, buggy)], f"KeyError: 'perplexity', at {location_of(buggy)}"),
        ([print], "print ... every_epoch"),
        (every_epoch(print), "put hooks into one, hooks=[...]"),
        ([Backwards()], "hook backwards returned at step 2 that it is next due at step 2"),
    ],
    ids=["a bug", "a function", "no list", "due in the past"],
)
def test_a_mistake_in_a_hook_is_one_line(inside, hooks, says):
    inside(*RUN, trainer=Line, data=data, hooks=hooks).refused(says)


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


def test_a_variable_that_drifts_apart_on_replicas_is_named_before_it_is_saved_and_at_the_end(inside, tmp_path):
    """With a sum in each step students are equal, and so are teachers; with local SGD teachers follow their own."""
    run = (*RUN, *TWO, "--train_steps=8")
    saves = (f"--run_dir={tmp_path}/apart", "--checkpoint_every_steps=4", "--snapshot_seconds=0")
    for step, where in ((4, saves), (8, ())):
        outcome = inside(*run, "--sync_every_steps=2", *where, trainer=Taught, data=data)
        assert_says(outcome.error, f"step {step}: replica 1 ... kernel ... reduction.sum(averages=)")
    assert not [*tmp_path.glob("apart/checkpoints/*.index")]
    inside(*run, f"--run_dir={tmp_path}/sum", trainer=Taught, data=data).ok()
