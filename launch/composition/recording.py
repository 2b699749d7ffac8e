"""Makes the record of a run from its configuration."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import subprocess
import sys
from typing import Any

from ...engine.checkpoints import Manifest
from ...engine.hooks.background import BackgroundThread
from ...engine.machine import environment
from ...engine.machine.pauses import Pauses
from ...engine.record import events
from ...engine.record.recorder import Recorder
from ...runner.base import BaseRun
from ...runner.host import streams

_GIT_SECONDS = 5.0
_LONGEST_COMMAND = 10_000


def make_recorder(
    run: BaseRun, writer: BackgroundThread, poller: BackgroundThread, began: float, pauses: Pauses
) -> Recorder:
    """Makes the hook that writes a run's events; see `hooks.make_hooks`."""
    config, cluster = run.config, run.config.cluster
    tasks = [{"name": name, "address": address} for name, address in (cluster.addresses if cluster else ())]
    servers = [task for task in tasks if task["name"].startswith("ps")]
    workers = [task for task in tasks if task not in servers and (task["name"] != "chief" or not config.coordinates)]
    strategy = run.strategy.describe()
    first_events: dict[str, dict[str, Any]] = {
        "start": {"mode": config.mode},
        "config": {
            "values": {**config.as_json()["flags"], "model": config.model_entry.name},
            "command": shlex.join(streams.arguments())[:_LONGEST_COMMAND],
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
        size = os.path.getsize(manifest.path) + sum(file["bytes"] for file in manifest.files.values())
        path = f"{'best' if is_best else 'checkpoints'}/{manifest.name}"
        record.checkpoint(is_best, path, manifest.step, seconds, size)

    for checkpoints, is_best in ((run.checkpoints, False), (run.best, True)):
        if checkpoints is not None:
            checkpoints.written = functools.partial(record_checkpoint, is_best)
    return record


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
