"""The hooks of a run, composed from its configuration, with the record of the run and its answers. Host code."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ...engine import logging
from ...engine.checkpoints import Manifest, RunDir
from ...engine.checkpoints import manifest as manifests
from ...engine.hooks import Hook, Status, StopRequest, evaluation, numerics, saving
from ...engine.hooks.base import Period, Periodic
from ...engine.hooks.bottlenecks import InputBound, Stragglers
from ...engine.hooks.monitors import EarlyStopping, ReduceLearningRate
from ...engine.hooks.recorder import Recorder
from ...engine.hooks.request_handler import RequestHandler
from ...engine.hooks.rollback import Rollback
from ...engine.hooks.saving import BestCheckpoint, BestWeights, Checkpointing
from ...engine.hooks.snapshots import InMemory
from ...engine.hooks.sync_check import SyncCheck
from ...engine.hooks.tensorboard import TensorBoard
from ...engine.hooks.tensorboard.probe import Probe
from ...engine.hooks.writing import Writing
from ...engine.keras_models.keras_callbacks import KerasCallbacks
from ...engine.machine import events
from ...engine.machine.pauses import Pauses
from ...engine.machine.requests import Requests
from ...engine.machine.threads import Thread
from ..cluster import discovery, members, rendezvous
from ..command_line import checks
from ..command_line.config import Config
from ..errors import UsageError, setting
from .base import BaseRun
from .history import History, TrainMetrics
from .progress import Progress, duration, metrics_shown

TO_INCLUDE = "to include "  # how the reason to stop begins where workers have come
_LOOK_SECONDS = 1.0


def compose(run: BaseRun, user_hooks: Sequence, began: float, pauses: Pauses) -> list[Hook]:
    """Makes a run's hooks, in the order in which they act: those that judge, show, stop, and last those that save.

    Args:
      run: gets its record, rows, metrics, final weights, stop request, check of replicas and rollback.
      user_hooks: Keras callbacks may be among them.
      began: when the process began to work on the run, by `time.monotonic`.
      pauses: of the process.

    Raises:
      UsageError: one of the user's is neither a hook nor a callback.
    """
    users = _checked(user_hooks)
    writing, looking = Writing(), Writing("looking")  # the first waits for the device, even if that hangs
    if run.strategy.is_chief:
        run.record = _record(run, writing, looking, began, pauses)
    periods = _row_periods(run, users)
    run.rows = History(run.record, periods)
    run.metrics = TrainMetrics(_eval_period(run, users))
    run.final = evaluation.FinalWeights(any(getattr(user, "given", ()) for user in users))
    run.stop_request = StopRequest(run.config.stop_at_step)
    runs_users = any(not isinstance(user, KerasCallbacks) or user.callbacks for user in users)
    if run.strategy.num_replicas > 1:
        names = run.strategy.replica_names
        run.sync_check = SyncCheck(run.config.check_sync_every_steps, names, periods, runs_users)
    own = [run.metrics, run.final, run.rows, *users, *([run.sync_check] if run.sync_check else [])]
    return in_order(run, own, periods, writing, looking)


def _checked(user_hooks: Sequence) -> list[Hook]:
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
    return [*others, KerasCallbacks(callbacks)] if callbacks else others


def in_order(
    run: BaseRun, own: Sequence[Hook], periods: set[int | Period], writing: Writing, looking: Writing
) -> list[Hook]:
    """Returns `own`, those that watch and write, with all others of a run around them."""
    config = run.config
    callbacks = [each for each in own if isinstance(each, KerasCallbacks)]
    # No checkpoint may have such weights, so a run with a folder ends with an error all the same.
    is_strict = bool(config.run_dir) or not any(each.ends_at_nonfinite for each in callbacks)
    hooks: list[Hook] = [numerics.NanGuard(is_strict), *_guards(run)]
    if run.evaluates:
        around = [each.evaluating for each in callbacks]

        def is_wanted(status: Status) -> bool:
            return all(each.wants_evaluation(status) for each in callbacks)

        between = callbacks[0].test_batches if callbacks else None
        hooks.append(
            evaluation.Evaluation(
                *(_eval_period(run, own), around, is_wanted, is_strict, between),
                batches=config.eval_batches,
                directory=config.run_dir,
                ends=lambda: run.stop_request.reason,
            )
        )
    hooks += [run.record] if run.record else []  # before those that save: a window ends with all work by then
    # Without evaluations, a metric of the training data is checked each epoch.
    evaluates = run.evaluates and _eval_period(run, own)
    period: dict[str, Any] = {} if evaluates else {"every_steps": run.epoch_period}
    if config.early_stopping:
        hooks.append(EarlyStopping(config.monitor, **config.arguments("early_stopping"), **period))
    if config.reduce_lr:
        hooks.append(ReduceLearningRate(config.monitor, **config.arguments("reduce_lr"), **period))
    if run.best and run.evaluates:
        hooks.append(BestCheckpoint(run.best, config.monitor, hooks))
    elif config.restore_best:
        hooks.append(BestWeights(config.monitor))
    hooks += own
    if config.run_dir:
        has_servers = not run.strategy.updates_here
        if has_servers and config.histogram_every_steps:
            every = setting("histogram_every_steps", config.histogram_every_steps)
            logging.warning("%s writes histograms of weights, and with parameter servers none of gradients", every)
        hooks.append(
            TensorBoard(
                RunDir(config.run_dir).tensorboard if config.is_chief else None,
                every_steps=config.summary_every_steps,
                histogram_every_steps=config.histogram_every_steps,
                more=periods if config.summary_every_steps else (),
                config=config.deciding(),
                # The coordinator would pull all weights for what the probe computes.
                probe=None if has_servers else Probe(run.strategy, run.trainer),
                writing=writing,
            )
        )
    hooks += [Progress(config.progress if config.is_chief else "off"), run.stop_request]
    if config.cluster and (config.cluster.absent or config.cluster.newcomers):
        hooks.append(_Included(config))
    if run.checkpoints:
        hooks.append(Checkpointing(run.checkpoints, config.checkpoint_every_steps, hooks))
        if most := config.rollbacks:
            run.rollback = Rollback(most, run.checkpoints, hooks)
            hooks.append(run.rollback)
    if run.snapshots:
        seconds = config.snapshot_seconds
        hooks.append(InMemory(run.snapshots, None if seconds == "auto" else float(seconds), hooks))
    return [*hooks, *_request_handler(run, hooks, looking)]


class _Included(Periodic):
    """Ends an attempt at a checkpoint if workers have come that it lacks; the next one includes them.

    A thread of the chief looks for them, since a host that is away may not answer for seconds.
    """

    name = "included"

    def __init__(self, config: Config):
        super().__init__(config.checkpoint_every_steps)
        self._config, self._cluster, self._waiting = config, config.cluster, list[tuple[str, str]]()
        self._ended = threading.Event()

    def begin(self, status: Status) -> None:
        if self._config.is_chief:
            Thread(target=self._look, name="included", daemon=True).start()

    def _look(self) -> None:
        absent, newcomers = self._cluster.absent, self._cluster.newcomers
        while not self._ended.wait(_LOOK_SECONDS):
            returned = [each for each in absent if members.is_waiting(each[1])]
            self._waiting = returned + (discovery.newcomers(self._cluster, newcomers) if newcomers else [])

    def act(self, status: Status) -> None:
        waiting, now = self._waiting, self._cluster.num_workers
        can_train = self._cluster.newcomers or any(
            checks.fits(self._config, number) for number in range(now + 1, now + len(waiting) + 1)
        )
        if waiting and can_train and not status.last:
            have = "have" if len(waiting) > 1 else "has"
            status.stop = status.stop or f"{TO_INCLUDE}{rendezvous.named(waiting)}, which {have} come"

    def close(self) -> None:
        self._ended.set()


def _guards(run: BaseRun) -> list[Hook]:
    """Makes the hooks that watch several workers, and how they wait for input."""
    strategy = run.strategy
    guards: list[Hook] = []
    if len(strategy.worker_names) > 1 and strategy.is_chief:
        guards.append(Stragglers(strategy.worker_names))
    guards.append(InputBound(run.inputs.faster))
    return guards


def _eval_period(run: BaseRun, hooks: Sequence[Hook]) -> int | Period:
    """Returns the period of evaluations: the epochs of callbacks, if these have their own."""
    period = run.config.eval_every_steps
    return next(iter(_callback_periods(run, hooks)), run.epoch_period if period is None else period)


def _callback_periods(run: BaseRun, hooks: Sequence[Hook]) -> set[Period]:
    """Returns the periods of callbacks whose epochs are not the data's."""
    of_callbacks = (hook for hook in hooks if isinstance(hook, KerasCallbacks) and hook.epoch_steps)
    return {hook.period(run.strategy.training.feed) for hook in of_callbacks}


