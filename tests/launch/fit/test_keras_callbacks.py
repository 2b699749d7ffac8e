"""Keras callbacks among a script's hooks. In this process."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import signal

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft import Mean, mean
from crankshaft.engine import logging
from crankshaft.engine.hooks import every_steps
from tests.launch.fit.test_fit import TWO
from tests.launch.line import RUN, Line, data

pytestmark = pytest.mark.thorough

EPOCHS = (*RUN, "--train_steps=8", "--eval_every_steps=4")  # two of four steps
callbacks = tf.keras.callbacks
POINTS = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
LABELS = POINTS.sum(1, keepdims=True)


def test_a_model_that_is_compiled_to_run_eagerly_does():
    seen = []

    def loss(labels, outputs):
        seen.append(tf.executing_eagerly())
        return tf.reduce_mean(tf.square(outputs - labels), -1)

    model = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(1)])
    model.compile("sgd", loss, run_eagerly=True)
    crankshaft.fit(model, POINTS, LABELS, batch_size=8, steps_per_epoch=3, verbose=0)
    assert seen.count(True) == 3


def test_a_callback_may_end_the_run(inside):
    where = ("--strategy=mirrored", "--num_virtual_devices=2")

    class Enough(callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

    outcome = inside(*EPOCHS, *where, trainer=Line, data=data, hooks=[Enough()]).ok()
    assert "stopped at step 4: stop_training of a Keras callback" in outcome.out


@pytest.mark.parametrize(
    ("made", "flag"), [(callbacks.BackupAndRestore("backup"), "run_dir"), (callbacks.SwapEMAWeights(), "ema_decay")]
)
def test_a_callback_that_needs_keras_loop_names_the_flag(inside, made, flag):
    outcome = inside(*EPOCHS, trainer=Line, data=data, hooks=[made])
    outcome.refused(f"Keras callback {type(made).__name__} is for Keras's own loop; use {flag}")


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_callback_sets_the_rate_unless_a_schedule_does(inside, schedule):
    class Slower(callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.optimizer.learning_rate = 1e-5
            assert float(self.model.optimizer.learning_rate) == pytest.approx(1e-5)

    outcome = inside(*EPOCHS, f"--learning_rate_schedule={schedule}", trainer=Line, data=data, hooks=[Slower()])
    assert outcome.code == (2 if schedule == "cosine" else 0)
    assert schedule == "constant" or "learning_rate_schedule=constant" in outcome.error


class Rising(Line):
    """`close` and `near` rise as the line comes closer; of `near` nobody knows which direction is better."""

    def metrics(self, outputs, batch):
        close = 1.0 - tf.square(outputs[:, 0] - batch[1])
        return {"close": mean(close, direction="max"), "near": mean(close)}


@pytest.mark.parametrize(
    "make",
    [
        lambda monitor: callbacks.EarlyStopping(monitor, patience=1),
        lambda monitor: callbacks.ReduceLROnPlateau(monitor, patience=1),
        lambda monitor: callbacks.ModelCheckpoint("best.keras", monitor, save_best_only=True),
    ],
)
def test_mode_auto_is_the_direction_of_the_metric_or_an_error_before_the_first_step(
    inside, tmp_path, monkeypatch, make
):
    monkeypatch.chdir(tmp_path)
    known, unknown = make("val_close"), make("val_near")
    slow = (*EPOCHS, "--optimizer=sgd", "--learning_rate=0.05")
    inside(*slow, trainer=Rising, data=data, hooks=[known]).ok()
    assert known.mode == "max"
    assert known.best > 0.1  # the second epoch's: the first begins below 0
    outcome = inside(*slow, trainer=Rising, data=data, hooks=[unknown])
    assert f"{type(unknown).__name__}(monitor='val_near'): whether a higher or a lower" in outcome.mistake
    assert "give it mode='max' or mode='min'" in outcome.mistake
    assert "step 1" not in outcome.out


class Late(Line):
    """Its `share` is of nothing at first."""

    def metrics(self, outputs, batch):
        high = tf.cast(outputs[:, 0] > 0.15, tf.float32)
        return {"share": Mean(tf.reduce_sum(high), tf.cast(tf.size(high), tf.float32) * tf.reduce_max(high))}


def test_a_first_value_that_is_nan_is_not_the_best(inside):
    values, stopping = [], callbacks.EarlyStopping("val_share", patience=50, mode="max")
    seen = callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: values.append(logs["val_share"]))
    slow = ("--optimizer=sgd", "--learning_rate=0.01", "--train_steps=40", "--eval_every_steps=4")
    inside(*RUN, *slow, trainer=Late, data=data, hooks=[stopping, seen]).ok()
    assert np.isnan(values[0])
    assert stopping.best == max(value for value in values if not np.isnan(value)) > 0


def compiled(optimizer, **how):
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(1)])
    model.compile(optimizer, "mse", **how)
    return model


def fitted(how, optimizer, made, epochs=4, eager=False, as_function=False, **more):
    """(the run or Keras's history, the weights) of five steps an epoch, as `how` fits them: Keras's or Crankshaft's."""
    make = functools.partial(compiled, optimizer, run_eagerly=eager)
    model = make if as_function else make()
    fit = model.fit if how == "keras" else functools.partial(crankshaft.fit, model, jit="off")
    done = fit(POINTS, LABELS, batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=made, **more)
    return done, [weight.ravel().tolist() for weight in (done.model if as_function else model).get_weights()]


class Looks(callbacks.Callback):
    """Uses the model as programs do, and sets its weights and its optimizer's rate."""

    def on_epoch_end(self, epoch, logs=None):
        outputs = self.model(POINTS)
        assert isinstance(self.model, tf.keras.Model)
        np.testing.assert_allclose(self.model.predict(POINTS, verbose=0), outputs, rtol=1e-5)
        np.testing.assert_allclose(
            self.model.evaluate(POINTS, LABELS, verbose=0), np.mean((outputs - LABELS) ** 2), 1e-5
        )
        copy = tf.keras.models.clone_model(self.model)
        copy.set_weights(self.model.get_weights())
        np.testing.assert_allclose(copy.predict(POINTS, verbose=0), outputs, rtol=1e-5)
        self.model.optimizer.learning_rate.assign(0.02 / (epoch + 1))
        self.model.layers[0].kernel.assign(self.model.layers[0].kernel * 0.9)
        self.model.stop_training = epoch == 1


class Trains(callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.train_on_batch(POINTS, LABELS)


@pytest.mark.parametrize("form", ["model", pytest.param("function", marks=pytest.mark.slow)])
def test_on_replicas_callbacks_have_a_keras_model_and_what_they_set_is_the_runs(form):
    two = {"strategy": "mirrored", "num_virtual_devices": 2, "as_function": form == "function"}
    looks = Looks()
    theirs, _ = fitted("keras", "adam", [Looks()])
    run, _ = fitted("ours", "adam", [looks], **two)
    assert run.step == 10
    assert "predict" not in vars(looks.model)  # it is Keras's again
    theirs.model.fit(POINTS, LABELS, shuffle=False, verbose=0)
    run.model.fit(POINTS, LABELS, shuffle=False, verbose=0)  # with the optimizer's state
    for mine, expected in zip(run.model.get_weights(), theirs.model.get_weights(), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-5)
    with pytest.raises(crankshaft.UsageError, match="a Keras callback calls train_on_batch of the model that the run"):
        fitted("ours", "adam", [Trains()], **two)


@pytest.mark.parametrize(
    "where", ["within it", *(pytest.param(where, marks=pytest.mark.slow) for where in ("after the scope", "a copy"))]
)
def test_a_model_made_in_the_scope_of_replicas_is_trained_as_a_copy_is(where):
    """What a callback sets, and SwapEMAWeights, is as in Keras on one device; Keras's own fit goes on."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    optimizer = functools.partial(tf.keras.optimizers.Adam, use_ema=True, ema_momentum=0.5)
    theirs, ours, looks = compiled(optimizer()), None, Looks()
    how = {"batch_size": 8, "epochs": 4, "shuffle": False, "verbose": 0, "validation_data": (POINTS, LABELS)}
    expected = theirs.fit(POINTS, LABELS, callbacks=[Looks(), callbacks.SwapEMAWeights(True)], **how)
    if where == "a copy":
        ours, how = compiled(optimizer()), {**how, "strategy": "mirrored", "num_virtual_devices": 2}
    with strategy.scope() if where != "a copy" else contextlib.nullcontext():
        ours = ours or compiled(optimizer())
        if where == "within it":
            run = crankshaft.fit(ours, POINTS, LABELS, callbacks=[looks, callbacks.SwapEMAWeights(True)], **how)
    if where != "within it":
        run = crankshaft.fit(ours, POINTS, LABELS, callbacks=[looks, callbacks.SwapEMAWeights(True)], **how)
    assert (run.strategy.num_replicas, run.step) == (2, 10)
    assert looks.model is run.trainer.model
    assert (looks.model is ours) == (where != "a copy")
    for name, values in expected.history.items():
        np.testing.assert_allclose(run.history.history[name], values, rtol=1e-5, err_msg=name)
    for model in (theirs, ours):
        model.fit(POINTS, LABELS, shuffle=False, verbose=0)
    for mine, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5)


# -- what they set, and what a resumed run repeats of it --------------------------------------------------------------


class Setting(callbacks.Callback):
    """Sets attributes of the optimizer at the beginning of the second epoch."""

    def __init__(self, **values):
        super().__init__()
        self._values = values

    def on_epoch_begin(self, epoch, logs=None):
        for name, value in self._values.items() if epoch == 1 else ():
            setattr(self.model.optimizer, name, value)


@pytest.mark.parametrize(
    ("optimizer", "values"),
    [
        pytest.param("SGD", {"momentum": 0.5}, marks=pytest.mark.slow),
        ("AdamW", {"weight_decay": 0.3, "beta_1": 0.5}),
    ],
    ids=["momentum", "decay"],
)
def test_what_a_callback_sets_in_the_optimizer_takes_effect_and_is_kept(tmp_path, optimizer, values):
    """Keras's compiled step takes in what was set before it was traced; its eager one always does."""

    def made():
        return getattr(tf.keras.optimizers, optimizer)(0.05, **dict.fromkeys(values, 0.9))

    _, keras = fitted("keras", made(), [Setting(**values)], eager=True)
    where = {"run_dir": tmp_path / "run"}
    fitted("ours", made(), [Setting(**values)], epochs=2, **where)
    _, ours = fitted("ours", made(), [Setting(**values)], **where)
    for mine, theirs in zip(ours, keras, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)
    _, without = fitted("keras", made(), [])
    assert not np.allclose(without[0], ours[0], rtol=1e-3)


class Assigning(callbacks.Callback):
    """Assigns the optimizer's count of updates and its slots as the first epoch ends."""

    def __init__(self, count):
        super().__init__()
        self.count = count

    def on_epoch_end(self, epoch, logs=None):
        iterations, _, *slots = self.model.optimizer.variables if epoch == 0 else (None, None)
        for variable in (iterations, *slots) if slots else ():
            variable.assign(np.full(variable.shape, self.count if variable is iterations else 0.5 * (self.count > 0)))


def adam():
    return tf.keras.optimizers.Adam(0.05)


@pytest.mark.parametrize(("count", "how"), [(0, {}), (0, TWO), (90, {})])
def test_an_optimizer_that_a_callback_resets_or_restores_updates_as_in_keras(tmp_path, count, how):
    _, keras = fitted("keras", adam(), [Assigning(count)])
    _, ours = fitted("ours", adam(), [Assigning(count)], **how)
    np.testing.assert_allclose(ours[0], keras[0], rtol=1e-5)
    if not how:
        for stop in ({"stop_at_step": 7}, {}):
            _, resumed = fitted("ours", adam(), [Assigning(count)], run_dir=tmp_path / "run", **stop)
        assert resumed == ours


@pytest.mark.parametrize("on_epoch", [True, False])
def test_a_run_with_averages_swapped_in_is_prolonged_with_the_weights_that_it_trained(tmp_path, on_epoch):
    def average():
        return tf.keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.8)

    def made():
        return [callbacks.SwapEMAWeights(on_epoch)]

    more = {"validation_data": (POINTS, LABELS)}
    theirs, keras = fitted("keras", average(), made(), **more)
    for epochs in (2, 4):
        run, ours = fitted("ours", average(), made(), epochs=epochs, run_dir=tmp_path / "run", **more)
    np.testing.assert_allclose(ours[0], keras[0], rtol=1e-5)
    np.testing.assert_allclose(run.history.history["val_loss"], theirs.history["val_loss"], rtol=1e-5)
    assert ours == fitted("ours", average(), made(), **more)[1]


class Averaging(callbacks.Callback):
    """Trains with the weights that it puts back as an epoch begins; their averages are in the model between epochs."""

    trained: list[np.ndarray] | None = None

    def on_train_begin(self, logs=None):
        self.averages = [tf.Variable(weight) for weight in self.model.get_weights()]

    def on_train_batch_end(self, batch, logs=None):
        for average, weight in zip(self.averages, self.model.weights, strict=True):
            average.assign(0.8 * average + 0.2 * weight)

    def on_epoch_begin(self, epoch, logs=None):
        if self.trained is not None:
            self.model.set_weights(self.trained)

    def on_epoch_end(self, epoch, logs=None):
        self.trained = self.model.get_weights()
        self.model.set_weights(self.averages)


class Freezes(callbacks.Callback):
    """Freezes a layer once, which Keras's own fit would follow if the model were compiled again."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self.model.layers[0].trainable = False


@pytest.mark.parametrize("how", [{}, TWO], ids=["one", "two"])
def test_a_layer_that_a_callback_freezes_is_frozen_in_a_resumed_run(tmp_path, how):
    def weights(**more):
        def model():
            tf.keras.utils.set_random_seed(1)
            made = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(2), tf.keras.layers.Dense(1)])
            made.compile("adam", "mse")
            return made

        given = {"batch_size": 8, "verbose": 0, "jit": "off", "callbacks": [Freezes()], **how, **more}
        run = crankshaft.fit(model, POINTS, LABELS, **given)
        return [weight.tolist() for weight in run.model.get_weights()]

    whole = weights(epochs=4)
    assert whole[:2] == weights(epochs=1)[:2] != weights(epochs=4, callbacks=[])[:2]
    for stop in ({"epochs": 4, "stop_at_step": 12}, {"epochs": 3}, {"epochs": 4}):
        resumed = weights(run_dir=tmp_path, **stop)
    assert resumed == whole


class LookingAhead(callbacks.EarlyStopping):
    """Goes half of the way from the weights as an epoch began; with state of a class of Keras's, too."""

    def __init__(self):
        super().__init__("loss", patience=9)
        self.ways = {(0, "first"): []}

    def on_epoch_begin(self, epoch, logs=None):
        self.slow = tuple(self.model.get_weights())

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        fast = self.model.get_weights()
        self.ways[0, "first"].append(np.abs(fast[0] - self.slow[0]).max())
        self.model.set_weights([slow + 0.5 * (new - slow) for slow, new in zip(self.slow, fast, strict=True)])


@pytest.mark.parametrize(("kind", "how"), [(Averaging, {}), (LookingAhead, TWO)], ids=["one", "two"])
def test_what_a_callback_without_get_state_keeps_in_its_attributes_is_in_checkpoints(tmp_path, caplog, kind, how):
    _, (expected, _) = fitted("keras", adam(), [kind()])
    _, whole = fitted("ours", adam(), [kind()], **how)
    np.testing.assert_allclose(whole[0], expected, rtol=1e-4)
    for number, stop in enumerate(({"stop_at_step": 7}, {"stop_at_step": 5}, {"epochs": 2})):  # within an epoch, ...
        fitted("ours", adam(), [kind()], run_dir=tmp_path / str(number), **how, **stop)
        callback = kind()
        _, resumed = fitted("ours", adam(), [callback], run_dir=tmp_path / str(number), **how)
        assert resumed == whole
    assert "begins again" not in caplog.text
    assert kind is Averaging or [type(way) for way in callback.ways[0, "first"]] == [np.float32] * 4


class Cycling(callbacks.Callback):
    """Sets another momentum before each batch, as one-cycle policies do."""

    step = 0

    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.momentum = 0.9 - 0.02 * self.step
        self.step += 1


def test_a_momentum_of_each_batch_is_used_named_and_keeps_few_programs(caplog):
    logging.warning_once.cache_clear()
    run, (kernel, _) = fitted("ours", tf.keras.optimizers.SGD(0.02, momentum=0.9), [Cycling()], epochs=2, eager=True)
    _, (expected, _) = fitted("keras", tf.keras.optimizers.SGD(0.02, momentum=0.9), [Cycling()], epochs=2, eager=True)
    np.testing.assert_allclose(kernel, expected, rtol=1e-5)
    assert len(run.strategy.training.programs) == 8
    assert [line for line in caplog.messages if "momentum changes again and again, and the step is compiled" in line]


COSINE = tf.keras.optimizers.schedules.CosineDecay(0.1, 10)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        *(("clipnorm", 1.0, "can't be set in a run"), ("learning_rate", COSINE, "can't be set in a run")),
        ("momentum", 0.9, "needs optimizer state that was not made"),
    ],
)
def test_what_a_callback_can_not_set_in_an_optimizer_is_an_error(name, value, why):
    with pytest.raises(crankshaft.UsageError, match=f"{name}.* of Keras optimizer sgd.* {why}"):
        fitted("ours", tf.keras.optimizers.SGD(0.1), [Setting(**{name: value})])


