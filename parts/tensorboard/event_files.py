"""Writes TensorBoard's event files in a thread.

An event file is TFRecords of `Event` protocol buffers; the first names the format. `tf.summary` writes the same by
one op per value, about 0.1 ms each in the training thread. Here that thread queues one event of many values,
which another thread formats (8 values in 0.02 ms) and writes in groups.
"""

from __future__ import annotations

import functools
import os
import re
import socket
import time
from collections.abc import Callable, Iterable

import tensorflow as tf

from ...engine import logging
from ...engine.errors import reason
from ...engine.hooks.background import BackgroundThread
from ...engine.machine import files

Event = tf.compat.v1.Event

_STAMP = re.compile(r"events\.out\.tfevents\.(\d{10}\.\d{6})\.")  # Unix seconds, in a file's name
_START = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)


class EventFiles:
    """One event file per folder, created with the folder's first event.

    If writing fails, e.g. on a full disk, the run continues: a warning is logged, and the next event begins a new file.

    Args:
      directory: the folders' parent; None writes nothing, for workers other than the chief.
      writer: the writing thread; None starts one for these files.
    """

    def __init__(self, directory: str | None, writer: BackgroundThread | None = None):
        self.directory = directory
        self._writer = writer or BackgroundThread()
        self._writers: dict[str, tf.io.TFRecordWriter] = {}  # by folder
        self._first_step = 0
        self._started: set[str] = set()  # folders in which START is written
        self._has_failed = False
        self._is_open = False

    def open(self, resumed_at: int | None) -> None:
        """Starts the thread.

        Args:
          resumed_at: the resumed step: TensorBoard discards later events of an earlier process, since they will be
            written again. None is a new run, which replaces all events.
        """
        self._first_step = 0 if resumed_at is None else resumed_at + 1
        self._started.clear()
        if self.directory is not None:
            self._is_open = True
            self._writer.open(self._flush)

    def put(self, folder: str, step: int, make: Callable[[], Iterable[tf.compat.v1.Summary.Value] | bytes]) -> None:
        """Queues one event. `make`, called in the thread, returns its values, or a graph, a serialised `GraphDef`."""
        if self.directory is not None:
            self._writer.submit(functools.partial(self._put, folder, time.time(), step, make))

    def flush(self, seconds: float | None = None) -> None:
        """Waits until all queued events are in the files, for at most so many seconds."""
        if self._is_open:
            self._writer.flush(seconds)

    def close(self) -> None:
        """Writes the rest and closes the files; may be called again."""
        if self._is_open:
            self._is_open = False
            self._writer.submit(self._close_files)
            self._writer.close(self._flush)

    def _put(self, folder: str, wall_time: float, step: int, make: Callable) -> None:
        def write() -> None:
            values, event = make(), Event(wall_time=wall_time, step=step)
            if isinstance(values, bytes):
                event.graph_def = values
            else:
                event.summary.value.extend(values)
            if folder not in self._writers:
                self._writers[folder] = self._new_writer(folder)
            self._writers[folder].write(event.SerializeToString())

        self._attempt(folder, write)

    def _flush(self) -> None:
        for folder, writer in [*self._writers.items()]:
            # Only once it is flushed is START in the file: after a failure the next file has to begin with it again.
            if self._attempt(folder, writer.flush):
                self._started.add(folder)

    def _close_files(self) -> None:
        for folder, writer in [*self._writers.items()]:
            self._attempt(folder, writer.close)
        self._writers.clear()

    def _attempt(self, folder: str, work: Callable[[], None]) -> bool:
        """Does work in a folder's file. After a failure a new file is begun: the old one may end in half an event."""
        try:
            work()
        except Exception as error:  # of any kind: a log must end neither a run nor the writing thread
            self._writers.pop(folder, None)
            if not self._has_failed:
                line = "TensorBoard's files in %s can't be written (%s); the run continues, and they have a gap"
                logging.warning(line, self.directory, reason(error))
            self._has_failed = True
            return False
        return True

    def _new_writer(self, folder: str) -> tf.io.TFRecordWriter:
        assert self.directory is not None  # without one nothing is queued
        path = os.path.join(self.directory, folder)
        os.makedirs(path, exist_ok=True)
        # TensorBoard reads a folder's files in the order of their names, so later ones must sort later. Seconds alone
        # would repeat in a process that resumes at once, whose copied folder (a remote run_dir) lacks the first file.
        # Those of a clock that was ahead are earlier, too.
        stamps = [float(match[1]) + 1e-6 for name in os.listdir(path) if (match := _STAMP.match(name))]
        name = f"events.out.tfevents.{max([time.time(), *stamps]):.6f}.{socket.gethostname()}.{os.getpid()}"
        path = os.path.join(path, name)
        files.make_empty(path)  # nothing has this name, not even a link
        writer = tf.io.TFRecordWriter(path)
        writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        if folder not in self._started:
            # It makes TensorBoard discard an earlier process's events from this step on. It ignores the first one
            # that it reads, so that a new run has to begin with one.
            start = Event(wall_time=time.time(), step=self._first_step, session_log=_START)
            writer.write(start.SerializeToString())
        return writer
