"""Figures of a hook: in one window each, in the log, the history, TensorBoard and the result, also after a resume."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft.engine.hooks import Periodic, every_steps

X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
DATA = (X, X.sum(1, keepdims=True))


class Line(crankshaft.Trainer):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(1)])

    def loss(self, outputs, batch):
        return crankshaft.mean(tf.square(outputs - batch[1])[:, 0])


class Seen(Periodic):
    """Sets a figure every three steps: the steps so far."""

    def act(self, status):
        status.figures["seen"] = status.step


def test_a_figure_is_in_one_window(tmp_path, replicas):
    on = {"strategy": "mirrored", "num_virtual_devices": 2} if replicas > 1 else {}
    flags = {"data": (DATA, None), "global_batch_size": 8, "train_steps": 8, "jit": "off", **on}
    for folder, stops, shown in (("whole", (8,), [6]), ("resumed", (3, 8), [3, 6])):  # in windows of the log
        for stop in stops:
            at = {"run_dir": tmp_path / folder, "stop_at_step": stop, "summary_every_steps": 2}
            with crankshaft.open_run(Line, hooks=[Seen(3)], **at, **flags) as run:
                run.train()
        # Set at 3 and 6, and shown by the windows that begin there: they end with epochs of two steps.
        rows = {entry["step"]: entry["train_seen"] for entry in run.history if "train_seen" in entry}
        assert rows == {4: 3, 8: 6}, folder
        assert run.result["train"]["seen"] == 6
        lines = map(json.loads, (tmp_path / folder / "events.jsonl").read_text().splitlines())
        windows = [line for line in lines if line["event"] == "window"]
        assert [line["metrics"]["seen"] for line in windows if "seen" in line["metrics"]] == shown, folder
        found = []
        for path in sorted((tmp_path / folder).rglob("events.out.tfevents*")):
            for event in tf.compat.v1.train.summary_iterator(str(path)):
                found += [
                    (event.step, float(tf.make_ndarray(v.tensor))) for v in event.summary.value if v.tag == "seen"
                ]
        assert sorted(found) == [(4, 3.0), (6, 6.0)], folder  # TensorBoard acts after the hook


def test_a_name_of_a_metric_is_refused():
    def set_loss(status, metrics):
        status.figures["loss"] = 0.0

    with pytest.raises(crankshaft.UsageError, match=r"status.figures has loss, and so has the step's metrics; use an"):
        crankshaft.run(Line, data=(DATA, None), hooks=[every_steps(1, set_loss)], global_batch_size=8, train_steps=2)
