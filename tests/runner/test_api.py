"""`crankshaft.run`: a run in Python returns what it came to, raises what a program would print, and leaves no trace."""

from __future__ import annotations

import bdb
import functools
import importlib
import io
import json
import os
import pathlib
import random
import re
import signal
import sys
import traceback
import types

import numpy as np
import pytest
import tensorflow as tf
from absl import flags
from absl.testing import flagsaver

import crankshaft
from crankshaft import RunError, Trainer, UsageError, load_model, mean, run, step_context
from crankshaft.engine.hooks import every_epoch, every_steps
from crankshaft.engine.internals.tensorflow import numerics_check
from crankshaft.engine.record.events import read
from tests.engine.trainers import Columns
from tests.parts.tensorboard.boards import raw_events, scalars

pytestmark = pytest.mark.thorough


class Plane(Trainer):
    """A plane through points of three numbers."""

    def __init__(self, units: int = 1):
        super().__init__()
        self.units = units

    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(self.units)])

    def loss(self, outputs, batch):
        return mean(tf.reduce_sum(tf.square(outputs - batch[1]), axis=-1))


def data():
    points = np.random.default_rng(0).normal(size=(300, 3)).astype("float32")
    heights = points @ np.float32([[1.0], [-2.0], [0.5]]) + 3.0
    return (points[:200], heights[:200]), (points[200:], heights[200:])


QUIET = {"jit": "off", "progress": "off"}
EVAL_POINTS, EVAL_HEIGHTS = data()[1]


@pytest.fixture(scope="module")
def plane_run(tmp_path_factory):
    """A run of four steps an epoch, evaluated after each."""
    run_dir = tmp_path_factory.mktemp("runs") / "plane"
    return run(Plane, data=data, train_steps=16, learning_rate=0.3, run_dir=run_dir, **QUIET)


def test_a_run_returns_what_it_came_to(plane_run):
    assert plane_run.result["step"] == 16
    assert plane_run.result == json.loads((pathlib.Path(plane_run.run_dir) / "result.json").read_text())
    assert [row["step"] for row in plane_run.history] == [4, 8, 12, 16]
    assert plane_run.history[-1]["eval_loss"] == plane_run.result["eval"]["loss"]
    assert plane_run.history[-1]["train_loss"] == plane_run.result["train"]["loss"]
    assert len(plane_run.history.column("eval_loss")) == 4
    assert list(scalars(pathlib.Path(plane_run.run_dir) / "tensorboard" / "train")["loss"]) == [4, 8, 12, 16]
    assert "step=16, loss=" in repr(plane_run)


def test_a_run_predicts_and_evaluates(plane_run):
    outputs = plane_run.predict(EVAL_POINTS)
    kernel, bias = (variable.numpy() for variable in plane_run.model.weights)
    np.testing.assert_allclose(outputs, EVAL_POINTS @ kernel + bias, rtol=1e-6, atol=1e-6)  # rounding of float32
    error = np.mean(np.square(outputs - EVAL_HEIGHTS, dtype=np.float64))
    for split in ((EVAL_POINTS, EVAL_HEIGHTS), tf.data.Dataset.from_tensor_slices((EVAL_POINTS, EVAL_HEIGHTS))):
        np.testing.assert_allclose(plane_run.evaluate(split)["loss"], error, rtol=1e-6)
    assert plane_run.predict(EVAL_POINTS[:0]).shape == (0, 1)
    np.testing.assert_array_equal(plane_run.predict(EVAL_POINTS[:2].tolist()), plane_run.predict(EVAL_POINTS[:2]))


