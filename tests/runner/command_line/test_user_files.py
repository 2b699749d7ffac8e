"""A model and an input in files of the user's own: --model=path.py and --input=path.py.

A user's own script, made a program by train.main: own flags, data, layers and exports.
"""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest
import tensorflow as tf
from absl import flags
from absl.testing import flagsaver

import crankshaft
from crankshaft import mean
from crankshaft.engine.checkpoints.manifest import with_digest
from crankshaft.launch import program
from crankshaft.runner.command_line import parsing
from crankshaft.runner.failures import UsageError
from tests.launch.line import RUN, Line
from tests.runner.command_line.test_config import asked

pytestmark = pytest.mark.thorough

MODEL = '''"""A line."""
import tensorflow as tf
from crankshaft import Trainer, mean
from slopes import START


class Base(Trainer):
    def __init__(self, start: float = START, units: int = 1):
        super().__init__()
        self.start, self.units = start, units


class Model(Base):
    def build_model(self):
        start = tf.constant_initializer(self.start)
        return tf.keras.Sequential([tf.keras.layers.Dense(self.units, kernel_initializer=start)])

    def loss(self, outputs, batch):
        return mean(tf.square(outputs[:, 0] - batch[1]))
'''
INPUT = '''"""Points on a line."""
import numpy as np


def load(data_dir, seed, *, examples: int = 32):
    features = np.random.default_rng(seed).normal(size=(examples, 1)).astype(np.float32)
    return (features, 2 * features[:, 0]), (features, 2 * features[:, 0])
'''
FILES = ("--model=my model/line.py", "--input=my model/points.py", *RUN, "--run_dir=run")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder; `my model` in it has a model, an input, and a file that the model imports."""
    (tmp_path / "my model").mkdir()
    (tmp_path / "my model" / "line.py").write_text(MODEL)
    (tmp_path / "my model" / "points.py").write_text(INPUT)
    (tmp_path / "my model" / "slopes.py").write_text("START = 0.0\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.holds("a script, `--model=file.py`", "a checkpoint")
def test_a_model_and_an_input_from_files_train_evaluate_and_export_from_anywhere(inside, folder, monkeypatch):
    inside(*FILES, "--model_arg=start=1.5", "--input_arg=examples=24", "--learning_rate=0").ok()
    about = json.loads((folder / "run" / "config.json").read_text())
    assert about["deciding"]["model"] == "line.py"
    assert about["deciding"]["model_arg"] == {"start": 1.5, "units": 1}
    assert about["deciding"]["input"] == "points.py"
    assert about["flags"]["model"] == str(folder / "my model" / "line.py")

    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    run, named = f"--run_dir={folder}/run", [f"--{kind}={about['flags'][kind]}" for kind in ("model", "input")]
    inside("--mode=eval", run, *named, f"--result_json={elsewhere}/eval.json").ok()
    loss = json.loads((elsewhere / "eval.json").read_text())["eval"]["loss"]
    points = np.random.default_rng(0).normal(size=(24, 1))
    assert loss == pytest.approx(np.mean((2 * points - 1.5 * points) ** 2), rel=1e-5)  # float32's
    inside("--mode=export", run, *named).ok()
    assert crankshaft.load_model(folder / "run").predict(np.ones([1, 1]), verbose=0) == pytest.approx(1.5)
    described = json.loads((folder / "run" / "model.json").read_text())
    (folder / "run" / "model.json").write_text(json.dumps(described | {"keras": None}))  # as of a subclassed model
    with pytest.raises(UsageError, match=r"ckpt-4.manifest.json names .*line.py, .*; give load_model its trainer"):
        crankshaft.load_model(folder / "run")
    manifest = folder / "run" / "checkpoints" / "ckpt-4.manifest.json"
    record = json.loads(manifest.read_text())
    for name, line in ((["/evil.py"], r"4.manifest.json: model=\['/evil.py'\] is a list"), ("evil", "evil is unknown")):
        record["about"]["flags"]["model"] = name
        manifest.write_text(json.dumps(with_digest(record)))
        path = elsewhere / str(name)  # which the list is as text
        path.parent.mkdir(exist_ok=True)
        path.write_text("raise SystemExit('it ran')")
        with pytest.raises(UsageError, match=line):
            crankshaft.load_model(folder / "run")
    record["about"]["flags"]["model"] = about["flags"]["model"]
    manifest.write_text(json.dumps(with_digest(record)))
    (folder / "run" / "model.json").write_text(json.dumps(described))

    monkeypatch.setenv("HOME", str(folder))
    again = ("--model=~/my model/line.py", "--input=../my model/points.py", "--learning_rate=0", *RUN[1:], run)
    arguments = ("--model_arg=start=1.5", "--input_arg=examples=24")
    outcome = inside(*again, *arguments, "--train_steps=6").ok()
    assert "resum" in (outcome.out + outcome.err).lower()
    assert json.loads((folder / "run" / "result.json").read_text())["step"] == 6
    outcome = inside(*again, "--model_arg=start=2", "--input_arg=examples=24", "--train_steps=8")
    assert "model_arg start: 1.5 -> 2" in outcome.mistake


@pytest.mark.holds("a run's folder, or its `config.json`", "`--mode=eval`, `export` and `generate`")
def test_a_file_that_a_run_dir_names_does_not_run_unless_the_caller_names_it_too(folder):
    """Whoever made the run_dir chose the name; and their file may lie beside it."""
    inside = folder / "run" / "checkpoints"
    inside.mkdir(parents=True)
    (inside / "ckpt-4.manifest.json").touch()
    (folder / "run" / "config.json").write_text(json.dumps(asked(*FILES).as_json()))
    model, points = folder / "my model" / "line.py", folder / "my model" / "points.py"
    on_its_word = "which does not run on that file's word alone; give"
    for mode in ("eval", "export", "generate"):
        call = (f"--mode={mode}", "--run_dir=run")
        with pytest.raises(UsageError, match=f"run/config.json names {model}, {on_its_word} model={model}"):
            asked(*call)
        with pytest.raises(UsageError, match=f"run/config.json names {points}, {on_its_word} input={points}"):
            asked(*call, f"--model={model}")
        assert asked(*call, f"--model={model}", f"--input={points}").model == str(model)
    with pytest.raises(UsageError, match=f"config=run/config.json names {model}, {on_its_word} model={model}"):
        parsing.from_argv(["crankshaft train", "--config=run/config.json"])
    parsing.from_argv(["crankshaft train", "--config=run/config.json", f"--model={model}", "--input", str(points)])


@pytest.mark.holds("a `--config` or `--flagfile`", "Flags of one call are not taken")
def test_a_runs_configuration_names_no_code_no_hosts_and_no_folders_for_another_call(folder, caplog):
    """Nor does a mapping of its flags alone, beside a run's files; another file is as its user's own words."""
    (folder / "run").mkdir()
    (folder / "run" / "events.jsonl").touch()
    call = ["crankshaft train", "--config=run/config.json"]
    config, model = folder / "run" / "config.json", str(folder / "my model" / "line.py")
    places = {"cluster_hosts": "a:1,b:2", "bind": "0.0.0.0", "metrics_port": 9119, "task_index": 0, "mode": "eval"}
    places |= {"export_dir": "y", "init_from": "z", "result_json": "r", "tensorboard_dir": "x"}
    saved = asked("--model=mlp", "--input=csv", "--input_arg=label=a").as_json()
    plain = {"model": "mlp", "input": "csv", "input_arg": {"label": "a"}}
    for values in (saved, plain):
        in_run = values.get("flags", values)
        in_run |= places
        in_run["input_arg"]["prepared_dir"] = "/etc"
        config.write_text(json.dumps(values))
        caplog.clear()
        taken = parsing.from_argv([*call, "--run_dir=new", "--bind=127.0.0.1"])
        assert taken["model"] == "mlp"
        assert taken["input_arg"] == {"label": "a"}
        assert taken.keys() & places.keys() == {"bind"}
        assert taken["bind"] == "127.0.0.1"
        line = "config=run/config.json is a run's, of which these are not taken: "
        assert line in caplog.text
        assert "bind" not in caplog.text
        for name, value in {**places, "prepared_dir": "/etc"}.items():
            assert (f"{name}={value}" in caplog.text) == (name != "bind")
        in_run["model"] = model
        config.write_text(json.dumps(values))
        with pytest.raises(UsageError, match=f"config=run/config.json names {model}, which does not run"):
            parsing.from_argv(call)
    (folder / "run" / "mine.json").write_text(json.dumps(plain))
    assert parsing.from_argv(["crankshaft train", "--config=run/mine.json"])["cluster_hosts"] == "a:1,b:2"


@pytest.mark.holds("Flags of one call are not taken")
def test_a_run_that_is_read_writes_no_file_where_its_folder_says_and_is_the_same_run(inside, folder):
    (folder / "t.csv").write_text("x,label\n" + "".join(f"{x / 7},{x % 2}\n" for x in range(40)))
    data = ("--model=logistic", "--input=csv", "--data_dir=t.csv", "--validation_split=0.2", "--train_steps=2")
    inside(*data, "--input_arg=array=true", "--input_arg=prepared_dir=fast", "--run_dir=run").ok()
    shutil.rmtree(folder / "fast")
    outcome = inside("--mode=eval", "--run_dir=run").ok()
    assert "run/config.json: prepared_dir=fast is not taken from a run" in outcome.err
    assert not (folder / "fast").exists()
    assert (folder / ".crankshaft").exists()


def test_the_scripts_flags_of_a_config_give_no_flag_of_another_call(folder, script_flags):
    about = asked("--model=mlp", "--input=synthetic").as_json()
    about["flags"]["flagfile"] = "flags.txt"
    of_others = {"model": "evil.py", "init_from": "evil", "flagfile": "x", "log_dir": "x"}
    about["deciding"]["script_flags"] = {**of_others, "slope": "up"}
    (folder / "config.json").write_text(json.dumps(about))
    with pytest.raises(UsageError, match=r"config.json: slope is unknown"):
        parsing.from_argv(["crankshaft train", "--config=config.json"])
    slope = script_flags.DEFINE_string("slope", "down", "Of the line.")
    values = parsing.from_argv(["crankshaft train", "--config=config.json"])
    assert slope.value == "up"
    assert flags.FLAGS.log_dir != "x"
    assert values["model"] == "mlp"
    assert not values.keys() & {"init_from", "flagfile"}


def test_a_file_that_was_changed_runs_as_it_is_now(folder):
    first = crankshaft.run(
        model="my model/line.py", input="my model/points.py", train_steps=1, learning_rate=0, jit="off"
    )
    path = folder / "my model" / "line.py"
    path.write_text(MODEL.replace("START", "3.0").replace("from slopes import 3.0\n", ""))
    second = crankshaft.run(model=path, input="my model/points.py", train_steps=1, learning_rate=0, jit="off")
    assert [float(run.model.weights[0].numpy()[0, 0]) for run in (first, second)] == [0.0, 3.0]


NO_FILE = "can't be read (No such file or directory); give the path of a Python file"
LOAD = "def load(data_dir, seed):\n    "


@pytest.mark.parametrize(
    ("model", "source", "says"),
    [
        ("--model=none.py", None, f"/none.py {NO_FILE}"),
        ("--model=./mlp", None, f"/mlp {NO_FILE}"),
        ("--model=some.py", "class Modell:\n    pass\n", "/some.py has no class Model; write class Model(crankshaft.T"),
        ("--model=some.py", "class Model:\n    pass\n", "/some.py has a Model that is not a Trainer; write class"),
        ("--model=some.py", "import os\nclass Model(:\n", "/some.py is not Python (invalid syntax, line 2); mend it"),
        ("--model=some.py", "a = '\0'\n", "/some.py is not Python ("),
        ("--model=some.py", "import absent_module\n", "No module named 'absent_module', at /"),
        ("--input=some.py", "x = 1\n", "/some.py has no function load; write def load(data_dir, seed), which returns"),
        ("--input=some.py", "def load():\n    pass\n", "/some.py has a load without the arguments data_dir and seed"),
        ("--input=some.py", f"{LOAD}pass\n", "the data function gave None; return (train, eval"),
        ("--input=some.py", f"{LOAD}return 1 / 0\n", "division by zero, at /"),
    ],
)
def test_each_mistake_in_a_file_is_one_line(inside, folder, model, source, says):
    if source is not None:
        (folder / "some.py").write_text(source)
    flags = {"--model": "--model=my model/line.py", "--input": "--input=my model/points.py"}
    flags[model.partition("=")[0]] = model
    inside(*flags.values(), *RUN).refused(says)


def test_an_argument_that_a_files_model_does_not_take_is_refused_at_once(inside, folder):
    outcome = inside(*FILES, "--model_arg=begin=1")
    assert "model_arg begin: line.py has no such argument; use one of start, units" in outcome.mistake
    assert not os.path.exists(folder / "run" / "config.json")


@pytest.mark.slow
@pytest.mark.parametrize("servers", [(), ("--ps=1",)])
def test_tasks_of_a_cluster_take_the_same_files_and_gpus_of_their_own(crank, folder, monkeypatch, servers):
    """As far as that can be seen without a GPU: TensorFlow warns, and the CPU computes."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    outcome = crank("--workers=2", "--max_restarts=0", *servers, "--", *FILES, "--mode=train", command="local").ok()
    assert json.loads((folder / "run" / "result.json").read_text())["step"] == 4
    for worker in range(0 if os.path.exists("/proc/driver/nvidia") else 2):
        assert f"GPU {worker} is requested, but TensorFlow finds no GPU" in outcome.err


