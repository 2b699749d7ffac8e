"""What a run leaves for TensorBoard, read back from its event files as TensorBoard reads them."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from crankshaft.engine.hooks import saving
from crankshaft.engine.hooks.evaluation import Evaluation
from crankshaft.models.mlp import Model as Mlp
from crankshaft.parts.tensorboard import TensorBoard
from tests.parts.tensorboard.boards import BATCH, Every, probe_of, raw_events, scalars, tensor

pytestmark = pytest.mark.thorough


def test_scalars_are_the_means_since_the_last_time_and_rates(made, tmp_path):
    bench = made(learning_rate=0.5, learning_rate_schedule="cosine", total_steps=10)
    bench.loop([Evaluation(4), TensorBoard(tmp_path, 4)], 10)
    train = scalars(tmp_path / "train")
    names = {"loss", "accuracy", "gradient_norm", "learning_rate", "epoch"}
    names |= {"steps_per_sec", "examples_per_sec", "input_wait_fraction"}
    assert set(train) == names
    assert all(list(series) == [4, 8, 10] for series in train.values())
    again = made(learning_rate=0.5, learning_rate_schedule="cosine", total_steps=10)
    means = [total / count for total, count in (again.train(step)["loss"] for step in (4, 8, 10))]
    # Events hold float32.
    assert list(train["loss"].values()) == pytest.approx(means, rel=1e-6)
    # The fourth update is of the schedule's step 3.
    assert train["learning_rate"][4] == pytest.approx(0.5 * (1 + np.cos(np.pi * 0.3)) / 2, rel=1e-6)
    assert train["epoch"] == {4: pytest.approx(0.8), 8: pytest.approx(1.6), 10: 2}
    assert all(0 <= value < 1 for value in train["input_wait_fraction"].values())
    assert all(value > 0 for value in train["steps_per_sec"].values())


def test_rates_are_those_of_the_steps(tmp_path, made, monkeypatch):
    """Two calls of 2 steps in 4 s each, a half of it waiting for input."""

    def run_slowly(program, limit):
        nonlocal now
        now += 4.0
        return run_steps(program, limit)._replace(input_seconds=2.0)

    bench, now = made(), 0.0
    run_steps = bench.strategy.run
    monkeypatch.setattr(bench.strategy, "run", run_slowly)
    bench.loop([Every(2), TensorBoard(tmp_path, 4)], 4, clock=lambda: now)
    train = scalars(tmp_path / "train")
    assert train["steps_per_sec"] == {4: 0.5}
    assert train["examples_per_sec"] == {4: 0.5 * BATCH}
    assert train["input_wait_fraction"] == {4: 0.5}


def test_evaluations_are_in_a_folder_of_their_own(made, tmp_path):
    bench = made()
    evaluation = Evaluation(3)
    bench.loop([evaluation, TensorBoard(tmp_path, 0)], 5)
    found = scalars(tmp_path / "eval")
    assert set(found) == {"loss", "accuracy"}
    assert list(found["loss"]) == [3, 5]
    assert found["loss"][5] == pytest.approx(evaluation.result["loss"], rel=1e-6)
    assert tensor(tmp_path / "eval", "loss", 5) == np.float32(found["loss"][5])


def test_loss_scale_is_written_where_there_is_one(made, tmp_path):
    bench = made(precision="float16")
    bench.loop([TensorBoard(tmp_path, 2)], 2)
    assert scalars(tmp_path / "train")["loss_scale"] == {2: float(bench.trainer.loss_scale.value.numpy())}


def test_graph_images_and_hyper_parameters_are_there_once_over_a_restart(made, tmp_path):
    config = {"learning_rate": 0.5, "model": "mlp", "hidden_units": (8, 8), "shuffle": True}

    def go(bench, until):
        hooks = [TensorBoard(tmp_path / "tensorboard", 2, config=config, probe=probe_of(bench))]
        saving.restore(bench.saves(tmp_path / "checkpoints", hooks), bench.state, hooks)
        bench.loop(hooks, until)

    for until in (2, 4):
        go(made(Mlp(hidden_units=(8,))), until)
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
    feed = made().strategy.training.feed
    operands, start, _ = feed.call_input(1, 1)  # of the first step after which something was due
    features, _ = feed.batch(*operands, tf.constant(start))
    np.testing.assert_array_equal(drawn, np.rint(features[0] * 255).astype(np.uint8))

    # Above train/ and eval/, whose scalars are then the session's; also those of a run that does not evaluate.
    values = [value for event in raw_events(tmp_path / "tensorboard") for value in event.summary.value]
    (session,) = [value for value in values if value.tag == "_hparams_/session_start_info"]
    kept = plugin_data_pb2.HParamsPluginData.FromString(session.metadata.plugin_data.content)
    assert kept.session_start_info.hparams["learning_rate"].number_value == 0.5
    assert kept.session_start_info.hparams["hidden_units"].string_value == "(8, 8)"
    (table,) = [value for event in train for value in event.summary.value if value.tag == "configuration"]
    assert b"| learning_rate | 0.5 |" in tf.make_ndarray(table.tensor).item()
