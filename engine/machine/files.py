"""Reads and writes files safely: only regular files, completely or not at all.

Whoever can write to a folder may put a link, a pipe or a device where a file is expected. So new files get
unpredictable names and then replace whatever is there; files to read or append to are checked after opening.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from .. import logging
from ..errors import UsageError

# Errors of a file system without fsync: for folders (CIFS, vboxsf, some FUSE ones), or for any file.
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_NO_RENAME = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)  # object stores as file systems
_RANDOM_BYTES = 8
_SHARED_SECONDS = 10.0  # for which a file that another host has made may stay unseen here
_MOST_JSON_BYTES = 1 << 28  # twice a manifest of a million variables
_SUFFIX = ".tmp"


def open_regular(
    path: str | os.PathLike, flags: int = os.O_RDONLY, folder: int | None = None, mode: int = 0o666
) -> int:
    """Opens a regular file, creating it with O_CREAT; never blocks, e.g. on a pipe.

    Follows links only for reading, without O_NOFOLLOW. Returns the descriptor. Raises OSError, also for other files.

    Args:
      folder: the descriptor of the folder of a relative path.
      mode: the permissions of a new file, before the umask.
    """
    if flags & (os.O_WRONLY | os.O_RDWR):
        flags |= os.O_NOFOLLOW
    at = {} if folder is None else {"dir_fd": folder}
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode, **at)
    except OSError as error:
        if error.errno == errno.ELOOP and flags & os.O_NOFOLLOW:
            raise OSError(errno.ELOOP, "it is a link", os.fspath(path)) from None
        if error.errno == errno.ENXIO:  # a pipe without a reader, or a socket
            raise _irregular(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _irregular(path)
    return descriptor


def open_lock(path: str | os.PathLike, flags: int = os.O_RDWR) -> int:
    """Opens a file to lock, creating it; other users' need only be readable. Returns its descriptor; raises OSError.

    Whoever can open it can lock it. So of this user's file that is only who may write to its folder.
    """
    folder = os.stat(os.path.dirname(path) or os.curdir).st_mode
    mode = 0o600 | (0o060 if folder & stat.S_IWGRP else 0) | (0o006 if folder & stat.S_IWOTH else 0)
    try:
        descriptor = open_regular(path, flags | os.O_CREAT, mode=mode)
    except PermissionError:
        return open_regular(path)
    status = os.fstat(descriptor)
    if status.st_mode & 0o666 & ~mode and status.st_uid == os.geteuid() and status.st_nlink == 1:
        with contextlib.suppress(OSError):  # a file system without permissions
            os.fchmod(descriptor, status.st_mode & mode)
    return descriptor


@contextlib.contextmanager
def folder_below(path: str | os.PathLike, name: str) -> Iterator[int]:
    """Yields the descriptor of the folder `name` below the folder `path`; raises OSError if a link is on the way.

    Files opened by name in it, with O_NOFOLLOW, are below `path`, whatever is renamed meanwhile.

    Args:
      path: path that the user gave, which may be a link.
      name: path from there, of one or several folders; "" is the folder itself.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    opened = os.open(path or os.curdir, flags)
    try:
        for part in filter(None, name.split(os.sep)):
            try:
                inner = os.open(part, flags | os.O_NOFOLLOW, dir_fd=opened)
            except NotADirectoryError:
                if stat.S_ISLNK(os.stat(part, dir_fd=opened, follow_symlinks=False).st_mode):
                    raise OSError(errno.ELOOP, "it is a link", os.path.join(path, name)) from None
                raise
            os.close(opened)
            opened = inner
        yield opened
    finally:
        os.close(opened)


def _irregular(path: str | os.PathLike) -> OSError:
    return OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))


