"""Filters the notes that TensorFlow prints as it is imported and starts. Imports nothing of the package."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
import warnings
from collections.abc import Iterator
from typing import NoReturn

_OVER = re.compile(r"Timeout \(([0-9:]+)")  # faulthandler's, before the stacks with which it ends a process that hangs
_END = b"\0end of TensorFlow's start\0\n"
_CLOSED_MILLISECONDS = 100
_NOT_JOINED = (
    "error: TensorFlow has not joined the cluster within {} (hours:minutes:seconds), as where a task ends just after "
    "all have come; look at the other tasks' output, and start all of them again\n"
)
# TensorFlow's lines at each start on a machine without a GPU; of no use to users who did not request one.
_NOISE = re.compile(
    r"oneDNN custom operations are on|Could not find cuda drivers|failed call to cuInit|cuda_diagnostics"
    r"|All log messages before absl::InitializeLog|To enable the following instructions|Compiled cluster using XLA"
    r"|Unable to register cu\w+ factory|computation placer already registered"
    r"|XLA service .* initialized|StreamExecutor device|This TensorFlow binary is optimized|Input of GeneratorDatasetOp"
)


@contextlib.contextmanager
def filtered_stderr() -> Iterator[None]:
    """Writes what comes to descriptor 2 within, less the noise, to where it goes outside."""
    sys.stderr.flush()
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # NumPy has threads; the child calls nothing of it
        child = os.fork()
    if not child:
        os.close(writing)
        _relay(reading)
    os.close(reading)
    stderr = os.dup(2)
    os.dup2(writing, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(stderr, 2)
        os.close(stderr)
        with contextlib.suppress(OSError):  # it has been killed
            os.write(writing, _END)
        os.close(writing)
        os.waitpid(child, 0)


def _relay(reading: int) -> NoReturn:
    """Writes to standard error what is read, less the noise, until `_END`; then ends the process.

    Programs that were started meanwhile have the pipe as their standard error: what they write later, a process of its
    own relays. Of a start that takes too long, see `rendezvous.limited`, a line instead of the stacks.
    """
    try:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):  # the other process's, which ends this one
            signal.signal(number, signal.SIG_IGN)
        with open(reading, "rb") as lines:
            for line in lines:
                is_end = line.endswith(_END)
                line = line.removesuffix(_END)
                if over := _OVER.match(line.decode(errors="replace")):
                    os.write(2, _NOT_JOINED.format(over[1]).encode())
                    lines.read()  # the stacks, which do not help a user
                elif line.strip() and not _NOISE.search(line.decode(errors="replace")):
                    os.write(2, line)
                if is_end:  # others may have the pipe open, which POLLHUP, always reported, shows in a moment
                    poll = select.poll()
                    poll.register(reading, 0)
                    if not poll.poll(_CLOSED_MILLISECONDS) and os.fork():
                        break
    finally:
        os._exit(0)
