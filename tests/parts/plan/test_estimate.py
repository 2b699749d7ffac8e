"""Seconds, checkpoints and goodput of a plan, beside published figures and hand computations."""

import dataclasses
import math

import numpy as np
import pytest

from crankshaft.parts.plan import hardware
from crankshaft.parts.plan.estimate import best_interval, estimate, message_seconds, slowdown
from crankshaft.parts.plan.quantities import Memory, Message, Product, Work
from crankshaft.runner.failures import UsageError

FIGURES = {
    "kind": "gpu",
    "devices_per_host": 2,
    "device_memory_gb": 1,
    "host_memory_gb": 4,
    "matmul_tflops": {"float32": {"100": 0.1, "1000": 1}},
    "memory_gb_per_sec": 10,
    "network_seconds": {"0": 0.001, "1e9": 1.001},
    "link_seconds": {"0": 0.0, "1e9": 0.1},
    "read_gb_per_sec": 1,
    "write_gb_per_sec": 1,
    "copy_gb_per_sec": 10,
    "hours_between_failures": 100,
}
WORK = Work(
    hosts=1,
    replicas=1,
    memory=Memory(weights=1e8, optimizer=2e8, gradients=1e8, activations=1e8, data=0.0),
    products=(Product("float32", flops=2e9, bytes=12e6, count=100), Product("float32", flops=2e6, bytes=1e7)),
    operations=1000,
    can_jit=False,
    moved_bytes=3.21e9,
    messages=(),
    examples=64,
    input_bytes=0.0,
    checkpoint_bytes=3e8,
    steps=36_000,
)


def _hardware(**changes) -> hardware.Hardware:
    return hardware.from_figures(FIGURES | changes, "mine")