def read_json(
    path: str | os.PathLike,
    parse_constant: Callable[[str], Any] | None = None,
    flags: int = os.O_RDONLY,
    most_bytes: int = _MOST_JSON_BYTES,
    folder: int | None = None,
) -> Any:
    """Reads JSON, in UTF-8, from a regular file. Raises OSError, and ValueError if it is not JSON.

    Args:
      parse_constant: the function for NaN and Infinity, as in `json.load`.
      most_bytes: the limit; more are a ValueError.
      folder: the descriptor of the folder of a relative path.
    """
    with open(open_regular(path, flags, folder), "rb") as file:
        if os.fstat(file.fileno()).st_size > most_bytes:
            raise UsageError(f"it has more than {most_bytes >> 20} MiB")
        try:
            return json.loads(file.read().decode(), parse_constant=parse_constant)
        except RecursionError:
            raise UsageError("its brackets are nested too deep") from None


def write_text(path: str | os.PathLike, text: str) -> None:
    """Replaces whatever is at `path` by a text in UTF-8, after it is completely on disk. Raises OSError."""
    with new_file(path) as file:
        file.write(text.encode())


@contextlib.contextmanager
def new_file(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """Yields a file that replaces whatever is at `path` if the body succeeds, after it is completely on disk.

    It is opened once: a link that somebody puts in its place meanwhile is not followed. Raises OSError.
    """
    with _replacing(path, make_file) as (temporary, descriptor), open(descriptor, "r+b", closefd=False) as file:
        yield file
        file.flush()
        _sync(descriptor, temporary)


def append(descriptor: int, content: bytes) -> None:
    """Appends to an open file, all or nothing, also on a nearly full disk. Raises OSError."""
    end = os.fstat(descriptor).st_size
    try:
        while content:
            content = content[os.write(descriptor, content) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, end)
        raise


def sync(path: str | os.PathLike) -> None:
    """Waits until a file, or a folder's entries, are on disk, if the file system can. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _sync(descriptor, path)
    finally:
        os.close(descriptor)


def _sync(descriptor: int, path: str | os.PathLike) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            mount = os.path.realpath(path)
            while not os.path.ismount(mount):
                mount = os.path.dirname(mount)
            _warn_not_synced(mount)


@functools.cache
def _warn_not_synced(mount: str) -> None:
    logging.warning(
        "the file system at %s can't wait until a file is on its disk (no fsync); the run continues, but what was "
        "written last may be lost if the machine fails",
        mount,
    )


@contextlib.contextmanager
def replacing(path: str | os.PathLike, make: Callable[[str], int]) -> Iterator[str]:
    """Yields the path of a new file beside `path`; it replaces `path` if the body succeeds, else it is removed.

    Devices are not replaced. Removes leftovers of killed processes, whose locks are free, first. Raises OSError.

    Args:
      make: creates and opens a file or a folder at a path that must not exist: `make_file`, `make_folder`.
    """
    with _replacing(path, make) as (temporary, _):
        yield temporary


@contextlib.contextmanager
def _replacing(path: str | os.PathLike, make: Callable[[str], int]) -> Iterator[tuple[str, int]]:
    folder, name = os.path.split(os.fspath(path))
    with contextlib.suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            raise OSError(errno.EINVAL, "it is a device", os.fspath(path))
    _clean_up(folder or os.curdir, name)
    temporary, lock = _make_locked(os.path.join(folder, name), make)
    try:
        with naming(path):
            yield temporary, lock
        try:
            os.replace(temporary, path)
        except OSError as error:
            if error.errno in _NO_RENAME:
                error.strerror = "its file system can't rename; use a folder of another, and copy the files afterwards"
            raise
    except BaseException:
        _remove(temporary)
        raise
    finally:
        # Only now: whoever finds a file unlocked takes it for a killed process's, and removes it.
        os.close(lock)


def file_system_time(folder: str) -> float:
    """Reads the clock by which a folder's files get their times, in Unix seconds: all hosts that share it have one."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:  # it is read-only, or the disk is full
        return time.time()


def temporary_folder() -> str:
    """Returns the folder for temporary files, by the variable TMPDIR or the system's.

    Raises:
      UsageError: no such folder can be written.
    """
    try:
        return tempfile.gettempdir()
    except FileNotFoundError as error:
        raise UsageError(f"{error.strerror}; set the variable TMPDIR to a folder that can be written") from None


def make_cache(folder: str, source: str) -> bool:
    """Makes a folder for caches of what is in a source; returns whether another user can't put anything there.

    In a sticky folder (/tmp is one) anybody may make files, and only their owners and its own change them. So a folder
    there has to be this user's, root's, or that of who may change the source. Elsewhere, who may write owns the
    contents. Raises OSError if it can't be made.
    """
    os.makedirs(folder, exist_ok=True)  # before it is looked at: then nobody else can exchange it
    made, outer = os.lstat(folder), os.stat(os.path.dirname(os.path.abspath(folder)))
    if not (made.st_mode | outer.st_mode) & stat.S_ISVTX:
        return True
    trusted = {os.geteuid(), 0, os.stat(source).st_uid, outer.st_uid}
    return stat.S_ISDIR(made.st_mode) and not made.st_mode & stat.S_ISVTX and made.st_uid in trusted


def private_cache() -> str:
    """Makes this user's own folder for caches in that for temporary files. Raises OSError if it is another user's."""
    folder = os.path.join(temporary_folder(), f"crankshaft-prepared-{os.geteuid()}")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if os.lstat(folder).st_uid != os.geteuid():  # who could choose the contents
        raise PermissionError(errno.EPERM, "it is another user's", folder)
    return folder


@contextlib.contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
    """Adds the file's name to the body's OSError without one, such as a write's."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno:
            error.filename = os.fspath(path)
        raise


def locked_folder(name: str) -> tuple[str, int]:
    """Makes a temporary folder of a name and a random end, which this user alone may read.

    Removes those of the same name that killed processes have left.

    Returns:
      Its path, and a descriptor whose lock lasts as long as this process or a fork of it has it open.
    """
    folder = temporary_folder()
    _clean_up(folder, name)
    return _make_locked(os.path.join(folder, name), lambda path: make_folder(path, 0o700))


def make_file(path: str) -> int:
    """Creates an empty file at a path where nothing exists, not even a link, and opens it. Raises OSError."""
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def make_empty(path: str) -> None:
    """Creates an empty file as `make_file` does."""
    os.close(make_file(path))


def make_folder(path: str, mode: int = 0o777) -> int:
    """Creates a folder at a path where nothing exists, and opens it. Raises OSError."""
    os.mkdir(path, mode)
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _make_locked(path: str, make: Callable[[str], int]) -> tuple[str, int]:
    """Makes a temporary file or folder; returns its path and a descriptor with its lock, which `_clean_up` respects."""
    while True:
        temporary = f"{path}.{secrets.token_hex(_RANDOM_BYTES)}{_SUFFIX}"
        try:
            lock = make(temporary)
        except FileNotFoundError:
            os.stat(os.path.dirname(path) or os.curdir)  # raises it again if the folder around is gone
            continue  # another process removed a folder before it was opened
        is_held = False
        try:
            # Without waiting: whoever may read it may have locked it first, for ever.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_held = True
        except OSError:  # a file system without locks: nothing is removed there either
            pass
        if not is_held and os.path.lexists(temporary):
            return temporary, lock
        os.close(lock)
        _remove(temporary)


def _clean_up(folder: str, name: str) -> None:
    ours = re.compile(re.escape(name) + rf"\.[0-9a-f]{{{2 * _RANDOM_BYTES}}}" + re.escape(_SUFFIX))
    for path in (os.path.join(folder, entry) for entry in os.listdir(folder) if ours.fullmatch(entry)):
        with contextlib.suppress(OSError):  # its process lives, and has the lock
            lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path)
            finally:
                os.close(lock)


def _remove(path: str) -> None:
    """Removes a file or a whole folder, but no link to one; ignores what can't be removed."""
    with contextlib.suppress(OSError):
        if os.path.isdir(path):
            shutil.rmtree(path)
        else:
            os.remove(path)


def appears(path: str) -> bool:
    """Returns whether a file becomes visible here soon: a network file system may cache that it did not exist."""
    end = time.monotonic() + _SHARED_SECONDS
    while not os.path.exists(path):
        if time.monotonic() >= end:
            return False
        with contextlib.suppress(OSError):
            os.listdir(os.path.dirname(path))  # which queries the server
        time.sleep(0.1)
    return True
