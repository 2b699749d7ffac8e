"""Reads a run's record, events.jsonl, as it grows, into figures of bounded size.

Anybody may have written the file: lines that are not of the schema are skipped and counted, and values of the others
are bounded in length, in number and in total. Of rows, which are not shown, only the beginnings are read.
"""

from __future__ import annotations

import collections
import itertools
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

from ...engine.machine.files import open_regular
from ...engine.record.events import LONGEST_LINE, line_of, parsed
from ...runner.command_line.values import differences
from .track import Track

VERSION = 1  # of the schema, in `start`
_LONGEST_TEXT = 500
_MOST_EVENT_SIZE = 100_000  # characters and values kept per event
_HUGE = 1e300
_MOST_WORKERS = 10_000
_MOST_NOTES = 200  # notes kept per kind
_MOST_VALUES = 500  # values kept per mapping
_POINTS, _LANE_POINTS = 600, 100
# How many windows of a record are read, and how many bytes of them with their workers' figures.
_MOST_WINDOWS, _WORKERS_BYTES = 20_000, 8 << 20
_LAST_BYTES = 1 << 16  # of a record, of which all windows are read
_FIGURES = ("step_ms", "own_ms", "input_wait_ms", "reduce_wait_ms", "gradient_norm", "staleness", "lag")
_TIME = ("", "time")  # the lanes' column
_LATEST = ("start", "config", "cluster", "window", "end")
_NOTES = ("start", "config", "restart", "fault", "warning", "checkpoint", "end")
_NOTED = (
    *("event", "time", "step", "attempt", "host", "task"),
    *("text", "cause", "reason", "exit_code", "best", "bytes"),
)
_TAIL = 64  # bytes before the reading position: they show whether a file was truncated and grew again
_SLOW = 1.5  # times the median of all workers' steps, without waits for others if known
_SILENT_SECONDS = 3.0
_MISSING_SECONDS = 2.0  # in others' windows
_UNKNOWN_PERIOD_SECONDS = 60.0  # until two windows are known


