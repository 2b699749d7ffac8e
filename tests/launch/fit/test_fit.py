"""`crankshaft.fit` beside Keras's own `fit` in this process: the same weights, history, metrics after 50 steps."""

from __future__ import annotations

import functools
import json
import os
import signal

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft.engine.checkpoints.manifest import with_digest
from crankshaft.engine.errors import CheckpointError
from tests.logical_cpus import make_four
from tests.runs import steps

keras = tf.keras
layers = keras.layers
EXAMPLES, BATCH, EPOCHS = 70, 16, 10  # five steps an epoch, the last of six examples


def sample(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=(EXAMPLES, *shape)).astype("float32")


def classes(count, seed=1):
    return np.random.default_rng(seed).integers(0, count, EXAMPLES)


make_four()  # before anything touches the devices
WEIGHTS = np.random.default_rng(2).uniform(size=EXAMPLES).astype("float32")


def mlp(optimizer=None, **compiled):
    model = keras.Sequential(
        [keras.Input([8]), layers.Dense(16, "relu", kernel_regularizer="l2"), layers.Dense(3, "softmax")]
    )
    how = {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"], "weighted_metrics": ["accuracy"]}
    model.compile(optimizer or "adam", **{**how, **compiled})
    return model


class Each(keras.callbacks.Callback):
    """Calls a function as an epoch ends."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def on_epoch_end(self, epoch, logs=None):
        self.call(epoch, logs)


def mlp_data(**more):
    return {"x": sample(8), "y": classes(3), **more}


def lstm():
    """Its mask reaches the loss, whose count is then of the tokens that are not padding."""
    model = keras.Sequential(
        [
            keras.Input([6], dtype="int32"),
            layers.Embedding(30, 4, mask_zero=True),  # rows that no batch has decay too
            layers.LSTM(5, return_sequences=True),
        ]
    )
    model.add(layers.Dense(1))
    model.compile(keras.optimizers.SGD(0.1, 0.9, weight_decay=0.1), "mse", metrics=["mae"], weighted_metrics=["mae"])
    return model


def lstm_data(**more):
    tokens = np.random.default_rng(3).integers(0, 12, [EXAMPLES, 6])
    return {"x": np.where(np.arange(6) < classes(6, 4)[:, None] + 1, tokens, 0), "y": sample(6, 1), **more}


def many():
    one, other = keras.Input([4], name="one"), keras.Input([3], name="other")
    both = layers.Concatenate()([one, other])
    hidden = layers.Dense(8, "tanh", activity_regularizer=keras.regularizers.L2(0.01))(both)
    heads = [layers.Dense(size, name=name)(hidden) for name, size in (("a", 1), ("b", 2), ("c", 3))]
    model = keras.Model([one, other], heads)
    model.compile(
        keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.5),
        loss={"a": "mse", "b": keras.losses.Huber(), "c": keras.losses.CategoricalCrossentropy(from_logits=True)},
        loss_weights={"a": 1.0, "b": 0.5, "c": 2.0},
        metrics={"a": ["mae"], "c": ["accuracy", keras.metrics.TopKCategoricalAccuracy(2)]},
        weighted_metrics={"b": ["mse"]},
    )
    return model


def even(part):
    """80 examples: Keras counts an uneven last batch as a whole one in the losses of outputs, and we its examples."""
    return tf.nest.map_structure(lambda x: np.concatenate([x, x[:10]]), part)


def many_data(**more):
    y = {"a": sample(1, seed=5), "b": sample(2, seed=6), "c": np.eye(3, dtype="float32")[classes(3)]}
    return even({"x": {"one": sample(4), "other": sample(3, seed=7)}, "y": y, **more})


def many_in_lists():
    data = many_data()
    return {name: list(each.values()) for name, each in data.items()}


class Transformers(keras.optimizers.schedules.LearningRateSchedule):
    """The schedule of TensorFlow's Transformer tutorial, which has no `get_config`."""

    def __init__(self, width, warmup_steps):
        self.width, self.warmup_steps = tf.cast(width, tf.float32), warmup_steps

    def __call__(self, step):
        step = tf.cast(step, tf.float32) + 1
        return tf.math.rsqrt(self.width) * tf.minimum(tf.math.rsqrt(step), step * self.warmup_steps**-1.5)


def averaged():
    rate = Transformers(64, 20)
    return mlp(keras.optimizers.Nadam(rate, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=7, clipvalue=0.01))


def summed():
    return mlp(keras.optimizers.Adagrad(clipnorm=0.3), loss=keras.losses.SparseCategoricalCrossentropy(reduction="sum"))


def of_the_weights():
    return mlp(loss=keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight"))


def text():
    """Words looked up within the model, averaged."""
    words = layers.TextVectorization(output_sequence_length=6, vocabulary=["bad", "dull", "good", "fine"])
    model = keras.Sequential([keras.Input([], dtype="string"), words, layers.Embedding(10, 4)])
    model.add(layers.GlobalAveragePooling1D())
    model.add(layers.Dense(1, "sigmoid"))
    model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", metrics=["accuracy"])
    return model


def text_data():
    words = np.array([["bad", "dull"], ["good", "fine"]])
    chosen = words[classes(2)[:, np.newaxis], np.random.default_rng(4).integers(0, 2, [EXAMPLES, 4])]
    return {"x": tf.constant([" ".join(each) for each in chosen]), "y": classes(2)}


def segmentation():
    """A class for each pixel, by convolutions down and up again."""
    inputs = keras.Input([8, 8, 1])
    down = layers.BatchNormalization()(layers.Conv2D(8, 3, strides=2, padding="same", activation="relu")(inputs))
    up = layers.Concatenate()([inputs, layers.Conv2DTranspose(4, 3, strides=2, padding="same")(down)])
    model = keras.Model(inputs, layers.Conv2D(2, 1, activation="softmax")(up))
    metrics = [keras.metrics.MeanIoU(2, "iou", sparse_y_pred=False)]
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=metrics)
    return model


CASES = {
    "mlp": (mlp, mlp_data),
    "class weights": (mlp, lambda: mlp_data(class_weight={0: 0.5, 2: 3.0})),
    "sample weights": (mlp, lambda: mlp_data(sample_weight=WEIGHTS)),
    "average, schedule, clipped values": (averaged, mlp_data),
    "sums, clipped norms": (summed, mlp_data),
    "mean by weights": (of_the_weights, lambda: mlp_data(sample_weight=WEIGHTS)),
    "lstm with masks": (lstm, lstm_data),
    "masks and weights": (lstm, lambda: lstm_data(sample_weight=WEIGHTS[:, None])),
    "two inputs, three outputs": (many, many_data),
    "weights of steps": (lstm, lambda: lstm_data(sample_weight=np.stack([WEIGHTS] * 6, 1) * np.arange(6))),
    "weights of outputs": (
        many,
        lambda: {**many_in_lists(), "sample_weight": [*map(even, (WEIGHTS, 2 * WEIGHTS, WEIGHTS[::-1]))]},
    ),
    "weights of an output": (many, lambda: {**many_in_lists(), "sample_weight": [None, even(WEIGHTS), None]}),
    "lists, weighted": (many, lambda: {**many_in_lists(), "sample_weight": even(WEIGHTS)}),
    "text": (text, text_data),
    "segmentation": (segmentation, lambda: {"x": sample(8, 8, 1), "y": (sample(8, 8, 1) > 0).astype("int32")}),
}


HOW = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
SET_AT_END = "callbacks have set weights as training ended"
TWO = {"strategy": "mirrored", "num_virtual_devices": 2}


def by_us(model, **how):
    return crankshaft.fit(model, jit="off", **how).history


def trained(fit, make, data, **more):
    keras.utils.set_random_seed(1)
    model = make()
    evaluated = (data["x"], data["y"], *([data["sample_weight"]] if "sample_weight" in data else []))
    return model, fit(model, **{**data, **HOW, "epochs": EPOCHS, "validation_data": evaluated, **more})


def both(make, data, callbacks=lambda name: [], **more):
    """[(model, history)] as Keras fits it, and as we do, with callbacks of the name "theirs" and "ours"."""
    theirs = trained(keras.Model.fit, make, data, callbacks=callbacks("theirs"))
    return [theirs, trained(lambda model, **how: by_us(model, **how, **more), make, data, callbacks=callbacks("ours"))]


def assert_close(ours, theirs, rtol, atol):
    for one, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)


