"""`--mode=benchmark` from beginning to end, in one process."""

from __future__ import annotations

import json

import pytest

from tests.launch.conftest import MLP


def test_benchmark_times_steps_and_leaves_the_run_alone(inside, small_probe, tmp_path):
    outcome = inside(
        *MLP, "--mode=benchmark", "--benchmark_steps=60", f"--run_dir={tmp_path}", f"--result_json={tmp_path}/b.json"
    ).ok()
    found = json.loads((tmp_path / "b.json").read_text())
    assert found["mode"] == "benchmark"
    assert set(found["step_ms"]) == {"p50", "p90", "p99"}
    for name in (
        *("mean", "stderr", "jitter", "input_wait_fraction", "compile_seconds", "peak_rss_mb", "environment"),
        *("examples_per_sec", "steps_per_sec", "wall_seconds", "model", "input", "strategy", "num_replicas"),
    ):
        assert name in found
    assert "steps/s" in outcome.out
    assert not (tmp_path / "config.json").exists()
    assert not (tmp_path / "result.json").exists()
    assert not list(tmp_path.glob("checkpoints/ckpt*"))


@pytest.mark.slow
def test_benchmark_of_all_parts_explains_the_whole_and_names_the_ops(inside, tmp_path):
    outcome = inside(
        *(*MLP, "--mode=benchmark", "--benchmark_seconds=0.05", "--benchmark_part=all", "--profile", "--jit=off"),
        *(f"--run_dir={tmp_path}", f"--result_json={tmp_path}/b.json"),
    ).ok()
    found = json.loads((tmp_path / "b.json").read_text())
    timed, shares = found["parts"], found["parts"]["shares"]
    assert timed["reduce"] is None
    assert any("reduce was not timed: one replica" in line for line in found["warnings"])
    assert sum(shares.values()) == pytest.approx(1.0)
    assert all(timed[name]["ms_per_step"] > 0 for name in ("whole", "step", "input", "update"))
    assert timed["checkpoint"]["mb"] > 0
    # 784-16-10: forward, for the weights, and for the second layer's inputs.
    assert found["flops_per_step"] == 2 * 64 * (2 * 784 * 16 + 3 * 16 * 10)
    assert found["roofline"]["bound"] in ("compute", "memory")
    assert any("MatMul" in op["type"] for op in found["profile"]["ops"])
    assert len(found["profile"]["ops"]) == 10
    assert list(tmp_path.glob("tensorboard/plugins/profile/*/*.xplane.pb"))
    assert not list(tmp_path.glob("checkpoints/*"))
    assert "share of limit" in outcome.out


@pytest.mark.slow
def test_benchmark_on_replicas_says_what_share_their_sums_take(inside, tmp_path):
    place = ("--strategy=mirrored", "--num_virtual_devices=2", "--mode=benchmark", "--benchmark_seconds=0.1")
    inside(*MLP, *place, f"--result_json={tmp_path}/b.json").ok()
    found = json.loads((tmp_path / "b.json").read_text())
    assert 0 < found["reduce_fraction"] <= 1
    inside(*MLP, "--mode=benchmark", "--benchmark_seconds=0.1", f"--result_json={tmp_path}/b.json").ok()
    assert json.loads((tmp_path / "b.json").read_text())["reduce_fraction"] is None


@pytest.mark.slow
def test_benchmark_on_a_mesh_tells_the_sums_over_the_model_apart(inside, tmp_path):
    sizes = [f"--model_arg={size}" for size in ("layers=1", "width=16", "heads=2")]
    model = ("--model=transformer_lm", *sizes, "--input=text", "--input_arg=context=16", "--global_batch_size=4")
    mesh = ("--strategy=mirrored", "--num_virtual_devices=2", "--mesh=model:2")
    asked = ("--mode=benchmark", "--benchmark_seconds=0.05", "--benchmark_part=all", "--progress=plain")
    outcome = inside(*model, *mesh, *asked, f"--result_json={tmp_path}/b.json").ok()
    shares = json.loads((tmp_path / "b.json").read_text())["parts"]["shares"]
    assert shares.keys() == {"step", "model_sums", "input", "reduce", "update", "unexplained"}
    assert sum(shares.values()) == pytest.approx(1.0)
    assert "sums over model" in outcome.out
