"""Keras callbacks among a script's hooks. In this process."""

from __future__ import annotations

import csv

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine import Mean, mean
from tests.launch.line import RUN, Line, data, place_of

EPOCHS = (*RUN, "--train_steps=8", "--eval_every_steps=4")  # two of four steps
callbacks = tf.keras.callbacks


class Recorder(callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.events = []

    def on_train_begin(self, logs=None):
        self.events.append(("train_begin", self.params["epochs"], self.params["steps"]))

    def on_train_end(self, logs=None):
        self.events.append(("train_end", sorted(logs)))

    def on_epoch_begin(self, epoch, logs=None):
        self.events.append(("epoch_begin", epoch))

    def on_epoch_end(self, epoch, logs=None):
        self.events.append(("epoch_end", epoch, sorted(logs), self.model.count_params()))

    def on_test_end(self, logs=None):
        self.events.append(("test_end", sorted(logs)))

    def on_train_batch_end(self, batch, logs=None):
        self.events.append(("batch_end", batch, round(float(self.model.optimizer.learning_rate), 6)))
        self.loss = logs["loss"]


def test_a_callback_is_called_as_fit_calls_it(inside):
    seen = Recorder()
    inside(*EPOCHS, "--learning_rate=0.01", trainer=Line, data=data, hooks=[seen]).ok()
    logs = ["loss", "val_loss"]

    def epoch(number):
        return [
            ("epoch_begin", number),
            *(("batch_end", batch, 0.01) for batch in range(4)),
            ("test_end", ["loss"]),
            ("epoch_end", number, logs, 2),
        ]

    assert seen.events == [("train_begin", 2, 4), *epoch(0), *epoch(1), ("train_end", logs)]


def test_an_epochs_logs_are_its_means(inside, tmp_path):
    """Beside the run's own: of the last epoch, and of its evaluation."""
    kept = {}
    hooks = [callbacks.CSVLogger(str(tmp_path / "log.csv")), callbacks.LambdaCallback(on_train_end=kept.update)]
    outcome = inside(*EPOCHS, trainer=Line, data=data, hooks=[hooks[0], hooks[1]]).ok()
    with open(tmp_path / "log.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1"]
    assert float(rows[1]["loss"]) < float(rows[0]["loss"])
    assert f"loss {float(rows[1]['val_loss']):.6g}" in outcome.out
    assert kept["loss"] == pytest.approx(float(rows[1]["loss"]))


@pytest.mark.parametrize("where", [(), ("--strategy=mirrored", "--num_virtual_devices=2")], ids=["one", "mirrored"])
def test_a_callback_may_end_the_run(inside, where):
    class Enough(callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

    outcome = inside(*EPOCHS, *where, trainer=Line, data=data, hooks=[Enough()]).ok()
    assert "stopped at step 4: stop_training of a Keras callback" in outcome.out


@pytest.mark.parametrize(
    ("callback", "flag"),
    [(lambda: callbacks.BackupAndRestore("backup"), "--run_dir"), (lambda: callbacks.SwapEMAWeights(), "--ema_decay")],
    ids=["backup", "average"],
)
def test_a_callback_that_needs_keras_loop_names_the_flag(inside, callback, flag):
    made = callback()
    outcome = inside(*EPOCHS, trainer=Line, data=data, hooks=[made])
    assert outcome.code == 2
    assert f"Keras callback {type(made).__name__} is for Keras's own loop; use {flag}" in outcome.error


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_callback_sets_the_rate_unless_a_schedule_does(inside, schedule):
    class Slower(callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.optimizer.learning_rate = 1e-5
            assert float(self.model.optimizer.learning_rate) == pytest.approx(1e-5)

    outcome = inside(*EPOCHS, f"--learning_rate_schedule={schedule}", trainer=Line, data=data, hooks=[Slower()])
    assert outcome.code == (2 if schedule == "cosine" else 0)
    assert schedule == "constant" or "--learning_rate_schedule=constant" in outcome.error


def test_a_bug_in_a_callback_names_its_file_and_line(inside):
    class Buggy(callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise KeyError(logs["none"])

    assert place_of(Buggy.on_epoch_end) in inside(*EPOCHS, trainer=Line, data=data, hooks=[Buggy()]).mistake


class Rising(Line):
    """`close` and `near` rise as the line comes closer; of `near` nobody knows which direction is better."""

    def metrics(self, outputs, batch):
        close = 1.0 - tf.square(outputs[:, 0] - batch[1])
        return {"close": mean(close, direction="max"), "near": mean(close)}


@pytest.mark.parametrize(
    "make",
    [
        lambda monitor: callbacks.EarlyStopping(monitor, patience=1),
        lambda monitor: callbacks.ReduceLROnPlateau(monitor, patience=1),
        lambda monitor: callbacks.ModelCheckpoint("best.keras", monitor, save_best_only=True),
    ],
)
def test_mode_auto_is_the_direction_of_the_metric_or_an_error_before_the_first_step(
    inside, tmp_path, monkeypatch, make
):
    monkeypatch.chdir(tmp_path)
    known, unknown = make("val_close"), make("val_near")
    slow = (*EPOCHS, "--optimizer=sgd", "--learning_rate=0.05")
    inside(*slow, trainer=Rising, data=data, hooks=[known]).ok()
    assert known.mode == "max"
    assert known.best > 0.1  # the second epoch's: the first begins below 0
    outcome = inside(*slow, trainer=Rising, data=data, hooks=[unknown])
    assert f"{type(unknown).__name__}(monitor='val_near'): whether a higher or a lower" in outcome.mistake
    assert "give it mode='max' or mode='min'" in outcome.mistake
    assert "step 1" not in outcome.out


class Late(Line):
    """Its `share` is of nothing at first."""

    def metrics(self, outputs, batch):
        high = tf.cast(outputs[:, 0] > 0.15, tf.float32)
        return {"share": Mean(tf.reduce_sum(high), tf.cast(tf.size(high), tf.float32) * tf.reduce_max(high))}


def test_a_first_value_that_is_nan_is_not_the_best(inside):
    values, stopping = [], callbacks.EarlyStopping("val_share", patience=50, mode="max")
    seen = callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: values.append(logs["val_share"]))
    slow = ("--optimizer=sgd", "--learning_rate=0.01", "--train_steps=40", "--eval_every_steps=4")
    inside(*RUN, *slow, trainer=Late, data=data, hooks=[stopping, seen]).ok()
    assert np.isnan(values[0])
    assert stopping.best == max(value for value in values if not np.isnan(value)) > 0
