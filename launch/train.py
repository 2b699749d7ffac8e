"""Train, evaluate, time or export a model from the command line, for example

  crankshaft train --model=cnn --input=digits --run_dir=runs/first

A script of your own becomes such a program by `crankshaft.main(MyTrainer, data=my_data)`.
"""

from __future__ import annotations

import bdb
import contextlib
import gc
import os
import re
import shlex
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags
from absl.logging import use_absl_handler

from ..engine.checkpoints import RunDir
from ..engine.errors import LostPeerError, StuckStreamError, as_line
from ..engine.own_code import note_passed
from ..runner import explanations, failures, terminal
from ..runner.command_line import help, parsing, paths, user_files
from ..runner.command_line.config import Config
from ..runner.host import exits, streams
from ..runner.host.signals import end_pid_1, interruptible
from ..runner.host.text_files import write_json
from . import assembly, program
from .command import TASK_MODULES

_COMMAND = "crankshaft train"  # the first argument of the command; a script has its path there


def main(
    trainer_class: type | None = None,
    *,
    data: Any = None,
    hooks: Sequence[Any] = (),
    argv: list[str] | None = None,
    may_change: Sequence[str] = (),
) -> None:
    """Runs a whole program by its command line, and exits the process. `run`, in Python, returns instead.

    Args:
      trainer_class: your `crankshaft.Trainer`; None takes the one that --model names.
      data: what, or a function without arguments that returns what, is (train, eval[, num_classes[, vocabulary]]) or
        a `crankshaft.Data`, which has more; train and eval are each (features, labels), (features, labels, weights)
        or (features,), of arrays whose first axis is examples (float64 is taken as float32, as Keras does), or of dicts
        and tuples of such arrays; a dict, which is features; or a `tf.data.Dataset` of such examples. eval may be
        None, or missing with all after it: no evaluation, unless --validation_split takes a fraction of train.
        vocabulary has, by the name of each feature that is an id, how many ids there are; None: no feature is.
        None takes what --input names.
      hooks: your `engine.hooks`.
      argv: the command line; None is the process's, which a notebook does not have.
      may_change: names of your own absl flags that do not decide a run's numbers: with other values of the others,
        a run_dir is not resumed.

    Example:
      >>> main(PlaneTrainer, data=data)  # doctest: +SKIP
    """
    if argv is None and terminal.is_interactive() and not hasattr(sys.modules["__main__"], "__file__"):
        raise failures.UsageError(
            "main() reads the command line of a program and ends it, and this is a notebook or a prompt; use "
            "crankshaft.run, with the flags as keywords: run(MyTrainer, data=data, train_epochs=10)"
        )
    end_pid_1()
    streams.prepare_streams()
    terminal.fit_log()
    with contextlib.redirect_stdout(streams.SturdyStream(sys.stdout)) as output:
        call = _Program(trainer_class, data, hooks, may_change, output)
        with call.failures_reported():
            call.start(argv)
    # An iterator over a dataset that calls Python blocks for ever if it is freed as the interpreter ends.
    gc.collect()
    sys.exit(call.code)


