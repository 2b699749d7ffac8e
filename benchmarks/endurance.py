"""Shows whether a step, a save and a call cost as much on the last day as on the first, and what grows meanwhile.

    python -m benchmarks.endurance [--share=1] [CASE ...]

Each case runs in a process of its own, some minutes each, and prints a line for each figure: what was found, and the
most that it may be. Slopes are of the second half of a case, when caches are full. Ends with 1 if a figure is above its
limit. `--share=0.01` does a hundredth of the work, to try the script: such figures say little, and decide nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_SAMPLES = 20
_QUIET = {"progress": "off", "jit": "off"}


class Watch:
    """Samples of this process at equal numbers of units of work: CPU time, memory, open files and threads."""

    def __init__(self, units: int):
        self._every, self._rows = max(1, units // _SAMPLES), []

    def done(self, unit: int) -> None:
        """Notes that a unit of work, counted from 1, is done."""
        if unit % self._every == 0:
            files = len(os.listdir("/proc/self/fd"))
            self._rows.append((unit, time.process_time(), _megabytes("VmRSS"), files, threading.active_count()))

    def figures(self, memory_limit: float, per: int, cpu_limit: float = 1.5) -> dict[str, tuple[float, float]]:
        """Returns figures with their limits, by name; `memory_limit` is in MiB for `per` units."""
        units, cpu, memory, files, threads = zip(*self._rows, strict=True)
        half, last = len(units) // 2, len(units) - 1
        costs = [after - before for before, after in itertools.pairwise(cpu)]
        early, late = statistics.median(costs[1 : half + 1]), statistics.median(costs[half:])
        return {
            "CPU time per unit, second half over first": (late / early, cpu_limit),
            f"MiB per {per:,} units": (_slope(units, memory) * per, memory_limit),
            "open files more": (files[last] - files[half], 3),
            "threads more": (threads[last] - threads[half], 3),
        }


def steps(share: float) -> dict[str, tuple[float, float]]:
    """One call on a stream without end."""
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices(_examples(6400)).repeat()
    return _trained(_model(), data, int(200_000 * share)).figures(memory_limit=20, per=100_000)


def generator(share: float) -> dict[str, tuple[float, float]]:
    """One call on the batches of a Python generator without end."""
    import tensorflow as tf

    batch = _examples(32)
    specs = tuple(tf.TensorSpec([None, *x.shape[1:]], x.dtype) for x in batch)
    data = tf.data.Dataset.from_generator(lambda: itertools.repeat(batch), output_signature=specs)
    return _trained(_model(), data, int(200_000 * share)).figures(memory_limit=20, per=100_000)


def pictures(share: float) -> dict[str, tuple[float, float]]:
    """TensorBoard's files with a picture each 10 steps, and histograms each 100."""
    import tensorflow as tf

    class Painting(_model()):
        def compute_metrics(self, predictions):
            return {"outputs": abs(predictions["outputs"][:64]).reshape([8, 8, 1])}

    data = tf.data.Dataset.from_tensor_slices(_examples(6400)).repeat()
    often = {"eval_every_steps": 10, "histogram_every_steps": 100, "global_batch_size": 32}
    with tempfile.TemporaryDirectory() as folder:
        watch = _trained(Painting, data, int(20_000 * share), run_dir=folder, **often)
    return watch.figures(memory_limit=10, per=1000)


def traces(share: float) -> dict[str, tuple[float, float]]:
    """Epochs whose steps are traced again, since a callback has set another momentum."""
    count = max(60, int(300 * share))

    def begin(model, epoch: int) -> None:
        model.optimizer.momentum = epoch / count

    return _fitted(count, begin).figures(memory_limit=20, per=100)


def epochs(share: float) -> dict[str, tuple[float, float]]:
    """Epochs of a small set by `fit`, with validation, saves and the best checkpoint."""
    x, y = _examples(32)
    with tempfile.TemporaryDirectory() as folder:
        often = {"run_dir": folder, "checkpoint_every_minutes": 2 / 60}
        watch = _fitted(max(60, int(1500 * share)), validation_data=(x, y), **often)
        manifests = sorted(Path(folder, "checkpoints").glob("*.manifest.json"), key=os.path.getmtime)
        size = manifests[-1].stat().st_size
    return {**watch.figures(memory_limit=20, per=1000), "KiB of a manifest": (size / 1024, 16)}


