"""The record of a run, `events.jsonl`: one JSON object per line, by `SCHEMA`.

Anyone may have written the file: lines that don't match the schema are not events, and readers skip them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import threading
import time as clock
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, NamedTuple

from .. import logging
from ..errors import counted
from ..machine.files import append, new_file, open_regular

VERSION = 1
# Kept when a run is resumed from an earlier step: these are about its processes, not its steps.
_PROCESS_EVENTS = {"start", "config", "cluster", "restart", "fault", "end"}
LONGEST_LINE = 4 << 20  # bytes; twice the figures of 10,000 workers
_LONGEST_TEXT = 1 << 14
_PIECE = 1 << 20
_LATEST = 1e11  # Unix seconds; a span is shorter, too
# The beginning of a line as `EventLog` writes it, of the kinds of which a long run has most.
_HEAD = re.compile(
    rb'\{"event": "(checkpoint|evaluation|row|warning|window)", "time": (\d{1,10}(?:\.\d+)?), "step": (\d{1,18})[,}]'
)
_START = rb'\n\{"event": "start"'
_KINDS = {kind.encode(): kind for kind in ("checkpoint", "evaluation", "row", "warning", "window")}


def _has_types(keys: Mapping[str, Callable], values: Mapping[str, Any], others: Callable = lambda value: True) -> bool:
    """Whether values match the types of their keys, or `others`. Null is of each type: unknown, or not finite."""
    return all(value is None or keys.get(name, others)(value) for name, value in values.items())


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _integer(value: Any) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 63


def _text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_TEXT


def _numbers(value: Any) -> bool:
    return isinstance(value, dict) and _has_types({}, value, _number)


def _spans(value: Any) -> bool:
    return isinstance(value, dict) and _has_types({}, value, lambda span: _number(span) and abs(span) < _LATEST)


def _figures(**types: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Returns whether a value is a list of objects, whose values match these types and a name, or are numbers."""

    def is_one(value: Any) -> bool:
        return isinstance(value, dict) and _has_types({"name": _text, **types}, value, _number)

    return lambda value: isinstance(value, list) and all(map(is_one, value))


def _goodput(value: Any) -> bool:
    return isinstance(value, dict) and _has_types({"share": _number, "seconds": _spans}, value)


class EventKey(NamedTuple):
    """The contents of a key of an event.

    Attributes:
      fits: function that tells whether a value other than null matches.
      description: the description for docs/events.md.
    """

    fits: Callable[[Any], bool]
    description: str


