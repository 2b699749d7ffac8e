"""Train, evaluate, time or export a model from the command line, for example

  crankshaft train --model=cnn --input=digits --run_dir=runs/first

A script of your own becomes such a program by `crankshaft.main(MyTrainer, data=my_data)`. The only code, with the rest
of `launch`, that reads flags and the environment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags, logging

from ..engine.data.source import StuckStreamError
from ..engine.machine import allocator
from . import errors, explanations, terminal
from .benchmark.result import check_baseline, check_work_of_baseline
from .cluster import servers, tf_config
from .command_line import checks, config, given, help, own_files, rules
from .command_line import flags as our_flags
from .errors import UsageError, nearest
from .host import imports, process
from .host import remote as remotes
from .host.files import write_of_run
from .run import data as datas
from .run import results

_COMMAND = "crankshaft train"  # its first argument, where a script has its path
_START_SECONDS = 120.0  # TensorFlow's own start, on a machine that is busy


def main(
    trainer_class=None,
    *,
    data: Callable | Sequence | None = None,
    hooks: Sequence = (),
    argv: list[str] | None = None,
    may_change: Sequence[str] = (),
) -> None:
    """Runs what the command line asks for, and exits the process. `run`, in Python, returns instead.

    Args:
      trainer_class: your `crankshaft.Trainer`; None takes the one that --model names.
      data: what, or a function without arguments that returns what, is (train, eval[, num_classes[, vocabulary]]) or
        a `crankshaft.Data`, which has more; train and eval are each (features, labels), (features, labels, weights)
        or (features,), of arrays whose first axis is examples (float64 is taken as float32, as Keras does), or of dicts
        and tuples of such arrays; a dict, which is features; or a `tf.data.Dataset` of such examples. eval may be
        None, or left out with all after it: no evaluation, unless --validation_split takes a part of train.
        vocabulary has, by the name of each feature that is an id, how many ids there are; None: no feature is.
        None takes what --input names.
      hooks: your `engine.hooks`.
      argv: the command line; None is the process's.
      may_change: names of your own absl flags that do not decide a run's numbers: with other values of the others,
        a run_dir is not resumed.

    Example:
      >>> main(PlaneTrainer, data=data)  # doctest: +SKIP
    """
    process.open_closed_streams()
    terminal.fit_log()
    with contextlib.redirect_stdout(process.SturdyStream(sys.stdout)) as output:
        code = _exit_code(sys.argv if argv is None else argv, trainer_class, data, hooks, may_change)
        output.flush()
    if output.lost:
        code = code or errors.fail(errors.EXIT_FAILED, f"a part of what was printed is lost: {output.lost.strerror}")
    # An iterator over a dataset that calls Python, if freed as the interpreter ends, waits for it for ever.
    gc.collect()
    sys.exit(code)


def _exit_code(argv: list[str], trainer_class, data, hooks, may_change) -> int:
    """Does the work of `main` and returns the exit code; every failure is printed as one line."""
    asked = None
    try:
        own_files.check_trainer(trainer_class)
        own = parse(argv)
        remote = remotes.of(flags.FLAGS["run_dir"].value)
        asked = config.from_flags(trainer_class, data is not None, os.environ, own - set(may_change), remote=remote)
        checks.check(asked)
        check_baseline(asked)
        code = perform(asked, data, hooks).code
        _say_where(asked)
    except KeyboardInterrupt:  # before the first step, or after the last: within, it asks the loop to save and end
        return errors.fail(errors.EXIT_INTERRUPTED, "interrupted; what the run had saved is as it was")
    except Exception as error:  # the border of the program: every failure becomes one line here
        code = _explain(error, flags.FLAGS["debug"].value)
        if explanations.is_lost_peer(error) or isinstance(error, StuckStreamError):
            process.leave(code)
    if asked is not None and asked.coordinates:  # a worker may be down
        process.leave(code)
    return code


def parse(argv: list[str]) -> set[str]:
    """Parses a command line into all flags, or their defaults; returns the names of the script's own flags.

    Raises:
      UsageError: a mistake in the command line.
    """
    own = our_flags.own()
    is_ours = argv[0] == _COMMAND
    of_script = "" if is_ours else help.doc_of("__main__")
    doc = of_script or "\n\n".join(help.doc_of(__name__).split("\n\n")[:2])
    name = argv[0] if is_ours else os.path.basename(argv[0])
    if {"--help", "-h", "--helpfull", "-help"} & set(argv[1:]):
        help.show(help.help_text(name, doc, own, argv[1:]))
    if "--helpshort" in argv[1:]:
        help.show(help.short_help_text(name, doc))
    for name in flags.FLAGS:  # an earlier run of this process may have had a command line of its own
        flags.FLAGS[name].unparse()
    return read_flags(argv)


def read_flags(argv: list[str]) -> set[str]:
    """Sets flags by a command line. Returns the names of the script's own. Raises `UsageError`."""
    own = our_flags.own()
    arguments = given.without_flagfiles(argv[1:])
    files = given.files(arguments)
    try:
        _read_words([argv[0], *(word for _, words in files for word in words), *arguments], own)
    except UsageError:
        for path, words in files:
            try:
                _read_words([argv[0], *words], own)
            except UsageError as error:  # it is the file's
                raise UsageError(f"--config={path}: {error}") from None
        raise
    logging.use_absl_handler()
    return set(own)