def compare(theirs, ours, tolerance):
    """Two pairs of a model and its history."""
    (model, expected), (mine, history) = theirs, ours
    assert history.epoch == expected.epoch
    assert sorted(history.history) == sorted(expected.history)
    for name, values in expected.history.items():
        np.testing.assert_allclose(history.history[name], values, rtol=tolerance, atol=tolerance, err_msg=name)
    assert_close(mine, model, tolerance, tolerance)


# One for each kind of loss, weight and input; the others, of which these are parts, are slow tests. The mlp is in
# test_callbacks_steer_a_run_as_they_steer_keras, weights of classes in test_evaluations_are_of_what_keras_evaluates.
QUICK = ("average, schedule, clipped values", "lstm with masks", "two inputs, three outputs", "text")


def _marks(case):
    return [pytest.mark.slow] * (case not in QUICK) + [pytest.mark.thorough] * (case != "text")


@pytest.mark.parametrize("case", [pytest.param(case, marks=_marks(case)) for case in CASES])
def test_fit_trains_as_keras_does(case):
    make, data = CASES[case]
    theirs, ours = both(make, data())
    compare(theirs, ours, 1e-6)
    assert int(ours[0].optimizer.iterations) == 50


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["sums, clipped norms", pytest.param("masks and weights", marks=pytest.mark.slow)])
def test_two_replicas_train_as_one_device(case):
    make, data = CASES[case]
    compare(*both(make, data(), **TWO), 1e-5)


