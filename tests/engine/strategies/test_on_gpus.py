"""What is done otherwise where replicas compute on GPUs. On a machine without one TensorFlow puts on the CPU what is
asked for on GPU:0: graphs and feeds are as they would be there, and nothing is said of speed."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import config

from crankshaft.engine.data.arrays import ArraySource, for_device, gather_examples
from crankshaft.engine.hooks.bottlenecks import Stragglers
from crankshaft.engine.meter import Meter, Segment, Totals
from crankshaft.engine.metrics.pairs import Mean
from crankshaft.engine.optimizers import outer
from crankshaft.engine.reduction import Reduction
from crankshaft.engine.reduction.local_sgd import LocalSgd
from crankshaft.engine.strategies import FeedOptions, StrategyOptions, WorkerTask, replicated
from crankshaft.engine.strategies.arrivals import Arrivals
from crankshaft.engine.strategies.base import Processes
from crankshaft.engine.strategies.inner_loop import InnerLoop
from crankshaft.engine.strategies.replicated import Replicated
from crankshaft.input import synthetic_clicks
from crankshaft.models.cnn import Model as Cnn
from crankshaft.models.mlp import Model as Mlp
from crankshaft.models.wide_deep import Model as WideDeep
from crankshaft.parts.benchmark.measure import rounds
from crankshaft.parts.workers.multi_worker import resolver, watched_figures
from crankshaft.parts.workers.workers_loop import WorkersLoop
from tests.arrays import assert_same
from tests.engine.strategies.gpu_memory import waits
from tests.engine.trainers import pictures

STREAMED = FeedOptions(resident_bytes=0)
without_gpus = pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="a GPU rounds otherwise")


@pytest.fixture(scope="module", autouse=True)
def _gpu_kernels_are_registered():
    if not tf.test.is_built_with_cuda():
        pytest.skip("this TensorFlow has no kernels for GPUs")


def on(bench, device: str, trainer, sync_every_steps: int = 0, **options):
    reduction = LocalSgd(sync_every_steps, outer()) if sync_every_steps else None
    return bench(trainer, pictures(70), 16, num_classes=4, device=device, reduction=reduction, **options)


@pytest.fixture
def waits_of(monkeypatch):
    """waits_of(bench): what any of its loops would wait for, that which trains and that which evaluates, if it does."""
    loops = []

    class Noted(InnerLoop):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            loops.append(self)

    monkeypatch.setattr(replicated, "InnerLoop", Noted)

    def waits_of(made):
        made.train(1)
        if made.strategy.evaluation:
            made.strategy.evaluate()
        programs = [[*loop.programs.values()] for loop in loops]
        assert len(programs) == 1 + bool(made.strategy.evaluation)
        assert all(programs)
        return [wait for of_loop in programs for traced in of_loop for wait in waits(traced.program)]

    return waits_of


@pytest.mark.parametrize(
    ("trainer", "options"),
    [
        pytest.param(Mlp((8,)), {}, marks=pytest.mark.slow),
        (Mlp((8,)), {"feed": STREAMED}),
        (Mlp((8,)), {"clip_norm": 1.0, "ema_decay": 0.9}),
        pytest.param(Mlp((8,)), {"sync_every_steps": 4}, marks=pytest.mark.thorough),
        pytest.param(Cnn(), {}, marks=pytest.mark.slow),
        pytest.param(Cnn(), {"precision": "bfloat16"}, marks=pytest.mark.thorough),
    ],
)
def test_no_step_waits_for_the_device(bench, waits_of, trainer, options):
    """Else the host could not run ahead: a value that it needs comes when all that was asked for before is done."""
    assert waits_of(on(bench, "GPU:0", trainer, eval_source=pictures(40), **options)) == []


def test_no_step_on_tables_waits_for_the_device(bench, waits_of):
    clicks = synthetic_clicks.load(None, 0, examples=64)
    made = bench(WideDeep(), tuple(clicks.train), 16, vocabulary=clicks.vocabulary, device="GPU:0")
    assert waits_of(made) == []


def test_what_waits_is_found(bench, waits_of):
    """Of a step that may be left out, whether it is: a branch, in a loop of several steps and in one of single."""
    found = waits_of(on(bench, "GPU:0", Mlp((8,)), on_nonfinite="skip"))
    assert found
    assert all("IsFinite" in each for each in found)


@without_gpus
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"feed": STREAMED}, marks=pytest.mark.slow),
        pytest.param({"sync_every_steps": 4}, marks=pytest.mark.slow),
        pytest.param({"jit": True}, marks=pytest.mark.thorough),
    ],
)
def test_a_run_has_the_bits_that_it_has_on_the_cpu(bench, options):
    found = []
    for device in ("CPU:0", "GPU:0"):
        made = on(bench, device, Mlp((8,)), **options)
        sums = made.train(11, calls_of=4)  # two epochs, smaller last batches, calls cut short
        found.append((sums, made.arrays()))
    (sums, arrays), (gpu_sums, gpu_arrays) = found
    for each in (sums, gpu_sums):  # counted where kernels do not raise: on GPUs, and by XLA
        assert not np.any(each.pop("labels from 0 to 3", 0.0))
    assert sums == gpu_sums
    assert_same(arrays, gpu_arrays)


@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 2, 3)])
def test_int32_travels_as_float32_of_the_same_bits(shape):
    """Those of NaN too, which arithmetic would change."""
    rng = np.random.default_rng(0)
    array = rng.integers(-(2**31), 2**31, shape).astype(np.int32)
    array.flat[:4] = 0x7F800001, -1, -(2**31), 0
    kept = for_device(array, on_gpus=True)
    assert kept.dtype == np.float32
    indices = tf.constant([5, 0, 0, 3], tf.int64)
    np.testing.assert_array_equal(gather_examples(tf.constant(kept), indices, array), array[[5, 0, 0, 3]])


def test_what_is_no_int32_stays_as_it_is():
    for dtype in (np.int64, np.float32, np.uint8):
        assert for_device(np.zeros((2, 3), dtype), on_gpus=True).dtype == dtype


def test_a_gpu_is_sent_larger_blocks_than_a_cpu_s_cache_holds():
    source = ArraySource((np.zeros((4096, 1 << 14), np.float32), np.zeros(4096, np.int32)))

    def block_steps(device: str) -> int:
        strategy = Replicated("test", tf.distribute.OneDeviceStrategy(device), StrategyOptions(feed_options=STREAMED))
        return strategy.feed(source, 16, 0).order.block_steps

    assert block_steps("CPU:0") == 7  # a batch is 2^20 + 64 bytes
    assert block_steps("GPU:0") == 63


class Watchdog:
    def beat(self, step, *_):
        assert step is None  # a program without state is an evaluation, whose steps are not the run's


def rows_of(device: str):
    """What a worker alone, with a replica there, tells of a call of three steps."""
    strategy = tf.distribute.OneDeviceStrategy(device)

    def step(batch, step, collect_norm):
        reduction = Reduction()
        reduction.watched = watched_figures(strategy)
        found = reduction.pop_figures()
        own = {f"worker/{name}": Mean(value, tf.constant(1.0)) for name, value in found.items()}
        return {"loss": Mean(tf.reduce_sum(batch[0]), tf.constant(4.0)), **own}

    ones = ArraySource((np.ones((32, 2), np.float32), np.zeros(32)))
    feed = Replicated("test", strategy, StrategyOptions(steps_per_loop=8)).feed(ones, 4, 0)
    loop = WorkersLoop(strategy, step, feed, processes=Processes(), arrivals=Arrivals(), watchdog=Watchdog())
    result = loop(0, 3)
    assert result.sums.read()["loss"] == (24.0, 12.0)
    return result.workers


@pytest.mark.parametrize(
    ("device", "timed"), [("CPU:0", {"step_ms", "own_ms", "reduce_wait_ms"}), pytest.param("GPU:0", set())]
)
def test_of_gpus_no_time_is_told_that_the_host_s_clock_does_not_see(device, timed):
    """Their work is done long after the host has handed it out. What the host itself waits for is told."""
    totals = Totals()
    totals.add(Segment(0, workers=rows_of(device)))
    (figures,) = totals.workers()
    assert set(figures) == timed | {"input_wait_ms"}


def test_a_clock_that_is_set_back_within_a_call_makes_no_time_negative(monkeypatch):
    readings = itertools.count()
    clock = lambda: 1.7e9 - 86400.0 * next(readings)  # noqa: E731
    monkeypatch.setattr(tf, "timestamp", lambda: tf.numpy_function(clock, [], tf.float64))
    totals = Totals()
    totals.add(Segment(0, workers=rows_of("CPU:0")))
    (figures,) = totals.workers()
    assert figures["step_ms"] == figures["own_ms"] == 0.0
    assert 0.0 <= figures["input_wait_ms"] < 86400.0  # the host's, by its monotonic clock
    assert next(readings) > 2


def test_who_is_slow_is_not_guessed_where_no_times_are_told(caplog):
    class Status:
        step = 3

    hook, meter, rows = Stragglers(["worker 0"], window_seconds=0.0, windows=1), Meter(), rows_of("GPU:0")
    hook.attach(None, meter)
    hook.begin(Status)
    meter.add(Segment(0, workers=rows))
    hook(Status)
    assert not caplog.records
    assert rounds.reduce_seconds(rows) is None


@pytest.fixture
def _deterministic():
    tf.config.experimental.enable_op_determinism()
    yield
    config.disable_op_determinism()


@pytest.mark.usefixtures("_deterministic")
def test_the_wait_for_data_is_measured_where_kernels_are_deterministic(bench):
    """TensorFlow's own clock raises there."""
    (figures,) = rows_of("GPU:0").read()
    assert figures["input_seconds"] >= 0.0
    made = bench(Mlp((8,)), tf.data.Dataset.from_tensor_slices(pictures(32)), 16, num_classes=4, device="GPU:0")
    made.train(3)
    assert made.state.step == 3


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("jit", [False, True])
def test_xla_compiles_no_sum_of_segments_where_kernels_are_deterministic(bench, jit):
    """TensorFlow's own kernels need it for the loss's gradient; XLA adds them in a loop of the batch's length."""
    made = bench(Mlp((8,)), pictures(32), 16, num_classes=4, jit=jit)
    made.train(2)
    kinds = made.strategy.training.operations
    own = 1  # the confusion matrix, which no training step computes: XLA removes it
    assert kinds["UnsortedSegmentSum"] == own + (not jit)
    assert kinds["SparseSoftmaxCrossEntropyWithLogits"] == jit
    assert config.is_op_determinism_enabled()


def test_workers_compute_on_the_gpus_that_they_took():
    """By the number that TensorFlow is told; without one it takes none, and says nothing."""
    task = WorkerTask(1, ("worker 0", "worker 1"), ("localhost:1", "localhost:2"))
    assert resolver(task, 2).num_accelerators() == {"GPU": 2}
