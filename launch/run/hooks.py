"""The hooks of a run, composed from its configuration, with the record of the run and its answers."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ...engine import logging
from ...engine.checkpoints import Checkpoints, Manifest
from ...engine.checkpoints import manifest as manifests
from ...engine.errors import rounded
from ...engine.hooks import Hook, Status, StopRequest, evaluation, numerics, saving
from ...engine.hooks.background import BackgroundThread
from ...engine.hooks.base import Period, Periodic
from ...engine.hooks.bottlenecks import InputBound, Stragglers
from ...engine.hooks.monitors import EarlyStopping, ReduceLearningRate
from ...engine.hooks.recorder import Recorder
from ...engine.hooks.saving import BestCheckpoint, BestWeights, Checkpointing
from ...engine.hooks.sync_check import SyncCheck
from ...engine.keras_models.keras_callbacks import KerasCallbacks
from ...engine.machine import environment, events
from ...engine.machine.pauses import Pauses
from ...engine.strategies.base import Stop
from ..cluster import rendezvous
from ..command_line import checks
from ..command_line.config import Config
from ..failures import EXIT_REGROUP, UsageError
from ..host import process
from .base import BaseRun
from .history import History
from .progress import Progress, duration, metrics_shown

_POLL_SECONDS, _GIT_SECONDS = 1.0, 5.0
_LONGEST_COMMAND = 10_000


def make_hooks(run: BaseRun, user_hooks: Sequence[Hook], began: float, pauses: Pauses) -> list[Hook]:
    """Makes a run's hooks, in the order in which they act: those that evict, judge, show, stop, and that save.

    Those that the run itself reads are set as its attributes: `record` to `sync_check`, see `BaseRun`.

    Args:
      user_hooks: hooks of the user, as `check_user_hooks` returns them.
      began: time at which the process began to work on the run, by `time.monotonic`.
    """
    config, strategy = run.config, run.strategy
    callbacks = next((hook for hook in user_hooks if isinstance(hook, KerasCallbacks)), None)
    eval_period = run.epoch_period if config.eval_every_steps is None else config.eval_every_steps
    if callbacks and callbacks.epoch_steps:  # which may not be the data's: they evaluate at the ends of theirs
        eval_period = callbacks.period(strategy.training.feed)
    row_periods: set[int | Period] = {run.epoch_period, eval_period}
    # The writer waits for the device, even if that hangs; the poller never does.
    writer, poller = BackgroundThread("writer"), BackgroundThread("poller")

    if strategy.is_chief:
        run.record = _record(run, writer, poller, began, pauses)
    run.rows = History(run.record, row_periods)
    run.final = evaluation.FinalWeights(any(getattr(user, "given", ()) for user in user_hooks))
    run.stop_request = StopRequest(config.stop_at_step)
    if strategy.num_replicas > 1:
        runs_user_code = any(not isinstance(user, KerasCallbacks) or user.callbacks for user in user_hooks)
        names = strategy.replica_names
        run.sync_check = SyncCheck(config.check_sync_every_steps, names, row_periods, runs_user_code)

    # Which those that save keep, for the state of all of them. What is evaluated and saved is without evicted rows.
    hooks: list[Hook] = []
    if run.trainer.inventory.tables:
        from ...engine.hooks.eviction import make_eviction

        hooks += make_eviction(run.trainer.inventory)
    hooks += _judges(run, callbacks, eval_period, hooks)
    hooks += [run.final, run.rows, *user_hooks]
    if run.sync_check:
        hooks.append(run.sync_check)
    if config.run_dir:
        from ...engine.hooks.tensorboard import TensorBoard
        from ...engine.hooks.tensorboard.probe import Probe

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
                more=row_periods if config.summary_every_steps else (),
                config=config.deciding(),
                probe=probe,
                writer=writer,
            )
        )
    hooks += [Progress(config.progress_mode), run.stop_request]
    if config.cluster and (config.cluster.absent or config.cluster.newcomers):
        hooks.append(_IncludeWorkers(config))
    # Those that save come last, and save the state of all hooks: `hooks` itself, to which they are appended.
    if run.checkpoints:
        every_steps, every_seconds = config.checkpoint_period
        hooks.append(Checkpointing(run.checkpoints, every_steps, hooks, every_seconds))
    if run.snapshots:
        from ...engine.hooks.snapshots import InMemory

        seconds = None if config.snapshot_seconds == "auto" else float(config.snapshot_seconds)
        hooks.append(InMemory(run.snapshots, seconds, hooks))
    if run.checkpoints and not config.remote:
        hooks.append(_request_handler(run, run.checkpoints, hooks, poller))
    return hooks


def _judges(
    run: BaseRun, callbacks: KerasCallbacks | None, eval_period: int | Period, hooks: Sequence[Hook]
) -> list[Hook]:
    """Makes the hooks that judge a call: whether it is finite and fast, and how good the weights are."""
    config, strategy = run.config, run.strategy
    # No checkpoint may have weights that are not finite, so a run with a folder ends with an error all the same.
    is_strict = bool(config.run_dir) or not (callbacks and callbacks.ends_at_nonfinite)
    judges: list[Hook] = [numerics.NanGuard(is_strict)]
    if len(strategy.worker_names) > 1 and strategy.is_chief:
        judges.append(Stragglers(strategy.worker_names))
    judges.append(InputBound(run.inputs.faster))
    if run.evaluates:
        around: dict[str, Any] = {"ends": lambda: run.stop_request.reason}
        if callbacks:
            around = {
                "is_wanted": callbacks.wants_evaluation,
                "around": [callbacks.evaluating],
                "between": callbacks.test_batches,
                "ends": lambda: None if callbacks.has_changed_weights else run.stop_request.reason,
            }
        judges.append(
            evaluation.Evaluation(
                eval_period,
                **around,
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
    return [*others, KerasCallbacks(callbacks)] if callbacks else others


class _IncludeWorkers(Periodic):
    """Ends an attempt at a checkpoint if workers have come that it lacks; the next one includes them.

    A thread of the chief looks for them, since a host that is away may not answer for seconds.
    """

    name = "included"

    def __init__(self, config: Config):
        super().__init__(config.checkpoint_period[0])
        self._config, self._cluster, self._waiting = config, config.tasks, list[tuple[str, str]]()
        self._ended = threading.Event()

    def begin(self, status: Status) -> None:
        if self._config.is_chief:
            threading.Thread(target=self._poll, name="included", daemon=True).start()

    def _poll(self) -> None:
        from ..cluster import discovery, members

        absent, newcomers = self._cluster.absent, self._cluster.newcomers
        while not self._ended.wait(_POLL_SECONDS):
            returned = [
                (name, address) for name, address in absent if members.is_waiting(address, self._cluster.addresses)
            ]
            self._waiting = returned + (discovery.newcomers(self._cluster, newcomers) if newcomers else [])

    def act(self, status: Status) -> None:
        waiting, now = self._waiting, self._cluster.num_workers
        can_train = self._cluster.newcomers or any(
            checks.fits(self._config, number) for number in range(now + 1, now + len(waiting) + 1)
        )
        if waiting and can_train and not status.last:
            have = "have" if len(waiting) > 1 else "has"
            reason = f"to include {rendezvous.describe_peers(waiting)}, which {have} come"
            status.stop = status.stop or Stop(reason, exit_code=EXIT_REGROUP)

    def close(self) -> None:
        self._ended.set()


def _commit() -> str | None:
    """Reads the commit of the repository that the program is in, or that a command is given in; None without one."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    folder = os.curdir
    if script and os.path.basename(script) not in ("crankshaft", "__main__.py"):
        folder = os.path.dirname(os.path.abspath(script))
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", folder, "rev-parse", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True)
        return done.stdout.strip()
    return None


