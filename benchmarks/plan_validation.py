"""What the planner predicts beside what a run takes: memory, of real processes, or time. A script, not a test.

    python -m benchmarks.plan_validation --cases=mlp:one_device,cnn:two_workers
    python -m benchmarks.plan_validation --times=this.yaml --cases=mlp:one_device,cnn:two_workers
    python -m benchmarks.plan_validation --times=core.yaml --link=1e9,0.01 --cases=mlp:two_workers,mlp:four_workers

Memory is the sum, over the job's tasks, of the most that each had (VmHWM), minus that of a job of the same tasks with a
model and data of a few bytes. TensorFlow, its threads and what each task imports are in both. Tasks are the job's
largest processes of `crankshaft train`; `crankshaft local`, which starts them, is larger than an empty one. Times are
those of a batch, from examples per second: `crankshaft plan`'s by the file's constants, and benchmark mode's.

With --link, each worker is on a host of its own (`benchmarks.links`), of one core. A plan is made twice: by the times
of messages between two such hosts (`benchmarks.message_times`), and by the file's, to each of which a round trip and
the bytes at the link's rate are added.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .links import Hosts, Link, on_hosts
from .markdown import number, table
from .processes import Process, read_result, run_script, run_together
from .workloads import BATCH_SIZE, WORKLOADS

_POLL_SECONDS = 0.02
_CRANKSHAFT = (sys.executable, "-m", "crankshaft")
_COMMON = ("--jit=off", "--mode=train", "--progress=off", "--train_steps=12")
_NOTHING = ("--model=logistic", "--input=synthetic", "--input_arg=shape=1", "--input_arg=examples=1024")
_FILE = Path(__file__).with_name("memory_models.py")
_SEQUENCES = ("--input=synthetic", "--input_arg=shape=128,128", "--input_arg=examples=1024")
_MODELS = {kind: (f"--model={_FILE}", f"--model_arg=kind={kind}", *_SEQUENCES) for kind in ("gru", "lstm", "attention")}
_NAMES = ("mlp", "wide", "cnn", "resnet20", "wide_deep", "language_model", *_MODELS)
_MIRRORED = ("--strategy=mirrored", "--num_virtual_devices=2")


class Tasks(NamedTuple):
    """How a job's tasks are started, and how the planner is asked for them.

    Attributes:
      command: of `crankshaft`, before the flags.
      flags: of train.
      workers: processes.
      devices: of each worker, in one process here.
      shares: of a batch.
    """

    command: tuple[str, ...]
    flags: tuple[str, ...]
    workers: int = 1
    devices: int = 1
    shares: int = 1


TASKS = {
    "one_device": Tasks(("train",), ()),
    "two_mirrored": Tasks(("train",), _MIRRORED, devices=2, shares=2),
    "two_workers": Tasks(("local", "--workers=2", "--"), ("--strategy=multi_worker",), 2, shares=2),
    "four_workers": Tasks(("local", "--workers=4", "--"), ("--strategy=multi_worker",), 4, shares=4),
    "mesh_1x2": Tasks(("train",), (*_MIRRORED, "--mesh=model:2"), devices=2),
    "mesh_2x1": Tasks(("train",), (*_MIRRORED, "--mesh=data:2", "--shard_optimizer=true"), devices=2, shares=2),
}


def flags(workload: str, tasks: Tasks) -> tuple[str, ...]:
    """Returns a workload's flags of train, with a batch for these tasks."""
    model_flags = _MODELS[workload] if workload in _MODELS else WORKLOADS[workload].flags
    batch_size = BATCH_SIZE if workload in _MODELS else WORKLOADS[workload].batch
    return (*model_flags, *_COMMON, *tasks.flags, f"--global_batch_size={batch_size * tasks.shares}")


