"""Keras fit that trains a piece of its steps at each request: a peer of `turns.py`, a process of its own.

`python -m benchmarks.peers.keras_fit --workload=mlp --setting=fit_tuned`. What Keras prints goes nowhere.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import sys
import threading
import time

import tensorflow as tf

from .. import keras_peer
from ..turns import take_turns
from ..workloads import WORKLOADS


class InPieces(tf.keras.callbacks.Callback):
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
        self._at_most = int(self.model.optimizer.iterations)  # waits for them
        if self._at_most < self._end:
            return
        if self._end:
            self._rates.put((self._at_most - self._first) / (time.perf_counter() - self._began))
        steps = self._requests.get()
        self._first, self._end, self._began = self._at_most, self._at_most + steps, time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--setting", choices=keras_peer.SETTINGS, required=True)
    arguments = parser.parse_args()
    answers = sys.stdout
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        model, data, shown = keras_peer.prepare(arguments.workload, arguments.setting, "float32")
        pieces = InPieces(keras_peer.SETTINGS[arguments.setting].get("steps_per_execution", 1))
        more = {"epochs": 1_000_000, "callbacks": [pieces], **shown}
        threading.Thread(target=model.fit, args=data.train, kwargs=more, daemon=True).start()
        take_turns(pieces.rate, answers)
    answers.flush()
    os._exit(0)  # fit has no end of its own


if __name__ == "__main__":
    main()