_TASKS = _figures(address=_text)
_TASK = EventKey(_text, "the task that it is about; null for the whole run")
_SPENT = EventKey(_spans, "seconds since the run's first start by cause: [goodput](#goodput)")
# The keys of each kind. Other keys may have any values.
SCHEMA: dict[str, dict[str, EventKey]] = {
    "start": {
        "version": EventKey(_integer, "1; it grows only if a key changes its meaning"),
        "attempt": EventKey(_integer, "0 for the run's first process, one more for each that resumes it"),
        "pid": EventKey(_integer, "the process ID"),
        "host": EventKey(_text, "the host's name"),
        "pid_space": EventKey(_text, "where the process ID counts: this boot of the machine, and the container"),
        "cause": EventKey(_text, "what ended the process before; null for the first"),
        "mode": EventKey(_text, "the mode"),
        "until_step": EventKey(_integer, "the step at which the run ends; null if only the program knows"),
        "steps_per_epoch": EventKey(_number, "steps per epoch"),
        "seconds": EventKey(_spans, "what came before the first step: `start`"),
        "spent": _SPENT,
    },
    "config": {
        "values": EventKey(lambda value: isinstance(value, dict), "all flags; `model` by its name"),
        "command": EventKey(_text, "the command line"),
        "versions": EventKey(lambda value: isinstance(value, dict), "of Python and the libraries"),
        "commit": EventKey(_text, "git's, of the program's folder; null if it is in no repository"),
    },
    "cluster": {
        "strategy": EventKey(_text, "the strategy"),
        "replicas": EventKey(_integer, "the number of replicas"),
        "workers": EventKey(_TASKS, "the `name` and `address` of each worker"),
        "servers": EventKey(_TASKS, "of each parameter server"),
    },
    "window": {
        "epoch": EventKey(_number, "the epoch, with its fraction"),
        "seconds": EventKey(_number, "since this process's first step"),
        "seconds_left": EventKey(_number, "to the run's end, by the clock"),
        "metrics": EventKey(_numbers, "means over the window"),
        "learning_rate": EventKey(_number, "of the last update; `learning_rate/NAME` of several optimizers"),
        "loss_scale": EventKey(_number, "of float16"),
        "tables/NAME/rows_given": EventKey(_number, "with `admit_after`, as `rows_freed` and `turned_away`"),
        "steps_per_sec": EventKey(_number, "steps per second"),
        "examples_per_sec": EventKey(_number, "examples per second, across all replicas"),
        "input_wait_fraction": EventKey(_number, "the share of the time that steps waited for input"),
        "input_wait_ms": EventKey(_number, "a step's wait for input"),
        "input_bytes_per_sec": EventKey(_number, "bytes read per second"),
        "input_steps_ahead": EventKey(_number, "steps whose examples are ready"),
        "reduce_fraction": EventKey(_number, "the share of workers' steps that waited for other workers"),
        "workers": EventKey(
            _figures(),
            "each worker's `name`, `step_ms`, `own_ms` (without waiting for other workers), `input_wait_ms`, "
            "`reduce_wait_ms`, `gradient_norm` (if computed); with parameter servers `steps` done, `lag` behind the "
            "fastest in steps, and `staleness`, the mean number of others' updates between its pull and its push",
        ),
        "servers": EventKey(
            _figures(rows=_numbers),
            "each server's `name`, `bytes` of variables and slots, `rows` of each table, and `seconds` of its newest "
            "answer (null if servers are not probed)",
        ),
        "staleness": EventKey(_numbers, 'how many updates missed 0, 1, ... of others (`"15"`: 15 or more)'),
        "spent": _SPENT,
        "memory_mb": EventKey(_number, "resident memory of the process, MiB"),
    },
    "row": {
        "epoch": EventKey(_number, "the epoch; `run(...).history` has this event's numbers as an entry"),
        "seconds": EventKey(_number, "since this process's first step"),
        "examples_per_sec": EventKey(_number, "examples per second, across all replicas"),
        "train_NAME": EventKey(_number, "mean of a training metric since the last entry"),
        "eval_NAME": EventKey(_number, "a metric of the evaluation at this step"),
    },
    "evaluation": {
        "metrics": EventKey(_numbers, "of the evaluation"),
        "eval_batches": EventKey(_integer, "of how many of the first batches it is, if not of all"),
        "seconds": EventKey(_number, "that it took"),
    },
    "checkpoint": {
        "path": EventKey(_text, "in the run_dir"),
        "seconds": EventKey(_number, "that writing took, beside training"),
        "bytes": EventKey(_integer, "its size"),
        "best": EventKey(lambda value: isinstance(value, bool), "whether it is the best evaluation's"),
    },
    "warning": {
        "text": EventKey(_text, "what was logged"),
        "task": _TASK,
        "state": EventKey(_text, "`answers`: the task is heard again"),
    },
    "fault": {
        "text": EventKey(_text, "why the run ends"),
        "task": _TASK,
        "state": EventKey(_text, "`silent`: the task has not been heard of for a second and a half"),
    },
    "restart": {
        "cause": EventKey(_text, "what ended, and how, as `crankshaft local` saw it"),
        "task": _TASK,
        "exit_code": EventKey(_integer, "of that task"),
    },
    "end": {
        "reason": EventKey(_text, "`done`, a signal, a hook's reason, or an error's line"),
        "exit_code": EventKey(_integer, "of the process"),
        "goodput": EventKey(_goodput, "`share` and `seconds`: [goodput](#goodput)"),
    },
}
_FITS = {kind: {name: key.fits for name, key in keys.items()} for kind, keys in SCHEMA.items()}


def parsed(line: bytes) -> dict[str, Any] | None:
    """Returns the event of a line; None if it does not match the schema, e.g. a killed writer's last line."""
    try:
        event = json.loads(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict):
        return None
    head: list[Any] = [event.get(name) for name in ("event", "time", "step")]
    kind, time, step = head
    if not isinstance(kind, str) or not _number(time) or not 0 <= time < _LATEST or not _integer(step) or step < 0:
        return None
    values = {name: value for name, value in event.items() if name != "event"}
    others = _number if kind == "row" else lambda value: True
    return event if _has_types(_FITS.get(kind, {}), values, others) else None


