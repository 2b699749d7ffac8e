"""A step's parts by themselves, its ops and the machine's limits: what each does, on one device and on two replicas."""

import os
import re

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.reduction import Reduction
from crankshaft.launch.benchmark.measure import machine, parts, trace
from crankshaft.models import mlp

BATCH, LEARNING_RATE = 8, 0.5
REPLICAS = pytest.mark.parametrize("replicas", [1, 2])


@pytest.fixture
def made(bench):
    """made(replicas, ...): an mlp of two layers with its data, ready to run."""

    def make(replicas, examples=20, units=16, **options):
        images = np.random.default_rng(0).random((examples, 4, 4), np.float32)
        labels = (np.arange(examples) % 3).astype(np.int64)
        options = {"optimizer": "sgd", "learning_rate": LEARNING_RATE, **options}
        model = mlp.Model(hidden_units=(units,))
        return bench(model, (images, labels), BATCH, replicas, num_classes=3, **options)

    return make


def run(made, part, steps):
    """Runs a part for so many steps; the mean of the metric that stands for what it computed."""
    part.bind(made.strategy, made.state)
    return made.train(made.state.step + steps)["loss"].value()


def exhausted(*_):
    raise AssertionError("the input was read")


@REPLICAS
def test_step_trains_on_one_whole_batch_and_reads_no_input(made, replicas, monkeypatch):
    made = made(replicas)
    feed = made.strategy.train_feed
    made.jump(2)  # the epoch's last batch, which is smaller
    part = parts.step(made.strategy, made.state, feed, jit=False)
    monkeypatch.setattr(feed, "take", exhausted)
    first, later = run(made, part, 1), run(made, part, 30)
    assert later < first  # that batch is learnt
    assert made.strategy.train_order.examples_before(30) == 30 * BATCH


@REPLICAS
def test_a_users_dataset_is_timed_by_itself_and_left_out_of_the_step(bench, replicas):
    images, labels = np.ones([20, 4, 4], np.float32), np.zeros([20], np.int64)
    read = tf.Variable(0, dtype=tf.int64)

    def counted(*example):
        with tf.control_dependencies([read.assign_add(1)]):
            return tf.nest.map_structure(tf.identity, example)

    source = tf.data.Dataset.from_tensor_slices((images, labels)).map(counted)
    made = bench(mlp.Model(hidden_units=(16,)), source, BATCH, replicas, num_classes=3, shuffle=False)
    feed = made.strategy.train_feed
    part = parts.input(made.strategy, made.state, feed, jit=False)
    assert run(made, part, 4) == pytest.approx(1.0)  # a pixel, and a label of 0
    assert read.numpy() >= 20 + BATCH
    part = parts.step(made.strategy, made.state, feed, jit=False)
    run(made, part, 1)
    held = part.feed.take(0, 1).operands
    assert (
        tf.nest.flatten(made.strategy.distribution.experimental_local_results(held[0]))[0].shape[0] == BATCH // replicas
    )


@pytest.mark.parametrize(("replicas", "jit"), [(1, False), (1, True), (2, False)])
def test_input_changes_nothing(made, replicas, jit):
    made = made(replicas)
    before = made.arrays()
    part = parts.input(made.strategy, made.state, made.strategy.train_feed, jit)
    assert 0 <= run(made, part, 9) <= 3  # the mean of a pixel, in 0 to 1, and a label, 0 to 2
    counters = [variable is made.state.step_variable for variable in made.state.variables()]
    for same, now, is_counter in zip(before, made.arrays(), np.repeat(counters, replicas), strict=True):
        assert is_counter or np.array_equal(same, now)


@REPLICAS
def test_update_applies_the_gradients_that_are_there(made, replicas):
    made = made(replicas)
    variables = parts.dense_variables(made.trainer)
    before = [made.copies(variable) for variable in variables]
    part = parts.update(made.strategy, made.state, made.strategy.train_feed, jit=False)
    ((gradients,), _, _) = part.feed.take(0, 1)
    run(made, part, 4)
    for variable, copies, gradient in zip(variables, before, gradients, strict=True):
        gradient = made.strategy.distribution.experimental_local_results(gradient)[0].numpy()
        for was, now in zip(copies, made.copies(variable), strict=True):
            # Four subtractions in float32, of which each rounds to 6e-8 of the value.
            np.testing.assert_allclose(now, was - 4 * LEARNING_RATE * gradient, rtol=1e-6, atol=1e-6)


