"""Locks on file systems with `flock` and without it, such as Lustre and FUSE. Host code; starts no TensorFlow."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from absl import logging

from ..errors import UsageError

NAME = ".lock.owner"
_UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK)


def flock(file: int, operation: int) -> bool:
    """Locks by flock of section 2; returns False where the file system does not support it.

    Raises:
      OSError: any other error, such as BlockingIOError.
    """
    try:
        fcntl.flock(file, operation)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return False
        raise
    return True


@contextlib.contextmanager
def owned(run_dir: str) -> Iterator[None]:
    """Holds run_dir by a file that names its owner and is created exclusively, where `flock` is missing.

    A process that was killed leaves the file behind: the next one on the same host recognises that, one on another host
    cannot.

    Raises:
      UsageError: another process holds it.
    """
    path = Path(run_dir, NAME)
    logging.warning(
        "--run_dir=%s: its file system has no flock; its file %s locks it instead, and has to be removed by hand if "
        "this process is killed and the next one runs on another host",
        run_dir,
        NAME,
    )
    me = f"{os.getpid()} {_began(os.getpid())} {socket.gethostname()}"
    if not _make(path, me) and not _take_over(path, me):
        raise _in_use(path, run_dir)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if path.read_text() == me:
                path.unlink()


def _make(path: Path, owner: str) -> bool:
    """Creates the file; returns False if it exists. open(2) creates it for one process alone, on NFS and Lustre too."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return False
    try:
        os.write(file, owner.encode())
        os.fsync(file)
    finally:
        os.close(file)
    return True


def _take_over(path: Path, owner: str) -> bool:
    """Recreates the file if its owner was a process of this host that has ended.

    Returns False if the owner is alive or unknown, or where another process is taking over.
    """
    if not _is_left_behind(path):
        return False
    only_one = path.with_name(f"{NAME}.taken")
    if not _make(only_one, owner):
        return False
    try:
        if not _is_left_behind(path):  # by now it is another's
            return False
        path.unlink()
        return _make(path, owner)
    finally:
        only_one.unlink()


def _is_left_behind(path: Path) -> bool:
    pid, began, host = _owner(path)
    return host == socket.gethostname() and _began(int(pid)) != began


def _owner(path: Path) -> tuple[str, str, str]:
    """Returns (process, when it began, host) as the file says, with "unknown" for what it does not say."""
    with contextlib.suppress(OSError, ValueError):
        pid, began, host = path.read_text().split()
        if pid.isdecimal():
            return pid, began, host
    return "unknown", "unknown", "unknown"


def _began(pid: int) -> str:
    """Returns when a process of this host began, in ticks since boot; "-" without the process or without /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]  # proc(5), field 22
    except (OSError, IndexError):
        return "-"


def _in_use(path: Path, run_dir: str) -> UsageError:
    pid, _, host = _owner(path)
    return UsageError(
        f"--run_dir={run_dir} is in use by process {pid} on host {host}, as its file {NAME} says; wait for it or end "
        f"it, remove {NAME} if it is no more, or use another --run_dir"
    )
