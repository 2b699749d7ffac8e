"""What a run leaves for TensorBoard, read back from its event files as TensorBoard reads them."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from engine import loop
from engine.checkpoints import Checkpoints
from engine.hooks import Hook, saving
from engine.hooks.evaluation import Evaluation
from engine.metrics import LoopSums
from engine.summaries import TensorBoard, event_values
from engine.summaries.event_files import EventFiles, cut_back
from engine.summaries.probe import Probe
from models.cnn import Model as Cnn
from models.mlp import Model as Mlp

EXAMPLES, BATCH = 70, 16  # 5 steps an epoch, the last of 6 examples


def data(seed: int = 0):
    rng = np.random.default_rng(seed)
    return rng.random((EXAMPLES, 12, 12, 1), dtype="float32"), rng.integers(0, 3, EXAMPLES).astype("int32")


@pytest.fixture
def made(bench):
    def make(trainer=None, replicas=1, **options):
        trainer = trainer or Mlp(hidden_units=(8,), dropout=0.5)
        return bench(trainer, data(), BATCH, replicas, num_classes=3, eval_source=data(1), **options)

    return make


def probe_of(bench):
    return Probe(bench.strategy.distribution, bench.strategy.train_feed, bench.trainer)


def run(bench, hooks, until):
    return loop.train(bench.strategy, bench.state, hooks, until)


def raw_events(folder):
    """Every event in a folder's files, in order."""
    events = []
    for name in sorted(name for name in os.listdir(folder) if "tfevents" in name):
        for record in tf.data.TFRecordDataset(os.path.join(folder, name)).as_numpy_iterator():
            events.append(tf.compat.v1.Event.FromString(record))
    return events


def scalars(folder):
    """{tag: {step: value}}, from every file; fails where a step is there twice."""
    found = {}
    for event in raw_events(folder):
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


def test_scalars_are_the_means_since_the_last_time_and_rates(made, tmp_path):
    bench = made(learning_rate=0.5, schedule="cosine", total_steps=10)
    run(bench, [Evaluation(4), TensorBoard(tmp_path, 4)], 10)
    train = scalars(tmp_path / "train")
    names = {"loss", "accuracy", "gradient_norm", "learning_rate", "epoch"}
    names |= {"steps_per_sec", "examples_per_sec", "input_wait_fraction"}
    assert set(train) == names
    assert all(list(series) == [4, 8, 10] for series in train.values())
    again = made(learning_rate=0.5, schedule="cosine", total_steps=10)
    means = [total / count for total, count in (again.train(step)["loss"] for step in (4, 8, 10))]
    # Events hold float32.
    assert list(train["loss"].values()) == pytest.approx(means, rel=1e-6)
    assert train["learning_rate"][4] == pytest.approx(0.5 * (1 + np.cos(np.pi * 0.4)) / 2, rel=1e-6)
    assert train["epoch"] == {4: pytest.approx(0.8), 8: pytest.approx(1.6), 10: 2}
    assert all(0 <= value < 1 for value in train["input_wait_fraction"].values())
    assert all(value > 0 for value in train["steps_per_sec"].values())


def test_rates_are_those_of_the_steps(tmp_path, made):
    """Two calls of 8 steps in 2 s each, a half of it waiting for input."""

    class Fixed(TensorBoard):
        def __call__(self, moment):
            moment.seconds, moment.input_seconds, moment.steps, moment.examples = 2.0, 1.0, 8, 8 * BATCH
            super().__call__(moment)

    bench = made()
    hooks = [Every(1), Fixed(tmp_path, 2)]
    run(bench, hooks, 2)
    train = scalars(tmp_path / "train")
    assert train["steps_per_sec"] == {2: 4}
    assert train["examples_per_sec"] == {2: 4 * BATCH}
    assert train["input_wait_fraction"] == {2: 0.5}