def test_an_optimizer_of_the_engine_takes_what_it_has(inside):
    names = (*EPOCHS, "--optimizer=momentum")
    inside(*names, trainer=Line, data=data, hooks=[Setting(momentum=0.5)]).ok()
    outcome = inside(*names, trainer=Line, data=data, hooks=[Setting(beta_1=0.5)])
    assert "momentum has no setting beta_1; it has learning_rate, momentum, nesterov" in outcome.error


class Compiles(callbacks.Callback):
    def __init__(self, method):
        super().__init__()
        setattr(self, method, self.compile_again)

    def compile_again(self, *_):
        self.model.compile(tf.keras.optimizers.SGD(0.1), "mae")


@pytest.mark.parametrize("method", ["on_epoch_end", "on_train_begin"])
def test_a_callback_that_compiles_the_model_in_training_is_an_error(method):
    model = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(1)])
    model.compile(tf.keras.optimizers.Adam(0.1), "mse")
    data = {"epochs": 2, "batch_size": 8, "verbose": 0, "jit": "off"}
    with pytest.raises(crankshaft.UsageError, match=r"calls compile of the model .*; compile it in on_train_end, or"):
        crankshaft.fit(model, POINTS, LABELS, callbacks=[Compiles(method)], **data)
    assert (type(model.optimizer), model.loss) == (tf.keras.optimizers.Adam, "mse")