def test_several_evaluation_sets_are_each_computed_as_alone_and_one_is_monitored(tmp_path, capfd):
    """Their metrics have their names, in results, history and TensorBoard; a resumed run goes on by the best of one."""
    points, heights = data()[1]
    sets = {"near": (points[:30], heights[:30]), "far": tf.data.Dataset.from_tensor_slices((points[30:], heights[30:]))}
    how = {"learning_rate": 0.3, "run_dir": tmp_path / "run", "monitor": "eval_far/loss", **QUIET}
    for steps in (4, 8):
        done = run(Plane, data=(data()[0], sets), train_steps=steps, **how)
    names = ["near/loss", "far/loss"]
    assert [*done.result["eval"]] == names
    alone = [done.evaluate(split)["loss"] for split in ((points[:30], heights[:30]), (points[30:], heights[30:]))]
    np.testing.assert_allclose([*done.result["eval"].values()], alone, rtol=1e-6)
    assert done.evaluate() == done.result["eval"]
    assert done.history[-1]["eval_far/loss"] == done.result["best"]["value"] == done.result["eval"]["far/loss"]
    assert {*names} <= scalars(tmp_path / "run" / "tensorboard" / "eval").keys()
    assert done.predict(split="eval/far").shape == (70, 1)
    with pytest.raises(UsageError, match=r"split='eval': .* no such split; it has train, eval/near, eval/far"):
        done.predict()
    with pytest.raises(UsageError, match=r"eval_loss is not measured .* use one of eval_far/loss, eval_near/loss"):
        run(Plane, data=(data()[0], sets), train_steps=4, monitor="eval_loss", early_stopping={"patience": 1}, **QUIET)
    sets["third"] = sets.pop("far")
    other = run(Plane, data=(data()[0], sets), train_steps=8, **{**how, "monitor": "eval_third/loss"})
    np.testing.assert_allclose(other.result["eval"]["third/loss"], alone[1], rtol=1e-6)


def test_models_of_a_run_are_loaded(plane_run):
    best = min(range(4), key=lambda index: plane_run.history[index]["eval_loss"])
    for loaded in (load_model(plane_run.run_dir), load_model(plane_run.run_dir, trainer_class=Plane)):
        np.testing.assert_array_equal(loaded(EVAL_POINTS), plane_run.model(EVAL_POINTS))
        assert [weight.path for weight in loaded.weights] == [weight.path for weight in plane_run.model.weights]
    for loaded in (load_model(plane_run.run_dir, "best"), plane_run.best_model()):
        loss = float(np.mean(np.square(loaded(EVAL_POINTS).numpy() - EVAL_HEIGHTS, dtype=np.float64)))
        np.testing.assert_allclose(loss, plane_run.history[best]["eval_loss"], rtol=1e-6)
    np.testing.assert_array_equal(load_model(plane_run.run_dir, 16)(EVAL_POINTS), plane_run.model(EVAL_POINTS))
    with pytest.raises(UsageError, match=r"has no whole checkpoint 7; use latest, best, or a step of 16$"):
        load_model(plane_run.run_dir, 7)


def test_a_model_has_the_weights_that_evaluations_use(tmp_path):
    averaged = {"ema_decay": 0.9, "strategy": "mirrored", "num_virtual_devices": 2}
    done = run(Plane, data=data, train_steps=8, learning_rate=0.3, run_dir=tmp_path / "run", **averaged, **QUIET)
    for model in (done.model, load_model(tmp_path / "run"), load_model(tmp_path / "run", trainer_class=Plane)):
        outputs = model(EVAL_POINTS).numpy()
        loss = np.mean(np.square(outputs - EVAL_HEIGHTS, dtype=np.float64))
        np.testing.assert_allclose(loss, done.result["eval"]["loss"], rtol=1e-6)
        np.testing.assert_allclose(outputs, done.predict(EVAL_POINTS), rtol=1e-6, atol=1e-6)


class Two(Columns):
    """Two inputs, one output."""

    def build_model(self):
        inputs = tf.keras.Input([3]), tf.keras.Input([2])
        return tf.keras.Model(inputs, tf.keras.layers.Dense(1)(tf.keras.layers.Concatenate()(inputs)))


def test_several_inputs_are_trained_exported_and_loaded(tmp_path):
    split = (EVAL_POINTS, EVAL_POINTS[:, :2]), EVAL_HEIGHTS
    done = run(Two, data=(split, split), train_steps=8, run_dir=tmp_path, **QUIET)
    outputs = done.predict(split[0])
    asked = {"mode": "export", "run_dir": tmp_path, "data": (split, split)}
    served = tf.saved_model.load(run(Two, **asked).result["export"]).signatures["serving_default"]
    found = served(features_0=tf.constant(split[0][0]), features_1=tf.constant(split[0][1]))["outputs"]
    np.testing.assert_allclose(found, outputs, rtol=1e-6, atol=1e-6)
    path = run(Two, output=tmp_path / "two.keras", **asked).result["export"]
    for model in (tf.keras.models.load_model(path), load_model(tmp_path)):
        np.testing.assert_allclose(model(list(split[0])), outputs, rtol=1e-6, atol=1e-6)
    with pytest.raises(UsageError, match=r"two\.keras exists; remove it or use another output$"):
        run(Two, output=tmp_path / "two.keras", **asked)