class Enough(Exception):
    """What a search's callback raises to end a trial."""


@pytest.mark.thorough
def test_what_a_callback_raises_reaches_the_caller_and_the_model_keeps_its_weights():
    def end(epoch, logs):
        if epoch == 3:
            raise Enough

    models = []
    for fit, more in ((keras.Model.fit, {}), (crankshaft.fit, {"jit": "off", **TWO})):
        keras.utils.set_random_seed(1)
        models.append(mlp())
        with pytest.raises(Enough):
            fit(models[-1], **mlp_data(), **HOW, epochs=9, callbacks=[Each(end)], **more)
    assert_close(*models, 1e-5, 1e-6)
    assert int(models[1].optimizer.iterations.numpy()) == 4 * 5


@pytest.mark.slow
def test_a_second_fit_goes_on_with_the_loss_scale():
    """Callbacks see it, and may set it, on replicas too."""

    class Sees(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            optimizer = self.model.optimizer
            scales.append((float(optimizer.dynamic_scale.numpy()), int(optimizer.step_counter.numpy())))
            if len(scales) == 4:
                optimizer.dynamic_scale.assign(2.0)

    two = functools.partial(by_us, strategy="mirrored", num_virtual_devices=2)
    for fit in (keras.Model.fit, by_us, two):
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), 4.0, dynamic_growth_steps=4)
        model, scales = mlp(scaled), []
        for _ in range(2):  # of ten steps
            fit(model, **mlp_data(batch_size=BATCH, epochs=2, verbose=0, callbacks=[Sees()]))
            scales.append((float(model.optimizer.dynamic_scale), int(model.optimizer.step_counter)))
        assert scales == [(8.0, 1), (16.0, 2), (16.0, 2), (32.0, 3), (2.0 * 2**2, 0), (8.0, 0)]


