"""`crankshaft plan` on a small model: what it prints and writes, and one line for each mistake."""

import json

import pytest

from crankshaft.launch.plan import hardware, saved
from crankshaft.launch.plan import main as command
from tests.launch.plan.test_estimate import FIGURES

MLP = ("--model=mlp", "--model_arg=hidden_units=16", "--input=digits", "--jit=off")
WEIGHTS = 4 * (64 * 16 + 16 + 16 * 10 + 10)


@pytest.fixture
def plan(capfd, tmp_path):
    """`plan(*arguments, **figures)`: the command in this process, on such a machine: its code and output."""

    def run(*arguments: str, **figures):
        path = tmp_path / "machine.json"
        path.write_text(json.dumps(FIGURES | {"kind": "cpu", "devices_per_host": 1} | figures))
        with pytest.raises(SystemExit) as ended:
            command.main(["crankshaft plan", f"--on={path}", *arguments])
        out, err = capfd.readouterr()
        return ended.value.code, out, [line for line in err.splitlines() if line.startswith("error: ")]

    return run


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--hosts=0",), "--hosts=0 can't be used: it is not a list of numbers from 1 to 50,000, such as 1,8,64"),
        (("--hosts=1,2", "--strategy=one_device"), "--hosts=2: --strategy=one_device runs on one host"),
        (("--hosts=1000",), "--global_batch_size=64"),
        (("--strategy=parameter_server",), "--strategy=parameter_server needs servers; add --num_ps=N"),
        (("--measure=this.yaml",), "--measure plans nothing; leave --model out"),
        (("--hots=2",), "--hots is unknown"),
        (("--on=h10",), "--on=h10 is neither a file nor published hardware; did you mean h100?"),
    ],
)
def test_a_mistake_is_one_line(plan, arguments, line):
    code, out, errors = plan(*MLP, *arguments)
    assert (code, out) == (2, "")
    assert len(errors) == 1
    assert line in errors[0]


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


def test_a_simulation_and_a_plot_stand_beside_the_plan(plan, tmp_path):
    for module in ("simpy", "matplotlib"):
        pytest.importorskip(module, reason="pip install crankshaft[plan]")
    path, drawn = tmp_path / "plan.json", tmp_path / "plan.svg"
    code, out, errors = plan(*MLP, "--simulate", f"--plot={drawn}", f"--result_json={path}", step_jitter=0.0)
    assert (code, errors) == (0, [])
    (one,) = json.loads(path.read_text())["hosts"]
    # No other host to wait for: failures and checkpoints alone, 7 of them in 30 days.
    assert one["simulated"]["goodput"] == pytest.approx(one["goodput"], abs=0.01)
    assert "simulated goodput" in out
    assert "Simulated, it saturates nowhere." in out
    assert "<svg" in drawn.read_text()
    assert list(saved.read(str(path))) == [1]
    assert "is not a name that ends in .png, .svg or .pdf" in plan(*MLP, "--plot=plan.gif")[2][0]


def test_advice_fits_and_is_flags_to_copy(plan, tmp_path):
    path = tmp_path / "plan.json"
    big = ("--model=mlp", "--model_arg=hidden_units=256,256", "--input=digits", "--jit=off", f"--result_json={path}")
    assert plan(*big, "--strategy=mirrored", "--hosts=1", kind="gpu", devices_per_host=2)[0] == 0
    memory = json.loads(path.read_text())["hosts"][0]["memory"]
    limit = memory["total"] - memory["optimizer"] / 4  # half of the optimizer's state would fit
    shape = {"kind": "gpu", "devices_per_host": 2, "device_memory_gb": limit / 1e9}
    code, out, _ = plan(*big, "--strategy=mirrored", **shape)
    advice = json.loads(path.read_text())["advice"]
    assert (code, json.loads(path.read_text())["fits"]) == (0, False)
    assert "--shard_optimizer" in advice
    assert "--shard_optimizer" in out


@pytest.mark.slow  # starts TensorFlow three times more
def test_this_machine_is_measured_into_a_file_that_on_accepts(tmp_path):
    path = tmp_path / "this.yaml"
    with pytest.raises(SystemExit) as ended:
        command.main(["crankshaft plan", f"--measure={path}"])
    assert ended.value.code == 0
    found = hardware.read(str(path))
    assert found.matmul_tflops.keys() == {"float32", "bfloat16"}
    for links in (found.network_seconds, found.link_seconds):
        assert [size for size, _ in links] == sorted(size for size, _ in links)
        assert len(links) == 6
    assert found.sources["hours_between_failures"] == "an assumption"
    assert {"hours_between_failures", "recovery_seconds", "lease_seconds"} <= {*found.assumed}
    assert not {"step_seconds", "network_overlap", "matmul_tflops"} & {*found.assumed}  # measured
