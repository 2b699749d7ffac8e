"""Benchmark mode between processes: all make the same calls, and the chief alone speaks."""

import json

import pytest


@pytest.mark.slow
def test_steps_with_parameter_servers_are_timed_and_traced_on_their_tasks(start, tmp_path):
    work = "--model=wide_deep --input=synthetic_clicks --input_arg=examples=2048 --global_batch_size=64"
    length = "--mode=benchmark --benchmark_arg=seconds=0.5 --benchmark_arg=rounds=2 --benchmark_arg=profile=true"
    flags = (*length.split(), *work.split(), f"--result_json={tmp_path}/b.json")
    run_dir = start("run", *flags, local=("--ps=1",), script=()).ok().run_dir
    found = json.loads((tmp_path / "b.json").read_text())
    assert found["reduce_fraction"] is None
    # 8 ids of 16 numbers, 128, 64, 1: forward, for the weights, and for each layer's inputs.
    assert found["flops_per_step"] == 2 * 64 * 3 * (8 * 16 * 128 + 128 * 64 + 64)
    assert found["roofline"]["bound"] in ("compute", "memory")
    assert len(list(run_dir.glob("tensorboard/plugins/profile/*/*.xplane.pb"))) == 3
    assert found["profile"]["steps"] > 1
    assert len(found["profile"]["ops"]) == 10
    assert not list(run_dir.glob("checkpoints/*"))
