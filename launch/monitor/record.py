"""Reads a run's record, events.jsonl, as it grows, into figures of bounded size. Host code.

Anybody may have written the file: lines that are not of the schema are left out, and lengths and counts are bounded.
"""

from __future__ import annotations

import collections
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

from ...engine.machine.files import open_regular
from .track import Track

VERSION = 1  # of the schema, in `start`
_LONGEST_LINE = 16 << 20
_LONGEST_TEXT = 500
_MOST_WORKERS = 10_000
_MOST_NOTES = 200  # of each kind
_MOST_VALUES = 500  # of a mapping
_POINTS, _LANE_POINTS = 600, 100
# A longer record's windows are read without their workers' figures, but for as many as these bytes hold.
_WORKERS_BYTES = 16 << 20
_WINDOW = re.compile(rb'\{"event": ?"window"')
_FIGURES = ("step_ms", "input_wait_ms", "reduce_wait_ms", "gradient_norm", "staleness", "lag")
_NOTES = ("start", "restart", "fault", "warning", "checkpoint", "end")
_TAIL = 64  # bytes before the place read up to, by which a file that was cut and grew again is known
_SLOW = 1.5  # times the median of all workers' steps
_SILENT_SECONDS = 3.0
_MISSING_SECONDS = 2.0  # in others' windows
_UNKNOWN_PERIOD_SECONDS = 60.0  # until two windows have told it


