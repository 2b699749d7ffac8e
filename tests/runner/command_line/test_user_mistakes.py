"""Mistakes that only data, a run or a machine shows, TensorFlow running: one line all the same.

Mistakes in a user's own trainer and hooks, TensorFlow running: one line all the same.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Trainer, UsageError, load_model, mean, minimize, step_context
from crankshaft.engine import devices
from crankshaft.engine.hooks import Hook, every_epoch, every_steps
from crankshaft.engine.strategies.replicated import eval_batch_size
from crankshaft.runner.failures import EXIT_DIVERGED
from tests.launch.line import FEATURES, LABELS, RUN, Line, data, location_of
from tests.processes import assert_says
from tests.waiting import PATIENCE

X, Y = FEATURES, LABELS
WORDS = np.where(Y > 0, "large", "small")


def whole() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y))


# What the data function returns, and what the line says: what is wrong and the cure. What one form of data can't be:
# engine/data/test_entry.py.
DATA = [
    (lambda: None, "the data function gave None; return (train, eval)"),
    (lambda: tuple(range(10)), "the data function gave 10 values; return (train, eval)"),
    (
        lambda: ((WORDS[:, None], Y),) * 2,
        "features holds strings, and Line computes with them as with numbers; look them up",
    ),
    (lambda: (whole().repeat(), whole()), "never ends ... dataset.take"),
]


@pytest.mark.parametrize("row", range(len(DATA)))
def test_data_that_cannot_be_used_is_described(inside, row):
    given, says = DATA[row]
    inside(*RUN, trainer=Line, data=given).refused(says)


SMALL = "--input=synthetic --input_arg=examples=32 --input_arg=classes=3 --input_arg=shape="
ALONE = lambda: ((X, Y), None)  # noqa: E731
# Flags, the data if it is none of an input, and what the line says: the flag, the value, the cure.
FLAGS = [
    ("--model=cnn", data, "model=cnn is given, but this script trains Line"),
    ("--monitor=eval_acuracy --early_stopping=patience=1", data, "monitor=eval_acuracy ... use one of eval_loss"),
    ("--monitor=eval_acuracy", data, "monitor=eval_acuracy ... use one of eval_loss"),
    ("--eval_every_steps=2", ALONE, "eval_every_steps=2 needs evaluation data, and the data has none; return (train"),
    ("--restore_best", ALONE, "restore_best needs evaluation data, and the data has none; return (train, eval)"),
    (
        "--early_stopping=patience=2",
        ALONE,
        "early_stopping watches monitor=eval_loss ... the run has no evaluation data; use monitor=train_loss",
    ),
    ("--monitor=eval_accuracy", ALONE, "monitor=eval_accuracy, and ... no evaluation data; use monitor=train_"),
    ("--validation_split=1", ALONE, "validation_split=1.0 of 32 examples leaves 0 to train on and 32 to evaluate"),
    ("--validation_split=0.2", data, "validation_split=0.2 takes evaluation data from ... and the data has its own"),
    ("--validation_split=0.2", lambda: (whole(), None), "=0.2 divides arrays ... return (dataset.skip(n),"),
    ("--model=logistic", data, "logistic needs num_classes ... float32, -2.0 ... ; give (train, eval, num_classes),"),
    ("--model=logistic", lambda: (({"a": X, "b": X}, Y), None, 2), "logistic takes one array ... (a, b); give one"),
    ("--model=logistic", lambda: ((X,), (X,), 2), "logistic needs labels ... return (features, labels) for each split"),
    (f"--model=logistic {SMALL}8,8,1 --model_arg=class_weight=1,2", None, "class_weight=1,2 ... each of the 3 classes"),
    (f"--model=mlp {SMALL}8,8,1 --model_arg=class_weight=1,-1,2", None, "class_weight=1,-1,2 ... each of the 3"),
    (f"--model=cnn {SMALL}8,8,1 --model_arg=class_weight=2", None, "class_weight=2 ... each of the 3 classes"),
    (f"--model=resnet {SMALL}8,8,1 --model_arg=class_weight=a,b,c", None, "class_weight=a,b,c ... each of the 3"),
    (f"--model=cnn {SMALL}3,3,1", None, "output size would be zero or negative"),
]


@pytest.mark.parametrize("row", range(len(FLAGS)), ids=[flags for flags, *_ in FLAGS])
def test_a_flag_that_does_not_fit_the_data_or_the_model_is_one_line(inside, row):
    flags, given, says = FLAGS[row]
    own = given and (Line if "=logistic" not in flags else None)
    outcome = inside(*RUN, *flags.split(), trainer=own, data=given)
    outcome.refused(says)
    assert "\x1b" not in outcome.error  # as Keras writes


@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="there is a GPU")
def test_mirrored_without_a_gpu_says_how_to_have_replicas(inside):
    inside(*RUN, "--strategy=mirrored", trainer=Line, data=data).refused("found no GPU; use num_virtual_devices=N")


def test_an_export_without_a_model_says_what_is_served(inside, tmp_path):
    class Named(Line):
        def build(self):
            super().build()
            self.line = self.model
            del self.model

        def train_step(self, batch):
            return {"loss": self.loss(self.line(batch[0]), batch)}

        eval_step = train_step

    inside(*RUN, "--mode=train", f"--run_dir={tmp_path}", trainer=Named, data=data).ok()
    outcome = inside("--mode=export", f"--run_dir={tmp_path}", trainer=Named, data=data)
    outcome.refused("mode=export serves Named.model, which is missing")


@pytest.mark.parametrize(
    ("prints", "says"), [("[N/A]", "invalid literal"), (None, "No such file"), ("", "empty")], ids=str
)
def test_a_gpu_is_split_by_what_the_driver_says_is_free(prints, says):
    assert devices.free_gpu_memory_mb(("printf", "81000\\n79000\\n")) == 79000
    with pytest.raises(UsageError) as failed:
        devices.free_gpu_memory_mb(("no-such-program",) if prints is None else ("printf", prints))
    assert_says(str(failed.value), f"{says} ... leave num_virtual_devices out")


def test_an_evaluation_batch_of_one_shape_divides_over_the_replicas():
    assert eval_batch_size(360, 512, 8) == 360
    assert eval_batch_size(1000, 100, 8) == 40
    assert eval_batch_size(997, 100, 8) == 96  # a prime: its last 37 are left out
    assert eval_batch_size(997, 3, 8) == 8


@pytest.mark.parametrize(
    ("error", "code"),
    [(FileNotFoundError(2, "No such file or directory", "no/such.npy"), 2), (ConnectionResetError(104, "Reset"), 1)],
)
def test_a_bug_in_the_data_function_names_its_place_and_a_network_may_be_up_again(inside, error, code):
    def broken():
        raise error

    outcome = inside(*RUN, trainer=Line, data=broken)
    assert outcome.code == code
    assert_says(outcome.error, f"{error} ... {location_of(broken)}")


def test_a_failed_run_writes_its_error_as_its_result_and_a_mistake_before_it_none(inside, tmp_path):
    def fails(status, means):
        if status.step == 3:
            raise ConnectionError("the tracker is down")

    def result():
        return json.loads((tmp_path / "result.json").read_text())

    flags = (*RUN, f"--run_dir={tmp_path}")
    assert inside(*flags, trainer=Line, data=lambda: 1 / 0).code == 2
    assert not (tmp_path / "result.json").exists()
    failed = inside(*flags, trainer=Line, data=data, hooks=[every_steps(1, fails)])
    error = failed.error.partition(";")[0]
    assert failed.code == 1
    assert {"exit_code": 1, "step": 3, "error": error}.items() <= result().items()
    inside(*flags, trainer=Line, data=data).ok()
    assert "error" not in result()
    assert result()["stop"] is None  # it ran to its end


def test_a_default_that_is_no_json_is_kept_by_its_name(inside, tmp_path):
    """Alike in each process: the run resumes."""

    class Bent(Line):
        def __init__(self, activation=tf.nn.relu, dtype=tf.float32):
            super().__init__()

    run = (*RUN, f"--run_dir={tmp_path}")
    inside(*run, trainer=Bent, data=data).ok()
    assert "relu" in (tmp_path / "config.json").read_text()
    assert "complete" in inside(*run, trainer=Bent, data=data).ok().out


def test_what_columns_of_a_table_lack_for_a_classifier_is_named(inside, tmp_path):
    run = ("--model=logistic", "--input=csv", f"--data_dir={tmp_path}/rows.csv", "--validation_split=0.5", *RUN)
    (tmp_path / "rows.csv").write_text("a,b,label\n" + "0.5,1.5,1\n0.1,0.2,0\n" * 8)
    inside(*run).refused("the data has several (a, b); add input_arg=array=true, which makes one")
    for label in ("0.5", "1000000000000000000", "-3"):
        (tmp_path / "rows.csv").write_text(f"a,b,label\n0.5,1.5,{label}\n" + "0.5,1.5,1\n" * 8)
        cure = "among them; give labels that are classes, numbered from 0"
        inside(*run, "--input_arg=array=true").refused(f"{label} ... {cure}")


class Unbounded(Line):
    """A model that takes 4 TB while it is made, of which none is a variable's, whose bytes are compared before."""

    def build_model(self):
        tf.zeros([10**6, 10**6])
        return super().build_model()


