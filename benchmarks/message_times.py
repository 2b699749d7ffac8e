"""Times all-reduces between the workers of TF_CONFIG or, without it, two virtual devices or all GPUs: a process's work.

`python -m benchmarks.message_times` prints {bytes of one message: seconds} as JSON. The sums are those of the
engine's reduction, which are gathers if they are small, else rings (`engine.mesh.collectives`).
"""

from __future__ import annotations

import json
import os
import statistics
import time

import tensorflow as tf

from crankshaft.engine.internals.tensorflow import all_replicas_context
from crankshaft.engine.mesh import collectives

SIZES = (1 << 8, 1 << 14, 1 << 18, 1 << 21, 1 << 24, 1 << 26)
_SAMPLES, _SAMPLE_SECONDS = 5, 0.2


def main() -> None:
    """Prints the table, if this is the first worker."""
    strategy = _strategy()
    table = dict(_message_seconds(strategy, size) for size in SIZES)
    if json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"] == 0:
        print(json.dumps(table), flush=True)


def _strategy() -> tf.distribute.Strategy:
    if "TF_CONFIG" in os.environ:
        return tf.distribute.MultiWorkerMirroredStrategy()
    if len(gpus := tf.config.list_physical_devices("GPU")) > 1:
        return tf.distribute.MirroredStrategy([f"GPU:{number}" for number in range(len(gpus))])
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def _message_seconds(strategy: tf.distribute.Strategy, size: int) -> tuple[float, float]:
    """Measures an all-reduce of `size` bytes: (bytes, seconds) of one of its messages."""
    members = strategy.num_replicas_in_sync

    def reduce():
        with all_replicas_context() as replica:
            return collectives.all_reduce(replica, tf.zeros([size // 4]))

    @tf.function(autograph=False)
    def several(count):
        def body(done):
            with tf.control_dependencies(strategy.experimental_local_results(strategy.run(reduce))):
                return done + 1

        return tf.while_loop(lambda done: done < count, body, [tf.constant(0)], parallel_iterations=1)[0]

    def timed(count: int) -> float:
        before = time.perf_counter()
        several(tf.constant(count)).numpy()
        return time.perf_counter() - before

    timed(2)
    count = max(1, round(_SAMPLE_SECONDS / _mean_over_workers(strategy, timed(2) / 2)))
    seconds = statistics.median(timed(count) for _ in range(_SAMPLES)) / count
    is_gathered = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    if is_gathered and members * size <= collectives.GATHERED_BYTES:
        return size, seconds / (members - 1)
    return size / members, seconds / (2 * (members - 1))


def _mean_over_workers(strategy: tf.distribute.Strategy, seconds: float) -> float:
    """Averages the workers' figures, so that all repeat equally often."""

    def mean():
        return tf.distribute.get_replica_context().all_reduce("mean", tf.constant(seconds))

    return float(strategy.experimental_local_results(tf.function(lambda: strategy.run(mean))())[0])


if __name__ == "__main__":
    main()