QUIET = ("--jit=off", "--progress=plain")
TWO = ("--strategy=mirrored", "--num_virtual_devices=2")
FEATURES = np.random.default_rng(0).normal(size=(96, 3)).astype(np.float32)
LABELS = FEATURES @ np.array([1.0, -2.0, 0.5], np.float32) + 0.25


class Regression(Line):
    """Least squares."""

    def __init__(self, units: int = 1):
        super().__init__()
        self.units = units

    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(self.units)])

    def metrics(self, outputs, batch):
        return {"error": mean(tf.abs(outputs[:, 0] - batch[1]))}


def arrays():
    return (FEATURES, LABELS), (FEATURES[:30], LABELS[:30])


def found_in(path) -> dict:
    return json.loads(path.read_text())


SCRIPT = '''"""Fits lines."""
import numpy as np
from absl import flags
from crankshaft.launch import train
from tests.launch.line import Line

SLOPE = flags.DEFINE_float("slope", 2.0, "Of the line.")


def data():
    x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(64, 1)
    return (x, SLOPE.value * x[:, 0]), (x, SLOPE.value * x[:, 0])


if __name__ == "__main__":
    train.main(Line, data=data)
'''


@pytest.mark.usefixtures("script_flags")
def test_a_script_is_a_whole_program_with_flags_of_its_own(crank, inside, tmp_path):
    (script := tmp_path / "lines.py").write_text(SCRIPT)
    flags = ("--slope=-3", "--optimizer=sgd", "--learning_rate=0.3", "--global_batch_size=32", "--train_epochs=40")
    crank(*flags, *QUIET, "--eval_every_steps=0", f"--run_dir={tmp_path}/run", script=script).ok()
    assert crankshaft.load_model(tmp_path / "run").get_weights()[0] == pytest.approx(-3, abs=0.01)
    with flagsaver.flagsaver():
        inside.script(script, "--slop=1").refused("did you mean slope")
    helped = inside.script(script, "--help").ok()
    assert "Fits lines." in helped.out
    assert "This script:\n  --slope" in helped.out


