"""`--mode=benchmark` from beginning to end, in one process."""

from __future__ import annotations

import json

import pytest

from tests.launch.conftest import MLP


def test_benchmark_times_steps_and_leaves_the_run_alone(inside, small_probe, tmp_path):
    outcome = inside(
        *MLP,
        "--mode=benchmark",
        "--benchmark_arg=steps=60",
        f"--run_dir={tmp_path}",
        f"--result_json={tmp_path}/b.json",
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
def test_a_profile_names_the_ops(inside, tmp_path):
    outcome = inside(
        *(*MLP, "--mode=benchmark", "--benchmark_arg=seconds=0.05", "--benchmark_arg=profile=true", "--jit=off"),
        *(f"--run_dir={tmp_path}", f"--result_json={tmp_path}/b.json"),
    ).ok()
    found = json.loads((tmp_path / "b.json").read_text())
    # 784-16-10: forward, for the weights, and for the second layer's inputs.
    assert found["flops_per_step"] == 2 * 64 * (2 * 784 * 16 + 3 * 16 * 10)
    assert found["roofline"]["bound"] in ("compute", "memory")
    assert any("MatMul" in op["type"] for op in found["profile"]["ops"])
    assert len(found["profile"]["ops"]) == 10
    assert list(tmp_path.glob("tensorboard/plugins/profile/*/*.xplane.pb"))
    assert not list(tmp_path.glob("checkpoints/*"))
    assert found["reduce_fraction"] is None
    assert "share of limit" in outcome.out
