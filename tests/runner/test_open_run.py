"""`crankshaft.open_run`: a run that its program holds trains in many calls as in one, and ends whole in any case.

How an open run ends: by its program's errors, by signals, within a call and between two.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import pathlib
import random
import signal
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft import Trainer, UsageError, mean, open_run, run
from crankshaft.engine.hooks import every_steps
from crankshaft.engine.strategies.base import Stop
from crankshaft.parts import sharding as parallel
from crankshaft.runner.modes.predicting import Predictor
from tests import logical_cpus
from tests.engine.trainers import Columns, Squares
from tests.launch.line import Line
from tests.waiting import wait_until

pytestmark = pytest.mark.thorough


class Noisy(Columns):
    """A plane through points, with everything whose state has to go on from call to call: dropout, averages, a rate."""

    def build_model(self):
        layers = tf.keras.layers
        return tf.keras.Sequential([layers.Dense(8), layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(1)])


def data():
    points = np.random.default_rng(0).normal(size=(300, 3)).astype("float32")
    heights = points @ np.float32([[1.0], [-2.0], [0.5]]) + 3.0
    return (points[:200], heights[:200]), (points[200:], heights[200:])


# 7 steps an epoch, the last of them smaller.
ASKED = {"data": data, "global_batch_size": 32, "learning_rate": 0.05, "jit": "off", "progress": "off"}
ONE_STEP = {**ASKED, "steps_per_loop": 1}  # a call: traced once, where calls of several are unrolled, in five traces
TWO = {"strategy": "mirrored", "num_virtual_devices": 2}


def weights(of) -> list[np.ndarray]:
    return [each.numpy() for each in of.trainer.model.weights]


def assert_same(one, other):
    for mine, theirs in zip(weights(one), weights(other), strict=True):
        np.testing.assert_array_equal(mine, theirs)


FORMS = {"arrays": lambda split: split, "stream": tf.data.Dataset.from_tensor_slices}


@pytest.mark.parametrize(
    ("form", "where"), [pytest.param("arrays", TWO, marks=pytest.mark.slow), ("stream", {})], ids=["two", "stream"]
)
def test_many_calls_end_on_the_bits_of_one(form, where, tmp_path):
    def splits():
        return tuple(map(FORMS[form], data()))

    asked = {**ASKED, **where, "data": splits, "ema_decay": 0.9, "reduce_lr": ["patience=1"], "train_steps": 100}
    whole = run(Noisy, **asked)
    with open_run(Noisy, run_dir=tmp_path / "run", **asked) as opened:
        for _ in range(4):
            random.seed(1)  # what the program samples between calls is its own
            opened.train(steps=10)
    with open_run(Noisy, run_dir=tmp_path / "run", **asked) as opened:
        assert opened.step == 40
        for _ in range(6):
            tf.keras.layers.Dense(1)
            means = opened.train(steps=10)
        assert opened.stop == "step 100 is the last of the run"
    assert_same(opened, whole)
    columns = ("step", "train_loss", "eval_loss")
    assert [[row[c] for c in columns] for row in opened.history] == [[row[c] for c in columns] for row in whole.history]
    assert opened.result["eval"] == whole.result["eval"]
    assert set(means) == {"loss"}


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A run of no end, open for this module's tests, with what `compiled` counts in the loss."""
    with open_run(Noisy, run_dir=tmp_path_factory.mktemp("runs") / "run", **ASKED) as opened:
        opened.train(epochs=2)
        yield opened


def test_a_run_without_an_end_goes_on_from_where_it_is(opened):
    step = opened.step
    opened.train(epochs=1)
    opened.train(epochs=0.5)
    opened.train(steps=1)
    assert opened.step == step + 7 + 4 + 1
    assert opened.stop is None
    assert [row["step"] for row in opened.history][:2] == [7, 14]
    assert opened.models == {"model": opened.trainer.model}
    assert opened.evaluate() == opened.evaluate()