def _read_words(argv: list[str], own: list[str]) -> None:
    try:
        rest = flags.FLAGS(argv)[1:]
    except flags.UnrecognizedFlagError as error:
        known = [name for names in our_flags.GROUPS.values() for name in names] + own
        raise UsageError(f"--{error.flagname} is unknown; {nearest(error.flagname, known, 'see --help')}") from None
    except flags.Error as error:
        raise rules.explain(error, flags.FLAGS) from None
    except ValueError as error:  # of absl's own flags
        raise UsageError(f"{error}; see --help") from None
    if rest:
        raise UsageError(f"{rest[0]!r} is no flag; write --NAME=VALUE, see --help")


@dataclasses.dataclass
class Done:
    """The outcome of a configuration.

    Attributes:
      code: the exit code.
      result: as result.json has it; {} of a task that served others.
      session: the run, put together; None of a task that served others.
      history: the rows of a run that trained.
    """

    code: int
    result: dict[str, Any] | None = None
    session: Any = None
    history: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def perform(asked: config.Config, data, hooks: Sequence) -> Done:
    """Does what a checked configuration asks for, and writes its result. Errors are raised as they come."""
    started = time.monotonic()
    if asked.strategy == "parameter_server":
        servers.fail_fast()
    process.prepare()
    if asked.serves:
        load = functools.partial(datas.sources, asked, data)
        serve = functools.partial(servers.serve, gpus=asked.gpu_numbers)
        return Done(serve(asked.cluster, asked.cluster_timeout_seconds, not asked.debug, load))
    with contextlib.ExitStack() as stack:
        if asked.remote and (asked.writes_run or asked.mode == "export"):
            stack.enter_context(asked.remote.pushing())
        held = stack.enter_context(process.lock(asked.run_dir)) if asked.writes_run else None
        early = asked.input and not own_files.is_path(asked.input) and asked.mode != "generate"
        loaded = datas.load(asked) if early else None
        strategy = _start(asked, stack)
        get = functools.partial(datas.load, asked) if asked.input else functools.partial(datas.call, data)
        if asked.mode == "generate":
            with strategy.watch():
                return _generate(asked, strategy)
        if asked.is_evaluator:
            return Done(_evaluate_checkpoints(asked, loaded or get(), strategy))
        with strategy.watch():
            session = _create(asked, loaded or get(), strategy)
            done = _work(session, hooks, held)
        done.result.setdefault("wall_seconds", time.monotonic() - started)
        _write_result(asked, done.result)
        return done


