"""`crankshaft.fit` that trains a piece of its steps at each request: a peer of `turns.py`, a process itself.

`python -m benchmarks.peers.crankshaft_fit --workload=mlp`: on the compiled model and the data of `keras_fit`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import sys
import threading
import time

import crankshaft
from crankshaft.engine.hooks import Hook

from .. import keras_peer
from ..turns import take_turns
from ..workloads import WORKLOADS


class InPieces(Hook):
    """Holds the run at the end of each piece until another thread asks for the next one."""

    name = "in_pieces"

    def __init__(self):
        self._requests, self._rates = queue.SimpleQueue(), queue.SimpleQueue()

    def rate(self, steps: int) -> float:
        """Steps a second of `steps` more steps."""
        self._requests.put(steps)
        return self._rates.get()

    def begin(self, status):
        self._first = status.step
        self._end, self._began = self._first + self._requests.get(), time.perf_counter()

    def next_due(self, step, status):
        return self._end

    def __call__(self, status):
        if status.step == self._end:
            status.segment.sums.read()  # waits for them
            self._rates.put((self._end - self._first) / (time.perf_counter() - self._began))
            self.begin(status)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args()
    answers, pieces = sys.stdout, InPieces()

    def answer():
        take_turns(pieces.rate, answers)
        os._exit(0)  # fit has no end of its own

    threading.Thread(target=answer, daemon=True).start()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        model, data, options = keras_peer.prepare(arguments.workload, "fit", arguments.precision)
        crankshaft.fit(model, *data.train, epochs=1_000_000, hooks=[pieces], **options)


if __name__ == "__main__":
    main()
