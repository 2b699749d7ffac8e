"""Write any input's examples into shards that are read by their indices.

For example:

  crankshaft prepare --input=digits --output_dir=shards/digits
  crankshaft prepare --input=csv --data_dir=logs/*.csv --output_dir=shards/logs
  crankshaft train --model=mlp --input=tfrecord --data_dir=shards/digits

Examples keep their order, types and values, so a run on the shards trains as one on the input itself does. A call that
was interrupted is taken up again by the same call: shards that are whole are kept.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import functools
import multiprocessing
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any

from ..engine.errors import UnavailableError
from ..engine.machine import cpus
from ..input.records.shard_writing import Shard, ShardRequest
from ..runner import terminal
from ..runner.command_line import command_flags, parsing, registry, user_files
from ..runner.command_line.rules import ARGUMENT, FilePaths, Integer, OneOf, Path, flag
from ..runner.failures import UsageError
from ..runner.host import process, startup

if TYPE_CHECKING:
    from ..runner.data.writing_shards import Loaded

_PR_SET_PDEATHSIG = 1  # prctl(2)
_SAFE_PATH = "PYTHONSAFEPATH"  # Python 3.11's
_task: list[Any] = []  # in a process of the pool: the request, and its loaded data
_Written = Iterator[tuple[Shard, dict[str, int]]]


@dataclasses.dataclass(kw_only=True)
class PrepareFlags:
    """The values of a command line."""

    input: str | None = flag(user_files.Module(), None, "Input to write, or a .py file with a function load.")
    input_arg: Mapping[str, Any] = flag(ARGUMENT, {}, "Argument of the input. Repeatable.")
    data_dir: str | None = flag(FilePaths(), None, "Files of the input, as for crankshaft train.")
    eval_data_dir: str | None = flag(FilePaths(), None, "Files of the evaluation data.")
    seed: int = flag(Integer(0), 0, "Seed of the input.")
    output_dir: str | None = flag(Path(), None, "Folder of the shards: they are written to its folders train and eval.")
    shards: int = flag(
        Integer(1), 16, "Shards of the training data; those of the evaluation data have as many examples each."
    )
    format: str = flag(OneOf(("tfrecord", "array_record")), "tfrecord", "Format of the shards.")
    processes: int | None = flag(Integer(1, 1000), None, "Processes that write shards; default: one per core.")


def main(argv: list[str]) -> int:
    """Writes shards by the command line."""
    flags, _ = command_flags.read(argv, PrepareFlags, "crankshaft prepare --input=... --output_dir=... [flags]")
    if not flags.output_dir:
        raise UsageError("--output_dir is missing; name a folder for the shards")
    entry = registry.find("input", flags.input)
    arguments: Mapping[str, Any] = registry.coerce_arguments("input_arg", flags.input_arg, entry)
    if flags.eval_data_dir and not entry.reads_eval_data:
        raise UsageError(f"eval_data_dir is not read by input={entry.name}; leave it out")
    if (
        "allow_outside" in entry.defaults
    ):  # of an input that reads lists of files: shards are copies, for others to read
        arguments = {"allow_outside": False, **arguments}
    process.prepare(tunes_allocator=False)
    with startup.quiet_startup(quiet=False):
        from ..runner.data import writing_shards

    request = ShardRequest(
        input=str(flags.input),  # `find` refuses none
        arguments={**arguments, **({"eval_data_dir": flags.eval_data_dir or ""} if entry.reads_eval_data else {})},
        data_dir=flags.data_dir,
        seed=flags.seed,
        output_dir=flags.output_dir,
        shards=flags.shards,
        format=flags.format,
    )
    write_all = functools.partial(_write_all, request, flags.processes or max(1, int(cpus.usable_cores())))
    summary = writing_shards.prepare(request, write_all, _print)
    words = shlex.join(parsing.to_words({"input": flags.format, "data_dir": flags.output_dir}))
    _print(f"{summary}; train on it by crankshaft train {words}")
    return 0


def _print(line: str) -> None:
    print(terminal.fitted(f"[prepare] {line}", sys.stdout), flush=True)


def _write_all(request: ShardRequest, processes: int, loaded: Loaded, left: list[Shard]) -> _Written:
    """Yields each shard once it is written, with its counts.

    Several processes are fresh ones, each with the input loaded by itself.

    Raises:
      UsageError: an example can't be read.
      OSError: a file can't be written, or a process was killed.
    """
    processes = min(processes, len(left))
    if processes <= 1:
        from ..runner.data import writing_shards

        yield from ((shard, writing_shards.write(request, loaded, shard)) for shard in left)
        return
    context = multiprocessing.get_context("spawn")  # a process with TensorFlow's threads can't be forked
    before = os.environ.get(_SAFE_PATH)
    # Until they have started: they find modules by this process's path, not first in the folder of the call.
    os.environ[_SAFE_PATH] = "1"
    try:
        pool = concurrent.futures.ProcessPoolExecutor(processes, context, _start_worker, (request, before))
        shards_by_future = {pool.submit(_write, shard): shard for shard in left}
    finally:
        _set_safe_path(before)
    try:
        for future in concurrent.futures.as_completed(shards_by_future):
            yield shards_by_future[future], future.result()
    except BrokenProcessPool:
        raise OSError("a process that wrote shards was killed (out of memory?); use fewer --processes") from None
    finally:
        # After an error or Ctrl-C, which they leave to this process: else each would finish its shard first.
        for worker in [*(pool._processes or {}).values()]:
            worker.kill()
        pool.shutdown(cancel_futures=True)


def _set_safe_path(value: str | None) -> None:
    os.environ.pop(_SAFE_PATH, None)
    if value is not None:
        os.environ[_SAFE_PATH] = value


def _start_worker(request: ShardRequest, safe_path: str | None) -> None:
    """Makes a process of the pool ready. It ends with its parent, to whom Ctrl-C is left."""
    _set_safe_path(safe_path)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    process.prepare(tunes_allocator=False)
    _task[:] = [request]


def _write(shard: Shard) -> dict[str, int]:
    """Writes a shard, in a process of the pool."""
    with startup.quiet_startup(quiet=True):
        from ..runner.data import writing_shards
    try:
        if len(_task) == 1:  # the process's first shard
            _task.append(writing_shards.load(_task[0]))
        return writing_shards.write(_task[0], _task[1], shard)
    except UnavailableError as error:
        raise OSError(str(error)) from None
    except UsageError as error:
        raise UsageError(error.message) from None  # which is made of its line alone, and so can be sent