def test_reduce_sums_what_replicas_hold(made):
    made = made(2)
    part = parts.reduce(made.strategy, made.state, made.strategy.train_feed)
    ((gradients,), _, _) = part.feed.take(0, 1)
    firsts = [made.strategy.distribution.experimental_local_results(g)[0].numpy().flat[0] for g in gradients]
    # Looked at are each sum's first value, and the count of the two replicas.
    assert run(made, part, 3) == pytest.approx(2 * sum(firsts) + 2, rel=1e-5)


def test_the_latency_of_a_sum_is_timed_beside_its_rates(made):
    made = made(2)
    found = parts.figures_of_sums(made.strategy, made.state, made.strategy.train_feed, ms_per_step=2.0)
    assert found["bytes"] == 4 * (16 * 16 + 16 + 16 * 3 + 3)
    assert found["latency_ms"] > 0


def test_rates_of_a_sum_by_hand():
    # 1000 values of four bytes in 2 ms are 2 MB/s; of four replicas each link carries 2 x 3/4 of it.
    variables = [tf.Variable(tf.zeros([1000]))]
    found = parts.rates_of_sums(Reduction(), variables, 4, 2.0)
    assert found == {"bytes": 4000, "gb_per_sec": pytest.approx(2e-3), "bus_gb_per_sec": pytest.approx(3e-3)}
    # An all-gather: each link carries the three others' two bytes a value.
    found = parts.rates_of_sums(Reduction("bfloat16"), variables, 4, 2.0)
    assert found == {"bytes": 2000, "gb_per_sec": pytest.approx(1e-3), "bus_gb_per_sec": pytest.approx(3e-3)}


def test_reduce_says_why_there_is_none(made):
    assert "one replica" in parts.without_sums(made(1).strategy, made(1).state)
    assert parts.without_sums(made(2).strategy, made(2).state) is None


def test_shares_by_hand():
    ms = {"whole": 10.0, "step": 8.0, "input": 1.0, "reduce": 2.0, "update": 3.0}
    found = parts.shares({name: {"ms_per_step": value} for name, value in ms.items()})
    assert found == pytest.approx({"step": 0.3, "input": 0.1, "reduce": 0.2, "update": 0.3, "unexplained": 0.1})
    # Input that is read beside the step takes nothing from the whole.
    ms = {"whole": 10.0, "step": 10.0, "input": 4.0, "update": 3.0}
    found = parts.shares({name: {"ms_per_step": value} for name, value in ms.items()} | {"reduce": None})
    assert found == pytest.approx({"step": 0.7, "input": 0.4, "reduce": 0.0, "update": 0.3, "unexplained": -0.4})


@REPLICAS
def test_parts_are_timed_in_turn_and_leave_no_trace(made, replicas):
    made = made(replicas, optimizer="adam")
    before, step, feed = made.arrays(), made.state.step, made.strategy.train_feed
    with made.state.kept():
        pieces = {make.__name__: make(made.strategy, made.state, feed, False) for make in (parts.whole, parts.update)}
        found = parts.timed(made.strategy, made.state, pieces, 0.06)
    assert set(found) == {"whole", "update"}
    for each in found.values():
        assert each["ms_per_step"] == pytest.approx(1e3 * each["seconds"] / each["repeats"])
        assert min(each["rounds_ms"]) <= each["ms_per_step"] <= max(each["rounds_ms"])
    assert made.state.step == step
    for same, now in zip(before, made.arrays(), strict=True):
        np.testing.assert_array_equal(now, same)


@REPLICAS
def test_checkpoint_is_written_and_read_while_training_goes_on(made, replicas, tmp_path):
    made = made(replicas)
    with made.state.kept():
        part = parts.step(made.strategy, made.state, made.strategy.train_feed, jit=False)
        found = parts.checkpoint(made.strategy, made.state, part, str(tmp_path))
    assert [name for name in os.listdir(tmp_path) if name.endswith(".manifest.json")]
    assert len(found["samples"]) == found["repeats"] == 3
    for name in ("mb", "write_mb_per_sec", "restore_mb_per_sec", "blocked_ms"):
        assert found[name] > 0
        assert min(each[name] for each in found["samples"]) <= found[name] <= max(e[name] for e in found["samples"])


@pytest.mark.parametrize(("replicas", "jit"), [(1, False), (1, True), (2, False)])
def test_profile_names_the_matrix_products(made, replicas, jit, tmp_path):
    made = made(replicas, units=256, jit=jit)
    made.train(4)
    found = trace.profile(made.strategy, made.state, str(tmp_path))
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
