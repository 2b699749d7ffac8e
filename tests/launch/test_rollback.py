"""--on_nonfinite=rollback: a run returns to its last checkpoint, and leaves out the steps that are not finite."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft.engine import Trainer, mean
from crankshaft.engine.hooks import Hook, every_steps
from tests.arrays import assert_same

EXAMPLES, BAD = 32, 11
FEATURES = np.random.default_rng(1).normal(size=[EXAMPLES, 3]).astype("f")
LABELS = FEATURES @ np.array([1, -2, 3], "f")
WITH_NAN = FEATURES.copy()
WITH_NAN[BAD, 1] = np.nan
RUN = {"global_batch_size": 4, "jit": "off", "progress": "off", "mode": "train", "train_steps": 20, "optimizer": "adam"}
MIRRORED = {"strategy": "mirrored", "num_virtual_devices": 2}


class Plane(Trainer):
    """Batch normalization's statistics and the optimizer's slots are of the state that is put back."""

    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.BatchNormalization(), tf.keras.layers.Dense(1)])

    def loss(self, outputs, batch):
        return mean(tf.square(outputs[:, 0] - batch[1]))


def of_arrays():
    return (WITH_NAN, LABELS), None


def of_stream():
    return tf.data.Dataset.from_tensor_slices((WITH_NAN, LABELS)).shuffle(8, seed=1), None


def trained(run_dir, data=of_arrays, **keywords):
    return crankshaft.run(Plane, data=data, run_dir=str(run_dir), **{**RUN, "checkpoint_every_steps": 3, **keywords})


def weights(run) -> list[np.ndarray]:
    return run.model.get_weights()


def rollback_of(run_dir, step: int) -> dict:
    manifest = json.loads((run_dir / "checkpoints" / f"ckpt-{step}.manifest.json").read_text())
    return manifest["host_state"]["hooks"]["rollback"]


@pytest.mark.parametrize(
    ("data", "devices"), [(of_arrays, MIRRORED), pytest.param(of_stream, {}, marks=pytest.mark.slow)]
)
def test_steps_with_nan_are_left_out_and_all_others_are_those_of_a_run_that_skips_them(tmp_path, data, devices):
    """The example with a NaN comes once per epoch of 8 steps. A run that stops and is resumed has the same bits."""
    expected = trained(tmp_path / "skips", data, on_nonfinite="skip", **devices)
    run = trained(tmp_path / "returns", data, on_nonfinite="rollback", **devices)
    rollback = rollback_of(tmp_path / "returns", 20)
    assert_same(weights(run), weights(expected))
    assert len(rollback["left_out"]) == rollback["returns"] >= 2
    at = rollback["left_out"][0]
    trained(tmp_path / "stops", data, on_nonfinite="rollback", stop_at_step=at, **devices)
    assert rollback_of(tmp_path / "stops", at) == {"returns": 1, "left_out": [at]}
    resumed = trained(tmp_path / "stops", data, on_nonfinite="rollback", **devices)
    assert_same(weights(resumed), weights(expected))
    assert rollback_of(tmp_path / "stops", 20) == rollback


class Write(Hook):
    """Changes a weight on the last replica alone, at the end of a step, so many times."""

    def __init__(self, at: int, times: int):
        self._at, self._times = at, times

    def __call__(self, status):
        if status.step >= self._at and self._times:
            self._times -= 1
            kernel = status.state.trainer.model.layers[1].kernel.value
            last = status.strategy.distribution.experimental_local_results(kernel)[-1]
            last.assign_add(tf.ones_like(last) * 1e-6)


def of_finite():
    return (FEATURES, LABELS), None


def test_a_replica_that_differs_is_named_and_the_run_returns_to_where_it_did_not(tmp_path):
    expected = weights(trained(tmp_path / "undisturbed", of_finite, **MIRRORED))
    once = trained(tmp_path / "once", of_finite, on_nonfinite="rollback:1", hooks=[Write(7, 1)], **MIRRORED)
    assert_same(weights(once), expected)
    assert rollback_of(tmp_path / "once", 20) == {"returns": 1, "left_out": []}
    differs = r"replica 1 \(.*\) of 2 replicas holds other values of \S*kernel \[3, 1\] than the rest"
    # A snapshot in memory is checked as a checkpoint is, and a clock decides at which step.
    without = {"snapshot_seconds": 0, **MIRRORED}
    with pytest.raises(crankshaft.RunError, match=f"step 9: {differs}.*; the run has returned to a checkpoint 2 times"):
        trained(tmp_path / "again", of_finite, on_nonfinite="rollback:2", hooks=[Write(7, 99)], **without)
    with pytest.raises(crankshaft.RunError, match=f"step 9: {differs}"):
        trained(tmp_path / "raises", of_finite, hooks=[Write(7, 1)], **without)


def test_a_run_ends_after_as_many_returns_and_where_no_step_is_to_blame(tmp_path):
    with pytest.raises(
        crankshaft.RunError, match=r"gradient_norm is nan.*; the run has returned to a checkpoint 1 time"
    ):
        trained(tmp_path / "nan", on_nonfinite="rollback:1")

    def data():
        return (FEATURES, LABELS), (WITH_NAN, LABELS)

    with pytest.raises(crankshaft.RunError, match=r"^evaluation at step 8: loss is nan"):
        trained(tmp_path / "evaluation", data, on_nonfinite="rollback", mode="train_and_eval")


def test_weights_that_are_not_finite_though_the_loss_is(tmp_path):
    """Once, as by a fault of a device: the steps since the checkpoint are repeated one by one, and all are good."""

    def spoil(status, _):
        if status.step == 5 and not spoilt:
            spoilt.append(status.step)
            status.state.trainer.model.layers[0].moving_mean.assign([np.inf] * 3)

    spoilt: list[int] = []
    expected = weights(trained(tmp_path / "undisturbed", of_finite))
    run = trained(tmp_path / "spoilt", of_finite, on_nonfinite="rollback", hooks=[every_steps(1, spoil)])
    assert spoilt == [5]
    assert_same(weights(run), expected)
    assert rollback_of(tmp_path / "spoilt", 20) == {"returns": 1, "left_out": []}


class Faults(Hook):
    """Errors of a device: at these steps, one after the other, a weight becomes NaN."""

    def __init__(self, steps):
        self._steps = [*steps]

    def next_due(self, step, status):
        return self._steps[0] if self._steps and self._steps[0] > step else None

    def __call__(self, status):
        if [status.step] == self._steps[:1]:
            del self._steps[0]
            kernel = status.state.trainer.model.layers[0].kernel
            kernel.assign(kernel * np.float32("nan"))


class Counts(tf.keras.callbacks.Callback):
    ended = 0

    def on_epoch_end(self, epoch, logs=None):
        self.ended += 1

    def get_state(self):
        return {"ended": self.ended}

    def set_state(self, state):
        self.ended = state["ended"]


class Stateless(tf.keras.callbacks.Callback):
    pass


def test_keras_callbacks_return_with_the_run(tmp_path, caplog):
    """Epochs of 8 steps and a checkpoint every 12: the run returns before its first epoch's end, and twice within one.

    No loss is an improvement, so early stopping ends the run after 5 epochs, and the rate falls after 2 and 4.
    """

    def fitted(name, faults):
        tf.keras.utils.set_random_seed(0)
        model = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(1)])
        model.compile(tf.keras.optimizers.SGD(0.01), "mse")
        counts, kwargs = Counts(), {"min_delta": 100.0}
        called = [
            tf.keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=2, **kwargs),
            tf.keras.callbacks.EarlyStopping("loss", patience=4, restore_best_weights=True, **kwargs),
            tf.keras.callbacks.CSVLogger(tmp_path / f"{name}.csv"),
            *(counts, Stateless()),
        ]
        where = {"run_dir": str(tmp_path / name), "on_nonfinite": "rollback:3", "checkpoint_every_steps": 12}
        data = {"epochs": 9, "batch_size": 4, "verbose": 0, "jit": "off"}
        hooks = [Faults(faults)]
        history = crankshaft.fit(model, FEATURES, LABELS, callbacks=called, hooks=hooks, **where, **data).history
        rows = (tmp_path / f"{name}.csv").read_text()
        return history.epoch, history.history, counts.ended, rows, [each.tolist() for each in model.get_weights()]

    expected = fitted("undisturbed", [])
    assert expected[0] == [0, 1, 2, 3, 4]
    with caplog.at_level("WARNING", logger="absl"):
        assert fitted("returns", [10, 20, 13]) == expected
    names = "Keras callback Stateless has no state, so it does not return to step"
    assert sum(record.getMessage().startswith(names) for record in caplog.records) == 1
    assert rollback_of(tmp_path / "returns", 36) == {"returns": 3, "left_out": []}


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"run_dir": None}, "on_nonfinite=rollback returns to checkpoints, which are in run_dir; give one"),
        ({"on_nonfinite": "rollback:0"}, "on_nonfinite=rollback:0 is unknown; did you mean rollback"),
        ({"sync_every_steps": 4, "checkpoint_every_steps": 4, **MIRRORED}, "can't be combined with sync_every_steps=4"),
        ({"check_numerics": True}, "can't be combined with check_numerics"),
        ({"strategy": "parameter_server"}, "can't be combined with strategy=parameter_server"),
    ],
)
def test_what_it_can_not_do_is_refused_in_a_line(tmp_path, keywords, words, monkeypatch):
    hosts = {"chief": ["localhost:1"], "worker": ["localhost:2"], "ps": ["localhost:3"]}
    task = {"cluster": hosts, "task": {"type": "chief", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(task) if "strategy" in keywords and len(keywords) == 1 else "")
    how = {"run_dir": str(tmp_path), "on_nonfinite": "rollback", **RUN, **keywords}
    with pytest.raises(crankshaft.UsageError, match=words):
        crankshaft.run(Plane, data=of_arrays, **how)
    if how["run_dir"] is None:
        with pytest.raises(crankshaft.UsageError, match="of a run that trains to its end"):
            crankshaft.open_run(Plane, data=of_arrays, **{**how, "run_dir": str(tmp_path)})
