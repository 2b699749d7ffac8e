"""A script ends with its last line: what reads ahead for a run in Python is freed where the run ends, however it does.

An iterator that calls Python is waited for by whoever frees it, for ever where the interpreter is ending by then.
"""

from __future__ import annotations

import signal

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft.engine.hooks import every_steps
from tests.waiting import wait_until

ASKED = {"train_steps": 20, "jit": "off", "progress": "off"}
SCRIPT = """
import atexit, sys
from tests.launch import test_exit
if __name__ == "__main__":
    atexit.register(lambda: print("open at the end:", test_exit.Endless.open, flush=True))
    run = test_exit.trained()
    assert run.evaluate(test_exit.Endless().dataset.take(64))
    test_exit.trained(fails=True)
"""


class Endless:
    """A dataset that Python code gives, of more examples than anybody reads; knows how many of its iterators live."""

    open = 0

    def __init__(self):
        spec = (tf.TensorSpec([4]), tf.TensorSpec([1]))
        given = tf.data.Dataset.from_generator(self._examples, output_signature=spec)
        self.dataset = given.apply(tf.data.experimental.assert_cardinality(10**6))

    def _examples(self):
        Endless.open += 1
        try:
            for number in range(10**6):
                yield np.full(4, number % 2, np.float32), np.full(1, number % 2, np.float32)
        finally:
            Endless.open -= 1


class Line(crankshaft.Trainer):
    def __init__(self, fails: bool = False):
        super().__init__()
        self.fails = fails

    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(1)])

    def loss(self, outputs, batch):
        if self.fails:
            with tf.control_dependencies([tf.debugging.assert_less(batch[1], 0.5)]):
                outputs = tf.identity(outputs)
        return crankshaft.mean(tf.square(outputs - batch[1]))


def trained(hooks=(), fails=False, **asked):
    def data():
        return Endless().dataset, Endless().dataset

    asked = {**ASKED, "mode": "train", **asked}
    return crankshaft.run(Line, data=data, hooks=hooks, model_arg={"fails": fails}, **asked)


def assert_nothing_is_open():
    wait_until(lambda: Endless.open == 0)


def failing(status, metrics):
    raise KeyError("mine")


def interrupted(status, metrics):
    signal.raise_signal(signal.SIGINT)


def test_a_run_that_is_kept_reads_no_further():
    kept = trained(strategy="mirrored", num_virtual_devices=2)
    assert_nothing_is_open()
    assert kept.evaluate(Endless().dataset.take(640))["loss"] < 10
    assert_nothing_is_open()


def test_a_program_that_ends_leaves_nothing_that_reads(inside):
    kept = []  # as a script may

    def data():
        kept.extend([Endless().dataset, Endless().dataset.take(64)])
        return (*kept,)

    inside("--train_steps=20", "--jit=off", "--progress=plain", trainer=Line, data=data).ok()
    assert_nothing_is_open()


def test_an_evaluation_that_was_prepared_and_not_made_reads_no_further():
    kept = trained([every_steps(5, interrupted)], mode="train_and_eval", train_steps=10**6, eval_every_steps=10**6)
    assert kept.result["step"] < 10**6
    assert_nothing_is_open()


@pytest.mark.parametrize(
    ("fails", "kind"),
    [
        ({"fails": True}, crankshaft.UsageError),
        pytest.param({"hooks": [every_steps(5, failing)]}, KeyError, marks=pytest.mark.slow),  # the program's own
    ],
    ids=["step", "hook"],
)
def test_an_error_that_is_kept_keeps_no_input(fails, kind):
    with pytest.raises(kind) as error:
        trained(**fails)
    assert_nothing_is_open()
    assert kind is KeyError or error.value.__cause__ is not None


@pytest.mark.slow
def test_a_script_that_trains_evaluates_and_fails_ends(crank, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = crank(script=script)
    assert done.code == 1
    assert "open at the end: 0" in done.out
