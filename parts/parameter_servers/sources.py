"""Sources that workers read themselves: the tasks' functions for the coordinator, and its calls.

Graphs call, by name, functions that the executing process has registered (`Sources.answer`). A source is identified by
its description, so a task with different files refuses to read, also if it returns after a loss.
"""

from __future__ import annotations

import dataclasses
import json
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ...engine import logging
from ...engine.data.buckets import BucketedOrder
from ...engine.data.order import ChunkedOrder, Order
from ...engine.data.reader import Reader, as_stored, packed, stored_dtypes
from ...engine.data.source import Source, WithoutBadRecords
from ...engine.errors import CrankshaftError, LostPeerError, SourceError, UnavailableError, reason
from ...engine.internals.tensorflow import answer_to, called_by_name
from ...engine.machine import environment
from ..workers.comparison import differences
from ..workers.watchdog import FIRST_CALL_FACTOR

_READ, _DESCRIBE, _VERIFY, _BAD, _DISMISS, _VERSIONS = (
    f"crankshaft/{name}" for name in ("read", "describe", "verify", "bad", "dismiss", "versions")
)
_ERROR = re.compile(r"\[(Source|Unavailable)Error\] (.*?) \[end\]", re.DOTALL)  # TensorFlow adds names and a traceback
_PAUSE_SECONDS = 0.5
_ANSWER_SECONDS = 60.0  # timeout of calls that may fail
_DISMISS_SECONDS = 2.0


class Sources:
    """The sources of a task of the cluster, in its own process.

    Args:
      load: returns the sources; called once, when first needed, and again after an error.

    Attributes:
      dismissed: set when the coordinator's run has succeeded.
    """

    def __init__(self, load: Callable[[], Sequence[Source]], task: str):
        self._load, self._task = load, task
        self._lock = threading.Lock()
        self._loaded: Sequence[Source] | None = None
        self._readers: dict[bytes, Reader] = {}
        self._bytes_reported: dict[bytes, int] = {}  # read by each
        self._answers: list[Callable] = []
        self.dismissed = threading.Event()

    def answer(self) -> Sources:
        """Registers this task's functions, for the lifetime of this object. Returns itself."""
        answers: dict[str, Callable] = {
            _READ: self._read,
            _DESCRIBE: self._describe,
            _VERIFY: self._verify,
            _BAD: self._bad,
            _DISMISS: self._dismiss,
            _VERSIONS: lambda: _as_text([environment.versions()]),
        }
        # Kept, since TensorFlow has only weak references to them.
        self._answers = [self._with_marked_errors(function) for function in answers.values()]
        for name, function in zip(answers, self._answers, strict=True):
            answer_to(name, function)
        return self

    def _with_marked_errors(self, function: Callable) -> Callable:
        """Wraps a function so that its errors about data are marked for the coordinator."""

        def marked(*arguments):
            try:
                return function(*arguments)
            except CrankshaftError as error:
                kind = "Unavailable" if isinstance(error, UnavailableError) else "Source"
                line = " ".join(error.message.split())
                raise SourceError(f"[{kind}Error] {self._task}: {line} [end]") from None

        return marked

    def _read(self, wanted: bytes, *request: Any) -> list[np.ndarray]:
        with self._lock:
            if wanted not in self._readers:
                self._readers[wanted] = self._reader(json.loads(wanted))
            reader = self._readers[wanted]
        stored = as_stored(reader.fetch(*request), reader.source.stored_spec)
        with self._lock:
            now = reader.bytes_read or 0
            size, self._bytes_reported[wanted] = now - self._bytes_reported.get(wanted, 0), now
        return [*stored, np.int64(size)]

    def _describe(self) -> list[np.ndarray]:
        with self._lock:
            return _as_text(describe(source) for source in self._all())

    def _verify(self) -> list[np.ndarray]:
        for reader in [*self._readers.values()]:
            if error := reader.find_undecodable():
                raise error if isinstance(error, CrankshaftError) else SourceError(reason(error))
        return _as_text([])

    def _bad(self) -> list[np.ndarray]:
        with self._lock:
            return _as_text([*source.bad] if isinstance(source, WithoutBadRecords) else [] for source in self._all())

    def _dismiss(self) -> list[np.ndarray]:
        self.dismissed.set()
        return _as_text([])

    def _reader(self, wanted: dict) -> Reader:
        described = [describe(source) for source in self._all()]
        if wanted["source"] not in described:
            raise SourceError(difference(wanted["source"], described))
        index = wanted["index"]  # the coordinator's index: two splits may have equal descriptions
        if described[index : index + 1] != [wanted["source"]]:
            index = described.index(wanted["source"])
        order = (ChunkedOrder if "chunk_examples" in wanted["order"] else Order)(**wanted["order"])
        return Reader(self._all()[index], order, wanted["timeout_seconds"])

    def _all(self) -> Sequence[Source]:
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded


