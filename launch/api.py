"""Runs in Python: `crankshaft.run` and `open_run`, in a script, a search or a notebook.

A run's keywords are the flags, checked by the same rules. Nothing of one run reaches the next, nor the program between
the calls of one: flags get their values back, and so does whatever else a run sets for its process (`isolation`).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from ..runner import explanations
from ..runner.command_line import parsing, rules, user_files
from ..runner.failures import EXIT_HUNG_UP, EXIT_INTERRUPTED, EXIT_TERMINATED, UsageError
from ..runner.host import remote as remotes
from . import program
from .assembly import assemble_run, run_to_end

if TYPE_CHECKING:
    from ..engine.trainer import Trainer
    from .composition.open_run import Run


@explanations.explained
def run(
    trainer_class: type[Trainer] | None = None,
    *,
    data: Any = None,
    hooks: Sequence[Any] = (),
    may_change: Sequence[str] = (),
    **keywords: Any,
) -> Run:
    """Runs a model with its flags as keywords: `run(PlaneTrainer, data=data, train_steps=100, learning_rate=0.1)`.

    Ctrl-C, SIGTERM and SIGHUP stop and save the run first; then Ctrl-C raises KeyboardInterrupt, and the others have
    their usual effect. Threads are left as they are: only a process that belongs to the run (`main`) gives each core of
    a CPU a micro-batch.

    Args:
      trainer_class: as `crankshaft.main` takes it.
      data: as `crankshaft.main` takes it.
      hooks: as `crankshaft.main` takes them.
      may_change: as `crankshaft.main` takes it.
      **keywords: the flags by name, `crankshaft train --help` lists them; lists for those that may be repeated,
        dictionaries for `model_arg` and its like. None leaves a flag at its default. The script's own absl flags may be
        among them; those not among them keep their values.

    Raises:
      UsageError: a mistake in the arguments (a ValueError); the message is the line that the command would print.
      RunError: the run failed (a RuntimeError), with such a line too; its cause is the exception that ended it.

    Example:
      >>> run(PlaneTrainer, data=data, train_steps=100, learning_rate=0.1).result["eval"]  # doctest: +SKIP
    """
    run = run_within(trainer_class, data=data, hooks=hooks, may_change=may_change, **keywords)
    raise_signal_again(run)
    return run


def run_within(trainer_class=None, *, data=None, hooks=(), may_change=(), set_by_data=(), **keywords) -> Run:
    """Runs a model as `run` does; its caller explains exceptions (`explanations.explained`).

    `set_by_data` are the names of flags that the data decides (`Data.flags`).
    """
    config, script_flags = _configure(trainer_class, data, may_change, keywords, set_by_data=set_by_data)
    run = run_to_end(config, data, hooks, script_flags)
    if config.is_evaluator:
        raise SystemExit(run.code)
    return run


def raise_signal_again(run: Run) -> None:
    """Lets a signal that has ended a run have its usual effect; that of Ctrl-C is KeyboardInterrupt."""
    if run.code in (EXIT_HUNG_UP, EXIT_TERMINATED):
        signal.raise_signal(run.code - 128)
    if run.code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt


@explanations.explained
def open_run(
    trainer_class: type[Trainer] | None = None,
    *,
    data: Any = None,
    hooks: Sequence[Any] = (),
    may_change: Sequence[str] = (),
    **keywords: Any,
) -> Run:
    """Opens a run for a program that has its own loop: it is assembled once, and can train many times.

    With a run_dir it resumes from the latest checkpoint, if any. It has no end unless `train_steps` or
    `train_epochs` sets one. When the context ends, also by your own exception or by Ctrl-C, the run is saved and
    closed. A signal ends a call of `train` at a step, and then has its usual effect;
    SIGTERM and SIGHUP save and close the run before, between two calls too. A run that is left open is saved and
    closed once the program holds it no more, as its folder is opened again or as the program ends; one of several
    processes is then not saved.

    With mode="eval" it only reads the run of run_dir, also beside the process that trains it: it has the weights of
    `eval_checkpoint`, and later those of `restore`; it evaluates and predicts, and writes nothing.

    Args:
      trainer_class: as `crankshaft.main` takes it.
      data: as `crankshaft.main` takes it: the training data, and the form of all data passed later.
      hooks: as `crankshaft.main` takes them.
      may_change: as `crankshaft.main` takes it.
      **keywords: as `crankshaft.run` takes them.

    Raises:
      UsageError: a mistake in the arguments.
      RunError: the run could not be assembled.

    Example:
      >>> with open_run(PlaneTrainer, data=data, learning_rate=0.1) as run:  # doctest: +SKIP
      ...     for _ in range(10):
      ...         print(run.step, run.train(steps=10)["loss"])
    """
    config, script_flags = _configure(trainer_class, data, may_change, keywords, may_be_endless=True)
    if not config.trains and (config.mode != "eval" or config.follow):
        mode = f"mode={config.mode!r}" + ", follow=True" * config.follow
        raise UsageError(f"open_run({mode}): an open run trains, or reads by mode='eval'; use crankshaft.run for this")
    if config.export_dir:
        raise UsageError('open_run(export_dir=...): an open run has no end of its own; use run(mode="export") after it')
    if config.is_evaluator:
        raise SystemExit(run_to_end(config, data, hooks, script_flags).code)
    run = assemble_run(config, data, hooks, script_flags)
    run.begin_loop()
    return run.handle()


def _configure(trainer_class, data, may_change: Sequence[str], keywords: dict[str, Any], **options) -> tuple[Any, dict]:
    """Configures and checks keywords; also finds the script's own flags that they set, by name.

    Raises `UsageError`.
    """
    if user_files.instead.get():
        raise UsageError("a run in Python is not planned, and would train; plan a script that calls crankshaft.main")
    user_files.check_trainer(trainer_class)
    given, script_flags = parsing.from_keywords(keywords, ("data", "hooks", "may_change"))
    config = program.configure_program(
        given, script_flags, trainer_class, data is not None, may_change, owns_process=False, **options
    )
    program.check(config)
    script_flags |= config.script_flags
    return config, {name: value for name, value in script_flags.items() if value != flags.FLAGS[name].value}


@explanations.explained
def load_model(
    run_dir: str | os.PathLike[str],
    which: str | int = "latest",
    trainer_class: type[Trainer] | None = None,
    name: str | None = None,
) -> Any:
    """Loads the Keras model of a run, with a checkpoint's weights: their moving average, if the run has one.

    It computes what `Trainer.forward` computes, with the tables as they were trained. If the run's Trainer overrides
    `forward`, `trainer_class` is needed, and the model is for predictions, not for training or a `.keras` file. While
    the run removes older checkpoints, the model has the newest readable one's weights.

    Its attribute `names` has the names of its numbers, as `Run.names`, and its `predict` takes, besides what Keras's
    does, what `Run.predict` takes: text that was looked up for training, a `Source`, a dataset in batches or not, the
    name of an input, `split="eval"` or `"train"` of the run's own data, if it is a named input's, and `columns`.

    Args:
      run_dir: folder of a run that trained.
      which: "latest", "best", or the step of a checkpoint that was kept.
      trainer_class: the run's own Trainer; needed if it has a `forward` of its own, or tables, and for a model that
        Keras can't make from its configuration (one that is subclassed, or has layers that are not registered with
        `keras.saving.register_keras_serializable`).
      name: name of one of the trainer's Keras models, without `Trainer.forward`: that of the attribute, such as
        "generator" or "model".

    Raises:
      UsageError: the folder holds no such checkpoint, or the model can't be made.

    Example:
      >>> load_model("runs/digits", "best").predict(split="eval").argmax(-1)  # doctest: +SKIP
    """
    from ..runner.modes import saved_run

    user_files.check_trainer(trainer_class)
    if not isinstance(path := os.fspath(run_dir) if isinstance(run_dir, os.PathLike) else run_dir, str):
        raise UsageError(f"load_model({run_dir!r:.60}): give the path of a run's folder")
    remote = remotes.remote_folder(path)
    folder = remote.folder if remote else rules.absolute(path)
    return saved_run.SavedRun(folder).model(str(which), trainer_class, name)