def measured_bytes(tasks: Tasks, train_flags: Sequence[str]) -> float:
    """Runs a job, and returns the sum of the most bytes that each of its tasks had. Raises `SystemExit`."""
    command = [*_CRANKSHAFT, *tasks.command, *train_flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    most: dict[int, int] = {}
    try:
        while process.poll() is None:
            for pid in (process.pid, *_descendants(process.pid)):
                most[pid] = max(most.get(pid, 0), _peak_bytes(pid))
            time.sleep(_POLL_SECONDS)
    finally:
        process.terminate()
        printed = process.communicate()[0]
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{printed[-2000:]}")
    return float(sum(sorted(most.values())[-tasks.workers :]))


def _descendants(pid: int) -> Iterator[int]:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            pids = [int(child) for child in children.read_text().split()]
        except OSError:  # it has ended
            continue
        for child in pids:
            yield child
            yield from _descendants(child)


def _peak_bytes(pid: int) -> int:
    try:
        if b" train " not in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" "):
            return 0
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(found[1]) << 10 if found else 0


def predicted_bytes(tasks: Tasks, train_flags: Sequence[str]) -> float:
    """Returns what the planner predicts for a job's processes together.

    The devices of a process share its copy of resident examples.
    """
    from crankshaft.parts.plan.main import configured
    from crankshaft.parts.plan.quantify import quantify
    from crankshaft.runner.command_line import parsing

    given = parsing.from_argv(["crankshaft plan", *train_flags])
    work = quantify(configured(given, tasks.workers, tasks.devices), tasks.workers, tasks.devices)
    memory = work.memory
    return tasks.workers * (work.host_bytes + memory.data + tasks.devices * (memory.total - memory.data))


def predicted_seconds(tasks: Tasks, train_flags: Sequence[str], machine: str) -> float:
    """Returns the seconds that `crankshaft plan` predicts for a batch on the hardware in a file."""
    planned = (flag for flag in train_flags if not flag.startswith("--benchmark_arg"))
    words = ["plan", *planned, f"--on={machine}", f"--hosts={tasks.workers}"]
    plan = _result(words)
    return plan["global_batch_size"] / plan["hosts"][0]["examples_per_sec"]


def measured_seconds(tasks: Tasks, train_flags: Sequence[str], hosts: Hosts | None = None) -> float:
    """Returns the seconds that a batch takes in benchmark mode: here, or with each task on its host."""
    words = [*train_flags, "--mode=benchmark"]
    if not hosts:
        return 1 / _result([*tasks.command, *words])["steps_per_sec"]
    return 1 / _result(["train", *words], functools.partial(on_hosts, hosts, tasks.workers, 0))["steps_per_sec"]


def _here(command: Sequence[str]) -> list[Process]:
    return [Process(command)]


def _result(words: Sequence[str], processes: Callable[[Sequence[str]], Sequence[Process]] = _here) -> dict[str, Any]:
    """Runs a command of `crankshaft` as some processes, and returns what the first writes."""
    words = [word for word in words if word != "--mode=train" and not word.startswith("--train_steps")]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "result.json")
        run_together(processes([*_CRANKSHAFT, *words, f"--result_json={path}"]))
        return read_result(path)


def with_links(machine: str, link: Link, folder: Path) -> list[str]:
    """Returns files of a machine in a network of such links: as messages take there, and as the link's figures say."""
    from crankshaft.parts.plan import hardware
    from crankshaft.parts.plan.hardware import between

    figures = hardware.read(machine)
    by_figures = tuple(
        (size, seconds + 2 * link.delay_seconds + 8 * size / link.bits_per_sec)
        for size, seconds in figures.network_seconds
    )
    with Hosts(2, link) as hosts:
        processes = on_hosts(hosts, 2, 0, [sys.executable, "-m", "benchmarks.message_times"])
        rows = json.loads(run_together(processes)[0][-1])
    (_, latency), *others = sorted((float(size), seconds) for size, seconds in rows.items())
    measured = ((0.0, latency), *others)
    shown = [
        [number(size), number(1e3 * seconds), number(1e3 * between(by_figures, size))] for size, seconds in measured
    ]
    print(table(["bytes of a message", "measured ms", "by the link's figures ms"], shown, names=0), flush=True)
    paths = []
    for name, points in (("measured", measured), ("by_figures", by_figures)):
        paths.append(folder / f"{name}.json")
        constants = dataclasses.asdict(figures) | {"network_seconds": dict(points)}
        constants["matmul_tflops"] = {dtype: dict(rates) for dtype, rates in figures.matmul_tflops.items()}
        constants["link_seconds"] = figures.link_seconds and dict(figures.link_seconds)
        given = {key: value for key, value in constants.items() if value not in (None, {})}
        paths[-1].write_text(json.dumps(given), encoding="utf-8")
    return [str(path) for path in paths]


