"""Reads what the page shows, from a run's folder or a benchmark's result. No TensorFlow."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import re
import stat
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ...engine.checkpoints import RunDir
from ...engine.checkpoints.run_dir import NAMES
from ...engine.errors import reason
from ...engine.machine.files import folder_below, open_regular
from ...engine.machine.threads import pid_space
from ...engine.metrics.monitored import Monitored
from ...runner.command_line.flags import Flags
from ...runner.command_line.values import plain
from ...runner.failures import UsageError
from ...runner.host.locks import is_alive
from . import plan_file, result_text
from .record_reader import RecordReader

_LOGS, _LOG_BYTES = 8, 16 << 10
_LANES = 50
_DEPTH = 3  # of folders below one that is named, in which runs are looked for
# Control sequences of terminals.
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


class RecordedRun:
    """A run that the page shows.

    Args:
      path: path of the run's folder, or of a file of result_json.
      name: its name on the page; None is the last part of the path.
      within: folder that the user gave, below which the run was found; None is the path. No link below it is followed.

    Attributes:
      result: contents of the file of result_json; {} of a folder.

    Raises:
      UsageError: nothing is at the path, or no result.
    """

    def __init__(self, path: str, name: str | None = None, within: str | None = None):
        if not os.path.exists(path):
            raise UsageError(f"{path} is not there; give a run's folder on this machine, or a file of result_json")
        is_folder = os.path.isdir(path)
        self.name = name or os.path.basename(os.path.abspath(path))
        # Anybody may have written the folder: a link in it would show another file of this user's. So may whoever
        # replaces it by one meanwhile.
        self._result, self._open_flags = (NAMES.result, os.O_NOFOLLOW) if is_folder else (path, os.O_RDONLY)
        self._folder = (within or path, os.path.relpath(path, within or path)) if is_folder else None
        self._record = RecordReader(RunDir(path).events) if is_folder else None
        self.result = {} if is_folder else result_text.read(path)

    def shown(self, seconds: float, seen: str = "", find: str = "") -> dict[str, Any]:
        """Reads new events, and returns the page's data, plain JSON.

        Args:
          seconds: most seconds to spend on reading.
          seen: the page's revision; if it is the newest, `view` is left out.
          find: a part of the names of the workers that are shown.
        """
        try:
            return self._shown(seconds, seen, find)
        except Exception as error:  # an error in this run's folder must not hide other runs
            view = {"problem": f"{self.name} can't be shown: {reason(error)}"}
            return {"name": self.name, "revision": "", "read": 1.0, "age": 0.0, "late": False, "view": view}

    def _shown(self, seconds: float, seen: str, find: str) -> dict[str, Any]:
        with contextlib.ExitStack() as stack:
            within, inner = self._folder or ("", "")
            run = stack.enter_context(folder_below(within, inner)) if self._folder else None
            if self._record:
                self._record.poll(seconds, run)
            folder = None
            with contextlib.suppress(OSError):
                if self._folder:
                    folder = stack.enter_context(folder_below(within, os.path.join(inner, NAMES.logs)))
            logs = _newest(folder)
            written = [_mark(name, run) for name in (self._result, NAMES.plan)]
            marks = [self._record.revision if self._record else (), find, *written, logs]
            revision = hashlib.sha256(repr(marks).encode()).hexdigest()[:16]
            shown = {"name": self.name, "revision": revision, "read": 1.0, "age": 0.0, "late": False}
            if events := self._record:
                shown |= {"read": round(events.read, 3), **events.age(), "killed": _killed_at(events, run)}
                shown["state"] = _state(events.latest, shown)
            if revision != seen:
                record = self._record.view(find, _LANES) if self._record else {}
                values = record.get("latest", {}).get("config", {}).get("values")
                record["changed"] = _changed(values)
                record["best"] = _best(record, values) if isinstance(values, dict) else None
                tails = {name: _end(folder, name) for name, *_ in logs}
                result = _sections(self.result or _benchmark(self._result, self._open_flags, run))
                plan = _plan(self._record, run) if self._record else {}
                shown["view"] = {**record, "result": result, "logs": tails, "plan": plan}
        return shown


def _killed_at(record: RecordReader, folder: int | None) -> float | None:
    """Returns the time of the last event of a run whose process is gone, and has not written its end."""
    start = record.start_without_end
    if not start.get("pid_space") or start["pid_space"] != pid_space():  # process IDs of elsewhere
        return None
    pids = {str(start.get("pid"))}
    with contextlib.suppress(OSError), open(open_regular(NAMES.lock, os.O_NOFOLLOW, folder), "rb") as file:
        pids.update(file.read(512).decode(errors="replace").split()[:1])  # of a supervisor's, it outlives a task
    return None if any(pid.isdecimal() and is_alive(int(pid)) for pid in pids) else record.time


def _plan(record: RecordReader, folder: int | None) -> dict[str, Any]:
    """Returns the plan's figures for the run's number of workers; {} without a plan for it."""
    with contextlib.suppress(UsageError):
        return plan_file.read(NAMES.plan, os.O_NOFOLLOW, folder).get(record.num_workers or 1, {})
    return {}


def _changed(values: Any) -> list[str]:
    """Lists the flags among a record's whose values are not the defaults."""
    defaults = plain(vars(Flags()))
    return [name for name, value in values.items() if value != defaults.get(name)] if isinstance(values, dict) else []


