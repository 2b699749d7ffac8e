"""Builds a run from its configuration: strategy, data, state, checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import uuid
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import tensorflow as tf

from ...engine.checkpoints import Checkpoints, WritingProcess
from ...engine.data.run_data import Data
from ...engine.hooks import Hook
from ...engine.machine import threads
from ...engine.state import TrainState
from ...engine.strategies import ClusterAddresses, FeedOptions, ServerOptions, WorkerTask
from ...engine.strategies.base import Strategy
from ...engine.strategies.options import default_timeout_seconds
from ...runner import progress
from ...runner.command_line import checks, rules
from ...runner.command_line.config import WITHOUT_DATA, Config
from ...runner.data import inputs
from ...runner.data.inputs import Inputs
from ...runner.host import cpu_threads
from ...runner.restored.state import build_state, parallel_micro_batches, train_steps
from . import devices
from .open_run import Run

_RECORD_SECONDS = 5.0  # limit of recording the end of a hanging process, whose disk may hang too


def build_run(
    config: Config,
    data: Data | Callable[[], Data],
    strategy: Strategy,
    hooks: Sequence[Hook] | None = None,
    check_folder: Callable[[], None] = lambda: None,
) -> Run:
    """Puts a run together, and restores nothing.

    Args:
      data: loaded data, or a function that loads it, which a mode without data does not call.
      hooks: see `inputs.build`.
      check_folder: raises where the run_dir is not this run's any more.
    """
    steps: int | None = config.train_steps or 1
    agreement: ModuleType | None = None
    if strategy.num_hosts > 1:
        from ...parts.workers import agreement
    if config.mode in WITHOUT_DATA:
        run_inputs = inputs.saved_inputs(config, strategy, agreement)  # an export works where the data is not
    else:
        run_inputs = inputs.build(config, data() if callable(data) else data, strategy, hooks, agreement)
        limits = [hook.last_step for hook in hooks or ()]
        steps = train_steps(config, run_inputs.feeds["train"], limits)
        run_inputs.feeds["train"].last_step = steps
    cache = None
    if config.trainer_class.is_built:
        from .compiled_cache import CompiledCache

        cache = CompiledCache.pop(config, run_inputs, steps)
    state = cache.restarted(run_inputs.updates_before) if cache else build_state(config, strategy, run_inputs, steps)
    strategy.bind(state, run_inputs.feeds.get("train"), run_inputs.evaluation_feeds)
    if cache:  # not before: `bind` makes the programs
        cache.give_compiled(strategy, run_inputs)
    saved = build_checkpoints(config, state, strategy, run_inputs, check_folder)
    run = Run(config, strategy, run_inputs, state, steps, *saved)
    for line in run_inputs.lines:
        run.log(line)
    return run


def make_strategy(config: Config, record_end: Callable[[str], None] = lambda line: None) -> Strategy:
    """Makes the strategy, before anything else touches the devices.

    Args:
      record_end: called in a thread if the watchdog ends the process, with the reason in a line.
    """

    def end_process(line: str) -> None:
        recording = threading.Thread(target=record_end, args=(line,), daemon=True)
        with contextlib.suppress(RuntimeError):  # without memory for it the process ends all the same
            recording.start()
            recording.join(_RECORD_SECONDS)
        threads.end_process(line)

    task = servers = None
    if config.strategy == "multi_worker":
        cluster = config.tasks
        names, addresses = zip(*cluster.addresses, strict=True)
        task = WorkerTask(cluster.index, names, addresses, cluster.secret, cluster.bind)
    if config.coordinates:
        cluster = config.tasks
        servers = ServerOptions(
            ClusterAddresses(cluster.job("chief")[0], cluster.job("worker"), cluster.job("ps")),
            max_staleness_steps=config.max_staleness_steps,
            placement_rules=tuple(config.placement_rules),
        )
    strategy = devices.create(
        "one_device" if config.is_evaluator else config.strategy,
        num_virtual_devices=config.num_virtual_devices,
        # A Keras model that is to be trained was made in the scope of a strategy, which is used.
        distribution=config.trainer_class.strategy() if config.trainer_class.is_built else None,
        mesh=rules.mesh_shape(config.mesh),
        shard_optimizer=config.shard_optimizer,
        tpu_address=os.environ.get("TPU_NAME", ""),
        task=task,
        servers=servers,
        communication=config.communication,
        step_timeout_seconds=_step_timeout_seconds(config),
        end_process=end_process,
        steps_per_loop=config.steps_per_loop,
        feed_options=FeedOptions(
            config.resident_data_mb << 20,
            config.shuffle_buffer,
            inputs.sharding(config),
            config.shuffle_window,
            read_timeout_seconds=_step_timeout_seconds(config) / 2,  # a read that hangs is named, not who waits for it
            watch=progress.watch(config.progress_mode),
        ),
        parallel_micro_batches=parallel_micro_batches(config),
        owns_process=config.owns_process,
        gpus=config.gpu_numbers,
        run_eagerly=config.run_eagerly,
        # TensorFlow has no deterministic kernel of the op that checks numbers on GPUs.
        deterministic=not config.check_numerics
        and os.environ.get("TF_DETERMINISTIC_OPS", "").lower() not in ("0", "false"),
    )
    checks.check_batch(config, strategy.mesh.batch_shard(0, strategy.num_replicas)[1])
    tf.config.list_logical_devices()  # starts them, so that TensorFlow's messages about it come now
    return strategy


def _step_timeout_seconds(config: Config) -> float:
    seconds = config.step_timeout_seconds
    return default_timeout_seconds() if seconds is None else seconds


def build_checkpoints(
    config: Config, state: TrainState, strategy: Strategy, run_inputs: Inputs, check_folder: Callable[[], None]
) -> tuple[Checkpoints | None, Checkpoints | None]:
    """Returns those of the run, and that of its best evaluation; of a run without a folder None."""
    if not config.run_dir:
        return None, None
    about = {
        **config.as_json(),
        "strategy": strategy.describe(),
        "data": strategy.exchange(run_inputs.contents)[0],  # all decide alike, though CPUs may round otherwise
    }
    state.is_saved = True
    about["cpu"], about["updated"] = cpu_threads.counts(strategy), state.updated()
    if final_averages := state.final_averages():
        about["final_averages"] = final_averages
    if parts := {split: feed.part.metadata() for split, feed in run_inputs.feeds.items() if feed.part}:
        about["input"] = parts
    if compile_values := state.trainer.compile_values:
        about["compile"] = compile_values
    elif settings := state.optimizer_settings():
        about["optimizers"] = settings
    if run_inputs.updates_before:
        about["updates_before"] = run_inputs.updates_before
    if run_inputs.order and run_inputs.order.origin.step:
        about["origin"] = dataclasses.asdict(run_inputs.order.origin)
    attempt = strategy.exchange(uuid.uuid4().hex)[0]
    writer = WritingProcess(strategy.host, attempt, _step_timeout_seconds(config))
    folder = config.files
    options: dict[str, Any] = {"about": about, "writer": writer, "check": check_folder}
    if config.remote:
        options["removing"] = config.remote.removing
    # If the run has an evaluator, that alone writes the best checkpoint.
    writes_best = config.is_evaluator or not config.has_evaluator
    best = Checkpoints(folder.best, state.checkpoint, keep=1, writes=writes_best, overtakes=True, **options)
    # A run that goes on from a checkpoint finds the best until then: it evaluates only later steps again.
    keep = config.keep_checkpoints
    return Checkpoints(folder.checkpoints, state.checkpoint, keep=keep, after=best, **options), best