def test_a_callback_may_compile_the_model_for_the_next_run():
    model = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(1)])
    model.compile(tf.keras.optimizers.Adam(0.1), "mse")
    data = {"batch_size": 8, "verbose": 0, "jit": "off"}
    crankshaft.fit(model, POINTS, LABELS, callbacks=[Compiles("on_train_end")], **data)
    assert (type(model.optimizer), model.loss) == (tf.keras.optimizers.SGD, "mae")
    loss = model.evaluate(POINTS, LABELS, verbose=0)
    assert crankshaft.fit(model, POINTS, LABELS, **data).history.history["loss"][0] < loss
    assert model.optimizer.iterations.numpy() == 5


class Halving(callbacks.Callback):
    """Halves the rate and the weights as an epoch begins, and stops the run, or fails, after a step."""

    begun = 0

    def __init__(self, ends=None, fails=False):
        super().__init__()
        self._ends, self._fails = ends, fails

    def on_epoch_begin(self, epoch, logs=None):
        self.begun += 1
        self.model.optimizer.learning_rate = 0.5 * float(self.model.optimizer.learning_rate)
        self.model.set_weights([0.5 * weight for weight in self.model.get_weights()])

    def on_epoch_end(self, epoch, logs=None):
        logs["rate"] = float(self.model.optimizer.learning_rate)

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == self._ends:
            if self._fails:
                raise RuntimeError("as if killed")
            self.model.stop_training = True

    def get_state(self):
        return {"begun": self.begun}

    def set_state(self, state):
        self.begun = state["begun"]