def saves(share: float) -> dict[str, tuple[float, float]]:
    """Checkpoints of one run."""
    import crankshaft

    count = max(60, int(3000 * share))
    watch = Watch(count)
    with tempfile.TemporaryDirectory() as folder:
        with crankshaft.open_run(_model(), data=(_examples(640), None), run_dir=folder, **_QUIET) as run:
            for number in range(count):
                run.train(steps=1)
                run.save()
                watch.done(number + 1)
        files = sum(len(names) for *_, names in os.walk(folder))
    return {**watch.figures(memory_limit=20, per=1000), "files of the run": (files, 40)}


def resumes(share: float) -> dict[str, tuple[float, float]]:
    """Calls of `run` that each resume the run of the call before."""
    import crankshaft

    count, data = max(40, int(300 * share)), (_examples(640), None)
    watch, trainer = Watch(count), _model()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            crankshaft.run(trainer, data=data, train_steps=5 * (number + 1), run_dir=folder, **_QUIET)
            watch.done(number + 1)
        files = sum("tfevents" not in name for *_, names in os.walk(folder) for name in names)
    return {**watch.figures(memory_limit=60, per=100), "files of the run but TensorBoard's": (files, 40)}


def record(share: float) -> dict[str, tuple[float, float]]:
    """A record of a million lines: what a restart's launcher and first process read, and a report."""
    from crankshaft.engine.record.events import EventLog, NewestStep
    from crankshaft.engine.record.goodput import Past
    from crankshaft.parts.dashboard.record_reader import RecordReader

    head = {"time": 1.7e9, "step": 46, "epoch": 1.0, "seconds": 10.0, "examples_per_sec": 1.0}
    window = {"event": "window", **head, "metrics": {"loss": 0.5}, "spent": {"steps": 1.0, "total": 2.0}}
    lines = [json.dumps({"event": "row", **head}) + "\n"] * 9 + [json.dumps(window) + "\n"]
    with tempfile.TemporaryDirectory() as folder:
        path, before = os.path.join(folder, "events.jsonl"), _megabytes("VmHWM")
        with open(path, "w", encoding="utf-8") as file:
            file.write(json.dumps({"event": "start", "time": 1.7e9, "step": 0, "attempt": 0}) + "\n")
            for _ in range(int(1e5 * share)):
                file.writelines(lines)
        newest, seconds = NewestStep(path), []
        begun, reported = (lambda: EventLog(path).cut(46, Past().replay)), (lambda: RecordReader(path).poll(600))
        for act in (newest, newest, begun, reported):
            began = time.process_time()
            act()
            seconds.append(time.process_time() - began)
    return {
        "s of CPU, a launcher's first look": (seconds[0], 3),
        "s of CPU, its next": (seconds[1], 0.1),
        "s of CPU, a process's start": (seconds[2], 3),
        "s of CPU, a report": (seconds[3], 10),
        "MiB more": (_megabytes("VmHWM") - before, 50),
    }


def runs(share: float) -> dict[str, tuple[float, float]]:
    """Calls of `run` in one process."""
    import crankshaft

    count, data = max(40, int(300 * share)), (_examples(640), None)
    watch, trainer = Watch(count), _model()
    for number in range(count):
        crankshaft.run(trainer, data=data, train_steps=5, **_QUIET)
        watch.done(number + 1)
    return watch.figures(memory_limit=60, per=100)


def calls(share: float) -> dict[str, tuple[float, float]]:
    """Calls of an open run: train, predict and evaluate, of changing sizes."""
    import numpy as np

    import crankshaft

    count, (x, y) = max(60, int(20_000 * share)), _examples(640)
    watch, sizes = Watch(count), np.random.default_rng(1).integers(1, 300, count)
    with crankshaft.open_run(_model(), data=((x, y), (x, y)), **_QUIET) as run:
        for number, size in enumerate(sizes):
            if number % 3 == 0:
                run.train(steps=2)
            elif number % 3 == 1:
                run.predict(x[:size])
            else:
                run.evaluate((x[:size], y[:size]))
            watch.done(number + 1)
    return watch.figures(memory_limit=20, per=5000)


