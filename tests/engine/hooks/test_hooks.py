"""The hooks that evaluate, save and guard, in real runs of a small model through the outer loop."""

from __future__ import annotations

import functools
import threading

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Trainer, mean
from crankshaft.engine import loop
from crankshaft.engine.errors import NonfiniteError
from crankshaft.engine.hooks import (
    Hook,
    Periodic,
    StopRequest,
    Windowed,
    before_every_epoch,
    every_epoch,
    every_steps,
    numerics,
    saving,
)
from crankshaft.engine.hooks.background import BackgroundThread
from crankshaft.engine.hooks.evaluation import Evaluation, averaged_weights, evaluate
from crankshaft.engine.hooks.monitors import EarlyStopping
from crankshaft.engine.hooks.numerics import NanGuard
from crankshaft.engine.metrics.pairs import Mean
from crankshaft.engine.metrics.sums import LoopSums, SumSpec
from crankshaft.models.mlp import Model
from crankshaft.parts.ask import requests
from crankshaft.parts.ask.request_handler import RequestHandler
from tests.arrays import assert_same
from tests.waiting import wait_until

pytestmark = pytest.mark.thorough

EXAMPLES, BATCH = 70, 16  # 5 steps an epoch, the last of 6 examples


@functools.cache
def data(scale: float = 1.0, seed: int = 0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, EXAMPLES).astype("int32")
    features = rng.random((EXAMPLES, 4, 4, 1), dtype="float32") + labels[:, None, None, None]
    return (features * np.float32(scale)).astype("float32"), labels


@pytest.fixture
def mlp(bench, compiled):
    def get(source=None, replicas=1, dropout=0.0, **options):
        source = data() if source is None else source

        def make():
            trainer = Model(hidden_units=(8,), dropout=dropout)
            return bench(trainer, source, BATCH, replicas, num_classes=3, eval_source=data(seed=1), **options)

        return compiled((id(source), replicas, dropout, *options.items()), make)  # `data` keeps its sources

    return get


class Normed(Trainer):
    """Ends in batch normalisation."""

    def build_model(self):
        layers = tf.keras.layers
        return tf.keras.Sequential([layers.Flatten(), layers.Dense(2), layers.BatchNormalization()])

    def loss(self, outputs, batch):
        return mean(tf.reduce_sum(outputs**2, 1))


class Recorder(Hook):
    name = "record"

    def __init__(self):
        self.steps, self.evaluations = [], {}

    def __call__(self, status):
        self.steps.append(status.step)
        if status.evaluation is not None:
            self.evaluations[status.step] = status.evaluation


def test_loop_stops_where_a_hook_is_due(mlp):
    record = Recorder()
    mlp().loop([every_steps(3, lambda *_: None), record], 10)
    assert {3, 6, 9, 10} <= set(record.steps)


def test_calls_count_an_epochs_smaller_last_batch_by_its_examples(mlp):
    class Examples(Hook):
        name = "examples"

        def __call__(self, status):
            counted.append((status.segment.examples, status.segment.sums.read()["loss"][1]))

    counted = []
    mlp().loop([every_steps(3, lambda *_: None), Examples()], 12)
    assert all(examples == seen for examples, seen in counted)
    assert sum(examples for examples, _ in counted) == 2 * EXAMPLES + 2 * BATCH


def test_users_function_gets_the_means_since_last_time(mlp):
    bench = mlp()
    seen = []
    bench.loop([every_epoch(lambda status, metrics: seen.append((status.step, metrics["loss"])))], 12)
    assert [step for step, _ in seen] == [5, 10]
    again = mlp()
    totals = [again.train(step).get("loss") for step in (5, 10)]
    assert [loss for _, loss in seen] == [total / count for total, count in totals]


def test_before_an_epochs_first_step_and_not_at_the_end_a_users_function_is_called_once(mlp, tmp_path):
    """Epochs of 5 steps: a run that ends at an epoch's end has begun no other; what goes on from there has."""
    bench, seen = mlp(), []
    hooks = [before_every_epoch(lambda status: seen.append((status.step, status.epoch)))]
    saved = bench.saves(tmp_path, hooks)
    bench.loop(hooks, 10)
    assert seen == [(0, 0), (5, 1)]
    assert saved.latest().step == 10
    bench.loop(hooks, 13)
    bench.loop(hooks, 16)
    assert seen[2:] == [(10, 2), (15, 3)]


def test_totals_that_a_hook_keeps_are_not_changed_by_later_calls(mlp):
    kept = []

    class Keeps(Windowed):
        def act(self, status):
            kept.append(self.window.take())

    mlp().loop([Keeps(2)], 4)
    assert [totals.host_state()["loss"][2] for totals in kept] == [2 * BATCH, 2 * BATCH]


