"""The hooks of a run, composed from its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from ... import parts
from ...engine import logging
from ...engine.hooks import Hook, StopRequest, evaluation, numerics
from ...engine.hooks.background import BackgroundThread
from ...engine.hooks.base import Arrangement, Period
from ...engine.hooks.bottlenecks import InputBound, Stragglers
from ...engine.hooks.monitors import EarlyStopping, ReduceLearningRate
from ...engine.hooks.saving import BestCheckpoint, BestWeights, Checkpointing
from ...engine.hooks.sync_check import SyncCheck
from ...engine.machine.pauses import Pauses
from ...runner.base import BaseRun
from ...runner.failures import UsageError
from ...runner.history import History
from ...runner.progress import Progress

if TYPE_CHECKING:
    from ...parts.memory_snapshots.in_memory import Snapshots


def make_hooks(
    run: BaseRun, user_hooks: Sequence[Hook], began: float, pauses: Pauses, snapshots: Snapshots | None
) -> list[Hook]:
    """Makes a run's hooks, in the order in which they act: those that evict, judge, show, stop, and that save.

    Those that the run itself reads are set as its attributes: `record` to `sync_check`, see `BaseRun`.

    Args:
      user_hooks: hooks of the user, as `check_user_hooks` returns them.
      began: time at which the process began to work on the run, by `time.monotonic`.
    """
    config, strategy = run.config, run.strategy
    arrangements = (hook.arranged(strategy.training.feed) for hook in user_hooks)
    arranged = next((arrangement for arrangement in arrangements if arrangement), None)
    eval_period = run.epoch_period if config.eval_every_steps is None else config.eval_every_steps
    if arranged and arranged.period:
        eval_period = arranged.period
    entry_periods: set[int | Period] = {run.epoch_period, eval_period}
    # The writer waits for the device, even if that hangs; the poller never does.
    writer, poller = BackgroundThread("writer"), BackgroundThread("poller")

    if strategy.is_chief:
        from .recording import make_recorder

        run.record = make_recorder(run, writer, poller, began, pauses)
    run.history_hook = History(run.record, entry_periods)
    run.final = evaluation.FinalWeights(any(user.ends_last and user.runs_user_code for user in user_hooks))
    run.stop_request = StopRequest(config.stop_at_step)
    if strategy.num_replicas > 1:
        runs_user_code = any(user.runs_user_code for user in user_hooks)
        names = strategy.replica_names
        run.sync_check = SyncCheck(config.check_sync_every_steps, names, entry_periods, runs_user_code)

    # Which those that save keep, for the state of all of them. What is evaluated and saved is without evicted rows.
    hooks: list[Hook] = []
    if run.trainer.inventory.tables:
        from ...parts.tables.eviction import make_eviction

        hooks += make_eviction(run.trainer.inventory)
    hooks += _judges(run, arranged, eval_period, hooks)
    hooks += [run.final, run.history_hook, *user_hooks]
    if run.sync_check:
        hooks.append(run.sync_check)
    if config.run_dir and parts.has("tensorboard"):
        from ...parts.tensorboard import TensorBoard
        from ...parts.tensorboard.probe import Probe

        has_servers = not strategy.updates_here
        if has_servers and config.histogram_every_steps:
            every = f"histogram_every_steps={config.histogram_every_steps}"
            logging.warning("%s writes histograms of weights, and with parameter servers none of gradients", every)
        # For a probe, each step would exchange more with the servers.
        probe = None if has_servers else Probe(strategy, run.trainer, bool(config.histogram_every_steps))
        hooks.append(
            TensorBoard(
                config.tensorboard if config.is_chief else None,
                every_steps=config.summary_every_steps,
                histogram_every_steps=config.histogram_every_steps,
                more=entry_periods if config.summary_every_steps else (),
                config=config.deciding(),
                probe=probe,
                writer=writer,
            )
        )
    hooks += [Progress(config.progress_mode), run.stop_request]
    if config.cluster and (config.cluster.absent or config.cluster.newcomers):
        from ...parts.elastic.joining import IncludeWorkers

        hooks.append(IncludeWorkers(config))
    # Those that save come last, and save the state of all hooks: `hooks` itself, to which they are appended.
    if run.checkpoints:
        every_steps, every_seconds = config.checkpoint_period
        hooks.append(Checkpointing(run.checkpoints, every_steps, hooks, every_seconds))
    if snapshots:
        from ...parts.memory_snapshots.snapshots import InMemory

        seconds = None if config.snapshot_seconds == "auto" else float(config.snapshot_seconds)
        hooks.append(InMemory(snapshots, seconds, hooks))
    if run.checkpoints and not config.remote and parts.has("ask"):
        from ...parts.ask.answering import make_request_handler

        hooks.append(make_request_handler(run, run.checkpoints, hooks, poller))
    return hooks


def _judges(run: BaseRun, arranged: Arrangement | None, eval_period: int | Period, hooks: Sequence[Hook]) -> list[Hook]:
    """Makes the hooks that judge a call: whether it is finite and fast, and how good the weights are."""
    config, strategy = run.config, run.strategy
    # No checkpoint may have weights that are not finite, so a run with a folder ends with an error all the same.
    is_strict = bool(config.run_dir) or not (arranged and arranged.ends_at_nonfinite)
    judges: list[Hook] = [numerics.NanGuard(is_strict)]
    if len(strategy.worker_names) > 1 and strategy.is_chief:
        judges.append(Stragglers(strategy.worker_names))
    judges.append(InputBound(run.inputs.faster))
    if run.evaluates:
        judges.append(
            evaluation.Evaluation(
                eval_period,
                ends=lambda: run.stop_request.reason if arranged is None or arranged.may_end() else None,
                **(arranged.options if arranged else {}),
                is_strict=is_strict,
                batches=config.eval_batches,
                directory=config.run_dir,
            )
        )
    if run.record:
        judges.append(run.record)  # before those that save: a window ends with all work by then
    # Without evaluations, a metric of the training data is checked each epoch.
    period: dict[str, Any] = {} if run.evaluates and eval_period else {"every_steps": run.epoch_period}
    if config.early_stopping:
        judges.append(EarlyStopping(config.monitor, **config.arguments("early_stopping"), **period))
    if config.reduce_lr:
        judges.append(ReduceLearningRate(config.monitor, **config.arguments("reduce_lr"), **period))
    if run.best and run.evaluates:
        judges.append(BestCheckpoint(run.best, config.monitor, hooks))
    elif config.restore_best:
        judges.append(BestWeights(config.monitor))
    return judges


def check_user_hooks(user_hooks: Sequence) -> list[Hook]:
    """Returns the user's hooks; Keras callbacks become one hook, the last. Raises `UsageError` for other objects."""
    if not isinstance(user_hooks, Sequence):
        raise UsageError(f"hooks={user_hooks!r} is not a list; put hooks into one, hooks=[...]")
    callbacks = [hook for hook in user_hooks if isinstance(hook, tf.keras.callbacks.Callback)]
    others = [hook for hook in user_hooks if hook not in callbacks]
    for hook in others:
        if not isinstance(hook, Hook):
            raise UsageError(
                f"hook {hook!r} is neither an engine.hooks.Hook nor a Keras callback; wrap a function by every_epoch "
                "or every_steps"
            )
    if callbacks:
        from ...parts.keras_models.keras_callbacks import KerasCallbacks

        others.append(KerasCallbacks(callbacks))
    return others
