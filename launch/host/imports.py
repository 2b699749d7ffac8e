"""The imports of TensorFlow and Keras, most of a process's start time."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import ClassVar, NoReturn


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """Disables garbage collection within: it would visit a million objects of imports, which stay, again and again."""
    collects, starts = gc.isenabled(), "tensorflow" not in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if starts and not gc.get_freeze_count():  # else another program has configured the collector
            gc.freeze()
            gc.unfreeze()  # moves all objects to the oldest generation, which is seldom collected
        if collects:
            gc.enable()


@functools.cache  # counting frozen objects takes a time proportional to their number
def keep() -> None:
    """Excludes all current objects, mainly modules, from garbage collection: for a process that the run owns."""
    if not gc.get_freeze_count():
        gc.freeze()


# Variables that libraries read as they are imported, and those of the same form that only TensorFlow's runtime reads.
_READ_AT_IMPORT = re.compile(r"(KERAS|TF2?|OMP|OPENBLAS|GOTO|MKL|NPY|NUMPY|HDF5|GRPC|ARROW|PANDAS|PROTOCOL_BUFFERS)_")
_READ_LATER = re.compile(r"TF_(CONFIG|XLA_|NUM_|GPU_|FORCE_GPU_|DETERMINISTIC_|CUDNN_|NODE_)")


def watch(command: Sequence[str]) -> None:
    """Restarts a program as a new Python once it would import other modules, or sets a variable that imports read.

    For a fork of a process that has imported TensorFlow, before its program begins. A variable that a library has read
    as it was imported can be set until `watch_no_more`.
    """
    _Watched.process, _Watched.start = os.getpid(), ([*command], dict(os.environ), os.getcwd())
    os.environ.__class__ = _Watched
    names = {name.removesuffix(".py") for name in os.listdir(sys.path[0]) if name.endswith(".py")}
    names |= {name for name in os.listdir(sys.path[0]) if os.path.isfile(f"{sys.path[0]}/{name}/__init__.py")}
    for name in names & sys.modules.keys():
        if not (getattr(sys.modules[name], "__file__", None) or "").startswith(os.path.join(sys.path[0], "")):
            start_again(f"{name} in {sys.path[0]} is another module than the one imported")


def watch_no_more() -> None:
    """Ends `watch`."""
    if isinstance(os.environ, _Watched):
        os.environ.__class__ = _Watched.__base__


class _Watched(type(os.environ)):  # type: ignore[misc]
    process: ClassVar[int]
    start: ClassVar[tuple[list[str], dict[str, str], str]]

    def __setitem__(self, name: str, value: str) -> None:
        self._check(name, value)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        self._check(name, None)
        super().__delitem__(name)

    def _check(self, name: str, value: str | None) -> None:
        if self.get(name) == value or self.process != os.getpid():
            return
        if _READ_AT_IMPORT.match(name) and not _READ_LATER.match(name):
            start_again(f"{name} is set after the libraries that read it were imported")


def start_again(why: str) -> NoReturn:
    """Replaces this watched program by a new Python, which starts it from its beginning."""
    print(f"{why}: the program starts again, and imports TensorFlow itself", flush=True)
    sys.stderr.flush()
    command, variables, folder = _Watched.start
    os.chdir(folder)
    os.execve(command[0], command, variables)