def test_evaluates_when_due_and_at_the_last_step_once(mlp):
    bench, record = mlp(), Recorder()
    evaluation = Evaluation(4)
    bench.loop([evaluation, record], 8)
    assert sorted(record.evaluations) == [4, 8]
    bench.loop([evaluation, record], 10)
    assert sorted(record.evaluations) == [4, 8, 10]
    assert (evaluation.step, evaluation.result) == (10, record.evaluations[10])
    assert set(evaluation.result) == {"loss", "accuracy"}


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_evaluation_uses_the_average_and_puts_the_weights_back_on_each_replica(mlp, replicas):
    bench = mlp(replicas=replicas, ema_decay=0.9, learning_rate=0.1)
    bench.loop([], 7)
    before = bench.arrays()
    average = [shadow.numpy() for shadow in bench.trainer.optimizer.weight_average.shadows]
    found = evaluate(bench.strategy, bench.state)
    assert_same(bench.arrays(), before)
    with averaged_weights(bench.trainer):
        for variable, shadow in zip(bench.trainer.model.trainable_variables, average, strict=True):
            np.testing.assert_array_equal(bench.held(variable), shadow)
        assert bench.strategy.evaluate().means() == found
    assert_same(bench.arrays(), before)
    assert bench.strategy.evaluate().means()["loss"] != found["loss"]


def test_evaluating_changes_no_bit_of_training(mlp):
    plain, evaluated = mlp(dropout=0.5), mlp(dropout=0.5)
    plain.loop([], 9)
    evaluated.loop([Evaluation(2)], 9)
    assert_same(plain.arrays(), evaluated.arrays())


def test_stop_request_ends_the_run_at_the_next_moment_and_the_first_reason_stays(mlp):
    stop, record = StopRequest(), Recorder()

    def ask(status, _):
        stop.request("asked")
        stop.request("again")

    status = mlp().loop([every_steps(4, ask), stop, record], 40)
    assert (status.step, status.stop) == (4, "asked")
    assert record.steps[-1] == 4
    assert mlp().loop([stop], 40).step == 0


def test_a_request_to_stop_ends_the_run_as_the_call_in_which_it_came_ends(mlp, tmp_path):
    folder, answers = tmp_path / "requests", []
    asker = threading.Thread(target=lambda: answers.append(requests.ask(str(folder), "stop", None, 60)))

    def ask(status, _):
        asker.start()
        wait_until(lambda: [*folder.glob("*.request")])

    handler = RequestHandler(
        requests.Requests(str(folder), lambda *_: True), BackgroundThread(), str, StopRequest().request, str, "", {}
    )
    status = mlp().loop([every_steps(4, ask), handler], 40)
    asker.join()
    assert (status.step, status.stop) == (4, "crankshaft ask stop")
    assert answers == ["the run has ended at step 4, and is saved: crankshaft ask stop"]
    handler.close()


def test_checkpoints_when_due_and_where_the_run_was_stopped(mlp, tmp_path):
    bench, stop = mlp(), StopRequest()
    hooks = [every_steps(7, lambda *_: stop.request("asked")), stop]
    saved = bench.saves(tmp_path, hooks, 3)
    bench.loop(hooks, 100)
    assert [manifest.step for manifest in saved.all()] == [3, 6, 7]


def test_checkpoints_by_the_clock_since_the_last_one_of_any_kind(mlp, tmp_path):
    bench, record = mlp(), Recorder()
    saved, hooks = bench.checkpoints(tmp_path), [every_steps(1, lambda *_: None), record]
    clock = {"clock": lambda: 60.0 * bench.state.step}
    hooks.append(saving.Checkpointing(saved, 8, hooks, every_seconds=300.0, **clock))
    bench.loop(hooks, 20)
    assert [manifest.step for manifest in saved.all()] == [5, 8, 13, 16, 20]


def test_run_without_a_step_saves_nothing(mlp, tmp_path):
    bench, stop = mlp(), StopRequest()
    stop.request("at once")
    hooks = [stop]
    saved = bench.saves(tmp_path, hooks, 3)
    bench.loop(hooks, 100)
    assert saved.all() == []


def test_resumed_run_has_its_state_and_that_of_hooks_with_one_name(mlp, tmp_path):
    def hooks_of(bench):
        hooks = [every_steps(10, lambda *_: None), every_steps(10, lambda *_: None)]
        return bench.saves(tmp_path, hooks, 4), hooks

    bench = mlp(dropout=0.5)
    _, hooks = hooks_of(bench)
    bench.loop(hooks, 4)
    whole = mlp(dropout=0.5)
    whole.loop([], 9)

    resumed = mlp(dropout=0.5)
    saved, hooks = hooks_of(resumed)
    again = loop.Loop(resumed.strategy, resumed.state, hooks, 9)
    manifest = saving.restore(saved, resumed.state, hooks, meter=again.meter)
    assert (manifest.step, resumed.state.step) == (4, 4)
    assert [hook.window.totals.host_state()["loss"][2] for hook in hooks[:2]] == [4 * BATCH] * 2
    again.begin()
    again.train_to(9)
    again.end()
    assert [hook.window.totals.host_state()["loss"][2] for hook in hooks[:2]] == [EXAMPLES + 4 * BATCH] * 2
    assert_same(resumed.arrays(), whole.arrays())