def test_a_run_that_has_only_its_best_checkpoint_repeats_and_skips_no_epochs_end(tmp_path):
    """That one was saved before they saw its epoch end, where the rate falls, with the averages in the weights."""

    def fitted_by(epochs, **where):
        tf.keras.utils.set_random_seed(0)
        model = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(1)])
        model.compile(tf.keras.optimizers.SGD(0.01, 0.5, use_ema=True, ema_momentum=0.5), "mse")
        seen = [Halving(), callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=100.0)]
        seen.append(callbacks.SwapEMAWeights(swap_on_epoch=False))
        how = {"validation_data": (POINTS, LABELS), "verbose": 0, "jit": "off", "batch_size": 8, **where}
        run = crankshaft.fit(model, POINTS, LABELS, epochs=epochs, callbacks=seen, **how)
        return [weight.tolist() for weight in model.get_weights()], run.history.history, seen[0].begun

    whole = fitted_by(5)
    fitted_by(3, run_dir=tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    assert fitted_by(5, run_dir=tmp_path) == whole


def batch_steps(folder) -> list[int]:
    """The steps of TensorBoard's losses of batches, in order of time."""
    found = []
    for path in sorted(folder.glob("train/*"), key=lambda each: each.stat().st_mtime):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            found += [event.step for value in event.summary.value if value.tag == "batch_loss"]
    return found


@pytest.mark.parametrize("fails", [False, True], ids=["within an epoch", "between epochs"])
def test_a_resumed_run_neither_skips_nor_repeats_a_callback(tmp_path, fails):
    """One stops within the third epoch; one fails there, and goes on from the end of the second."""
    alone = Halving()
    _, weights = fitted("ours", tf.keras.optimizers.SGD(0.4, 0.5), [alone])
    where = {"run_dir": tmp_path / "run", "checkpoint_every_steps": 10}
    board = {"log_dir": str(tmp_path / "board"), "update_freq": 1}
    with pytest.raises(RuntimeError, match="as if killed") if fails else contextlib.nullcontext():
        fitted("ours", tf.keras.optimizers.SGD(0.4, 0.5), [Halving(13, fails), callbacks.TensorBoard(**board)], **where)
    goes_on = Halving()
    run, resumed = fitted("ours", tf.keras.optimizers.SGD(0.4, 0.5), [goes_on, callbacks.TensorBoard(**board)], **where)
    assert resumed == weights
    assert goes_on.begun == alone.begun == 4
    np.testing.assert_allclose(run.history.history["rate"], [0.2, 0.1, 0.05, 0.025])
    again = [11, 12] if fails else []
    assert batch_steps(tmp_path / "board") == [*range(1, 13), *again, *range(13, 21)]


_PLACES = ["hook", "on_epoch_begin", "on_test_begin", "on_test_batch_end", "on_test_end", "on_epoch_end"]


@pytest.mark.slow
@pytest.mark.parametrize("place", _PLACES)
def test_a_stop_at_any_moment_of_an_epoch_leaves_the_history_of_an_undisturbed_run(tmp_path, place):
    """At each step, in each evaluation, at its end; and again as the resumed run comes there."""

    def fit(run_dir=None, stop=lambda *_: None):
        model = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(1, kernel_initializer="zeros")])
        model.compile("sgd", "mse", metrics=["mae"])
        callback = type("Stopping", (callbacks.Callback,), {} if place == "hook" else {place: stop})()
        return crankshaft.fit(
            *(model, POINTS[:24], LABELS[:24]),
            batch_size=8,
            epochs=2,
            validation_data=(POINTS[24:], LABELS[24:]),
            verbose=0,
            jit="off",
            callbacks=[callback],
            hooks=[every_steps(1, stop)] if place == "hook" else [],
            run_dir=run_dir,
        )

    expected, stops = fit(), 0
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # which a run that it has ended raises again
    try:
        for at in itertools.count():
            calls: list[int] = []

            def stop(*_, calls=calls, at=at, **__):
                calls.append(at)
                if len(calls) - at in (1, 2):
                    os.kill(os.getpid(), signal.SIGTERM)

            run = fit(tmp_path / str(at), stop)
            if len(calls) <= at:
                break
            while run.result["stop"] == "SIGTERM":
                stops, run = stops + 1, fit(tmp_path / str(at), stop)
            assert run.history.history == expected.history.history
            for name in ("eval_loss", "eval_mae"):
                assert run.history.column(name) == expected.history.column(name)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stops >= 2


