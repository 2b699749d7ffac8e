"""Runs that begin with another run's weights and optimizer state, or with weights of other code."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft import Trainer, learning_rate, mean
from crankshaft.engine import Averaged, Embedding
from tests import runs

TWO = {"strategy": "mirrored", "num_virtual_devices": 2}
RATE, STEPS, DECAY = 0.1, 6, 0.7
_RNG = np.random.default_rng(0)
DAYS = [(_RNG.normal(size=(16, 3)).astype("float32"), _RNG.normal(size=16).astype("float32")) for _ in range(2)]


class Line(Trainer):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(1, kernel_initializer="ones")])

    def loss(self, outputs, batch):
        return mean(tf.square(outputs[:, 0] - batch[1]))


class ByKeras(Line):
    def build_optimizer(self):
        return tf.keras.optimizers.Adam(learning_rate(self))


class OfKeras(Line):
    """With a schedule of the Keras optimizer's own."""

    def build_optimizer(self):
        return tf.keras.optimizers.Adam(tf.keras.optimizers.schedules.PolynomialDecay(RATE, STEPS, 0.0))


def expected():
    """Adam on all examples of day after day, in float64: moments and counts go on, the rate falls to 0 each day."""
    weights, moments, squares, count = np.array([1.0, 1, 1, 0]), np.zeros(4), np.zeros(4), 0
    average = weights.copy()
    for points, labels in DAYS:
        inputs = np.concatenate([points, np.ones([len(points), 1])], axis=1)
        for step in range(STEPS):
            gradient = 2 * inputs.T @ (inputs @ weights - labels) / len(labels)
            count += 1
            moments, squares = 0.9 * moments + 0.1 * gradient, 0.999 * squares + 0.001 * gradient**2
            corrected = math.sqrt(1 - 0.999**count) / (1 - 0.9**count)
            weights = weights - RATE * (1 - step / STEPS) * corrected * moments / (np.sqrt(squares) + 1e-7)
            average += (1 - min(DECAY, (1 + count) / (10 + count))) * (weights - average)
    return weights, average


@pytest.mark.parametrize(
    ("trainer", "first", "then"),
    [
        pytest.param(Line, {"ema_decay": DECAY}, {"ema_decay": DECAY}, marks=pytest.mark.slow),
        (Line, {"ema_decay": DECAY, **TWO}, {"ema_decay": DECAY, **TWO, "shard_optimizer": True}),
        pytest.param(Line, {**TWO, "shard_optimizer": True}, {}, marks=pytest.mark.slow),
        (ByKeras, {}, TWO),
        pytest.param(OfKeras, {"learning_rate": None, "learning_rate_schedule": None}, {}, marks=pytest.mark.slow),
    ],
    ids=["average", "average, sharded", "from shards", "Keras's rule", "Keras's schedule"],
)
def test_the_next_days_updates_go_on_and_its_schedule_begins_again(tmp_path, trainer, first, then):
    common = {"learning_rate": RATE, "learning_rate_schedule": "polynomial", "train_steps": STEPS, "jit": "off"}
    common |= {"global_batch_size": 16, "progress": "off", **first}
    crankshaft.run(trainer, data=(DAYS[0], None), **common, run_dir=tmp_path / "1")
    begun = {"init_from": tmp_path / "1", "init_optimizer": True, "run_dir": tmp_path / "2"}
    second = {"data": (DAYS[1], None), **common, **then, **begun}
    crankshaft.run(trainer, **second, stop_at_step=2)
    made = crankshaft.run(trainer, **second)  # resumed, and not begun again
    weights, average = expected()
    kept = runs.tensors(tmp_path / "2")
    assert kept["step/.ATTRIBUTES/VARIABLE_VALUE"] == STEPS
    assert kept["trainer/optimizer/iterations/.ATTRIBUTES/VARIABLE_VALUE"] == STEPS
    np.testing.assert_array_equal(kept["trainer/optimizer/update_counts/.ATTRIBUTES/VARIABLE_VALUE"], 2 * STEPS)
    found = np.concatenate([np.ravel(each) for each in made.model.get_weights()])
    # Twelve updates of up to 0.1, whose corrections Keras computes in float32: 1 - 0.999 has a relative error of 6e-5.
    np.testing.assert_allclose(found, average if "ema_decay" in common else weights, atol=1e-5)


def tables(rows, shards, admit_after=None):
    """A trainer with a table of so many rows and shards."""

    class Rows(Trainer):
        def build_model(self):
            self.table = Embedding("users", rows, 2, num_shards=shards, admit_after=admit_after)
            return tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)])

        def forward(self, features, training):
            return self.model(self.table(features["user"], training=training), training=training)

        loss = Line.loss

    return Rows