def test_a_run_goes_back_to_a_checkpoint_with_what_was_kept_there(opened):
    opened.save(extra={"epsilon": 0.5, "seen": [1, 2]})
    step, before, loss = opened.step, weights(opened), opened.evaluate()["loss"]
    opened.extra = {"epsilon": 0.25}
    opened.train(steps=9)
    opened.save()
    after = weights(opened)
    opened.restore(step)
    assert (opened.step, opened.extra) == (step, {"epsilon": 0.5, "seen": [1, 2]})
    assert opened.evaluate()["loss"] == loss
    assert opened.history[-1]["step"] <= step
    for mine, theirs in zip(weights(opened), before, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    opened.train(steps=9)
    for mine, theirs in zip(weights(opened), after, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    opened.restore("best")
    assert opened.evaluate()["loss"] == min(opened.history.column("eval_loss"))


POINTS, HEIGHTS = data()[0]
TRACES = []


class Traced(Noisy):
    def loss(self, outputs, batch):
        TRACES.append(outputs)
        return super().loss(outputs, batch)


class Points(crankshaft.Source):
    element_spec = (crankshaft.Spec((3,), np.float32), crankshaft.Spec((1,), np.float32))

    def __len__(self):
        return 40

    def read(self, indices):
        return POINTS[indices], HEIGHTS[indices]


def test_data_that_is_handed_in_is_trained_on_and_compiled_for_once():
    with open_run(Traced, **ASKED, **TWO) as opened:
        for examples in (1, 2):  # a batch of fewer examples than replicas has a program of its own
            opened.train(data=(POINTS[:examples], HEIGHTS[:examples]), steps=1)
            opened.evaluate((POINTS[:examples], HEIGHTS[:examples]))
        opened.evaluate()
        traces = len(TRACES)
        for examples in (200, 40, 33, 32, 5):
            step = opened.step
            opened.train(data=(POINTS[:examples], HEIGHTS[:examples]), epochs=2)
            assert opened.step == step + 2 * -(-examples // 32)
        arrays = POINTS[:40], HEIGHTS[:40]
        stream = tf.data.Dataset.from_tensor_slices(arrays).filter(lambda *_: True)
        losses = [opened.evaluate(split)["loss"] for split in (arrays, Points(), stream)]
        errors = np.square(opened.predict(POINTS[:40]) - HEIGHTS[:40], dtype=np.float64)
        np.testing.assert_allclose(losses, [errors.mean()] * 3, rtol=1e-5)  # rounding of float32
        opened.train(data=Points(), steps=3)
        opened.train(data=stream, epochs=2)
        assert len(TRACES) == traces
        opened.train(steps=2)
        assert opened.evaluate()["loss"] != losses[0]


def test_each_example_that_is_handed_in_is_trained_on_once_an_epoch(tmp_path):
    class Sum(Trainer):
        """Adds up the labels that it sees, and their squares by their position."""

        def build(self):
            self.total = tf.Variable([0.0, 0.0])
            self.optimizer = crankshaft.make_optimizer(self, [self.total])

        def train_step(self, batch):
            weights = 1.0 + tf.range(tf.shape(batch[1])[0], dtype=tf.float32)
            self.total.assign_add([tf.reduce_sum(batch[1]), tf.reduce_sum(batch[1][:, 0] * weights)])
            return {"loss": mean(batch[1][:, 0])}

        eval_step = train_step

    asked = {**ASKED, "data": ((POINTS[:1], HEIGHTS[:1]),), "run_dir": tmp_path / "run", "learning_rate": None}
    numbers = np.arange(100, dtype=np.float32)[:, np.newaxis]
    given = (np.zeros((100, 3), np.float32), numbers)
    with open_run(Sum, **asked) as opened:
        opened.train(data=given, epochs=1)
        first = opened.trainer.total.numpy()
        opened.save()
        means = opened.train(data=given, epochs=2)
        found = opened.trainer.total.numpy()
        opened.restore("latest")
        opened.train(data=given, epochs=2)
        np.testing.assert_array_equal(opened.trainer.total, found)
    assert first[0] == numbers.sum()
    assert found[0] == 3 * numbers.sum()
    assert found[1] - first[1] != 2 * first[1]  # in another order
    assert means["loss"] == numbers.mean()


class Tells(Line):
    """Tells the mean of the numbers that it is trained on."""

    def metrics(self, outputs, batch):
        return {"mean": mean(batch[1])}


def test_data_that_is_handed_in_is_read_in_order_and_a_dataset_goes_on():
    """A dataset is read no further than it is trained on: the program may have it make examples as it goes."""
    numbers = np.arange(8, dtype="float32")
    arrays, made = (numbers[:, None], numbers), []

    def simulated():
        for number in range(6):
            made.append(number)
            yield [number], number

    asked = {**ASKED, "data": (arrays, None), "global_batch_size": 2, "mode": "train", "shuffle_buffer": 0}
    with open_run(Tells, **asked) as opened:

        def means(data, steps, calls):
            return [opened.train(data=data, steps=steps)["mean"] for _ in range(calls)]

        assert means(arrays, 1, 2) == [0.5, 0.5]
        one = tf.data.Dataset.from_tensor_slices(arrays)
        other = tf.data.Dataset.from_tensor_slices((-numbers[:, None], -numbers)).repeat()
        assert [*means(one, 1, 1), *means(other, 2, 1), *means(one, 1, 3), *means(other, 1, 1)] == [
            *(0.5, -1.5),
            *(2.5, 4.5, 6.5, -4.5),
        ]
        assert means(one, 1, 1) == [0.5]
        assert opened.train(data=one, epochs=1)["mean"] == 3.5
        spec = tf.TensorSpec([1]), tf.TensorSpec([])
        queue = simulated()
        once = tf.data.Dataset.from_generator(lambda: queue, output_signature=spec)
        assert means(once, 2, 1) == [1.5]
        assert made == [0, 1, 2, 3]
        with pytest.raises(UsageError, match="ended after 1 steps of this call, and gives nothing when it is read"):
            means(once, 3, 1)
    assert made == [*range(6)]


def test_examples_that_the_runs_own_model_labels_are_made_once():
    """The generator can be read again, and its calls of the run leave the program's generators alone."""
    made = []

    def labelled():
        for number in range(40):
            made.append(number)
            yield POINTS[number], opened.predict(POINTS[number : number + 1])[0]

    spec = tf.TensorSpec([3]), tf.TensorSpec([1])
    stream = tf.data.Dataset.from_generator(labelled, output_signature=spec)
    np.random.seed(3)  # noqa: NPY002
    wanted = np.random.random()  # noqa: NPY002
    np.random.seed(3)  # noqa: NPY002
    with open_run(Straight, **{**ASKED, "global_batch_size": 8, "mode": "train"}) as opened:
        losses = [opened.train(data=stream, steps=steps)["loss"] for steps in (3, 1)]
        assert made == [*range(32)]
        assert opened.train(data=stream, steps=2)["loss"] < 1e-9
    np.testing.assert_allclose(losses, 0.0, atol=1e-9)
    assert made == [*range(40), *range(8)]
    assert np.random.random() == wanted  # noqa: NPY002


KEPT = "can't be saved in a checkpoint"
MISTAKES = [
    (lambda r: r.train(steps=1, epochs=1), "train(steps=1, epochs=1): both are given; use one of them"),
    (lambda r: r.train(), "train(): how long? give steps or epochs, or open the run with train_steps"),
    (lambda r: r.train(steps=1.5), "train(steps=1.5): give a number above 0, a whole one of steps"),
    (lambda r: r.train(steps=0), "train(steps=0): give a number above 0"),
    (lambda r: r.restore(3), " has no whole checkpoint 3; "),
    (lambda r: r.restore("worst"), " has no whole checkpoint worst; "),
    (lambda r: r.save(extra={"x": np.zeros(2)}), f"{KEPT} (Object of type ndarray"),
    (lambda r: r.save(extra=[3, 5]), f"extra=[3, 5] {KEPT} (it is of type list, not a dictionary"),
    (lambda r: r.save(extra=[]), f"extra=[] {KEPT} (it is of type list, not a dictionary"),
    (lambda r: setattr(r, "extra", [("a", 1)]), "(it is of type list, not a dictionary); use a dictionary"),
    (lambda r: r.save(extra={"seen": {3: 1}}), "(its keys are not all strings); use a dictionary"),
    (lambda r: r.save(extra={"x": "x" * (1 << 20)}), "a checkpoint keeps 1,048,576 at most; write a file"),
    (lambda r: r.train(data=(POINTS[:, :2], HEIGHTS), steps=1), "data are ('float32[2]', 'float32[1]') an"),
    (lambda r: r.evaluate((POINTS[:0], HEIGHTS[:0])), "the given data has no examples; give at least one"),
]


def test_what_a_program_keeps_is_checked_in_each_checkpoint(opened):
    opened.extra = {"seen": (1, 2)}
    opened.save()
    opened.extra["seen"] = {7}
    with pytest.raises(UsageError, match=r"can't be saved in a checkpoint \(Object of type set"):
        opened.save()
    opened.extra = {}
    opened.save()


@pytest.mark.parametrize(("call", "line"), MISTAKES)
def test_a_mistake_is_one_line_and_the_run_goes_on(opened, call, line):
    with pytest.raises(UsageError) as raised:
        call(opened)
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)
    opened.train(steps=1)


def test_predictions_of_many_runs_warn_of_no_retracing(opened, caplog):
    for _ in range(6):
        predictor = Predictor(opened)
        predictor(predictor.checked(POINTS[:2]))
    assert not [each for each in caplog.messages if "retracing" in each]


def refused(line: str):
    return pytest.raises(UsageError, match=line)


def test_what_an_open_run_is_not_for_is_one_line():
    with open_run(Noisy, **ONE_STEP, train_steps=3, mode="train") as opened:
        opened.train()
        with refused(r"^train\(\): the run has stopped \(step 3 is the last of the run\); look"):
            opened.train(steps=1)
        with refused(r"^save\(\): the run has no folder to write to; give open_run a run_dir"):
            opened.save()
    with refused(r"^train\(.*\): the run is closed; open it again"):
        opened.train(steps=1)
    assert opened.predict(np.zeros((2, 3), "float32")).shape == (2, 1)
    with refused(r"^open_run\(mode='benchmark'\): an open run trains, or reads by mode='eval'; use cranks"):
        open_run(Noisy, mode="benchmark", **ONE_STEP)
    with refused(r"cosine ends where the run does, and the run has no length; give train_steps"):
        open_run(Noisy, learning_rate_schedule="cosine", **ONE_STEP)


@pytest.mark.parametrize("reason", ["enough", "to include the next year's data"])
def test_a_hook_stops_a_run_that_its_program_holds(reason):
    def stop(status, metrics):
        status.stop = reason

    with open_run(Noisy, hooks=[every_steps(4, stop)], **ASKED) as opened:
        opened.train(steps=10)
        assert (opened.step, opened.stop) == (4, reason)
    assert (opened.result["stop"], opened.code) == (reason, 0)


def test_a_stop_carries_its_exit_code():
    def stop(status, metrics):
        status.stop = Stop("the table is full", exit_code=7)

    with open_run(Noisy, hooks=[every_steps(4, stop)], **ASKED) as opened:
        opened.train(steps=10)
    assert (opened.result["stop"], opened.code) == ("the table is full", 7)


class Two(Noisy):
    def build_model(self):
        body = tf.keras.layers.Dense(4, "tanh", name="body", trainable=self.begins)
        return tf.keras.Sequential([tf.keras.Input([3]), body, tf.keras.layers.Dense(1)])


def test_a_layer_that_is_made_untrainable_between_two_calls_is_left_alone():
    with open_run(type("Two", (Two,), {"begins": True}), optimizer="adam", **ONE_STEP) as opened:
        body = opened.model.get_layer("body")
        for more in ({}, {"data": data()[0]}):
            opened.train(steps=2, **more)
            then = body.kernel.numpy()
            body.trainable = False
            opened.train(steps=2, **more)
            np.testing.assert_array_equal(body.kernel.numpy(), then)
            body.trainable = True
            opened.train(steps=2, **more)
            assert not np.array_equal(body.kernel.numpy(), then)
    with open_run(type("Two", (Two,), {"begins": False}), optimizer="adam", **ONE_STEP) as opened:
        opened.train(steps=2)
        opened.model.get_layer("body").trainable = True
        with refused(r"body/kernel has been made trainable .* no state for it"):
            opened.train(steps=2)


@pytest.mark.parametrize("restores", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_that_early_stopping_has_ended_goes_on_with_new_patience(tmp_path, restores):
    (x, y), _ = data()
    stopping = {"early_stopping": {"patience": 2}, "mode": "train_and_eval", "eval_every_steps": 1, "run_dir": tmp_path}
    with open_run(Noisy, **ONE_STEP, **stopping) as opened:
        opened.train(data=(x, 0 * y - 90), steps=1)  # only worse from here on
        opened.train(data=(x, 0 * y - 90), steps=9)
        assert "has not improved for 2 evaluations" in opened.stop
        with pytest.raises(UsageError, match=r"reset_patience\(\) lets it continue$"):
            opened.train(steps=1)
        if restores:
            opened.restore("best")
            assert opened.stop is None
        before = opened.step
        opened.reset_patience()
        opened.train(data=(x, 0 * y - 90), steps=9)
        assert opened.step == before + 3  # the first evaluation is the best, then two
        assert "has not improved for 2 evaluations" in opened.stop


def test_calls_leave_no_thread_and_no_file_open():
    def left() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    with open_run(Noisy, **ONE_STEP) as opened:
        for calls in (2, 20):  # the first compile
            before = left()
            for _ in range(calls):
                opened.train(steps=1)
                opened.train(data=(POINTS[:9], HEIGHTS[:9]), steps=1)
                opened.predict(POINTS[:2])
        wait_until(lambda: all(now <= then for now, then in zip(left(), before, strict=True)))


def sample() -> list[float]:
    return [random.random(), np.random.random(), float(tf.random.uniform([]))]  # noqa: NPY002


def test_the_programs_random_generators_and_policy_are_left_to_it():
    """Whatever calls a hook makes, or another thread, and while that is at it."""

    def look(status, metrics):
        opened.predict(POINTS[:2])
        opened.evaluate((POINTS[:9], HEIGHTS[:9]))

    def predict():
        for _ in range(30):
            opened.predict(POINTS[:2])

    tf.keras.utils.set_random_seed(5)
    wanted = [sample() for _ in range(60)]
    tf.keras.utils.set_random_seed(5)
    found = [sample()]
    with open_run(Noisy, hooks=[every_steps(2, look)], **{**ONE_STEP, "precision": "bfloat16"}) as opened:
        found.append(sample())
        opened.train(steps=4)
        found.append(sample())
        other = threading.Thread(target=predict)
        other.start()
        while other.is_alive() and len(found) < 50:
            assert tf.keras.config.dtype_policy().name == "float32"
            found.append(sample())
        other.join()
        found += [sample() for _ in range(60 - len(found))]
    assert found == wanted


class Straight(Columns):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(1)])


def test_weights_that_are_set_in_the_model_are_the_runs(tmp_path):
    """On replicas, with an average, as on one device: in evaluations, in steps, in checkpoints."""
    logical_cpus.make_four()
    with open_run(Straight, run_dir=tmp_path, **{**ASKED, "learning_rate": 1e-4}, **TWO, ema_decay=0.9) as opened:
        opened.train(steps=3)
        model = opened.model
        model.set_weights([np.float32([[1.0], [-2.0], [0.5]]), np.float32([3.0])])
        assert opened.model is model
        assert opened.evaluate()["loss"] == pytest.approx(0.0, abs=1e-10)
        model.layers[-1].bias.assign([5.0])
        opened.save()
        loaded = crankshaft.load_model(tmp_path).get_weights()
        np.testing.assert_allclose(np.concatenate([each.ravel() for each in loaded]), [1.0, -2.0, 0.5, 5.0])
        assert opened.train(steps=1)["loss"] == pytest.approx(4.0, rel=1e-5)
        bias = float(model.layers[-1].bias.numpy()[0])
        assert 0.0 < abs(bias - 5.0) < 1e-3
        np.testing.assert_allclose(opened.predict(np.zeros([4, 3], "float32"))[:, 0], bias, rtol=1e-6)


class Ranked(Squares):
    """A table and a layer that is sharded over a mesh."""

    def build_model(self):
        self.users = crankshaft.Embedding("users", rows=5, width=3)
        layers = [tf.keras.Input([3]), parallel.Dense(4, split="columns"), parallel.Dense(1, split="rows")]
        return tf.keras.Sequential(layers)

    def forward(self, features, training):
        return self.model(self.users(features))


@pytest.mark.parametrize(
    "where", [pytest.param({}, marks=pytest.mark.slow), {**TWO, "mesh": "model:2"}], ids=["one", "mesh"]
)
def test_weights_that_a_program_sets_are_in_every_shard_and_the_next_checkpoint(where, tmp_path):
    logical_cpus.make_four()
    rng, users = np.random.default_rng(0), np.arange(5, dtype=np.int32)
    table, first, second = (rng.normal(size=size).astype("float32") for size in ((5, 3), (3, 4), (4, 1)))
    asked = {"data": ((users, np.zeros(5, "float32")),), "jit": "off", "progress": "off", "run_dir": tmp_path, **where}

    def expected(table):
        return table @ first @ second + 2.0

    with open_run(Ranked, **asked, ema_decay=0.5) as opened:
        opened.train(steps=3)
        opened.set_weights([first, np.zeros(4), second, [2.0]])
        opened.set_weights({"users": table})
        np.testing.assert_allclose(opened.predict(users), expected(table), rtol=1e-5)
        kernel = next(each.path for each in opened.model.weights if each.shape == (4, 1))
        for wrong, why in [
            ([first], "1 arrays, and the model has 4 weights"),
            ({"users": -table, kernel: second.T}, r"kernel has the shape \[4, 1\], and its array \[1, 4\]"),
            ({"users": -table, "usrs": table}, "'usrs': did you mean users"),
            ({"users": -table, kernel: "many"}, "kernel takes an array of numbers"),
        ]:
            with pytest.raises(UsageError, match=why):
                opened.set_weights(wrong)
        np.testing.assert_allclose(opened.predict(users), expected(table), rtol=1e-5)
        opened.set_weights({"users": 2 * table})
    with open_run(Ranked, **asked, ema_decay=0.5) as resumed:
        assert resumed.step == 3
        np.testing.assert_allclose(resumed.predict(users), expected(2 * table), rtol=1e-5)


def ended_by(error: type[BaseException], end, tmp_path) -> crankshaft.Run:
    with pytest.raises(error), open_run(Noisy, run_dir=tmp_path / "run", **ASKED) as opened:  # noqa: PT012
        opened.train(steps=5)
        end(opened)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["step"] == opened.step
    return open_run(Noisy, run_dir=tmp_path / "run", **ASKED)


def test_a_run_is_saved_where_its_program_fails_between_calls(tmp_path):
    with ended_by(ZeroDivisionError, lambda opened: 1 / 0, tmp_path) as opened:
        assert opened.step == 5


@pytest.mark.usefixtures("answers_ctrl_c")
def test_ctrl_c_ends_a_call_at_a_step_and_the_run_is_saved(tmp_path):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    def interrupt(opened):
        started = opened.step

        def once_it_trains():
            while opened.step == started:
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=once_it_trains).start()
        opened.train(steps=10_000_000)

    with ended_by(KeyboardInterrupt, interrupt, tmp_path) as opened:
        assert 5 < opened.step < 10_000_000
        step = opened.step
        with pytest.raises(KeyboardInterrupt):
            interrupt(opened)
        opened.train(steps=1)  # a program that catches it goes on
        assert opened.step > step
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_a_run_that_was_left_open_is_saved_and_closed_where_its_folder_is_opened_again(tmp_path, caplog):
    def again(*_):
        open_run(Noisy, run_dir=tmp_path, **ASKED)

    left = open_run(Noisy, run_dir=tmp_path, hooks=[every_steps(5, again)], **ASKED)
    left.train(steps=3)
    with pytest.raises(UsageError, match="which is this one; close its run, or use another"):
        left.train(steps=2)  # it is not closed within its own call
    with open_run(Noisy, run_dir=tmp_path, **ASKED) as opened:
        assert (opened.step, left.is_open) == (5, False)
    assert "was left open at step 5: it is saved and closed" in caplog.text


