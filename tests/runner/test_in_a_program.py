"""What is around a run in a program of one's own: its logging, its threads, and the processes that it forks.

A script ends with its last line: what reads ahead for a run in Python is freed where the run ends, however it does.

An iterator that calls Python is waited for by whoever frees it, for ever where the interpreter is ending by then.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft.engine.hooks import every_steps
from tests.test_imports import PARTS, part_of
from tests.waiting import PATIENCE, wait_until

PROGRAM = """
import json, logging, os, signal, sys, threading
import numpy as np
import tensorflow as tf

x = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
short = {"jit": "off", "progress": "off"}


def forked(function, *arguments, **keywords):
    reading, writing = os.pipe()
    if not (child := os.fork()):
        signal.alarm(60)  # ends a fork that hangs
        try:
            result = function(*arguments, **keywords)
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        os.write(writing, json.dumps(result).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as file:
        result = file.read()
    os.waitpid(child, 0)
    return json.loads(result or '"hangs"')


def model():
    made = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(1, kernel_initializer="ones")])
    made.compile("sgd", "mse")
    return made


def fit(**keywords):
    import crankshaft

    return crankshaft.fit(model, x, x[:, :1], verbose=0, jit="off", **keywords).history.history["loss"][0]


def setup():
    loggers = [logging.getLogger(name) for name in (None, "absl", "tensorflow")]
    return [[each.level, [*map(repr, each.handlers)]] for each in loggers]


found = {}

import crankshaft
from crankshaft.engine.hooks import every_steps

during = []


class Plane(crankshaft.Trainer):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="ones")])

    def loss(self, outputs, batch):
        return crankshaft.mean(tf.reduce_sum(tf.square(outputs - batch[1]), axis=-1))


def warn(*_):
    crankshaft.mean(tf.constant(2.0))
    during.append(setup())


def without_setup():
    before = setup()
    crankshaft.run(model="mlp", input="digits", train_steps=2, **short)
    modules = [name for name in sys.modules if name.startswith("crankshaft.")]
    loss = fit(hooks=[every_steps(1, warn)], run_dir=sys.argv[1])
    return [loss, setup() == before and all(each == before for each in during), modules]


found["of a fork before the start"] = forked(without_setup)
logging.basicConfig(level=logging.INFO, format="MINE %(message)s", stream=sys.stdout)
before = setup()


def opened(rate):
    note = every_steps(1, lambda *_: during.append(setup()))
    data = ((x, x[:, :1]),)
    with crankshaft.open_run(Plane, data=data, learning_rate=rate, hooks=[note], **short) as run:
        run.train(steps=3)
        losses[rate] = run.evaluate((x, x[:, :1]))["loss"]


losses = {}
crankshaft.open_run  # imported
threads = [threading.Thread(target=opened, args=(rate,), daemon=True) for rate in (0.1, 0.2)]
for each in threads:
    each.start()
for each in threads:
    each.join(60)
if any(each.is_alive() for each in threads):
    print("hangs", flush=True)
    os._exit(1)
beside = dict(losses)
for rate in beside:
    opened(rate)
found["threads"] = [len(beside), beside == losses]
warn()
logging.info("of the program")
found["setup"] = [len(during) > 3, setup() == before and all(each == before for each in during)]
with crankshaft.open_run(Plane, data=((x, x[:, :1]),), **short) as run:
    found["in a fork"] = [
        forked(fit),
        forked(crankshaft.run, Plane, data=((x, x[:, :1]),), train_steps=1),
        forked(crankshaft.open_run, Plane, data=((x, x[:, :1]),)),
        forked(run.train, 1),
    ]
print(json.dumps(found))
"""
REFUSED = "UsageError: this process was forked from one in which TensorFlow runs, and lacks its threads; start it by"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """What the program has found, and its output."""
    command = [sys.executable, "-c", PROGRAM, tmp_path_factory.mktemp("run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done


@pytest.mark.thorough
def test_first_runs_of_two_threads_start_at_once_as_each_alone(program):
    assert program[0]["threads"] == [2, True]


def test_a_plain_run_loads_no_part_that_it_does_not_have(program):
    modules = program[0]["of a fork before the start"][2]
    assert {"crankshaft.launch.composition.training", "crankshaft.models.mlp"} <= {*modules}
    assert [module for module in modules if part_of(module.removeprefix("crankshaft.").replace(".", "/"))] == []
    modes = ("modes.predicting", "modes.generate", "modes.export", "modes.saved_run")
    assert [module for module in modules if module.endswith(modes)] == []


# Runs without a folder where parts and forms of data are missing, and with one where parts are.
WITHOUT_PARTS = """
import json, sys
import crankshaft


class Missing:
    def __init__(self, names):
        self.names = [f"crankshaft.{each}." for each in names]

    def find_spec(self, name, path=None, target=None):
        if f"{name}.".startswith(tuple(self.names)):
            raise ModuleNotFoundError(f"{name} is missing")


parts, forms = json.loads(sys.argv[1])
missing = Missing(parts + forms)
sys.meta_path.insert(0, missing)
for folder in ({}, {"run_dir": sys.argv[2]}):
    run = crankshaft.run(model="mlp", input="digits", train_steps=5, jit="off", progress="off", **folder)
    assert run.step == 5
    missing.names = missing.names[: len(parts)]  # what a run with a folder may need later is imported as it begins
