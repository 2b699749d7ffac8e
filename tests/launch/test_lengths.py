"""Runs on examples of varying length: resumed, called with other lengths, predicted, exported; mistakes in flags."""

from __future__ import annotations

import itertools
import re
from typing import ClassVar

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Padded, UsageError, load_model, mean, open_run, run
from crankshaft.engine.hooks import every_steps
from tests.launch import varying
from tests.logical_cpus import make_four
from tests.runs import assert_equal_bits

make_four()
FLAGS = {"global_batch_size": 8, "learning_rate": 0.01, "seed": 3, "eval_batch_size": 16, "jit": "off"}
BUCKETS = "0:3,7,12:48"


def made(kind):
    return varying.Walks() if kind == "source" else varying.dataset()


@pytest.mark.parametrize(
    ("kind", "buckets"), [pytest.param("source", BUCKETS, marks=pytest.mark.slow), ("dataset", "0:3,7,12")]
)
def test_a_run_in_two_parts_is_one_and_serves_any_length(kind, buckets, tmp_path, capsys):
    data = (made(kind), made(kind))
    flags = {**FLAGS, "bucket_by": buckets}
    whole = run(varying.Mean, data=data, train_steps=10, run_dir=tmp_path / "whole", **flags)
    shapes = re.findall(r"the data in buckets: \d+ batches per epoch, of (\d+) shapes", capsys.readouterr().out)
    assert [2 < int(count) <= 6 for count in shapes] == [True] * (kind == "source")  # a dataset's are not known before
    for steps in (7, 10):
        parts = run(varying.Mean, data=data, train_steps=steps, run_dir=tmp_path / "parts", **flags)
    assert_equal_bits(tmp_path / "whole", tmp_path / "parts", "eval")
    assert parts.result["eval"] == whole.result["eval"]
    mirrored = run(varying.Mean, data=data, train_steps=10, strategy="mirrored", num_virtual_devices=2, **flags)
    # Sums of float32 in another order.
    assert mirrored.result["eval"]["loss"] == pytest.approx(whole.result["eval"]["loss"], rel=1e-5)
    with pytest.raises(UsageError, match="bucket_by"):
        run(varying.Mean, data=data, train_steps=12, run_dir=tmp_path / "parts", **{**flags, "bucket_by": "0:12"})


class Count(varying.Mean):
    """Notes the examples of each step."""

    steps: ClassVar[list[list[int]]] = []

    def forward(self, features, training):
        def note(numbers):
            self.steps.append(numbers.astype(int).tolist())
            return np.float32(0)

        tf.numpy_function(note, [features.values[:, 0, 0]], tf.float32)
        return super().forward(features, training)


@pytest.mark.parametrize("kind", ["source", "dataset"])
def test_what_orders_an_epoch_changes_where_it_ends(kind, tmp_path):
    Count.steps.clear()
    bounded = {"source": ":48", "dataset": ""}[kind]
    flags = {**FLAGS, "data": (made(kind), None), "run_dir": tmp_path, "learning_rate_schedule": "cosine"}
    flags |= {"bucket_by": f"0:3,7,12{bounded}", "train_epochs": 2, "allow_changed_config": True}
    run(Count, **flags, stop_at_step=4)
    order_by = {"bucket_by": f"0:6,12{bounded}"}
    for changed in (order_by, {"bucket_by": None}, {"seed": 4}, {"shuffle_buffer": 0}, {"global_batch_size": 16}):
        with pytest.raises(
            UsageError, match=r"epoch 1 began .*; resume .* up to step .*, where the epoch end"
        ) as error:
            run(Count, **{**flags, **changed})
    first = int(re.findall(r"up to step (\d+)", str(error.value))[0])
    run(Count, **flags, stop_at_step=first)
    rates = []

    def note(status, means):
        rates.append(float(status.state.trainer.optimizer.learning_rate))

    run(Count, **{**flags, **order_by}, hooks=[every_steps(1, note)])
    for epoch in (Count.steps[:first], Count.steps[first:]):
        assert sorted(itertools.chain(*epoch)) == [*range(len(varying.LENGTHS))]
    progress = np.arange(len(Count.steps) - first + 1)[1:] / (len(Count.steps) - first)
    np.testing.assert_allclose(rates, 0.005 * (1 + np.cos(np.pi * (1 + progress) / 2)), atol=1e-3)


