"""`crankshaft plan` on a small model: what it prints and writes, and one line for each mistake."""

import json
import sys

import pytest

from crankshaft.launch import command
from crankshaft.parts.dashboard import plan_file
from crankshaft.parts.plan import hardware, main
from crankshaft.runner.command_line import parsing
from tests.parts.plan.test_estimate import FIGURES

pytestmark = pytest.mark.thorough

MLP = ("--model=mlp", "--model_arg=hidden_units=16", "--input=digits", "--jit=off")
WEIGHTS = 4 * (64 * 16 + 16 + 16 * 10 + 10)


@pytest.fixture
def plan(capfd, tmp_path):
    """`plan(*arguments, **figures)`: the command in this process, on such a machine: its code and output."""

    def run(*arguments: str, **figures):
        path = tmp_path / "machine.json"
        path.write_text(json.dumps(FIGURES | {"kind": "cpu", "devices_per_host": 1} | figures))
        with pytest.raises(SystemExit) as ended:
            command.execute("plan", [f"--on={path}", *arguments])
        out, err = capfd.readouterr()
        return ended.value.code, out, [line for line in err.splitlines() if line.startswith("error: ")]

    return run


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--hosts=0",), "--hosts=0 can't be used: it is not a list of numbers from 1 to 50,000, such as 1,8,64"),
        (("--hosts=1,2", "--strategy=one_device"), "--hosts=2: strategy=one_device runs on one host"),
        (("--hosts=2", "--strategy=tpu"), "--hosts=2: strategy=tpu runs on one host"),
        (("--hosts=1000",), "global_batch_size=64 does not divide over 1000 replicas"),
        (("--strategy=parameter_server",), "strategy=parameter_server: parameter servers are not planned; leave that"),
        (("--num_ps=4", "--hosts=1,8"), "num_ps=4: parameter servers are not planned; leave that out to plan"),
        (("--hots=2",), "hots is unknown"),
        (("--on=h10",), "--on=h10 is neither a file nor published hardware; did you mean h100?"),
    ],
)
def test_a_mistake_is_one_line(plan, arguments, line):
    code, out, errors = plan(*MLP, *arguments)
    assert (code, out) == (2, "")
    assert len(errors) == 1
    assert line in errors[0]


def test_a_plan_needs_a_machine(capfd):
    with pytest.raises(SystemExit) as ended:
        command.execute("plan", MLP)
    assert ended.value.code == 2
    assert "error: --on is missing; give h100, a100, l4, tpu-v5e, or a file" in capfd.readouterr().err


def test_a_plan_as_a_table_and_as_json(plan, tmp_path):
    path = tmp_path / "plan.json"
    flags = ("--hosts=2,1", "--price_per_host_hour=2", "--train_epochs=4", f"--result_json={path}")
    code, out, errors = plan(*MLP, *flags)
    assert (code, errors) == (0, [])
    found = json.loads(path.read_text())
    assert found["fits"] is True
    assert found["advice"] == []
    assert found["constants"]["memory_gb_per_sec"] == 10
    one, two = found["hosts"]
    assert [(each["hosts"], each["replicas"]) for each in (one, two)] == [(1, 1), (2, 2)]
    for each in (one, two):
        memory, step = each["memory"], each["step"]
        assert memory["total"] == sum(value for name, value in memory.items() if name != "total")
        assert memory["weights"] >= WEIGHTS  # also averages and the like
        assert step["flops"] > 0
        assert step["bound"] in ("compute", "memory", "network", "input", "dispatch")
        assert each["examples_per_sec"] == pytest.approx(64 / step["seconds"])
        assert each["hours"] == pytest.approx(4 * 23 * step["seconds"] / 3600 / each["goodput"])
        assert each["cost"] == pytest.approx(2 * each["hosts"] * each["hours"])
        assert 0.9 < each["goodput"] < 1
    assert one["step"]["wire_bytes"] == 0
    assert two["step"]["wire_bytes"] >= WEIGHTS  # by a ring or a gather of two, each sends its gradients once
    assert two["step"]["flops"] == pytest.approx(one["step"]["flops"] / 2)
    assert "in all" in out
    assert "goodput" in out


SCRIPT = """
from absl import flags
import numpy as np
import tensorflow as tf
import crankshaft

flags.DEFINE_integer("units_of_script", 1, "")

class Plane(crankshaft.Trainer):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(flags.FLAGS.units_of_script)])

    def loss(self, outputs, batch):
        return crankshaft.mean(tf.square(outputs - batch[1]))

def data():
    return (np.zeros([640, 3], np.float32), np.zeros([640, 1], np.float32)), None

if __name__ == "__main__":
    crankshaft.main(Plane, data=data)
"""


MADE = """from crankshaft.parts.keras_models.keras_trainer import KerasTrainer
    mine = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(1)])
    mine.compile("adam", "mse")
    """