def is_locked(run_dir):
    """Whether some process, which may be this one, has a run in a folder."""
    with open(run_dir / ".lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def used_in_all_ways(run):
    run.train(steps=3)
    run.evaluate()
    run.predict(split="train")
    run.set_weights(run.model.get_weights())
    run.save({"note": 1})
    run.restore("latest")
    assert run.models
    assert run.page()
    assert run.extra == {"note": 1}


def test_a_run_that_its_program_no_longer_holds_is_saved_and_frees_its_folder(tmp_path, caplog):
    run = open_run(Noisy, run_dir=tmp_path, **ASKED)
    used_in_all_ways(run)
    run.train(steps=1)
    assert is_locked(tmp_path)
    cycle = [run]
    cycle.append(cycle)
    del run, cycle
    gc.collect()
    assert not is_locked(tmp_path)
    assert "was left open at step 4: it is saved and closed" in caplog.text
    with open_run(Noisy, run_dir=tmp_path, **ASKED) as again:
        assert again.step == 4


def test_a_run_that_is_collected_within_another_runs_call_is_closed_when_the_next_run_starts(tmp_path):
    held = [open_run(Noisy, run_dir=tmp_path / "dropped", **ASKED)]
    held[0].train(steps=2)

    def drop(*_):
        held.clear()
        assert is_locked(tmp_path / "dropped")

    with open_run(Noisy, hooks=[every_steps(1, drop)], **ASKED) as other:
        other.train(steps=1)
    assert not held
    assert is_locked(tmp_path / "dropped")
    with open_run(Noisy, **ASKED):
        assert not is_locked(tmp_path / "dropped")


LEFT_OPEN = """
import atexit, os, sys, threading
import crankshaft
from crankshaft.models.logistic import Model

def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")

run = crankshaft.open_run(Model, input="digits", run_dir=sys.argv[1], jit="off", progress="off")
run.train(steps=3)
if not os.fork():
    sys.exit()  # the run is the parent's
os.wait()
atexit.register(setattr, threading.Thread, "start", refuse)  # as Python 3.12 and later have it
sys.exit(3)
"""


def test_a_run_that_is_open_where_its_program_ends_is_saved(crank, tmp_path):
    (tmp_path / "left.py").write_text(LEFT_OPEN)
    ended = crank(tmp_path / "run", script=tmp_path / "left.py")
    assert ended.code == 3
    assert ended.err.count("was left open at step 3: it is saved and closed") == 1
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("*.json")] == ["ckpt-3.manifest.json"]