def test_a_call_takes_other_lengths_and_predictions_are_in_order(tmp_path):
    longest = 30  # the run's own are 12 at most
    values = np.zeros([3, longest, 2], np.float32)
    for row, length in enumerate(lengths := [30, 1, 17]):
        values[row, :length] = row
    rows = tf.RaggedTensor.from_tensor(values, lengths=lengths)
    other = tf.data.Dataset.from_tensor_slices((rows, np.array(lengths, np.int32)))
    with open_run(varying.Mean, data=(made("source"), None), train_steps=9, run_dir=tmp_path / "run", **FLAGS) as each:
        each.train(steps=2)
        loss = each.train(steps=1, data=other)["loss"]
        assert np.isfinite(float(loss))
        evaluated = each.evaluate(other)["loss"]
        outputs = each.predict(other)
        expected = np.mean(np.square(outputs[:, 0] - np.array(lengths) / 10))
        assert evaluated == pytest.approx(expected, rel=1e-5)
        np.testing.assert_allclose(each.predict(Padded(values, np.array(lengths, np.int32))), outputs, rtol=1e-6)
        own = each.predict(made("source"))
        assert own.shape == (len(varying.LENGTHS), 1)
        each.train()
        kept = each.predict(Padded(values, np.array(lengths, np.int32)))
    run(
        varying.Mean,
        data=(made("source"), None),
        run_dir=tmp_path / "run",
        mode="export",
    )
    serve = tf.saved_model.load(str(tmp_path / "run" / "export" / "9")).signatures["serving_default"]
    served = serve(features=tf.constant(values), features_lengths=tf.constant(lengths))["outputs"]
    np.testing.assert_allclose(served, kept, rtol=1e-6)


@pytest.mark.parametrize(
    ("buckets", "line"),
    [
        ("100,200", "it is not axis:boundaries; use e.g. 0:100,200,400"),
        ("0:5,5", "its boundaries do not ascend from 1 on"),
        ("0:5,12:11", "its bound of 11 is below the last boundary, so that no example fits"),
        ("1:5,12", "bucket_by names axis 1, counted from 0, and an example of the data has 1 unknown dimensions"),
        ("0:5,7", "the longest example is of length 12, and bucket_by has no boundary that long"),
    ],
)
def test_a_mistake_in_buckets_is_one_line(buckets, line):
    with pytest.raises(UsageError, match=line):
        run(varying.Mean, data=(made("source"), None), train_steps=1, bucket_by=buckets, **FLAGS)


def test_an_example_of_a_stream_that_fits_no_bucket_is_named_by_its_length():
    with pytest.raises(
        UsageError, match=r"^an example is of length \d+ and bucket_by has no boundary that long; add one"
    ):
        run(varying.Mean, data=(made("dataset"), None), train_steps=40, bucket_by="0:5,7", **FLAGS)


def test_buckets_of_examples_of_one_length_are_one_line():
    arrays = np.ones([8, 3], np.float32)
    with pytest.raises(UsageError, match="an example of the data has 0 unknown dimensions; give a dataset or a source"):
        run(varying.Mean, data=((arrays, arrays[:, 0]), None), train_steps=1, bucket_by="0:5", **FLAGS)


class Whole(varying.Mean):
    """Takes arrays, of no lengths; the loss depends on padding."""

    def forward(self, features, training):
        return self.model(tf.reduce_mean(features, 1) / 20.0, training=training)

    def loss(self, outputs, batch):
        return mean(tf.square(outputs[:, 0] - tf.cast(batch[1], tf.float32) / 10.0))

    def predictions(self, outputs, batch):
        return {"sums": tf.reduce_sum(batch[0], [1, 2])}

    def compute_metrics(self, predictions):
        return {"sum": float(np.sum(predictions["sums"]))}


def test_a_trainer_gets_arrays_of_batches_that_came_padded(tmp_path):
    data = made("dataset").padded_batch(8)
    flags = {**FLAGS, "accumulate_steps": 2, "train_steps": 4}
    with open_run(Whole, data=(data, data), run_dir=tmp_path / "run", **flags) as each:
        each.train()
        values = np.ones([2, 5, 2], np.float32)
        outputs = each.predict(values)
        of_data = each.predict(data)
        assert of_data.shape == (len(varying.LENGTHS), 1)
        with pytest.raises(UsageError, match="the run takes no lengths: give arrays"):
            each.evaluate(made("dataset"))
        one = each.evaluate()
        assert one["sum"] == 2 * np.sum(varying.LENGTHS * np.arange(len(varying.LENGTHS)))
    mirrored = run(Whole, data=(data, data), strategy="mirrored", num_virtual_devices=2, **flags)
    assert mirrored.result["eval"]["loss"] == pytest.approx(one["loss"], rel=1e-5)
    run(Whole, data=(data, data), run_dir=tmp_path / "run", mode="export")
    serve = tf.saved_model.load(str(tmp_path / "run" / "export" / "4")).signatures["serving_default"]
    np.testing.assert_allclose(serve(features=tf.constant(values))["outputs"], outputs, rtol=1e-6)
    model = load_model(tmp_path / "run", trainer_class=Whole)
    np.testing.assert_allclose(model.predict(values), outputs, rtol=1e-6)