def _row_periods(run: BaseRun, hooks: Sequence[Hook]) -> set[int | Period]:
    """Returns the periods after which training metrics are written: an epoch and an evaluation interval."""
    return {run.epoch_period, _eval_period(run, hooks), *_callback_periods(run, hooks)}


def _record(run: BaseRun, writing: Writing, looking: Writing, began: float, pauses: Pauses) -> Recorder:
    """Makes the hook that records a run; see `Recorder`."""
    config, cluster = run.config, run.config.cluster
    tasks = [{"name": name, "address": address} for name, address in (cluster.addresses if cluster else ())]
    servers = [task for task in tasks if task["name"].startswith("ps")]
    workers = [task for task in tasks if task not in servers and (task["name"] != "chief" or not config.coordinates)]
    strategy = run.strategy.describe()
    around: dict[str, dict[str, Any]] = {
        "start": {"mode": config.mode},
        "config": {"values": {**config.as_json()["flags"], "model": config.model_entry.name}},
        "cluster": {
            "strategy": strategy["name"],
            "replicas": strategy["replicas"],
            "workers": workers or [{"name": run.strategy.worker_names[0], "address": None}],
            "servers": servers,
        },
    }
    log = events.EventLog(RunDir(config.run_dir).events if config.writes_run else None)
    made = Recorder(log, writing, looking, around, began, pauses)
    for checkpoints, best in ((run.checkpoints, False), (run.best, True)):
        if checkpoints is not None:
            checkpoints.written = functools.partial(_checkpoint, made, best)
    return made