@pytest.mark.thorough
def test_a_model_that_no_memory_has_room_for_is_named_and_not_the_batch(inside):
    outcome = inside(*RUN, trainer=Unbounded, data=data)
    assert outcome.code == 1
    assert "Unbounded does not fit into memory (OOM when" in outcome.error
    assert "batch" not in outcome.error


@pytest.mark.slow
@pytest.mark.parametrize("address", ["", "grpc://127.0.0.1:1"])
def test_tpu_without_a_tpu_says_so_and_waits_for_none(crank, address, monkeypatch):
    monkeypatch.setenv("TPU_NAME", address)
    outcome = crank("--model=logistic", "--input=digits", "--strategy=tpu")
    outcome.refused(f"strategy=tpu found no TPU at {address or 'this host'}")


def test_a_checkpoint_that_cannot_be_written_fails_the_run_and_says_where(inside, tmp_path):
    def meanwhile():
        (tmp_path / "checkpoints").touch()
        return data()

    outcome = inside(*RUN, f"--run_dir={tmp_path}", trainer=Line, data=meanwhile)
    assert outcome.code == 1  # not 2: the next try may find room
    assert f"ckpt-4 could not be written to {tmp_path}/checkpoints" in outcome.error


@pytest.mark.thorough
@pytest.mark.skipif(os.geteuid() != 0, reason="a disk of a few MB is mounted")
def test_a_disk_that_fills_is_a_line_without_those_of_tensorflow(tmp_path):
    command = (
        f"{sys.executable} -m crankshaft train --model=mlp --input=digits --train_steps=6 --run_dir={tmp_path}/run"
    )
    script = f"""mount -t tmpfs -o size=8m none {tmp_path} && head -c 2000000 /dev/zero > {tmp_path}/other &&
    {command} --keep_checkpoints=0 --checkpoint_every_steps=1 --jit=off --progress=off"""
    ended = subprocess.run(["unshare", "-m", "bash", "-c", script], capture_output=True, text=True, timeout=PATIENCE)
    if "unshare failed" in ended.stderr or "mount" in ended.stderr:
        pytest.skip("no mount is permitted here")
    lines = ended.stderr.splitlines()
    assert ended.returncode == 1
    assert "OP_REQUIRES" not in ended.stderr
    assert re.fullmatch(
        rf"error: ckpt-6 could not be written to {tmp_path}/run/checkpoints: No space left on device; free space [^;]*",
        lines[-1],
    )


