"""Writes TensorBoard's event files in a thread, and cuts back those a killed run wrote past its checkpoint.

Host code. An event file is TFRecords of `Event` protocol buffers, the first of which names the format. `tf.summary`
writes the same, an op a value, about 0.1 ms each in the thread that trains. Here that thread queues one event of many
values, which another puts together (8 values in 0.02 ms) and writes, many at a time.
"""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Callable, Iterable

import tensorflow as tf
from absl import logging

from ...internals.errors import reason
from ...machine import files
from ..writing import Writing

Event = tf.compat.v1.Event
Summary = tf.compat.v1.Summary

_MARK = "tfevents"  # by which TensorBoard recognises these files
_START = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)


class EventFiles:
    """One event file in each of some folders, made when an event is first put into the folder.

    Files that can't be written end the writing, with one warning, and not the run.

    Args:
      directory: the folders' parent; None writes nothing, which is for all workers but the chief.
      writing: the thread that writes; None starts one for these files.
    """

    def __init__(self, directory: str | None, writing: Writing | None = None):
        self.directory = directory
        self._writing = writing or Writing()
        self._writers: dict[str, tf.io.TFRecordWriter] = {}
        self._resumed_at: int | None = None
        self._broken = False
        self._is_open = False

    def open(self, resumed_at: int | None) -> None:
        """Cuts older files back to a step, and starts the thread.

        Args:
          resumed_at: the step that the run goes on from: later events of an earlier process are removed, since they
            will be written again. None is a run from its start: files of an earlier start are removed.
        """
        self._resumed_at = resumed_at
        if self.directory is None:
            return
        for folder, _, _ in os.walk(self.directory):
            self._guarded(cut_back, folder, -1 if resumed_at is None else resumed_at)
        self._is_open = True
        self._writing.open(self._flush_writers)

    def put(self, folder: str, step: int, make: Callable[[], Iterable[tf.compat.v1.Summary.Value]]) -> None:
        """Queues one event. `make` returns its values, and is called in the thread."""
        if self.directory is not None:
            self._writing.do(functools.partial(self._guarded, self._write, folder, time.time(), step, make))

    def put_graph(self, folder: str, make: Callable[[], bytes]) -> None:
        """Queues a graph, a serialised `GraphDef`, at step 0."""
        self.put(folder, 0, make)

    def flush(self) -> None:
        """Waits until all queued events are in the files."""
        if self._is_open:
            self._writing.flush()

    def close(self) -> None:
        """Writes what is left and closes the files; may be called again."""
        if self._is_open:
            self._is_open = False
            self._writing.do(self._close_writers)
            self._writing.close(self._flush_writers)

    def _flush_writers(self) -> None:
        for writer in self._writers.values():
            self._guarded(writer.flush)

    def _close_writers(self) -> None:
        for writer in self._writers.values():
            self._guarded(writer.close)
        self._writers.clear()

    def _guarded(self, write: Callable, *arguments) -> None:
        if self._broken:
            return
        try:
            write(*arguments)
        except Exception as error:  # of whatever kind: a log must not end a run, nor the thread that writes it
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._broken = True
        logging.warning("TensorBoard's files in %s are no longer written: %s", self.directory, reason(error))

    def _write(self, folder: str, wall_time: float, step: int, make: Callable) -> None:
        made = make()
        event = Event(wall_time=wall_time, step=step)
        if isinstance(made, bytes):
            event.graph_def = made
        else:
            event.summary.value.extend(made)
        self._writer(folder).write(event.SerializeToString())

    def _writer(self, folder: str) -> tf.io.TFRecordWriter:
        if folder not in self._writers:
            path = os.path.join(self.directory, folder)
            os.makedirs(path, exist_ok=True)
            # TensorBoard reads a folder's files in the order of their names, so that a later one has to sort later.
            number = sum(_MARK in name for name in os.listdir(path))
            name = f"events.out.{_MARK}.{int(time.time()):010d}.{number:04d}.{socket.gethostname()}.{os.getpid()}"
            files.make_file(os.path.join(path, name))  # nothing, no link either, has that name
            writer = self._writers[folder] = tf.io.TFRecordWriter(os.path.join(path, name))
            writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
            if self._resumed_at is not None:
                # A running TensorBoard has read the events that were cut: this makes it forget them.
                start = Event(wall_time=time.time(), step=self._resumed_at + 1, session_log=_START)
                writer.write(start.SerializeToString())
        return self._writers[folder]


def cut_back(folder: str, step: int) -> None:
    """Removes the events of later steps from a folder's event files, and a record that a kill cut short.

    Each file is written again and renamed into place. With `step` below 0 the files are removed.
    """
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if _MARK not in name or not os.path.isfile(path):
            continue
        if step < 0:
            os.remove(path)
            continue
        records, is_whole = _read_records(path)
        kept = [record for record in records if Event.FromString(record).step <= step]
        if is_whole and len(kept) == len(records):
            continue
        # The temporary name is one that TensorBoard ignores.
        with files.replacing(path, files.make_file, name="cut") as temporary, tf.io.TFRecordWriter(temporary) as writer:
            for record in kept:
                writer.write(record)


def _read_records(path: str) -> tuple[list[bytes], bool]:
    """Returns a file's records, and whether it ends with a whole one."""
    records = []
    try:
        for record in tf.data.TFRecordDataset(path).as_numpy_iterator():
            records.append(record)
    except tf.errors.DataLossError:
        return records, False
    return records, True
