"""An evaluator beside a run: evaluates each new checkpoint, keeps the best, and ends with the run. Its own process."""

from __future__ import annotations

import time
from collections.abc import Iterator

import tensorflow as tf

from ...engine.checkpoints import CheckpointError, Manifest, RunDir
from ...engine.hooks import Status, StopRequest, evaluation, saving
from ...engine.hooks.saving import BestCheckpoint
from ...engine.hooks.tensorboard import event_values
from ...engine.hooks.tensorboard.event_files import EventFiles
from ...engine.metrics.monitored import Monitored
from ..cluster.meeting import Presence, answers
from ..command_line import checks
from ..errors import UsageError
from ..host.signals import EXIT_CODES, Signals
from . import agreement, reading
from .modes import as_line
from .session import Session

_POLL_SECONDS = 1.0


def watch(session: Session) -> int:
    """Evaluates until the run's last checkpoint is evaluated, a signal comes, or the coordinator has gone for good.

    After a signal the newest checkpoint is still evaluated. Returns the exit code. Raises `UsageError` where the
    coordinator's folder is another.
    """
    config, end = session.config, session.train_steps
    request = StopRequest()
    files = EventFiles(RunDir(config.run_dir).evaluator)
    session.best.clean()
    best = None
    if Monitored.parse(config.monitor).source == "eval":
        best = BestCheckpoint(session.best, config.monitor)
        best.begin(_status(session))
    else:
        session.say(f"no best checkpoint: --monitor={config.monitor} is not known here, where none are trained on")
    (chief,) = config.cluster.job("chief")
    coordinator = Presence(chief, config.cluster_timeout_seconds)
    done, has_met = -1, False
    with Signals(request.request):
        while True:
            if not has_met and (has_met := bool(answers(chief))):
                _check_run_dir(config.run_dir)
            asked_to_end = request.reason or coordinator.is_gone()  # asked first: what was saved by then is found below
            for manifest in restored(session, newer_than=done):
                if done < 0:
                    files.open(manifest.step - 1)
                done = manifest.step
                _evaluate(session, files, best)
            if asked_to_end or done >= end:
                break
            time.sleep(_POLL_SECONDS)
    files.close()
    session.best.wait()
    return EXIT_CODES.get(request.reason, 0)


def _check_run_dir(run_dir: str) -> None:
    if not agreement.appears(RunDir(run_dir).lock):
        raise UsageError(
            f"--run_dir={run_dir} is another folder here than at the coordinator, which writes the checkpoints that an "
            "evaluator reads; give a folder of a file system that all hosts share"
        )


def restored(session: Session, newer_than: int) -> Iterator[Manifest]:
    """Restores each checkpoint newer than a step, the oldest first; those that are removed meanwhile are left out."""
    steps = checks.checkpoint_steps(session.config.run_dir)
    if not steps or steps[-1] <= newer_than:
        return
    for manifest in session.checkpoints.all(lambda each: each.step > newer_than):
        reading.check_same_run(session, manifest)
        try:
            saving.restore(session.checkpoints, session.state, manifest=manifest)
        except (CheckpointError, tf.errors.OpError):
            if manifest.problem() is None:
                raise
            continue
        yield manifest


def _evaluate(session: Session, files: EventFiles, best: BestCheckpoint | None) -> None:
    metrics = evaluation.evaluate(session.strategy, session.state)
    session.say(f"evaluation at step {session.state.step}: {as_line(metrics)}")
    files.put("", session.state.step, lambda: event_values.evaluation(metrics))
    if best:
        best(_status(session, metrics))


def _status(session: Session, metrics: dict | None = None) -> Status:
    step, per_epoch = session.state.step, session.strategy.train_order.steps_per_epoch
    strategy = session.strategy
    return Status(
        step, session.train_steps, 0, 0, per_epoch, None, 0.0, 0.0, session.state, strategy, evaluation=metrics
    )
