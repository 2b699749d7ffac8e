"""The command `crankshaft`: its subcommands by name. Nothing here starts TensorFlow."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pkgutil import iter_modules
from typing import NamedTuple, NoReturn

from .. import engine, models, parts
from .. import input as inputs
from ..engine import version
from ..runner import explanations, failures, modes
from ..runner.command_line import help
from ..runner.command_line.flags import MODES
from ..runner.host import streams
from ..runner.host.imports import import_whole
from ..runner.host.signals import end_pid_1, interruptible

_OTHER_PARTS = ("dashboard", "launchers", "plan")  # other commands': a run has no more of them than three modules
# What a task can need from its start to its end, each with all below it: its parent imports it once for all that it
# forks, and `import_for_run` what is of the task's own run.
_RUN_MODULES = (engine.__name__, modes.__name__)
_PARTS = (
    *(part for _, part, _ in iter_modules(parts.__path__, f"{parts.__name__}.") if not part.endswith(_OTHER_PARTS)),
    *("crankshaft.parts.dashboard.metrics", "crankshaft.parts.dashboard.result_text", "crankshaft.parts.plan.limits"),
)
TASK_MODULES = ("tensorflow", "keras", *_RUN_MODULES, __package__, inputs.__name__, models.__name__, *_PARTS)


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


def import_for_run() -> None:
    """Imports what a run with the parts that this process has can need until it ends: its files may be replaced."""
    import_whole([*_RUN_MODULES, *(part for part in _PARTS if part in sys.modules)])


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
