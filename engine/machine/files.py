"""Reads and writes files safely: regular files only, whole or not at all. Host code.

Whoever may write to a folder may put a link, a pipe or a device in the place of an expected file. So what is written
gets a name that cannot be known before, and replaces whatever is there; what is read or appended to is checked once it
is open.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import UsageError

_RANDOM_BYTES = 8
_MOST_JSON_BYTES = 1 << 28  # a manifest of a million variables has half
_SUFFIX = ".tmp"


def open_regular(path: str | os.PathLike, flags: int = os.O_RDONLY, folder: int | None = None) -> int:
    """Opens a regular file, created with O_CREAT if asked for; never waits, as for a pipe's other end.

    A link is followed where the file is only read, without O_NOFOLLOW. Returns the descriptor. Raises OSError, also for
    what is not a regular file.

    Args:
      path: of the file.
      flags: flags of `os.open`.
      folder: the descriptor of the folder that a relative path is of.
    """
    if flags & (os.O_WRONLY | os.O_RDWR):
        flags |= os.O_NOFOLLOW
    at = {} if folder is None else {"dir_fd": folder}
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, **at)
    except OSError as error:
        if error.errno == errno.ELOOP and flags & os.O_NOFOLLOW:
            raise OSError(errno.ELOOP, "it is a link", os.fspath(path)) from None
        if error.errno == errno.ENXIO:  # a pipe that nobody reads, a socket
            raise _irregular(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _irregular(path)
    return descriptor


@contextlib.contextmanager
def folder_below(path: str | os.PathLike, name: str) -> Iterator[int]:
    """Yields the descriptor of the folder `name` in the folder `path`, unless it is a link. Raises OSError.

    What is opened by its name in this descriptor, with O_NOFOLLOW, is below `path`, whatever is renamed meanwhile.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    outer = os.open(path, flags)
    try:
        inner = os.open(name, flags | os.O_NOFOLLOW, dir_fd=outer)
    finally:
        os.close(outer)
    try:
        yield inner
    finally:
        os.close(inner)


def _irregular(path: str | os.PathLike) -> OSError:
    return OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))


def read_json(
    path: str | os.PathLike,
    parse_constant: Callable[[str], Any] | None = None,
    flags: int = os.O_RDONLY,
    most_bytes: int = _MOST_JSON_BYTES,
) -> Any:
    """Reads JSON, in UTF-8, from a regular file. Raises OSError, and ValueError where it is not JSON.

    Args:
      path: of the file.
      parse_constant: as `json.load` takes it, of NaN and Infinity.
      flags: as `open_regular` takes it.
      most_bytes: that are read; more are a ValueError.
    """
    with open(open_regular(path, flags), "rb") as file:
        if os.fstat(file.fileno()).st_size > most_bytes:
            raise UsageError(f"it has more than {most_bytes >> 20} MiB")
        try:
            return json.loads(file.read().decode(), parse_constant=parse_constant)
        except RecursionError:
            raise UsageError("its brackets are nested too deep") from None


def write_text(path: str | os.PathLike, text: str) -> None:
    """Replaces whatever is at `path` by a text in UTF-8, once all of it is on the disk. Raises OSError."""
    with replacing(path, make_file) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def append(descriptor: int, content: bytes) -> None:
    """Appends to an open file, all or nothing: of a disk that is almost full a part is written. Raises OSError."""
    end = os.fstat(descriptor).st_size
    try:
        while content:
            content = content[os.write(descriptor, content) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, end)
        raise


def sync(path: str | os.PathLike) -> None:
    """Waits until a file, or the names in a folder, are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: str | os.PathLike, make: Callable[[str], None], name: str | None = None) -> Iterator[str]:
    """Yields the path of a new file beside `path`, which replaces it if the body succeeds, and is removed if not.

    A device is not replaced. Leftovers of killed processes, whose locks are free, are removed first. Raises OSError.

    Args:
      path: the path of the result.
      make: makes a file or a folder at the path that it is given, which must not exist: `make_file`, `os.mkdir`.
      name: the beginning of the new file's name, if not that of `path`.
    """
    folder = os.path.dirname(os.fspath(path))
    name = name or os.path.basename(os.fspath(path))
    _check_replaceable(path)
    _clean_up(folder or os.curdir, name)
    temporary, lock = _make_locked(os.path.join(folder, name), make)
    try:
        with naming(path):
            yield temporary
        os.replace(temporary, path)
    except BaseException:
        _remove(temporary)
        raise
    finally:
        os.close(lock)


def _check_replaceable(path: str | os.PathLike) -> None:
    with contextlib.suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            raise OSError(errno.EINVAL, "it is a device", os.fspath(path))


@contextlib.contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
    """Names the file in an OSError of the body's that names none, as one of a write does."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno:
            error.filename = os.fspath(path)
        raise


def make_file(path: str) -> None:
    """Makes an empty file at a path where nothing exists, not even a link. Raises OSError."""
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666))


def _make_locked(path: str, make: Callable[[str], None]) -> tuple[str, int]:
    """Makes a temporary file or folder; returns its path and a descriptor with its lock, which `_clean_up` respects."""
    while True:
        temporary = f"{path}.{secrets.token_hex(_RANDOM_BYTES)}{_SUFFIX}"
        make(temporary)
        with contextlib.suppress(FileNotFoundError):  # another process swept it before it was locked
            lock = os.open(temporary, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with contextlib.suppress(OSError):  # a file system without locks: nothing is swept there either
                fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.lexists(temporary):
                return temporary, lock
            os.close(lock)


def _clean_up(folder: str, name: str) -> None:
    ours = re.compile(re.escape(name) + rf"\.[0-9a-f]{{{2 * _RANDOM_BYTES}}}" + re.escape(_SUFFIX))
    for entry in os.listdir(folder):
        if ours.fullmatch(entry):
            with contextlib.suppress(OSError):
                _remove_unless_locked(os.path.join(folder, entry))


def _remove_unless_locked(path: str) -> None:
    lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(path)
    finally:
        os.close(lock)


def _remove(path: str) -> None:
    """Removes a file or a whole folder that is not a link; what can't be removed stays."""
    with contextlib.suppress(OSError):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.remove(path)