def test_history_is_recorded_and_cut_where_a_run_goes_on(tmp_path):
    def rows() -> list[dict]:
        return [line.event for line in read(tmp_path / "run" / "events.jsonl") if line.kind == "row"]

    asked = {"run_dir": tmp_path / "run", "checkpoint_every_steps": 8, **QUIET}
    whole = run(Plane, data=data, train_steps=16, run_dir=tmp_path / "whole", **QUIET).history
    run(Plane, data=data, train_steps=8, **asked)
    assert len(rows()) == 2
    with open(tmp_path / "run" / "events.jsonl", "a") as file:
        late = {"event": "row", "time": 0.0, "step": 12}
        file.write(f'{json.dumps(late)}\n{{"event": "row", "ti')  # past the checkpoint, by a process that was killed
    done = run(Plane, data=data, train_steps=16, **asked)
    kept = ("step", "epoch", "train_loss", "eval_loss")
    for found in (rows(), done.history):
        assert [{name: row[name] for name in kept} for row in found] == [{n: row[n] for n in kept} for row in whole]


MISTAKES = {
    "unknown": ({"learning_rat": 1}, "learning_rat is unknown; did you mean learning_rate"),
    "no number": ({"train_steps": "x"}, "train_steps=x can't be used: it takes an integer"),
    "out of range": ({"learning_rate": -1.0}, "learning_rate=-1.0 can't be used"),
    "no argument": ({"model_arg": {"depth": 3}}, "model_arg depth: Plane has no such argument"),
    "in memory": ({"max_bad_records": 2}, "max_bad_records=2 is for examples that are read as the run goes, and the"),
    "no use": ({"mesh": "model:2"}, "mesh=model:2 has no use with strategy=one_device; use strategy=mirrored or"),
    "both lengths": ({"train_steps": 1, "train_epochs": 1}, "train_steps and train_epochs are both given"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_the_programs_line(name):
    keywords, line = MISTAKES[name]
    with pytest.raises(UsageError) as raised:
        run(Plane, data=data, **keywords)
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "--" not in str(raised.value).replace("train --help", "")
    assert isinstance(raised.value, ValueError)
    assert raised.value.exit_code == 2


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (tf.keras.Sequential(), "an object of Sequential; give a subclass of crankshaft.Trainer, whose build_model"),
        (Plane(), "an object of Plane; give the class itself, Plane, and its arguments as model_arg"),
        (int, "the class int; give a subclass of crankshaft.Trainer, whose build_model returns the Keras model"),
        (3, "an object of int; give a subclass"),
    ],
    ids=["a model", "a trainer", "int", "3"],
)
def test_what_is_no_trainers_class_is_named(given, line, tmp_path, capsys):
    for call in (functools.partial(run, data=data), lambda given: load_model(tmp_path, trainer_class=given)):
        with pytest.raises(UsageError, match=f"^the trainer_class is {line}"):
            call(given)
    with pytest.raises(SystemExit, match="2"):
        crankshaft.main(given, data=data, argv=["script"])
    assert capsys.readouterr().err.startswith(f"error: the trainer_class is {line}")


def test_many_runs_of_one_process_bring_no_warning_of_retracing(tmp_path, caplog):
    """TensorFlow warns at the fifth trace of a function of the same code. Histograms are of gradients, too."""
    writes = {"histogram_every_steps": 1, "checkpoint_every_steps": 1, "check_sync_every_steps": 1}
    two = {"strategy": "mirrored", "num_virtual_devices": 2, "sync_every_steps": 1}
    for number in range(5):
        run(Plane, data=data, train_steps=2, run_dir=tmp_path / str(number), **QUIET, **writes, **two)
    assert "retracing" not in caplog.text
    events = raw_events(tmp_path / "4" / "tensorboard" / "train")
    assert {"weights", "gradients"} < {value.tag.split("/")[0] for event in events for value in event.summary.value}


