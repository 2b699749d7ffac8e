"""Assembles a run, from a checked configuration to its first step, and executes it.

Mistakes in a configuration or a file are reported before TensorFlow is imported. The wait for the other processes of a
cluster comes before it too.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..engine import logging
from ..engine.checkpoints.run_dir import RunDir
from ..engine.machine import allocator
from ..engine.machine.threads import PROCESS
from ..runner.command_line import checks, user_files
from ..runner.command_line.config import WITHOUT_DATA, Config
from ..runner.data import loading
from ..runner.failures import UsageError
from ..runner.host import exits, forks, locks, process, startup
from ..runner.results import RunOutcomeWriter
from .command import import_for_run

if TYPE_CHECKING:
    from ..runner.modes.outcome import Outcome
    from .composition.open_run import Run

_LINK = "run_dir: %s was a link to %s, and no run writes through one in its folder: a new folder has its place"


def run_to_end(config: Config, data, hooks: Sequence, script_flags: Mapping[str, Any] | None = None) -> Run:
    """Assembles a run, executes its mode to the end and writes its result; raises errors unchanged."""
    run = assemble_run(config, data, hooks, script_flags)
    run.execute_mode(_mode_function(config))
    return run


def _mode_function(config: Config) -> Callable[[Run], Outcome]:
    """Imports the mode of a run alone, and returns its function."""
    if config.is_evaluator:
        from ..parts.parameter_servers.evaluator import watch as mode
    elif config.mode == "benchmark":
        from ..parts.benchmark.mode import benchmark
        from ..parts.dashboard import result_text
        from ..parts.plan.limits import step_limits

        mode = functools.partial(benchmark, limits=step_limits, text=result_text.text)
    elif config.mode == "eval":
        from ..runner.modes.evaluate import evaluate_checkpoints as mode
    elif config.mode == "export":
        from ..runner.modes.export import export as mode
    elif config.mode == "predict":
        from ..runner.modes.prediction_files import predict as mode
    elif config.mode == "generate":
        from ..runner.modes.generate import generate as mode
    else:
        from .composition.training import train_to_end as mode
    return mode


def assemble_run(config: Config, data, hooks: Sequence, script_flags: Mapping[str, Any] | None = None) -> Run:
    """Assembles a run up to its first step, and opens it.

    In a task that serves others it does not return: the process serves until they end, and ends with them.

    Args:
      data: data, or a function that returns it, if the configuration names no input.
      script_flags: values of the script's own flags; None in a process that belongs to the run, which has parsed them.
    """
    began = time.monotonic()
    if config.trains:
        exits.end_left_open(config.configured_run_dir)
    process.prepare()  # from here on a fork may set what libraries read
    waiting: contextlib.AbstractContextManager = contextlib.nullcontext()
    guarding: contextlib.AbstractContextManager = contextlib.nullcontext()
    look: Callable[[], None] | None = None
    if config.cluster:
        from ..parts.clusters import arrival, rendezvous

        arrival.reach_directly(config.cluster)
        if not (config.is_evaluator or rendezvous.has_joined(config.cluster)):
            limit, elastic = config.cluster_timeout_seconds, bool(config.min_workers)
            waiting = arrival.waiting_for_peers(config.cluster, limit, elastic)
            guarding, look = arrival.guarding_start(config.cluster), rendezvous.Rendezvous(config.cluster).look
    if config.strategy == "parameter_server":
        from ..parts.parameter_servers import servers

        servers.fail_fast()
    is_quiet = config.cluster is not None and not config.debug
    outcome_writer = RunOutcomeWriter(config, began)
    with contextlib.ExitStack() as stack:
        stack.push(outcome_writer.end)
        if config.cluster:
            stack.enter_context(rendezvous.refusing(config.cluster))
        if config.mode == "benchmark":
            from ..parts.benchmark import result

            result.check_baseline(config)
        if config.serves:
            load = functools.partial(loading.sources, config, data)
            run_dir = RunDir(config.run_dir) if config.run_dir and not config.remote else None
            limit, gpus = config.cluster_timeout_seconds, config.gpu_numbers
            servers.serve(config.tasks, limit, is_quiet, load, import_for_run, gpus=gpus, run_dir=run_dir)  # to the end
        if config.remote and (config.writes_run or config.mode == "export"):
            stack.enter_context(config.remote.pushing())
        inherited_lock = config.cluster.lock if config.cluster else None
        if config.writes_run:
            locked = locks.lock(config.files.path, inherited_lock, locks.LOCK_SECONDS, before_pause=look)
            outcome_writer.lock = stack.enter_context(locked)
        exports = config.mode == "export" and config.run_dir and config.output_path == config.files.export
        if config.writes_run or exports:
            for path, target in config.files.remove_links(config.trains).items():
                logging.warning(_LINK, path, target)
        stack.push(outcome_writer.end)  # here, while it has the lock
        if config.metrics_port is not None:
            from ..parts.dashboard import metrics

            stack.enter_context(metrics.serving_run(config, lambda: outcome_writer.run))
        # The inputs that come with Crankshaft do without TensorFlow: a broken file is found before it starts.
        is_builtin = config.input and not user_files.is_own(config.input)
        loaded = loading.load(config) if is_builtin and config.mode not in WITHOUT_DATA else None

        with PROCESS:
            with waiting, startup.quiet_startup(is_quiet):
                import tensorflow as tf

                from ..engine.strategies.base import closing_feeds
                from ..runner.host.isolation import Isolation
                from .composition import building, training
                from .composition import hooks as run_hooks

                tf.config.list_physical_devices()  # the first look logs that there is no GPU
            isolation = Isolation(config.keras_defaults, script_flags, config.check_numerics)
            with isolation.entered():
                checks.check_named(config)
                if config.mode == "benchmark":
                    result.check_baseline_work(config)
                with guarding:
                    strategy = building.make_strategy(config, outcome_writer.end_stuck)
            if not process.sets_allocator(os.environ):
                allocator.keep_freed_memory_with_tensorflow()
        stack.enter_context(closing_feeds(strategy))
        if not config.is_evaluator:
            stack.enter_context(strategy.watch())

        load_data = (
            functools.partial(loading.load, config) if config.input else functools.partial(loading.data_from, data)
        )
        with isolation.entered():
            user_hooks = run_hooks.check_user_hooks(hooks)
            run = building.build_run(config, loaded or load_data, strategy, user_hooks, outcome_writer.check_folder)
            outcome_writer.run = run
            stack.callback(run.external_streams.clear)
            if config.trains:
                since = time.monotonic() - forks.age_seconds() if config.owns_process else began
                snapshots = training.prepare(run, user_hooks, since)
                stack.push(lambda _, error, __: training.close(run, snapshots, error))
            if config.run_dir or config.cluster:
                import_for_run()
        run.mark_open(outcome_writer, isolation, stack.pop_all(), _page)
    return run


def _page(run_dir: str | None) -> Any:
    """Makes the page of the run in a folder; see `Run.page`."""
    if run_dir:
        from ..parts.dashboard import report

        return report.shown(run_dir)
    raise UsageError("page(): the run has no folder whose log it would show; give it a run_dir")