@pytest.mark.slow
def test_virtual_devices_come_before_a_data_function_that_uses_tensorflow(crank, tmp_path):
    script = tmp_path / "datasets.py"
    script.write_text(
        "import tensorflow as tf\n"
        "from crankshaft.launch import train\n"
        "def data():\n"
        "    split = tf.data.Dataset.from_tensor_slices((tf.random.normal([32, 4]), tf.zeros([32], tf.int32)))\n"
        "    return split, split, 2\n"
        "train.main(data=data)\n"
    )
    outcome = crank("--model=logistic", *TWO, "--train_steps=2", script=script).ok()
    assert "mirrored, 2 replicas" in outcome.out


def test_a_script_that_changes_its_folder_finds_all_files_where_they_were_typed(inside, tmp_path, monkeypatch):
    """As hydra does for each job. Also where a run is resumed, and its model is loaded."""
    (elsewhere := tmp_path / "elsewhere").mkdir()

    def data():
        os.chdir(elsewhere)
        return arrays()

    flags = ("--run_dir=runs/a b", "--result_json=r.json", "--train_epochs=2", "--checkpoint_every_steps=1", *QUIET)
    for epochs in (2, 3):
        monkeypatch.chdir(tmp_path)
        outcome = inside(*flags, f"--train_epochs={epochs}", trainer=Regression, data=data).ok()
    assert outcome.out.endswith(f" -m tensorboard.main --logdir '{tmp_path}/runs/a b/tensorboard'\n")  # can be pasted
    monkeypatch.chdir(tmp_path)
    model = crankshaft.load_model("runs/a b")
    inside("--mode=eval", *flags[:2], trainer=Regression, data=data).ok()
    assert model.predict(FEATURES, verbose=0).shape == (96, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "r.json", "runs"]
    assert not list(elsewhere.iterdir())


