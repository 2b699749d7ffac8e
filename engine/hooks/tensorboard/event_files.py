"""Writes TensorBoard's event files in a thread, and truncates those that a killed run wrote past its checkpoint.

An event file is TFRecords of `Event` protocol buffers; the first names the format. `tf.summary` writes the same by
one op per value, about 0.1 ms each in the training thread. Here that thread queues one event of many values,
which another thread formats (8 values in 0.02 ms) and writes in groups.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator

import tensorflow as tf

from ... import logging
from ...errors import reason
from ...machine import files
from ...machine.events import Gap
from ..writing import Writing

Event = tf.compat.v1.Event
Summary = tf.compat.v1.Summary

_AROUND_RECORD = 16  # bytes: a length, a checksum of each
_MARK = "tfevents"  # by which TensorBoard recognizes these files
_STAMP = re.compile(rf"events\.out\.{_MARK}\.(\d{{10}}\.\d{{6}})\.")  # Unix seconds, in a file's name
_MAKING = ""  # key for events that can't be made, whatever the files
_START = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)


@dataclasses.dataclass
class _File:
    """An open event file.

    Attributes:
      whole_bytes: the file's size at the last flush.
      steps: the steps of the events since the last flush.
    """

    path: str
    writer: tf.io.TFRecordWriter
    whole_bytes: int = 0
    steps: list[int] = dataclasses.field(default_factory=list)


class EventFiles:
    """One event file per folder, created with the folder's first event.

    If writing fails, e.g. on a full disk, the run and the writing continue: a warning is logged, the file is truncated
    to its last whole event, and each later event is an attempt with a new file. After a success, or at the end, a
    warning counts the missing events.

    Args:
      directory: the folders' parent; None writes nothing, for workers other than the chief.
      writing: the writing thread; None starts one for these files.
    """

    def __init__(self, directory: str | None, writing: Writing | None = None):
        self.directory = directory
        self._writing = writing or Writing()
        self._files: dict[str, _File] = {}
        self._gaps = collections.defaultdict[str, Gap](Gap)  # by folder
        self._purged: set[str] = set()  # folders whose readers are notified of truncation
        self._uncut: list[str] = []  # folders whose older files must still be truncated
        self._last_step = -1  # later events of earlier processes are removed
        self._is_open = False

    def open(self, resumed_at: int | None) -> None:
        """Truncates older files to a step, and starts the thread.

        Args:
          resumed_at: the resumed step: later events of an earlier process are removed, since they will be written
            again. None is a new run: files of an earlier start are removed.
        """
        self._last_step = -1 if resumed_at is None else resumed_at
        self._purged.clear()
        if self.directory is None:
            return
        self._uncut = [folder for folder, _, _ in os.walk(self.directory)]
        with self._attempt(self.directory):
            self._cut_back()
        self._is_open = True
        self._writing.open(self._flush)

    def put(self, folder: str, step: int, make: Callable[[], Iterable[tf.compat.v1.Summary.Value]]) -> None:
        """Queues one event. `make`, called in the thread, returns its values."""
        if self.directory is not None:
            self._writing.submit(functools.partial(self._put, folder, time.time(), step, make))

    def put_graph(self, folder: str, make: Callable[[], bytes]) -> None:
        """Queues a graph, a serialised `GraphDef`, at step 0."""
        self.put(folder, 0, make)

    def flush(self, seconds: float | None = None) -> None:
        """Waits until all queued events are in the files, for at most so many seconds."""
        if self._is_open:
            self._writing.flush(seconds)

    def close(self) -> None:
        """Writes the rest and closes the files; may be called again."""
        if self._is_open:
            self._is_open = False
            self._writing.submit(self._close_files)
            self._writing.close(self._flush)

    def _put(self, folder: str, wall_time: float, step: int, make: Callable) -> None:
        with self._attempt(_MAKING, step):
            values = make()
            event = Event(wall_time=wall_time, step=step)
            if isinstance(values, bytes):
                event.graph_def = values
            else:
                event.summary.value.extend(values)
            with self._attempt(folder, step):
                self._cut_back()
                file = self._files.get(folder) or self._new_file(folder)
                file.writer.write(event.SerializeToString())
                file.steps.append(step)

    def _flush(self) -> None:
        for folder, file in [*self._files.items()]:
            with self._attempt(folder):
                file.writer.flush()
                file.whole_bytes = os.path.getsize(file.path)
                file.steps.clear()
                self._purged.add(folder)
                _log(self.directory, self._gaps.pop(folder, Gap()))

    def _close_files(self) -> None:
        self._flush()
        for file in self._files.values():
            file.writer.close()
        self._files.clear()
        for gap in self._gaps.values():
            _log(self.directory, gap)
        self._gaps.clear()

    @contextlib.contextmanager
    def _attempt(self, folder: str, *steps: int) -> Iterator[None]:
        """Runs a body that writes to a folder; on failure counts missing events, and gives up the folder's file."""
        try:
            yield
        except Exception as error:  # of any kind: a log must end neither a run nor the writing thread
            gap = self._gaps[folder]
            if not gap.reason:
                line = (
                    "TensorBoard's files in %s can't be written (%s); the run continues, and so do they when possible"
                )
                logging.warning(line, self.directory, reason(error))
            gap.reason = reason(error)
            gap.add(*steps)
            if file := self._files.pop(folder, None):
                gap.add(*file.steps)
                _end_cleanly(file)

    def _cut_back(self) -> None:
        while self._uncut:
            cut_back(self._uncut[-1], self._last_step)
            self._uncut.pop()

    def _new_file(self, folder: str) -> _File:
        path = os.path.join(self.directory, folder)
        os.makedirs(path, exist_ok=True)
        # TensorBoard reads a folder's files in the order of their names, so later ones must sort later. Seconds alone
        # would repeat in a process that resumes at once, whose copied folder (a remote run_dir) lacks the first file.
        # Those of a clock that was ahead are earlier, too.
        stamps = [float(match[1]) + 1e-6 for name in os.listdir(path) if (match := _STAMP.match(name))]
        name = f"events.out.{_MARK}.{max([time.time(), *stamps]):.6f}.{socket.gethostname()}.{os.getpid()}"
        path = os.path.join(path, name)
        files.make_file(path)  # nothing has this name, not even a link
        file = self._files[folder] = _File(path, tf.io.TFRecordWriter(path))
        file.writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        if folder not in self._purged:
            # A running TensorBoard has read the removed events: this makes it discard them. It ignores the first one
            # that it reads, so that a new run has to begin with one.
            start = Event(wall_time=time.time(), step=self._last_step + 1, session_log=_START)
            file.writer.write(start.SerializeToString())
        return file


