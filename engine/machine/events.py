"""The record of a run, `events.jsonl`: one JSON object a line, as docs/events.md has it. Host code.

Anybody may have written the file: a line that does not match the schema is not an event, and whoever reads skips it.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time as clock
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

from absl import logging

from .files import make_file, open_regular, replacing

VERSION = 1
# What stays where a run goes on from an earlier step: it is about the run's processes, not about its steps.
_OF_PROCESSES = {"start", "config", "cluster", "restart", "fault", "end"}


LONGEST_LINE = 4 << 20  # bytes; of 10,000 workers' figures it has half
_LONGEST_TEXT = 1 << 14
_LATEST = 1e11  # Unix seconds; a span is shorter, too


def _number(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and abs(value) <= sys.float_info.max)


def _whole(value: Any) -> bool:
    return value is None or (type(value) is int and -(1 << 63) <= value < 1 << 63)


def _text(value: Any) -> bool:
    return value is None or (isinstance(value, str) and len(value) <= _LONGEST_TEXT)


def _either(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _mapping(value: Any) -> bool:
    return value is None or isinstance(value, dict)


def _numbers(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and all(map(_number, value.values())))


def _spans(value: Any) -> bool:
    return value is None or (_numbers(value) and all(abs(each or 0) < _LATEST for each in value.values()))


def _rows(**columns: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Returns whether a value is a list of objects with a name, whose other values are of these columns, or numbers."""

    def is_row(row: Any) -> bool:
        return isinstance(row, dict) and _text(row.get("name")) and _is_of({"name": _text, **columns}, row, _number)

    return lambda value: value is None or (isinstance(value, list) and all(map(is_row, value)))


def _goodput(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and _is_of({"share": _number, "seconds": _spans}, value))


def _is_of(keys: Mapping[str, Callable], values: Mapping[str, Any], others: Callable = lambda value: True) -> bool:
    return all(keys.get(name, others)(value) for name, value in values.items())


_TASKS = _rows(address=_text)
_RATES = ("steps_per_sec", "examples_per_sec", "input_wait_fraction", "input_wait_ms", "reduce_fraction", "memory_mb")
# What each kind's keys hold; null is what is missing, or not finite. Other keys may hold anything.
_SCHEMA: dict[str, dict[str, Callable[[Any], bool]]] = {
    "start": {
        **dict.fromkeys(("version", "incarnation", "pid", "until_step"), _whole),
        **dict.fromkeys(("host", "cause", "mode"), _text),
        **dict.fromkeys(("seconds", "spent"), _spans),
        "steps_per_epoch": _number,
    },
    "config": {"values": _mapping},
    "cluster": {"strategy": _text, "replicas": _whole, "workers": _TASKS, "servers": _TASKS},
    "window": {
        **dict.fromkeys(("epoch", "seconds", "learning_rate", "loss_scale", *_RATES), _number),
        **dict.fromkeys(("metrics", "staleness"), _numbers),
        "spent": _spans,
        "workers": _rows(),
        "servers": _rows(rows=_numbers),
    },
    "row": {},  # and numbers
    "evaluation": {"metrics": _numbers, "seconds": _number},
    "checkpoint": {"path": _text, "seconds": _number, "bytes": _whole, "best": _either},
    "warning": dict.fromkeys(("text", "task", "state"), _text),
    "fault": dict.fromkeys(("text", "task", "state"), _text),
    "restart": {"cause": _text, "task": _text, "exit_code": _whole},
    "end": {"reason": _text, "exit_code": _whole, "goodput": _goodput},
}


def parsed(line: bytes) -> dict[str, Any] | None:
    """Returns the event of a line; None for what does not match the schema, as a line that a killed writer left."""
    try:
        event = json.loads(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict):
        return None
    kind, time, step = (event.get(name) for name in ("event", "time", "step"))
    if not isinstance(kind, str) or time is None or not _number(time) or not 0 <= time < _LATEST:
        return None
    if step is None or not _whole(step) or step < 0:
        return None
    values = {name: value for name, value in event.items() if name != "event"}
    others = _number if kind == "row" else lambda value: True
    return event if _is_of(_SCHEMA.get(kind, {}), values, others) else None


def read(path: str) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yields each event and its line, leaving out what is not one. Raises OSError, also where a link is at the path."""
    with open(open_regular(path, os.O_NOFOLLOW), "rb") as file:
        for event, line in _lines(file):
            if event is not None:
                yield event, line


def _lines(file: IO[bytes]) -> Iterator[tuple[dict[str, Any] | None, bytes]]:
    """Yields each line and its event, if it is one. Of a line that is too long it reads only the beginning at once."""
    is_rest = False
    while line := file.readline(LONGEST_LINE):
        if not is_rest:
            yield parsed(line), line
        is_rest = not line.endswith(b"\n")


class EventLog:
    """Appends events to a file. Several threads may; an error ends the writing, with one warning, and not the run.

    Args:
      path: of the file; None writes nothing.
    """

    def __init__(self, path: str | None):
        self._path = path
        self._lock = threading.Lock()

    def write(self, event: str, step: int, *, time: float | None = None, **values: Any) -> None:
        """Appends an event; numbers that are not finite become null. `time` is Unix's, None is now."""
        head = {"event": event, "time": clock.time() if time is None else time, "step": step}
        line = json.dumps(_finite({**head, **values})) + "\n"
        self._guarded(self._append, line)

    def cut(self, step: int, see: Callable[[dict[str, Any]], Any]) -> None:
        """Removes what was recorded of steps past `step`; hands all events to `see` first.

        What is not an event is removed too, and counted in a line.
        """
        self._guarded(self._cut, step, see)

    def _guarded(self, write: Callable, *arguments) -> None:
        with self._lock:
            if self._path is None:
                return
            try:
                write(*arguments)
            except OSError as error:
                path, self._path = self._path, None
                logging.warning("%s can't be written (%s); the run goes on without a record", path, error.strerror)

    def _append(self, line: str) -> None:
        with os.fdopen(open_regular(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "rb+", buffering=0) as file:
            if end := file.seek(0, os.SEEK_END):
                file.seek(end - 1)
                line = line if file.read(1) == b"\n" else f"\n{line}"  # a killed writer's last is not whole
            file.write(line.encode())

    def _cut(self, step: int, see: Callable[[dict[str, Any]], Any]) -> None:
        if not os.path.lexists(self._path):
            return
        skipped = 0
        with (
            open(open_regular(self._path, os.O_NOFOLLOW), "rb") as file,
            replacing(self._path, make_file) as temporary,
            open(temporary, "wb") as kept,
        ):
            for event, line in _lines(file):
                if event is None:
                    skipped += 1
                    continue
                see(event)
                if event["step"] <= step or event["event"] in _OF_PROCESSES:
                    kept.write(line if line.endswith(b"\n") else line + b"\n")
        if skipped:
            what = "1 line that is not an event was" if skipped == 1 else f"{skipped:,} lines that are not events were"
            logging.warning("%s: %s removed; a process that is killed may leave one", self._path, what)


def _finite(value: Any) -> Any:
    """Returns a value as JSON takes it: numbers that are not finite are None, tuples lists, keys text."""
    if isinstance(value, Mapping):
        return {str(name): _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    if isinstance(value, (bool, int, str)) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return _finite(value.item()) if hasattr(value, "item") else str(value)
