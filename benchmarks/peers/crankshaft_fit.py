"""`crankshaft.fit` on the compiled model and the data of `keras_fit`: a peer that takes turns."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time

import crankshaft
from crankshaft.engine.hooks import Hook

from ..peer import parse_arguments, take_turns
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
    arguments = parse_arguments(__doc__, WORKLOADS)
    workload, answers, pieces = WORKLOADS[arguments.workload], sys.stdout, InPieces()

    def answer():
        take_turns(pieces.rate, answers)
        os._exit(0)  # fit has no end of its own

    threading.Thread(target=answer, daemon=True).start()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        from .. import keras_models  # starts TensorFlow

        model, data = keras_models.compiled(arguments.workload)
        crankshaft.fit(model, *data.train, epochs=1_000_000, hooks=[pieces], batch_size=workload.batch)


if __name__ == "__main__":
    main()
