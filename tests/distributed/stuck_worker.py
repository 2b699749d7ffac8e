"""One worker of a small job under a `Watchdog`, for its tests: TIMEOUT_SECONDS [STEP at which worker 1 is stuck]."""

import json
import os
import sys

import tensorflow as tf

from crankshaft.engine.strategies.arrivals import Arrivals
from crankshaft.parts.workers.watchdog import FIRST_CALL_FACTOR, Watchdog

STEPS_PER_CALL = 50
CONFIG = json.loads(os.environ["TF_CONFIG"])
WORKER, ADDRESSES = CONFIG["task"]["index"], CONFIG["cluster"]["worker"]
STUCK_AT = int(sys.argv[2]) if len(sys.argv) > 2 and WORKER == 1 else -1


def read_forever(step):
    """The input function of a worker that is stuck."""
    while step == STUCK_AT:
        pass
    return step


def main() -> int:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    arrivals = Arrivals()
    with strategy.scope():
        total = tf.Variable(0.0)
    numbers = tf.data.Dataset.counter().map(lambda step: tf.py_function(read_forever, [step], tf.int64))
    batches = iter(strategy.distribute_datasets_from_function(lambda _: numbers))

    def step(batch):
        total.assign_add(tf.distribute.get_replica_context().all_reduce("sum", tf.cast(batch, tf.float32)))

    @tf.function
    def call(steps):
        for _ in tf.range(steps):
            asked = tf.timestamp()
            batch = next(batches)
            arrivals.mark(batch, asked)
            strategy.run(step, args=(batch,))

    names = tuple(f"worker {index}" for index in range(len(ADDRESSES)))
    with Watchdog(WORKER, names, tuple(ADDRESSES), float(sys.argv[1]), arrived=arrivals.count) as watchdog:
        try:
            for index in range(1 << 40):
                watchdog.beat(index * STEPS_PER_CALL, 1.0 if index else FIRST_CALL_FACTOR)
                call(tf.constant(STEPS_PER_CALL))
                watchdog.beat((index + 1) * STEPS_PER_CALL)
                if index == 2:
                    print("under way", flush=True)
        except tf.errors.OpError as error:
            print(f"error: {watchdog.explain_lost_peer(error) or error}", file=sys.stderr, flush=True)
            # TensorFlow takes seconds, up to ten, to shut down beside a server that is gone.
            watchdog.close()
            os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
