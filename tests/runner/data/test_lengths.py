"""Runs on examples of varying length: resumed, called with other lengths, predicted, exported; mistakes in flags.

Several inputs per step: each has its own batch size, order and position, and each mean its own count.

A trainer's Keras models are had by their names: while it trains, and of its checkpoints.
"""

from __future__ import annotations

import itertools
import re
from typing import ClassVar

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import (
    Averaged,
    Data,
    Padded,
    Trainer,
    UsageError,
    load_model,
    make_optimizer,
    mean,
    minimize,
    open_run,
    run,
)
from crankshaft import run as run_
from crankshaft.engine.hooks import every_steps
from tests import logical_cpus
from tests.arrays import assert_same
from tests.launch import varying
from tests.launch.several_inputs import ASKED, Both, U, X, Y, arrays, by_hand, streams
from tests.logical_cpus import make_four

make_four()
FLAGS = {"global_batch_size": 8, "learning_rate": 0.01, "seed": 3, "eval_batch_size": 16, "jit": "off"}


def made(kind):
    return varying.Walks() if kind == "source" else varying.dataset()


class Count(varying.Mean):
    """Notes the examples of each step."""

    steps: ClassVar[list[list[int]]] = []

    def forward(self, features, training):
        def note(numbers):
            self.steps.append(numbers.astype(int).tolist())
            return np.float32(0)

        tf.numpy_function(note, [features.values[:, 0, 0]], tf.float32)
        return super().forward(features, training)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [pytest.param("source", marks=pytest.mark.slow), "dataset"])
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


@pytest.mark.thorough
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


@pytest.mark.thorough
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


TWO = {"strategy": "mirrored", "num_virtual_devices": 2}
FORMS = {"arrays": (arrays, {}), "read": (arrays, {"resident_data_mb": 0}), "streams": (streams, {})}


def weights(run) -> list[np.ndarray]:
    return [each.numpy() for each in run.trainer.model.weights]