CLICKS = [({"user": np.arange(32) * 7 % (9 + 4 * day)}, np.float32(np.arange(32) % 3)) for day in range(2)]


def after_two_days(folder, first, then, **more):
    """All variables after a day with users 0 to 8 and one with users 0 to 12; rows in the order of users."""
    common = {"train_steps": 4, "global_batch_size": 8, "mode": "train", "jit": "off", "progress": "off", **more}
    crankshaft.run(first, data=(CLICKS[0], None), **common, run_dir=folder / "1")
    begun = {"init_from": folder / "1", "init_optimizer": True, "run_dir": folder / "2"}
    crankshaft.run(then, data=(CLICKS[1], None), **common, **begun)
    kept, slots = runs.tensors(folder / "2"), runs.manifests(folder / "2")[-1]["about"]["updated"]["optimizer"]
    found = {}
    for kind in ("", "m/", "v/"):
        at = [f"trainer/optimizer/slots/{n:04d}_shard/{kind}" if kind else name for n, name in enumerate(slots)]
        shards = [kept[f"{at[n]}.ATTRIBUTES/VARIABLE_VALUE"] for n, name in enumerate(slots) if "table" in name]
        rows = np.empty([sum(map(len, shards)), 2], np.float32)
        for number, shard in enumerate(shards):
            rows[number :: len(shards)] = shard
        found[kind] = rows
    return found


@pytest.mark.parametrize("more", [{}, pytest.param(TWO, marks=pytest.mark.slow)], ids=["one device", "two replicas"])
def test_a_table_and_its_slots_grow_with_the_next_days_ids(tmp_path, more):
    expected = after_two_days(tmp_path / "whole", tables(13, 1), tables(13, 1))
    grown = (tables(9, 1), tables(13, 1)) if more else (tables(9, 2), tables(13, 3))
    found = after_two_days(tmp_path / "grown", *grown, **more)
    for kind, rows in expected.items():
        np.testing.assert_allclose(found[kind], rows, atol=1e-6, err_msg=kind)
    assert (expected["m/"][9:] != 0).any()


def test_new_ids_are_admitted_on_the_next_day(tmp_path):
    found = after_two_days(tmp_path, *[tables(20, 1, admit_after=1)] * 2)
    assert np.count_nonzero(found["v/"].any(axis=1)) == 13


def test_what_can_not_continue_is_one_line(tmp_path):
    common = {"train_steps": 1, "global_batch_size": 16, "mode": "train", "jit": "off", "progress": "off"}
    crankshaft.run(Line, data=(DAYS[0], None), **common, run_dir=tmp_path / "1").model.save(tmp_path / "line.keras")

    def refused(trainer=Line, data=DAYS[0], source="1", **flags):
        begun = {"init_from": tmp_path / source, "init_optimizer": True, **common, **flags}
        with pytest.raises(crankshaft.UsageError) as error:
            crankshaft.run(trainer, data=(data, None), **begun)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "another optimizer state" in refused(optimizer="sgd")
    assert "set allow_changed_config to restore only what matches" in refused(optimizer="sgd")
    assert "can't be combined with init_optimizer" in refused(source="line.keras")
    assert "does not fit this model; use the same model and model_arg" in refused(tables(9, 1), CLICKS[0])
    tf.train.Checkpoint(model=tf.Variable(1.0)).write(str(tmp_path / "other"))
    assert "is not a run's checkpoint" in refused(source="other")
    with pytest.raises(crankshaft.UsageError, match="has no use without init_from"):
        crankshaft.run(Line, data=(DAYS[0], None), **common, init_optimizer=True)


class Taught(Line):
    def build(self):
        super().build()
        self.teacher = Averaged(self.model, decay=0.9)


