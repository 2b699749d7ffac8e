"""A step's ops, and the machine's limits."""

import re

import numpy as np
import pytest

from crankshaft.launch.benchmark.measure import machine, trace
from crankshaft.models import mlp


@pytest.mark.parametrize(("replicas", "jit"), [pytest.param(1, True, marks=pytest.mark.slow), (2, False)])
def test_profile_names_the_matrix_products(bench, replicas, jit, tmp_path):
    data = np.random.default_rng(0).random((20, 4, 4), np.float32), np.arange(20) % 3
    made = bench(mlp.Model(hidden_units=(256,)), data, 8, replicas, num_classes=3, jit=jit)
    made.train(4)
    found = trace.profile(made.strategy, str(tmp_path))
    assert list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))
    assert any("MatMul" in op["type"] for op in found["ops"])
    assert not any(op["type"].startswith(("While", "while", "StatefulPartitionedCall")) for op in found["ops"])
    assert not any(re.search(r"\bwhile(_\d+)?/", op["name"]) for op in found["ops"])
    assert sum(op["share"] for op in found["ops"]) == pytest.approx(1.0)
    assert sum(op["ms_per_step"] for op in found["ops"]) == pytest.approx(found["ops_ms_per_step"])
    assert made.state.step == 14


def test_time_within_an_op_is_not_its_own():
    plane = trace.xplane_pb2.XPlane(name="/host:CPU")
    names = {
        1: "a/while/body/_1/while/StatefulPartitionedCall/dense/MatMul:MatMul",
        2: "while_1/step_0/inner:Mul",
        3: "no op at all",
    }
    for key, name in names.items():
        plane.event_metadata[key].name = name
    line = plane.lines.add(name="thread")
    for key, offset, duration in [(1, 0, 10_000_000_000), (2, 2_000_000_000, 3_000_000_000), (3, 0, 20_000_000_000)]:
        line.events.add(metadata_id=key, offset_ps=offset, duration_ps=duration)
    found = trace.ops(trace.xplane_pb2.XSpace(planes=[plane]), steps=2)
    assert found == [
        {"name": "dense/MatMul", "type": "MatMul", "ms_per_step": pytest.approx(3.5), "share": pytest.approx(0.7)},
        {"name": "inner", "type": "Mul", "ms_per_step": pytest.approx(1.5), "share": pytest.approx(0.3)},
    ]


@pytest.mark.parametrize("sizes", ["small", pytest.param("as they are", marks=pytest.mark.slow)])
def test_probe_measures_products_memory_and_cache(sizes, request):
    if sizes == "small":
        request.getfixturevalue("small_probe")
    found = machine.probe("/device:CPU:0", ("float32", "bfloat16"))
    assert set(found["matmul_gflops"]) == {"float32", "bfloat16"}
    for name in ("float32", "bfloat16"):
        assert sorted(found["samples"]["matmul_gflops"][name])[2] == found["matmul_gflops"][name] > 0
    assert min(found["memory_gb_per_sec"], found["cache_gb_per_sec"], found["cache_mb"]) > 0


def test_last_cache_is_that_of_all_cores_together(tmp_path):
    def cache(core, index, level, size, shared):
        folder = tmp_path / f"cpu{core}" / "cache" / f"index{index}"
        folder.mkdir(parents=True)
        for name, text in (("level", level), ("size", size), ("shared_cpu_list", shared)):
            (folder / name).write_text(f"{text}\n")

    for core, shared in enumerate(["0-1", "0-1", "2-3", "2-3"]):
        cache(core, 0, 1, "32K", str(core))
        cache(core, 1, 3, "24576K", shared)
    assert machine.last_cache_bytes({0, 1, 2, 3}, tmp_path) == 48 << 20
    assert machine.last_cache_bytes({1}, tmp_path) == 24 << 20
    assert machine.last_cache_bytes({0}, tmp_path / "none") == 32 << 20  # as is assumed where nothing is told