def steering():
    """Callbacks that steer a run, and one of one's own that sees each batch."""

    class Own(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.seen = []

        def on_train_begin(self, logs=None):
            self.seen.append((self.params["epochs"], self.params["steps"], self.model.count_params()))

        def on_epoch_begin(self, epoch, logs=None):
            self.seen.append(("begin", epoch))

        def on_train_batch_end(self, batch, logs=None):
            self.seen.append((batch, sorted(logs), round(float(self.model.optimizer.learning_rate), 6)))

        def on_test_end(self, logs=None):
            self.seen.append(("test_end", sorted(logs)))

        def on_epoch_end(self, epoch, logs=None):
            self.seen.append((epoch, sorted(logs), round(float(np.sum(self.model.get_weights()[0])), 4)))

    def rate(epoch, rate):
        return 0.02 if epoch < 3 else rate

    return [
        keras.callbacks.LearningRateScheduler(rate),
        keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1, factor=0.5, min_delta=0.02),
        keras.callbacks.EarlyStopping(monitor="loss", mode="max", patience=5, restore_best_weights=True),
        Own(),
    ]


def of_averages():
    keras.utils.set_random_seed(1)
    return mlp(keras.optimizers.SGD(0.3, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=None))


@pytest.mark.thorough
def test_with_use_ema_a_run_ends_with_the_averages_as_keras_does():
    theirs, expected = trained(keras.Model.fit, of_averages, mlp_data())
    evaluated = tuple(mlp_data().values())
    run = crankshaft.fit(of_averages, **mlp_data(), **HOW, epochs=EPOCHS, validation_data=evaluated, jit="off", **TWO)
    assert_close(run.model, theirs, 1e-5, 1e-5)
    np.testing.assert_allclose(run.predict(sample(8)), theirs.predict(sample(8), verbose=0), rtol=1e-5, atol=1e-5)
    history = run.history.history  # of the weights that were trained, as in Keras
    np.testing.assert_allclose(history["val_loss"], expected.history["val_loss"], rtol=1e-5)
    assert run.result["eval"] == pytest.approx(run.evaluate())
    found = theirs.evaluate(*evaluated, verbose=0, return_dict=True)
    assert run.result["eval"]["accuracy"] == pytest.approx(found["accuracy"])
    assert run.result["eval"]["loss"] != pytest.approx(history["val_loss"][-1], rel=1e-3)


@pytest.mark.thorough
def test_what_is_loaded_from_a_run_with_use_ema_has_its_averages(tmp_path, caplog):
    evaluated = tuple(mlp_data().values())
    how = {"run_dir": str(tmp_path / "run"), "validation_data": evaluated}
    run = crankshaft.fit(of_averages, **mlp_data(), **HOW, epochs=EPOCHS, jit="off", **how)
    assert SET_AT_END not in caplog.text
    trainer, x = crankshaft.KerasTrainer.for_model(of_averages), sample(8)
    expected = run.predict(x)
    for chosen in (None, trainer):
        loaded = crankshaft.load_model(how["run_dir"], trainer_class=chosen)
        np.testing.assert_allclose(loaded.predict(x, verbose=0), expected, rtol=1e-5)
    trained = crankshaft.load_model(how["run_dir"], str(run.step)).predict(x, verbose=0)  # of a step, its own weights
    assert np.abs(trained - expected).max() > 1e-3
    again = functools.partial(crankshaft.run, trainer, data=(evaluated, evaluated), mode="eval", run_dir=how["run_dir"])
    assert again().result["eval"] == pytest.approx(run.result["eval"])
    found = again(eval_checkpoint=str(run.step)).result["eval"]
    assert found["loss_with_penalties"] == pytest.approx(run.history.history["val_loss"][-1])
    # An earlier version did not note of which weights averages are.
    manifest = tmp_path / f"run/checkpoints/ckpt-{run.step}.manifest.json"
    record = json.loads(manifest.read_text())
    del record["about"]["final_averages"], record["sha256"]
    manifest.write_text(json.dumps(with_digest(record)))
    with pytest.raises(CheckpointError, match="by a version that did not note of which weight each is; continue the"):
        crankshaft.load_model(how["run_dir"])