def _as_text(values: Iterable) -> list[np.ndarray]:
    return [np.array([json.dumps(value) for value in values], object)]


def describe(source: Source) -> dict:
    """Describes a source in plain JSON, to distinguish it from others."""
    layout = tf.nest.map_structure(lambda spec: f"{spec.dtype.name} {[*spec.shape]}", source.element_spec)
    return {
        "examples": len(source),
        "layout": str(layout),
        "files": zlib.crc32(source.identity().encode()),
        "preprocessing": source.preprocessing_digest,
    }


def difference(wanted: dict, described: Sequence[dict]) -> str:
    """Describes how a task's sources, as `describe` returns them, differ from the coordinator's `wanted` one."""
    same_size = [source for source in described if source["examples"] == wanted["examples"]]
    same_layout = [source for source in same_size if source["layout"] == wanted["layout"]]
    if any({**source, "preprocessing": wanted["preprocessing"]} == wanted for source in same_layout):
        return (
            "it has fitted words, classes or means to the data, and the coordinator has those of the run; give all "
            "tasks a run_dir that they see, and the same command line"
        )
    if not described:
        how = "its data is in memory, and the coordinator's in files"
    elif not same_size:
        sizes = " and ".join(f"{source['examples']:,}" for source in described)
        how = f"its files have {sizes} examples, and the coordinator's {wanted['examples']:,}"
    elif not same_layout:
        how = f"its examples are {same_size[0]['layout']}, and the coordinator's {wanted['layout']}"
    else:
        how = "its files have as many examples as the coordinator's, and other contents"
    return f"{how}; give all tasks the same files, and the same command line"


def failure(error: Any) -> CrankshaftError | None:
    """Returns the exception of a task's source that caused an error, if any; the message begins with the task."""
    match = _ERROR.search(str(error)) if isinstance(error, tf.errors.OpError) else None
    return {"Source": SourceError, "Unavailable": UnavailableError}[match[1]](match[2]) if match else None


def read(source: Source, index: int, order: Order, timeout_seconds: float, indices: tf.Tensor, step: tf.Tensor):
    """Reads examples in the executing process. In a graph.

    Args:
      index: index of the source among the coordinator's.
      order: order of the source's examples, with blocks of one step.
      indices: [n] int64.
      step: step of the first of the examples; determines the chunks to read ahead.

    Returns:
      (nest of tensors [n, ...], see `source.stored_spec`; int64, bytes read by the process since its last report)
    """
    order_of_all = order.without_buckets if isinstance(order, BucketedOrder) else order  # the same for reading
    wanted = {"source": describe(source), "index": index, "order": dataclasses.asdict(order_of_all)}
    wanted_text = tf.constant(json.dumps({**wanted, "timeout_seconds": timeout_seconds}))
    dtypes = [*stored_dtypes(source.stored_spec), tf.int64]
    request = (indices, order.epochs(step)[0], *order.chunks_ahead(step))
    *stored, size = called_by_name(_READ, (wanted_text, *request), dtypes)
    return packed(stored, source.stored_spec), tf.ensure_shape(size, [])