@tf.keras.utils.register_keras_serializable()
class Masked(tf.keras.layers.Dense):
    """Multiplies its kernel by masks in variables that Keras does not list."""

    def build(self, input_shape):
        super().build(input_shape)
        self.mask = tf.Variable(tf.ones([3, 1]), trainable=False)
        self.masks = [tf.Variable(tf.ones([3, 1]), trainable=False)]

    def call(self, inputs):
        return tf.matmul(inputs, self.kernel * self.mask * self.masks[0]) + self.bias


WEIGHT: list[tf.keras.Variable] = []


def masked(loss=None):
    tf.keras.utils.set_random_seed(1)
    WEIGHT[:] = [tf.keras.Variable(1.0, trainable=False, name="share")]
    model = tf.keras.Sequential([tf.keras.Input([3]), Masked(1, name="masked")])
    model.compile(tf.keras.optimizers.SGD(0.1), loss or ["mse"], loss_weights=None if loss else [*WEIGHT])
    return model


class Prunes(callbacks.Callback):
    """Prunes in the first epoch, and halves the weight of the loss in each."""

    def on_epoch_end(self, epoch, logs=None):
        WEIGHT[0].assign(WEIGHT[0] / 2)
        if epoch == 0:
            layer = self.model.get_layer("masked")
            layer.mask.assign([[0.0], [1.0], [1.0]])
            layer.masks[0].assign([[1.0], [0.0], [1.0]])