class RecordReader:
    """Reads a run's record as it grows.

    Args:
      path: path of the file, which need not exist yet.
      unix_clock: gives Unix seconds, for the age of the last line that the file has at first.

    Attributes:
      read: the fraction of the file that has been read.
      problem: why the file can't be read; "" if it can.
      skipped: lines that are not of the schema.
      time: the newest event's, Unix seconds.
    """

    def __init__(
        self, path: str, clock: Callable[[], float] = time.monotonic, unix_clock: Callable[[], float] = time.time
    ):
        self._path = path
        self._clock, self._unix_clock = clock, unix_clock
        self.problem = ""
        self._begin(None)

    def _begin(self, identity: tuple[int, int] | None) -> None:
        self.read = 0.0
        self._identity = identity
        self._offset = self.skipped = 0
        self._tail = b""
        self._is_in_long = False  # whether the position is within a line that is too long
        self._num_windows = 0  # those that were read
        self._with_workers = 0  # bytes of lines whose workers' figures were read
        self._is_current = False  # whether all lines that the file had at first were read
        self._heard = self._clock()  # time of the run's last write
        self._starts = 0
        self._latest: dict[str, dict[str, Any]] = {}  # the newest of each of `_LATEST`
        self._windows = Track(_POINTS, _MOST_VALUES, _is_last)
        self._evaluations = Track(_POINTS, _MOST_VALUES, _is_last)
        self._lanes = Track(_LANE_POINTS, 1 + _MOST_WORKERS * len(_FIGURES), _is_last)
        self._notes = {kind: collections.deque[dict[str, Any]](maxlen=_MOST_NOTES) for kind in _NOTES}
        self._workers: dict[str, dict[str, Any]] = {}
        self._faults: dict[str, tuple[str, Any]] = {}  # by task: text, state
        self._periods = collections.deque[float](maxlen=20)  # seconds between two windows
        self._window_seconds = 0.0  # time of the newest window, by its process's monotonic clock
        self.time = math.inf

    @property
    def revision(self) -> tuple:
        """A value that changes whenever more is read."""
        return self._identity, self._offset, self.problem

    @property
    def latest(self) -> Mapping[str, Mapping[str, Any]]:
        """The newest event of each kind whose older events no longer count."""
        return self._latest

    @property
    def start_without_end(self) -> Mapping[str, Any]:
        """The newest start of a run that has written no end; {} of others."""
        return {} if "end" in self._latest else self._latest.get("start", {})

    @property
    def num_workers(self) -> int:
        """How many workers are known; 0 if the run has not named any."""
        return len(self._workers)

    def poll(self, seconds: float, folder: int | None = None) -> None:
        """Reads new events, for so many seconds at most; `folder` is the descriptor of the file's folder."""
        path = self._path if folder is None else os.path.basename(self._path)
        try:
            with open(open_regular(path, os.O_NOFOLLOW, folder), "rb", buffering=1 << 20) as file:
                self.problem = ""
                self._read(file, time.monotonic() + seconds)
        except FileNotFoundError:
            self.problem = "the run has written no events.jsonl yet"
            self.read = 1.0
        except OSError as error:
            self.problem = f"{self._path} can't be read: {error.strerror}"
            self.read = 1.0

    def _read(self, file: IO[bytes], deadline: float) -> None:
        status = os.fstat(file.fileno())
        identity = (status.st_dev, status.st_ino)
        continues = identity == self._identity and status.st_size >= self._offset
        if continues:
            file.seek(self._offset - len(self._tail))
            continues = file.read(len(self._tail)) == self._tail
        if not continues:  # another file, or one that was cut and written again
            self._begin(identity)
        size, before = status.st_size, self._offset
        file.seek(self._offset)
        self.read = 0.0
        while time.monotonic() < deadline:
            line = file.readline(LONGEST_LINE)
            is_whole = line.endswith(b"\n")
            if not is_whole and len(line) < LONGEST_LINE:  # the end, or an incomplete line
                self.read = 1.0
                break
            if is_whole and not self._is_in_long:
                self._add_line(line, size)
            else:
                self.skipped += is_whole
            self._is_in_long = not is_whole
            self._offset += len(line)
            self._tail = line[-_TAIL:]
        if self._offset != before:
            age = 0.0 if self._is_current else max(0.0, self._unix_clock() - self.time)
            self._heard = self._clock() - age
        self._is_current = self._is_current or self.read == 1.0
        self.read = self.read or min(1.0, self._offset / size)

    # -- A line ------------------------------------------------------------------------------------------------------

    def _add_line(self, text: bytes, size: int) -> None:
        if (line := line_of(text)) is None:
            self.skipped += 1
            return
        if line.kind == "row" or (line.kind == "window" and not self._takes_window(len(text), size)):
            self.time = line.time
            return
        has_workers = line.kind != "window" or self._takes_workers(len(text), size)
        raw = (not has_workers and parsed(_without_workers(text))) or line.event
        if not raw:
            self.skipped += 1
            return
        workers = (raw.pop("workers", None) or [])[:_MOST_WORKERS]
        event = _bounded(raw, [_MOST_EVENT_SIZE])
        kind, task, time = raw["event"], event.get("task"), raw["time"]
        self.time = time
        if kind == "config" and (changed := _changes(self._latest.get(kind, {}), event)):
            event["text"] = changed  # of an attempt: a note
        if kind in _LATEST:
            self._latest[kind] = event
        if kind in self._notes and (kind != "config" or changed):
            seconds = {"seconds": event["seconds"]} if kind == "checkpoint" and "seconds" in event else {}
            self._notes[kind].append({key: event[key] for key in _NOTED if key in event} | seconds)
        if kind == "start":
            self._starts += 1
            self._latest.pop("end", None)
            self._periods.clear()
            self._window_seconds = 0.0
        elif kind == "cluster":
            self._workers = {_name(worker): {"seen": math.inf, "figures": {}} for worker in workers}
            self._faults.clear()
        elif kind in ("fault", "restart") and task is not None and len(self._faults) < _MOST_WORKERS:
            self._faults[task] = (str(event.get("text") or event.get("cause")), event.get("state"))
        elif kind == "warning" and event.get("state") == "answers":
            self._faults.pop(str(task), None)
        elif kind == "evaluation":
            self._evaluations.add(_flat(event))
        elif kind == "window":
            self._windows.add(_flat(event))
            before, self._window_seconds = self._window_seconds, event.get("seconds") or self._window_seconds
            self._periods.append(self._window_seconds - before)
            self._add_workers(workers, time)

    def _takes_window(self, length: int, size: int) -> bool:
        """Decides whether a window is read: they are evenly over the record, and in its last lines always."""
        is_taken = self._is_near_end(length, size) or self._num_windows <= _MOST_WINDOWS * self._offset / size
        self._num_windows += is_taken
        return is_taken

    def _takes_workers(self, length: int, size: int) -> bool:
        """Decides likewise whether a window is read with its workers' figures."""
        room = min(1.0, _WORKERS_BYTES / size) * self._offset
        is_taken = self._is_near_end(length, size) or self._with_workers <= room
        self._with_workers += is_taken * length
        return is_taken

    def _is_near_end(self, length: int, size: int) -> bool:
        return self._offset + max(2 * length, _LAST_BYTES) > size

    def _add_workers(self, workers: list[dict[str, Any]], time: float) -> None:
        lane: dict[Any, float] = {_TIME: time}
        for entry in workers:
            name = _name(entry)
            if name not in self._workers and len(self._workers) >= _MOST_WORKERS:
                continue
            figures = {key: number for key in _FIGURES if (number := _number(entry.get(key))) is not None}
            worker = self._workers.setdefault(name, {"seen": self._window_seconds, "figures": {}})
            worker["figures"].update(figures)
            lane.update(((name, key), number) for key, number in figures.items())
            if entry.get("steps") == 0:  # with parameter servers an idle worker is listed too
                continue
            worker["seen"] = self._window_seconds
            if name in self._faults and self._faults[name][1] != "silent":  # it ends with a warning of its own
                del self._faults[name]
        if workers:
            self._lanes.add(lane)

    # -- What is shown -----------------------------------------------------------------------------------------------

    def age(self) -> dict[str, Any]:
        """Returns the seconds since the run's last write, and whether that is longer than usual."""
        age = max(0.0, self._clock() - self._heard)
        period = max([*self._periods][1:], default=_UNKNOWN_PERIOD_SECONDS)  # the first compiles
        is_late = "start" in self._latest and "end" not in self._latest and age > max(_SILENT_SECONDS, 3 * period)
        return {"age": round(age, 1), "late": is_late}

    def view(self, find: str, most_lanes: int) -> dict[str, Any]:
        """Returns the page's data, plain JSON.

        Args:
          find: a part of the names of the workers that are shown.
          most_lanes: largest number of workers whose figures over time are returned, first the stopped and slow ones.
        """

        def rank(worker: dict[str, Any]) -> tuple:  # worker 10 comes after worker 9
            parts = re.split(r"(\d+)", worker["name"])
            return _ORDER.index(worker["state"]), [(0, int(part)) if part.isdecimal() else (1, part) for part in parts]

        workers = sorted(self._states(find), key=rank)
        for worker in workers[:most_lanes]:
            worker["lane"] = {key: self._lanes.column((worker["name"], key)) for key in worker["figures"]}
        version = self._latest.get("start", {}).get("version", VERSION)
        newer = "" if version == VERSION else f"the record is of schema {version}, and this reads {VERSION}"
        servers = self._latest.get("window", {}).get("servers") or []
        notes = [note for kind in self._notes.values() for note in kind]
        return {
            "problem": self.problem or newer,
            "skipped": self.skipped,
            "starts": self._starts,
            "first": self._notes["start"][0]["time"] if self._notes["start"] else None,
            "latest": self._latest,
            "windows": {name: self._windows.column(name) for name in self._windows.names},
            "evaluations": {name: self._evaluations.column(name) for name in self._evaluations.names},
            "workers": workers,
            "servers": [{**server, **self._health(str(server.get("name")))} for server in servers],
            "lane_time": self._lanes.column(_TIME),
            "notes": sorted(notes, key=lambda note: note["time"]),
        }

    def _states(self, find: str) -> Iterator[dict[str, Any]]:
        """Yields each worker: name, state, why, newest figures."""
        figures = {name: worker["figures"] for name, worker in self._workers.items() if worker["figures"]}
        step_ms = {name: values.get("own_ms", values.get("step_ms", 0.0)) for name, values in figures.items()}
        steps = sorted(step_ms.values())
        slow = _SLOW * steps[len(steps) // 2] if len(steps) > 2 else math.inf
        newest = max((worker["seen"] for worker in self._workers.values() if worker["seen"] < math.inf), default=0.0)
        for name, worker in self._workers.items():
            if find.lower() not in name.lower():
                continue
            health = self._health(name)
            if health["state"] == "runs":
                if newest - worker["seen"] > max(_MISSING_SECONDS, 3e-3 * worker["figures"].get("step_ms", 0.0)):
                    health = {"state": "stopped", "why": "the others have gone on without it"}
                elif step_ms.get(name, 0) > slow:
                    health = {"state": "slow", "why": f"{step_ms[name] / slow * _SLOW:.1f} times the median step"}
            yield {"name": name, **health, "figures": worker["figures"]}

    def _health(self, task: str) -> dict[str, str]:
        """Returns a task's state and the reason, from its faults and from how the run ended."""
        end = self._latest.get("end")
        if task in self._faults and (end is None or end.get("exit_code")):
            return {"state": "stopped", "why": self._faults[task][0]}
        return {"state": "runs" if end is None else "ended", "why": ""}


_ORDER = ("stopped", "slow", "runs", "ended")


def _without_workers(line: bytes) -> bytes:
    """Cuts the workers' figures out of a window's line. If a name in them has a bracket, the result is not JSON."""
    before, start, rest = line.partition(b'"workers": [')
    return before + b'"workers": []' + rest.partition(b"]")[2] if start else line


def _number(value: Any) -> float | None:
    """Returns a finite number, or None for any other value."""
    return value if type(value) in (int, float) and -_HUGE < value < _HUGE else None


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describes what an attempt has otherwise than the one before: flags, versions, the program's commit."""
    keys = {"values": "flags", "versions": "versions", "commit": "commit"}
    sides = (
        {label: side[key] for key, label in keys.items() if key in before and key in now} for side in (before, now)
    )
    return "; ".join(differences(*sides))[:_LONGEST_TEXT]


def _name(worker: Mapping[str, Any]) -> str:
    return str(worker.get("name"))[:_LONGEST_TEXT]


def _bounded(value: Any, room: list[int], depth: int = 4) -> Any:
    """Returns plain JSON of bounded counts, lengths and depth; numbers that are not finite are None.

    Args:
      room: the largest number of characters and values in all, a list of one number, which is reduced.
      depth: the largest depth of nested mappings and lists; deeper ones are left out.
    """
    room[0] -= 1
    if isinstance(value, str):
        value = value[: min(_LONGEST_TEXT, max(0, room[0]))]
        room[0] -= len(value)
        return value
    if isinstance(value, dict | list):
        most = min(_MOST_VALUES, max(0, room[0])) if depth else 0
        if isinstance(value, list):
            return [_bounded(item, room, depth - 1) for item in value[:most]]
        items = itertools.islice(value.items(), most)
        return {_bounded(key, room): _bounded(item, room, depth - 1) for key, item in items}
    return value if isinstance(value, bool) else _number(value)


def _flat(event: Mapping[str, Any]) -> dict[str, float]:
    """Returns an event's numbers by name; those of its mappings as `metrics.loss`."""
    inner = {
        f"{key}.{name}": value
        for key in ("metrics", "spent")
        if isinstance(event.get(key), dict)
        for name, value in event[key].items()
    }
    return {name: number for name, value in {**event, **inner}.items() if (number := _number(value)) is not None}


def _is_last(name: Any) -> bool:
    name = name[-1] if isinstance(name, tuple) else name
    return name in ("time", "step", "epoch", "seconds") or name.startswith("spent.")
