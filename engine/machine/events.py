"""The record of a run, `events.jsonl`: one JSON object a line, as docs/events.md has it. Host code."""

from __future__ import annotations

import json
import math
import os
import threading
import time as clock
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from absl import logging

from .files import make_file, open_regular, replacing

VERSION = 1
# What stays where a run goes on from an earlier step: it is about the run's processes, not about its steps.
_OF_PROCESSES = {"start", "config", "cluster", "restart", "fault", "end"}


def read(path: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields each event and its line, leaving out what is not one, as a line that a killed writer left unfinished."""
    with open(open_regular(path), encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                event = json.loads(line)
                if isinstance(event["event"], str) and math.isfinite(event["time"]) and int(event["step"]) >= 0:
                    yield event, line
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
                continue


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
        """Removes what was recorded of steps past `step`, and what is not an event; hands all events to `see` first."""
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
        with replacing(self._path, make_file) as temporary, open(temporary, "w", encoding="utf-8") as kept:
            for event, line in read(self._path):
                see(event)
                if event["step"] <= step or event["event"] in _OF_PROCESSES:
                    kept.write(line if line.endswith("\n") else f"{line}\n")


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