@pytest.mark.parametrize(("mean_minutes", "published"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_best_interval_is_daly_s(mean_minutes, published):
    """Figures 3 to 5 of Daly 2006, for checkpoints of 5 minutes."""
    assert best_interval(300, 60 * mean_minutes) / 60 == pytest.approx(published, abs=0.5 if published > 10 else 0.05)


def test_best_interval_makes_the_run_shortest():
    stall, recovery, mean = 60.0, 600.0, 7200.0
    intervals = np.linspace(100, 4000, 39_001)
    seconds = [(1 + stall / each) * slowdown(each + stall, recovery, 1 / mean) for each in intervals]
    # Equation 37 is an expansion in stall / mean; the minimum is flat.
    assert best_interval(stall, mean) == pytest.approx(intervals[np.argmin(seconds)], rel=1e-3)


def test_slowdown_is_that_of_simulated_failures():
    interval, recovery, mean, random = 300.0, 200.0, 1000.0, np.random.default_rng(0)
    total, saves = 0.0, 20_000
    for _ in range(saves):
        wait = interval  # work, or recovery and work, that no failure may interrupt
        while (until := random.exponential(mean)) < wait:
            total += until
            wait = recovery + interval
        total += wait
    assert total / (saves * interval) == pytest.approx(slowdown(interval, recovery, 1 / mean), rel=0.02)


def test_step_is_the_sum_of_its_parts_by_hand():
    found = estimate(WORK, _hardware(operation_seconds=1e-6, step_seconds=1e-3))
    assert found.step.compute_seconds == pytest.approx(100 * 2e9 / 1e12)  # n = 1000
    # The small product, n = 100, takes 20 us by its rate and 1 ms by its bytes; all else moves 2 GB.
    assert found.step.memory_seconds == pytest.approx(1e-3 + 0.2)
    assert found.step.dispatch_seconds == pytest.approx(2e-3)
    assert found.step.seconds == pytest.approx(0.2 + 0.201 + 0.002)
    assert found.step.bound == "memory"
    assert found.examples_per_sec == pytest.approx(64 / found.step.seconds)
    assert found.hours == pytest.approx(36_000 * found.step.seconds / 3600 / found.goodput)


def test_messages_travel_during_the_backward_pass():
    messages = (Message("all_reduce", 4e8, 2, "hosts"),)
    work = dataclasses.replace(WORK, hosts=2, replicas=2, messages=messages)
    seconds = 2 * (0.001 + 0.2)
    assert message_seconds(messages[0], _hardware()) == pytest.approx(seconds)
    alone = estimate(WORK, _hardware()).step.seconds
    assert estimate(work, _hardware(network_overlap=0)).step.seconds == pytest.approx(alone + seconds)
    assert estimate(work, _hardware()).step.seconds == pytest.approx(alone + seconds - alone * 2 / 3)
    small = Message("all_reduce", 1e6, 1000, "hosts")  # a ring's 1,998 turns, or a tree's 20 and all bytes twice
    assert message_seconds(small, _hardware(kind="cpu")) == pytest.approx(1998 * (0.001 + 1e-6))
    assert message_seconds(small, _hardware()) == pytest.approx(20 * 0.001 + 0.002)


def test_input_bounds_a_step_that_reads_more_than_it_computes():
    found = estimate(dataclasses.replace(WORK, input_bytes=5e8), _hardware())
    assert (found.step.bound, found.step.seconds) == ("input", pytest.approx(0.5))


def test_virtual_devices_share_a_device():
    found = estimate(dataclasses.replace(WORK, replicas=4), _hardware())
    assert found.step.seconds == pytest.approx(2 * estimate(WORK, _hardware()).step.seconds)
    assert found.fits  # 2 x 0.5 GB of 1 GB
    assert not estimate(dataclasses.replace(WORK, replicas=6), _hardware()).fits


def test_goodput_and_cost_by_hand():
    found = estimate(WORK, _hardware(lost_host_share=1, price_per_host_hour=3))
    stall, write, mean = 0.03, 0.3, 360_000
    assert (found.checkpoint.stall_seconds, found.checkpoint.seconds) == pytest.approx((stall, write))
    assert found.checkpoint.interval_seconds == pytest.approx(math.sqrt(2 * stall * mean), rel=1e-3)
    interval, recovery = found.checkpoint.interval_seconds, 600 + 0.3 + write
    assert found.failures.lost_host_seconds == pytest.approx(recovery + (interval + stall) / 2)
    first_order = 1 / (1 + stall / interval + stall / 6 + (recovery + interval / 2) / mean)
    assert found.goodput == pytest.approx(first_order, rel=1e-4)
    assert found.cost == pytest.approx(3 * found.hours)


def test_another_host_s_memory_bounds_what_a_lost_host_costs():
    work = dataclasses.replace(WORK, hosts=2, replicas=2)
    found = estimate(work, _hardware())
    assert found.failures.lost_host_seconds == pytest.approx(600 + found.snapshot_interval_seconds / 2)


def test_without_snapshots_a_failure_costs_the_steps_since_a_checkpoint():
    found = estimate(WORK, _hardware(), snapshot_seconds=0)
    assert found.checkpoint.interval_seconds == pytest.approx(math.sqrt(2 * 0.03 * 360_000), rel=1e-3)
    repeats = (found.checkpoint.interval_seconds + 0.03) / 2
    assert found.failures.seconds == pytest.approx(10 + 0.3 + 0.3 + repeats)  # also reads one, written whole
    assert estimate(WORK, _hardware(), snapshot_seconds=30).failures.seconds == pytest.approx(10 + 30 / 2)
    assert estimate(WORK, _hardware()).host_bytes - found.host_bytes == pytest.approx(2 * 3e8)


@pytest.mark.parametrize("name", ["h100", "a100", "l4", "tpu-v5e"])
def test_published_hardware_is_read_and_has_sources(name):
    found = hardware.read(name)
    assert found.achieved["matmul"] < 1
    assert {"matmul_tflops", "memory_gb_per_sec", "network_seconds", "achieved"} <= found.sources.keys()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("devices_per_host: 0", "devices_per_host is 0; it takes an integer from 1"),
        (
            "{kind: gpu, devices_per_host: 8}",
            "has no device_memory_gb (Memory of one device); add it: a number above 0",
        ),
        ("network_seconds: 0.1", "network_seconds is 0.1; it takes a table such as {0: 0.00002, 1e9: 0.04}"),
        ("network_second: {0: 1}", "network_second is unknown; did you mean network_seconds or link_seconds"),
        ("matmul_tflops: {float23: 4}", "matmul_tflops is {'float23': '4'}; float23 is unknown; did you mean float32"),
        ("price_per_host_hour:", "price_per_host_hour is nothing; it takes a number above 0"),
        ("- 8", "is not a mapping of hardware; write lines such as devices_per_host: 8"),
    ],
)
def test_mistakes_in_a_hardware_file_are_one_line(tmp_path, text, line):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        hardware.read(str(path))
    assert line in error.value.message
    assert "\n" not in error.value.message


def test_unknown_hardware_and_a_dtype_without_a_rate_name_the_cure():
    with pytest.raises(UsageError, match=r"neither a file nor published hardware; did you mean h100\?"):
        hardware.read("h10")
    half = dataclasses.replace(WORK, products=(Product("float16", 1.0, 1.0),))
    with pytest.raises(UsageError, match=r"no matmul_tflops of float16.*it has float32"):
        estimate(half, _hardware())
