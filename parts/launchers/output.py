"""The output of a cluster's tasks: line by line, prefixed, to the supervisor's own streams and to log files.

Nothing here waits: tasks are read and the supervisor's streams are written as they are ready. Supervisor code.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import select
import selectors
import time
from collections.abc import Iterable, Sequence
from typing import IO

from ...engine.errors import as_line, counted, one_line, visible
from ...engine.machine.files import append, folder_below, open_regular
from ...runner.host.streams import has_no_reader

_CHUNK = 1 << 16
_LONGEST_LINE = 1 << 20
_MOST_PENDING = 1 << 20  # bytes that wait for our reader; with more, tasks are not read either
_MOST_LEFT = 1 << 21  # bytes read after a task's end: more than a pipe holds
_LAST_LINES = 10
_LAST_LINE_LENGTH = 300
_COLOURS = ("36", "33", "32", "35", "34", "96", "93", "92")  # SGR; red is for errors
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_FRAME = re.compile(rb"    @ +0x[0-9a-f]+  |\*\*\* Check failure stack trace: \*\*\*$")  # absl's, after the reason
# SGR, the one command to a terminal that tasks may give; but none that blinks (5, 6) or hides (8).
_SGR = r"[345]8[;:](?:5[;:]\d+|2(?:(?:;\d*){3}|(?::\d*){3,5}))|(?![345]8)0*(?:[0-47]|9|[1-9]\d+)?(?::\d+)?"
_COLOUR = re.compile(rf"(\x1b\[(?:{_SGR})(?:;(?:{_SGR}))*m)")
_NO_COLOUR = "\x1b[0m"


class Lines:
    """Splits a stream of bytes into lines. A carriage return ends a line too: progress bars have no other end."""

    def __init__(self):
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the lines that `data` completes, without their ends."""
        *whole, rest = (self._rest + data).split(b"\n")
        lines = [piece for line in whole for piece in [*filter(None, line.split(b"\r"))] or [b""]]
        drawn, returned, last = rest[:-1].rpartition(b"\r")  # the last byte may be half of a \r\n
        if returned:
            lines += filter(None, drawn.split(b"\r"))
            rest = last + rest[-1:]
        # What has no end of a line must not fill the memory.
        while len(rest) > _LONGEST_LINE:
            lines.append(rest[:_LONGEST_LINE])
            rest = rest[_LONGEST_LINE:]
        self._rest = rest
        return lines

    def end(self) -> list[bytes]:
        """Returns the rest of the stream, which no end of a line has followed."""
        rest, self._rest = self._rest, b""
        return list(filter(None, rest.split(b"\r")))


class Sink:
    """A stream of the supervisor. Keeps what its reader does not take yet; a reader that is gone does no harm.

    Attributes:
      pending: the bytes that are still to be written.
      lost: the first error that kept something from being written; None without one, or if nobody reads any more.
    """

    def __init__(self, descriptor: int, selector: selectors.BaseSelector, coloured: bool):
        self.coloured = coloured
        self.lost: OSError | None = None
        self._descriptor = descriptor
        self._selector = selector
        self.pending = bytearray()
        self._paused: list[_Stream] = []
        self._is_registered = False

    @property
    def is_full(self) -> bool:
        """Whether so much is pending that tasks are not to be read."""
        return len(self.pending) > _MOST_PENDING

    def write(self, data: bytes) -> None:
        """Writes what fits without waiting, and keeps the rest for later."""
        self.pending += data
        self._flush()
        if self.pending and not self._is_registered:
            self._selector.register(self._descriptor, selectors.EVENT_WRITE, self._on_ready)
            self._is_registered = True

    def pause(self, stream: _Stream) -> None:
        """Stops reading a stream until there is room for it."""
        self._paused.append(stream)

    def _on_ready(self) -> None:
        self._flush()
        if not self.pending:
            self._selector.unregister(self._descriptor)
            self._is_registered = False
        if not self.is_full:
            paused, self._paused = self._paused, []
            for stream in paused:
                stream.resume()

    def _flush(self) -> None:
        while self.pending and select.select([], [self._descriptor], [], 0)[1]:
            try:  # a pipe that is ready takes so many bytes without a wait (pipe(7))
                done = os.write(self._descriptor, self.pending[: select.PIPE_BUF])
            except OSError as error:  # the reader is gone, or a disk is full: the log files still have the text
                self.pending.clear()
                if not has_no_reader(self._descriptor, error):
                    self.lost = self.lost or error
                return
            del self.pending[:done]


