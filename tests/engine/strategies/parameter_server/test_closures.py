"""What closures cost beside their steps: how often one that waits asks the servers, how long one lasts."""

import time

import pytest
import tensorflow as tf

from crankshaft.engine.strategies.parameter_server.closures import Counters, Lease, Returned
from crankshaft.engine.strategies.parameter_server.coordinator import Done
from crankshaft.engine.strategies.parameter_server.pacing import ClosurePace

LOOKS = 48


class SlowCounters(Counters):
    """Of two workers, here: the second is at its first update until the first has looked at it so many times."""

    def __init__(self):
        self.slots, self.workers = 2, 2
        self.looks = tf.Variable(0, dtype=tf.int64)

    def read(self):
        looks = self.looks.assign_add(1)
        return tf.concat([tf.zeros([5], tf.int64), [10], [tf.where(looks < LOOKS, 1, 10)]], 0)

    def read_holding(self):
        return tf.constant([1, 2], tf.int64)


def test_a_worker_that_waits_asks_the_first_server_ever_more_seldom():
    """48 looks are a quarter of a second at least, of sleep: eight of a millisecond, then each an eighth later."""
    counters = SlowCounters()
    seen = tf.constant([0, 0, 0, 0, 0, 10, 1], tf.int64)
    wait = tf.function(lambda: counters.wait_for_slower(tf.constant(0, tf.int64), seen, 4), autograph=False)
    wait = wait.get_concrete_function()
    began = time.monotonic()
    counts = wait()
    waited = time.monotonic() - began
    assert counters.looks.numpy() == LOOKS
    assert counts.numpy().tolist() == [0, 0, 0, 0, 0, 10, 10]
    assert waited > 0.25


@pytest.mark.parametrize(("workers", "steps"), [(2, 250), (8, 250), (32, 1000)])
def test_of_many_workers_each_closure_lasts_longer(workers, steps):
    """The coordinator takes them back one by one: as many a second from 32 workers as from 8. A step takes 1 ms."""
    pace = ClosurePace(workers)
    for number in range(1, workers + 20):
        lease = Lease(number, 0, 0, 0, 0, pace.steps)
        pace.fit(Done(lease, Returned(None, None, None, seconds=0.001 * pace.steps)))
        assert pace.steps == 1 or number > workers  # the first that each takes is compiled
    assert pace.steps == steps
