"""Calls a source's `read` in threads of its own, checks and counts what it returns, and limits how long it may take."""

from __future__ import annotations

import os
import queue
import sys
import sysconfig
import threading
import time
import weakref
from concurrent.futures import Future
from typing import Any

import numpy as np
import tensorflow as tf

from .source import Source, SourceError, Spec, StuckReadError, WrappedSource
from .waiting import of_files, result_of

_THREADS = 2  # one waits for the disk while another parses
_LIBRARY = sysconfig.get_paths()["stdlib"]


class Reads:
    """Reads of one source. A read that never returns can't be interrupted: its thread is abandoned, and the run ends.

    Args:
      source: what is read.
      timeout_seconds: without any read that returns, until `result` raises; 0 waits for ever.
    """

    def __init__(self, source: Source, timeout_seconds: float = 0.0):
        self.source = source
        self._timeout = timeout_seconds
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        self._progress = _Progress()
        for _ in range(_THREADS):  # no executor's, which the process's end would wait for
            arguments = (self._calls, self._progress)
            threading.Thread(target=_serve, args=arguments, name="crankshaft-read", daemon=True).start()
        weakref.finalize(self, _end, self._calls)

    @property
    def bytes(self) -> int:
        """Bytes of what was read so far."""
        return sum(self._progress.bytes.values())

    def begin(self, indices: np.ndarray) -> Future:
        """Begins to read examples, [n] int64, without waiting."""
        future: Future = Future()
        self._calls.put((future, self.source, indices))
        return future

    def result(self, future: Future) -> Any:
        """Returns the nest of arrays that a read has given, once it has.

        Raises:
          StuckReadError: nothing was read for too long.
          Exception: what the source has raised.
        """
        return result_of(future, self._timeout, lambda: self._progress.last, self._stuck)

    def read(self, indices: np.ndarray) -> Any:
        """Reads examples, as `begin` and `result` do."""
        return self.result(self.begin(indices))

    def _stuck(self, idle: float) -> StuckReadError:
        thread, first = next(iter(self._progress.at.items()), (0, 0))
        return StuckReadError(
            f"{_name(self.source)}.read has not returned for {idle:.3g} s, at {_location(thread)}, from example "
            f"{first} on{of_files(self.source.files())}; see whether its files' disk or host answers, or raise "
            "`step_timeout_seconds`"
        )


class _Progress:
    """What the threads are reading.

    Attributes:
      last: when a read ended last, by the monotonic clock.
      at: by thread, the first example of what it reads.
      bytes: by thread, of what it has read.
    """

    def __init__(self):
        self.last = 0.0
        self.bytes: dict[int, int] = {}
        self.at: dict[int, int] = {}


def _serve(calls: queue.SimpleQueue, progress: _Progress) -> None:
    """Serves reads in a thread. Must hold no reference to its `Reads`, whose deletion ends the thread."""
    thread = threading.get_ident()
    while call := calls.get():
        future, source, indices = call
        progress.at[thread] = int(indices[0]) if len(indices) else 0
        try:
            found = checked(source, source.read(indices), len(indices))
            progress.bytes[thread] = progress.bytes.get(thread, 0) + sum(map(_size, tf.nest.flatten(found)))
            future.set_result(found)
            del found
        except BaseException as error:  # is raised where the result is wanted
            future.set_exception(error)
        progress.last = time.monotonic()
        del progress.at[thread], call, future, source, indices


def _end(calls: queue.SimpleQueue) -> None:
    for _ in range(_THREADS):
        calls.put(None)


def checked(source: Source, found: Any, examples: int) -> Any:
    """Returns what a source has read, as arrays of its `stored_spec`.

    Raises:
      SourceError: it is of another form, and the line says which part.
    """
    name = f"{_name(source)}.read"
    try:
        tf.nest.assert_same_structure(source.stored_spec, found, check_types=False)
    except (TypeError, ValueError):
        raise SourceError(
            f"{name} returned {_described(found)}, and the source's spec has {_described(source.stored_spec)}; return "
            "an array [n, ...] for each Spec, in the same tuples and dicts"
        ) from None

    def as_array(spec: Spec, part) -> np.ndarray:
        array = np.asarray(part)
        if array.ndim == 0 or len(array) != examples:
            count = "a single value" if array.ndim == 0 else f"{len(array)} examples"
            raise SourceError(
                f"{name} was asked for {examples} examples and returned {count}; return one for each index"
            )
        if array.shape[1:] != spec.shape:
            raise SourceError(
                f"{name} returned examples of shape {[*array.shape[1:]]}, and the source's spec has {[*spec.shape]}"
            )
        if not _holds(spec.dtype, array.dtype):
            raise SourceError(
                f"{name} returned {array.dtype}, and the source's spec has {_type(spec)}; convert it by astype"
            )
        return array.astype(spec.dtype, copy=False)

    return tf.nest.map_structure(as_array, source.stored_spec, found)


def _holds(dtype: np.dtype, found: np.dtype) -> bool:
    """Returns whether values of one type are those of another; NumPy's float64 may be rounded to what is asked for."""
    if dtype.kind == "O":
        return found.kind in "OSU"
    return np.can_cast(found, dtype, "safe") or (found.kind == dtype.kind == "f")


def _type(spec: Spec) -> str:
    return "strings (object)" if spec.dtype == object else str(spec.dtype)


def _described(nest: Any) -> str:
    """Returns a nest's form in a few words."""
    if isinstance(nest, dict):
        return "a dict of " + ", ".join(map(str, nest))
    if isinstance(nest, (tuple, list)):
        return f"a {type(nest).__name__} of {len(nest)}"
    return "one array" if isinstance(nest, (Spec, np.ndarray)) else f"a {type(nest).__name__}"


def _name(source: Source) -> str:
    while isinstance(source, WrappedSource):
        source = source.source
    return type(source).__name__


def _location(thread: int) -> str:
    """Returns "file:line in function" of where a thread is, outside the standard library."""
    frame = sys._current_frames().get(thread)
    while frame and frame.f_back and os.path.abspath(frame.f_code.co_filename).startswith(_LIBRARY + os.sep):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" if frame else "an unknown place"


def _size(part: np.ndarray) -> int:
    """Returns the bytes of an array; of strings, those of the strings."""
    return sum(map(len, part.ravel())) if part.dtype == object else part.nbytes