def _log(directory: str | None, gap: Gap) -> None:
    if gap:
        logging.warning("TensorBoard's files in %s: %s", directory, gap)


def _end_cleanly(file: _File) -> None:
    """Closes a file after a failed write, and keeps its whole events; removes it if it has none."""
    with contextlib.suppress(OSError, tf.errors.OpError):
        file.writer.close()
    with contextlib.suppress(OSError):
        if file.whole_bytes:
            os.truncate(file.path, file.whole_bytes)
        else:
            os.remove(file.path)


def cut_back(folder: str, step: int) -> None:
    """Removes the events of later steps from a folder's event files, and a record truncated by a kill.

    Each file is rewritten and renamed into place. With `step` below 0 the files are removed.
    """
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if _MARK not in name or not os.path.isfile(path) or os.path.islink(path):
            continue
        if step < 0:
            os.remove(path)
            continue
        _cut_partial_event(path)
        records, is_whole = _read_records(path)
        remaining = [record for record in records if (own_step := _event_step(record)) is not None and own_step <= step]
        if is_whole and len(remaining) == len(records):
            continue
        # The temporary name is one that TensorBoard ignores.
        with files.replacing(path, files.make_file, name="cut") as temporary, tf.io.TFRecordWriter(temporary) as writer:
            for record in remaining:
                writer.write(record)


def _cut_partial_event(path: str) -> None:
    """Truncates a file after its last record of the stated length: TensorFlow allocates the stated length."""
    with open(files.open_regular(path, os.O_RDWR), "rb+") as file:
        size, whole = os.fstat(file.fileno()).st_size, 0
        while whole + _AROUND_RECORD <= size:
            after = whole + _AROUND_RECORD + int.from_bytes(file.read(8), "little")
            if after > size:
                break
            whole = file.seek(after)
        if whole < size:
            file.truncate(whole)


def _event_step(record: bytes) -> int | None:
    try:
        return Event.FromString(record).step
    except Exception:  # protobuf's DecodeError: not an event
        return None


def _read_records(path: str) -> tuple[list[bytes], bool]:
    """Returns a file's records, and whether the last is whole."""
    records = []
    try:
        for record in tf.data.TFRecordDataset(path).as_numpy_iterator():
            records.append(record)
    except tf.errors.DataLossError:
        return records, False
    return records, True