def test_steps_that_run_eagerly_have_values_to_print_and_train_the_same(caplog):
    """Rounding of 1e-7 in 8 steps of Adam, which XLA and TensorFlow's graphs compute in another order."""

    seen = []

    class Looking(Plane):
        calls = 0

        def loss(self, outputs, batch):
            seen.extend([int(step_context().step)] if tf.executing_eagerly() else [])
            self.calls += 1
            return super().loss(outputs, batch)

    how = {"data": lambda: (data()[0], None), "train_steps": 8, "seed": 1, **QUIET}
    made = [run(Looking, run_eagerly=eager, **how) for eager in (False, True)]
    assert seen == [*range(8)]
    assert "traced" not in caplog.text  # each step counts
    for compiled, eager in zip(*(one.model.get_weights() for one in made), strict=True):
        np.testing.assert_allclose(eager, compiled, rtol=0, atol=1e-5)
    with pytest.raises(UsageError, match="jit=on: run_eagerly executes steps op by op; use jit=auto or off"):
        run(Looking, data=data, train_steps=8, run_eagerly=True, jit="on", progress="off")
    with pytest.raises(UsageError, match="use strategy=one_device instead of mirrored, or leave run_eagerly out"):
        run(Looking, data=data, run_eagerly=True, strategy="mirrored")


class WriteOnly:
    """A stream as some programs put one in standard output's place."""

    def __init__(self):
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("stream", [WriteOnly(), None], ids=["write and flush", "none"])
@pytest.mark.parametrize("progress", ["auto", "bar"])
def test_any_standard_output_is_enough(stream, progress, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    assert run(Plane, data=data, train_steps=2, jit="off", progress=progress, run_dir=tmp_path / "run").step == 2
    assert stream is None or "evaluation at step 2: loss" in stream.text
    # What a moment's goodput leaves out is not the end of its line.
    assert stream is None or re.search(r"goodput \d+%: .* steps that count($|; \w)", stream.text, re.M)


def test_main_in_a_notebook_names_run(monkeypatch):
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)  # of IPython too
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", "kernel.json"])
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))  # whose cells are no file
    with pytest.raises(UsageError, match=r"^main\(\) reads the command line .*; use crankshaft.run, with the flags as"):
        crankshaft.main(Plane, data=data)


def test_arguments_that_are_missing_or_misspelt_are_named():
    for call in (run, crankshaft.open_run):
        with pytest.raises(UsageError, match=r"^data is missing for Plane; give data=\(train, eval\), or a function "):
            call(Plane)
        with pytest.raises(UsageError, match=r"^dat is unknown; did you mean data\?$"):
            call(Plane, dat=data)
        with pytest.raises(TypeError, match=r"takes from 0 to 1 positional arguments"):
            call(Plane, data)


def test_a_run_with_a_folder_has_a_page(tmp_path):
    done = run(Plane, data=data, train_steps=2, run_dir=tmp_path / "watched", **QUIET)
    assert '"reason":"done"' in done.page().html
    with pytest.raises(UsageError, match=r"^page\(\): the run has no folder .*; give it a run_dir$"):
        run(Plane, data=data, train_steps=2, **QUIET).page()


def test_a_folder_that_is_none_of_a_run_is_one_line(tmp_path):
    with pytest.raises(UsageError, match=r"^load_model\(3\): give the path of a run's folder$"):
        load_model(3)
    with pytest.raises(UsageError, match=r"holds no run \(no config.json\); give the folder of a run"):
        load_model(tmp_path)


def test_whatever_a_call_raises_is_one_line():
    with pytest.raises(RunError, match=r"^TypeError: 'int' object is not iterable$") as raised:
        run(Plane, data=data, may_change=3)
    assert isinstance(raised.value.__cause__, TypeError)


def test_a_failure_is_one_line_with_its_cause():
    class Broken(Plane):
        def loss(self, outputs, batch):
            raise RuntimeError("the loss is broken")

    with pytest.raises(UsageError, match=r"the loss is broken, at .*test_api.py") as raised:
        run(Broken, data=data, train_steps=2, **QUIET)
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert functions_of(raised.value) == ["test_a_failure_is_one_line_with_its_cause", "border"]
    assert functions_of(raised.value.__cause__) == ["loss"]
    with pytest.raises(RunError, match="loss"):
        run(Plane, data=data, train_steps=20, optimizer="sgd", learning_rate=1e30, **QUIET)