def check(sources: Sequence[Source], workers: Sequence[str], timeout_seconds: float) -> None:
    """Compares each worker's sources with the coordinator's.

    Args:
      workers: addresses of the workers.
      timeout_seconds: limit on waiting, times `FIRST_CALL_FACTOR`, as workers open files; 0 waits for ever.

    Raises:
      SourceError: a worker's differ, or can't be read.
      LostPeerError: a worker does not answer.
    """
    answers = _query(_DESCRIBE, _jobs_tasks(worker=len(workers)), FIRST_CALL_FACTOR * timeout_seconds)
    for worker, (answer, address) in enumerate(zip(answers, workers, strict=True)):
        if answer is None:
            raise LostPeerError(
                f"worker {worker} ({address}) has not opened its files for {FIRST_CALL_FACTOR:g} times "
                f"step_timeout_seconds={timeout_seconds:g}; see whether it is there, and reaches them"
            )
        if isinstance(answer, Exception):
            raise failure(answer) or answer
        for source in sources:
            if describe(source) not in answer:
                raise SourceError(f"worker {worker} ({address}): {difference(describe(source), answer)}")


def compare_versions(workers: int, servers: int) -> None:
    """Logs, in a line, which of the reachable workers and servers, and the coordinator, run other versions than others.

    A task that starts again may have a newer build, which continues the same run.
    """
    answers = _query(_VERSIONS, tasks := _jobs_tasks(worker=workers, ps=servers), _ANSWER_SECONDS)
    versions, earlier = {"chief": environment.versions()}, list[str]()
    for task, answer in zip(tasks, answers, strict=True):
        # Side by side, an error of one may have come to another.
        answer = _query(_VERSIONS, [task], _ANSWER_SECONDS)[0] if isinstance(answer, Exception) else answer
        name = task.removeprefix("/job:").replace("/task:", " ")
        if isinstance(answer, list):
            versions[name] = answer[0]
        elif isinstance(answer, tf.errors.InvalidArgumentError):  # it does not know the question
            earlier.append(name)
    warn_of_versions(versions, earlier)


def warn_of_versions(versions: Mapping[str, Mapping[str, str]], earlier: Sequence[str] = ()) -> None:
    """Logs, in a line, what differs between the versions of tasks; `earlier`: tasks of an earlier build, of any."""
    if lines := [*differences(versions), *([f"an earlier build at {' and '.join(earlier)}"] if earlier else [])]:
        logging.warning(
            "tasks run different code: %s; install the same everywhere, unless it is an upgrade", "; ".join(lines)
        )


def undecodable(workers: int) -> CrankshaftError | None:
    """Returns the problem of an example that a worker can't decode, if any."""
    answers = _query(_VERIFY, _jobs_tasks(worker=workers), _ANSWER_SECONDS)
    return next((fault for answer in answers if (fault := failure(answer))), None)


def bad_records(index: int, workers: int) -> set[int]:
    """Returns the records of a source, by index, that workers have skipped; ignores unreachable workers."""
    answers = _query(_BAD, _jobs_tasks(worker=workers), _ANSWER_SECONDS)
    return {record for answer in answers if isinstance(answer, list) for record in answer[index]}


def dismiss(workers: int, servers: int) -> None:
    """Notifies reachable workers and servers that the run has succeeded, so they end with the coordinator."""
    _query(_DISMISS, _jobs_tasks(worker=workers, ps=servers), _DISMISS_SECONDS)


def _jobs_tasks(**counts: int) -> list[str]:
    return [f"/job:{job}/task:{number}" for job, count in counts.items() for number in range(count)]


def _query(name: str, tasks: Sequence[str], seconds: float) -> list[list | Exception | None]:
    """Calls each task's function; returns each result or exception, None without an answer in time (0: no limit)."""
    answers: list[list | Exception | None] = [None] * len(tasks)
    end = time.monotonic() + seconds

    def query(number: int) -> None:
        while answers[number] is None and not (seconds and time.monotonic() > end):
            try:
                with tf.device(f"{tasks[number]}/device:CPU:0"):
                    (texts,) = called_by_name(name, (), [tf.string])
                    answers[number] = [json.loads(text) for text in texts.numpy()]
            except (tf.errors.UnavailableError, tf.errors.AbortedError):  # it is being restarted
                time.sleep(_PAUSE_SECONDS)
            except Exception as error:  # passed to the waiting thread
                answers[number] = error

    # Daemons: the process must not wait for a thread that waits for a stopped worker.
    threads = [threading.Thread(target=query, args=(number,), daemon=True) for number in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()) if seconds else None)
    return answers