class Every(Hook):
    def __init__(self, steps):
        self.steps = steps

    def next_due(self, step, moment):
        return (step // self.steps + 1) * self.steps


def test_evaluations_are_in_a_folder_of_their_own(made, tmp_path):
    bench = made()
    evaluation = Evaluation(3)
    run(bench, [evaluation, TensorBoard(tmp_path, 0)], 5)
    found = scalars(tmp_path / "eval")
    assert set(found) == {"loss", "accuracy"}
    assert list(found["loss"]) == [3, 5]
    assert found["loss"][5] == pytest.approx(evaluation.result["loss"], rel=1e-6)
    assert tensor(tmp_path / "eval", "loss", 5) == np.float32(found["loss"][5])


def test_loss_scale_is_written_where_there_is_one(made, tmp_path):
    bench = made(precision="float16")
    run(bench, [TensorBoard(tmp_path, 2)], 2)
    assert scalars(tmp_path / "train")["loss_scale"] == {2: float(bench.trainer.loss_scale.value.numpy())}


@pytest.mark.parametrize("replicas", [1, 2])
def test_gradient_histograms_are_those_of_the_next_step_over_all_replicas(made, tmp_path, replicas):
    bench = made(Mlp(hidden_units=(8,)), replicas)
    found = probe_of(bench).gradients(0)
    model = bench.trainer.model
    one = made(Mlp(hidden_units=(8,)))
    features, labels = one.strategy.train_feed.batch(*one.strategy.train_feed.take(0, 1).operands, tf.constant(0))
    with tf.GradientTape() as tape:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, one.trainer.model(features))
        loss = tf.reduce_mean(losses)
    gradients = tape.gradient(loss, one.trainer.model.trainable_variables)
    assert list(found) == [v.path for v in model.trainable_variables]
    for histogram, gradient in zip(found.values(), gradients, strict=True):
        assert int(tf.reduce_sum(histogram.counts)) == gradient.shape.num_elements()
        # Summed over replicas in another order: float32 rounding.
        assert float(histogram.low) == pytest.approx(float(tf.reduce_min(gradient)), rel=1e-4, abs=1e-7)
        assert float(histogram.high) == pytest.approx(float(tf.reduce_max(gradient)), rel=1e-4, abs=1e-7)


def ranges(histograms):
    return np.array([(float(h.low), float(h.high)) for h in histograms.values()])


def test_probe_takes_a_replica_without_examples_as_training_does(bench):
    """17 images by 16: the second step's one example is on one of two replicas. Kernels do not bear no examples."""
    source = tuple(array[:17] for array in data())
    found = [
        ranges(probe_of(bench(Cnn(), source, 16, replicas, num_classes=3, shuffle=False)).gradients(1))
        for replicas in (1, 2)
    ]
    assert np.isfinite(found[1]).all()
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-6)  # one example's: rounding of kernels alone


def test_probe_takes_micro_batches_as_training_does(bench):
    """Batch normalisation makes them tell: its mean is that of a micro-batch."""
    learning_rate = 0.5
    options = {"num_classes": 3, "accumulate_steps": 4, "optimizer": "sgd", "learning_rate": learning_rate}
    made = bench(Cnn(batch_norm=True), data(), 16, **options)
    variables = made.trainer.model.trainable_variables
    found, before = probe_of(made).gradients(0), [v.numpy() for v in variables]
    made.train(1)
    gradients = [(then - v.numpy()) / learning_rate for then, v in zip(before, variables, strict=True)]
    wanted = [(g.min(), g.max()) for g in gradients]
    np.testing.assert_allclose(ranges(found), wanted, rtol=1e-3, atol=1e-6)  # differences of float32 weights