def functions_of(error: BaseException) -> list[str]:
    """The functions in an error's traceback."""
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_a_traceback_has_the_programs_frames_alone_unless_all_are_wanted(monkeypatch):
    def failing(status, state):
        return {}["missing"]

    def frames(**flags):
        held = crankshaft.open_run(Plane, data=data, hooks=[every_steps(1, failing)], **QUIET, **flags)
        with held, pytest.raises(KeyError) as raised:
            held.train(steps=1)
        return functions_of(raised.value)

    assert frames() == ["frames", "border", "failing"]
    assert {"frames", "train_to", "failing"} < set(frames(debug=True))
    monkeypatch.setenv("CRANKSHAFT_FULL_TRACEBACK", "1")
    assert {"frames", "train_to", "failing"} < set(frames())


# A user's module: each line that fails is in a function of its own.
IN_SITE_PACKAGES = """
import tensorflow as tf
from crankshaft import mean
from tests.runner.test_api import Plane

def hook(status, state):
    return {}["missing"]

class Traced(Plane):
    def loss(self, outputs, batch):
        return mean(tf.reshape(outputs, [7]))

class Executed(Plane):
    def loss(self, outputs, batch):
        return mean(tf.reduce_sum(tf.reshape(outputs, [tf.cast(batch[1][0, 0], tf.int32) * 0 + 7, -1])))

class Asserts(Plane):
    def loss(self, outputs, batch):
        tf.debugging.assert_less(outputs, -1e9, message="large")
        return super().loss(outputs, batch)

def examples():
    yield [0.0, 0.0, 0.0], [0.0]
    raise KeyError("one")

def generated():
    spec = tf.TensorSpec([3]), tf.TensorSpec([1])
    return tf.data.Dataset.from_generator(examples, output_signature=spec), None

def mapped():
    def read(x):
        raise ValueError(f"another of {x.numpy()[0]}")
    decode = lambda x, y: (tf.ensure_shape(tf.py_function(read, [x], tf.float32), [3]), y)
    return tf.data.Dataset.from_tensor_slices((tf.zeros([4, 3]), tf.zeros([4, 1]))).map(decode), None
"""


def test_a_mistake_in_an_installed_program_shows_its_line(tmp_path, monkeypatch):
    """In site-packages, as pip installs a project, and while steps run as while they are traced."""
    (tmp_path / "site-packages").mkdir()
    (path := tmp_path / "site-packages" / "mistakes_of_mine.py").write_text(IN_SITE_PACKAGES)
    monkeypatch.syspath_prepend(path.parent)
    module = importlib.import_module(path.stem)

    def line(function, code):
        number = next(n for n, line in enumerate(IN_SITE_PACKAGES.splitlines(), 1) if code in line)
        return f", at {path}:{number} in {function}"

    with pytest.raises(KeyError, match="missing"):
        run(Plane, data=data, hooks=[every_steps(1, module.hook)], train_steps=2, **QUIET)
    for trainer, message, place in (
        (module.Traced, "Cannot reshape", line("loss", "[7])")),
        (module.Executed, "InvalidArgumentError: Input to reshape", line("loss", "* 0 + 7")),
        (module.Asserts, "large Condition x < y did not hold", line("loss", "large")),
    ):
        with pytest.raises(UsageError, match=message) as raised:
            run(trainer, data=data, train_steps=2, **QUIET)
        assert str(raised.value).endswith(place)
    for given, error, message in (
        (module.generated, RunError, f"UnknownError: KeyError: 'one'{line('examples', 'raise KeyError')}"),
        (module.mapped, UsageError, f"ValueError: another of 0.0{line('read', 'raise ValueError')}"),
    ):
        with pytest.raises(error, match=re.escape(message)):
            run(Plane, data=given, mode="train", **{**QUIET, "global_batch_size": 2}, train_steps=2)


LIBRARY = """
count = tf.Variable(0.0, trainable=False, name="count")
class Counts(tf.keras.layers.Layer):
    def call(self, x):
        count.assign_add(1.0)
        return x
"""


def test_what_a_librarys_layer_does_without_a_line_of_the_program_has_the_librarys():
    exec(compile(LIBRARY, path := "/lib/site-packages/counting.py", "exec"), library := {"tf": tf, "__name__": "c"})

    class Counted(Plane):
        def build_model(self):
            return tf.keras.Sequential([tf.keras.Input([3]), library["Counts"](), tf.keras.layers.Dense(1)])

    with pytest.raises(UsageError, match=rf"its step assigns count .*, at {path}:5 in call, that is in none of"):
        run(Counted, data=data, train_steps=2, **QUIET)


