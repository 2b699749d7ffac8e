"""The imports of TensorFlow and Keras, most of a process's start time."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import linecache
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pkgutil import walk_packages
from typing import NamedTuple, NoReturn, TextIO

from ...engine.errors import as_line

# TensorFlow's lines as it is imported, and first looks for devices, on a machine without a GPU.
_NOTES = re.compile(
    rb"oneDNN custom operations are on|Could not find cuda drivers|failed call to cuInit|cuda_diagnostics"
    rb"|All log messages before absl::InitializeLog|To enable the following instructions"
    rb"|This TensorFlow binary is optimized"
)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disables garbage collection within: it would visit a million objects of imports, which stay, again and again."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def import_whole(names: Iterable[str]) -> None:
    """Imports modules, and all below those that are folders of this package; keeps the source of its modules.

    Once: later, and in a fork, its files may be another version's.
    """
    for name in names:
        _import_whole(name)
    for module in [module for name, module in sys.modules.items() if name.startswith("crankshaft.")]:
        path = getattr(module, "__file__", None) or ""
        if lines := linecache.getlines(path, vars(module)):  # AutoGraph reads a function's source as it is traced
            linecache.cache[path] = sum(map(len, lines)), None, lines, path  # without a time it is not read again


@functools.cache
def _import_whole(name: str) -> None:
    folder = getattr(import_module(name), "__path__", ())
    for module in walk_packages(folder, f"{name}.") if name.startswith("crankshaft.") else ():
        import_module(module.name)


@contextlib.contextmanager
def without_notes() -> Iterator[None]:
    """Holds back what libraries write to descriptor 2 within, and writes it at the end, less TensorFlow's notes.

    No level of TF_CPP_MIN_LOG_LEVEL hides those that come before TensorFlow reads it. What Python writes to standard
    error, such as a line of another thread, is not held back.
    """
    stderr = _other_stderr()
    os.dup2(2, stderr.fileno(), inheritable=False)
    is_usual = isinstance(sys.stderr, io.TextIOWrapper) and sys.stderr.fileno() == 2  # not a notebook's, or a test's
    if is_usual:
        sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            with contextlib.redirect_stderr(stderr) if is_usual else contextlib.nullcontext():
                yield
        finally:
            os.dup2(stderr.fileno(), 2)
            file.seek(0)
            for line in file:
                if line.strip() and not _NOTES.search(line):
                    os.write(2, line)


@functools.cache
def _other_stderr() -> TextIO:
    """Opens standard error a second time; for good, as a library may keep the stream (`logging.StreamHandler`)."""
    return open(os.dup(2), "w", 1, getattr(sys.stderr, "encoding", None), "backslashreplace")


# Variables that libraries read as they are imported, and those of the same form that only TensorFlow's runtime reads.
_READ_AT_IMPORT = re.compile(r"(KERAS|TF2?|OMP|OPENBLAS|GOTO|MKL|NPY|NUMPY|HDF5|GRPC|ARROW|PANDAS|PROTOCOL_BUFFERS)_")
_READ_LATER = re.compile(r"TF_(CONFIG|XLA_|NUM_|GPU_|FORCE_GPU_|DETERMINISTIC_|CUDNN_|NODE_)")


class _Start(NamedTuple):
    """How a program began in a fork of a process that has imported TensorFlow."""

    pid: int
    command: list[str]
    environment: Mapping[str, str]
    folder: str


_start: _Start | None = None


def has_working_folder() -> bool:
    """Returns whether this process imports modules from its working folder, as by `python -m`."""
    return sys.path[0] in ("", os.getcwd())


def own_python() -> list[str]:
    """Returns the words that start a Python for modules of Crankshaft's own.

    Modules of the working folder, which may be of unpacked data, count there only if they do in this process.
    """
    return [sys.executable, *([] if has_working_folder() or sys.version_info < (3, 11) else ["-P"])]


def note_start(command: Sequence[str], folder: str | None) -> None:
    """Notes how a program begins in this fork of a process that has imported TensorFlow.

    The program starts again as a new Python if a module in its own folder has an imported one's name.
    """
    global _start
    _start = _Start(os.getpid(), [*command], dict(os.environ), os.getcwd())
    entries = os.listdir(folder) if folder else []
    names = {name.removesuffix(".py") for name in entries if name.endswith(".py")}
    names |= {name for name in entries if os.path.isfile(f"{folder}/{name}/__init__.py")}
    for name in names & sys.modules.keys():
        if not (getattr(sys.modules[name], "__file__", None) or "").startswith(os.path.join(folder or "", "")):
            start_again(f"{name} in {folder} is another module than the one imported")


def check_variables() -> None:
    """Starts this program again as a new Python if it has set a variable that libraries had read before its fork.

    Once, before Crankshaft sets such variables itself.
    """
    global _start
    if _start and _start.pid == os.getpid():  # else a process that the program has forked
        for name in sorted(_start.environment.keys() | os.environ.keys()):
            has_effect = _READ_AT_IMPORT.match(name) and not _READ_LATER.match(name)
            if has_effect and os.environ.get(name) != _start.environment.get(name):
                start_again(f"{name} is set after the libraries that read it were imported")
    _start = None


def start_again(why: str) -> NoReturn:
    """Replaces this fork by a new Python, which starts its program from the beginning."""
    assert _start
    print(as_line(f"{why}: the program starts again, and imports TensorFlow itself"), flush=True)
    sys.stderr.flush()
    os.chdir(_start.folder)
    os.execve(_start.command[0], _start.command, _start.environment)