def _checkpoint(record: Recorder, best: bool, manifest: Manifest, seconds: float) -> None:
    size = sum(each["bytes"] for each in manifest.files.values())
    record.checkpoint(best, f"{'best' if best else 'checkpoints'}/{manifest.name}", manifest.step, seconds, size)


def _request_handler(run: BaseRun, hooks: Sequence[Hook], looking: Writing) -> list[RequestHandler]:
    """Makes the hook that answers `crankshaft ask`, if the run has a folder for requests."""
    config, strategy, checkpoints = run.config, run.strategy, run.checkpoints
    if checkpoints is None or config.remote:
        return []
    own = config.cluster.task if config.cluster else strategy.worker_names[0]
    others = {name: address for name, address in config.cluster.addresses if name != own} if config.coordinates else {}

    def is_mine(kind: str, task: str | None) -> bool:
        return task == own or (task is None and strategy.is_chief) or (kind == "profile" and task in others)

    def save(status: Status) -> str:
        saving.save(checkpoints, status, hooks)
        return os.path.join(checkpoints.directory, f"ckpt-{status.step}{manifests.SUFFIX}")

    def describe() -> str:
        return _described(run.record) if run.record else f"{own}: step {run.state.step:,}"

    folder = RunDir(config.run_dir)
    requests = Requests(folder.requests, is_mine)
    return [RequestHandler(requests, looking, save, run.stop_request.request, describe, folder.tensorboard, others)]


def _described(record: Recorder) -> str:
    latest, goodput = record.latest, record.spent
    if not latest:
        return f"starting, for {duration(goodput['total'] + record.age)}"
    step, until, left = latest["step"], latest["until_step"], latest["seconds_left"]
    parts = [f"step {step:,}" + (f"/{until:,}" if until else ""), *metrics_shown(latest["metrics"])]
    parts += [f"epoch {latest['epoch']:.3g}", f"{latest.get('examples_per_sec') or 0:,.0f} examples/s"]
    parts += [f"{duration(left)} left"] if left is not None else []
    parts += [f"goodput {goodput['steps'] / goodput['total']:.0%} of {duration(goodput['total'])}"]
    return "  ".join([*parts, *([record.saved] if record.saved else []), f"as of {duration(record.age)} ago"])
