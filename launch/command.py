"""The command `crankshaft`: its subcommands by name. Nothing here starts TensorFlow."""

from __future__ import annotations

import importlib
import sys

from . import failures
from .command_line import help
from .host import process

# name -> the module whose `main(argv)` runs it and exits the process, and what it is for.
COMMANDS = {
    "train": ("crankshaft.launch.train", "Train, evaluate, time or export a model."),
    "local": ("crankshaft.launch.local", "Run a whole cluster on this machine, one process per task."),
    "plan": ("crankshaft.launch.plan.main", "Plan a run: memory, speed, cost, goodput, before training it."),
    "prepare": ("crankshaft.launch.prepare", "Write an input's examples into shards of files."),
    "ask": ("crankshaft.launch.ask", "Ask a running job for a profile, stacks, a checkpoint, its status, or to stop."),
    "monitor": ("crankshaft.launch.monitor.server", "Show running and finished runs on a page."),
    "report": ("crankshaft.launch.monitor.report", "Print a benchmark's result as Markdown, or write the page."),
}


def run() -> None:
    """Runs the subcommand that `sys.argv` names, and exits the process."""
    name, *arguments = process.arguments()[1:] or [""]
    if name in ("", "help", "--help", "-h"):
        lines = ["Explicit distributed training loops for TensorFlow 2.", "", "usage: crankshaft COMMAND [flags]", ""]
        lines += [f"  {command:<10} {purpose}" for command, (_, purpose) in COMMANDS.items()]
        help.show("\n".join([*lines, "", "crankshaft COMMAND --help explains a command's flags."]))
    if name not in COMMANDS:
        hint = "flags stand after it" if name.startswith("-") else failures.nearest(name, COMMANDS)
        sys.exit(
            failures.fail(failures.EXIT_USAGE, f"crankshaft {name} is not a command of {', '.join(COMMANDS)}; {hint}")
        )
    module = importlib.import_module(COMMANDS[name][0])
    module.main(argv=[f"crankshaft {name}", *arguments])
