"""Hooks that watch one metric: when it counts as better, what they do when it is not, over a restart too."""

from __future__ import annotations

import types

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Trainer
from crankshaft.engine.hooks import Hook, every_steps, saving
from crankshaft.engine.hooks.evaluation import Evaluation
from crankshaft.engine.hooks.monitors import EarlyStopping, Monitor, ReduceLearningRate
from crankshaft.engine.metrics import means, sums
from crankshaft.engine.metrics.monitored import Monitored
from crankshaft.models.mlp import Model
from crankshaft.parts.keras_models.keras_metrics import KerasMetric
from tests.arrays import assert_same

pytestmark = pytest.mark.thorough


class Values(Hook):
    """Stands in for an evaluation: gives the next of some values every step."""

    def __init__(self, name, values):
        self.values = {name: list(values)}

    def next_due(self, step, status):
        return step + 1

    def __call__(self, status):
        status.evaluation = {name: values[status.step - 1] for name, values in self.values.items()}


class Improvements(Monitor):
    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.seen = []

    def observe(self, status, value, improved):
        self.seen.append(improved)


@pytest.fixture
def mlp(bench, compiled):
    def make(**options):
        rng = np.random.default_rng(0)
        source = rng.random((32, 4), dtype="float32"), rng.integers(0, 3, 32).astype("int32")
        trainer = Model(hidden_units=(4,))
        return bench(trainer, source, 16, num_classes=3, eval_source=source, **options)

    return lambda **options: compiled(tuple(options.items()), lambda: make(**options))


def measured(**pairs) -> dict:
    return sums.kinds_by_name(sums.sum_specs({"loss": means.mean([1.0]), **pairs}))


def improvements(monitor, **arguments):
    """A monitor of `eval_loss`, `eval_auc` or `eval_score`, which knows its direction."""
    made = Improvements(monitor, **arguments)
    made.resolve(measured(auc=means.auc([1], [0.5]), score=means.mean([1.0])), Trainer())
    return made


def observe(monitor, values):
    for value in values:
        monitor(types.SimpleNamespace(evaluation={monitor.monitored.metric: value}, sums=None, step=1))


@pytest.mark.parametrize("name", ["loss", "iou_loss", "log_loss", "mean_squared_error", "perplexity", "nrmse", "mae"])
def test_a_lower_value_is_better_by_a_name_that_ends_as_losses_do(name):
    assert Monitored.parse(f"eval_{name}").directed(measured(**{name: means.mean([1.0])})).direction == "min"


@pytest.mark.parametrize("name", ["ndcg10", "score", "map", "lossy", "mse_h1", "accuracy", "wer", "auc"])
def test_of_any_other_name_the_direction_has_to_be_given(name):
    kinds = measured(**{name: means.mean([1.0])})
    with pytest.raises(ValueError, match=rf"eval_{name}: .* use max:eval_{name} or min:eval_{name}"):
        Monitored.parse(f"eval_{name}").directed(kinds)
    for direction in ("max", "min"):
        assert Monitored.parse(f"{direction}:train_{name}").directed(kinds).direction == direction


def test_a_metric_declares_its_direction_whatever_its_name():
    keras = {
        "f": KerasMetric(tf.keras.metrics.F1Score(average=None)),
        "r2": KerasMetric(tf.keras.metrics.R2Score()),
        "kl": KerasMetric(tf.keras.metrics.KLDivergence()),
        "top": KerasMetric(tf.keras.metrics.TopKCategoricalAccuracy(2)),
        "plain": KerasMetric(tf.keras.metrics.MeanMetricWrapper(lambda labels, found: found, "plain")),
    }
    y, p = tf.constant([[1.0, 0.0], [0.0, 1.0]]), tf.constant([[0.9, 0.1], [0.3, 0.7]])
    pairs = {name: each(y, p) for name, each in keras.items()}
    weighed = means.mean([1.0, 0.0], direction="max").weigh(tf.constant([1.0, 2.0]))
    own = {
        "area": means.auc([1, 0], [0.5, 0.1]),
        "spread": means.root_mean_square([1.0]),
        "surprise": means.exp_mean([1.0]),
        "right_error": means.as_pair(weighed, "metrics", tf.constant([2.0, 2.0])),
    }
    found = {name: kind.direction for name, kind in measured(**pairs, **own).items()}
    kinds = {"max": ["f", "r2", "top", "area", "right_error"], "min": ["kl", "spread", "surprise"]}
    assert found == {"loss": None, "plain": None} | {name: key for key, names in kinds.items() for name in names}
    kinds = measured(**pairs, **own)
    assert Monitored.parse("eval_f_1").directed(kinds).direction == "max"  # one of several values
    assert Monitored.parse("eval_right_error").directed(kinds).direction == "max"
    with pytest.raises(ValueError, match="direction='up' is unknown; use 'max' or 'min'"):
        means.mean([1.0], direction="up")