def assert_close(run, expected):
    for mine, theirs in zip(weights(run), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-6)  # float32 beside float64


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("form", "where"),
    [
        ("arrays", TWO),
        ("streams", TWO),
        *(pytest.param(form, {}, marks=pytest.mark.slow) for form in FORMS),
        pytest.param("read", TWO, marks=pytest.mark.slow),
        *(pytest.param(form, {"jit": "on"}, marks=pytest.mark.slow) for form in ("arrays", "read")),
    ],
)
def test_each_mean_is_over_its_own_batch_also_where_epochs_end(form, where):
    logical_cpus.make_four()
    data, more = FORMS[form]
    with open_run(Both, data=data, shuffle_buffer=0, **{**ASKED, **where, **more}) as run:
        run.train(steps=5)
        means = run.train(steps=4)
        assert means["loss"] > 0
        assert_close(run, by_hand(9))
        run.train(data={"near": (X[:4], Y[:4]), "far": (U[:14],)}, steps=1)
        assert run.evaluate()["loss"] == pytest.approx(run.evaluate((X, Y))["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("form", "where"),
    [("streams", {}), *(pytest.param(form, TWO, marks=pytest.mark.slow) for form in ("arrays", "read", "streams"))],
)
def test_a_run_that_is_resumed_in_the_middle_of_both_epochs_ends_on_the_same_bits(form, where, tmp_path):
    logical_cpus.make_four()
    data, more = FORMS[form]
    asked = {**ASKED, **where, **more, "run_dir": tmp_path / "parts"}
    with open_run(Both, data=data, **{**asked, "run_dir": tmp_path / "whole"}) as whole:
        whole.train(steps=11)
    for steps in (2, 3, 6):  # 2: in the first epoch of both; 5: in the second of both
        with open_run(Both, data=data, **asked) as run:
            run.train(steps=steps)
    assert run.step == 11
    assert_same(weights(run), weights(whole))
    assert max(abs(a - b).max() for a, b in zip(weights(whole), by_hand(11), strict=True)) > 1e-4  # it is shuffled


@pytest.mark.thorough
def test_the_others_are_shuffled_by_seeds_of_their_own_and_may_be_endless():
    same = {"a": (np.arange(12, dtype="float32"),), "b": (np.arange(12, dtype="float32"),)}

    class Seen(Trainer):
        def build_model(self):
            return tf.keras.Sequential([tf.keras.Input([1]), tf.keras.layers.Dense(1)])

        def forward(self, features, training):
            return self.model(tf.reshape(tf.concat([features["a"], features["b"]], 0), [-1, 1]))

        def loss(self, outputs, batch):
            return mean(tf.square(outputs[:, 0]))

        def metrics(self, outputs, batch):
            squares = {name: mean(tf.square(each)) for name, each in batch.items()}  # of sizes of their own
            apart = tf.abs(batch["a"][: tf.shape(batch["b"])[0]] - batch["b"])
            return {**squares, "apart": mean(apart)}

    asked = {**ASKED, "global_batch_size": 12}
    with open_run(Seen, data=Data(same, batch_sizes={}), **asked) as run:
        assert run.train(steps=1)["apart"] > 1
    squares = []
    for micro_batches in (1, 3):
        asked_too = {**asked, "accumulate_steps": micro_batches}
        with open_run(Seen, data=Data(same, batch_sizes={"b": 5}), **asked_too) as run:
            means = run.train(steps=3)  # an epoch of "b", and three of "a"
            squares.append([means["a"], means["b"]])
    np.testing.assert_allclose(squares, np.full([2, 2], np.mean(np.arange(12) ** 2)), rtol=1e-6)
    endless = tf.data.Dataset.from_tensor_slices(same["b"][0]).repeat()
    with open_run(Seen, data=Data({**same, "b": endless}), **asked) as run:
        assert run.train(epochs=3)["apart"] > 0
        assert run.step == 3


def test_streams_of_several_inputs_continue_in_later_calls():
    data = streams().train
    with open_run(Both, data=streams(), **{**ASKED, "shuffle_buffer": 0}) as run:
        for steps in (1, 1, 2):
            run.train(data=data, steps=steps)
        assert_close(run, by_hand(4))


def test_inputs_that_are_not_clear_are_errors_of_one_line(tmp_path):
    logical_cpus.make_four()
    near, far = (X, Y), (U,)
    for data, where, why in [
        (Data({"near": near, "far": far}), {}, r"dictionary of tuples \(near, far\): several inputs per step, or"),
        (Data({"near": near, "far": U}, batch_sizes={}), {}, "'far' is a ndarray; give"),
        (Data(near, batch_sizes={"far": 7}), {}, "batch_sizes is for several inputs per step"),
        (arrays(near=3), {}, r"batch_sizes\['near'\]=3: the batch size of the first input is the run's"),
        (arrays(fra=3), {}, r"batch_sizes\['fra'\]: the train data has no such input; use far"),
        (arrays(far=0), {}, r"batch_sizes\['far'\]=0 is not a batch size"),
        (arrays(far=24), TWO, r"'far'\] has a batch of 1 examples, and each of 2 replicas .*; use a batch size of 23"),
    ]:
        with pytest.raises(UsageError, match=why), open_run(Both, data=data, **ASKED, **where):
            pass
    with open_run(Both, data=arrays, run_dir=tmp_path, **ASKED) as run:
        with pytest.raises(UsageError, match="give a dictionary of near, far"):
            run.train(data=near, steps=1)
        run.train(steps=1)
    with pytest.raises(UsageError, match="far batch_size: 7 -> 8"):
        open_run(Both, data=lambda: arrays(far=8), run_dir=tmp_path, **ASKED)


class Vae(Trainer):
    """An encoder, which is called `model`, and a decoder."""

    def build_model(self):
        layers = tf.keras.layers
        self.decoder = tf.keras.Sequential([layers.Input([2]), layers.Dense(4)])
        return tf.keras.Sequential([layers.Input([4]), layers.Dense(2)])

    @property
    def trainable_variables(self):
        return [*self.model.trainable_variables, *self.decoder.trainable_variables]

    def forward(self, features, training=False):
        return self.decoder(self.model(features, training=training), training=training)

    def loss(self, outputs, batch):
        return mean(tf.reduce_sum(tf.square(outputs - batch), axis=-1))


def test_a_model_is_had_by_its_name(tmp_path):
    points, codes = np.ones((8, 4), np.float32), np.ones((3, 2), np.float32)
    with open_run(Vae, data=(points,), run_dir=tmp_path / "run", jit="off", progress="off", mode="train") as run:
        run.train(steps=3)
        assert sorted(run.models) == ["decoder", "model"]
        decoded = run.predict(codes, name="decoder")
        np.testing.assert_allclose(decoded, run.models["decoder"](codes), rtol=1e-6)  # compiled, and not
        np.testing.assert_allclose(run.predict(run.predict(points, name="model"), "decoder"), run.predict(points), 1e-6)
        with pytest.raises(UsageError, match=r"^name='coder': Vae has no Keras model of that name; it has decoder, m"):
            run.predict(codes, name="coder")
    for trainer_class in (None, Vae):
        loaded = load_model(tmp_path / "run", trainer_class=trainer_class, name="decoder")
        np.testing.assert_array_equal(loaded(codes), run.models["decoder"](codes))
        with pytest.raises(UsageError, match=r"name='coder'"):
            load_model(tmp_path / "run", trainer_class=trainer_class, name="coder")


class Gan(Trainer):
    """Two models, neither of which is called `model`, and an average of the generator's weights."""

    def build(self):
        layers = tf.keras.layers
        self.generator = tf.keras.Sequential([layers.Input([3]), layers.Dense(2)])
        self.critic = tf.keras.Sequential([layers.Input([2]), layers.Dense(1)])
        self.optimizer = make_optimizer(self, self.generator.trainable_variables)

    def train_step(self, batch):
        return minimize(self, batch, self.eval_step, {"loss": self.optimizer})

    def eval_step(self, batch):
        return {"loss": mean(self.critic(self.generator(tf.concat([batch, batch[:, :1]], 1)))[:, 0])}


@pytest.mark.thorough
def test_one_of_several_models_is_exported_by_its_name(tmp_path):
    replicas = {"strategy": "mirrored", "num_virtual_devices": 2}
    noise = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    asked = {"data": (noise[:, :2],), "run_dir": tmp_path / "run", "jit": "off", "progress": "off", **replicas}
    expected = run_(Gan, train_steps=1, ema_decay=0.5, **asked).predict(noise, "generator")
    export = {**asked, "mode": "export"}
    path = run_(Gan, **export, export_model="generator").result["export"]
    served = tf.saved_model.load(path)
    outputs = served.signatures["serving_default"](features=tf.constant(noise))["outputs"]
    np.testing.assert_allclose(outputs, expected, rtol=1e-6)
    saved = tf.train.load_checkpoint(f"{path}/variables/variables").get_variable_to_shape_map()
    weights = sorted(shape for name, shape in saved.items() if name.endswith("VARIABLE_VALUE"))
    assert weights == [[2], [3, 2]]  # the generator's alone
    path = run_(Gan, **export, export_model="generator", output=tmp_path / "made.keras").result["export"]
    np.testing.assert_allclose(tf.keras.models.load_model(path)(noise), expected, rtol=1e-6)
    run_(Gan, **{**asked, "mode": "predict"}, export_model="critic", output=tmp_path / "said.npz")
    with np.load(tmp_path / "said.npz") as arrays:
        assert arrays["prediction"].shape == (5,)
    with pytest.raises(UsageError, match=r"^name='maker': Gan has no Keras model of that name; it has critic, gener"):
        run_(Gan, **export, export_model="maker", output=tmp_path / "b")
    with pytest.raises(UsageError, match=r"which is missing; .* or give export_model=critic, generator$"):
        run_(Gan, **export, output=tmp_path / "c")


class Taught(Vae):
    def build(self):
        super().build()
        self.teacher = Averaged(self.model, 0.5)


@pytest.mark.parametrize("where", [{}, {"strategy": "mirrored", "num_virtual_devices": 2}], ids=["one", "two"])
def test_a_run_s_model_is_the_one_to_predict_with_and_has_no_teacher(where):
    points = np.ones((8, 4), np.float32)
    with open_run(Taught, data=(points,), jit="off", progress="off", mode="train", **where) as run:
        run.train(steps=3)
        assert [each.shape for each in run.model.weights] == [(2, 4), (4,), (4, 2), (2,)]  # by the layers' names
        assert len(run.models["teacher"].weights) == 2
        run.set_weights([np.zeros_like(each) for each in run.model.get_weights()])
        assert not run.predict(points).any()
        assert run.models["teacher"].get_weights()[0].any()