def test_a_strategy_of_the_programs_own_around_a_run_or_in_its_step_is_one_line():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])

    class Distributes(Plane):
        def train_step(self, batch):
            return strategy.run(super().train_step, args=(batch,))

    line = (
        r"^a run distributes by a strategy of its own, and the program uses another's scope\(\), run\(\) or variables"
    )
    with strategy.scope(), pytest.raises(UsageError, match=f"{line}; leave these out: build_model is called within"):
        run(Plane, data=data, train_steps=2, **QUIET)
    with pytest.raises(UsageError, match=rf"{line}, at {re.escape(__file__)}:\d+ in train_step; leave"):
        run(Distributes, data=data, train_steps=2, **QUIET)


class Pruned(Exception):
    """What ends a trial of a search."""


@pytest.mark.parametrize("where", ["hook", "data", "source"])
def test_what_the_programs_own_code_raises_reaches_it_as_it_is(where):
    def prune(*_):
        raise Pruned("the trial is worse than others")

    class Pruning(crankshaft.Source):
        element_spec = (crankshaft.Spec((3,), np.float32), crankshaft.Spec((1,), np.float32))
        read = prune

        def __len__(self):
            return 64

    asked = {"hook": {"data": data, "hooks": [every_steps(1, prune)]}, "data": {"data": prune}}
    with pytest.raises(Pruned, match="worse than others"):
        run(Plane, train_steps=9, **QUIET, **asked.get(where, {"data": lambda: (Pruning(), None), "mode": "train"}))


def test_leaving_a_debugger_ends_with_its_own_traceback(inside):
    class Left(Plane):
        def loss(self, outputs, batch):
            raise bdb.BdbQuit  # q at a prompt here

    with pytest.raises(bdb.BdbQuit) as raised:
        run(Left, data=data, train_steps=2, **QUIET)
    assert functions_of(raised.value)[-1] == "loss"
    program = inside("--train_steps=2", "--jit=off", "--progress=off", trainer=Left, data=data)
    assert program.code == 130
    assert program.err.endswith("bdb.BdbQuit\n")


def test_nothing_of_a_run_is_left():
    random.seed(1)
    np.random.seed(2)  # noqa: NPY002
    tf.random.set_seed(3)
    expected = random.random(), np.random.normal(), float(tf.random.normal([]))  # noqa: NPY002
    random.seed(1)
    np.random.seed(2)  # noqa: NPY002
    tf.random.set_seed(3)
    before = {name: (flags.FLAGS[name].value, flags.FLAGS[name].present) for name in flags.FLAGS}
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    asked = {"precision": "bfloat16", "check_numerics": True, "optimizer": "sgd", "clip_norm": 1.0}
    run(Plane, data=data, train_steps=2, seed=11, **asked, **QUIET)
    assert (random.random(), np.random.normal(), float(tf.random.normal([]))) == expected  # noqa: NPY002
    assert {name: (flags.FLAGS[name].value, flags.FLAGS[name].present) for name in flags.FLAGS} == before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert tf.keras.config.dtype_policy().name == "float32"
    assert np.isnan(tf.math.log(-1.0))  # numerics are not checked any more


def test_a_program_that_checks_numerics_does_so_in_its_runs_and_after_them(request):
    class Broken(Plane):
        def loss(self, outputs, batch):
            return mean(tf.math.log(-1.0 - tf.square(outputs[:, 0])))

    how = {"data": data, "train_steps": 2, "progress": "off"}
    request.addfinalizer(tf.debugging.disable_check_numerics)
    tf.debugging.enable_check_numerics(path_length_limit=40)
    enabled = numerics_check()
    with pytest.raises(RunError, match="nan first in output 0 of op Log"):
        run(Broken, **how)
    run(Plane, **how, check_numerics=False, jit="on")
    assert numerics_check() is enabled
    with pytest.raises(tf.errors.InvalidArgumentError):
        tf.math.log(-1.0)