def test_a_run_whose_checkpoints_are_all_broken_does_not_start_over(inside, tmp_path):
    run, checkpoints = (*RUN, "--mode=train", f"--run_dir={tmp_path}"), tmp_path / "checkpoints"
    inside(*run, trainer=Line, data=data).ok()
    shutil.copytree(checkpoints, whole := tmp_path / "whole")
    (written,) = checkpoints.glob("ckpt-4.data*")
    os.truncate(written, 10)
    found = sorted(path.name for path in checkpoints.iterdir())
    cure = "in another run_dir, from the start or, with init_from, from other weights"
    broken = f"no checkpoint in {checkpoints} can be read ({written.name}: expected ... begin {cure}"
    inside(*run, trainer=Line, data=data).refused(broken)
    assert sorted(path.name for path in checkpoints.iterdir()) == found
    outcome = inside("--mode=eval", f"--run_dir={tmp_path}", trainer=Line, data=data)
    assert f"run_dir={tmp_path} has no whole checkpoint latest; {written.name}: expected" in outcome.error
    with pytest.raises(UsageError, match=f"{tmp_path} has no whole checkpoint latest; {written.name}: expected"):
        load_model(tmp_path)
    whole.rename(tmp_path / "best")
    assert "resumed at step 4: this run is complete" in inside(*run, trainer=Line, data=data).ok().out


