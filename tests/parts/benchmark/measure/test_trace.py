"""A step's ops, by their time."""

import itertools
import re

import numpy as np
import pytest

from crankshaft.models import mlp
from crankshaft.parts.benchmark.measure import trace

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize(("replicas", "jit"), [pytest.param(1, True, marks=pytest.mark.slow), (2, False)])
def test_profile_names_the_matrix_products(bench, replicas, jit, tmp_path):
    data = np.random.default_rng(0).random((20, 4, 4), np.float32), np.arange(20) % 3
    made = bench(mlp.Model(hidden_units=(256,)), data, 8, replicas, num_classes=3, jit=jit)
    made.train(4)
    found = trace.profile(made.strategy, str(tmp_path))
    assert any("MatMul" in op["type"] for op in found["ops"])
    assert not any(op["type"].startswith(("While", "while", "StatefulPartitionedCall")) for op in found["ops"])
    assert not any(re.search(r"\bwhile(_\d+)?/", op["name"]) for op in found["ops"])
    assert sum(op["share"] for op in found["ops"]) == pytest.approx(1.0)
    assert sum(op["ms_per_step"] for op in found["ops"]) == pytest.approx(found["ops_ms_per_step"])
    assert made.state.step == 14
    (file,) = tmp_path.glob("plugins/profile/*/*.xplane.pb")
    calls = _steps(trace.xplane_pb2.XSpace.FromString(file.read_bytes()))
    assert [first for first, _ in calls] == [*itertools.accumulate([4, *(steps for _, steps in calls)])][:-1]
    assert sum(steps for _, steps in calls) == 10


def _steps(space: trace.xplane_pb2.XSpace) -> list[tuple[int, int]]:
    """The first step and the number of steps of each event that TensorBoard takes for a step's, by time."""
    found = []
    for plane in space.planes:
        for event in (event for line in plane.lines for event in line.events):
            stats = {plane.stat_metadata[stat.metadata_id].name: stat.int64_value for stat in event.stats}
            if {"step_num", "_r"} <= stats.keys():
                assert plane.event_metadata[event.metadata_id].name == "train"
                found.append((stats["step_num"], stats["steps"]))
    return sorted(found)


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