def test_direction_may_be_given():
    monitor = improvements("max:eval_loss")
    observe(monitor, [1.0, 2.0, 1.5])
    assert monitor.seen == [True, True, False]


def test_the_best_by_one_direction_is_none_by_the_other():
    before = improvements("max:eval_loss")
    observe(before, [1.0, 3.0])
    for monitor, kept in (("eval_loss", None), ("max:eval_loss", 3.0)):
        early, late = Improvements(monitor), improvements(monitor)
        for each in (early, late):
            each.restore_host_state(before.host_state())
        early.resolve(measured(), Trainer())
        assert (early.best, late.best) == (kept, kept)


def test_better_is_by_more_than_min_delta_and_nan_never_is():
    monitor = improvements("eval_loss", min_delta=0.1)
    observe(monitor, [np.nan, 1.0, 0.95, 0.85, np.nan, 0.8])
    assert monitor.seen == [False, True, False, True, False, False]
    assert monitor.best == 0.85


def test_a_metric_that_has_no_value_now_has_not_improved():
    """Such as the AUC of labels that are all alike."""
    monitor = improvements("eval_auc")
    for evaluation in ({"auc": np.nan}, {"auc": 0.6}, {"auc": np.nan}, {"auc": 0.7}):
        monitor(types.SimpleNamespace(evaluation=evaluation, sums=None, step=1))
    assert monitor.seen == [False, True, False, True]


def test_monitor_without_a_source_is_refused():
    with pytest.raises(ValueError, match="monitor=val_loss is unknown; use eval_NAME or train_NAME"):
        Monitor("val_loss")


def test_metric_that_is_not_measured_is_named_with_those_that_are(mlp):
    with pytest.raises(ValueError, match=r"monitor=eval_auc is not measured .* use one of eval_accuracy, eval_loss"):
        mlp().loop([Evaluation(1), EarlyStopping("eval_auc", 1)], 3)


def test_a_metric_that_no_step_has_is_known_once_one_is_traced(mlp):
    bench, seen = mlp(seed=1), []  # another than those that other tests have traced
    kinds = sums.kinds_by_name(bench.strategy.evaluation.trace())
    assert Monitored.parse("eval_accuracy").directed(kinds).direction == "max"
    with pytest.raises(ValueError, match=r"monitor=eval_foo is not measured in this run; use one of eval_accuracy, "):
        Monitored.parse("eval_foo").directed(kinds)
    with pytest.raises(ValueError, match=r"monitor=train_foo is not measured .* use one of train_accuracy, "):
        bench.loop([every_steps(1, lambda *_: seen.append(1)), EarlyStopping("train_foo", 1)], 3)
    assert len(seen) == 1  # the first call, and no evaluation is waited for


def test_train_metric_is_the_mean_since_the_last_look(mlp):
    whole = Improvements("train_loss")
    values = []
    whole.observe = lambda status, value, improved: values.append((status.step, value))
    mlp().loop([Evaluation(4), whole], 8)
    bench = mlp()
    means = [total / count for total, count in (bench.train(step)["loss"] for step in (4, 8))]
    assert values == [(4, means[0]), (8, means[1])]


def test_train_metric_needs_no_evaluation_with_a_period_of_its_own(mlp):
    monitor = Improvements("train_loss", every_steps=3)
    mlp().loop([monitor], 9)
    assert len(monitor.seen) == 3
    with pytest.raises(ValueError, match=r"monitor=eval_loss needs evaluations.* use train_loss"):
        Improvements("eval_loss", every_steps=3)


def test_stops_after_patience_evaluations_in_a_row(mlp):
    values = Values("loss", [5, 4, 4.5, 3, 3, 3, 3, 3, 3])
    status = mlp().loop([values, EarlyStopping("eval_loss", 3)], 9)
    assert status.step == 7
    assert "(best 3)" in status.stop


def test_learning_rate_falls_on_each_plateau_down_to_the_least_scale(mlp):
    bench = mlp(learning_rate=0.5)
    optimizer = bench.trainer.optimizer
    scales = []

    class Scale(Hook):
        def __call__(self, status):
            scales.append(float(optimizer.learning_rate_scale.numpy()))

    hooks = [Values("loss", [1] * 9), ReduceLearningRate("eval_loss", 2, factor=0.5, min_scale=0.2), Scale()]
    bench.loop(hooks, 9)
    assert scales == pytest.approx([1, 1, 0.5, 0.5, 0.25, 0.25, 0.2, 0.2, 0.2])
    assert float(optimizer.learning_rate) == pytest.approx(0.5 * 0.2)


