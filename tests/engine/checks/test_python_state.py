"""What a step changes in Python as it is traced is named if it computes with it, and is as the trace left it."""

from __future__ import annotations

import functools
import itertools
import types

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import mean
from crankshaft.engine.checks.python_state import PythonState
from tests.engine.trainers import Squares

DATA = np.ones((8, 3), np.float32), np.zeros(8, np.float32)
count = 0


class Box:
    times = 0


def in_class(trainer):
    type(trainer).times += 1
    return trainer.times


def in_module(trainer):
    global count
    count += 1
    return count


def in_array(trainer):
    trainer.array[0] += 1
    return trainer.array[0]


def in_new_attribute(trainer):
    trainer.fresh = getattr(trainer, "fresh", 0) + 1
    return trainer.fresh


def in_layer(trainer):
    layer = trainer.model.layers[0]
    layer.calls = getattr(layer, "calls", 0) + 1
    return layer.calls


def in_box(trainer):
    trainer.box.times += 1
    return trainer.box.times


def in_tf_module(trainer):
    trainer.module.entries[0] += 1
    return trainer.module.entries[0]


def in_dictionary(trainer):
    trainer.by_name["n"] = trainer.by_name["n"] * 0.5
    return trainer.by_name["n"]


def in_list(trainer):
    trainer.listed.append(1)
    return len(trainer.listed)


def in_number(trainer):
    trainer.number = trainer.number + np.float32(1)
    return float(trainer.number)


def in_bool(trainer):
    trainer.is_odd = not trainer.is_odd
    return 1.0 if trainer.is_odd else 2.0


def in_text(trainer):
    trainer.phase = "b" if trainer.phase == "a" else "a"
    return 1.0 if trainer.phase == "a" else 2.0


WAYS = {
    "Counting.times": in_class,
    "Counting.change: count": in_module,
    "Counting.array": in_array,
    "Counting.fresh": in_new_attribute,
    "out.calls": in_layer,
    "Counting.box.times": in_box,
    "Counting.module.entries.0": in_tf_module,
    "Counting.by_name.n": in_dictionary,
    "Counting.listed.0": in_list,
    "Counting.number": in_number,
    "Counting.is_odd": in_bool,
    "Counting.phase": in_text,
    "Counting.iterator": lambda trainer: next(trainer.iterator),
    "Counting.counter": lambda trainer: next(trainer.counter),
}


class Counting(Squares):
    """Multiplies its loss by what `change` returns, and keeps what any step may: sizes, names, a cache."""

    times = 0

    def __init__(self, change):
        super().__init__()
        self.change, self.box, self.module, self.array = change, Box(), tf.Module(), np.zeros(1)
        self.listed, self.by_name, self.number = [], {"n": 1.0}, np.float32(0)
        self.is_odd, self.phase, self.iterator, self.counter = False, "a", iter(range(9)), itertools.count()
        self.module.entries, self.names, self.size = [0], [], types.SimpleNamespace()

    def build_model(self):
        return tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(1, name="out")])

    def loss(self, outputs, batch):
        self.names.append(outputs.name)
        self.size.last, self.size.tensor = outputs.shape[0], outputs
        self.cache = getattr(self, "cache", np.ones(1, np.float32))
        return mean(self.cache * float(self.change(self)) * tf.square(outputs[:, 0] - batch[1]))


def traced(trainer):
    def total(features):
        return trainer.loss(trainer.model(features), (features, tf.zeros(4))).total

    return tf.function(total, autograph=False).get_concrete_function(tf.TensorSpec([4, 3]))


def test_what_a_step_counts_in_python_is_named_with_the_line_that_computes_with_it(caplog):
    for path, change in WAYS.items():
        caplog.clear()
        trainer = Counting(change)
        trainer.model = trainer.build_model()
        trace = functools.partial(traced, trainer)
        state = PythonState(lambda t=trainer: [("Counting", t), ("out", t.model.layers[0])])
        state.warn_if_computed(trace().graph, trace, lambda: None)
        (line,) = [line for line in caplog.messages if "only as it is traced" in line]
        assert f"{path} (from" in line
        assert "test_python_state.py:" in line
        assert " in loss changes with it" in line


class InFunction(Counting):
    """Has its step in a function, which has in the second trace the graph of the first."""

    train_step = tf.function(Counting.train_step, autograph=False)


@pytest.mark.parametrize(("kind", "replicas"), [(Counting, 1), (Counting, 2), (InFunction, 1)])
def test_what_a_step_changes_and_does_not_compute_with_is_no_line_and_stays_as_it_was(bench, caplog, kind, replicas):
    def change_all(trainer):
        for change in WAYS.values():
            change(trainer)
        return 1.0

    trainer, before = kind(change_all), count
    bench(trainer, DATA, 4, replicas).run(1)
    assert "traced" not in caplog.text
    assert count - before == trainer.box.times == trainer.array[0] == trainer.fresh == replicas
    assert len(trainer.names) == len(trainer.listed) == trainer.number == trainer.module.entries[0] == replicas
    assert next(trainer.iterator) == next(trainer.counter) == replicas
