"""Keras fit on its JAX backend, as people write it or with many steps a call. In a process of its own.

KERAS_BACKEND=jax has to be in the environment. Needs Keras, JAX and NumPy, no TensorFlow.
"""

from __future__ import annotations

import sys
import time

import keras

from .. import keras_models
from ..race import parse_peer_arguments, write_result
from ..workloads import BATCH_SIZE, WORKLOADS


class Stopwatch(keras.callbacks.Callback):
    """Ends fit after some steps to warm up and some that are timed. Ends of epochs in between are part of fit's price.

    Args:
      warm_up_steps, steps: above.
      stride: steps between two calls of the callback.
    """

    def __init__(self, warm_up_steps: int, steps: int, stride: int):
        super().__init__()
        self.warm_up_steps = warm_up_steps
        self.steps = steps
        self.stride = stride
        self.done = 0
        self.started = None

    def on_train_batch_end(self, batch, logs=None):
        self.done += self.stride
        if self.started is None and self.done >= self.warm_up_steps:
            self.started, self.done = time.perf_counter(), 0
        elif self.started is not None and self.done >= self.steps:
            self.rate = self.done / (time.perf_counter() - self.started)
            self.model.stop_training = True


def main() -> None:
    arguments = parse_peer_arguments(__doc__, steps_per_call=1)
    if keras.backend.backend() != "jax":
        sys.exit(f"KERAS_BACKEND is {keras.backend.backend()}; use jax")
    import jax

    data = WORKLOADS[arguments.workload].load()
    x, y = data.train
    keras.utils.set_random_seed(0)
    model = keras_models.build(arguments.workload, data)
    keras_models.compile(model, arguments.workload, steps_per_execution=arguments.steps_per_call)
    few = arguments.quality_steps * BATCH_SIZE
    model.fit(x[:few], y[:few], batch_size=BATCH_SIZE)
    loss, accuracy = model.evaluate(*data.evaluation, batch_size=BATCH_SIZE, verbose=0)
    watch = Stopwatch(arguments.warm_up_steps, arguments.steps, arguments.steps_per_call)
    model.fit(x, y, batch_size=BATCH_SIZE, epochs=1_000_000, callbacks=[watch])
    versions = {"keras": keras.__version__, "jax": jax.__version__}
    result = {"steps_per_sec": watch.rate, "loss": float(loss), "accuracy": float(accuracy), "versions": versions}
    write_result(arguments.result_json, result)


if __name__ == "__main__":
    main()