@pytest.mark.thorough
def test_with_use_ema_the_best_weights_of_a_callback_stay():
    stopping = {"mode": "max", "patience": 2, "restore_best_weights": True}
    theirs, ours = both(of_averages, mlp_data(), lambda name: [keras.callbacks.EarlyStopping("loss", **stopping)])
    compare(theirs, ours, 1e-5)
    assert len(ours[1].epoch) < EPOCHS
    seen = []

    def look(epoch, logs):
        before = looking.model.get_weights()[0]
        with looking.model.averaged_weights():
            seen.append((before, looking.model.get_weights()[0].copy()))
        np.testing.assert_array_equal(looking.model.get_weights()[0], before)

    looking = Each(look)
    ours, _ = trained(by_us, of_averages, mlp_data(), callbacks=[looking])
    assert len(seen) == EPOCHS
    np.testing.assert_array_equal(seen[-1][1], ours.get_weights()[0])  # with which the run ends
    assert np.abs(seen[-1][0] - seen[-1][1]).max() > 1e-3


@pytest.mark.thorough
def test_a_metric_by_class_is_a_vector_in_the_history_and_the_logs(tmp_path):
    def make():
        return mlp(loss="categorical_crossentropy", metrics=[keras.metrics.F1Score(average=None, name="f1")])

    data = {"x": sample(8), "y": keras.utils.to_categorical(classes(3), 3)}
    theirs, ours = both(make, data, lambda name: [keras.callbacks.CSVLogger(str(tmp_path / name))])
    assert np.shape(ours[1].history["val_f1"]) == (EPOCHS, 3)
    compare(theirs, ours, 1e-5)
    rows = [(tmp_path / name).read_text().splitlines()[0] for name in ("theirs", "ours")]
    assert rows[0] == rows[1]


def test_callbacks_steer_a_run_as_they_steer_keras(tmp_path):
    seen, kept = [], []

    def callbacks(name):
        steered = steering()
        seen.append(steered[-1].seen)
        return [
            *steered,
            keras.callbacks.CSVLogger(str(tmp_path / f"{name}.csv")),
            keras.callbacks.ModelCheckpoint(str(tmp_path / f"{name}.keras"), save_best_only=True),
            keras.callbacks.TensorBoard(str(tmp_path / name)),
            keras.callbacks.LambdaCallback(on_train_end=lambda logs, of=steered[-1]: of.seen.append(sorted(logs))),
        ]

    theirs, ours = both(mlp, mlp_data(), callbacks)
    assert len(theirs[1].epoch) < EPOCHS  # it was stopped
    compare(theirs, ours, 1e-6)
    assert seen[0] == seen[1]
    kept = [keras.models.load_model(tmp_path / f"{name}.keras") for name in ("theirs", "ours")]
    assert_close(*kept, 1e-6, 1e-6)
    assert int(kept[0].optimizer.iterations) == int(kept[1].optimizer.iterations)
    assert list((tmp_path / "ours").rglob("*.tfevents*"))
    lines = [(tmp_path / f"{name}.csv").read_text().splitlines() for name in ("theirs", "ours")]
    assert lines[0][0] == lines[1][0]
    assert len(lines[0]) == len(lines[1])


