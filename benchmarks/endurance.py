"""Shows whether a step, a save and a call cost as much on the last day as on the first, and what grows meanwhile.

    python -m benchmarks.endurance [--share=1] [steps epochs record runs calls]

Each case runs in a process of its own, some minutes each, and prints a line for each figure: what was found, and the
most that it may be. `--share=0.01` does a hundredth of the work: it tries the script, and its figures say nothing. Ends
with 1 if a figure is above its limit. Slopes are of the second half of a case, when caches are full.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SAMPLES = 20


class Watch:
    """Samples of this process at equal numbers of units of work: CPU time, memory, open files and threads."""

    def __init__(self, units: int):
        self._every, self._rows = max(1, units // _SAMPLES), []

    def done(self, unit: int) -> None:
        """Notes that a unit of work, counted from 1, is done."""
        if unit % self._every == 0:
            status = Path("/proc/self/status").read_text(encoding="utf-8")
            memory = int(status.partition("VmRSS:")[2].split()[0]) / 1024
            files = len(os.listdir("/proc/self/fd"))
            self._rows.append((unit, time.process_time(), memory, files, threading.active_count()))

    def figures(self, memory_limit: float, per: int, cpu_limit: float = 1.5) -> dict[str, tuple[float, float]]:
        """Returns figures with their limits, by name; `memory_limit` is in MiB for `per` units."""
        units, cpu, memory, files, threads = zip(*self._rows, strict=True)
        half, last = len(units) // 2, len(units) - 1
        costs = [after - before for before, after in itertools.pairwise(cpu)]
        early, late = statistics.median(costs[1 : half + 1]), statistics.median(costs[half:])
        return {
            "CPU time per unit, second half over first": (late / early, cpu_limit),
            f"MiB per {per:,} units": ((memory[last] - memory[half]) * per / (units[last] - units[half]), memory_limit),
            "open files more": (files[last] - files[half], 3),
            "threads more": (threads[last] - threads[half], 3),
        }


def steps(share: float) -> dict[str, tuple[float, float]]:
    """One call on a stream without end."""
    import numpy as np
    import tensorflow as tf

    import crankshaft
    from crankshaft.engine.hooks import every_steps

    count, x = int(200_000 * share), np.random.default_rng(0).normal(size=(6400, 8)).astype("float32")
    watch, done = Watch(count), iter(range(1, count + 1))
    hook = every_steps(1, lambda *_: watch.done(next(done)))
    with crankshaft.open_run(_model(), data=((x, x[:, :1]), None), hooks=[hook], progress="off", jit="off") as run:
        run.train(data=tf.data.Dataset.from_tensor_slices((x, x[:, :1])).repeat(), steps=count)
    return watch.figures(memory_limit=20, per=100_000)


def epochs(share: float) -> dict[str, tuple[float, float]]:
    """Epochs of a small set by `fit`, with validation, saves and the best checkpoint."""
    import keras
    import numpy as np

    import crankshaft

    count, x = max(60, int(1500 * share)), np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    watch = Watch(count)
    model = keras.Sequential([keras.Input([8]), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.001), "mse")
    hook = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: watch.done(epoch + 1))
    with tempfile.TemporaryDirectory() as folder:
        crankshaft.fit(
            *(model, x, x[:, :1], 32, count, 0, [hook]),
            validation_data=(x[:32], x[:32, :1]),
            run_dir=folder,
            checkpoint_every_minutes=2 / 60,
            jit="off",
        )
        manifests = sorted(Path(folder, "checkpoints").glob("*.manifest.json"), key=os.path.getmtime)
        size = manifests[-1].stat().st_size
    return {**watch.figures(memory_limit=20, per=1000), "KiB of a manifest": (size / 1024, 16)}


def record(share: float) -> dict[str, tuple[float, float]]:
    """A restart of a run whose record has a million lines: what its first process and its launcher read."""
    from crankshaft.engine.record.events import EventLog, NewestStep
    from crankshaft.engine.record.goodput import Past

    head = {"time": 1.7e9, "step": 46, "epoch": 1.0, "seconds": 10.0, "examples_per_sec": 1.0}
    window = {"event": "window", **head, "metrics": {"loss": 0.5}, "spent": {"steps": 1.0, "total": 2.0}}
    lines = [json.dumps({"event": "row", **head}) + "\n"] * 9 + [json.dumps(window) + "\n"]
    with tempfile.TemporaryDirectory() as folder:
        path, before = os.path.join(folder, "events.jsonl"), _peak_mb()
        with open(path, "w", encoding="utf-8") as file:
            file.write(json.dumps({"event": "start", "time": 1.7e9, "step": 0, "attempt": 0}) + "\n")
            for _ in range(int(1e5 * share)):
                file.writelines(lines)
        newest, seconds = NewestStep(path), []
        for act in (newest, newest, lambda: EventLog(path).cut(46, Past().replay)):
            began = time.process_time()
            act()
            seconds.append(time.process_time() - began)
    return {
        "s of CPU, a launcher's first look": (seconds[0], 3),
        "s of CPU, its next": (seconds[1], 0.1),
        "s of CPU, a process's start": (seconds[2], 3),
        "MiB more": (_peak_mb() - before, 50),
    }


def runs(share: float) -> dict[str, tuple[float, float]]:
    """Calls of `run` in one process."""
    import numpy as np

    import crankshaft

    count, x = max(40, int(300 * share)), np.random.default_rng(0).normal(size=(640, 8)).astype("float32")
    watch, trainer = Watch(count), _model()
    for number in range(count):
        crankshaft.run(trainer, data=((x, x[:, :1]), None), train_steps=5, progress="off", jit="off")
        watch.done(number + 1)
    return watch.figures(memory_limit=60, per=100)


def calls(share: float) -> dict[str, tuple[float, float]]:
    """Calls of an open run: train, predict and evaluate, of changing sizes."""
    import numpy as np

    import crankshaft

    count, x = max(60, int(20_000 * share)), np.random.default_rng(0).normal(size=(640, 8)).astype("float32")
    watch, sizes = Watch(count), np.random.default_rng(1).integers(1, 300, count)
    with crankshaft.open_run(_model(), data=((x, x[:, :1]), (x, x[:, :1])), progress="off", jit="off") as run:
        for number, size in enumerate(sizes):
            if number % 3 == 0:
                run.train(steps=2)
            elif number % 3 == 1:
                run.predict(x[:size])
            else:
                run.evaluate((x[:size], x[:size, :1]))
            watch.done(number + 1)
    return watch.figures(memory_limit=20, per=5000)


CASES: dict[str, Callable[[float], dict[str, tuple[float, float]]]] = {
    "steps": steps,
    "epochs": epochs,
    "record": record,
    "runs": runs,
    "calls": calls,
}


def _model() -> Any:
    """A small `Trainer` class."""
    import keras
    import tensorflow as tf

    import crankshaft

    class Small(crankshaft.Trainer):
        def build_model(self):
            return keras.Sequential([keras.Input([8]), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])

        def loss(self, outputs, batch):
            return crankshaft.mean(tf.square(outputs - batch[1])[:, 0])

    return Small


def _peak_mb() -> float:
    return int(Path("/proc/self/status").read_text(encoding="utf-8").partition("VmHWM:")[2].split()[0]) / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)}; all if omitted")
    parser.add_argument("--share", type=float, default=1.0, help="of the work (%(default)g)")
    parser.add_argument("--here", action="store_true", help="run the one case in this process, and print JSON")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.cases if name not in CASES]:
        parser.error(f"{unknown[0]} is none of {', '.join(CASES)}")
    if arguments.here:
        print(json.dumps(CASES[arguments.cases[0]](arguments.share)))
        return 0
    above = 0
    for name in arguments.cases or CASES:
        command = [sys.executable, "-m", "benchmarks.endurance", "--here", f"--share={arguments.share}", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        for figure, (found, limit) in json.loads(done.stdout.splitlines()[-1]).items():
            above += found > limit
            print(
                f"{name:<7} {figure:<42} {found:>10.4g}  (at most {limit:g}){'  ABOVE' * (found > limit)}", flush=True
            )
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