@pytest.mark.usefixtures("answers_ctrl_c")
def test_ctrl_c_before_the_first_step_is_one_line_and_saves_nothing(inside, tmp_path):
    def interrupted():
        signal.raise_signal(signal.SIGINT)
        return data()

    outcome = inside(*RUN, f"--run_dir={tmp_path}", trainer=Line, data=interrupted)
    assert outcome.code == 130
    assert "interrupted" in outcome.error
    assert not (tmp_path / "config.json").exists()


def test_a_script_that_processes_import_without_a_guard_is_named(crank, tmp_path):
    (script := tmp_path / "script.py").write_text(
        "import multiprocessing\n"
        "from crankshaft.launch import train\n"
        "if multiprocessing.current_process().name == 'MainProcess':\n"  # as its data function would, once it trains
        "    multiprocessing.get_context('spawn').Pool(1).map(abs, range(4))\n"
        "train.main(argv=['script', '--model=mlp', '--input=digits'])\n"
    )
    outcome = crank(script=script, tensorflow=False)
    assert outcome.code == -signal.SIGTERM
    assert outcome.error.startswith("the script starts a process by `multiprocessing`, which imports the script")
    assert outcome.error.endswith('put what starts the run below `if __name__ == "__main__":`')


def test_a_loss_that_is_not_finite_ends_the_run_with_another_code(inside, tmp_path):
    class Exploding(Line):
        def loss(self, outputs, batch):
            return mean((1 + tf.square(outputs[:, 0])) / tf.cast(step_context().step < 2, tf.float32))

    copy = f"--result_json={tmp_path}/copy.json"
    outcome = inside(*RUN, "--steps_per_loop=1", f"--run_dir={tmp_path}", copy, trainer=Exploding, data=data)
    assert outcome.code == EXIT_DIVERGED == 65
    result = json.loads((tmp_path / "result.json").read_text())
    assert result == json.loads((tmp_path / "copy.json").read_text())
    assert (result["error"], result["exit_code"], result["mode"]) == (outcome.error, 65, "train_and_eval")
    assert result["step"] in (3, 4)
    assert_says(outcome.error, "is inf ... learning rate")
    assert not list((tmp_path / "checkpoints").glob("ckpt-4*"))  # such a state is not kept


