"""Sources that workers read by themselves: what a task answers with, and what the coordinator asks.

Graphs call by name what the process that runs them has registered (`Sources.answer`); the coordinator, which looks at a
batch now and then, has registered its own. A source is known by its description, so a task whose files are others
refuses to read, also where it comes back after it was lost.
"""

from __future__ import annotations

import json
import re
import threading
import time
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from crankshaft.engine.data.order import ChunkedOrder, Order
from crankshaft.engine.data.reading import Chunks, as_stored, packed, stored_dtypes
from crankshaft.engine.data.reads import Reads
from crankshaft.engine.data.source import Source, SourceError
from crankshaft.engine.health.watchdog import FIRST_CALL_FACTOR, LostPeerError
from crankshaft.engine.internals.tensorflow import answer_to, called_by_name

_READ, _DESCRIBE = "crankshaft/read", "crankshaft/describe"
_SAID = re.compile(r"\[source\] (.*?) \[end\]", re.DOTALL)  # TensorFlow puts names and a traceback around it
_PAUSE_SECONDS = 0.5


class Sources:
    """What a task of the cluster reads, in its own process.

    Args:
      load: returns the sources; called at the first question, once, and again where it has raised.
      task: this one's name, for messages.
    """

    def __init__(self, load: Callable[[], Sequence[Source]], task: str):
        self._load, self._task = load, task
        self._lock = threading.Lock()
        self._loaded: Sequence[Source] | None = None
        self._found: dict[bytes, tuple[Reads, Chunks | None]] = {}
        self._answers: list[Callable] = []

    def answer(self) -> Sources:
        """Answers graphs from now on, for as long as this object is kept. Returns itself."""
        self._answers = [self._telling(self._read), self._telling(self._describe)]
        for name, function in zip((_READ, _DESCRIBE), self._answers, strict=True):
            answer_to(name, function)
        return self

    def _telling(self, function: Callable) -> Callable:
        """Returns the function with what it raises of the data marked, so that the coordinator finds it."""

        def told(*arguments):
            try:
                return function(*arguments)
            except SourceError as error:
                raise SourceError(f"[source] {self._task}: {' '.join(str(error).split())} [end]") from None

        return told

    def _describe(self) -> list[np.ndarray]:
        with self._lock:
            return [np.array([json.dumps(describe(each)) for each in self._all()], object)]

    def _read(self, wanted: bytes, indices: np.ndarray, ahead: np.ndarray) -> list[np.ndarray]:
        with self._lock:
            if wanted not in self._found:
                self._found[wanted] = self._find(json.loads(wanted))
            reads, chunks = self._found[wanted]
        return as_stored(chunks.read(indices, ahead) if chunks else reads.read(indices), reads.source.stored_spec)

    def _find(self, wanted: dict) -> tuple[Reads, Chunks | None]:
        found = [describe(each) for each in self._all()]
        if wanted["source"] not in found:
            raise SourceError(difference(wanted["source"], found))
        reads = Reads(self._all()[found.index(wanted["source"])])
        return reads, Chunks(reads, *wanted["chunks"]) if wanted["chunks"] else None

    def _all(self) -> Sequence[Source]:
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded


def describe(source: Source) -> dict:
    """Returns what tells a source from another, as JSON has it."""
    layout = tf.nest.map_structure(lambda spec: f"{spec.dtype.name} {[*spec.shape]}", source.element_spec)
    return {"examples": len(source), "layout": str(layout), "files": zlib.crc32(source.identity().encode())}


def difference(wanted: dict, found: Sequence[dict]) -> str:
    """Says how the sources that were `found` by a task differ from the coordinator's, none being `wanted`."""
    same_size = [each for each in found if each["examples"] == wanted["examples"]]
    same_layout = [each for each in same_size if each["layout"] == wanted["layout"]]
    if not found:
        what = "its data is in memory, and the coordinator's in files"
    elif not same_size:
        sizes = " and ".join(f"{each['examples']:,}" for each in found)
        what = f"its files have {sizes} examples, and the coordinator's {wanted['examples']:,}"
    elif not same_layout:
        what = f"its examples are {same_size[0]['layout']}, and the coordinator's {wanted['layout']}"
    else:
        what = "its files have as many examples as the coordinator's, and other contents"
    return f"{what}; give all tasks the same files, and the same command line"


def failure(error: BaseException) -> str | None:
    """Returns the line with which a task's source has failed, if an error says so."""
    found = _SAID.search(str(error)) if isinstance(error, tf.errors.OpError) else None
    return found[1] if found else None


def read(source: Source, order: Order, indices: tf.Tensor, step: tf.Tensor):
    """Reads examples in the process that runs this: nest of tensors [n, ...] as `source.stored_spec` says. In a graph.

    Args:
      source: the coordinator's.
      order: of its examples, with blocks of one step.
      indices: [n] int64.
      step: the first one's that they are for, by which chunks are read ahead.
    """
    chunks, ahead = None, tf.zeros([0], tf.int64)
    if isinstance(order, ChunkedOrder):
        chunks, ahead = [order.chunk_examples, order.chunks_to_keep], order.chunks_ahead(step)
    wanted = tf.constant(json.dumps({"source": describe(source), "chunks": chunks}))
    return packed(
        called_by_name(_READ, (wanted, indices, ahead), stored_dtypes(source.stored_spec)), source.stored_spec
    )


def check(sources: Sequence[Source], workers: Sequence[str], timeout_seconds: float) -> None:
    """Compares each worker's sources with the coordinator's.

    Args:
      sources: the coordinator's.
      workers: their addresses.
      timeout_seconds: to answer in, `FIRST_CALL_FACTOR` times, as a worker then opens its files; 0 waits for ever.

    Raises:
      SourceError: a worker's differ, or can't be read.
      LostPeerError: a worker does not answer.
    """
    answers: list[list | Exception | None] = [None] * len(workers)
    end = time.monotonic() + FIRST_CALL_FACTOR * timeout_seconds

    def ask(worker: int) -> None:
        while answers[worker] is None:
            try:
                with tf.device(f"/job:worker/task:{worker}/device:CPU:0"):
                    answers[worker] = [
                        json.loads(each) for each in called_by_name(_DESCRIBE, (), [tf.string])[0].numpy()
                    ]
            except (tf.errors.UnavailableError, tf.errors.AbortedError):  # it is started again
                time.sleep(_PAUSE_SECONDS)
            except Exception as error:  # reaches the thread that waits
                answers[worker] = error

    # Daemons: the process must not wait for a thread that waits for a stopped worker.
    asked = [threading.Thread(target=ask, args=(worker,), daemon=True) for worker in range(len(workers))]
    for thread in asked:
        thread.start()
    for worker, thread in enumerate(asked):
        thread.join(max(0.0, end - time.monotonic()) if timeout_seconds else None)
        found, name = answers[worker], f"worker {worker} ({workers[worker]})"
        if found is None:
            raise LostPeerError(
                f"{name} has not opened its files for {FIRST_CALL_FACTOR:g} times `step_timeout_seconds`="
                f"{timeout_seconds:g}; see whether it is there, and reaches them"
            )
        if isinstance(found, Exception):
            if line := failure(found):
                raise SourceError(line) from found
            raise found
        for source in sources:
            if describe(source) not in found:
                raise SourceError(f"{name}: {difference(describe(source), found)}")