class Line(NamedTuple):
    """A line of a record that has an event.

    Of the kinds of which there are many, only a line's head has been parsed, which takes a fifth of the time.
    """

    kind: str
    time: float
    step: int
    text: bytes

    @property
    def event(self) -> dict[str, Any]:
        """The event's keys and values; {} if those after the head do not match the schema."""
        return parsed(self.text) or {}


def line_of(text: bytes) -> Line | None:
    """Returns the line, or None if it has no event."""
    if text.endswith(b"}\n") and (head := _HEAD.match(text)):
        kind, time, step = head.groups()
        return Line(_KINDS[kind], float(time), int(step), text)
    event = parsed(text)
    return Line(event["event"], event["time"], event["step"], text) if event else None


def read(path: str) -> Iterator[Line]:
    """Yields each line that has an event, skipping others. Raises OSError, also for a link."""
    with open(open_regular(path, os.O_NOFOLLOW), "rb") as file:
        yield from (line for line, *_ in _lines(file) if line is not None)


class NewestStep:
    """The newest step of a record's last attempt. Each call reads what has come since the one before.

    Args:
      path: path of the file, which need not exist; None without one.
    """

    def __init__(self, path: str | None):
        self._path = path
        self._file: tuple[int, int] | None = None
        self._offset = self._step = 0

    def __call__(self) -> int:
        """Returns the newest step; 0 without a record."""
        if self._path is None or not os.path.isfile(self._path):
            return 0
        with open(open_regular(self._path, os.O_NOFOLLOW), "rb") as file:
            state = os.fstat(file.fileno())
            if self._file == (state.st_dev, state.st_ino) and state.st_size >= self._offset:
                file.seek(self._offset)
            else:
                self._file, self._step = (state.st_dev, state.st_ino), 0
                _seek_start(file)
            newest = max((line.step for line, *_ in _lines(file) if line is not None), default=0)
            self._step, self._offset = max(self._step, newest), file.tell()
        return self._step


def record_restart(path: str | None, at: float, step: int, cause: str, task: str, exit_code: int) -> None:
    """Records a restart, at so many Unix seconds, and why; a run that has no record yet has lost nothing."""
    if path and os.path.isfile(path):
        EventLog(path).write("restart", step, time=at, cause=cause, task=task, exit_code=exit_code)


def _seek_start(file: IO[bytes], step: float = math.inf) -> int:
    """Moves to the newest event `start` of at most a step, or else to the file's beginning; returns the position.

    The attempt that has written it had removed what is of later steps, but for `_PROCESS_EVENTS`. Reads backwards.
    """
    first, rest = file.seek(0, os.SEEK_END), b""
    while first > 0:
        last, first = first, max(0, first - _PIECE)
        file.seek(first)
        block = file.read(last - first) + rest
        for found in reversed([*re.finditer(_START, block)]):
            position = file.seek(first + found.start() + 1)
            event = parsed(file.readline(LONGEST_LINE))
            if event and event["step"] <= step:
                return file.seek(position)
        rest = block[: len(_START)]
    return file.seek(0)


def _lines(file: IO[bytes]) -> Iterator[tuple[Line | None, int, int]]:
    """Yields each line, None if it has no event, and its range in the file. Reads overlong lines in pieces."""
    is_rest, last = False, file.tell()
    while text := file.readline(LONGEST_LINE):
        first, last = last, last + len(text)
        is_whole = text.endswith(b"\n") or len(text) < LONGEST_LINE
        if not is_rest:
            yield line_of(text) if is_whole else None, first, last
        is_rest = not is_whole


