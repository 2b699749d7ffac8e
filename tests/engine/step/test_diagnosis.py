"""A step's graph is looked through: losses of pairs of examples are named, ids and labels out of range counted."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft import Mean, Trainer, mean, minimize
from crankshaft.engine.hooks import numerics
from crankshaft.engine.logging import warning_once
from crankshaft.engine.metrics.means import root_mean_square
from crankshaft.engine.step.diagnosis import labels_as_numbers, warn_of_sums
from crankshaft.models.transformer_lm import Model
from tests import runs

pytestmark = pytest.mark.thorough

IDS, CLASSES = 20, 5


class Line(Trainer):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(1)])

    def loss(self, outputs, batch):
        return mean((outputs - batch[1]) ** 2)


def absolute(outputs, labels):
    return tf.abs(outputs - labels)


FORMS = {
    "as they are": lambda outputs, labels: mean((outputs - labels) ** 2),
    "weighed": lambda outputs, labels: mean((outputs - labels) ** 2, tf.abs(labels)),
    "of a mean over one axis": lambda outputs, labels: mean(tf.reduce_mean((outputs - labels) ** 2, -1)),
    "of a root": lambda outputs, labels: root_mean_square(outputs - labels),
    "compared": lambda outputs, labels: mean(tf.where(2.0 * outputs > labels, tf.ones_like(outputs), 0.0)),
    "in a tf.function": lambda outputs, labels: mean(tf.reduce_mean(tf.function(absolute)(outputs, labels), -1)),
    "in a branch": lambda outputs, labels: mean(
        tf.cond(tf.reduce_sum(labels) < 1e9, lambda: absolute(outputs, labels), lambda: outputs)
    ),
}


class Weighted(Line):
    def loss(self, outputs, batch):
        return FORMS["weighed"](outputs, batch[1])


class Form(Line):
    """Has a form of values in its loss, or in its metrics."""

    def __init__(self, form, where):
        super().__init__()
        self.form, self.where = form, where

    def loss(self, outputs, batch):
        return FORMS[self.form](outputs if self.where == "loss" else outputs[:, 0], batch[1])

    def metrics(self, outputs, batch):
        return {"error": FORMS[self.form](outputs if self.where == "metrics" else outputs[:, 0], batch[1])}


class Ranks(Line):
    """By a new axis, or by as many numbers as there are examples that are not the examples'."""

    def loss(self, outputs, batch):
        scores, labels = outputs[:, 0], batch[1]
        wrong = tf.nn.softplus(scores[:, None] - scores) * tf.cast(labels[:, None] < labels, tf.float32)
        above = outputs - tf.reshape(tf.linspace(0.1, 0.4, 25), [25])
        return mean(tf.reduce_sum(wrong, 1) + tf.reduce_sum(tf.abs(outputs - labels[None, :]) + above, 1))


class AsManyTokens(Line):
    def loss(self, outputs, batch):
        return mean(tf.square(tf.tile(batch[0], [1, 9])[:, :25] - batch[1]) + outputs)


class Tokens(Trainer):
    """A loss of each token, those of the padding without weight."""

    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(5)])

    def loss(self, outputs, batch):
        return mean((outputs - batch[1]) ** 2, batch[1] > 0.2)


class Flat(Tokens):
    def loss(self, outputs, batch):
        return mean(tf.reshape((outputs - batch[1]) ** 2, [-1]))


class Pairs(Line):
    """Each pair of examples, and that is meant."""

    def loss(self, outputs, batch):
        values = (outputs - batch[1][None, :]) ** 2
        return Mean(tf.reduce_sum(values), tf.cast(tf.size(values), tf.float32))


class OfOneSize(Tokens):
    def loss(self, outputs, batch):
        return mean(tf.reshape(outputs, [2, 25]))


def data(*label_shape, kind=np.asarray):
    rng = np.random.default_rng(0)
    features, labels = rng.random((25, 3), np.float32), rng.random((25, *label_shape), np.float32)
    if kind is np.asarray:
        return features, labels
    return tf.data.Dataset.from_tensor_slices((features, labels))