@pytest.mark.parametrize("mistake", ["--larning_rate=1", "--train_steps=-1", "--input=mnist --data_dir=/none", "data"])
def test_a_mistake_is_in_the_file_of_the_result_and_not_in_the_runs(inside, tmp_path, mistake):
    flags, brings = ([], {"data": lambda: 7}) if mistake == "data" else (mistake.split(), {"data": data})
    run = (f"--run_dir={tmp_path}/run", f"--result_json={tmp_path}/copy.json")
    outcome = inside(*RUN, *run, *flags, trainer=Line, **brings)
    result = json.loads((tmp_path / "copy.json").read_text())
    assert (result["error"], result["exit_code"], outcome.code) == (outcome.error, 2, 2)
    assert not (tmp_path / "run" / "result.json").exists()
    (config := tmp_path / "run" / "config.json").parent.mkdir(exist_ok=True)
    config.write_text("{}")
    inside(*RUN, f"--run_dir={tmp_path}/run", f"--result_json={config}", *flags, trainer=Line, **brings)
    assert config.read_text() == "{}"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "how",
    ["dense", pytest.param("cast", marks=pytest.mark.slow), pytest.param("scaled", marks=pytest.mark.slow), "ids"],
)
def test_whole_numbers_that_float32_cannot_hold_are_warned_of(inside, how):
    class Timed(Line):
        def forward(self, features, training):
            times = features["time"]
            times = {"ids": times % 100, "scaled": times - 1_700_000_000}.get(how, times)
            times = times if how == "dense" else tf.cast(times, tf.float32)
            return self.model(times, training=training)

        def build_model(self):
            model = super().build_model()
            model.build((None, 1))
            return model

    times = 1_700_000_000 + np.arange(32)[:, np.newaxis]
    split = {"time": times, "small": times % 7}, LABELS
    outcome = inside(*RUN, "--learning_rate=0", trainer=Timed, data=lambda: (split, split)).ok()
    warning = "time: whole numbers up to 1,700,000,031 become float32 in the model, which represents them exactly up to"
    assert outcome.err.count(f"{warning} 16,777,216") == (how in ("dense", "cast"))
    assert "small: whole" not in outcome.err


TWO = ("--strategy=mirrored", "--num_virtual_devices=2")


def own(**methods) -> type[Line]:
    """A trainer with these methods instead of the line's."""
    return type("Own", (Line,), methods)


def loss(outputs, batch):
    return mean(tf.square(outputs[:, 0] - batch[1]))


@functools.cache
def metric() -> tf.keras.metrics.Metric:
    """A metric made outside of a step."""
    return tf.keras.metrics.Precision(name="precision")


def metrics(**made):
    """`metrics` that makes these of the errors."""
    return lambda self, outputs, batch: {name: make(tf.abs(outputs[:, 0] - batch[1])) for name, make in made.items()}


def without_model(self):
    Line.build(self)
    self.line = self.model
    del self.model


def with_bare_optimizer(self):
    Line.build(self)
    self.optimizer = tf.keras.optimizers.SGD(0.1)


def of_the_line(self):
    return (self.line if hasattr(self, "line") else self.model).trainable_variables


def frozen(self):
    model = Line.build_model(self)
    model.trainable = False
    return model


def step(returns):
    return lambda self, batch: [Line.train_step(self, batch), returns(self)][1]


