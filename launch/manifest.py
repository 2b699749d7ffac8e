"""Print the input for Slurm or Kubernetes that runs a cluster.

For example:

  crankshaft manifest slurm --workers=8 --time=12:00:00 -- --model=cnn --input=digits --run_dir=/shared/runs/first
  crankshaft manifest kubernetes --workers=8 --image=registry/me:1 -- train_mine.py --run_dir=/runs/first
  crankshaft manifest jobset --workers=4 --ps=2 --image=registry/me:1 -- --model=wide_deep --run_dir=/runs/second
  crankshaft manifest slurm --plan=plan.json --workers=64 -- --model=cnn --input=digits --run_dir=/shared/runs/third
  crankshaft manifest dockerfile

After -- come flags of crankshaft train, or a script (or -m and a module) that calls `crankshaft.main`, and its flags.
Nothing is started. Besides the printed text, the cluster needs the image, or Crankshaft on all nodes, and a folder that
all tasks see.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from . import errors, explanations
from .command_line import command_flags, help, rules
from .command_line.rules import Boolean, Integer, Path, Text, flag
from .errors import UsageError
from .host import process
from .manifests import kubernetes, slurm
from .manifests.job import Job
from .plan import saved

_PROGRAM = "crankshaft manifest"
_TARGETS = ("slurm", "kubernetes", "jobset", "dockerfile")
_USAGE = f"{_PROGRAM} {'|'.join(_TARGETS)} [flags] -- [script.py | -m module] [flags of train]"
_TARGETS_BY_FLAG = {
    "time": ("slurm",),
    "image": ("kubernetes", "jobset"),
    "claim": ("kubernetes", "jobset"),
}  # all others: of all
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")  # of a Service; a pod's name is longer, and has 63 at most
_TIME = re.compile(r"(?:(\d{1,2})-([01]?\d|2[0-3])|(\d{1,3})):([0-5]\d):([0-5]\d)")
_IMAGE = re.compile(r"[\w.-][\w./:@-]*")
_MEMORY_MARGIN = 4 / 3  # docs/plan.md: of twelve runs, the worst took that much more than planned
_LEAST_SECONDS = 300  # of a time limit; the tasks are requested to save two minutes before it
_SIZES = (64, 16 << 20)  # MiB


def _check_size(text: str) -> None:
    """Raises ValueError, as a rule, for an amount of memory that no scheduler gives to a task."""
    least, most = _SIZES
    if not slurm.QUANTITY.fullmatch(text) or not least <= slurm.mebibytes(text) <= most:
        raise ValueError(f"it is not a quantity from {least}Mi to {most >> 20}Ti, e.g. 8Gi")


def _check_time(text: str) -> None:
    """Raises ValueError, as a rule, for a time that Slurm does not take, or in which nothing can be saved."""
    if not (match := _TIME.fullmatch(text)):
        raise ValueError("it is not a time, e.g. 12:00:00 or 2-00:00:00")
    days, hours_of_day, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    if ((24 * days + hours_of_day + hours) * 60 + minutes) * 60 + seconds < _LEAST_SECONDS:
        raise ValueError(f"it is less than the {_LEAST_SECONDS // 60} minutes that tasks need to start and to save")


def _matching(pattern: re.Pattern, wants: str) -> Text:
    return Text(wants, rules.matching(pattern.pattern, f"it is not {wants}"))


@dataclasses.dataclass(kw_only=True)
class Flags:
    """The values of a command line, before the --."""

    name: str = flag(_matching(_NAME, "small letters, digits and hyphens, 40 at most"), "train", "Job name.")
    plan: str | None = flag(Path(), None, "Result of crankshaft plan: workers, ps, GPUs and memory that are not set.")
    workers: int = flag(Integer(1, 1000), 2, "Processes that train together.")
    ps: int = flag(Integer(0, 1000), 0, "Parameter servers; with any, a coordinator runs too.")
    evaluator: bool = flag(Boolean(), False, "With --ps: a task that evaluates each checkpoint.")
    gpus_per_worker: int = flag(Integer(0, 1000), 0, "GPUs per worker; slurm: per task.")
    cpus: int = flag(Integer(1, 1000), 4, "Cores per task.")
    memory: str = flag(Text("a quantity, e.g. 8Gi", _check_size), "8Gi", "Memory per task, as Kubernetes writes it.")
    time: str = flag(Text("a time, e.g. 12:00:00 or 2-00:00:00", _check_time), "24:00:00", "slurm: time limit.")
    image: str | None = flag(_matching(_IMAGE, "an image"), None, "kubernetes, jobset: container image.")
    claim: str = flag(_matching(_NAME, "a claim's name"), "runs", "kubernetes, jobset: claim of the volume at /runs.")


def main(argv: list[str]) -> None:
    """Prints a manifest by the command line, and exits the process."""
    process.prepare_streams()
    try:
        text = _text(argv)
    except Exception as error:  # the border of the program
        sys.exit(errors.fail(*explanations.explain(error, has_debug=False)))
    help.show(text.rstrip("\n"))


def _text(argv: list[str]) -> str:
    cut = argv.index("--") if "--" in argv else len(argv)
    words, command = argv[1:cut], argv[cut + 1 :]
    target = words.pop(0) if words and not words[0].startswith("-") else ""
    values, _ = command_flags.read(
        *([argv[0], *words], Flags, help.module_doc(__name__), _USAGE),
        words="the command of the tasks comes after --",
        has_tasks=True,
    )
    if target not in _TARGETS:
        problem = f"{target} is not a target of {_PROGRAM}" if target else f"{_PROGRAM} has no target"
        raise UsageError(f"{problem}; use {', '.join(_TARGETS[:-1])} or {_TARGETS[-1]}")
    for name in values:
        if target not in _TARGETS_BY_FLAG.get(name, _TARGETS[:-1]):
            raise UsageError(f"--{name} has no use with {_PROGRAM} {target}; leave it out")
    if target == "dockerfile":
        if command:
            raise UsageError(f"{command[0]!r} has no use with {_PROGRAM} {target}, whose image runs any command")
        return kubernetes.dockerfile()
    if "plan" in values:
        values = {**_read_plan(values["plan"], values.get("workers")), **values}
    job = _job(target, Flags(**values), command)
    return slurm.script(job) if target == "slurm" else kubernetes.manifest(job, as_job_set=target == "jobset")


def _read_plan(path: str, workers: int | None) -> dict[str, Any]:
    """Reads the flags of a plan's requests, for so many workers. Raises `UsageError`."""
    plan = saved.read(path)
    hosts = workers or (next(iter(plan)) if len(plan) == 1 else None)
    if hosts not in plan:
        problem = f"is not for --workers={workers}" if workers else "is for several numbers of hosts"
        raise UsageError(f"{path} {problem}; use --workers={' or '.join(map(str, plan))}")
    needs = plan[hosts]
    mebibytes = math.ceil(_MEMORY_MARGIN * max(needs["host_bytes"], needs["server_bytes"]) / 2**20)
    values = {"workers": hosts, "ps": needs["servers"], "gpus_per_worker": needs["gpus_per_host"]}
    return {**values, "memory": f"{max(mebibytes, _SIZES[0])}Mi"}