def test_restoring_from_nothing_says_so(mlp, tmp_path):
    bench = mlp()
    assert saving.restore(bench.checkpoints(tmp_path), bench.state, [NanGuard()]) is None


@functools.cache
def with_nan(at: int):
    features, labels = data()
    features = features.copy()
    features[at] = np.nan
    return features, labels


def test_nan_guard_ends_a_run_whose_loss_is_nan_in_one_line_with_a_cure(mlp):
    bench = mlp(with_nan(0), shuffle=False)
    with pytest.raises(NonfiniteError) as error:
        bench.loop([every_steps(1, lambda *_: None), NanGuard()], 20)
    message = str(error.value)
    assert message.startswith("step 1: gradient_norm is nan, the first such variable is ")
    assert "dense" in message
    assert "lower the learning rate" in message
    assert "\n" not in message


def test_nan_guard_reads_the_call_before_and_never_the_newest(mlp):
    class Unread(Hook):
        def __call__(self, status):
            newest.append(status.segment.sums)
            read.append([sums.is_read for sums in newest])

    class EachStep(Periodic):
        def act(self, status):
            pass

    newest, read = [], []
    mlp().loop([EachStep(1), NanGuard(), Unread()], 3)
    assert read == [[False], [True, False], [True, True, False]]


def test_state_that_is_not_finite_is_never_saved(mlp, tmp_path):
    bench = mlp(with_nan(40), shuffle=False)  # in the third step
    hooks = [NanGuard()]
    saved = bench.saves(tmp_path, hooks, 1)
    with pytest.raises(NonfiniteError, match="step 3"):
        bench.loop(hooks, 20)
    saved.wait()
    assert [manifest.step for manifest in saved.all()] == [1, 2]


def test_weights_that_are_not_finite_are_not_saved_though_the_metrics_are(mlp, tmp_path):
    bench = mlp()

    def break_weights(status, _):
        bench.trainer.model.trainable_variables[-1].assign([0.0, np.inf, 0.0])

    hooks = [NanGuard(), every_steps(2, break_weights)]
    saved = bench.saves(tmp_path, hooks, 2)
    with pytest.raises(NonfiniteError, match=r"step 2: variable .*logits/bias is not finite"):
        bench.loop(hooks, 20)
    assert saved.all() == []


def test_nan_in_the_last_step_of_a_run_without_checkpoints_is_found(mlp):
    with pytest.raises(NonfiniteError, match=r"^step 1: gradient_norm is nan, the first such variable is "):
        mlp(with_nan(0), shuffle=False).loop([NanGuard()], 1)


class Hiding(Model):
    """An mlp whose activation makes nan 0, as kernels of ReLU do for some CPUs: the loss does not show it."""

    def build_model(self):
        layers = tf.keras.layers
        hidden = layers.Dense(8, lambda x: tf.where(x > 0, x, 0.0))
        return tf.keras.Sequential([layers.Flatten(), hidden, layers.Dense(self.run_context.num_classes)])


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("hook", [NanGuard, lambda: Evaluation(7)], ids=["the end", "an evaluation"])
def test_nan_that_an_activation_hides_from_the_loss_is_found_in_the_weights(bench, hook, replicas):
    source = with_nan(40)  # in the third step
    bench = bench(Hiding(), source, BATCH, replicas, num_classes=3, shuffle=False, eval_source=data(seed=1))
    with pytest.raises(NonfiniteError, match=r"variable \S*kernel is not finite; lower the learning rate"):
        bench.loop([hook()], 9)
    assert np.isfinite(bench.strategy.evaluate().means()["loss"])


@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
def test_evaluation_loss_that_is_not_finite_is_an_error_by_name(bench, on_nonfinite):
    features, labels = data(seed=1)
    features = features.copy()
    features[3, 0, 0, 0] = np.inf
    made = bench(Model(hidden_units=(8,)), data(), BATCH, num_classes=3, eval_source=(features, labels))
    with pytest.raises(NonfiniteError, match=r"^evaluation at step 2: loss is nan; look in the eval"):
        made.loop([Evaluation(2)], 4)


def test_metrics_of_a_hook_have_a_loss_where_all_steps_were_skipped(mlp):
    seen = []
    mlp(data(scale=np.inf), on_nonfinite="skip").loop([every_steps(1, lambda _, found: seen.append(found["loss"]))], 2)
    assert np.isnan(seen).tolist() == [True, True]