PAIRS = [
    *(("as they are", "loss", {name: 2}) for name in ("replicas", "accumulate_steps", "parallel_micro_batches")),
    *((form, "loss", {}) for form in FORMS if form != "of a root"),
    *((form, "metrics", {}) for form in ("of a root", "in a branch")),
]


@pytest.mark.parametrize(
    ("kind", "form", "where", "options"),
    [
        *((tf.data.Dataset, *pair) for pair in PAIRS),
        *(pytest.param(np.asarray, *pair, marks=[] if pair[2] else pytest.mark.slow) for pair in PAIRS),
    ],
)
def test_pairs_of_examples_are_named_with_both_shapes_in_whatever_form(bench, kind, form, where, options):
    """A batch's size is not known in the stream of an open dataset."""
    made = bench(Form(form, where), data(kind=kind), 10, **options)
    with pytest.raises(
        ValueError, match=rf"Form\.{where}: values \[n, 1\] and \[n\] .* broadcast to \[n, n\]"
    ) as error:
        made.train(1)
    assert "(outputs are [n, 1], labels [n]); make the shapes alike" in str(error.value)


@pytest.mark.parametrize(
    ("trainer", "label_shape", "replicas"),
    [(Line, (1,), 1), (Weighted, (1,), 2), (Tokens, (5,), 1), (Tokens, (5,), 2), (Flat, (5,), 2), (Pairs, (), 2)],
)
def test_several_values_an_example_are_taken(bench, trainer, label_shape, replicas):
    made = bench(trainer(), data(*label_shape), 10, replicas)
    assert np.isfinite(made.train(4)["loss"]).all()


@pytest.mark.parametrize(
    ("trainer", "label_shape", "batch"), [(OfOneSize, (5,), 10), (Ranks, (), 25), (AsManyTokens, (25,), 25)]
)
def test_what_only_looks_like_pairs_of_examples_is_taken(bench, trainer, label_shape, batch):
    assert np.isfinite(bench(trainer(), data(*label_shape), batch).train(1)["loss"]).all()


def test_an_evaluation_alone_is_checked_too(bench):
    made = bench(Line(), data(1), 10, eval_source=data())
    with pytest.raises(ValueError, match=r"Line\.loss: values \[n, 1\] and \[n\] .* broadcast to \[n, n\]"):
        made.strategy.evaluate()


class Looked(Trainer):
    """Looks up ids of 20, by Keras's layer, and classifies them, of 5."""

    def build_model(self):
        layers = tf.keras.layers
        return tf.keras.Sequential([tf.keras.Input([3], dtype="int32"), layers.Embedding(IDS, 4), layers.Flatten()])

    def build(self):
        self.head = tf.keras.layers.Dense(CLASSES)
        self.head.build([None, 12])
        super().build()

    def forward(self, features, training):
        return self.head(self.model(features, training=training))

    @property
    def trainable_variables(self):
        return [*self.model.trainable_variables, *self.head.trainable_variables]

    def loss(self, outputs, batch):
        return mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=batch[1], logits=outputs))


def looked_up(ids: dict | None = None, labels: dict | None = None):
    random = np.random.default_rng(1)
    x, y = random.integers(0, IDS, [24, 3]).astype(np.int32), random.integers(0, CLASSES, 24).astype(np.int64)
    for index, value in (ids or {}).items():
        x[index] = value
    for index, value in (labels or {}).items():
        y[index] = value
    return x, y


WRONG = [
    ({"ids": {(17, 2): 23}}, "ids from 0 to 19: a number is 23, out of that range; correct the data"),
    ({"ids": {(3, 0): 21, (20, 1): 21}}, "ids from 0 to 19: the largest number is at least 21, out of"),
    ({"ids": {(3, 0): 21, (20, 1): 32}}, "ids from 0 to 19: the largest number is at least 27, out of"),
    ({"ids": {(16, 0): 21, (16, 1): 32, (16, 2): 24}}, "ids from 0 to 19: a number is 32, out of"),
    ({"labels": {9: -9, 10: 25}}, "labels from 0 to 4: a number is 25 and a number is -9, out of"),
    ({"labels": {9: 5}}, "labels from 0 to 4: a number is 5, "),
    ({"labels": {9: -1}}, "labels from 0 to 4: a number is -1, "),
    ({"ids": {(17, 2): -IDS}}, None),  # Keras's layer counts from the end
    ({}, None),
]