def in_train(opened):
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    opened.train(steps=10_000_000)


def between_calls(opened):
    opened.train(steps=4)
    os.kill(os.getpid(), signal.SIGTERM)


class Ending(Points):
    """A source whose reading is ended by SIGTERM, once."""

    def read(self, indices):
        if not self.__dict__.setdefault("sent", False):
            self.sent = True
            os.kill(os.getpid(), signal.SIGTERM)
        return super().read(indices)


def in_evaluate(opened):
    opened.train(steps=4)
    with pytest.raises(UsageError, match=r"evaluate\(\): the run ends, since a process got SIGTERM"):
        opened.evaluate(Ending())


def in_predict(opened):
    opened.train(steps=4)
    with pytest.raises(UsageError, match=r"predict\(\): the run ends, since a process got SIGTERM"):
        opened.predict(Ending())


@pytest.mark.parametrize("send", [in_train, between_calls, in_evaluate, in_predict])
def test_sigterm_saves_and_closes_a_run_before_it_does_what_the_program_wants(tmp_path, send):
    told = []
    before = signal.signal(signal.SIGTERM, lambda *_: told.append(opened.stop))
    try:
        with open_run(Noisy, run_dir=tmp_path / "run", eval_batch_size=8, **ASKED) as opened:
            send(opened)
            with pytest.raises(UsageError, match="the run is closed"):
                opened.train(steps=1)
        assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, before)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told == ["SIGTERM"]
    assert json.loads((tmp_path / "run" / "result.json").read_text())["step"] == opened.step > 0
    assert (tmp_path / "run" / "checkpoints" / f"ckpt-{opened.step}.index").exists()


