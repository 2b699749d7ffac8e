r"""Crankshaft beside Keras, JAX, PyTorch, another checkout, or itself with other flags, on one device, in rounds.

    python -m benchmarks.compare mlp wide cnn cnn_bfloat16 resnet20 wide_deep --with=keras
    python -m benchmarks.compare mlp --with=jax,keras_jax --jax_python=.../bin/python
    python -m benchmarks.compare language_model --with=torch --torch_python=.../bin/python
    python -m benchmarks.compare mlp --before=../before/crankshaft --fail_below=0.95 -- --jit=on
    python -m benchmarks.compare own --vary="global_batch_size=64,256;jit=on,off" -- --model=mlp --input=digits

What stands after `--` are more flags of `crankshaft train`; the workload `own` is these flags alone. All programs stay
loaded, and do a piece of half a second in each round, in turn; what is timed are steps alone: no compilation, nothing
around them. The table has medians over the rounds, and the median of the rounds' ratios with its 95 % interval, against
each peer as people write it and in the fastest of its settings. With `--vary`, each combination of values is a program,
beside the peers or else beside the first combination; a comma within a value is written `\,`. Exit code 3: the whole
interval of a ratio is below `--fail_below`; 1: a peer failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from crankshaft.runner.command_line.config import visible_gpus
from crankshaft.runner.failures import EXIT_FAILED, EXIT_SLOWER

from . import rounds
from .processes import ROOT, Process, importable, read_result, run_script, run_together
from .rounds import Measured, Rows
from .workloads import BATCH_SIZE, WORKLOADS

IMAGES = ("mlp", "wide", "cnn")
CALL = 50  # steps
OURS, BEFORE, OWN = "crankshaft", "checkout", "own"
# glibc keeps what is freed, as Crankshaft has it do too (runner/host/process.py): the kernel clears no page twice.
_ALLOCATOR = {
    "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=2147483647:"
    "glibc.malloc.top_pad=67108864"
}
_VECTORS = {"XLA_FLAGS": "--xla_cpu_prefer_vector_width=512"}  # as Crankshaft has them, on CPUs with AVX-512


class Setting(NamedTuple):
    """How a peer is run: its options, and its environment variables."""

    options: tuple[str, ...] = ()
    variables: Mapping[str, str] = {}
    xla: bool = False


@dataclasses.dataclass(frozen=True)
class Peer:
    """What Crankshaft is compared with.

    Attributes:
      program: in peers/, which takes turns.
      settings: by the name that tables have; the first is as people write it.
      workloads: that it has.
      python: "jax" or "torch" where another Python may have it (`--jax_python`, `--torch_python`).
      needs: packages of that Python.
    """

    program: str
    settings: Mapping[str, Setting]
    workloads: Sequence[str]
    python: str | None = None
    needs: tuple[str, ...] = ()


_KERAS_WORKLOADS = ("mlp", "wide", "cnn", "cnn_bfloat16", "resnet20", "wide_deep", "gan", "vae", "distiller")
_JAX_BACKEND = {"KERAS_BACKEND": "jax"}
_STEPS = f"--steps_per_call={CALL}"
PEERS = {
    "keras": Peer(
        "keras_fit",
        {
            "Keras fit": Setting(),
            "Keras fit, 50 steps per call": Setting((_STEPS, "--jit=off")),
            "Keras fit, 50 steps per call, XLA": Setting((_STEPS, "--jit=on"), xla=True),
        },
        _KERAS_WORKLOADS,
    ),
    "fit": Peer("crankshaft_fit", {"crankshaft.fit": Setting()}, _KERAS_WORKLOADS),
    "keras_jax": Peer(
        "keras_fit",
        {
            "Keras fit on JAX": Setting((), _JAX_BACKEND),
            "Keras fit on JAX, 50 steps per call": Setting((_STEPS,), {**_JAX_BACKEND, **_ALLOCATOR}),
        },
        IMAGES,
        "jax",
        ("jax", "keras", "numpy"),
    ),
    "jax": Peer(
        "jax_scan",
        {
            "JAX scan of 50": Setting((_STEPS,)),
            "JAX scan of 50, allocator": Setting((_STEPS,), _ALLOCATOR),
            "JAX scan of 50, allocator, vectors": Setting((_STEPS,), {**_ALLOCATOR, **_VECTORS}),
            # XLA's loops keep its convolutions to one core, so that steps without a loop may be faster.
            "JAX, 10 steps unrolled": Setting(("--steps_per_call=10", "--unroll=10"), _ALLOCATOR),
            "JAX, a step per call": Setting(("--steps_per_call=1",), _ALLOCATOR),
        },
        IMAGES,
        "jax",
        ("jax", "optax", "numpy"),
    ),
    "torch": Peer(
        "torch_loop",
        {"PyTorch": Setting(), "PyTorch, compiled": Setting(("--compile=yes",))},
        (*IMAGES, "language_model", "language_model_bfloat16"),
        "torch",
        ("torch", "numpy"),
    ),
}


def combinations(text: str) -> list[list[str]]:
    """Returns the flags of each point of NAME=VALUE,VALUE;NAME=VALUE,VALUE: the last name's values change fastest."""
    axes = []
    for part in filter(None, re.split(r"(?<!\\);", text)):
        name, equals, values = part.partition("=")
        plain = [re.sub(r"\\([,;])", r"\1", value.strip()) for value in re.split(r"(?<!\\),", values)]
        if not equals or "" in plain:
            raise argparse.ArgumentTypeError(f"{part!r} has no values; write NAME=VALUE,VALUE;NAME=VALUE,VALUE")
        axes.append([f"--{name.strip().removeprefix('--')}={value}" for value in plain])
    return [list(point) for point in itertools.product(*axes)]