SEVERAL = "is not a pair (total, count); add up what belongs to an example, and return one pair: crankshaft.mean("
OPTIMIZERS = "use one of engine.optimizers or tf.keras.optimizers"
# The methods, and what the line says: what is wrong and the cure.
METHODS = [
    (
        {"loss": lambda self, outputs, batch: tf.reduce_mean(tf.square(outputs[:, 0] - batch[1]))},
        "Own.loss: a SymbolicTensor is not a pair (total, count); return crankshaft.mean(values) ... KerasMetric",
    ),
    (
        {"loss": lambda self, outputs, batch: {"a": loss(outputs, batch)}, "metrics": metrics(a=mean)},
        "Own.metrics: 'a' is a mean of the loss; use another name",
    ),
    ({"loss": lambda self, outputs, batch: loss(outputs, batch) + loss(outputs, batch)}, SEVERAL),
    (
        {"loss": lambda self, outputs, batch: mean(tf.square(outputs - batch[1]))},
        "Own.loss: values [n, 1] and [n] of n examples broadcast to [n, n] ... (outputs are [n, 1], labels [n])",
    ),
    ({"build_model": lambda self: None}, "Own.build_model returned a NoneType; return a Keras model"),
    ({"metrics": lambda *_: None}, "Own.metrics returned a NoneType; return a dictionary of pairs"),
    ({"metrics": metrics(e=tf.reduce_mean)}, "Own.metrics['e']: a SymbolicTensor is not a pair (total, count)"),
    (
        {"metrics": metrics(e=lambda x: (x, tf.ones_like(x)))},
        "Own.metrics['e']: total and count are of shape ... , not scalars: use",
    ),
    ({"metrics": metrics(loss=mean)}, "Own.metrics: 'loss' can't be the name of a metric"),
    ({"metrics": metrics(skipped=mean)}, "Own.metrics: 'skipped' can't be the name of a metric"),
    (
        {"metrics": metrics(p=lambda _: metric())},
        "a Keras metric is not a pair; keep ... crankshaft.KerasMetric(metric)",
    ),
    ({"metrics": lambda self, outputs, batch: {1: mean(batch[1])}}, "Own.metrics: 1 can't be the name of a metric"),
    ({"build_optimizer": lambda self: "adam"}, OPTIMIZERS),
    ({"build_optimizer": lambda self: None}, OPTIMIZERS),
    ({"build_optimizer": lambda self: lambda: "adam"}, OPTIMIZERS),
    (
        {"train_step": step(lambda self: {"loss": tf.constant(1.0)})},
        "its step returned a SymbolicTensor as 'loss'; return pairs",
    ),
    ({"train_step": step(lambda self: tf.constant(1.0))}, "its step returned a SymbolicTensor; return pairs by name"),
    ({"train_step": step(lambda self: {"a": mean(tf.ones([1]))})}, "Own.train_step returned a, without 'loss' ... nam"),
    (
        {"train_step": lambda self, batch: minimize(self, batch, None, {"loss": tf.keras.optimizers.SGD(0.1)})},
        "Own.train_step updates by a bare SGD; in build, make it by crankshaft.make_optimizer(self, vari",
    ),
    ({"build": with_bare_optimizer}, "Own.train_step updates by a bare SGD; in build, make it by crankshaft.make_opt"),
    (
        {"train_step": step(lambda self: self.optimizer.apply_gradients([]))},
        "optimizer adam has no apply_gradients, which would ignore",
    ),
    ({"build_model": frozen}, "has no variable to train"),
    ({"build": without_model, "forward": lambda self, x, training: self.line(x)}, "has no variable to train"),
    (
        {"forward": lambda self, x, training: tf.stop_gradient(self.model(x, training=training))},
        "depends on none of the 2 variables",
    ),
    (
        {"build": without_model, "trainable_variables": property(of_the_line)},
        "Own.build sets no self.model, which forward calls",
    ),
]


@pytest.mark.parametrize("row", range(len(METHODS)), ids=[" ".join(methods) for methods, _ in METHODS])
def test_a_mistake_in_a_trainers_method_is_one_line_with_the_cure(inside, row):
    metric()
    methods, says = METHODS[row]
    inside(*RUN, trainer=own(**methods), data=data).refused(says)


@pytest.mark.parametrize(("method", "cure"), [("build_model", "return a Keras model"), ("loss", "crankshaft.mean(")])
def test_a_method_that_is_not_there_is_named(inside, method, cure):
    bare = type("Bare", (Trainer,), {"build_model": Line.build_model} if method == "loss" else {})
    inside(*RUN, trainer=bare, data=data).refused(f"Bare has no {method}(self ... {cure}")


class Weighing(Line):
    """Learns the scale of its errors, if `trains`: Kendall and Gal 2017."""

    trains = False

    def build_model(self):
        self.log_scale = tf.Variable(0.5, name="log_scale")
        return super().build_model()

    @property
    def trainable_variables(self):
        return [*super().trainable_variables, *([self.log_scale] if self.trains else [])]

    def loss(self, outputs, batch):
        return mean(tf.square(outputs[:, 0] - batch[1]) * tf.exp(-self.log_scale) + self.log_scale)


@pytest.mark.parametrize("trains", [True, False])
def test_a_variable_that_the_loss_uses_and_no_optimizer_updates_is_named(inside, monkeypatch, trains):
    monkeypatch.setattr(Weighing, "trains", trains)
    err = inside(*RUN, "--jit=off", "--optimizer=nadam", trainer=Weighing, data=data).ok().err  # has one of its own
    said = "its step uses log_scale, trainable, that no optimizer updates; to train it, add it to"
    assert err.count(said) == err.count("that no optimizer updates") == (not trains)


Classes = own(
    build_model=lambda self: tf.keras.Sequential([tf.keras.layers.Dense(2)]),
    loss=lambda self, outputs, batch: mean(tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], outputs)),
)