def servers(share: float) -> dict[str, tuple[float, float]]:
    """Two workers and two servers with tables that evict ids, after each worker and a server were killed."""
    from crankshaft.engine.record.events import NewestStep

    flags = "--model=wide_deep --input=synthetic_clicks --train_steps=1000000000 --jit=off --progress=off".split()
    flags += ["--checkpoint_every_minutes=0.5"]  # the first one takes some 40 MiB, which is no slope
    flags += "--model_arg=table_capacity=4096 --model_arg=admit_after=2 --model_arg=evict_after=20".split()
    with tempfile.TemporaryDirectory() as folder:
        temporary, log, newest = Path(folder, "tmp"), Path(folder, "log"), NewestStep(f"{folder}/run/events.jsonl")
        temporary.mkdir()

        def wait_for_steps() -> int:
            before, until = newest(), time.monotonic() + 600
            while newest() <= before:
                if job.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"error: the job makes no steps\n{log.read_text()[-2000:]}")
                time.sleep(0.5)
            return newest()

        command = [sys.executable, "-m", "crankshaft", "local", "--workers=2", "--ps=2", "--"]
        with log.open("wb") as output:
            job = subprocess.Popen(
                [*command, *flags, f"--run_dir={folder}/run"],
                env={**os.environ, "TMPDIR": str(temporary)},
                stdout=output,
                stderr=output,
            )
        try:
            for task in ("worker 1", "ps 1", "worker 0"):
                wait_for_steps()
                os.kill(int(re.findall(rf"{task} is process (\d+)", log.read_text())[-1]), signal.SIGKILL)
            rows = []
            for _ in range(_SAMPLES):
                time.sleep(15 * share)
                rows.append((wait_for_steps(), *_totals(str(temporary))))
            left = sum(1 for _ in temporary.rglob("*.py"))
        finally:
            job.terminate()
            job.wait()
    steps_done, memory, files, tasks = zip(*rows, strict=True)
    half = _SAMPLES // 2
    return {
        "MiB of all tasks per 10,000 steps": (_slope(steps_done, memory) * 1e4, 100),
        "open files more": (files[-1] - files[half], 3),
        "processes more": (tasks[-1] - tasks[half], 0),
        "temporary files that kills have left": (left, 0),
    }


CASES: dict[str, Callable[[float], dict[str, tuple[float, float]]]] = {
    case.__name__: case
    for case in (steps, generator, pictures, traces, epochs, saves, resumes, record, runs, calls, servers)
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


def _examples(count: int) -> tuple[Any, Any]:
    import numpy as np

    x = np.random.default_rng(0).normal(size=(count, 8)).astype("float32")
    return x, x[:, :1]


def _trained(trainer: Any, data: Any, count: int, **flags: Any) -> Watch:
    """Trains so many steps on a stream in one call of an open run, and watches each."""
    import crankshaft
    from crankshaft.engine.hooks import every_steps

    watch, done = Watch(count), iter(range(1, count + 1))
    hook = every_steps(1, lambda *_: watch.done(next(done)))
    examples = _examples(6400)
    with crankshaft.open_run(trainer, data=(examples, examples), hooks=[hook], **_QUIET, **flags) as run:
        run.train(data=data, steps=count)
    return watch


def _fitted(count: int, begin: Callable[[Any, int], None] = lambda model, epoch: None, **flags: Any) -> Watch:
    """Trains a compiled model for so many epochs, and watches each; `begin` gets the model and its number."""
    import keras

    import crankshaft

    watch, (x, y) = Watch(count), _examples(64)
    model = keras.Sequential([keras.Input([8]), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.001, momentum=0.9), "mse")
    hook = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: begin(model, epoch),
        on_epoch_end=lambda epoch, logs: watch.done(epoch + 1),
    )
    crankshaft.fit(model, x, y, 32, count, 0, [hook], jit="off", **flags)
    return watch


def _slope(units: Sequence[float], memory: Sequence[float]) -> float:
    """Returns by how much memory grows with a unit of work, in the second half of the samples.

    Between medians of its two halves: a sample by itself may be 20 MiB higher while a checkpoint is written.
    """
    half, last = len(units) // 2, len(units) - 1
    quarter = (last - half) // 2
    third, fourth = (statistics.median(memory[at : at + quarter + 1]) for at in (half, last - quarter))
    return (fourth - third) / (units[last - quarter] - units[half])


def _totals(mark: str) -> list[float]:
    """Memory in MiB, open files and number of the processes whose environment has a text."""
    rows = [(0.0, 0, 0)]
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if mark.encode() in Path("/proc", pid, "environ").read_bytes():
                rows.append((_megabytes("VmRSS", pid), len(os.listdir(f"/proc/{pid}/fd")), 1))
    return [sum(column) for column in zip(*rows, strict=True)]


def _megabytes(key: str, process: str = "self") -> float:
    """A size in a process's status."""
    status = Path("/proc", process, "status").read_text(encoding="utf-8")
    return int(status.partition(f"{key}:")[2].split()[0]) / 1024


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
                f"{name:<9} {figure:<42} {found:>10.4g}  (at most {limit:g}){'  ABOVE' * (found > limit)}", flush=True
            )
    return 1 if above and arguments.share >= 1 else 0


if __name__ == "__main__":
    sys.exit(main())
