"""Run a whole cluster on this machine, one process per worker, for example

  crankshaft local --workers=2 -- --model=mlp --input=digits --run_dir=runs/mlp
  crankshaft local --workers=2 -- my_script.py --run_dir=runs/first
  crankshaft local --ps=2 -- --model=mlp --input=digits --run_dir=runs/servers

After -- come flags of crankshaft train, or a script (or -m and a module) that calls `crankshaft.main`, and its flags.
Every worker gets TF_CONFIG, its share of the cores, and a GPU of its own if there are enough; its output
is shown with its name, and kept in run_dir/logs. When one dies, all start again from the newest snapshot or
checkpoint. Ctrl-C or SIGTERM: all save and end; a second one kills them.
"""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence

from ...engine.checkpoints import RunDir
from ...engine.errors import counted
from ...engine.machine import cpus
from ...engine.machine.files import temporary_folder
from ...runner.command_line import command_flags, following, parsing
from ...runner.command_line.config import visible_gpus
from ...runner.command_line.rules import Boolean, Integer, Number, flag
from ...runner.failures import UsageError, print_line
from ...runner.host.imports import own_python
from ...runner.host.tasks import SECRET
from ..clusters import listeners
from . import children, resources, restarts
from .supervisor import Supervisor, TaskSpec

_PROGRAM = "crankshaft local"
_LISTENING = {  # by whether sockets can be bound to loopback once they listen
    True: "TensorFlow's servers run code for whoever can log in to this machine; to keep others out, start this by "
    "unshare -rn sh -c 'ip link set lo up; exec crankshaft local ...'",
    False: "TensorFlow's servers listen on all interfaces and run code for whoever calls; to keep others out, start "
    "this by unshare -rn sh -c 'ip link set lo up; exec crankshaft local ...'",
}


@dataclasses.dataclass(kw_only=True, frozen=True)
class LocalFlags:
    """The values of a command line, before the --."""

    workers: int = flag(Integer(1, 1000), 2, "Processes that train together.")
    ps: int = flag(Integer(0, 1000), 0, "Parameter servers; with any, a coordinator, called chief, runs too.")
    evaluator: bool = flag(Boolean(), False, "With --ps: a process that evaluates each checkpoint.")
    max_restarts: int = flag(Integer(0), 5, "Restarts after failures within ten minutes; one more failure ends it.")
    grace_seconds: float = flag(
        Number(lower=0, upper=1e6),
        30.0,
        "Seconds that tasks have to save after a signal, before they are killed.",
    )

    @property
    def strategy(self) -> str:
        return "parameter_server" if self.ps else "multi_worker"

    @property
    def tasks(self) -> dict[str, int]:
        """The number of tasks of each type."""
        if not self.ps:
            return {"worker": self.workers}
        tasks = {"chief": 1, "worker": self.workers, "ps": self.ps}
        return {**tasks, "evaluator": 1} if self.evaluator else tasks


@dataclasses.dataclass(frozen=True)
class _Command:
    """The command after --.

    Attributes:
      start: words that Python runs: ("-m", "crankshaft", "train"), (script,) or ("-m", module).
      arguments: the flags of each task, before those that it gets here.
      rest: the words after them: a script's own -- and what follows; all, if they can't be read.
      compares: whether it is a benchmark with fail_below.
      names_gpus: whether --gpus is among the flags, and so is the same for all tasks.
      imports: whether it imports TensorFlow: not if it can't be read, and not a script that names no such library.
    """

    start: tuple[str, ...]
    arguments: list[str]
    rest: list[str]
    run_dir: str | None
    compares: bool
    names_gpus: bool = False
    imports: bool = False
    debug: bool = False
    step_timeout_seconds: float | None = None


def main(argv: list[str], modules: Sequence[str]) -> int:
    """Runs a cluster by the command line; `modules` are what a task imports."""
    cut = argv.index("--") if "--" in argv else len(argv)
    job, _ = command_flags.read(
        argv[:cut],
        LocalFlags,
        f"{_PROGRAM} [flags] -- [script.py | -m module] [flags of train]",
        words="the command of the tasks comes after --",
        has_tasks=True,
    )
    if job.evaluator and not job.ps:
        raise UsageError(
            "--evaluator is for --ps=N parameter servers; add them, or start the tasks' program once more, beside "
            f"them, with their run_dir and {following.FLAGS}"
        )
    if sys.platform != "linux":
        raise UsageError(
            f"{_PROGRAM} needs Linux, whose kernel ends tasks with their supervisor, and this is {sys.platform}; use "
            "crankshaft train --strategy=mirrored --num_virtual_devices=2, or a Linux container"
        )
    command = _read_command(job, argv[cut + 1 :])
    if command.imports:
        temporary_folder()  # TensorFlow's import needs one in each task, and here the mistake is one line
    rule = restarts.Servers if job.ps else restarts.Synchronous
    here = command.run_dir if command.run_dir and "://" not in command.run_dir else None
    for_all_tasks = {
        # TensorFlow reads it as it is imported, before the task's own --debug is parsed.
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1" if command.debug else "3"),
        SECRET: os.environ.get(SECRET) or secrets.token_hex(),
        # Output is a pipe's, which Python would hold back in blocks: lines would come late, and a killed task's never.
        "PYTHONUNBUFFERED": "1",
    }
    allows_colour = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"  # https://no-color.org
    # A script, or another module, has its own folder on its path.
    python = own_python() if command.start[:2] == ("-m", "crankshaft") else [sys.executable]
    supervisor = Supervisor(
        task_specs(job, os.environ, None if command.names_gpus else visible_gpus(os.environ)),
        [*python, *command.start, *command.arguments, f"--strategy={job.strategy}"],
        command.rest,
        rule(job.max_restarts, restarts.WINDOW_SECONDS, job.grace_seconds, compares=command.compares),
        environment={**os.environ, **for_all_tasks},
        log_dir=RunDir(here).logs if here else None,
        events=RunDir(here).events if here else None,
        coloured=(allows_colour and os.isatty(1), allows_colour and os.isatty(2)),
        grace_seconds=job.grace_seconds,
        modules=modules if command.imports else (),
        stopped_seconds=children.stopped_seconds(command.step_timeout_seconds),
    )
    supervisor.print(_LISTENING[listeners.can_refuse_hosts()])
    return supervisor.run()