def test_moving_statistics_that_are_not_finite_are_found(bench):
    model = bench(Normed(), data(), BATCH)
    numerics.check_weights(model.trainer, "here")
    model.trainer.model.layers[-1].moving_variance.assign([np.inf, 1.0])
    with pytest.raises(NonfiniteError, match=r"^here: variable .*moving_variance.* is not finite"):
        numerics.check_weights(model.trainer, "here")


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_skipped_steps_are_counted_and_warned_of_now_and_then(mlp, caplog, replicas):
    times = iter(range(100))
    guard = NanGuard(warn_seconds=4, clock=lambda: next(times))
    bench = mlp(with_nan(0), replicas, shuffle=False, on_nonfinite="skip")
    with caplog.at_level("WARNING", logger="crankshaft"):
        for steps, in_a_row in ((21, 1), (25, 0)):
            bench.loop([every_steps(1, lambda *_: None), guard], steps)
            assert (guard.skipped, guard.skipped_in_a_row) == (5, in_a_row)  # the first step of each epoch
    warned = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert warned[0].startswith("step 1: 1 updates left out")
    assert 1 < len(warned) < 5
    assert all(np.isfinite(array).all() for array in bench.arrays())


@pytest.mark.parametrize(
    ("replicas", "options"),
    [(1, {"on_nonfinite": "skip"}), (2, {"on_nonfinite": "skip"}), (1, {"precision": "float16", "clip_norm": 1.0})],
)
def test_skipping_all_steps_for_long_is_an_error(mlp, replicas, options):
    bench = mlp(data(scale=np.inf), replicas, **options)
    guard = NanGuard(max_skipped=12)
    with pytest.raises(NonfiniteError, match=r"the last 1\d steps .* nothing is learned") as error:
        bench.loop([every_steps(5, lambda *_: None), guard], 1000)
    assert "on_nonfinite" not in str(error.value)  # updates are left out already
    assert ("set clip_norm" in str(error.value)) == ("clip_norm" not in options)
    assert bench.state.step < 40
    again = NanGuard()
    again.restore_host_state(guard.host_state())
    assert again.skipped == again.skipped_in_a_row == guard.skipped >= 12


def test_early_stopping_counts_what_a_resumed_run_had_counted(mlp, tmp_path):
    """In a stopped run that is started again nothing is trained, until its patience is raised."""

    def hooks_of(bench, patience=2):
        hooks = [Evaluation(2), EarlyStopping("eval_loss", patience, min_delta=1e9)]
        return bench.saves(tmp_path, hooks), hooks

    bench = mlp()
    _, hooks = hooks_of(bench)
    status = bench.loop(hooks, 100)
    assert status.step == 6
    assert "eval_loss has not improved for 2 evaluations" in status.stop
    for patience, last_step in ((2, 6), (4, 10)):
        resumed = mlp()
        saved, hooks = hooks_of(resumed, patience)
        saving.restore(saved, resumed.state, hooks)
        assert resumed.loop(hooks, 100).step == last_step


@pytest.mark.parametrize("period", [0, -2, 2.5, None, "epoch"])
def test_a_period_that_is_no_number_of_steps_is_refused(period):
    line = "is never called; use 1 or more, or leave" if period in (0, -2) else "is not a number of steps"
    with pytest.raises(ValueError, match=line):
        every_steps(period, print)


def test_periodic_hook_of_period_0_is_never_due(mlp):
    class Never(Periodic):
        def act(self, status):
            raise AssertionError("it was due")

    mlp().loop([Never(0)], 3)


@pytest.fixture
def check_numerics():
    tf.debugging.enable_check_numerics()
    yield
    tf.debugging.disable_check_numerics()


def test_check_numerics_names_the_op_and_the_line_that_made_it(check_numerics):
    @tf.function
    def inner(x):
        return tf.math.log(x)

    @tf.function
    def outer():
        return tf.while_loop(lambda i: i < 2, lambda i: i + tf.cast(inner(-1.0), tf.int32) * 0 + 1, [0])

    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        outer()
    line = numerics.explain(error.value)
    assert line.startswith("nan first in output 0 of op Log")
    assert "test_hooks.py" in line
    assert "in inner" in line
    assert "\n" not in line


def test_check_numerics_explains_no_other_error():
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        tf.reshape([1, 2], [3])
    assert numerics.explain(error.value) is None


def test_check_numerics_finds_the_first_op_of_a_training_step(mlp, check_numerics):
    bench = mlp(data(scale=1e30), learning_rate=1.0)
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        bench.loop([], 5)
    assert "first in output 0 of op" in numerics.explain(error.value)


def test_sums_are_read_once_however_many_hooks_keep_them():
    sums = LoopSums([SumSpec("loss", Mean)], tf.constant([[6.0, 3.0]], tf.float64))
    assert sums.read() is sums.read()