@pytest.mark.parametrize("where", [pytest.param({}, marks=pytest.mark.slow), TWO], ids=["one device", "two replicas"])
def test_a_teacher_is_the_source_s_or_begins_at_the_model_and_a_line_says_so(tmp_path, capsys, where):
    common = {"data": (DAYS[0], None), "global_batch_size": 16, "jit": "off", **where}
    for trainer in (Taught, Line):
        crankshaft.run(trainer, **common, train_steps=3, mode="train", run_dir=tmp_path / trainer.__name__)

    def begun(source=None, **flags):
        """The model's weights and the teacher's as a run begins, and what it printed."""
        flags |= {"init_from": tmp_path / source} if source else {"run_dir": tmp_path / "Line"}
        with crankshaft.open_run(Taught, **common, train_steps=3, **flags) as run:
            weights = [run.models[name].get_weights() for name in ("model", "teacher")]
        return *(np.concatenate([np.ravel(each) for each in arrays]) for arrays in weights), capsys.readouterr().out

    kept = runs.tensors(tmp_path / "Taught")
    averages = [np.ravel(value) for key, value in kept.items() if key.startswith("trainer/teacher/")]
    model, teacher, printed = begun("Taught")
    np.testing.assert_array_equal(np.sort(teacher), np.sort(np.concatenate(averages)))
    assert (model != teacher).all()
    assert "4 weights taken from" in printed
    assert "teacher: not in" not in printed
    student, teacher, printed = begun("Line")
    np.testing.assert_array_equal(teacher, student)
    assert "teacher: not in" in printed
    differences = r"missing in the checkpoint \(2\): trainer\.teacher\."
    with pytest.raises(crankshaft.UsageError, match=rf"other averages or another optimizer state \({differences}"):
        begun("Line", init_optimizer=True)
    np.testing.assert_array_equal(begun(allow_changed_config=True)[:2], [student, student])  # resumed
    *weights, printed = begun("Line", init_optimizer=True, allow_changed_config=True)
    np.testing.assert_array_equal(weights, [student, student])
    assert re.search(rf"only what matches is taken: {differences}", printed)
    with pytest.raises(crankshaft.UsageError, match=r"only in the checkpoint \(2\): trainer\.teacher\."):
        crankshaft.run(Line, **common, train_steps=1, init_from=tmp_path / "Taught", init_optimizer=True)


class Net(Trainer):
    shards = 2

    def build_model(self):
        layers = tf.keras.layers
        self.table = Embedding("users", 5, 3, num_shards=self.shards)
        stack = [layers.Dense(4, name="first"), layers.BatchNormalization(name="norm"), layers.Dropout(0.5)]
        return tf.keras.Sequential([tf.keras.Input([3]), *stack, layers.Dense(1, name="last")], name="net")

    def forward(self, features, training):
        return self.model(self.table(features), training=training)

    loss = Line.loss


class OnReplicas(Net):
    shards = 1


def test_weights_of_other_code_are_renamed(tmp_path):
    layers = tf.keras.layers
    theirs = tf.keras.Sequential([layers.Dense(4), layers.BatchNormalization(), layers.Dense(1)])
    theirs.build([None, 3])
    for each in theirs.variables:
        each.assign(_RNG.uniform(size=each.shape))
    users = tf.Variable(_RNG.normal(size=[5, 3]).astype("float32"))
    optimizer = tf.keras.optimizers.Adam()
    optimizer.build(theirs.trainable_variables)
    whole = tf.train.Checkpoint(model=theirs, users=users, optimizer=optimizer, global_step=tf.Variable(7))
    tf.train.CheckpointManager(whole, str(tmp_path / "orbit"), 2).save()
    common = {"train_steps": 1, "optimizer": "sgd", "learning_rate": 1e-30, "ema_decay": 0.5, "progress": "off"}
    common |= {"data": ((np.arange(8) % 5, np.ones(8, "float32")), None), "global_batch_size": 8, "jit": "off"}

    def refused(*rules):
        with pytest.raises((crankshaft.UsageError, crankshaft.RunError)) as error:
            crankshaft.run(Net, **common, init_from=tmp_path / "orbit", init_map=rules)
        assert "\n" not in str(error.value)
        return str(error.value)

    operation = "model/_functional/_operations/"
    rules = ["(optimizer|global_step).*=", f"{operation}1/=net/first/", f"{operation}2/=net/norm/"]
    rules += [f"{operation}3/=net/last/", "/_(kernel)$=/\\1"]
    line = refused(*rules[:3], rules[4])
    assert "missing in the checkpoint (2): net/last/bias (nearest: " in line
    assert "only in the checkpoint (2): model/_functional/_operations/3/bias (nearest: net/last/bias); " in line
    assert "only in the checkpoint (1): global_step" in refused("optimizer.*=", *rules[1:])
    assert "net/first/kernel: from " in refused(*rules, "last/kernel=first/kernel")
    line = refused(*rules, "first/bias=other", "last/bias=first/bias", "other=last/bias")
    assert "of another shape or type (2): net/first/bias: [4] float32 here, [1] float32 in the checkpoint" in line

    ids = np.arange(5)
    for net, where in ((Net, {}), (OnReplicas, TWO)):
        with crankshaft.open_run(net, **common, **where, init_from=tmp_path / "orbit", init_map=rules) as run:
            np.testing.assert_allclose(run.predict(ids), theirs(tf.gather(users, ids)), atol=1e-6)
