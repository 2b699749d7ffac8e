"""An evaluator beside a run: evaluates each new checkpoint, keeps the best, and ends with the run. Its own process."""

from __future__ import annotations

import os
import time

from ...engine.checkpoints import RunDir
from ...engine.hooks import Status, StopRequest, evaluation
from ...engine.hooks.saving import BestCheckpoint
from ...engine.machine import environment
from ...engine.machine.files import appears
from ...engine.meter import Meter, Segment
from ...engine.metrics.monitored import Monitored
from ...runner import progress
from ...runner.base import BaseRun
from ...runner.failures import UsageError
from ...runner.host.signals import EXIT_CODES, Signals
from ...runner.modes.outcome import Outcome
from ...runner.restored.restoring import restored_since
from ..clusters.rendezvous import Presence, answers
from ..tensorboard import event_values
from ..tensorboard.event_files import EventFiles
from .sources import warn_of_versions

_POLL_SECONDS = 1.0


def watch(run: BaseRun) -> Outcome:
    """Evaluates until the run's last checkpoint is evaluated, a signal comes, or the coordinator has gone for good.

    After a signal the newest checkpoint is still evaluated. Raises `UsageError` where the
    coordinator's folder is another.
    """
    config = run.config
    request = StopRequest()
    files, best_checkpoints = EventFiles(os.path.join(config.tensorboard, "eval")), run.checkpoints_for("best")
    best_checkpoints.clean()
    best = None
    if Monitored.parse(config.monitor).source == "eval":
        best = BestCheckpoint(best_checkpoints, config.monitor)
        best.begin(_status(run))
    else:
        run.log(f"no best checkpoint: monitor={config.monitor} is not known here, where none are trained on")
    (chief,) = config.tasks.job("chief")
    coordinator = Presence(chief, config.cluster_timeout_seconds, config.tasks.identity)
    evaluated_step, has_met = -1, False
    with Signals(request.request):
        while True:
            if not has_met and (has_met := bool(answers(chief))):
                run_dir = config.files.path
                if not appears(RunDir(run_dir).lock):
                    raise UsageError(
                        f"run_dir={run_dir} is another folder here than at the coordinator, which writes the "
                        "checkpoints that an evaluator reads; give a folder of a file system that all hosts share"
                    )
            # Before reading: then all checkpoints saved until the request are found below.
            stop_requested = request.reason or coordinator.is_gone()
            for manifest in restored_since(run, evaluated_step):
                if evaluated_step < 0:
                    files.open(manifest.step - 1)
                    warn_of_versions({f"ckpt-{manifest.step}": manifest.versions, "evaluator": environment.versions()})
                evaluated_step = manifest.step
                _evaluate(run, files, best)
            if stop_requested or (run.train_steps is not None and evaluated_step >= run.train_steps):
                break
            time.sleep(_POLL_SECONDS)
    files.close()
    best_checkpoints.wait()
    return Outcome({}, EXIT_CODES.get(request.reason or "", 0))


def _evaluate(run: BaseRun, files: EventFiles, best: BestCheckpoint | None) -> None:
    config = run.config
    metrics = evaluation.evaluate(run.strategy, run.state, batches=config.eval_batches, directory=config.run_dir)
    run.log(progress.evaluation_line(run.state.step, metrics, config.log_format))
    files.put("", run.state.step, lambda: event_values.evaluation(metrics))
    if best:
        best(_status(run, metrics))


def _status(run: BaseRun, metrics: dict | None = None) -> Status:
    return Status(
        step=run.state.step,
        until_step=run.train_steps,
        segment=Segment(run.state.step),
        steps_per_epoch=run.strategy.training.feed.order.steps_per_epoch,
        state=run.state,
        strategy=run.strategy,
        meter=Meter(),
        evaluation=metrics,
    )
