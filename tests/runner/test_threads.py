"""Calls of one run by several threads: each has its own answer; what can't be done at once is refused by a line."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import UsageError, open_run
from crankshaft.engine.hooks import every_steps
from tests import logical_cpus
from tests.launch.line import Line

ASKED = {"global_batch_size": 8, "learning_rate": 0.1, "optimizer": "sgd", "jit": "off", "progress": "off"}
WHERE = [{}, {"strategy": "mirrored", "num_virtual_devices": 2}]
logical_cpus.make_four()
pytestmark = pytest.mark.thorough


def batch(number: int) -> tuple:
    x = np.random.default_rng(number).normal(size=(8, 1)).astype("float32")
    return x, 3 * x[:, 0] + 1


def opened(where: dict, **more):
    return open_run(Line, data=(batch(0),), mode="train", **ASKED, **where, **more)


def in_threads(*functions) -> list:
    """Calls functions, each in a thread; their results, or errors."""
    results: list = [None] * len(functions)

    def call(number: int, function) -> None:
        try:
            results[number] = function()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=call, args=pair) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.thorough
@pytest.mark.parametrize("where", WHERE, ids=["one_device", "two_replicas"])
def test_threads_predict_and_evaluate_beside_one_that_trains(where):
    with opened(where) as alone:
        for number in range(12):
            alone.train(data=batch(number), steps=1)
        expected = alone.model.get_weights()

    with opened(where) as run:

        def learn() -> None:
            for number in range(12):
                run.train(data=batch(number), steps=1)

        def play(number: int, weights=None):
            def predict() -> None:
                rng = np.random.default_rng(number)
                for _ in range(20):
                    x = rng.normal(size=(3 + number, 1)).astype("float32")
                    outputs = run.predict(x)
                    assert outputs.shape == x.shape
                    if weights:
                        np.testing.assert_allclose(outputs, x @ weights[0] + weights[1], rtol=1e-4, atol=1e-5)

            return predict

        def judge() -> None:
            for number in range(5):
                assert run.evaluate(batch(number))["loss"] >= 0

        assert in_threads(learn, play(0), play(1), judge) == [None] * 4
        for one, other in zip(run.model.get_weights(), expected, strict=True):
            np.testing.assert_array_equal(one, other)
        assert in_threads(*(play(number, expected) for number in range(3))) == [None] * 3


def test_a_dataset_whose_generator_predicts_is_trained_on():
    with opened({}) as run:

        def examples():
            for number in range(3):
                x, _ = batch(number)
                yield x, np.reshape(run.predict(x), -1) + 1.0

        specs = tf.TensorSpec([8, 1], tf.float32), tf.TensorSpec([8], tf.float32)
        dataset = tf.data.Dataset.from_generator(examples, output_signature=specs)
        losses = [run.train(data=dataset, steps=1)["loss"] for _ in range(4)]
    np.testing.assert_allclose(losses, 1.0, rtol=1e-5)  # each label is 1 more than what the weights of its step say


def refused(result) -> str:
    assert isinstance(result, UsageError), result
    return str(result)


def test_what_another_thread_can_not_do_while_a_run_trains_is_one_line(tmp_path):
    tried: list = []
    calls = {
        "train(steps=1)": lambda: run.train(steps=1),
        "save()": lambda: run.save(),
        "restore(which='latest')": lambda: run.restore("latest"),
        "set_weights()": lambda: run.set_weights(run.model.get_weights()),
        "evaluate()": lambda: run.evaluate(),
        "close()": lambda: run.close(),
    }
    others = [lambda: run.predict(batch(0)[0]), lambda: run.evaluate(batch(0))]

    def act(status, metrics) -> None:
        tried.extend(in_threads(*calls.values(), *others))

    with opened({}, hooks=[every_steps(1, act)], run_dir=str(tmp_path)) as run:
        run.train(steps=1)
        assert (run.is_open, run.step) == (True, 1)
    *results, predicted, evaluated = tried
    for call, result in zip(calls, results, strict=True):
        assert refused(result).startswith(f"{call}: another thread is in train(steps=1) of this run")
    assert predicted.shape == (8, 1)
    assert evaluated["loss"] >= 0


def test_predictions_with_averages_are_refused_beside_training():
    tried: list = []

    def act(status, metrics) -> None:
        tried.extend(in_threads(lambda: run.predict(batch(0)[0])))

    with opened({}, hooks=[every_steps(1, act)], ema_decay=0.9) as run:
        run.train(steps=1)
    assert refused(tried[0]).startswith("predict(): another thread is in train(steps=1)")
