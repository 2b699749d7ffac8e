"""Reads what the page shows, from a run's folder or a benchmark's result. No TensorFlow."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
from typing import Any

from ...engine.checkpoints import RunDir
from ...engine.checkpoints.run_dir import NAMES
from ...engine.errors import reason
from ...engine.machine.events import pid_space
from ...engine.machine.files import folder_below, open_regular
from ..benchmark import benchmark_report
from ..command_line.flags import Flags
from ..command_line.values import plain
from ..failures import UsageError
from ..host.process import is_alive
from . import plan_file
from .record_reader import RecordReader

_LOGS, _LOG_BYTES = 8, 16 << 10
_LANES = 50
# Control sequences of terminals.
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


class RecordedRun:
    """A run that the page shows.

    Args:
      path: path of the run's folder, or of a file of result_json.

    Attributes:
      name: last part of the path.

    Raises:
      UsageError: nothing is at the path, or no result.
    """

    def __init__(self, path: str):
        if not os.path.exists(path):
            raise UsageError(f"{path} is not there; give a run's folder on this machine, or a file of result_json")
        is_folder = os.path.isdir(path)
        self.name = os.path.basename(os.path.abspath(path))
        # Anybody may have written the folder: a link in it would show another file of this user's.
        self._result, self._open_flags = (RunDir(path).result, os.O_NOFOLLOW) if is_folder else (path, os.O_RDONLY)
        self._folder = path if is_folder else None
        self._planned, self._lock = RunDir(path).plan, RunDir(path).lock
        self._record = RecordReader(RunDir(path).events) if is_folder else None
        if not is_folder:
            benchmark_report.read(path)

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
        if self._record:
            self._record.poll(seconds)
        with contextlib.ExitStack() as stack:
            folder = None
            with contextlib.suppress(OSError):
                folder = stack.enter_context(folder_below(self._folder, NAMES.logs)) if self._folder else None
            logs = _newest(folder)
            files = (self._result, self._planned)
            marks = [self._record.revision if self._record else (), find, *map(_mark, files), logs]
            revision = hashlib.sha256(repr(marks).encode()).hexdigest()[:16]
            shown = {"name": self.name, "revision": revision, "read": 1.0, "age": 0.0, "late": False}
            if events := self._record:
                shown |= {"read": round(events.read, 3), **events.age(), "killed": self._was_killed(events)}
            if revision != seen:
                record = self._record.view(find, _LANES) if self._record else {}
                record["changed"] = _changed(record.get("latest", {}).get("config", {}).get("values"))
                tails = {name: _end(folder, name) for name, *_ in logs}
                result = _benchmark(self._result, self._open_flags)
                shown["view"] = {**record, "result": result, "logs": tails, "plan": self._plan()}
        return shown

    def _was_killed(self, record: RecordReader) -> float | None:
        """Returns the time of the last event of a run whose process is gone, and has not written its end."""
        start = record.start_without_end
        if not start.get("pid_space") or start["pid_space"] != pid_space():  # process IDs of elsewhere
            return None
        pids = {str(start.get("pid"))}
        with contextlib.suppress(OSError), open(open_regular(self._lock, os.O_NOFOLLOW), "rb") as file:
            pids.update(file.read(512).decode(errors="replace").split()[:1])  # of a supervisor's, it outlives a task
        return None if any(pid.isdecimal() and is_alive(int(pid)) for pid in pids) else record.time

    def _plan(self) -> dict[str, Any]:
        """Returns the plan's figures for the run's number of workers; {} without a plan for it."""
        with contextlib.suppress(UsageError):
            if self._record and os.path.lexists(self._planned):
                plan = plan_file.read(self._planned, os.O_NOFOLLOW)
                return plan.get(self._record.num_workers or 1, {})
        return {}


def _changed(values: Any) -> list[str]:
    """Lists the flags among a record's whose values are not the defaults."""
    defaults = plain(vars(Flags()))
    return [name for name, value in values.items() if value != defaults.get(name)] if isinstance(values, dict) else []


def _benchmark(path: str, flags: int) -> dict[str, Any]:
    """Returns the sections of the Markdown report of a benchmark's result; {} for other results or without one."""
    with contextlib.suppress(UsageError):
        result = benchmark_report.read(path, flags)
        return {"sections": [section._asdict() for section in benchmark_report.sections(result)]}
    return {}


def _mark(path: str) -> tuple[int, ...]:
    with contextlib.suppress(OSError):
        status = os.lstat(path)
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