# -- The programs of a workload ---------------------------------------------------------------------------------------


class Program(NamedTuple):
    """A program that takes turns, and the examples of its step."""

    process: Process
    batch: int


def bare(name: str, flags: Sequence[str], variables: Mapping[str, str]) -> Program:
    """Returns Crankshaft's program for a workload: that of the checkout which `variables` name."""
    workload = WORKLOADS.get(name)
    batch = workload.batch if workload else BATCH_SIZE
    words = [*(workload.flags if workload else ()), f"--global_batch_size={batch}", *flags]
    batches = [int(word.partition("=")[2]) for word in words if word.startswith("--global_batch_size=")]
    return Program(Process([sys.executable, "-m", "benchmarks.bare", *words], variables), batches[-1])


def beside(name: str, peer: Peer, args: argparse.Namespace, variables: Mapping[str, str]) -> dict[str, Program]:
    """Returns a peer's programs for a workload, by their settings' titles; none if it does not have the workload."""
    if name not in peer.workloads:
        return {}
    slow_xla = WORKLOADS[name].convolutional and not visible_gpus(os.environ)
    command = [args.pythons[peer.python], "-m", f"benchmarks.peers.{peer.program}"]
    options = [f"--workload={name}", f"--quality_steps={args.quality_steps}"]
    return {
        title: Program(
            Process([*command, *options, *setting.options], {**variables, **setting.variables}), WORKLOADS[name].batch
        )
        for title, setting in peer.settings.items()
        if not (setting.xla and slow_xla)
    }


def table_rows(measured: Measured, ours: Sequence[str], groups: Sequence[Sequence[str]]) -> Rows:
    """Returns what is compared: each of ours with the first of each group, and with the fastest of it.

    Without groups each of ours with the first of ours.
    """
    beside = {}
    for first, *others in groups:
        beside[first] = first
        if others:
            beside[f"{first} at its best"] = measured.fastest([first, *others]) or first
    return [(title, beside if groups else {ours[0]: ours[0]} if title != ours[0] else {}) for title in ours]


def compare(name: str, args: argparse.Namespace, folders: Mapping[str, Path]) -> tuple[Measured, Rows]:
    """Measures a workload's programs in rounds."""
    variables = {"PYTHONPATH": str(folders[OURS])}
    ours = {" ".join(point) or OURS: bare(name, [*args.flags, *point], variables) for point in args.vary}
    groups = [beside(name, PEERS[peer], args, variables) for peer in args.peers]
    if args.before:
        groups.append({BEFORE: bare(name, args.flags, {"PYTHONPATH": str(folders[BEFORE])})})
    groups = [group for group in groups if group]
    programs = {title: program for part in (*groups, ours) for title, program in part.items()}
    processes = {title: program.process for title, program in programs.items()}
    batches = {title: program.batch for title, program in programs.items()}
    title = WORKLOADS[name].title if name in WORKLOADS else " ".join(args.flags)
    commands = {title: str(process) for title, process in processes.items()}
    with rounds.residents(processes, batches, seconds=args.seconds, folder=folders[OURS]) as peers:
        measured = rounds.measure(title, peers, args.rounds, commands)
    return measured, table_rows(measured, [*ours], [[*group] for group in groups])