"""


# What reads data of other forms than arrays.
OTHER_FORMS = [f"engine.data.{name}" for name in ("entry.dataset_entry", "entry.py_dataset", "feeds.streamed_feed")]


@pytest.mark.thorough
def test_a_run_needs_no_part_and_no_form_of_data_that_it_does_not_ask_for(tmp_path):
    missing = [f"parts.{part}" for part in PARTS], OTHER_FORMS
    command = [sys.executable, "-c", WITHOUT_PARTS, json.dumps(missing), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-6000:]


def test_a_program_keeps_its_logging(program):
    found, done = program
    assert found["setup"] == [True, True]
    assert "MINE of the program\n" in done.stdout
    assert done.stdout.count("reduction=None") == 1


def test_a_warning_is_shown_in_a_program_without_logging_and_leaves_it_so(program):
    found, done = program
    assert found["of a fork before the start"][1]
    (line,) = [line for line in done.stderr.splitlines() if "reduction=None" in line]
    assert line.startswith("crankshaft.mean got one number for a batch")


def test_a_fork_trains_unless_tensorflow_ran_before_it(program):
    found, _ = program
    assert found["of a fork before the start"][0] > 0
    for line in found["in a fork"]:
        assert str(line).startswith(REFUSED)


ASKED = {"train_steps": 20, "jit": "off", "progress": "off"}
SCRIPT = """
import atexit, sys
from tests.runner import test_in_a_program as test_exit
if __name__ == "__main__":
    atexit.register(lambda: print("open at the end:", test_exit.Endless.open, flush=True))
    run = test_exit.trained()
    assert run.evaluate(test_exit.Endless().dataset.take(64))
    test_exit.trained(fails=True)
"""


class Endless:
    """A dataset that Python code gives, of more examples than anybody reads; knows how many of its iterators live."""

    open = 0

    def __init__(self):
        spec = (tf.TensorSpec([4]), tf.TensorSpec([1]))
        given = tf.data.Dataset.from_generator(self._examples, output_signature=spec)
        self.dataset = given.apply(tf.data.experimental.assert_cardinality(10**6))

    def _examples(self):
        Endless.open += 1
        try:
            for number in range(10**6):
                yield np.full(4, number % 2, np.float32), np.full(1, number % 2, np.float32)
        finally:
            Endless.open -= 1


class Line(crankshaft.Trainer):
    def __init__(self, fails: bool = False):
        super().__init__()
        self.fails = fails

    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(1)])

    def loss(self, outputs, batch):
        if self.fails:
            with tf.control_dependencies([tf.debugging.assert_less(batch[1], 0.5)]):
                outputs = tf.identity(outputs)
        return crankshaft.mean(tf.square(outputs - batch[1]))


def trained(hooks=(), fails=False, **asked):
    def data():
        return Endless().dataset, Endless().dataset

    asked = {**ASKED, "mode": "train", **asked}
    return crankshaft.run(Line, data=data, hooks=hooks, model_arg={"fails": fails}, **asked)


def assert_nothing_is_open():
    wait_until(lambda: Endless.open == 0)


def failing(status, metrics):
    raise KeyError("mine")


def interrupted(status, metrics):
    signal.raise_signal(signal.SIGINT)


@pytest.mark.thorough
def test_a_run_that_is_kept_reads_no_further():
    kept = trained(strategy="mirrored", num_virtual_devices=2)
    assert_nothing_is_open()
    assert kept.evaluate(Endless().dataset.take(640))["loss"] < 10
    assert_nothing_is_open()


@pytest.mark.thorough
def test_a_program_that_ends_leaves_nothing_that_reads(inside):
    kept = []  # as a script may

    def data():
        kept.extend([Endless().dataset, Endless().dataset.take(64)])
        return (*kept,)

    inside("--train_steps=20", "--jit=off", "--progress=plain", trainer=Line, data=data).ok()
    assert_nothing_is_open()


@pytest.mark.thorough
def test_an_evaluation_that_was_prepared_and_not_made_reads_no_further():
    with pytest.raises(KeyboardInterrupt) as kept:
        trained([every_steps(5, interrupted)], mode="train_and_eval", train_steps=10**6, eval_every_steps=10**6)
    assert_nothing_is_open()
    assert kept.value.__traceback__ is not None  # whose frames would keep it


@pytest.mark.parametrize(
    ("fails", "kind"),
    [
        ({"fails": True}, crankshaft.UsageError),
        pytest.param({"hooks": [every_steps(5, failing)]}, KeyError, marks=pytest.mark.slow),  # the program's own
    ],
    ids=["step", "hook"],
)
def test_an_error_that_is_kept_keeps_no_input(fails, kind):
    with pytest.raises(kind) as error:
        trained(**fails)
    assert_nothing_is_open()
    assert error.value.__traceback__ is not None  # whose frames would keep it


@pytest.mark.slow
def test_a_script_that_trains_evaluates_and_fails_ends(crank, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = crank(script=script)
    assert done.code == 1
    assert "open at the end: 0" in done.out