def main() -> None:
    """Runs the cases one after the other, and prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    fitting = [
        f"{name}:{tasks}"
        for tasks in TASKS
        for name in _NAMES
        if name == "language_model" or ("1x2" not in tasks and (name not in _MODELS or tasks == "one_device"))
    ]
    fitting = [case for case in fitting if case != "wide_deep:mesh_2x1"]  # whose tables no mesh has
    parser.add_argument("--cases", default=",".join(fitting), help="WORKLOAD:TASKS, separated by commas")
    parser.add_argument("--times", help="of a batch instead of memory, by the hardware in this file")
    parser.add_argument("--link", type=_link, help="with --times, between hosts: bits per second, and seconds of delay")
    parser.add_argument("--json", help="a file for the figures")
    parser.add_argument("flags", nargs="*", help="more of all trainings, after --")
    arguments = parser.parse_args()
    if arguments.link and not arguments.times:
        parser.error("--link is of times; add --times")
    with tempfile.TemporaryDirectory() as folder:
        machines = with_links(arguments.times, arguments.link, Path(folder)) if arguments.link else [arguments.times]
        more = arguments.flags
        compare = functools.partial(_times, machines, arguments.link, more) if arguments.times else _memory({}, more)
        _compare_all(arguments, compare)


def _link(text: str) -> Link:
    return Link(*map(float, text.split(",")))


def _compare_all(arguments: argparse.Namespace, compare: Callable[[str, str], Sequence[float]]) -> None:
    """Compares the cases, and prints the table. `compare` returns predictions and then the measured figure of one."""
    unit, scale = ("ms", 1e-3) if arguments.times else ("MiB", 2.0**20)
    rows, figures = [], []
    for case in arguments.cases.split(","):
        workload, _, name = case.partition(":")
        *predicted, measured = (each / scale for each in compare(workload, name))
        figures.append({"case": case, f"predicted_{unit}": predicted, f"measured_{unit}": measured})
        shown = map(number, (*predicted, measured))
        # A small model may take no page more than one of a few bytes.
        ratios = [f"{each / measured:.2f}" if measured > 0 else "–" for each in predicted]
        rows.append([workload, name, *shown, *ratios])
        print(" ".join(rows[-1]), file=sys.stderr, flush=True)
    titles = [f"predicted {unit}", f"measured {unit}", "ratio"]
    if arguments.link:
        titles = [f"predicted {unit}", f"by the link's figures {unit}", f"measured {unit}", "ratio", "by figures"]
    print(table(["workload", "tasks", *titles], rows, names=2))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def _memory(empty: dict[str, float], more: Sequence[str]) -> Callable[[str, str], tuple[float, float]]:
    """Returns what compares a case's bytes. `empty`: what jobs with a model of a few bytes take, by tasks."""

    def compare(workload: str, name: str) -> tuple[float, float]:
        tasks = TASKS[name]
        if name not in empty:
            plain = (flag for flag in tasks.flags if "mesh" not in flag and "shard" not in flag)
            empty[name] = measured_bytes(tasks, (*_NOTHING, *_COMMON, *plain))
        train_flags = (*flags(workload, tasks), *more)
        return predicted_bytes(tasks, train_flags), measured_bytes(tasks, train_flags) - empty[name]

    return compare


def _times(machines: Sequence[str], link: Link | None, more: Sequence[str], workload: str, name: str) -> list[float]:
    tasks, train_flags = TASKS[name], (*flags(workload, TASKS[name]), *more)
    predicted = [predicted_seconds(tasks, train_flags, machine) for machine in machines]
    if not link:
        return [*predicted, measured_seconds(tasks, train_flags)]
    with Hosts(tasks.workers, link) as hosts:
        return [*predicted, measured_seconds(tasks, train_flags, hosts)]


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    run_script(main)
