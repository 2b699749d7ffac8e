"""Processes that write shards, each a fresh one with the input loaded by itself.

Nothing here starts TensorFlow: it is imported without its noise.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import multiprocessing
import signal
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from ...engine.internals.errors import UnavailableError
from ...input.records.shard_writing import Shard, ShardRequest
from ..errors import UsageError
from ..host import process

_PR_SET_PDEATHSIG = 1  # prctl(2)
_here: list[Any] = []  # of a process of the pool: what is asked for, the counter, and what it has loaded


def written(
    request: ShardRequest, left: list[Shard], processes: int, tell: Any
) -> Iterator[tuple[str, dict[str, int]]]:
    """Yields (file, what there is to know of it) of each shard as it is done.

    Args:
      request: what is written.
      left: the shards to write.
      processes: how many.
      tell: counts and says how far it is.

    Raises:
      UsageError: an example can't be read.
      OSError: a file can't be written, or a process was killed.
    """
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", 0)
    pool = concurrent.futures.ProcessPoolExecutor(processes, context, _start, (request, counter))
    try:
        files = {pool.submit(_write, shard): shard.file for shard in left}
        waiting = {*files}
        while waiting:
            ended, waiting = concurrent.futures.wait(waiting, 1, concurrent.futures.FIRST_COMPLETED)
            for future in ended:
                tell.shards += 1
                yield files[future], future.result()
            tell.examples = counter.value
            tell.tell()
    except BaseException as error:
        for each in [*(pool._processes or {}).values()]:
            each.kill()
        if isinstance(error, BrokenProcessPool):
            raise OSError("a process that wrote shards was killed (out of memory?); use fewer --processes") from None
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _start(request: ShardRequest, counter: Any) -> None:
    """Makes a process of the pool ready. It ends with its parent, to whom Ctrl-C is left."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    process.prepare(tunes_allocator=False)
    _here[:] = [request, counter]


def _write(shard: Shard) -> dict[str, int]:
    with process.without_start_up_noise(quiet=True):
        from . import shard_job
    try:
        request, counter = _here[:2]
        if len(_here) == 2:
            _here.append(shard_job.load(request))

        def count(examples: int) -> None:
            with counter.get_lock():
                counter.value += examples

        return shard_job.write(request, _here[2], shard, count)
    except UnavailableError as error:
        raise OSError(str(error)) from None
    except UsageError as error:
        raise UsageError(error.message) from None  # which is made of its line alone, and so can be sent