def _read_command(job: LocalFlags, arguments: list[str]) -> _Command:
    """Reads the words after --. Raises `UsageError`; the tasks explain mistakes in their own flags."""
    if not arguments:
        raise UsageError(
            f"the command of the tasks is missing; write it after --, e.g. {_PROGRAM} -- --model=mlp --input=digits"
        )
    start, words = command_flags.split_program(arguments)
    command_flags.check_script_exists(start)
    start = start or ("-m", "crankshaft", "train")
    try:
        given = parsing.train_flags(words)
    except UsageError:  # the tasks report it
        return _Command(start, [], words, None, False)
    strategy, run_dir = given.get("strategy"), given.get("run_dir")
    if strategy == "parameter_server" != job.strategy:
        raise UsageError("strategy=parameter_server needs parameter servers; write --ps=N before the --")
    if strategy not in (None, job.strategy):
        raise UsageError(f"strategy={strategy} is not for workers; leave it out, or use crankshaft train without them")
    if given.get("min_workers"):
        raise UsageError(
            f"min_workers={given['min_workers']} is for workers on several hosts, and those of {_PROGRAM} share "
            "one, so that what takes one away for long takes all; leave it out"
        )
    if given.get("max_restarts"):
        raise UsageError(f"max_restarts={given['max_restarts']} of the tasks is this program's; write it before the --")
    if job.evaluator and not run_dir:
        raise UsageError("--evaluator finds its checkpoints in run_dir; give one after --")
    compares, names_gpus = "fail_below" in given.get("benchmark_arg", {}), "gpus" in given
    imports, debug = start[0] == "-m", given.get("debug", False)
    if not imports:
        # By its text: an import would execute it.
        with open(start[0], encoding="utf-8", errors="replace") as file:
            imports = bool(re.search(r"tensorflow|keras|crankshaft", file.read()))
    timeout = given.get("step_timeout_seconds")
    cut = words.index("--") if "--" in words else len(words)
    return _Command(start, words[:cut], words[cut:], run_dir, compares, names_gpus, imports, debug, timeout)


def task_specs(job: LocalFlags, environment: Mapping[str, str], gpus: Sequence[str] | None) -> list[TaskSpec]:
    """Lists the tasks, each with its share of the machine. Raises `UsageError`.

    Args:
      gpus: GPUs of the machine, to be divided among the tasks; None leaves them to the tasks.
    """
    kinds = [(kind, index) for kind, count in job.tasks.items() for index in range(count)]
    cores, tasks = resources.usable_cores(), len(kinds)
    usable = int(max(1, min(len(cores), cpus.quota_cores())))
    per_task = max(1, usable // tasks)
    # One thread for each core: TensorFlow's (its process_util.cc, local_device.cc), and those of other libraries.
    threads = {name: str(per_task) for name in ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS") if name not in environment}
    # Under a quota all cores of the machine are seen, and every task would get those with low numbers.
    shares = resources.divide_cores(cores, tasks, per_task) if usable == len(cores) else [None] * tasks
    # A server's tables are read and written at random: huge pages (glibc 2.35, malloc's tunables) miss the processor's
    # cache of page addresses less, the larger the table the more.
    pages = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if "GLIBC_TUNABLES" not in environment else {}
    gpu_shares = _divide_gpus(job, kinds, len(gpus or ()))
    return [
        TaskSpec(kind, index, share, {**threads, **(pages if kind == "ps" else {})}, gpu_shares.get((kind, index)))
        for (kind, index), share in zip(kinds, shares, strict=True)
    ]


def _divide_gpus(job: LocalFlags, tasks: list[tuple[str, int]], gpus: int) -> dict[tuple[str, int], str]:
    """Chooses --gpus of each task, {} without GPUs: one per worker, none for tasks that do not train.

    Synchronous workers all compute on the CPU if there are too few GPUs: a GPU can take part in a sum only once. With
    parameter servers several workers share one.
    """
    if not gpus:
        return {}
    without, workers = dict.fromkeys(tasks, "none"), [task for task in tasks if task[0] == "worker"]
    if len(workers) > gpus and not job.ps:
        print_line(
            f"[local] {counted(len(workers), 'worker')} and {counted(gpus, 'GPU')}: all compute on the CPU; use "
            f"--workers={gpus} for one each"
        )
        return without
    return without | {task: str(number % gpus) for number, task in enumerate(workers)}
