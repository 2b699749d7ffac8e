"""Keras `fit` as people write it, or with many steps per call: a peer that takes turns.

On JAX if KERAS_BACKEND=jax. Needs Keras, NumPy and the backend. What Keras prints goes nowhere.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time

from ..peer import parse_arguments, take_turns

_BACKEND = os.environ.get("KERAS_BACKEND", "tensorflow")
from ..workloads import WORKLOADS  # noqa: E402, Crankshaft, which makes TensorFlow the backend

os.environ["KERAS_BACKEND"] = _BACKEND
import keras  # noqa: E402

from .. import keras_models  # noqa: E402


class InPieces(keras.callbacks.Callback):
    """Holds fit, which runs in another thread, at the end of each piece until the next request."""

    def __init__(self, steps_per_call: int):
        super().__init__()
        self._steps_per_call = steps_per_call
        self._requests, self._rates = queue.SimpleQueue(), queue.SimpleQueue()
        self._first = self._end = self._at_most = 0

    def rate(self, steps: int) -> float:
        """Steps a second of `steps` more steps, or of some more, up to the end of a call."""
        self._requests.put(steps)
        return self._rates.get()

    def on_train_batch_end(self, batch, logs=None):
        self._at_most += self._steps_per_call  # an epoch's last call does fewer; to ask the optimizer each time costs
        if self._at_most < self._end:
            return
        self._at_most = self._done()
        if self._at_most < self._end:
            return
        if self._end:
            self._rates.put((self._at_most - self._first) / (time.perf_counter() - self._began))
        steps = self._requests.get()
        self._first, self._end, self._began = self._at_most, self._at_most + steps, time.perf_counter()

    def _done(self) -> int:
        """Waits for the steps, and returns how many there have been."""
        if keras.backend.backend() == "jax":
            self.model.jax_state_sync()
        return int(self.model.optimizer.iterations)


def main() -> None:
    arguments = parse_arguments(
        __doc__,
        WORKLOADS,
        steps_per_call={"type": int, "default": 1},
        jit={"choices": ("auto", "on", "off"), "default": "auto"},
    )
    workload, steps = WORKLOADS[arguments.workload], arguments.steps_per_call
    answers, quality = sys.stdout, None
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        settings = {
            "steps_per_execution": steps,
            "jit_compile": {"auto": "auto", "on": True, "off": False}[arguments.jit],
        }
        model, data = keras_models.compiled(arguments.workload, **settings)
        x, y = data.train
        shown = {"batch_size": workload.batch, "verbose": "auto" if steps == 1 else 2}  # a bar has its price
        if few := arguments.quality_steps * workload.batch:
            model.fit(
                {name: ids[:few] for name, ids in x.items()} if isinstance(x, dict) else x[:few], y[:few], **shown
            )
            loss, metric = model.evaluate(*data.evaluation, batch_size=workload.batch, verbose=0)
            quality = {"loss": float(loss), workload.metric: float(metric)}
        pieces = InPieces(steps)
        more = {"epochs": 1_000_000, "callbacks": [pieces], **shown}
        threading.Thread(target=model.fit, args=(x, y), kwargs=more, daemon=True).start()
        take_turns(pieces.rate, answers, quality)
    answers.flush()
    os._exit(0)  # fit has no end of its own


if __name__ == "__main__":
    main()