class Counted(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.epochs = 0

    def on_epoch_end(self, epoch, logs=None):
        self.epochs += 1

    def get_state(self):
        return {"epochs": self.epochs}

    def set_state(self, state):
        self.epochs = state["epochs"]


@pytest.mark.thorough
def test_a_resumed_run_goes_on_with_its_callbacks(tmp_path, caplog):
    class Forgetful(keras.callbacks.Callback):
        """Has an attribute that can't be saved."""

        def on_train_begin(self, logs=None):
            self.seen = {object()}

    def run(folder, epochs):
        keras.utils.set_random_seed(1)
        counted, plateau = Counted(), keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=1.0)
        model, x, y = mlp(), sample(8), classes(3)
        done = crankshaft.fit(
            *(model, x, y, BATCH, epochs, 0, [counted, plateau, Forgetful()]), run_dir=str(tmp_path / folder), jit="off"
        )
        return model, done.history, counted

    at_once, expected, _ = run("whole", 4)
    run("parts", 2)
    model, history, counted = run("parts", 4)
    assert counted.epochs == 4
    assert "Keras callback Forgetful begins again" in caplog.text
    compare((at_once, expected), (model, history), 0.0)


@pytest.mark.thorough
def test_a_checkpoint_s_manifest_is_as_long_after_many_epochs_and_a_run_that_goes_back_has_its_history(tmp_path):
    class Keeps(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs):
            logs["by_class"] = np.array([epoch, 0.1], np.float32)

    def fit(epochs, folder="run"):
        keras.utils.set_random_seed(1)
        model, x, y = mlp(), sample(8), classes(3)
        run_dir = str(tmp_path / folder)
        return crankshaft.fit(*(model, x, y, BATCH, epochs, 0, [Keeps()]), run_dir=run_dir, jit="off").history

    def size():
        return max((tmp_path / "run/checkpoints").glob("*.manifest.json"), key=os.path.getmtime).stat().st_size

    fit(2)
    before = size()
    fit(3)
    history = fit(40)
    assert size() - before < 40  # digits of the step and of counts
    expected = fit(40, "at_once")
    assert history.epoch == expected.epoch == [*range(40)]
    assert history.history.keys() == expected.history.keys()
    for name, values in expected.history.items():
        np.testing.assert_array_equal(history.history[name], values)


def ends(how=None):
    """Ends the fourth epoch, once, by an error or a signal; before, it shows a value that is best in the second."""

    def at(epoch, logs):
        logs["made"] = -abs(epoch - 1)
        if epoch == 3 and how:
            how()

    return Each(at)


def fails():
    raise ValueError("the power is cut")


def interrupts():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.thorough
@pytest.mark.parametrize("how", [pytest.param(fails, marks=pytest.mark.slow), interrupts])
@pytest.mark.usefixtures("answers_ctrl_c")
def test_a_run_that_was_ended_comes_to_the_best_weights_of_one_that_was_not(tmp_path, how, caplog):
    def fitted(folder, how=None):
        keras.utils.set_random_seed(1)
        model = mlp()
        stopping = keras.callbacks.EarlyStopping("made", mode="max", patience=4, restore_best_weights=True)
        run = crankshaft.fit(
            *(model, sample(8), classes(3), BATCH, EPOCHS, 0, [ends(how), stopping]),
            run_dir=str(tmp_path / folder),
            checkpoint_every_steps=5,
            jit="off",
        )
        return model, run.history, stopping, run.stop

    whole, expected, best, stop = fitted("whole")
    assert best.stopped_epoch == 5
    assert SET_AT_END in caplog.text  # which the loaded model lacks
    with pytest.raises(ValueError if how is fails else KeyboardInterrupt):
        fitted("parts", how)
    for _ in range(2):  # the second time there is nothing left to do
        parts, history, again, stopped = fitted("parts")
        assert (again.best_epoch, again.stopped_epoch, stopped) == (1, 5, stop)
        compare((whole, expected), (parts, history), 0.0)


@pytest.mark.thorough
@pytest.mark.usefixtures("answers_ctrl_c")
def test_ctrl_c_raises_once_weights_and_history_are_set(capfd):
    model = mlp()
    before = model.get_weights()
    with pytest.raises(KeyboardInterrupt):
        crankshaft.fit(model, sample(8), classes(3), BATCH, EPOCHS, 2, [ends(interrupts)], jit="off")
    assert len(model.history.history["loss"]) == 4
    assert not np.array_equal(model.get_weights()[0], before[0])
    assert "SIGINT; the model has the weights trained so far, and nothing else is kept" in capfd.readouterr().out