class Record:
    """What a run's record holds so far.

    Args:
      path: of the file, which need not exist yet.
      clock: gives Unix seconds.

    Attributes:
      read: the share of the file that has been read.
      problem: why the file can't be read; "" if it can.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.time):
        self._path = path
        self._clock = clock
        self.problem = ""
        self._begin(None)

    def _begin(self, identity: tuple[int, int] | None) -> None:
        self.read = 0.0
        self._identity = identity
        self._offset = self._cut = 0
        self._tail = b""
        self._is_in_long = False  # within a line that is too long to be read
        self._with_workers = 0  # bytes of lines whose workers' figures were read
        self._is_current = False  # whether all was read that was there at first
        self._heard = self._clock()  # when the run last wrote
        self._starts = 0
        self._said: dict[str, dict[str, Any]] = {}  # the newest start, config, cluster, window, end
        self._windows = Track(_POINTS, _MOST_VALUES, _is_last)
        self._evaluations = Track(_POINTS, _MOST_VALUES, _is_last)
        self._lanes = Track(_LANE_POINTS, 1 + _MOST_WORKERS * len(_FIGURES), _is_last)
        self._notes = {kind: collections.deque[dict[str, Any]](maxlen=_MOST_NOTES) for kind in _NOTES}
        self._workers: dict[str, dict[str, Any]] = {}
        self._faults: dict[str, tuple[str, Any]] = {}  # by task: text, state
        self._periods = collections.deque[float](maxlen=20)  # seconds between two windows
        self._said_at = math.nan  # the newest window's time, or the start's

    @property
    def revision(self) -> tuple:
        """What changes with what is read."""
        return self._identity, self._offset, self.problem

    def poll(self, seconds: float) -> None:
        """Reads on, for as long at most."""
        try:
            with open(open_regular(self._path), "rb", buffering=1 << 20) as file:
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
        if (status.st_dev, status.st_ino) != self._identity or self._is_cut(file, status.st_size):
            self._begin((status.st_dev, status.st_ino))
        size, before = status.st_size, self._offset
        file.seek(self._offset)
        self.read = 0.0
        while time.monotonic() < deadline:
            line = file.readline(_LONGEST_LINE)
            is_whole = line.endswith(b"\n")
            if not is_whole and len(line) < _LONGEST_LINE:  # the end, or a line that is half written
                self.read = 1.0
                break
            if is_whole and not self._is_in_long:
                self._take(line, size)
            self._is_in_long = not is_whole
            self._offset += len(line)
            self._tail = line[-_TAIL:]
        if self._offset != before:
            self._heard = self._clock() if self._is_current else min(self._clock(), self._last("time"))
        self._is_current = self._is_current or self.read == 1.0
        self.read = self.read or min(1.0, self._offset / size)

    def _is_cut(self, file: IO[bytes], size: int) -> bool:
        if size < self._offset:
            return True
        file.seek(self._offset - len(self._tail))
        return file.read(len(self._tail)) != self._tail

    def _last(self, name: str) -> float:
        values = [_number(each.get(name)) for each in self._said.values()]
        return max((value for value in values if not math.isnan(value)), default=math.nan)

    # -- A line ------------------------------------------------------------------------------------------------------

    def _take(self, line: bytes, size: int) -> None:
        if _WINDOW.match(line):
            room = min(1.0, _WORKERS_BYTES / size) * self._offset
            if self._with_workers <= room or self._offset + 2 * len(line) > size:
                self._with_workers += len(line)
            else:
                line = _without_workers(line)
        event = _parsed(line)
        kind = event.get("event")
        if not isinstance(kind, str) or math.isnan(_number(event.get("time"))):
            return
        if kind in ("start", "config", "cluster", "window", "end"):
            self._said[kind] = {key: value for key, value in event.items() if key != "workers"}
        if kind in self._notes:
            self._notes[kind].append(_note(event))
        if kind == "start":
            self._starts += 1
            self._said.pop("end", None)
            self._periods.clear()
            self._said_at = event["time"]
        elif kind == "cluster":
            named = [_text(each.get("name")) for each in _mappings(event.get("workers"))][:_MOST_WORKERS]
            self._workers = {name: {"seen": math.nan, "figures": {}} for name in named}
            self._faults.clear()
        elif kind in ("fault", "restart") and isinstance(event.get("task"), str):
            self._faults[_text(event["task"])] = (_text(event.get("text") or event.get("cause")), event.get("state"))
        elif kind == "warning" and event.get("state") == "answers":
            self._faults.pop(_text(event.get("task")), None)
        elif kind == "evaluation":
            self._evaluations.add(_flat(event))
        elif kind == "window":
            self._take_window(event)

    def _take_window(self, event: Mapping[str, Any]) -> None:
        row = _flat(event)
        self._windows.add(row)
        self._periods.append(row["time"] - self._said_at)
        self._said_at = row["time"]
        lane = {("", "time"): row["time"]}
        for each in _mappings(event.get("workers")):
            name = _text(each.get("name"))
            if name not in self._workers and len(self._workers) >= _MOST_WORKERS:
                continue
            figures = {key: value for key in _FIGURES if not math.isnan(value := _number(each.get(key)))}
            self._workers[name] = {"seen": row["time"], "figures": figures}
            if name in self._faults and self._faults[name][1] != "silent":  # that one ends with its own warning
                del self._faults[name]
            lane |= {(name, key): value for key, value in figures.items()}
        if len(lane) > 1:
            self._lanes.add(lane)

    # -- What is shown -----------------------------------------------------------------------------------------------

    def age(self) -> dict[str, Any]:
        """Returns the seconds since the run last wrote, and whether that is longer than it uses to take."""
        age = max(0.0, self._clock() - self._heard)
        period = max([*self._periods][1:], default=_UNKNOWN_PERIOD_SECONDS)  # the first compiles
        is_late = "start" in self._said and "end" not in self._said and age > max(_SILENT_SECONDS, 3 * period)
        return {"age": round(age, 1), "late": is_late}

    def view(self, find: str, most_lanes: int) -> dict[str, Any]:
        """Returns what the page shows, plain JSON.

        Args:
          find: a part of the names of the workers that are shown.
          most_lanes: as many of them have their figures over time, first those that are stopped and slow.
        """
        said = {kind: _bounded(event) for kind, event in self._said.items()}
        workers = sorted(self._states(find), key=lambda each: (_ORDER.index(each["state"]), _natural(each["name"])))
        for each in workers[:most_lanes]:
            each["lane"] = {key: self._lanes.column((each["name"], key)) for key in each["figures"]}
        notes = [note for kind in self._notes.values() for note in kind]
        return {
            "problem": self.problem or self._newer(),
            "starts": self._starts,
            "first": self._notes["start"][0]["time"] if self._notes["start"] else None,
            "said": said,
            "windows": {name: self._windows.column(name) for name in self._windows.names},
            "evaluations": {name: self._evaluations.column(name) for name in self._evaluations.names},
            "workers": workers,
            "lane_time": self._lanes.column(("", "time")),
            "notes": sorted(notes, key=lambda note: note["time"]),
        }

    def _newer(self) -> str:
        version = self._said.get("start", {}).get("version", VERSION)
        return "" if version == VERSION else f"the record is of schema {_text(version)}, and this reads {VERSION}"

    def _states(self, find: str) -> Iterator[dict[str, Any]]:
        """Yields each worker: name, state, why, newest figures."""
        steps = sorted(each["figures"]["step_ms"] for each in self._workers.values() if "step_ms" in each["figures"])
        slow = _SLOW * steps[len(steps) // 2] if len(steps) > 2 else math.inf
        newest = max((each["seen"] for each in self._workers.values() if each["figures"]), default=math.nan)
        for name, each in self._workers.items():
            if find.lower() not in name.lower():
                continue
            figures, state, why = each["figures"], "runs", ""
            if "end" in self._said:
                state = "ended"
            elif name in self._faults:
                state, why = "stopped", self._faults[name][0]
            elif newest - each["seen"] > _MISSING_SECONDS:
                state, why = "stopped", "the others have gone on without it"
            elif figures.get("lag", 0) > _SILENT_SECONDS:
                state, why = "stopped", f"last heard of {figures['lag']:.0f} s before"
            elif figures.get("step_ms", 0) > slow:
                state, why = "slow", f"{figures['step_ms'] / slow * _SLOW:.1f} times the median step"
            yield {"name": name, "state": state, "why": why, "figures": figures}


_ORDER = ("stopped", "slow", "runs", "ended")


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return event if isinstance(event, dict) else {}


def _without_workers(line: bytes) -> bytes:
    """Cuts the workers' figures out of a window's line; the whole line where their end is not plain to see."""
    start = line.find(b'"workers": [')
    end = line.find(b"]", start)
    cut = line[:start] + b'"workers": []' + line[end + 1 :]
    return cut if 0 <= start < end and _parsed(cut) else line


def _number(value: Any) -> float:
    """Returns a finite number, else NaN."""
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def _text(value: Any) -> str:
    return ("" if value is None else str(value))[:_LONGEST_TEXT]


def _mappings(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _flat(event: Mapping[str, Any]) -> dict[str, float]:
    """Returns an event's numbers by name; those of its mappings as `metrics.loss`."""
    row: dict[str, float] = {}
    for key, value in event.items():
        inner = value.items() if isinstance(value, dict) and key != "staleness" else ()
        row |= {f"{key}.{name}"[:_LONGEST_TEXT]: _number(each) for name, each in inner}
        if not math.isnan(number := _number(value)):
            row[key] = number
    return row


def _is_last(name: Any) -> bool:
    name = name[-1] if isinstance(name, tuple) else name
    return name in ("time", "step", "epoch", "seconds") or name.startswith("spent.")


def _note(event: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the page tells of an event in a line: its numbers, texts and truths."""
    return {
        key: _text(value) if isinstance(value, str) else value
        for key, value in list(event.items())[:20]
        if isinstance(value, str | bool) or not math.isnan(_number(value))
    }


def _bounded(value: Any, depth: int = 4) -> Any:
    """Returns plain JSON cut to bounded counts, lengths and depth."""
    if isinstance(value, dict):
        inner = list(value.items())[:_MOST_VALUES] if depth else []
        return {key[:_LONGEST_TEXT]: _bounded(each, depth - 1) for key, each in inner}
    if isinstance(value, list):
        return [_bounded(each, depth - 1) for each in value[:_MOST_VALUES]] if depth else []
    if isinstance(value, bool) or value is None:
        return value
    return _text(value) if isinstance(value, str) or math.isnan(_number(value)) else value


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Returns what sorts worker 10 after worker 9."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", name)]
