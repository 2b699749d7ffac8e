"""What tests of TensorBoard share: data for a run, the run itself, and what it has left, read back."""

from __future__ import annotations

import contextlib
import os

import numpy as np
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from crankshaft.engine.hooks import Hook
from crankshaft.parts.tensorboard.probe import Probe

EXAMPLES, BATCH = 70, 16  # 5 steps an epoch, the last of 6 examples


def data(seed: int = 0):
    rng = np.random.default_rng(seed)
    return rng.random((EXAMPLES, 12, 12, 1), dtype="float32"), rng.integers(0, 3, EXAMPLES).astype("int32")


class Every(Hook):
    def __init__(self, steps):
        self.steps = steps

    def next_due(self, step, status):
        return (step // self.steps + 1) * self.steps


def probe_of(bench):
    return Probe(bench.strategy, bench.trainer)


def raw_events(folder):
    """Every event in a folder's files, in order."""
    events = []
    for name in sorted(name for name in os.listdir(folder) if "tfevents" in name):
        with contextlib.suppress(
            tf.errors.DataLossError
        ):  # a file that a killed process has left ends in half an event
            for record in tf.data.TFRecordDataset(os.path.join(folder, name)).as_numpy_iterator():
                events.append(tf.compat.v1.Event.FromString(record))
    return events


def scalars(folder):
    """{tag: {step: value}}, from every file, as TensorBoard shows it; fails where a step is there twice."""
    found = {}
    for event in raw_events(folder):
        if event.HasField("session_log"):  # what an earlier process has written from there on is discarded
            found = {tag: {step: x for step, x in series.items() if step < event.step} for tag, series in found.items()}
        for value in event.summary.value:
            if value.metadata.plugin_data.plugin_name == "scalars":
                series = found.setdefault(value.tag, {})
                assert event.step not in series, f"{value.tag} is twice at step {event.step}"
                series[event.step] = float(tf.make_ndarray(value.tensor))
    return found


def tensor(folder, tag, step):
    """A value at a step by TensorBoard's own reader."""
    accumulator = EventAccumulator(str(folder)).Reload()
    (event,) = [e for e in accumulator.Tensors(tag) if e.step == step]
    return tf.make_ndarray(event.tensor_proto)