class Parts(Regression):
    """Its layers are beside its model."""

    def build_model(self):
        self.parts = [tf.keras.layers.Dense(4), tf.keras.layers.Dense(1)]
        for part, size in zip(self.parts, (3, 4), strict=True):
            part.build((None, size))
        return tf.keras.Sequential([tf.keras.layers.Identity()])

    def forward(self, features, training):
        for part in self.parts:
            features = part(features, training=training)
        return features

    @property
    def trainable_variables(self):
        return [variable for part in self.parts for variable in part.trainable_variables]


@pytest.mark.parametrize(
    ("trainer", "averages"), [(Regression, ("--ema_decay=0.99",)), (Parts, ())], ids=["average", "layers"]
)
def test_weights_are_brought_to_an_average_and_to_layers_beside_the_model(inside, tmp_path, trainer, averages):
    flags = (*QUIET, "--optimizer=sgd", "--global_batch_size=32")
    inside(*flags, "--train_epochs=9", f"--run_dir={tmp_path}/source", trainer=trainer, data=arrays).ok()
    still = ("--train_steps=1", "--learning_rate=0", *averages, f"--init_from={tmp_path}/source")
    inside(*flags, *still, f"--run_dir={tmp_path}/run", trainer=trainer, data=arrays).ok()
    losses = [found_in(tmp_path / run / "result.json")["eval"]["loss"] for run in ("source", "run")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize(("mode", "regularizer"), [("train_and_eval", "l2"), ("train", None)])
def test_the_summary_of_a_run_says_what_loss_leaves_out(inside, mode, regularizer):
    class Penalized(Regression):
        def build_model(self):
            return tf.keras.Sequential([tf.keras.layers.Dense(1, activity_regularizer=regularizer)])

    done = inside(*QUIET, f"--mode={mode}", "--train_steps=3", trainer=Penalized, data=arrays).ok()
    assert ("loss leaves out what layers add to it; loss_with_penalties" in done.out) == bool(regularizer)


def test_a_scripts_flag_that_may_be_a_secret_is_named_as_it_will_be_readable(folder, script_flags, caplog):
    for name, value in {"api_key": "a", "hub_token": "b", "password": "", "key_dim": "c", "tokens": "d"}.items():
        script_flags.DEFINE_string(name, value, "Of the script.")
    script_flags.DEFINE_integer("num_token", 3, "Of the script.")
    for given in ({}, {"run_dir": "run"}):
        program.configure_program({"input": "digits", **given}, {}, Line, False, ())
        named = [name for name in script_flags.FLAGS if f"the script's flag {name} will be readable" in caplog.text]
        assert sorted(named) == (["api_key", "hub_token"] if given else [])