def test_a_call_that_failed_is_not_saved_and_can_be_taken_back(tmp_path):
    asked = {**ASKED, "run_dir": tmp_path / "run", "optimizer": "sgd"}
    with open_run(Noisy, **asked) as opened:
        opened.train(steps=5)
        opened.save()
        before = weights(opened)
        opened.trainer.model.variables[0].assign(opened.trainer.model.variables[0] * np.inf)
        with pytest.raises(crankshaft.RunError, match="loss is nan"):
            opened.train(steps=5)
        opened.restore("latest")
        opened.train(steps=1)
        opened.restore(5)
        for mine, theirs in zip(weights(opened), before, strict=True):
            np.testing.assert_array_equal(mine, theirs)
        opened.trainer.model.variables[0].assign(opened.trainer.model.variables[0] * np.inf)
        with pytest.raises(crankshaft.RunError, match="loss is nan"):
            opened.train(steps=5)
        with pytest.raises(crankshaft.RunError, match=r"variable \S+ is not finite"):
            opened.close()
    assert sorted(path.name for path in pathlib.Path(opened.run_dir, "checkpoints").glob("*.index")) == ["ckpt-5.index"]


class Flaky(Points):
    """A source that fails when it is read for the second time, and for no other."""

    def __init__(self):
        self.reads = 0

    def read(self, indices):
        self.reads += 1
        if self.reads == 2:
            raise OSError("the disk was away")
        return super().read(indices)


