"""Programs that return values of each example: in order, each example once, on any replicas and in any batches."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Trainer, mean
from crankshaft.engine.data.arrays import ArraySource
from crankshaft.engine.errors import UsageError
from crankshaft.engine.metrics.predictions import Collector, in_order
from crankshaft.engine.strategies.base import Prediction

pytestmark = pytest.mark.thorough

RNG = np.random.default_rng(0)
X = RNG.normal(size=(21, 3)).astype(np.float32)
Y = RNG.integers(1, 5, 21)
PADDED = np.stack([np.where(np.arange(4) < y, y, 0) for y in Y])


class Line(Trainer):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(1)])

    def loss(self, outputs, batch):
        return mean(tf.square(outputs[:, 0] - tf.cast(batch[1], tf.float32)))

    def predictions(self, outputs, batch):
        return {"of": (outputs[:, 0], batch[1]), "text": tf.strings.as_string(batch[1])}

    def compute_metrics(self, predictions):
        return {}


class Ragged(Line):
    """Values whose lengths differ by example: y times y, and as text; and a type that NumPy's files lack."""

    def predictions(self, outputs, batch):
        values = tf.RaggedTensor.from_row_lengths(tf.repeat(batch[1], batch[1]), batch[1])
        return {"padded": values, "text": tf.strings.as_string(values) + "\0", "half": tf.cast(batch[1], tf.bfloat16)}


def all_of(strategy, program=None, batches=None):
    """Returns what a program returns of each example, and the sums of its metrics."""
    rows = Collector()
    sums = strategy.evaluate(program, batches=batches, keep=rows.add).values()
    return rows.all(), sums


@pytest.mark.parametrize(
    ("replicas", "batch_size", "streams"),
    [(1, 8, False), (1, 30, True), (2, 8, True), (4, 5, False), (4, 9, False), (4, 9, True)],
)
def test_they_come_in_order(bench, replicas, batch_size, streams):
    data = tf.data.Dataset.from_tensor_slices((X, Y)) if streams else (X, Y)
    made = bench(Line(), (X, Y), 8, replicas, eval_source=data, eval_batch_size=batch_size)
    outputs = made.trainer.model(X)[:, 0]
    for batches in (None, 2, 1):
        count = len(X) if batches is None else min(len(X), batches * batch_size)
        rows, sums = all_of(made.strategy, batches=batches)
        np.testing.assert_allclose(rows["of"][0], outputs[:count], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(rows["of"][1], Y[:count])
        assert rows["text"].tolist() == [b"%d" % y for y in Y[:count]]
        assert sums["loss"].count == count


def test_micro_batches_are_joined(bench):
    made = bench(Line(), (X, Y), 8, 2, eval_source=(X, Y), eval_batch_size=4, parallel_micro_batches=2)
    np.testing.assert_array_equal(all_of(made.strategy)[0]["of"][1], Y)


@pytest.mark.parametrize("options", [{}, {"replicas": 2}, {"parallel_micro_batches": 2}], ids=str)
def test_values_of_several_lengths_are_padded(bench, options):
    made = bench(Ragged(), (X, Y), 8, eval_source=(X, Y), eval_batch_size=2, **options)
    found = all_of(made.strategy)[0]
    np.testing.assert_array_equal(found["padded"], PADDED)
    assert found["text"].tolist() == [[b"%d\0" % y if y else b"" for y in row] for row in PADDED.tolist()]
    assert found["half"].dtype == np.float32
    np.testing.assert_array_equal(found["half"], Y)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_prediction_is_a_program_of_any_number_of_examples(bench, replicas):
    made = bench(Line(), (X, Y), 8, replicas)
    step = Prediction(lambda x: {"y": made.trainer.model(x), "x": x})
    for examples in (21, 5, 1):
        rows, sums = all_of(made.strategy, made.strategy.external(step, ArraySource(X[:examples]), 4))
        np.testing.assert_array_equal(rows["x"], X[:examples])
        np.testing.assert_allclose(rows["y"], made.trainer.model(X[:examples]), rtol=1e-5, atol=1e-6)
        assert sums == {}
    assert len(made.strategy.external(step, ArraySource(X), 4).programs) <= 2  # one where replicas share a batch


def test_a_sharded_model_takes_predictions_of_its_own(bench):
    whole = type("Whole", (Line,), {"predictions": Trainer.predictions})
    with pytest.raises(
        UsageError, match=r"Whole\.predictions: with a model sharded over a mesh, outputs may be shards"
    ):
        bench(whole(), (X, Y), 8, 2, model=2, eval_source=(X, Y))
    made = bench(Line(), (X, Y), 8, 2, model=2, eval_source=(X, Y))
    np.testing.assert_array_equal(all_of(made.strategy)[0]["of"][1], Y)


def test_text_of_several_processes_keeps_its_last_bytes():
    numbers, text = tf.constant([2, 0], tf.int64), tf.constant([b"a\0\0", b""])
    (found,) = in_order([[numbers, text]], lambda content: [content] * 2)  # of two that have the same
    assert found.tolist() == [b"", b"", b"a\0\0", b"a\0\0"]


def test_an_output_that_is_no_tensor_is_refused_by_its_kind_with_what_to_return(bench):
    class Distribution:
        dtype = tf.float32

    class Returns(Line):
        def predictions(self, outputs, batch):
            return {"of": Distribution()}

    made = bench(Returns(), (X, Y), 8, eval_source=(X, Y))
    with pytest.raises(UsageError, match=r"^Returns\.predictions: a value is a Distribution, .*; return tensors"):
        made.strategy.evaluate()