class _Stream:
    """A standard stream of a task."""

    def __init__(self, pipe, task: TaskOutput, sink: Sink, selector: selectors.BaseSelector):
        self._pipe, self._task, self._sink, self._selector = pipe, task, sink, selector
        self._lines = Lines()
        self._is_registered = False
        os.set_blocking(pipe.fileno(), False)
        self.resume()

    def resume(self) -> None:
        if not self._pipe.closed:
            self._selector.register(self._pipe, selectors.EVENT_READ, self._on_ready)
            self._is_registered = True

    def finish(self) -> None:
        """Reads and shows the rest, without waiting for other processes that still hold the stream."""
        left = _MOST_LEFT
        while left > 0 and (data := self._read()):
            self._task.show(self._lines.feed(data), self._sink)
            left -= len(data)
        self._task.show(self._lines.end(), self._sink)
        self._pause()
        self._pipe.close()

    def _on_ready(self) -> None:
        # Then the task waits for its own pipe, instead of filling this process's memory.
        if self._sink.is_full:
            self._pause()
            self._sink.pause(self)
        elif data := self._read():
            self._task.show(self._lines.feed(data), self._sink)
        else:
            self._pause()  # the task has closed its end

    def _pause(self) -> None:
        if self._is_registered:
            self._selector.unregister(self._pipe)
            self._is_registered = False

    def _read(self) -> bytes:
        try:
            return os.read(self._pipe.fileno(), _CHUNK)
        except BlockingIOError:
            return b""


class TaskOutput:
    """The output of one process of a task, from its start to its end."""

    def __init__(self, prefix: str, colour: str, log):
        self._prefix = f"[{prefix}] ".encode()
        self._coloured_prefix = f"\x1b[{colour}m[{prefix}]{_NO_COLOUR} ".encode()
        self._log = log
        self._missing, self._why = 0, ""  # lines that the log lacks, and why
        self._last: collections.deque[bytes] = collections.deque(maxlen=_LAST_LINES)
        self._streams: list[_Stream] = []

    def follow(self, pipe, sink: Sink, selector: selectors.BaseSelector) -> None:
        """Starts to read a pipe of the task, to be shown on `sink`."""
        self._streams.append(_Stream(pipe, self, sink, selector))

    def show(self, lines: list[bytes], sink: Sink) -> None:
        """Shows lines with the task's prefix, and adds them to its log, where alone those of a C++ stack are."""
        if not lines:
            return
        lines = [*map(without_controls, lines)]
        prefix = self._coloured_prefix if sink.coloured else self._prefix
        # A stack is long, and would push the reason before it out of sight and out of the last lines.
        without_stack = [line for line in lines if not _FRAME.match(line)]
        shown = without_stack if self._log else lines
        sink.write(b"".join(prefix + line + b"\n" for line in shown))
        self._last.extend(without_stack[-_LAST_LINES:])
        if self._log:
            gap = f"=== {counted(self._missing, 'line')} missing: {self._why} ===\n" if self._missing else ""
            try:
                append(self._log.fileno(), gap.encode() + b"".join(line + b"\n" for line in lines))
                self._missing = 0
            except OSError as error:  # a full disk ends neither the job nor the log
                self._missing, self._why = self._missing + len(lines), error.strerror or ""

    def finish(self) -> tuple[str, ...]:
        """Shows the rest, closes all streams and the log, and returns the last lines."""
        for stream in self._streams:
            stream.finish()
        if self._log:
            self._log.close()
        return _as_text(self._last)