def fails_once(status, metrics, seen=[]):  # noqa: B006
    seen.append(status.step)
    if seen == [4, 8]:
        raise OSError("the disk was away")


@pytest.mark.parametrize("where", ["hook", pytest.param("own data", marks=pytest.mark.slow), "given data"])
def test_a_program_that_catches_an_error_goes_on_and_loses_no_step(where, tmp_path):
    """The hooks after one that failed see its step too: the checkpoint that was due there is written."""
    hooks = [every_steps(4, fails_once)] if where == "hook" else []
    asked = {**ASKED, "run_dir": tmp_path / "run", "checkpoint_every_steps": 8, "seed": 3}
    asked |= {"data": lambda: (Flaky(),), "mode": "train", "resident_data_mb": 0} if where == "own data" else {}
    given = {"data": Flaky()} if where == "given data" else {}
    with open_run(Noisy, hooks=hooks, **asked) as opened:
        with pytest.raises(Exception, match="the disk was away"):  # noqa: PT012
            while opened.step < 12:
                opened.train(steps=3, **given)
        assert opened.step < 12
        opened.train(steps=20 - opened.step, **given)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["step"] == 20
    kept = [path.name for path in pathlib.Path(opened.run_dir, "checkpoints").glob("*.index")]
    assert {"ckpt-8.index", "ckpt-16.index", "ckpt-20.index"} <= {*kept}
    if not given:
        own = {name: asked[name] for name in ("mode", "resident_data_mb") if name in asked}
        split = {"data": lambda: (Points(),)} if own else {}
        assert_same(opened, run(Noisy, train_steps=20, **{**ASKED, **own, **split, "seed": 3}))


