"""Answers `crankshaft ask`: a hook, made from a run's configuration."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ...engine.checkpoints import Checkpoints
from ...engine.checkpoints import manifest as manifests
from ...engine.errors import rounded
from ...engine.hooks import Hook, Status, saving
from ...engine.hooks.background import BackgroundThread
from ...runner.base import BaseRun
from ...runner.progress import duration, metrics_shown
from .request_handler import RequestHandler
from .requests import Requests


def make_request_handler(
    run: BaseRun, checkpoints: Checkpoints, hooks: Sequence[Hook], poller: BackgroundThread
) -> RequestHandler:
    """Makes the hook that answers `crankshaft ask`."""
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
