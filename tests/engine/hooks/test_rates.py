"""What a run says of its input: how long steps wait for it, what is read, what is there before it is asked for."""

from __future__ import annotations

import time

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.data.source import Source, Spec
from crankshaft.engine.hooks import Hook, every_steps
from crankshaft.engine.hooks.bottlenecks import InputBound
from crankshaft.engine.strategies import FeedOptions
from tests.engine.trainers import Squares

pytestmark = pytest.mark.thorough

EXAMPLES, BATCH, WIDTH = 96, 8, 4
SECONDS = 0.2  # that a slow read takes, of one batch


class Waiting(Source):
    """Examples whose reading takes so long, each time."""

    element_spec = (Spec((WIDTH,), np.float32), Spec((), np.float32))

    def __init__(self, seconds: float = 0.0, chunk_examples: int = 1):
        self._seconds, self.chunk_examples = seconds, chunk_examples

    def __len__(self):
        return EXAMPLES

    def read(self, indices):
        time.sleep(self._seconds)
        return np.ones([len(indices), WIDTH], np.float32), indices.astype(np.float32)


def slow_dataset():
    def wait(x):
        time.sleep(SECONDS / 4 / BATCH)
        return x

    arrays = np.ones([EXAMPLES, WIDTH], np.float32), np.arange(EXAMPLES, dtype=np.float32)
    data = tf.data.Dataset.from_tensor_slices(arrays)
    return data.map(lambda x, y: (tf.ensure_shape(tf.numpy_function(wait, [x], tf.float32), [WIDTH]), y))


class Kept(Hook):
    """Keeps all calls; `window` has all but the first, which compiles."""

    def attach(self, state, meter):
        self.window, self.calls = meter.window(leaves_out_first=True), []

    def __call__(self, status):
        self.calls.append(status.segment)


@pytest.fixture
def watched(bench):
    """watched(data, steps, ...): the hook `Kept` of a run, beside other hooks."""

    def run(data, steps, replicas=1, hooks=()):
        feed = FeedOptions(resident_bytes=0)
        made = bench(Squares(), data, BATCH, replicas, feed=feed, block_steps=1)
        kept = Kept()
        made.loop([every_steps(2, lambda *_: None), kept, *hooks], steps)
        return kept

    return run


@pytest.mark.parametrize("replicas", [1, 2])
def test_steps_that_wait_for_a_source_say_so(watched, replicas):
    found = watched(Waiting(SECONDS), 12, replicas).window.totals.input
    # Two reads at a time: a step takes half of SECONDS at least, nearly all of it waiting, but on a very busy machine.
    assert found["input_wait_fraction"] > 0.2
    assert found["input_wait_ms"] > 0.1e3 * SECONDS
    assert found["input_steps_ahead"] <= 4


def test_steps_that_wait_for_a_dataset_say_so_though_the_wait_is_in_the_loop(watched):
    calls = watched(slow_dataset(), 24).calls
    # The second epoch's shuffle reads all of it first.
    assert max(call.input_seconds for call in calls[1:]) > 0.05 * SECONDS * EXAMPLES / BATCH
    assert all(call.input_seconds <= call.seconds for call in calls)


@pytest.mark.parametrize(("chunk_examples", "epochs_read"), [(1, 2), (16, 1)])  # a window of chunks holds them all
def test_bytes_are_those_that_a_source_has_read(watched, chunk_examples, epochs_read):
    kept = watched(Waiting(chunk_examples=chunk_examples), 24)  # two epochs
    epoch = EXAMPLES * (WIDTH + 1) * 4
    read = sum(call.input_bytes for call in kept.calls)
    assert epochs_read * epoch <= read <= (epochs_read + 1) * epoch


def test_what_is_read_ahead_of_idle_steps_is_counted(watched):
    class Idle(Hook):
        def __call__(self, status):
            time.sleep(0.05)

    # Blocks of one step: two in the pipeline's buffer and two at work.
    assert 1 <= max(call.steps_ahead for call in watched(Waiting(), 24, hooks=[Idle()]).calls) <= 5


def test_data_in_memory_reads_nothing(watched):
    arrays = np.ones([EXAMPLES, WIDTH], np.float32), np.ones(EXAMPLES, np.float32)
    found = watched(arrays, 24).window.totals.input
    assert set(found) == {"input_wait_fraction"}


def test_a_run_that_waits_for_input_says_so_once(watched, caplog):
    watched(Waiting(SECONDS), 24, hooks=[InputBound("read less", window_seconds=2 * SECONDS)])
    said = [record.getMessage() for record in caplog.records if "wait for input" in record.getMessage()]
    assert len(said) == 1
    assert said[0].endswith("examples/s); read less")


def test_a_run_that_waits_for_nothing_does_not(watched, caplog):
    class Slow(Hook):  # so that reading is always ahead
        def __call__(self, status):
            time.sleep(0.05)

    watched(Waiting(), 24, hooks=[InputBound("read less", fraction=0.9, window_seconds=1e-6), Slow()])
    assert "wait for input" not in caplog.text
