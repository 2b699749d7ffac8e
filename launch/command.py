"""The command `crankshaft`: its subcommands by name. Nothing here starts TensorFlow."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from ..engine import version
from ..runner import explanations, failures
from ..runner.command_line import help
from ..runner.command_line.flags import MODES
from ..runner.host import streams
from ..runner.host.signals import end_pid_1, interruptible

# What a task imports from its start to its first step, and its parent once for all that it forks.
TASK_MODULES = (
    *("tensorflow", "keras", "crankshaft.engine", "crankshaft.launch.command", "crankshaft.launch.train"),
    *("crankshaft.engine.strategies.base", "crankshaft.runner.host.isolation"),
    *(f"crankshaft.launch.composition.{name}" for name in ("training", "building", "open_run")),
    *("crankshaft.parts.benchmark.mode", "crankshaft.parts.parameter_servers.evaluator"),
    *("crankshaft.runner.modes.export", "crankshaft.runner.modes.generate"),
    "crankshaft.runner.modes.prediction_files",
)


class Command(NamedTuple):
    """A subcommand.

    Attributes:
      module: name of the module whose `main(argv, *more)` runs it, and returns the exit code.
      purpose: what it is for.
      kept: what holds after Ctrl-C or an error of the system; "" if there is nothing to say.
      more: further arguments of its `main`.
    """

    module: str
    purpose: str
    kept: str = ""
    more: tuple = ()


COMMANDS = {
    "train": Command("crankshaft.launch.train", "Train, evaluate, time or export a model."),
    "local": Command(
        "crankshaft.parts.launchers.local",
        "Run a whole cluster on this machine, one process per task.",
        more=(TASK_MODULES,),
    ),
    "plan": Command("crankshaft.parts.plan.main", "Plan a run: memory, speed, cost, goodput, before training it."),
    "prepare": Command(
        "crankshaft.launch.prepare",
        "Write an input's examples into shards of files.",
        "complete shards are kept, and the same command continues",
    ),
    "ask": Command(
        "crankshaft.parts.ask.command",
        "Ask a running job for a profile, stacks, a checkpoint, its status, or to stop.",
        "the request is taken back",
    ),
    "monitor": Command("crankshaft.parts.dashboard.server", "Show running and finished runs on a page."),
    "report": Command(
        "crankshaft.parts.dashboard.report", "Print a benchmark's result as Markdown, or write the page."
    ),
}


def run() -> None:
    """Runs the subcommand that `sys.argv` names, and exits the process."""
    name, *arguments = streams.arguments()[1:] or [""]
    if name in ("", "help", "--help", "-h"):
        lines = ["Explicit distributed training loops for TensorFlow 2.", "", "usage: crankshaft COMMAND [flags]", ""]
        lines += [f"  {command:<10} {purpose}" for command, (_, purpose, *_) in COMMANDS.items()]
        help.show("\n".join([*lines, "", "crankshaft COMMAND --help explains a command's flags."]))
    if name == "--version":
        help.show(f"crankshaft {version.described()}")
    if name not in COMMANDS:
        hint = failures.nearest(name, [*COMMANDS])
        if name.startswith("-"):
            hint = f"flags stand after one of {', '.join(COMMANDS)}"
        elif name in MODES:
            hint = f"use crankshaft train --mode={name}"
        sys.exit(failures.fail(failures.EXIT_USAGE, f"crankshaft {name} is not a command; {hint}"))
    execute(name, arguments)


def execute(name: str, arguments: Sequence[str]) -> NoReturn:
    """Runs a subcommand, whose failures become one line each here, and exits the process."""
    end_pid_1()
    command, argv = COMMANDS[name], [f"crankshaft {name}", *arguments]
    main = importlib.import_module(command.module).main
    if name == "train":  # which scripts call too: it exits by itself
        main(argv=argv)
    streams.prepare_streams()
    kept = command.kept and f"; {command.kept}"
    try:
        with interruptible():
            code = main(argv, *command.more)
    except KeyboardInterrupt:
        code = failures.fail(failures.EXIT_INTERRUPTED, f"interrupted{kept}")
    except Exception as error:  # the border of the program
        explained = explanations.explain(error, has_debug=False)
        if kept and isinstance(error, OSError):
            explained = failures.EXIT_FAILED, f"{explanations.explain_system_error(error)}{kept}"
        code = failures.fail(*explained)
    sys.exit(code)