def without_controls(line: bytes) -> bytes:
    """Escapes what acts on a terminal in a line, except colours, which end with it."""
    if line.isascii() and line.decode().isprintable():
        return line
    parts = _COLOUR.split(line.decode(errors="surrogateescape"))
    text = "".join(part if index % 2 else visible(part) for index, part in enumerate(parts))
    end = _NO_COLOUR if parts[1:] and parts[-2] != _NO_COLOUR else ""
    return (text + end).encode(errors="surrogateescape")


def last_lines(data: bytes) -> tuple[str, ...]:
    """Formats the end of a program's output for people: whole lines, without colours."""
    lines = Lines()
    return _as_text([*lines.feed(data), *lines.end()][-_LAST_LINES:])


def _as_text(lines: Iterable[bytes]) -> tuple[str, ...]:
    return tuple(filter(None, map(_readable, lines)))


def _readable(line: bytes) -> str:
    text = _ESCAPES.sub("", line[: 4 * _LAST_LINE_LENGTH].decode(errors="replace")).rstrip()
    return text if len(text) <= _LAST_LINE_LENGTH else f"{text[:_LAST_LINE_LENGTH]}..."


class Output:
    """Shows and logs everything that the tasks and the supervisor print.

    Args:
      selector: selector, in which the data of each key is a function to call when its file is ready.
      log_dir: a folder for a file a task, or None; made when it is needed.
      coloured: whether standard output and standard error show colours.

    Attributes:
      log_paths: the log file of each task that has one, by its name, such as "worker 0".
    """

    def __init__(self, selector: selectors.BaseSelector, log_dir: str | None, coloured: tuple[bool, bool]):
        self._selector = selector
        self._log_dir = log_dir
        self.log_paths: dict[str, str] = {}
        out = Sink(1, selector, coloured[0])
        # One sink for both where they are one file, as with 2>&1: what is left of a line is written before anything
        # else.
        self._sinks = [out, out if os.path.sameopenfile(1, 2) else Sink(2, selector, coloured[1])]

    @property
    def is_pending(self) -> bool:
        return any(sink.pending for sink in self._sinks)

    @property
    def lost(self) -> OSError | None:
        return next((sink.lost for sink in self._sinks if sink.lost), None)

    def follow(self, name: str, index: int, pid: int, pipes: Sequence[IO[bytes]]) -> TaskOutput:
        """Starts to read a task's two streams; `index`, its number among the tasks, gives it its colour."""
        task = TaskOutput(name, _COLOURS[index % len(_COLOURS)], self._open_log(name, pid))
        for pipe, sink in zip(pipes, self._sinks, strict=True):
            task.follow(pipe, sink, self._selector)
        return task

    def print(self, line: str) -> None:
        self._sinks[1].write(f"[local] {as_line(line)}\n".encode(errors="backslashreplace"))

    def fail(self, line: str, details: tuple[str, ...]) -> None:
        """Prints why the supervisor ends, and `details` below."""
        lines = [f"error: {one_line(line)}\n", *(f"    {detail}\n" for detail in details)]
        self._sinks[1].write("".join(lines).encode())

    def _open_log(self, name: str, pid: int):
        if not self._log_dir:
            return None
        path = os.path.join(self._log_dir, f"{name.replace(' ', '-')}.log")
        try:
            os.makedirs(self._log_dir, exist_ok=True)
            with folder_below(*os.path.split(self._log_dir)) as folder:
                descriptor = open_regular(os.path.basename(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT, folder)
            log = open(descriptor, "ab", buffering=0)  # noqa: SIM115 (TaskOutput.finish closes it)
            head = f"=== {time.strftime('%Y-%m-%d %H:%M:%S')} {name} starts as process {pid} ===\n"
            with contextlib.suppress(OSError):  # a full disk, which may have room later
                append(descriptor, head.encode())
            self.log_paths[name] = path
            return log
        except OSError as error:
            self.log_paths.pop(name, None)
            self.print(f"no logs of {name}: {path}: {error.strerror}")
            return None
