"""What a run answers to `crankshaft ask`, put together from its parts. Host code."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ...engine.checkpoints import RunDir, manifest
from ...engine.hooks import Hook, Status, StopRequest, saving
from ...engine.hooks.asked import Asked
from ...engine.hooks.record import Record
from ...engine.hooks.writing import Writing
from ...engine.machine.requests import Requests
from .base import BaseRun
from .progress import duration, metrics_shown


def asked(
    run: BaseRun, hooks: Sequence[Hook], record: Record | None, stop: StopRequest, looking: Writing
) -> list[Asked]:
    """Makes the hook that answers, where the run has a folder that whoever asks can reach; see `Asked`."""
    config, strategy, checkpoints = run.config, run.strategy, run.checkpoints
    if checkpoints is None or config.remote:
        return []
    own = config.cluster.task if config.cluster else strategy.worker_names[0]
    others = {name: address for name, address in config.cluster.addresses if name != own} if config.coordinates else {}

    def is_mine(kind: str, task: str | None) -> bool:
        return task == own or (task is None and strategy.is_chief) or (kind == "profile" and task in others)

    def save(status: Status) -> str:
        saving.save(checkpoints, status, hooks)
        return os.path.join(checkpoints.directory, f"ckpt-{status.step}{manifest.SUFFIX}")

    def describe() -> str:
        return _described(record) if record else f"{own}: step {run.state.step:,}"

    folder = RunDir(config.run_dir)
    requests = Requests(folder.requests, is_mine)
    return [Asked(requests, looking, save, stop.request, describe, folder.tensorboard, others)]


def _described(record: Record) -> str:
    latest, goodput = record.latest, record.spent
    if not latest:
        return f"starting, for {duration(goodput['total'] + record.age)}"
    step, until, left = latest["step"], latest["until_step"], latest["seconds_left"]
    parts = [f"step {step:,}" + (f"/{until:,}" if until else ""), *metrics_shown(latest["metrics"])]
    parts += [f"epoch {latest['epoch']:.3g}", f"{latest.get('examples_per_sec') or 0:,.0f} examples/s"]
    parts += [f"{duration(left)} left"] if left is not None else []
    parts += [f"goodput {goodput['steps'] / goodput['total']:.0%} of {duration(goodput['total'])}"]
    return "  ".join([*parts, *([record.saved] if record.saved else []), f"as of {duration(record.age)} ago"])