def test_a_plateau_at_the_least_scale_is_said_once(mlp, caplog):
    reduce = ReduceLearningRate("eval_loss", 2, factor=0.01)
    with caplog.at_level("INFO", logger="crankshaft"):
        mlp(learning_rate=0.5).loop([Values("loss", [1] * 11), reduce], 11)
    said = [(each.levelname, each.getMessage().split(": ")[0]) for each in caplog.records if "scaled" in each.message]
    assert said == [("INFO", "step 3"), ("INFO", "step 5"), ("WARNING", "step 7")]
    assert "the learning rate of optimizer, scaled by 0.001, is not lowered further" in caplog.text


def test_plateau_is_counted_over_a_restart(mlp, tmp_path):
    """Nine steps straight, and four, a new process and five, lower the rate alike."""

    def go(bench, until, directory):
        hooks = [Values("loss", [1] * 9), ReduceLearningRate("eval_loss", 3, factor=0.5)]
        saving.restore(bench.saves(directory, hooks), bench.state, hooks)
        bench.loop(hooks, until)
        return hooks[1].waited, bench.arrays()

    straight = go(mlp(), 9, tmp_path / "straight")
    go(mlp(), 6, tmp_path / "cut")
    resumed = go(mlp(), 9, tmp_path / "cut")
    assert resumed[0] == straight[0]
    assert_same(resumed[1], straight[1])


@pytest.mark.parametrize(("changed", "kept"), [("train", True), ("eval", False)])
def test_what_was_measured_on_other_data_does_not_count_after_a_restart(mlp, tmp_path, changed, kept):
    found = []
    for now in ({"train": 1, "eval": 1}, {"train": 1, "eval": 1, changed: 2}):
        bench = mlp()
        hooks = [Evaluation(2), EarlyStopping("eval_loss", 9, min_delta=1e9)]
        saving.restore(bench.saves(tmp_path, hooks, about={"data": now}), bench.state, hooks)
        found.append((hooks[0].step, hooks[1].best is not None, hooks[1].waited))
        bench.loop(hooks, 6)
    assert found == [(None, False, 0), (6, True, 2) if kept else (None, False, 0)]


def best_run(bench, directory, values, until, *, restore):
    """A run that keeps its best checkpoint in `best`; returns its steps."""
    hooks = [Values("accuracy", values)]
    best = bench.checkpoints(directory / "best", keep=1)
    hooks.append(saving.BestCheckpoint(best, "eval_accuracy", hooks))
    saved = bench.saves(directory / "checkpoints", hooks, 2)
    if restore:
        saving.restore(saved, bench.state, hooks, restore(saved))
    bench.loop(hooks, until)
    return [manifest.step for manifest in best.all()]


def test_best_checkpoint_is_that_of_the_best_value(mlp, tmp_path):
    assert best_run(mlp(), tmp_path, [0.1, 0.7, 0.9, 0.8, 0.9, 0.2], 6, restore=None) == [3]


def test_best_checkpoint_is_not_replaced_by_a_worse_one_after_a_restart(mlp, tmp_path):
    values = [0.1, 0.7, 0.9, 0.8, 0.85, 0.2, 0.95, 0.3]
    assert best_run(mlp(), tmp_path, values, 4, restore=None) == [3]
    assert best_run(mlp(), tmp_path, values, 6, restore=lambda saved: saved.latest()) == [3]
    assert best_run(mlp(), tmp_path, values, 8, restore=lambda saved: saved.latest()) == [7]


def test_best_checkpoint_of_a_killed_run_stands_though_the_resume_is_before_it(mlp, tmp_path):
    assert best_run(mlp(), tmp_path, [0.1, 0.2, 0.9, 0.8], 4, restore=None) == [3]
    worse = [0.1, 0.2, 0.5, 0.6, 0.7]
    assert best_run(mlp(), tmp_path, worse, 5, restore=lambda saved: saved.all()[0]) == [3]


class Counted(EarlyStopping):
    """Keeps the steps whose evaluations count."""

    def __init__(self):
        super().__init__("eval_loss", patience=9)
        self.steps = []

    def observe(self, status, value, improved):
        self.steps.append(status.step)


def test_the_evaluation_where_a_run_ends_does_not_count_as_one_of_its_schedule(mlp):
    """So a run that is prolonged goes on as if it had never ended; the best evaluation may be that one."""
    bench, counted, best = mlp(), Counted(), Improvements("eval_loss")
    hooks = [Evaluation(2), counted, best]
    bench.loop(hooks, 3)
    assert (counted.steps, len(best.seen)) == ([2], 2)
    bench.loop(hooks, 6)
    assert counted.steps == [2, 4, 6]
