"""Imports and starts TensorFlow: quietly, and not where it would crash."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from importlib import import_module
from pathlib import Path

from ...engine.machine import cpus
from ...engine.machine.files import temporary_folder
from ...engine.machine.threads import PROCESS
from ..failures import UsageError
from . import imports
from .forks import refuse_forked_start

# Address space for TensorFlow's threads and XLA, and for each core: two threads' stacks, and an arena of glibc's. Of
# 20 steps of mlp on two cores it is 850 MB, and 1,300 MB with XLA.
_STARTED_BYTES, _BYTES_PER_CORE = 1 << 30, 80 << 20


@contextlib.contextmanager
def quiet_startup(quiet: bool = False):
    """Keeps TensorFlow's notes on a start without a GPU from standard error; other lines come at the end.

    For its import and its first look for devices. `quiet` also suppresses TensorFlow's errors from then on, unless
    TF_CPP_MIN_LOG_LEVEL is set: they come as exceptions as well, and where a peer is lost there are pages of them.

    Threads take turns: the second finds TensorFlow imported.

    Raises:
      UsageError: see `refuse_forked_start`; or a limit of address space is too low.
    """
    refuse_forked_start()
    with PROCESS:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3" if quiet else "1")
        if "tensorflow" in sys.modules and import_module("crankshaft.engine.internals.tensorflow").has_started():
            yield  # its notes are behind
        else:
            with imports.without_notes(), imports.uncollected():
                yield
            refuse_small_address_space()


def refuse_small_address_space() -> None:
    """Raises `UsageError` where TensorFlow, once imported, could not start its threads, but would crash."""
    limit, (size, *_) = resource.getrlimit(resource.RLIMIT_AS)[0], cpus.lines(Path("/proc/self/statm")) or [""]
    if limit == resource.RLIM_INFINITY or not size:
        return
    used = int(size.split()[0]) * os.sysconf("SC_PAGE_SIZE")
    needed = _STARTED_BYTES + _BYTES_PER_CORE * (os.cpu_count() or 1)
    if limit - used < needed:
        raise UsageError(
            f"ulimit -v allows {limit >> 20:,} MiB of address space, and a run needs {used + needed >> 20:,} or more "
            "for TensorFlow and its threads; raise it, and limit memory by a control group instead"
        )


def import_tensorflow(*dependents: str) -> None:
    """Imports TensorFlow, and modules that need it, for a script before its flags are parsed.

    As noisy as in its run: quiet for a worker. Raises `UsageError`, as `prepare` does, without temporary files.
    """
    temporary_folder()
    with quiet_startup(quiet="TF_CONFIG" in os.environ and not {"--debug", "-debug"} & {*sys.argv}):
        for name in ("tensorflow", *dependents):
            import_module(name)