@pytest.mark.parametrize("accumulate_steps", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_step_of_xla_counts_what_its_kernels_take_for_another(bench, accumulate_steps):
    """One program, which has three steps of each case in turn."""
    data = (np.concatenate(arrays) for arrays in zip(*(looked_up(**wrong) for wrong, _ in WRONG), strict=True))
    made = bench(Looked(), tuple(data), 8, jit=True, shuffle=False, accumulate_steps=accumulate_steps)
    for case, (_, line) in enumerate(WRONG, start=1):
        sums = made.train(3 * case)
        refused = pytest.raises(numerics.LabelError, match=f"^here: {line}") if line else contextlib.nullcontext()
        with refused:
            numerics.check_labels(sums, "here")


def test_what_is_counted_is_no_metric_and_nothing_is_counted_where_kernels_raise(bench):
    jitted = bench(Looked(), looked_up(), 8, jit=True)
    assert {*jitted.strategy.run(jitted.strategy.training, 1).sums.read()} > {"ids from 0 to 19", "labels from 0 to 4"}
    by_kernels = bench(Looked(), looked_up({(17, 2): 23}), 8, jit=False)
    assert not any("from 0" in name for name in bench(Looked(), looked_up(), 8).train(1))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"= 23 is not in \[0, 20\)"):
        by_kernels.train(3)


@pytest.mark.parametrize(("wrong", "line"), [((0, 40), "ids from 0 to 15: a number is 40"), ((1, 40), "labels from 0")])
def test_weights_that_are_cut_over_a_mesh_take_none_for_zeros(bench, wrong, line):
    tokens = np.random.default_rng(0).integers(0, 16, [2, 16, 8]).astype(np.int32)
    tokens[1, 4:6, 3] = -1  # which does not count
    tokens[wrong[0], 5, 2] = wrong[1]
    model = Model(layers=1, width=16, heads=2)
    made = bench(model, (tokens[0], tokens[1]), 8, replicas=2, model=2, num_classes=16)
    with pytest.raises(numerics.LabelError, match=f"^here: {line}"):
        numerics.check_labels(made.train(2), "here")


def test_a_run_ends_before_it_saves_what_it_has_learned_of_one(tmp_path):
    x, y = looked_up({(17, 2): 23})
    flags = {"jit": "on", "global_batch_size": 8, "progress": "off", "run_dir": str(tmp_path / "run")}
    with pytest.raises(
        crankshaft.UsageError, match=r"^step.*: ids from 0 to 19: a number is 23, out of that range; corr"
    ):
        crankshaft.run(Looked, data=((x, y), None), train_steps=3, **flags)
    assert not runs.steps(tmp_path / "run")


def cast_text():
    tf.raw_ops.Cast(x=tf.constant("1"), DstT=tf.float32)


def fail():
    raise TypeError("no numbers")


TEXT = {"kind": tf.constant(["a"]), "size": tf.constant([1.0])}


@pytest.mark.parametrize(
    ("labels", "act", "line"),
    [
        (TEXT, fail, "^labels\\['kind'\\] holds strings, and Line.loss computes with them"),
        (TEXT["kind"], cast_text, "^labels holds strings, and Line.loss computes with them"),
        (TEXT["size"], fail, "^no numbers$"),
        (None, fail, "^no numbers$"),
        (TEXT["size"], cast_text, None),
        (TEXT, lambda: None, None),
    ],
)
def test_text_that_a_loss_takes_for_numbers_is_named(labels, act, line):
    with tf.Graph().as_default():
        cast_text()  # before the loss: a model's own
        raises = pytest.raises((crankshaft.UsageError, TypeError), match=line) if line else contextlib.nullcontext()
        with raises, labels_as_numbers(labels, Line()):
            act()


def squares(outputs, labels):
    return tf.square(outputs - labels)