def _job(target: str, flags: Flags, command: Sequence[str]) -> Job:
    """Reads the job from the flags and the command. Raises `UsageError`."""
    if not command:
        raise UsageError("the command of the tasks is missing; write it after --, e.g. -- --model=mlp --input=digits")
    if flags.evaluator and not flags.ps:
        raise UsageError("--evaluator is for --ps=N parameter servers; add them, or leave it out")
    program, words = command_flags.split_program(command)
    command_flags.check_task_flags(words, has_others=bool(program))
    run_dir = next((word.partition("=")[2] for word in words if re.match("--?run_dir=", word)), "")
    if not run_dir:
        raise UsageError("the command has no run_dir=FOLDER, where a restart finds the checkpoints; add one after --")
    if target != "slurm":
        if not flags.image:
            raise UsageError(f"--image is missing; name one that holds the command (`{_PROGRAM} dockerfile`)")
        if not run_dir.startswith("/runs/") and "://" not in run_dir:
            raise UsageError(f"run_dir={run_dir} is not in /runs, where the pods have their volume; use /runs/NAME")
    elif not os.path.isabs(run_dir) and "://" not in run_dir:
        raise UsageError(f"run_dir={run_dir} is not an absolute path; give one that all nodes see")
    needs = {name: value for name, value in vars(flags).items() if name != "plan"}
    return Job(**needs, program=program, words=tuple(words))