def _start(asked: config.Config, run: contextlib.ExitStack):
    """Starts TensorFlow, meets the other processes if any, and returns the strategy. `run` ends with it."""
    with process.without_start_up_noise(quiet=asked.cluster is not None and not asked.debug):
        with _meeting(asked):
            from ..engine.strategies.base import closing_feeds
            from .host import isolation
            from .run import session as sessions
        run.enter_context(isolation.isolated())
        checks.check_named(asked)
        check_work_of_baseline(asked)
        if asked.check_numerics:
            from ..engine.hooks import numerics

            numerics.enable()
        with _joining(asked):
            strategy = sessions.make_strategy(asked)
        if not process.sets_allocator(os.environ):
            allocator.keep_freed_memory_with_tensorflow()
    if asked.owns_process:
        imports.keep()
    run.enter_context(closing_feeds(strategy))
    return strategy


@contextlib.contextmanager
def _meeting(asked: config.Config):
    """Waits for the other processes, if any, before TensorFlow is imported, which is done within, and afterwards."""
    if not asked.cluster or asked.is_evaluator:
        yield
        return
    with tf_config.Meeting(asked.cluster) as meeting:
        meeting.wait(asked.cluster_timeout_seconds)
        if asked.strategy == "multi_worker" and asked.is_chief and not asked.cluster.secret:
            logging.warning(
                "workers believe what arrives at their UDP ports; for them to know each other, set %s, the same random "
                "text for all of them",
                tf_config.SECRET,
            )
        yield
        meeting.wait(asked.cluster_timeout_seconds, ready=True)


@contextlib.contextmanager
def _joining(asked: config.Config):
    """Prepares for TensorFlow's joining a cluster, if any, which is done within and holds Python's lock meanwhile."""
    if not asked.cluster or asked.is_evaluator:
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(tf_config.limited(asked.cluster_timeout_seconds + _START_SECONDS))
        stack.enter_context(process.keeping_sigterm())
        stack.enter_context(tf_config.keep_others_out(asked.cluster))
        yield


def _create(asked: config.Config, data, strategy):
    """Builds everything up to the first step. The devices are split by now, so the user's data may use TensorFlow."""
    from .run import session as sessions

    return sessions.create(asked, data, strategy)


def _generate(asked: config.Config, strategy) -> Done:
    from .run import generation

    session = generation.create(asked, strategy)
    result, code = generation.generate(session)
    _write_result(asked, result)
    return Done(code, result, session)


def _evaluate_checkpoints(asked: config.Config, data, strategy) -> int:
    from .run import evaluator

    return evaluator.watch(_create(asked, data, strategy))


def _work(session, hooks, held: process.LockedRunDir | None) -> Done:
    from .benchmark import mode as benchmark_mode
    from .run import modes, user_hooks

    mode = session.config.mode
    if mode in ("train", "train_and_eval"):
        history = modes.make_history(session)
        holding = [modes.Holding(held.check)] if held else []
        result, code = modes.train(session, [*holding, *user_hooks.checked(hooks)], history)
        return Done(code, result, session, history.rows)
    if mode == "benchmark":
        result, code = benchmark_mode.benchmark(session, os.environ)
    else:
        result, code = {"eval": modes.evaluate, "export": modes.export}[mode](session)
    return Done(code, result, session)


def _write_result(asked: config.Config, result: dict) -> None:
    if asked.writes_run:
        write_of_run(asked.run_dir, "result.json", result)
    if asked.is_chief:
        results.write(result, asked.values)


def _say_where(asked: config.Config) -> None:
    if asked.writes_run and asked.progress != "off":
        run_dir = asked.given_run_dir
        board = os.path.join(run_dir, "tensorboard")
        print(f"The run's files: {run_dir}\nTensorBoard:     {sys.executable} -m tensorboard.main --logdir {board}")


def _explain(error: Exception, debug: bool) -> int:
    """Prints one line for an exception and returns the exit code."""
    if debug:
        traceback.print_exception(error)
    code, line = explanations.explain(error)
    return errors.fail(code, line)