def recorded_runs(paths: Sequence[str]) -> list[RecordedRun]:
    """Finds the runs at these paths: a run's folder, a folder of such folders, or a file of result_json.

    They are named by the parts of their paths in which they differ.
    """
    found = [(inner, path) for path in paths for inner in _run_paths(path)]
    parts = [pathlib.Path(os.path.abspath(path)).parts for path, _ in found]
    room = min(map(len, parts), default=1) - 1  # so that each keeps a part
    first = next((i for i in range(room) if len({part[i] for part in parts}) > 1), room)
    last = next((i for i in range(room - first) if len({part[-1 - i] for part in parts}) > 1), room - first)
    names = ["/".join(part[first : len(part) - last]) for part in parts]
    return [
        RecordedRun(path, name, within if os.path.isdir(within) else None)
        for (path, within), name in zip(found, names, strict=True)
    ]


def _run_paths(path: str) -> list[str]:
    """Lists the folders of the runs in a folder, or the path itself if it is a run, or has none."""
    if os.path.basename(path) == NAMES.result and os.path.exists(RunDir(os.path.dirname(path)).events):
        return [os.path.dirname(path) or "."]
    found = []
    for folder, folders, files in os.walk(path):
        if NAMES.events in files or NAMES.config in files:
            found.append(folder)
        depth = len(pathlib.Path(os.path.relpath(folder, path)).parts)
        folders[:] = [] if found[-1:] == [folder] or depth >= _DEPTH else sorted(folders)
    return found or [path]


def _state(latest: Mapping[str, Any], shown: Mapping[str, Any]) -> tuple[str, str]:
    """Describes what has become of a run, in a few words, and whether it is "late", or "runs"."""
    if end := latest.get("end"):
        code = f" (exit code {end['exit_code']})" if end.get("exit_code") else ""
        return f"ended: {end.get('reason') or ''}{code}", "late" if code else ""
    if shown["killed"]:
        return f"was killed, or its machine stopped, at {moment(shown['killed'])}", "late"
    if shown["late"]:
        since = f", since step {result_text.number(latest['window'].get('step'))}" if "window" in latest else ""
        return f"nothing new for {shown['age']:,.0f} s{since}", "late"
    return ("runs", "runs") if latest else ("", "")


def _best(view: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any] | None:
    """Finds the monitored metric's value at the best checkpoint; without one, the best of all."""
    with contextlib.suppress(UsageError):
        monitored = Monitored.parse(str(flags.get("monitor", "eval_loss"))).by_name
        metric, evaluations = f"metrics.{monitored.metric}", view["evaluations"]
        columns = evaluations if monitored.source == "eval" and metric in evaluations else view["windows"]
        steps = zip(columns.get("step", ()), columns.get(metric, ()), strict=False)
        if values := {step: value for step, value in steps if value is not None}:
            saved = [note.get("step") for note in view["notes"] if note["event"] == "checkpoint" and note.get("best")]
            direction = monitored.direction or "max"
            best = (min if direction == "min" else max)(values.values())
            return {"name": monitored.name, "direction": direction, "value": values.get([None, *saved][-1], best)}
    return None


def moment(seconds: float) -> str:
    """Formats a time, Unix seconds, by the clock of this machine."""
    with contextlib.suppress(OverflowError, ValueError, OSError):  # anybody's number
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    return ""


def _benchmark(path: str, flags: int, folder: int | None) -> dict[str, Any]:
    """Reads a benchmark's result in a run's folder; {} for other results, which the record has too, or without one."""
    with contextlib.suppress(UsageError):
        result = result_text.read(path, flags, folder)
        return result if "schema" in result else {}
    return {}


def _sections(result: Mapping[str, Any]) -> dict[str, Any]:
    return {"sections": [section._asdict() for section in result_text.sections(result)]} if result else {}


def _mark(path: str, folder: int | None) -> tuple[int, ...]:
    with contextlib.suppress(OSError):
        status = os.stat(path, dir_fd=folder, follow_symlinks=False)
        return status.st_ino, status.st_size, status.st_mtime_ns
    return ()


def _newest(folder: int | None) -> list[tuple[Any, ...]]:
    """Returns the most recently written logs: name, size, time."""
    files = []
    for name in os.listdir(folder) if folder is not None else ():
        with contextlib.suppress(FileNotFoundError):  # removed since it was listed
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            files += [(name, status)] if stat.S_ISREG(status.st_mode) else []
    newest = sorted(files, key=lambda file: -file[1].st_mtime_ns)[:_LOGS]
    return sorted((name, status.st_size, status.st_mtime_ns) for name, status in newest)


def _end(folder: int | None, name: str) -> str:
    """Returns a log's last lines, without control characters."""
    try:
        with open(open_regular(name, os.O_NOFOLLOW, folder), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES))
            text = file.read(_LOG_BYTES).decode(errors="replace")
    except OSError as error:
        return f"{error.strerror}\n"
    return _ESCAPES.sub("", text)