@pytest.mark.thorough
def test_a_backups_folder_is_the_runs_until_its_end(tmp_path, caplog):
    def fitted(how=None, **more):
        keras.utils.set_random_seed(1)
        model, backup = mlp(), keras.callbacks.BackupAndRestore(str(tmp_path / "backup"), **more.pop("backup", {}))
        run = crankshaft.fit(*(model, sample(8), classes(3), BATCH, EPOCHS, 0, [ends(how), backup]), jit="off", **more)
        return model, run

    whole, run = fitted()
    assert "run_dir=" in caplog.text
    assert not (tmp_path / "backup").exists()
    with pytest.raises(ValueError, match="the power is cut"):
        fitted(fails)
    assert steps(tmp_path / "backup")[-1] == 3 * 5
    parts, again = fitted()
    assert again.result["resumed_from"] == 3 * 5
    compare((whole, run.history), (parts, again.history), 0.0)
    assert not (tmp_path / "backup").exists()
    _, kept = fitted(backup={"delete_checkpoint": False, "save_freq": 7})
    assert steps(tmp_path / "backup")[-2:] == [49, 50]
    _, other = fitted(run_dir=str(tmp_path / "run"))
    assert other.run_dir == str(tmp_path / "run")
    assert kept.result["step"] == steps(tmp_path / "run")[-1] == 50


# -- forms of data


class Batches(keras.utils.PyDataset):
    def __init__(self, *parts):
        super().__init__()
        self.parts = parts

    def __len__(self):
        return -(-len(tf.nest.flatten(self.parts)[0]) // BATCH)

    def __getitem__(self, number):
        rows = slice(number * BATCH, (number + 1) * BATCH)
        return tf.nest.map_structure(lambda x: x[rows], self.parts)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(
            {
                "validation_data": (sample(8), classes(3)),
                "validation_freq": 2,
                "validation_steps": 2,
                "initial_epoch": 4,
            },
            marks=pytest.mark.slow,
        ),
        # Examples that are split off have no weights of their classes.
        {"class_weight": {0: 0.2, 1: 5.0}, "validation_split": 0.3, "initial_epoch": 5},
        {"validation_data": (sample(8), classes(3)), "validation_freq": [1, 3]},
    ],
    ids=["every second epoch, of two batches", "split off", "listed"],
)
def test_evaluations_are_of_what_keras_evaluates(how):
    histories = []
    for fit in (keras.Model.fit, by_us):
        keras.utils.set_random_seed(1)
        histories.append(fit(mlp(), **mlp_data(), **HOW, **how, epochs=8))
    theirs, ours = histories
    assert ours.epoch == theirs.epoch
    for name, values in theirs.history.items():
        np.testing.assert_allclose(ours.history[name], values, rtol=1e-6, err_msg=name)
    assert len(ours.history["val_loss"]) == (2 if "validation_freq" in how else 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("by_word", "how"),
    [(False, {}), (True, TWO)],
    ids=["one device", "by word, two replicas"],
)
def test_each_batch_of_padded_batch_has_a_length_of_its_own(by_word, how):
    lengths = [2, 3, 5, 4, 9]  # batches of 4 x 5 and 1 x 9

    def sentences():
        for length in lengths:
            words = np.arange(1, length + 1)
            yield words, words % 3 if by_word else np.float32([length])

    def model():
        keras.utils.set_random_seed(1)
        made = [layers.Embedding(10, 4, mask_zero=True), layers.GRU(3, return_sequences=by_word), layers.Dense(3)]
        model = keras.Sequential([keras.Input([None]), *made] if by_word else made)
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True) if by_word else "mse")
        return model

    words = tf.TensorSpec([None], tf.int64)
    form = (words, words if by_word else tf.TensorSpec([1], tf.float32))
    data = tf.data.Dataset.from_generator(sentences, output_signature=form).padded_batch(4)
    theirs, ours = model(), model()
    expected = theirs.fit(data, epochs=2, validation_data=data, verbose=0)
    compare((theirs, expected), (ours, by_us(ours, x=data, epochs=2, validation_data=data, verbose=0, **how)), 1e-6)
    if not by_word:
        of_one_length = (np.ones([3, 6], np.int64), np.ones([3, 1], np.float32))
        run = crankshaft.fit(ours, data, validation_data=of_one_length, verbose=0)
        assert run.evaluate(of_one_length) == {"loss": pytest.approx(run.history.history["val_loss"][0], rel=1e-6)}
        for same in (data, tf.data.Dataset.from_generator(sentences, output_signature=form)):
            assert run.evaluate(same)["loss"] == pytest.approx(ours.evaluate(data, verbose=0), rel=1e-5)
            np.testing.assert_allclose(run.predict(same), ours.predict(data, verbose=0), atol=1e-6)


