"""Keras fit on a workload, in a process of its own: what stands beside Crankshaft in the standard set.

`python -m benchmarks.keras_peer --workload=mlp --setting=fit --seconds=5 --result_json=fit.json`
"""

from __future__ import annotations

import argparse
import time

from crankshaft.launch.host import files

from .workloads import BATCH_SIZE, WORKLOADS

STEPS_PER_EXECUTION = 50
_WARM_UP_SECONDS = 0.5

# Settings of `compile`: fit as people write it, and with many steps in one call, without XLA and with it.
SETTINGS = {
    "fit": {},
    "fit_tuned": {"steps_per_execution": STEPS_PER_EXECUTION, "jit_compile": False},
    "fit_tuned_xla": {"steps_per_execution": STEPS_PER_EXECUTION, "jit_compile": True},
}


def prepare(name: str, setting: str, precision: str) -> tuple:
    """Returns (compiled model, the workload's splits, arguments of fit except the data)."""
    import tensorflow as tf

    from . import keras_models

    tf.keras.config.set_dtype_policy("float32" if precision == "float32" else f"mixed_{precision}")
    data = WORKLOADS[name].load()
    tf.keras.utils.set_random_seed(0)
    model = keras_models.build(name, data)
    keras_models.compile(model, name, **SETTINGS[setting])
    return model, data, {"batch_size": BATCH_SIZE, "verbose": "auto" if setting == "fit" else 2}  # a bar has its price


def measure(name: str, setting: str, precision: str, seconds: float, quality_steps: int) -> dict:
    """Trains `quality_steps` (a multiple of 50), which compiles; evaluates; then continues and is timed.

    Returns:
      steps_per_sec, examples_per_sec; loss and the workload's metric of the evaluation data after `quality_steps`.
    """
    import tensorflow as tf

    model, data, shown = prepare(name, setting, precision)
    x, y = data.train
    few = quality_steps * BATCH_SIZE
    model.fit(tf.nest.map_structure(lambda array: array[:few], x), y[:few], **shown)
    loss, metric = model.evaluate(*data.evaluation, batch_size=BATCH_SIZE, verbose=0)
    watch = _stopwatch(seconds)
    model.fit(x, y, epochs=1_000_000, callbacks=[watch], **shown)
    return {
        "steps_per_sec": watch.rate,
        "examples_per_sec": watch.rate * BATCH_SIZE,
        "loss": float(loss),
        WORKLOADS[name].metric: float(metric),
    }


def _stopwatch(seconds: float):
    """Returns a callback that ends fit after `seconds` of steady state.

    Ends of epochs that fall into the span count: they are part of what fit costs. Steps are counted by the optimizer,
    since the last call of an epoch may do fewer than the others.
    """
    import tensorflow as tf

    class Stopwatch(tf.keras.callbacks.Callback):
        started = None

        def on_train_begin(self, logs=None):
            self.begun = time.perf_counter()

        def on_train_batch_end(self, batch, logs=None):
            now = time.perf_counter()
            if self.started is None and now - self.begun >= _WARM_UP_SECONDS:
                self.first, self.started = int(self.model.optimizer.iterations), time.perf_counter()
            elif self.started is not None and now - self.started >= seconds:
                steps = int(self.model.optimizer.iterations) - self.first  # waits for them
                self.rate = steps / (time.perf_counter() - self.started)
                self.model.stop_training = True

    return Stopwatch()


def main() -> None:
    """Measures what the command line asks for, and writes what `measure` returns to --result_json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--setting", choices=SETTINGS, required=True)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seconds", type=float, default=5.0, help="of steady state")
    parser.add_argument("--quality_steps", type=int, default=100, help="a multiple of 50, before the clock starts")
    parser.add_argument("--result_json", required=True)
    args = parser.parse_args()
    result = measure(args.workload, args.setting, args.precision, args.seconds, args.quality_steps)
    files.write_json(args.result_json, result)


if __name__ == "__main__":
    main()
