"""A run held by this process: put together once, at work in each call, until it is closed. Host code.

`perform` is one that is opened, does what its mode is, and is closed; a program's own (`crankshaft.open_run`) is opened
and closed by the program, and trains in between as often as it is asked.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

from absl import logging

from ..engine.machine import allocator
from .benchmark.result import check_work_of_baseline
from .cluster import cluster, meeting, servers
from .command_line import checks, own_files
from .command_line.config import Config
from .errors import UsageError
from .host import imports, process
from .host.files import write_of_run
from .run import data as datas
from .run import results

_START_SECONDS = 120.0  # TensorFlow's own start, on a machine that is busy


def perform(asked: Config, data, hooks: Sequence) -> Held:
    """Does what a checked configuration asks for, and writes its result. Errors are raised as they come."""
    held = Held(asked)
    held.open(data, hooks)
    if held.session is not None:
        with held, held.at_work():
            held.do_all()
    return held


class Held:
    """A run that this process holds. `open` it, use it as a context, and do what it is to do `at_work`.

    Args:
      asked: the run's configuration, checked.

    Attributes:
      session: the run, put together; None of a task that served others, until they ended.
      training: of a run that trains; else None.
      result: as result.json has it, once it is known.
      code: the exit code, likewise.
      is_open: whether it can be used.
    """

    def __init__(self, asked: Config):
        self.asked = asked
        self.session: Any = None
        self.training: Any = None
        self.result: dict[str, Any] = {}
        self.code = 0
        self.is_open = False
        self._began = time.monotonic()
        self._stack = contextlib.ExitStack()

    def open(self, data, hooks: Sequence) -> None:
        """Puts the run together, up to its first step; a task that serves others does so until they end."""
        asked = self.asked
        if asked.strategy == "parameter_server":
            servers.fail_fast()
        process.prepare()
        if asked.serves:
            load = functools.partial(datas.sources, asked, data)
            serve = functools.partial(servers.serve, gpus=asked.gpu_numbers)
            self.code = serve(asked.cluster, asked.cluster_timeout_seconds, not asked.debug, load)
            return
        with contextlib.ExitStack() as stack:
            if asked.remote and (asked.writes_run or asked.mode == "export"):
                stack.enter_context(asked.remote.pushing())
            lock = stack.enter_context(process.lock(asked.run_dir)) if asked.writes_run else None
            early = asked.input and not own_files.is_path(asked.input) and asked.mode != "generate"
            loaded = datas.load(asked) if early else None
            strategy = self._start(stack)
            if not asked.is_evaluator:
                stack.enter_context(strategy.watch())
            get = functools.partial(datas.load, asked) if asked.input else functools.partial(datas.call, data)
            with self.at_work():
                session = self._create(loaded or get, strategy)
                if asked.is_evaluator:
                    self.code = _evaluator().watch(session)
                    return
                self.session = session
                if asked.trains:
                    self.training = stack.enter_context(contextlib.closing(self._training(hooks, lock)))
            self.is_open = True
            self._stack = stack.pop_all()

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *error) -> None:
        self.close(*error)

    def close(self, *error) -> None:
        """Frees what the run holds, after an error, which may be explained by another that is raised, or without."""
        self.is_open = False
        self._stack.__exit__(*(error or (None, None, None)))

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Enters the state in which the run finds its process."""
        with self._isolation:
            if self.asked.check_numerics:
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
            alone = self.session.strategy.num_hosts == 1 and not self.asked.coordinates
            if self.is_open and (any_error or not (is_mistake or alone)):
                self.close(type(error), error, error.__traceback__)
            raise

    @contextlib.contextmanager
    def opened_again(self) -> Iterator[None]:
        """Has a run that is closed evaluate within."""
        from ..engine.strategies.base import closing_feeds

        with self.session.strategy.watch(), closing_feeds(self.session.strategy):
            yield

    def agree(self, call: str, split) -> None:
        """Raises `UsageError`, in all processes that train together, where one of them makes another call.

        `split` is data that is given to the call, if any.
        """
        from .run import agreement, lent

        if self.session.strategy.num_hosts > 1:
            agreement.check_call(call if split is None else f"{call} on {lent.described(split)}", self.session.strategy)

    def do_all(self) -> None:
        """Does what the mode is, and writes the result."""
        from .benchmark import mode as benchmark_mode
        from .run import generation, modes

        session, mode = self.session, self.asked.mode
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
            found = benchmark_mode.benchmark(session, os.environ)
        else:
            found = {"eval": modes.evaluate, "export": modes.export, "generate": generation.generate}[mode](session)
        self.set_result(*found)

    def set_result(self, result: dict[str, Any], code: int) -> None:
        """Sets what the run has come to, and writes it."""
        self.result, self.code = result, code
        if self.asked.mode != "generate":
            result.setdefault("wall_seconds", time.monotonic() - self._began)
        if self.asked.writes_run:
            write_of_run(self.asked.run_dir, "result.json", result)
        if self.asked.is_chief:
            results.write(result, self.asked.values)

    def _start(self, stack: contextlib.ExitStack):
        """Starts TensorFlow, meets the other processes if any, and returns the strategy. `stack` ends with it."""
        asked = self.asked
        with process.without_start_up_noise(quiet=asked.cluster is not None and not asked.debug):
            with _meeting(asked):
                from ..engine.strategies.base import closing_feeds
                from .host import isolation
                from .run import session as sessions
            self._isolation = isolation.Isolation()
            with self.at_work():
                checks.check_named(asked)
                check_work_of_baseline(asked)
                with _joining(asked):
                    strategy = sessions.make_strategy(asked)
            if not process.sets_allocator(os.environ):
                allocator.keep_freed_memory_with_tensorflow()
        if asked.owns_process:
            imports.keep()
        stack.enter_context(closing_feeds(strategy))
        return strategy

    def _create(self, data, strategy):
        """Builds everything up to the first step. The devices are split by now, so the user's data may use TensorFlow.

        `data` is the run's, or a function that returns it, which a run that only generates does not call.
        """
        from .run import generation
        from .run import session as sessions

        if self.asked.mode == "generate":
            return generation.create(self.asked, strategy)
        return sessions.create(self.asked, data() if callable(data) else data, strategy)

    def _training(self, hooks: Sequence, lock: process.LockedRunDir | None):
        from .run import training, user_hooks

        checked = user_hooks.checked(hooks)
        return training.Training(self.session, checked, lock.check if lock else None)


def _evaluator():
    from .run import evaluator

    return evaluator


@contextlib.contextmanager
def _meeting(asked: Config):
    """Waits for the other processes, if any, before TensorFlow is imported, which is done within, and afterwards."""
    if not asked.cluster or asked.is_evaluator:
        yield
        return
    with meeting.Meeting(asked.cluster) as peers:
        peers.wait(asked.cluster_timeout_seconds)
        if asked.strategy == "multi_worker" and asked.is_chief and not asked.cluster.secret:
            logging.warning(
                "workers believe what arrives at their UDP ports; for them to know each other, set %s, the same random "
                "text for all of them",
                cluster.SECRET,
            )
        yield
        peers.wait(asked.cluster_timeout_seconds, ready=True)


@contextlib.contextmanager
def _joining(asked: Config):
    """Prepares for TensorFlow's joining a cluster, if any, which is done within and holds Python's lock meanwhile."""
    if not asked.cluster or asked.is_evaluator:
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(meeting.limited(asked.cluster_timeout_seconds + _START_SECONDS))
        stack.enter_context(process.keeping_sigterm())
        stack.enter_context(meeting.keep_others_out(asked.cluster))
        yield
