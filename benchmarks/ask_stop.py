"""Measures how soon a run stops after `crankshaft ask stop`: `python -m benchmarks.ask_stop --turns=7`.

Each turn starts a run in this process, and requests its end from a thread, by a file as the command does, at a random
time after its first call of the inner loop. Prints the seconds from the request to the end of the last step, to the
answer, by when the run is saved, and those of the last call, which the request may have had to wait for.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
import time

import crankshaft
from crankshaft.engine.checkpoints import RunDir
from crankshaft.engine.hooks import Hook
from crankshaft.engine.machine import requests

from .markdown import spread, table
from .turns import add_turns

_WARM_SECONDS = 2.0  # in which calls reach their length
_WAIT_SECONDS = 60.0


class Asking(Hook):
    """Requests the run's end once, and notes when it was requested, stepped last, and was answered."""

    name = "asking"

    def __init__(self, run_dir: str, delay_seconds: float):
        self._folder, self._delay = RunDir(run_dir).requests, delay_seconds
        self._thread = threading.Thread(target=self._ask)
        self._asked = self._answered = 0.0
        self._calls: list[float] = []

    def __call__(self, status) -> None:
        self._calls.append(time.monotonic())
        if len(self._calls) == 1:
            self._thread.start()

    def _ask(self) -> None:
        time.sleep(self._delay)
        self._asked = time.monotonic()
        if requests.ask(self._folder, "stop", None, _WAIT_SECONDS) is not None:
            self._answered = time.monotonic()

    def seconds(self) -> tuple[float, float, float]:
        """Returns the seconds to the last step, to the answer, and of the last call."""
        self._thread.join()
        last = self._calls[-1]
        return last - self._asked, self._answered - self._asked, last - self._calls[-2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_turns(parser, 7)
    turns, rng, found = parser.parse_args().turns, random.Random(0), []
    for _ in range(turns):
        with tempfile.TemporaryDirectory() as run_dir:
            asking = Asking(run_dir, _WARM_SECONDS + rng.random())
            endless = {"train_steps": 10**8, "mode": "train", "jit": "off", "progress": "off"}
            crankshaft.run(model="mlp", input="digits", hooks=[asking], run_dir=run_dir, **endless)
            found.append(asking.seconds())
    names = "to the last step", "to the answer", "the last call"
    rows = [(name, spread(values)) for name, values in zip(names, zip(*found, strict=True), strict=True)]
    print(table(("after a stop is requested", "seconds: median (least–most)"), rows))


if __name__ == "__main__":
    main()