class EventLog:
    """Appends events to a file. Several threads may.

    If writing fails, e.g. on a full disk, the run and the record continue: a warning is logged, missing events are
    counted, and each later event is an attempt. The first that succeeds follows a warning with the count.

    Args:
      path: the file's path; None writes nothing.
    """

    def __init__(self, path: str | None):
        self._path = path
        self._lock = threading.Lock()
        self._missing: list[int] = []  # the steps of the events that could not be written
        self._reason = ""  # why not; "" while the file can be written
        self._cut_at: int | None = None  # the step past which the file must be truncated first

    def read(self) -> Iterator[Line]:
        """Yields each line of the file that has an event; none if it can't be read."""
        with contextlib.suppress(OSError):
            yield from read(self._path) if self._path else ()

    def write(self, event: str, step: int, *, time: float | None = None, **values: Any) -> None:
        """Appends an event; non-finite numbers become null. `time` is in Unix seconds, None is now."""
        head = {"event": event, "time": clock.time() if time is None else time, "step": step}
        with self._lock, self._attempt(step):
            if self._cut_at is not None:
                self._cut(self._cut_at, lambda line: None)
            lines = [json.dumps(_finite({**head, **values}))]
            if self._missing:
                first, last = min(self._missing), max(self._missing)
                at = f"steps {first:,} to {last:,}" if first < last else f"step {first:,}"
                is_or_are = "is" if len(self._missing) == 1 else "are"
                text = f"{counted(len(self._missing), 'event')} of {at} {is_or_are} missing: {self._reason}"
                gap = {"event": "warning", "time": head["time"], "step": step, "text": text, "task": None}
                # With the event or not at all: else a disk with room for one of them is logged twice.
                lines.insert(0, json.dumps(gap))
            self._append("\n".join(lines))
            self._missing, self._reason = [], ""

    def cut(self, step: int, replay: Callable[[Line], Any]) -> None:
        """Removes the events of steps past `step`; passes the lines since the last `start` before it to `replay` first.

        Lines that are not events are removed, too, and their number is logged.
        """
        with self._lock, self._attempt():
            self._cut_at = step
            self._cut(step, replay)

    @contextlib.contextmanager
    def _attempt(self, *steps: int) -> Iterator[None]:
        """Runs a body that writes; on failure counts an event of each of these steps as missing."""
        try:
            yield
        except OSError as error:
            self._missing += steps
            if not self._reason:
                line = "%s can't be written (%s); the run continues, and so does its record once it can be"
                logging.warning(line, self._path, error.strerror)
            self._reason = str(error.strerror)

    def _append(self, line: str) -> None:
        if self._path is None:
            return
        with os.fdopen(open_regular(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "rb+", buffering=0) as file:
            content = f"{line}\n".encode()
            if end := file.seek(0, os.SEEK_END):
                file.seek(end - 1)
                content = content if file.read(1) == b"\n" else b"\n" + content  # ends a killed writer's line
            append(file.fileno(), content)

    def _cut(self, step: int, replay: Callable[[Line], Any]) -> None:
        if self._path is not None and os.path.lexists(self._path):
            with open(open_regular(self._path, os.O_NOFOLLOW), "rb") as file:
                ranges, skipped = _kept(file, step, replay)
                # Else nothing is removed, and a long record need not be copied.
                if ranges != [(0, file.tell())]:
                    with new_file(self._path) as left:
                        for first, last in ranges:
                            file.seek(first)
                            while piece := file.read(min(_PIECE, last - file.tell())):
                                left.write(piece)
            if skipped:
                removed = f"{counted(skipped, 'line')} that {'is' if skipped == 1 else 'are'} not of its schema"
                logging.warning("%s: %s removed; a process that is killed may leave one", self._path, removed)
        self._cut_at = None


def _kept(file: IO[bytes], step: int, replay: Callable[[Line], Any]) -> tuple[list[tuple[int, int]], int]:
    """Returns the byte ranges of a file to keep when truncating it to a step, and the number of lines without event."""
    ranges, skipped = [(0, _seek_start(file, step))], 0
    for line, first, last in _lines(file):
        if line is None:
            skipped += 1
            continue
        replay(line)
        if line.step <= step or line.kind in _PROCESS_EVENTS:
            if ranges[-1][1] == first:
                first = ranges.pop()[0]
            ranges.append((first, last))
    return ranges, skipped


def _finite(value: Any) -> Any:
    """Converts a value for JSON: non-finite numbers to None, tuples to lists, keys to text."""
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, (bool, int, str)) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return _finite(value.item()) if hasattr(value, "item") else str(value)
