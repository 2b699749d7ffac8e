"""Measures the cost of an open run's calls: python -m benchmarks.open_run_calls [--calls=10000] [--opens=100]

Times calls of one step of the small mlp beside one call of as many steps, in turn, and prints the difference a call, in
wall time and in CPU time; then what such calls, and runs that are opened and closed, leave in the process: memory, open
files, threads.

On two cores of an Intel Xeon (AVX-512), quiet, 2026-11-25, with --calls=1000 --opens=10: a step took 0.72 ms in one
long call, 1.25 ms more in a call of its own (1.33 ms of CPU time, 0.3 of it TensorFlow's start of a call), and
1.76 ms more on 64 examples handed in; 2,000 calls left 2.5 MB, rows of the history among it, and 10 runs nothing. Ten
times a bare Keras model, its optimizer and a `tf.function`, made and dropped, left 4.5 MB each, and 4.1 MB with
`tf.keras.backend.clear_session()`: in runs TensorFlow's graphs are freed.
"""

from __future__ import annotations

import argparse
import gc
import os
import threading
import time

import numpy as np

import crankshaft

_ROUNDS = 5
_WARM_UP_OPENS = 6
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def left() -> dict[str, float]:
    """Returns what the process holds: megabytes, open files, threads of Python's and of all."""
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * _PAGE_BYTES / 1e6
    files, tasks = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
    return {"MB": resident, "files": files, "python_threads": threading.active_count(), "threads": tasks}


def growth(before: dict[str, float]) -> str:
    """Formats what has been added since."""
    return ", ".join(f"{name} {value - before[name]:+.4g}" for name, value in left().items())


def seconds(work) -> np.ndarray:
    """Returns the wall and the CPU time of a call, [2]."""
    before = np.array([time.perf_counter(), time.process_time()])
    work()
    return np.array([time.perf_counter(), time.process_time()]) - before


def open_mlp() -> crankshaft.Run:
    """Opens a run of the small mlp, on digits."""
    return crankshaft.open_run(model="mlp", input="digits", mode="train", jit="off", progress="off")


def time_calls(calls: int) -> None:
    """Prints what a call costs, on the run's own data and on data that is handed in."""
    images, labels = np.zeros((64, 28, 28, 1), np.float32), np.zeros(64, np.int32)
    a_round = calls // _ROUNDS

    def many(**how):
        for _ in range(a_round):
            run.train(steps=1, **how)

    with open_mlp() as run:
        ways = {
            "one call of all steps": lambda: run.train(steps=a_round),
            "calls of one step": many,
            "calls of one step on 64 examples handed in": lambda: many(data=(images, labels)),
        }
        for work in ways.values():  # compiles
            work()
        before = left()
        times = {name: [1e3 * seconds(work) / a_round for _ in range(_ROUNDS)] for name, work in ways.items()}
        alone = np.median(times["one call of all steps"], 0)
        for name, samples in times.items():
            (wall, cpu), (more, more_cpu) = np.median(samples, 0), np.median(samples, 0) - alone
            print(f"{name}: {wall:.3f} ms a step, {more:+.3f} ms; of CPUs {cpu:.3f}, {more_cpu:+.3f} ms", flush=True)
        print(f"after {2 * calls:,} calls more: {growth(before)}", flush=True)


def open_and_close(opens: int) -> None:
    """Prints what runs leave that were opened and closed, after some that warm the process up."""

    def some(count: int) -> None:
        for _ in range(count):
            with open_mlp() as run:
                run.train(steps=1)

    some(_WARM_UP_OPENS)
    before = left()
    some(opens)
    print(f"after {opens} runs opened and closed: {growth(before)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--opens", type=int, default=100)
    args = parser.parse_args()
    time_calls(args.calls)
    open_and_close(args.opens)


if __name__ == "__main__":
    main()