SUMS = {
    "of all": lambda errors: Mean(tf.reduce_sum(errors), 1.0),
    "of all, halved": lambda errors: Mean(tf.nn.l2_loss(errors) + 3.0, 1.0),
    "times a number, for two": lambda errors: Mean(-0.1 * tf.reduce_sum(tf.reduce_sum(errors, 1)), 2.0),
    "over the global batch": lambda errors: Mean(
        tf.nn.compute_average_loss(tf.reduce_mean(errors, 1), global_batch_size=16), 1.0
    ),
    "of what is flat": lambda errors: Mean(tf.reshape(tf.reduce_sum(tf.sqrt(tf.reshape(errors, [-1]))), []), 1.0),
    "by a function": lambda errors: Mean(*tf.function(lambda: (2 * tf.reduce_sum(errors), tf.constant(1.0)))()),
    "by a function's function": tf.function(
        lambda errors: Mean(tf.function(lambda x: tf.reduce_sum(tf.reshape(x, [-1])))(errors + 1.0) / 2, 1.0)
    ),
    "by a product": lambda errors: Mean(tf.tensordot(tf.ones_like(errors[:, 0]), errors[:, 0], 1), 1.0),
    "by einsum": lambda errors: Mean(tf.einsum("bi,bi->", errors, errors), 1.0),
    "by segments": lambda errors: Mean(tf.math.unsorted_segment_sum(errors[:, 0], tf.zeros([8], tf.int32), 1)[0], 1.0),
    "by a loop": lambda errors: Mean(tf.foldl(lambda total, x: total + x[0], errors, tf.constant(0.0)), 1.0),
    "by a norm": lambda errors: Mean(tf.square(tf.norm(errors)), 1.0),
    "a root of a sum": lambda errors: Mean(tf.sqrt(tf.reduce_sum(errors)), 1.0),
}
COUNTED = {
    "by examples": lambda errors: Mean(tf.reduce_sum(errors), 8.0),
    "by tokens": lambda errors: Mean(tf.reduce_sum(tf.reduce_sum(errors, 1)), 24.0),
    "by what is known": lambda errors: Mean(
        tf.reduce_sum(errors), tf.reduce_sum(tf.cast(errors > 1, tf.float32)) + 1.0
    ),
    "a mean": lambda errors: Mean(tf.reduce_mean(errors), 1.0),
    "divided by the examples": lambda errors: Mean(tf.reduce_sum(errors) / 8, 1.0),
    "divided by their shape": lambda errors: Mean(
        tf.reduce_sum(errors) / tf.cast(tf.shape(errors + 0)[0], "float32"), 1.0
    ),
    "by tokens that are flat": lambda errors: Mean(tf.reduce_sum(tf.sqrt(tf.reshape(errors, [-1]))), 24.0),
    "by examples, of what is flat": lambda errors: Mean(tf.reduce_sum(tf.sqrt(tf.reshape(errors, [-1]))), 8.0),
    "of means of columns": lambda errors: Mean(tf.reduce_sum(tf.reshape(tf.reduce_mean(errors, 0), [-1])), 1.0),
    "a mean by a function": lambda errors: Mean(*tf.function(lambda: (tf.reduce_mean(errors), tf.constant(1.0)))()),
    "of no examples": lambda errors: Mean(tf.reduce_sum(tf.fill([8], 2.0)) + tf.reduce_mean(errors), 1.0),
    "by examples, times a number": lambda errors: 0.1 * Mean(tf.reduce_sum(errors), 8.0),
    "a mean, times a number": lambda errors: Mean(0.1 * tf.reduce_sum(errors) / 24, 1.0),
    "a mean in a branch": lambda errors: Mean(
        tf.cond(errors[0, 0] > 1, lambda: tf.reduce_mean(errors), lambda: 2 * tf.reduce_mean(errors)), 1.0
    ),
    "a mean, if any is larger": lambda errors: Mean(
        tf.where(tf.reduce_any(errors > 1), tf.reduce_mean(errors), 0.0), 1.0
    ),
    "a sum of means of columns": lambda errors: Mean(
        tf.foldl(lambda total, column: total + tf.reduce_mean(column), tf.transpose(errors), tf.constant(0.0)), 1.0
    ),
}