@pytest.mark.parametrize("replicas", [1, 2])
def test_looking_at_a_run_changes_no_bit_of_it(made, tmp_path, replicas):
    """Dropout draws and batch normalisation moves in the probe too: both are put back on each replica."""

    def trainer():
        return Cnn(batch_norm=True)

    plain, watched = made(trainer(), replicas), made(trainer(), replicas)
    run(plain, [Every(2)], 7)
    run(watched, [TensorBoard(tmp_path, 3, histogram_every_steps=2, probe=probe_of(watched))], 7)
    for a, b in zip(plain.arrays(), watched.arrays(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_probe_puts_back_statistics_and_seeds_to_the_bit(made):
    model = Cnn(batch_norm=True)
    bench = made(model, 2)
    bench.train(3)
    moved = [v.value for v in model.model.non_trainable_variables]
    assert moved
    before = [copy for v in moved for copy in bench.copies(v)]
    probe_of(bench).gradients(3)
    for kept, copy in zip(before, [copy for v in moved for copy in bench.copies(v)], strict=True):
        np.testing.assert_array_equal(kept, copy)
    dropout = made()
    dropout.train(3)
    before = [copy for v in dropout.state.variables() for copy in dropout.copies(v)]
    probe_of(dropout).gradients(3)
    after = [copy for v in dropout.state.variables() for copy in dropout.copies(v)]
    for kept, copy in zip(before, after, strict=True):
        np.testing.assert_array_equal(kept, copy)


def test_weight_histograms_count_every_weight(made, tmp_path):
    bench = made()
    run(bench, [TensorBoard(tmp_path, 0, histogram_every_steps=3, probe=probe_of(bench))], 5)
    for variable in bench.trainer.model.trainable_variables:
        for kind in ("weights", "gradients"):
            table = tensor(tmp_path / "train", f"{kind}/{variable.path}", 3)
            assert table.shape == (30, 3)
            assert table[:, 2].sum() == np.prod(variable.shape)
            np.testing.assert_allclose(table[1:, 0], table[:-1, 1])


@pytest.mark.parametrize("values", [[], [2.0, 2.0], [np.nan, 1.0, 3.0, np.inf], [-3e38, 0.0, 3e38]])
def test_histogram_of_odd_values_counts_the_finite_ones(values):
    (value,) = event_values.histograms({"a": event_values.histogram(tf.constant(values, tf.float32))})
    table = tf.make_ndarray(value.tensor)
    assert np.isfinite(table).all()
    assert table[:, 2].sum() == np.isfinite(values).sum()


@pytest.mark.parametrize("jit", [False, True])
def test_histogram_counts_as_numpys(jit):
    values = np.random.default_rng(0).normal(size=[50, 7]).astype("float32")
    found = tf.function(event_values.histogram, jit_compile=jit)(tf.constant(values))
    counts, edges = np.histogram(values.astype("float64"), 30)
    assert (float(found.low), float(found.high)) == (edges[0], edges[-1])
    # A value within float32's rounding of an edge may be counted on the other side.
    np.testing.assert_allclose(np.cumsum(found.counts), np.cumsum(counts), atol=1)
    assert int(np.sum(found.counts)) == values.size


def test_graph_images_and_hyper_parameters_are_there_once_over_a_restart(made, tmp_path):
    config = {"learning_rate": 0.5, "model": "mlp", "hidden_units": (8, 8), "shuffle": True}

    def go(bench, until):
        hooks = [TensorBoard(tmp_path / "tensorboard", 2, config=config, probe=probe_of(bench))]
        saved = Checkpoints(tmp_path / "checkpoints", bench.state.checkpoint, keep=None, about={})
        hooks.append(saving.Checkpointing(saved, 0, hooks))
        saving.restore(saved, bench.state, hooks)
        run(bench, hooks, until)

    go(made(), 2)
    go(made(), 4)
    train = raw_events(tmp_path / "tensorboard" / "train")
    assert sum(event.HasField("graph_def") for event in train) == 1
    graph = EventAccumulator(str(tmp_path / "tensorboard" / "train")).Reload().Graph()
    assert any(node.op == "MatMul" and "logits" in node.name for node in graph.node)

    pictures = [value for event in train for value in event.summary.value if value.tag == "inputs"]
    assert len(pictures) == 1
    width, height, *encoded = tf.make_ndarray(pictures[0].tensor)
    assert (int(width), int(height), len(encoded)) == (12, 12, 9)
    drawn = tf.io.decode_png(encoded[0])
    assert drawn.shape == (12, 12, 1)
    first_batch = probe_of(made()).features(0)
    np.testing.assert_array_equal(drawn, np.rint(first_batch[0] * 255).astype(np.uint8))

    evaluated = [v for event in raw_events(tmp_path / "tensorboard" / "eval") for v in event.summary.value]
    (session,) = [value for value in evaluated if value.tag == "_hparams_/session_start_info"]
    kept = plugin_data_pb2.HParamsPluginData.FromString(session.metadata.plugin_data.content)
    assert kept.session_start_info.hparams["learning_rate"].number_value == 0.5
    assert kept.session_start_info.hparams["hidden_units"].string_value == "(8, 8)"
    (table,) = [value for event in train for value in event.summary.value if value.tag == "configuration"]
    assert b"| learning_rate | 0.5 |" in tf.make_ndarray(table.tensor).item()


def test_resume_after_a_kill_has_each_step_once(made, tmp_path):
    """Killed at step 8 with a checkpoint of step 4: the steps from there on are trained, and written, a second time."""
    board = tmp_path / "tensorboard"
    straight = made()
    run(straight, [Evaluation(2), TensorBoard(tmp_path / "straight", 2)], 12)

    def hooks_of(bench):
        hooks = [Evaluation(2), TensorBoard(board, 2)]
        saved = Checkpoints(tmp_path / "checkpoints", bench.state.checkpoint, keep=None, about={})
        hooks.append(saving.Checkpointing(saved, 4, hooks))
        return saved, hooks

    class Killed(Exception):
        pass

    class Kill(Every):
        def __call__(self, moment):
            if moment.step == 8:
                hooks[1].settle(moment)  # what was put is on disk, as if its time had come
                raise Killed

    bench = made()
    saved, hooks = hooks_of(bench)
    with pytest.raises(Killed):
        run(bench, [*hooks[:-1], Kill(8), hooks[-1]], 12)
    saved.wait()
    assert list(scalars(board / "train")["loss"]) == [2, 4, 6, 8]
    with open(board / "train" / os.listdir(board / "train")[0], "ab") as file:
        file.write(b"half a record")

    resumed = made()
    saved, hooks = hooks_of(resumed)
    assert saving.restore(saved, resumed.state, hooks).step == 4
    run(resumed, hooks, 12)
    for folder in ("train", "eval"):
        expected = scalars(tmp_path / "straight" / folder)
        for tag in ("loss", "accuracy"):
            assert scalars(board / folder)[tag] == expected[tag]
        # A TensorBoard that had read the events which were cut forgets them at this one.
        starts = [e.step for e in raw_events(board / folder) if e.HasField("session_log")]
        assert starts == [5]


def test_run_that_begins_again_leaves_nothing_of_the_killed_one(made, tmp_path):
    run(made(), [TensorBoard(tmp_path, 2)], 6)
    run(made(), [TensorBoard(tmp_path, 3)], 3)
    assert list(scalars(tmp_path / "train")["loss"]) == [3]


def test_events_are_on_disk_before_a_checkpoint_is(made, tmp_path):
    class NoEnd(TensorBoard):
        def end(self, moment):
            seen.append(list(scalars(tmp_path / "train")["loss"]))
            super().end(moment)

    seen = []
    bench = made()
    hooks = [NoEnd(tmp_path, 2)]
    saved = Checkpoints(tmp_path / "checkpoints", bench.state.checkpoint, keep=None, about={})
    hooks.append(saving.Checkpointing(saved, 4, hooks))
    run(bench, hooks, 4)
    assert seen == [[2, 4]]


def test_sums_are_read_in_the_writers_thread_and_not_in_the_hook(made, tmp_path, monkeypatch):
    read = LoopSums.read
    in_hook, elsewhere = [], set()

    class Watched(TensorBoard):
        def __call__(self, moment):
            in_hook.append(0)
            super().__call__(moment)
            in_hook.append(None)

    def spy(sums):
        thread = threading.current_thread().name
        if thread != "MainThread":
            elsewhere.add(thread)
        elif in_hook and in_hook[-1] is not None:
            in_hook[-1] += 1
        return read(sums)

    monkeypatch.setattr(LoopSums, "read", spy)
    run(made(), [Watched(tmp_path, 2)], 6)
    assert set(in_hook) == {0, None}
    assert elsewhere == {"event-files"}


def test_files_that_cannot_be_written_are_warned_of_once_and_end_no_run(made, tmp_path, caplog):
    (tmp_path / "train").write_text("a file where the folder should be")
    with caplog.at_level("WARNING", logger="absl"):
        assert run(made(), [TensorBoard(tmp_path, 1)], 4).step == 4
    warnings = [r.getMessage() for r in caplog.records if "no longer written" in r.getMessage()]
    assert len(warnings) == 1
    assert str(tmp_path) in warnings[0]


@pytest.mark.parametrize("error", [MemoryError(), tf.errors.ResourceExhaustedError(None, None, "the disk is full")])
def test_an_event_that_fails_ends_neither_the_writers_thread_nor_the_run(tmp_path, caplog, error):
    def fail():
        raise error

    files = EventFiles(str(tmp_path))
    with caplog.at_level("WARNING", logger="absl"):
        files.open(None)
        files.put("train", 1, fail)
        files.flush()  # returns, though nothing can be written
        files.close()
    (warning,) = [r.getMessage() for r in caplog.records if "no longer written" in r.getMessage()]
    assert warning.endswith(str(error) or "MemoryError")


def test_cutting_back_leaves_a_file_alone_that_has_nothing_to_lose(tmp_path):
    files = EventFiles(str(tmp_path))
    files.open(None)
    files.put("train", 3, lambda: event_values.scalars({"a": 1.0}))
    files.close()
    (name,) = os.listdir(tmp_path / "train")
    before = os.stat(tmp_path / "train" / name)
    cut_back(tmp_path / "train", 3)
    after = os.stat(tmp_path / "train" / name)
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    cut_back(tmp_path / "train", 2)
    assert scalars(tmp_path / "train") == {}