@pytest.mark.parametrize("trainer", [Classes, own()], ids=["classes", "numbers"])
def test_labels_of_text_are_one_line_with_the_cure(inside, trainer):
    words = np.where(LABELS > 0, "up", "down")
    outcome = inside(*RUN, trainer=trainer, data=lambda: ((FEATURES, words), None))
    outcome.refused("labels holds strings, and Own.loss computes with them as with numbers; number them")


@pytest.mark.parametrize("label", [7, pytest.param(-1, marks=pytest.mark.slow)])
def test_a_label_out_of_range_is_named_with_the_range(inside, label):
    labels = np.where(LABELS > 0, label, 1).astype(np.int64)
    outcome = inside(*RUN, trainer=Classes, data=lambda: ((FEATURES, labels), None))
    outcome.refused(f"the data has a label of {label}, and the loss takes labels from 0 to below 2, as many as")
    outcome = inside(*RUN, "--jit=on", trainer=Classes, data=lambda: ((FEATURES, labels), None))  # the step counts
    assert outcome.mistake.startswith(f"step 1: labels from 0 to 1: a number is {label}, out of that range; correct")


def flat(self):
    """Of several arrays Flatten raises a TypeError, Dense a ValueError."""
    return tf.keras.Sequential([tf.keras.layers.Flatten(), tf.keras.layers.Dense(1)])


@pytest.mark.parametrize(
    ("trainer", "split"), [(Line, {"x": FEATURES, "y": LABELS}), (own(build_model=flat), ((FEATURES,) * 2, LABELS))]
)
def test_several_features_of_a_sequential_are_named(inside, trainer, split):
    outcome = inside(*RUN, trainer=trainer, data=lambda: (split, None))
    outcome.refused("model is a tf.keras.Sequential, which takes one array, and features are several: features[")


@pytest.mark.thorough
def test_a_metric_of_whole_numbers_is_summed_as_others_are(inside):
    counting = own(metrics=lambda self, x, batch: {"up": (tf.math.count_nonzero(batch[1] > 0), tf.size(batch[1]))})
    assert "up 0.5" in inside(*RUN, trainer=counting, data=data).ok().out


@pytest.mark.parametrize("where", [pytest.param((), marks=pytest.mark.slow), TWO], ids=["one", "mirrored"])
def test_a_bug_in_an_evaluation_shows_before_the_first_step(inside, where):
    class Buggy(Line):
        def eval_step(self, batch):
            return {"kept": self.kept}

        def loss(self, outputs, batch):
            self.kept = mean(outputs)
            return super().loss(outputs, batch)

    done = []
    outcome = inside(*RUN, *where, trainer=Buggy, data=data, hooks=[every_steps(1, lambda status, _: done.append(1))])
    outcome.refused(location_of(Buggy.eval_step))
    assert not done


def test_a_bug_in_a_users_metric_shows_its_traceback_with_debug(inside):
    class Buggy(Line):
        def metrics(self, outputs, batch):
            return {"wrong": mean(batch["labels"])}

    outcome = inside(*RUN, "--debug", trainer=Buggy, data=data)
    assert outcome.code == 2
    assert_says(outcome.err.replace("\n", " "), f"Traceback ... {location_of(Buggy.metrics)}")


class Backwards(Hook):
    name = "backwards"

    def next_due(self, step, status):
        return 2


def buggy(status, means):
    raise KeyError("perplexity")


@pytest.mark.parametrize(
    ("hooks", "says"),
    [
        ([every_steps(1, buggy)], f"KeyError: 'perplexity', at {location_of(buggy)}"),
        ([print], "print ... every_epoch"),
        (every_epoch(print), "put hooks into one, hooks=[...]"),
        ([Backwards()], "hook backwards returned at step 2 that it is next due at step 2"),
    ],
    ids=["a bug", "a function", "no list", "due in the past"],
)
def test_a_mistake_in_a_hook_is_one_line(inside, hooks, says):
    inside(*RUN, trainer=Line, data=data, hooks=hooks).refused(says)