@pytest.mark.parametrize("case", [*SUMS, *COUNTED])
def test_a_sum_over_a_shares_examples_whose_count_is_a_number_is_named(case, caplog):
    """Each of two shares has 8 examples of 3 values."""

    @tf.function
    def step(outputs):
        pair = {**SUMS, **COUNTED}[case](squares(outputs, 1.0))
        warn_of_sums(case, [pair], outputs, micro_batches=2)
        return pair

    step.get_concrete_function(tf.TensorSpec([8, 3]))
    assert (f"{case}: its count is always" in caplog.text) == (case in SUMS)


class Summing(Line):
    """Two sums, each of a count of its own, for the default step or for `minimize`."""

    def __init__(self, minimizes):
        super().__init__()
        self.minimizes = minimizes

    def loss(self, outputs, batch):
        errors = squares(outputs, batch[1])
        return {"all": Mean(tf.reduce_sum(errors), 1.0), "mean": Mean(tf.reduce_mean(errors), 1.0)}

    def losses(self, batch):
        return {"loss": self.loss(self.model(batch[0], training=True), batch), "seen": Mean(1.0, 1.0)}

    def train_step(self, batch):
        if self.minimizes:
            return minimize(self, batch, self.losses, {"loss": self.optimizer})
        return super().train_step(batch)


@pytest.mark.parametrize("minimizes", [False, True])
def test_a_trainer_that_sums_over_its_share_is_named_only_if_there_are_several(bench, minimizes, caplog):
    source = np.ones([16, 3], np.float32), np.zeros([16, 1], np.float32)
    bench(Summing(minimizes), source, 8, optimizer="sgd").train(1)
    assert "its count" not in caplog.text
    values = bench(Summing(minimizes), source, 8, 2, optimizer="sgd").train(1)
    owner = "Summing.train_step: 'all'" if minimizes else "Summing.loss"
    assert caplog.text.count(f"{owner}: its count is always 1, and its total a sum over") == 1
    assert ("seen" in values) == minimizes


class Regularized(Line):
    """A layer with a regularizer, or an activity regularizer, whose losses the loss may add."""

    def __init__(self, adds, minimizes=False, kind="kernel", trained=True):
        super().__init__()
        self.adds, self.minimizes, self.kind, self.trained = adds, minimizes, kind, trained

    def build_model(self):
        layers = tf.keras.layers
        penalized = layers.Dense(2, **{f"{self.kind}_regularizer": "l2"})
        penalized.trainable = self.trained
        return tf.keras.Sequential([penalized, layers.Dense(1)])

    def loss(self, outputs, batch):
        added = tf.add_n(self.model.losses) if self.adds is True else 0.0
        if self.adds == "by hand":
            added = 0.01 * tf.nn.l2_loss(self.model.layers[0].kernel)
        return mean(tf.square(outputs - batch[1])[:, 0] + added)

    def losses(self, batch):
        return {"loss": self.loss(self.model(batch[0], training=True), batch)}

    def train_step(self, batch):
        if self.minimizes:
            return minimize(self, batch, self.losses, {"loss": self.optimizer})
        return super().train_step(batch)


TWICE, LEFT_OUT = (
    "so they count twice; leave them out",
    "/kernel is not minimized, since the loss that minimize gets has",
)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"adds": False}, None),
        ({"adds": True}, TWICE),
        ({"adds": True, "kind": "activity"}, TWICE),
        ({"adds": True, "minimizes": True}, None),
        ({"adds": "by hand", "minimizes": True}, None),
        ({"adds": False, "minimizes": True}, LEFT_OUT),
        ({"adds": False, "minimizes": True, "trained": False}, None),
    ],
)
def test_regularizers_that_count_twice_or_not_at_all_are_named(bench, caplog, how, says):
    """Of two micro-batches, whose loss is in a loop."""
    source = np.ones([16, 3], np.float32), np.zeros([16, 1], np.float32)
    warning_once.cache_clear()
    bench(Regularized(**how), source, 8, optimizer="sgd", accumulate_steps=2).train(1)
    said = [line for line in (TWICE, LEFT_OUT) if line in caplog.text]
    assert said == [line for line in [says] if line]
    assert sum(map(caplog.text.count, said)) == len(said)