def _record(run: BaseRun, writer: BackgroundThread, poller: BackgroundThread, began: float, pauses: Pauses) -> Recorder:
    config, cluster = run.config, run.config.cluster
    tasks = [{"name": name, "address": address} for name, address in (cluster.addresses if cluster else ())]
    servers = [task for task in tasks if task["name"].startswith("ps")]
    workers = [task for task in tasks if task not in servers and (task["name"] != "chief" or not config.coordinates)]
    strategy = run.strategy.describe()
    first_events: dict[str, dict[str, Any]] = {
        "start": {"mode": config.mode},
        "config": {
            "values": {**config.as_json()["flags"], "model": config.model_entry.name},
            "command": shlex.join(process.arguments())[:_LONGEST_COMMAND],
            "versions": environment.versions(),
            "commit": _commit(),
        },
        "cluster": {
            "strategy": strategy["name"],
            "replicas": strategy["replicas"],
            "workers": workers or [{"name": run.strategy.worker_names[0], "address": None}],
            "servers": servers,
        },
    }
    log = events.EventLog(config.files.events if config.writes_run else None)
    record = Recorder(log, writer, poller, first_events, began, pauses)

    def record_checkpoint(is_best: bool, manifest: Manifest, seconds: float) -> None:
        size = sum(file["bytes"] for file in manifest.files.values())
        path = f"{'best' if is_best else 'checkpoints'}/{manifest.name}"
        record.checkpoint(is_best, path, manifest.step, seconds, size)

    for checkpoints, is_best in ((run.checkpoints, False), (run.best, True)):
        if checkpoints is not None:
            checkpoints.written = functools.partial(record_checkpoint, is_best)
    return record


def _request_handler(run: BaseRun, checkpoints: Checkpoints, hooks: Sequence[Hook], poller: BackgroundThread) -> Hook:
    """Makes the hook that answers `crankshaft ask`."""
    from ...engine.hooks.request_handler import RequestHandler
    from ...engine.machine.requests import Requests

    config, strategy = run.config, run.strategy
    task_here = config.cluster.task if config.cluster else strategy.worker_names[0]
    others = dict(config.tasks.addresses) if config.coordinates else {}
    others.pop(task_here, None)

    def is_for_this_task(kind: str, task: str | None) -> bool:
        return task == task_here or (task is None and strategy.is_chief) or (kind == "profile" and task in others)

    def save(status: Status) -> str:
        saving.save(checkpoints, status, hooks)
        return os.path.join(checkpoints.directory, f"ckpt-{status.step}{manifests.SUFFIX}")

    def describe() -> str:
        if (record := run.record) is None:
            return f"{task_here}: step {run.state.step:,}"
        latest, goodput = record.latest, record.spent
        if not latest:
            return f"starting, for {duration(goodput['total'] + record.age)}"
        step, until, left = latest["step"], latest["until_step"], latest["seconds_left"]
        parts = [f"step {step:,}" + (f"/{until:,}" if until else ""), *metrics_shown(latest["metrics"])]
        parts += [f"epoch {rounded(latest['epoch'])}", f"{latest.get('examples_per_sec') or 0:,.0f} examples/s"]
        parts += [f"{duration(left)} left"] if left is not None else []
        parts += [f"goodput {goodput['steps'] / goodput['total']:.0%} of {duration(goodput['total'])}"]
        return "  ".join([*parts, *([record.saved] if record.saved else []), f"as of {duration(record.age)} ago"])

    folder = config.files
    requests = Requests(folder.requests, is_for_this_task)
    return RequestHandler(requests, poller, save, run.stop_request.request, describe, config.tensorboard, others)