@pytest.fixture
def script(tmp_path, monkeypatch, script_flags):
    """`script(text)`: the path of a script, plane.py, which can be imported where the test now is."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        (tmp_path / "plane.py").write_text(text)
        return "plane.py"

    return write


@pytest.mark.parametrize("start", [["plane.py"], ["-m", "plane"]], ids=" ".join)
def test_a_script_is_planned_with_its_trainer_its_data_and_its_flags(plan, script, tmp_path, start):
    script(SCRIPT)
    own = ("--units_of_script=7", "--global_batch_size=32", "--train_epochs=3", "--run_dir=runs/first")
    code, out, errors = plan("--hosts=1,2", "--result_json=plan.json", "--", *start, *own)
    assert (code, errors) == (0, [])
    assert "Plane, batches of 32" in out
    found = json.loads((tmp_path / "plan.json").read_text())
    for each in found["hosts"]:
        assert each["memory"]["weights"] - 4 * (3 * 7 + 7) in range(40)  # counts of steps and the like
        assert each["hours"] == pytest.approx(3 * 20 * each["step"]["seconds"] / 3600 / each["goodput"])
    assert not (tmp_path / "runs").exists()


def test_flags_of_train_may_stand_behind_its_name(plan):
    shown = [plan("--", *words, *MLP) for words in ((), ("train",), ("crankshaft", "train"))]
    assert shown[0] == shown[1] == shown[2]
    assert (shown[0][0], shown[0][2]) == (0, [])


@pytest.mark.parametrize(
    ("last", "line"),
    [
        ("crankshaft.main(Plane, data=data)  # --modle=mlp", "modle is unknown; did you mean "),
        ("crankshaft.run(Plane, data=data)", "a run in Python is not planned, and would train; plan a script that "),
        ("None", "plane.py has ended without crankshaft.main, which is what is planned; call it there"),
        ("crankshaft.main(Plane, data=lambda: 1 / 0)", "ZeroDivisionError: division by zero, at "),
        ("crankshaft.main(KerasTrainer.for_model(mine), data=data)", "Sequential exists, and a plan needs the "),
    ],
)
def test_a_script_that_cannot_be_planned_is_one_line_and_trains_nothing(plan, script, last, line):
    path = script(SCRIPT.replace("crankshaft.main(Plane, data=data)", MADE + last if "mine" in last else last))
    code, out, errors = plan("--", path, *last.partition("# ")[2].split())
    assert (code, out) == (2, "")
    assert len(errors) == 1
    assert line in errors[0]
    assert "no.py does not exist" in plan("--", "no.py")[2][0]


def test_a_simulation_stands_beside_the_plan(plan, tmp_path):
    pytest.importorskip("simpy", reason="pip install simpy")
    path = tmp_path / "plan.json"
    code, out, errors = plan(*MLP, "--simulate", f"--result_json={path}", step_jitter=0.0)
    assert (code, errors) == (0, [])
    (one,) = json.loads(path.read_text())["hosts"]
    # No other host to wait for: failures and checkpoints alone, 7 of them in 30 days.
    assert one["simulated"]["goodput"] == pytest.approx(one["goodput"], abs=0.01)
    assert "simulated goodput" in out
    assert "Simulated, it saturates nowhere." in out
    assert list(plan_file.read(str(path))) == [1]


WIDE = ("--model=mlp", "--model_arg=hidden_units=256,256", "--input=digits", "--jit=off")
DEEP = ("--model=mlp", "--model_arg=hidden_units=64,64,64,64,64,64,64,64,64,64,64,64", "--input=digits", "--jit=off")
LM = ("--model=transformer_lm", "--input=text", "--model_arg=layers=2", "--global_batch_size=4", "--jit=off")
LONG = (*LM, "--input_arg=context=256", "--model_arg=width=32", "--model_arg=heads=1")
HEAVY = (*LM, "--input_arg=context=16", "--model_arg=width=128", "--model_arg=heads=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "advice"),
    [
        ((*WIDE, "--strategy=mirrored"), "--shard_optimizer"),
        pytest.param(
            (*DEEP, "--global_batch_size=4096", "--strategy=one_device"), "--accumulate_steps=4", marks=pytest.mark.slow
        ),
        ((*LONG, "--strategy=one_device"), "--recompute"),
        ((*HEAVY, "--strategy=mirrored"), "--mesh=model:2"),
        pytest.param(
            (*LONG, "--strategy=mirrored"), "--recompute --shard_optimizer --accumulate_steps=2", marks=pytest.mark.slow
        ),
    ],
)
def test_advice_applied_fits(flags, advice):
    """On a machine with just the memory that a plan with the advice needs."""

    def planned(machine, *more):
        passed = parsing.from_argv(["crankshaft train", *flags, *more])
        return main.plan(passed, [1], hardware.from_figures(FIGURES | {"host_memory_gb": 1e3} | machine, "mine"))

    (needed,) = planned({}, *advice.split())["hosts"]
    device, host = needed["memory"]["total"], needed["host_bytes"]
    limits = {"device_memory_gb": 1.0001e-9 * device, "host_memory_gb": 1.0001e-9 * host}
    found = planned(limits)
    assert (found["fits"], advice in found["advice"]) == (False, True)
    for each in found["advice"]:
        assert planned(limits, *each.split())["fits"], each
