"""The record of a run, `run_dir/events.jsonl`: what stands around its steps, and its goodput for people. Host code."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from ...engine.checkpoints import Manifest, RunDir
from ...engine.hooks.record import Record
from ...engine.hooks.writing import Writing
from ...engine.machine import events
from ...engine.machine.pauses import Pauses
from .base import BaseRun
from .progress import duration


def record(run: BaseRun, writing: Writing, looking: Writing, began: float, pauses: Pauses) -> Record:
    """Makes the hook that records a run; see `Record`."""
    config, cluster = run.config, run.config.cluster
    tasks = [{"name": name, "address": address} for name, address in (cluster.addresses if cluster else ())]
    servers = [task for task in tasks if task["name"].startswith("ps")]
    workers = [task for task in tasks if task not in servers and (task["name"] != "chief" or not config.coordinates)]
    where = run.strategy.describe()
    around: dict[str, dict[str, Any]] = {
        "start": {"mode": config.mode},
        "config": {"values": {**config.about()["flags"], "model": config.model_entry.name}},
        "cluster": {
            "strategy": where["name"],
            "replicas": where["replicas"],
            "workers": workers or [{"name": run.strategy.worker_names[0], "address": None}],
            "servers": servers,
        },
    }
    log = events.EventLog(RunDir(config.run_dir).events if config.writes_run else None)
    made = Record(log, writing, looking, around, began, pauses)
    for checkpoints, best in ((run.checkpoints, False), (run.best, True)):
        if checkpoints is not None:
            checkpoints.written = functools.partial(_checkpoint, made, best)
    return made


def _checkpoint(record: Record, best: bool, manifest: Manifest, seconds: float) -> None:
    size = sum(each["bytes"] for each in manifest.files.values())
    record.checkpoint(best, f"{'best' if best else 'checkpoints'}/{manifest.name}", manifest.step, seconds, size)


def goodput_line(goodput: Mapping[str, Any]) -> str:
    """Formats what `Goodput.report` returns, for people."""
    seconds = dict(goodput["seconds"])
    total, steps = seconds.pop("total"), seconds.pop("steps")
    rest = sorted(seconds, key=lambda kind: -seconds[kind])
    others = ", ".join(f"{kind} {duration(seconds[kind])}" for kind in rest if seconds[kind] >= 0.5)
    return f"goodput {goodput['share']:.0%}: {duration(steps)} of {duration(total)} were steps that count; {others}"