def test_a_run_that_was_interrupted_within_its_steps_is_not_saved_and_says_so(tmp_path):
    failing = []

    def simulated():
        for number in range(200):
            if number == 150 and not failing:
                failing.append(number)
                raise OSError("the simulator is lost")
            yield POINTS[number], HEIGHTS[number]

    spec = tf.TensorSpec([3]), tf.TensorSpec([1])
    stream = tf.data.Dataset.from_generator(simulated, output_signature=spec)
    stream = stream.apply(tf.data.experimental.assert_cardinality(200))
    asked = {**ASKED, "data": lambda: (stream,), "run_dir": tmp_path / "run", "mode": "train", "shuffle_buffer": 0}
    opened = open_run(Noisy, **asked)
    opened.train(steps=2)
    opened.save()
    with pytest.raises(Exception, match="the simulator is lost"):
        opened.train(steps=5)
    with pytest.raises(crankshaft.RunError, match=r"could not be written: the call after it was interrupted"):
        opened.save()
    opened.restore("latest")
    opened.train(steps=5)
    opened.save()
    opened.close()
    failing.clear()
    opened = open_run(Noisy, **asked)
    assert opened.step == 7
    with pytest.raises(Exception, match="the simulator is lost"):
        opened.train(steps=7)
    with pytest.raises(crankshaft.RunError, match=r"restore a checkpoint"):
        opened.close()