@pytest.mark.parametrize("two", [pytest.param(False, marks=pytest.mark.slow), True], ids=["one device", "two replicas"])
def test_variables_that_keras_does_not_list_are_the_runs_and_those_of_its_checkpoints(tmp_path, two):
    how = {"batch_size": 20, "epochs": 3, "shuffle": False, "verbose": 0, "jit": "off", "ema_decay": 0.5}
    how |= {"strategy": "mirrored", "num_virtual_devices": 2} if two else {}

    def fit(folder, **more):
        return crankshaft.fit(masked, POINTS, LABELS, callbacks=[Prunes()], run_dir=tmp_path / folder, **how, **more)

    whole = fit("whole")
    fit("resumed", stop_at_step=2)
    resumed = fit("resumed")
    assert whole.history.history["loss"] == resumed.history.history["loss"]
    outputs = whole.predict(POINTS)
    for model in (whole.model, resumed.model, crankshaft.load_model(tmp_path / "whole")):
        np.testing.assert_array_equal(model(POINTS), outputs)
    third = np.asarray(whole.model.get_layer("masked").kernel)[2]
    np.testing.assert_allclose(outputs, POINTS[:, 2:] * third + whole.model.get_layer("masked").bias, rtol=1e-6)


def test_a_variable_that_a_loss_reads_from_outside_is_refused_as_it_is_saved(tmp_path):
    model = functools.partial(masked, lambda labels, outputs: WEIGHT[0] * tf.reduce_mean((labels - outputs) ** 2, -1))
    how = {"batch_size": 20, "epochs": 1, "verbose": 0, "callbacks": [Prunes()]}
    with pytest.raises(
        crankshaft.UsageError, match=r"reads share \[\], which has changed since .*attribute of the model"
    ):
        crankshaft.fit(model, POINTS, LABELS, run_dir=tmp_path / "run", **how)
    crankshaft.fit(model, POINTS, LABELS, **how)