@pytest.mark.thorough
def test_a_class_that_a_split_of_sorted_examples_leaves_untrained_is_named(caplog):
    x, y = np.ones([40, 8], np.float32), np.repeat([0, 1, 2, 2], 10)
    crankshaft.fit(mlp(), x, y, validation_split=0.5, verbose=0, jit="off")
    (line,) = [each.message for each in caplog.records if "class" in each.message]
    assert line == (
        "the evaluation data alone has examples of class 2, and the training data alone has examples of class 0, 1, so "
        "what is not in both is not trained, or not evaluated; shuffle the examples before they are divided "
        "(validation_split takes the last ones)"
    )
    caplog.clear()
    crankshaft.fit(mlp(), x, y, validation_data=(x, y), verbose=0, jit="off")
    assert "class" not in caplog.text


class LastBatch(keras.callbacks.Callback):
    """Notes each batch's loss."""

    def get_state(self):
        return {}  # a resumed run has a list of its own

    def set_state(self, state):
        pass

    def on_train_begin(self, logs=None):
        self.losses = []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "form", ["dataset", "frame", *(pytest.param(form, marks=pytest.mark.slow) for form in ("PyDataset", "arrays"))]
)
def test_a_function_of_data_trains_as_the_data_itself(tmp_path, form):
    """Batch size, order and columns are those of what it returns, also in a run that is resumed."""
    x, y = np.arange(24, dtype="float32")[:, None] / 24, np.ones([24, 1], "float32")

    def data():
        return {
            "dataset": lambda: tf.data.Dataset.from_tensor_slices((x, y)).batch(8),
            "PyDataset": lambda: Batches(x, y),
            "arrays": lambda: (x, y),
            "frame": lambda: (pytest.importorskip("pandas").DataFrame(x, columns=["height"]), y),
        }[form]()

    def trained(x, **how):
        keras.utils.set_random_seed(1)
        model, noted = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)]), LastBatch()
        model.compile(keras.optimizers.SGD(0.1), "mse")
        how |= {"steps_per_epoch": 4} if form == "arrays" else {}
        run = crankshaft.fit(model, *x, epochs=2, verbose=0, callbacks=[noted], jit="off", **how)
        return noted.losses, run

    itself, _ = trained(data() if isinstance(data(), tuple) else (data(),))
    returned, run = trained((data,), run_dir=tmp_path / "run")
    assert returned == itself
    assert run.data_info.preprocessing.array == (("height",) if form == "frame" else ())
    assert trained((data,), run_dir=tmp_path / "run")[0] == []
    if form == "dataset":
        with pytest.raises(crankshaft.UsageError, match="batch_size=6, and x comes in batches of 8"):
            trained((data,), batch_size=6)
        with pytest.raises(crankshaft.UsageError, match="accumulate_steps=9 is more than the 8 examples"):
            trained((data,), accumulate_steps=9)
        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(6)
        with pytest.raises(crankshaft.UsageError, match="batch_size=6 does not divide over 4 replicas"):
            trained((lambda: batches,), strategy="mirrored", num_virtual_devices=4)
