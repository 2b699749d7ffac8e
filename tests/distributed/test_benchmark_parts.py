"""Benchmark mode's parts between processes: all of them make the same calls, and the chief alone speaks."""

import json

import pytest


@pytest.mark.slow
def test_workers_time_all_parts_together(start_workers, tmp_path):
    flags = "--mode=benchmark --strategy=multi_worker --model=mlp --model_arg=hidden_units=16 --input=digits --profile"
    length = "--benchmark_part=all --benchmark_seconds=0.2 --benchmark_rounds=2"
    command = ["-m", "launch.train", *flags.split(), *length.split(), f"--result_json={tmp_path}/b.json"]
    workers = start_workers(2, *command).ok()
    found = json.loads((tmp_path / "b.json").read_text())
    timed = found["parts"]
    assert sum(timed["shares"].values()) == pytest.approx(1.0)
    assert all(timed[name]["ms_per_step"] > 0 for name in ("whole", "step", "input", "reduce", "update"))
    assert timed["reduce"]["bytes"] == 4 * (784 * 16 + 16 + 16 * 10 + 10)
    assert timed["checkpoint"]["mb"] > 0
    assert found["flops_per_step"] == 2 * 64 * (2 * 784 * 16 + 3 * 16 * 10)  # of the global batch
    assert any("CollectiveReduce" in op["type"] for op in found["profile"]["ops"])
    assert "steps/s" not in workers.output(1)
