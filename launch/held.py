"""A run held by this process: put together once, at work in each call, until it is closed. Host code.

`perform` is one that is opened, does what its mode is, and is closed; a program's own (`crankshaft.open_run`) is opened
and closed by the program, and trains in between as often as it is asked.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import logging

from ..engine.checkpoints import RunDir
from ..engine.machine import allocator
from . import explanations, terminal
from .benchmark.result import check_work_of_baseline
from .cluster import cluster, meeting, servers
from .command_line import checks, own_files
from .command_line.config import Config
from .errors import EXIT_USAGE, RunError, UsageError
from .host import imports, process, signals
from .host.files import finite, write_of_run
from .run import data as datas
from .run import results

_START_SECONDS = 120.0  # TensorFlow's own start, on a machine that is busy


def perform(config: Config, data, hooks: Sequence, once_failed: Callable[[Held], None] | None = None) -> Held:
    """Does what a checked configuration asks for, and writes its result. Errors are raised as they come.

    `once_failed` is called with a run that an error ends, while it can still be read.
    """
    held = Held(config)
    held.open(data, hooks)
    if held.session is not None:
        with held:
            try:
                with held.at_work():
                    held.do_all()
            except BaseException:
                if once_failed:
                    try:
                        once_failed(held)
                    except Exception as error:  # what has ended the run is to be told
                        logging.warning("the weights trained so far are not handed over: %s", error)
                raise
    return held


class Held:
    """A run that this process holds. `open` it, use it as a context, and do what it is to do `at_work`.

    Args:
      config: the run's configuration, checked.

    Attributes:
      session: the run, put together; None of a task that served others, until they ended.
      training: of a run that trains; else None.
      result: as result.json has it, once it is known.
      code: the exit code, likewise.
      is_open: whether it can be used.
    """

    def __init__(self, config: Config):
        self.config = config
        self.session: Any = None
        self.training: Any = None
        self.result: dict[str, Any] = {}
        self.code = 0
        self.is_open = False
        self._began = time.monotonic()
        self._stack = contextlib.ExitStack()
        self._lock: process.LockedRunDir | None = None

    def open(self, data, hooks: Sequence) -> None:
        """Puts the run together, up to its first step; a task that serves others does so until they end."""
        config = self.config
        if config.strategy == "parameter_server":
            servers.fail_fast()
        process.prepare()
        if config.serves:
            load = functools.partial(datas.sources, config, data)
            run_dir = None if config.remote else config.run_dir
            serve = functools.partial(servers.serve, gpus=config.gpu_numbers, run_dir=run_dir)
            self.code = serve(config.cluster, config.cluster_timeout_seconds, not config.debug, load)
            return
        with contextlib.ExitStack() as stack:
            if config.remote and (config.writes_run or config.mode == "export"):
                stack.enter_context(config.remote.pushing())
            if config.writes_run:
                self._lock = stack.enter_context(process.lock(config.run_dir))
            stack.push(self._record_end)
            if config.metrics_port is not None:
                self._serve_metrics(stack)
            early = config.input and not own_files.is_path(config.input) and config.mode != "generate"
            loaded = datas.load(config) if early else None
            strategy = self._start(stack)
            if not config.is_evaluator:
                stack.enter_context(strategy.watch())
            get = functools.partial(datas.load, config) if config.input else functools.partial(datas.call, data)
            with self.at_work():
                session = _base().BaseRun.create(config, loaded or get, strategy, _need_epochs(hooks))
                if config.is_evaluator:
                    self.code = _evaluator().watch(session)
                    return
                self.session = session
                stack.callback(session.lent_streams.clear)
                if config.trains:
                    self.training = stack.enter_context(contextlib.closing(self._training(hooks)))
            self.is_open = True
            self._stack = stack.pop_all()

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *error) -> None:
        self.close(*error)

    def close(self, *error) -> None:
        """Frees what the run holds, after an error, which may be explained by another that is raised, or without."""
        self.is_open = False
        if self.config.coordinates and not self.code and not any(error):
            self.session.strategy.dismiss()
        self._stack.__exit__(*(error or (None, None, None)))

    def keep(self, context: contextlib.AbstractContextManager) -> None:
        """Enters a context until the run is closed."""
        self._stack.enter_context(context)

    @contextlib.contextmanager
    def at_work(self, draws: bool = True) -> Iterator[None]:
        """Enters the state in which the run finds its process; `draws`: with its own random generators."""
        with self._isolation.entered(draws), terminal.escaping():
            if self.config.check_numerics:
                from ..engine.hooks import numerics

                numerics.enable()
            yield

    @contextlib.contextmanager
    def closing_after_errors(self, any_error: bool = False) -> Iterator[None]:
        """Closes the run after an error within that it can't go on after: any, or what other processes are part of.

        The error may then be explained by another that is raised, such as that one of them is lost.
        """
        try:
            yield
        except Exception as error:
            is_mistake = isinstance(error, UsageError)
            alone = self.session.strategy.num_hosts == 1 and not self.config.coordinates
            if self.is_open and (any_error or not (is_mistake or alone)):
                self.close(type(error), error, error.__traceback__)
            raise

    @contextlib.contextmanager
    def opened_again(self) -> Iterator[None]:
        """Opens a closed run again, to evaluate within."""
        from ..engine.strategies.base import closing_feeds

        with self.session.strategy.watch(), closing_feeds(self.session.strategy):
            yield

    def agree(self, call: str, split) -> str | None:
        """Compares what processes that train together do next: a call, or end by a signal, whose name then is `call`.

        `split` is data that is given to the call, if any.

        Returns:
          The signal by which all are to end instead, if one of them got one.

        Raises:
          UsageError: one of them makes another call.
          OutOfSyncError: the program has set a variable to other values in one of them.
        """
        from .run import agreement, lent

        if self.session.strategy.num_hosts == 1:
            return None
        call = call if split is None else f"{call} on {lent.described(split)}"
        ended_by = agreement.check_call(call, self.session.strategy)
        if self.training:
            self.training.check_sync()
        return ended_by

    def do_all(self) -> None:
        """Runs the mode, and writes the result."""
        session, mode = self.session, self.config.mode
        if self.training:
            self.training.restore_newest()
            with self.training.signals:
                self.training.make_ready()
                self.training.loop.begin()
                self.training.train_to(session.train_steps)
                self.training.loop.end()
            self.set_result(*self.training.outcome())
            return
        if mode == "benchmark":
            from .benchmark import mode as benchmark_mode

            result, code, report = benchmark_mode.benchmark(session, os.environ)
            self.set_result(result, code, [])
            if report:
                print(report, flush=True)
        else:
            from .run import generation, modes

            work = {"eval": modes.evaluate, "export": modes.export, "predict": modes.predict}
            self.set_result(*work.get(mode, generation.generate)(session))

    def set_result(self, result: dict[str, Any], code: int, lines: Sequence[str]) -> None:
        """Sets what the run has come to, writes it, and then prints lines of it."""
        if self._lock:
            self._lock.check()
        self._write_result(result, code)
        for line in lines:
            self.session.say(line)

    def _write_result(self, result: dict[str, Any], code: int) -> None:
        if self.config.mode != "generate":
            result.setdefault("wall_seconds", time.monotonic() - self._began)
        self.result, self.code = (result := finite(result)), code
        if self._lock and self._lock.is_in_place:
            write_of_run(RunDir(self.config.run_dir).result, result)
        if self.config.is_chief:
            results.write(result, self.config.values)

    def _write_failure(self, error: Exception) -> None:
        """Writes which error ended the run as its result.

        Before the first step a mistake leaves none, and any error leaves the result of an earlier start as it is: it
        shows that the run had ended, should its checkpoints be gone. What fails after the run's own result was
        written, as printing it may, leaves that.
        """
        if self.result:
            return
        config, has_trained = self.config, self.training is not None and self.training.loop.status.steps > 0
        code, line = explanations.explain(error, has_debug=False)
        has_result = self._lock and os.path.exists(RunDir(config.run_dir).result)
        if not has_trained and (code == EXIT_USAGE or has_result):
            return
        model = config.own_class.__name__ if config.own_class else config.model
        step = self.training.loop.status.step if self.training else None
        of_run = {"mode": config.mode, "model": model, "run_dir": config.given_run_dir, "step": step}
        try:
            self._write_result({**of_run, "error": line, "exit_code": code}, code)
        except OSError as failed:
            logging.warning("the result, %s, is not written: %s", line, explanations.of_system(failed))

    def _start(self, stack: contextlib.ExitStack):
        """Starts TensorFlow, meets the other processes if any, and returns the strategy. `stack` ends with it."""
        config = self.config
        with process.without_start_up_noise(quiet=config.cluster is not None and not config.debug):
            with _meeting(config):
                from ..engine.strategies.base import closing_feeds
                from .host import isolation
                from .run import base
            self._isolation = isolation.Isolation()
            with self.at_work():
                checks.check_named(config)
                check_work_of_baseline(config)
                with _joining(config):
                    strategy = base.make_strategy(config, self._record_standstill)
            if not process.sets_allocator(os.environ):
                allocator.keep_freed_memory_with_tensorflow()
        if config.owns_process:
            imports.keep()
        stack.enter_context(closing_feeds(strategy))
        return strategy

    def _training(self, hooks: Sequence):
        from .run import training

        began = time.monotonic() - process.age_seconds() if self.config.owns_process else self._began
        return training.Training(self.session, hooks, self._lock.check if self._lock else None, began)

    def _serve_metrics(self, stack: contextlib.ExitStack) -> None:
        from .run import metrics

        config, cluster = self.config, self.config.cluster
        port, task = config.metrics_port, cluster.task if cluster else "chief"
        port += cluster.index if cluster and port and cluster.is_on_one_host else 0
        about = {"model": config.model or "", "strategy": config.strategy, "run_dir": config.given_run_dir or ""}
        about |= {"task": task}
        port = stack.enter_context(metrics.serving(port, config.bind or "", lambda: self.training, about))
        if config.is_chief and config.progress != "off":
            print(f"metrics: http://{config.bind or '127.0.0.1'}:{port}/metrics", flush=True)

    def _record_end(self, kind, error, trace) -> None:
        if isinstance(error, Exception):
            self._write_failure(error)
        if self.training is not None:
            self.training.finish(error, self.code)

    def _record_standstill(self, line: str) -> None:
        self._record_end(RunError, RunError(line), None)


def _need_epochs(hooks: Any) -> bool:
    """Returns whether a hook may act at the ends of epochs; what is none is refused later."""
    return not isinstance(hooks, Sequence) or any(getattr(hook, "needs_epochs", True) for hook in hooks)


def _base():
    from .run import base

    return base


def _evaluator():
    from .run import evaluator

    return evaluator


@contextlib.contextmanager
def _meeting(config: Config):
    """Waits for the other processes, if any, before TensorFlow is imported, which is done within, and afterwards."""
    if not config.cluster or config.is_evaluator:
        yield
        return
    with meeting.Meeting(config.cluster) as peers:
        peers.wait(config.cluster_timeout_seconds)
        if config.strategy == "multi_worker" and config.is_chief and not config.cluster.secret:
            logging.warning(
                "workers believe what arrives at their UDP ports; for them to know each other, set %s, the same random "
                "text for all of them",
                cluster.SECRET,
            )
        yield
        peers.wait(config.cluster_timeout_seconds, ready=True)


@contextlib.contextmanager
def _joining(config: Config):
    """Prepares for TensorFlow's joining a cluster, if any, which is done within and holds Python's lock meanwhile."""
    if not config.cluster or config.is_evaluator:
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(meeting.limited(config.cluster_timeout_seconds + _START_SECONDS))
        stack.enter_context(signals.keeping_sigterm())
        stack.enter_context(meeting.keep_others_out(config.cluster))
        yield