class _Program:
    """One call of `main`, in its process and in the tasks that it forks."""

    def __init__(self, trainer_class, data, hooks, may_change, output: streams.SturdyStream):
        self._trainer_class, self._data, self._hooks, self._may_change = trainer_class, data, hooks, may_change
        note_passed(trainer_class, data, hooks)
        self._output = output
        self.code = 0
        self._has_debug = False
        self._leaves = False  # TensorFlow's end would not come
        self._paths: dict[str, Any] = {}  # of a run's results, until the run itself writes how it ends

    def start(self, argv: list[str] | None) -> None:
        """Executes a command line: plans, or runs in this process or in forks of it."""
        user_files.check_trainer(self._trainer_class)
        argv = streams.arguments() if argv is None else argv
        words = dict(word[2:].split("=", 1) for word in argv if re.match("--(result_json|run_dir)=", word))
        self._paths = {"result_json": None, "run_dir": None, **words}
        given = parse(argv)
        self._paths |= {name: given[name] for name in self._paths.keys() & given}
        self._has_debug = given.get("debug", False)
        if plan := user_files.instead.get():
            self.code = plan(given, self._trainer_class, self._data)
            return
        config = program.configure_program(given, {}, self._trainer_class, self._data is not None, self._may_change)
        for name, value in config.script_flags.items():  # the script's flags in the run that is read
            flags.FLAGS[name].value = value
        program.check(config)
        if config.max_restarts:
            from ..parts.launchers import agent

            if agent.can_fork(config, TASK_MODULES):
                self.code = agent.run(config, self._attempt)
                return
        self._run(config)

    def _attempt(self, config: Config) -> int:
        """Makes one attempt at a run, in a fork, and returns its exit code."""
        with self.failures_reported():
            self._run(config)
        return self.code

    def _run(self, config: Config) -> None:
        self._leaves, self._paths = config.coordinates, {}  # a worker may be down
        self.code = assembly.run_to_end(config, self._data, self._hooks).code
        if self.code != failures.EXIT_REGROUP and config.writes_run and config.progress != "off":
            run_dir = config.configured_run_dir or ""
            board = config.tensorboard_dir or RunDir(run_dir).tensorboard
            command = shlex.join([sys.executable, "-m", "tensorboard.main", "--logdir", board])
            print(as_line(f"The run's files: {run_dir}"), as_line(f"TensorBoard:     {command}"), sep="\n")

    @contextlib.contextmanager
    def failures_reported(self) -> Iterator[None]:
        """Prints a failure within as one line, and sets its exit code."""
        try:
            with interruptible():
                yield
        except KeyboardInterrupt:  # before the first step or after the last: else the loop saves and ends
            self.code = failures.fail(failures.EXIT_INTERRUPTED, "interrupted; the run's saved files are unchanged")
        except bdb.BdbQuit as error:  # q in a debugger
            traceback.print_exception(error)
            self.code = failures.EXIT_INTERRUPTED
        except Exception as error:  # the border of the program: every failure becomes one line here
            if self._has_debug:
                traceback.print_exception(error)
            code, line = explanations.explain(error)
            self.code = failures.fail(code, line)
            if path := self._paths.get("result_json"):
                with contextlib.suppress(OSError, failures.UsageError):
                    paths.check_results(self._paths)
                    write_json(path, {"run_dir": self._paths["run_dir"], "error": line, "exit_code": code})
            self._leaves |= isinstance(error, (LostPeerError, StuckStreamError))  # threads wait in TensorFlow for ever
        self._output.flush()
        if self._output.lost:
            line = f"a part of the output is lost: {self._output.lost.strerror}"
            self.code = self.code or failures.fail(failures.EXIT_FAILED, line)
        if self._leaves:
            exits.leave(self.code)


def parse(argv: list[str]) -> dict[str, Any]:
    """Parses a command line into values by flag, and sets the script's own flags. Raises `UsageError`."""
    is_ours = argv[0] == _COMMAND
    script_doc = "" if is_ours else help.module_doc("__main__")
    doc = script_doc or "\n\n".join(help.module_doc(__name__).split("\n\n")[:2])
    name = argv[0] if is_ours else os.path.basename(argv[0])
    if {"--help", "-h", "--helpfull", "-help"} & set(argv[1:]):
        help.show(help.help_text(name, doc, parsing.script_flag_names(), argv[1:], program.to_trainer))
    if "--helpshort" in argv[1:]:
        help.show(help.short_help_text(name, doc))
    for name in flags.FLAGS:  # an earlier run of this process may have had a command line of its own
        flags.FLAGS[name].unparse()
    given = parsing.from_argv(argv)
    use_absl_handler()
    return given