def test_keras_global_policy_is_the_precision_unless_both_are_set_and_differ(tmp_path, caplog, request):
    """A run that is read has its own."""
    request.addfinalizer(lambda: tf.keras.config.set_dtype_policy("float32"))
    how = {"data": data, "train_steps": 2, **QUIET}
    run(Plane, **how, run_dir=tmp_path)
    tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
    for given in ({}, {"precision": "bfloat16"}):
        done = run(Plane, **how, **given)
        assert done.result["precision"] == done.model.layers[-1].compute_dtype == "bfloat16"
    assert tf.keras.config.dtype_policy().name == "mixed_bfloat16"
    with pytest.raises(
        UsageError, match=r"precision=float32 is given, and the program has set .* mixed_bfloat16; leave"
    ):
        run(Plane, **how, precision="float32")
    with pytest.raises(UsageError, match="precision"):
        run(Plane, **{**how, "train_steps": 3}, run_dir=tmp_path)
    assert run(Plane, data=data, mode="eval", run_dir=tmp_path, progress="off").result["precision"] == "float32"
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    assert run(Plane, **how).trainer.loss_scale is not None
    tf.keras.mixed_precision.set_global_policy("float64")
    assert run(Plane, **how).model.layers[-1].compute_dtype == "float32"
    assert "Keras's policy float64 is not used" in caplog.text


def test_main_forgets_an_earlier_command_line(inside, tmp_path):
    asked = ("--train_steps=2", "--jit=off")
    inside(*asked, "--optimizer=sgd", "--learning_rate=0.5", "--clip_norm=1", trainer=Plane, data=data).ok()
    with flagsaver.flagsaver(), pytest.raises(SystemExit) as exit:
        crankshaft.main(Plane, data=data, argv=["script", *asked, f"--run_dir={tmp_path / 'run'}"])
    assert not exit.value.code
    kept = json.loads((tmp_path / "run" / "config.json").read_text())["flags"]
    assert (kept["optimizer"], kept["learning_rate"], kept["clip_norm"]) == ("adam", 0.001, 0.0)


@pytest.mark.usefixtures("answers_ctrl_c")
def test_ctrl_c_stops_saves_and_raises(tmp_path):
    hooks = [every_epoch(lambda status, _: status.epoch == 3 and os.kill(os.getpid(), signal.SIGINT))]
    with pytest.raises(KeyboardInterrupt):
        run(Plane, data=data, hooks=hooks, train_epochs=50, run_dir=tmp_path / "run", **QUIET)
    done = json.loads((tmp_path / "run" / "result.json").read_text())
    assert done["stop"].startswith("SIGINT")
    assert 12 <= done["step"] < 200
    assert load_model(tmp_path / "run", done["step"])(EVAL_POINTS).shape == (100, 1)


OWN_FLAG = """
from absl import flags
from crankshaft import main
from tests.runner.test_api import Plane, data

flags.DEFINE_float("beta", 1.0, "Decides.")
flags.DEFINE_string("note", "", "Decides nothing.")
main(Plane, data=data, may_change=["note"])
"""


@pytest.mark.usefixtures("script_flags")
def test_a_scripts_own_flags_belong_to_its_run(inside, tmp_path):
    script, run_dir = tmp_path / "script.py", f"--run_dir={tmp_path / 'run'}"
    script.write_text(OWN_FLAG)

    def ran(*flags):
        with flagsaver.flagsaver():  # the script defines its own each time
            return inside.script(script, "--jit=off", run_dir, *flags)

    ran("--train_steps=2", "--beta=3", "--note=a").ok()
    assert json.loads((tmp_path / "run" / "config.json").read_text())["deciding"]["script_flags"] == {"beta": 3.0}
    line = "another configuration (script_flags beta: 3.0 -> 7.0) ... may_change=['beta'] of main and run"
    ran("--train_steps=4", "--beta=7").refused(line)
    ran("--train_steps=4", "--beta=3", "--note=b").ok()
    script.write_text(OWN_FLAG.replace('["note"]', '["note", "beta"]'))
    ran("--train_steps=6", "--beta=7").ok()


def test_the_result_is_written_before_it_is_printed(tmp_path, monkeypatch):
    class Breaks(io.StringIO):
        def write(self, text):
            if text.startswith("evaluation at step"):
                raise RuntimeError("the console is gone")
            return super().write(text)

    monkeypatch.setattr(sys, "stdout", Breaks())
    with pytest.raises(RuntimeError, match="the console is gone"):
        run(Plane, data=data, train_steps=2, run_dir=tmp_path, jit="off", progress="plain")
    assert json.loads((tmp_path / "result.json").read_text())["eval"]["loss"] > 0


def test_benchmark_mode_chooses_xla_by_timing_both():
    """It has no hooks, so nothing but a signal ends the timing."""
    found = run(
        Plane,
        data=data,
        mode="benchmark",
        benchmark_arg={"steps": 5, "rounds": 1},
        global_batch_size=10,
        progress="off",
    )
    assert found.result["steps_per_sec"] > 0
