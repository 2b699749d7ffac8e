"""Runs on each kind of files, again and again, in one process: python open_runs.py FOLDER; prints what each leaves."""

import gc
import json
import os
import pathlib
import sys
import threading
import time

import numpy as np

from crankshaft import run

PATIENCE = 10.0  # seconds
RUN = {"model": "logistic", "train_steps": 2, "global_batch_size": 16, "resident_data_mb": 0, "jit": "off"}


def kinds(folder: pathlib.Path):
    """Writes files, and returns the arguments of a run on each kind."""
    rows = "".join(f"{i % 7},{i % 5},{i % 2}\n" for i in range(64))
    (folder / "train.csv").write_text(f"a,b,label\n{rows}")
    np.save(folder / "x.npy", np.zeros((64, 3), np.float32))
    mapped = np.load(folder / "x.npy", mmap_mode="r")
    csv = {"input": "csv", "data_dir": str(folder / "train.csv"), "input_arg": {"array": True}}
    return {"csv": csv, "mapped": {"data": lambda: ((mapped, np.zeros(64, np.int32)), None, 2)}}


def no_more(counts: tuple[int, int], before: tuple[int, int]) -> bool:
    """Whether there are as many of each, or fewer."""
    return counts[0] <= before[0] and counts[1] <= before[1]


def left_open(before: tuple[int, int] | None) -> tuple[int, int]:
    """Threads and descriptors that are open; waits for those above `before`, which threads that end may still hold."""
    deadline = time.monotonic() + PATIENCE
    while True:
        gc.collect()
        counts = threading.active_count(), len(os.listdir("/proc/self/fd"))
        if before is None or no_more(counts, before) or time.monotonic() > deadline:
            return counts
        time.sleep(0.1)


def main(folder: pathlib.Path) -> None:
    """Runs each kind four times, and prints what is open after each run as JSON."""
    found: dict[str, list] = {}
    for name, arguments in kinds(folder).items():
        for _ in range(4):
            run(**RUN, **arguments, progress="off")
            counts = found.setdefault(name, [])
            counts.append(left_open(counts[1] if len(counts) > 1 else None))
    print(json.dumps(found))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
