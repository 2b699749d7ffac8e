"""The command `crankshaft`: its subcommands by name. Nothing here starts TensorFlow."""

from __future__ import annotations

import importlib
import os
import signal
import sys

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
    # Until the subcommand can answer Ctrl-C, it ends the process without a word.
    quiet = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if quiet:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # a supervisor starts its tasks with it blocked
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        # Python would name files in the locale's encoding, and TensorFlow in UTF-8. Only a new process can change it.
        os.environ["PYTHONUTF8"] = "1"
        os.environ.setdefault("PYTHONIOENCODING", getattr(sys.stdout, "encoding", "") or "utf-8")  # the terminal's
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    # These import absl, which takes a moment too on a slow disk.
    from . import errors
    from .command_line import help

    name, arguments = sys.argv[1] if len(sys.argv) > 1 else "", sys.argv[2:]
    if name in ("", "help", "--help", "-h"):
        lines = ["Explicit distributed training loops for TensorFlow 2.", "", "usage: crankshaft COMMAND [flags]", ""]
        lines += [f"  {command:<10} {purpose}" for command, (_, purpose) in COMMANDS.items()]
        help.show("\n".join([*lines, "", "crankshaft COMMAND --help explains a command's flags."]))
    if name not in COMMANDS:
        hint = "flags stand after it" if name.startswith("-") else errors.nearest(name, COMMANDS)
        sys.exit(errors.fail(errors.EXIT_USAGE, f"crankshaft {name} is not a command of {', '.join(COMMANDS)}; {hint}"))
    module = importlib.import_module(COMMANDS[name][0])
    if quiet:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    module.main(argv=[f"crankshaft {name}", *arguments])