def quality(name: str, args: argparse.Namespace, folder: Path) -> Mapping:
    """Trains Crankshaft's model for `--quality_steps`, and returns loss and metric of the evaluation data."""
    path = folder / "quality.json"
    flags = [*WORKLOADS[name].flags, f"--global_batch_size={WORKLOADS[name].batch}", *args.flags]
    steps = ["--mode=train_and_eval", f"--train_steps={args.quality_steps}", f"--result_json={path}", "--progress=off"]
    run_together([Process([sys.executable, "-m", "crankshaft", "train", *flags, *steps])], folder=ROOT)
    return rounds.quality(read_result(path)["eval"])


# -- The command line -------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", metavar="WORKLOAD", help=f"{OWN}, {', '.join(WORKLOADS)}")
    parser.add_argument("--with", dest="peers", default="", metavar="PEER,...", help=f"{BEFORE}, {', '.join(PEERS)}")
    parser.add_argument("--before", type=Path, help=f"the {BEFORE} to compare with")
    parser.add_argument("--vary", type=combinations, default=[[]], metavar="NAME=VALUE,VALUE;...", help="flags of ours")
    parser.add_argument("--jax_python", default=sys.executable, help="a Python that has jax, optax and keras")
    parser.add_argument("--torch_python", default=sys.executable, help="a Python that has torch and numpy")
    parser.add_argument("--quality_steps", type=int, default=0, help="before losses are compared; 0: not (%(default)s)")
    parser.add_argument("--fail_below", type=float, help="exit with 3 if a ratio is shown to be below this")
    rounds.add_arguments(parser, rounds=20, seconds=0.5)
    args = rounds.parse(parser)
    args.peers = [peer for peer in args.peers.split(",") if peer and not (peer == BEFORE and args.before)]
    rounds.check_names(parser, "WORKLOAD", args.workloads, [OWN, *WORKLOADS])
    if BEFORE in args.peers:
        parser.error(f"--with={BEFORE} needs its folder; add --before=PATH")
    if args.fail_below and args.rounds < rounds.FEWEST:
        parser.error(f"--fail_below={args.fail_below:g} needs an interval; use --rounds={rounds.FEWEST} or more")
    rounds.check_names(parser, "--with", args.peers, PEERS)
    if OWN in args.workloads and not args.flags:
        parser.error(f"{OWN} has no flags; write -- and the flags of crankshaft train")
    if OWN in args.workloads and args.quality_steps:
        parser.error(f"--quality_steps={args.quality_steps} is of workloads that have a name, not of {OWN}")
    args.pythons = {None: sys.executable, "jax": args.jax_python, "torch": args.torch_python}
    return args


def main() -> None:
    args = parse_arguments()
    facts = rounds.facts((args.pythons[PEERS[name].python], PEERS[name].needs) for name in args.peers)
    with tempfile.TemporaryDirectory(prefix="crankshaft-compare-") as folder:
        folders = {OURS: importable(ROOT, Path(folder, "ours"))}
        if args.before:
            folders[BEFORE] = importable(args.before.resolve(), Path(folder, "before"))
        compared = [compare(name, args, folders) for name in args.workloads]
        if args.quality_steps:
            for name, (measured, _) in zip(args.workloads, compared, strict=True):
                measured.quality[OURS] = quality(name, args, Path(folder))
    print(rounds.report(facts, compared, args))
    slow = False
    for measured, rows in compared:
        for ours, beside in rows:
            for peer in dict.fromkeys(beside.values()):
                ratios = measured.ratios(ours, peer)
                if args.fail_below and ratios and rounds.interval(ratios)[1] < args.fail_below:
                    shown = rounds.shown_ratio(ratios)
                    print(f"fail_below={args.fail_below:g}: {ours} {shown} beside {peer}", file=sys.stderr)
                    slow = True
    sys.exit(EXIT_SLOWER if slow else EXIT_FAILED if any(measured.failed for measured, _ in compared) else 0)


if __name__ == "__main__":
    run_script(main)
