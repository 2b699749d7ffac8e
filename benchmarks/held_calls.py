"""What a call of a held run costs: python -m benchmarks.held_calls [--calls=10000] [--opens=100]

Times calls of one step of the small mlp beside one call of as many steps, in turn, and prints the difference a call;
then what such calls, and runs that are opened and closed, leave in the process: memory, open files, threads.
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


def seconds(work) -> float:
    """Times a call."""
    before = time.perf_counter()
    work()
    return time.perf_counter() - before


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
        alone = np.median(times["one call of all steps"])
        for name, found in times.items():
            print(f"{name}: {np.median(found):.3f} ms a step, {np.median(found) - alone:+.3f} ms", flush=True)
        print(f"after {2 * calls:,} calls more: {growth(before)}", flush=True)


def open_and_close(opens: int) -> None:
    """Prints what runs leave that were opened and closed, after as many that warm the process up."""

    def some(count: int) -> None:
        for _ in range(count):
            with open_mlp() as run:
                run.train(steps=1)

    some(max(1, opens // 4))
    before = left()
    some(opens)
    print(f"after {opens} runs opened and closed: {growth(before)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--opens", type=int, default=100)
    asked = parser.parse_args()
    time_calls(asked.calls)
    open_and_close(asked.opens)


if __name__ == "__main__":
    main()
