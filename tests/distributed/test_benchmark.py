"""Benchmark mode between processes: all make the same calls, and the chief alone speaks."""

import json

import pytest


@pytest.mark.slow
def test_a_profile_is_of_all_workers(start_workers, tmp_path):
    flags = "--mode=benchmark --strategy=multi_worker --model=mlp --model_arg=hidden_units=16 --input=digits"
    length = "--benchmark_arg=seconds=0.2 --benchmark_arg=rounds=2 --benchmark_arg=profile=true"
    command = ["-m", "crankshaft", "train", *flags.split(), *length.split(), f"--result_json={tmp_path}/b.json"]
    workers = start_workers(2, *command).ok()
    found = json.loads((tmp_path / "b.json").read_text())
    assert found["flops_per_step"] == 2 * 64 * (2 * 784 * 16 + 3 * 16 * 10)  # of the global batch
    assert any("CollectiveGather" in op["type"] for op in found["profile"]["ops"])  # what is small is gathered
    assert "steps/s" not in workers.output(1)


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
