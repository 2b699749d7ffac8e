"""The lock on a run's folder, which one process holds."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import SoftFileLock, Timeout, lock_descriptor

from ...engine import logging
from ...engine.checkpoints.run_dir import NAMES, RunDir
from ...engine.machine import threads
from ...engine.machine.files import open_lock
from ..failures import CrankshaftError, RunError, UsageError

_OWNER = NAMES.lock_owner
_OF_DISK = (errno.EROFS, errno.EIO, errno.ESTALE)  # which may work again later
_NO_FLOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK)
LOCK_SECONDS = 100.0  # a server of NFS ends the locks of a host that is lost after 90
_LOCK_POLL_SECONDS = 1.0
_TAKE_OVER_SECONDS = 3.0  # in which the file of an owner that has ended is taken over; half written, it takes 2


@contextlib.contextmanager
def lock(
    run_dir: str,
    held: LockedRunDir | None = None,
    wait_seconds: float = 0.0,
    after_loss: bool = False,
    before_pause: Callable[[], None] | None = None,
) -> Iterator[LockedRunDir]:
    """Holds run_dir for this process alone; `held`: its parent has taken the lock for it.

    Args:
      wait_seconds: how long to wait for a process of another host, which may be lost.
      after_loss: whether to wait for the process that has it now instead, whichever it is, but for no later one.
      before_pause: called before each pause of the wait, which an error of it ends.

    Raises:
      RunDirInUse: another process, still alive, holds it.
      RunError: the lock of another host has outlasted the wait, or the disk has failed: another try may have it.
      UsageError: it can't be locked.
    """
    if held is None:
        held, first, end = LockedRunDir(run_dir), None, time.monotonic() + wait_seconds
        while True:
            try:
                held.acquire()
                break
            except RunDirInUse as error:
                is_same, is_over = error.holder and error.holder == (first or error).holder, time.monotonic() >= end
                if is_over and error.is_elsewhere:
                    raise RunError(error.message) from None
                if not (is_same if after_loss else error.is_elsewhere) or is_over:
                    raise
                if not first:
                    logging.warning("%s; this process waits for it, up to %g s", error, wait_seconds)
                first = error
            if before_pause:
                before_pause()
            time.sleep(_LOCK_POLL_SECONDS)
    try:
        yield held
    finally:
        held.release()


def can_lock(run_dir: str) -> bool:
    """Returns whether nobody's lock on run_dir keeps this process out."""
    try:
        with lock(run_dir):
            return True
    except CrankshaftError:
        return False


class RunDirInUse(UsageError):
    """Another process holds the lock on a run_dir.

    Attributes:
      holder: the words by which the process named itself; empty if the file system has no `flock`.
      is_elsewhere: whether it is of another host, whose lock may outlive it for a while.
    """

    holder, is_elsewhere = "", False


class LockedRunDir:
    """A run_dir with this process's lock on it."""

    def __init__(self, run_dir: str):
        self._run_dir = run_dir
        self._file: int | None = None
        self._owner = SoftFileLock(RunDir(run_dir).lock_owner, _TAKE_OVER_SECONDS, thread_local=False)

    def acquire(self) -> None:
        """Takes the lock. Raises `UsageError`, as `lock` does."""
        try:
            self._file = open_lock(RunDir(self._run_dir).lock)
        except OSError as error:
            raise _lock_error(self._run_dir, error) from None
        try:
            if not _try_flock(self._file, self._run_dir):
                self._acquire_owner_file()
            self._folder = _identity(self._run_dir)
        except CrankshaftError:
            self.release()
            raise

    def release(self) -> None:
        """Releases the lock, if it is held; one by `flock` lasts as long as a fork of this process has it open."""
        self._owner.release()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @property
    def is_by_flock(self) -> bool:
        """Whether the file system has `flock`, by which it is held."""
        return not self._owner.is_locked

    def _acquire_owner_file(self) -> None:
        """Makes a file that names this process, unless another's is there that may be alive."""
        logging.warning(
            "run_dir=%s: its file system has no flock; its file %s locks it instead, and has to be removed by hand "
            "if this process is killed and the next one runs on another host or after a reboot",
            *(self._run_dir, _OWNER),
        )
        # Its third word begins with the boot of the host, which may have this one's name (filelock's start token).
        words, boot = self._owner_words(), int(threads.pid_space().partition(" ")[0].replace("-", "") or "0", 16)
        is_elsewhere = len(words) == 3 and words[2].isdecimal() and int(words[2]) >> 64 not in (0, boot)
        try:
            if is_elsewhere:
                raise Timeout(self._owner.lock_file)
            self._owner.acquire()
        except Timeout:
            pid, host = [*self._owner_words(), "unknown", "unknown"][:2]
            raise RunDirInUse(
                f"run_dir={self._run_dir} is in use by process {pid} on host {host}, as its file {_OWNER} says; wait "
                f"for it or end it, remove {_OWNER} if it has ended, or use another run_dir"
            ) from None
        except OSError as error:
            raise _lock_error(self._run_dir, error, _OWNER) from None

    def _owner_words(self) -> list[str]:
        """Reads the file that names the process which holds the lock: its ID, its host, and when it began."""
        with contextlib.suppress(OSError, ValueError):
            return Path(self._owner.lock_file).read_text(encoding="utf-8").split()
        return []

    @property
    def is_in_place(self) -> bool:
        """Whether run_dir is the folder that was locked."""
        return _identity(self._run_dir) == self._folder

    def check(self) -> None:
        """Raises `UsageError` if run_dir is now another folder, or none. A missing lock file is created again."""
        with contextlib.suppress(OSError):  # a file system that does not answer for a moment
            if not self.is_in_place:
                raise UsageError(
                    f"run_dir={self._run_dir} was removed or replaced while its run went on, and what is done now "
                    "would not be kept; leave it in its place, and start again"
                )
            if self._file is None or _identity(RunDir(self._run_dir).lock) != _identity(self._file):
                self.release()
                self.acquire()


def _identity(path: str | int) -> tuple[int, int] | None:
    """Reads a file's identity, (device, inode); None if it does not exist."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino


def _try_flock(lock: int, run_dir: str) -> bool:
    """Locks the file; returns False where the file system has no such lock."""
    try:
        is_locked = lock_descriptor(lock, blocking=False)
    except OSError as error:
        if error.errno in _NO_FLOCK:
            return False
        raise _lock_error(run_dir, error) from None
    if not is_locked:
        holder = os.read(lock, 512).decode(errors="replace")
        described, is_elsewhere = _described(holder)
        in_use = RunDirInUse(f"run_dir={run_dir} is in use {described}, or use another run_dir")
        in_use.holder, in_use.is_elsewhere = holder, is_elsewhere
        raise in_use
    with contextlib.suppress(OSError):  # it is open for reading alone, or the disk is full
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()} {socket.gethostname()} {threads.pid_space()}".encode())
    return True


def _described(holder: str) -> tuple[str, bool]:
    """Describes who holds a lock, by its words, and what to do; also returns whether that is of another host."""
    pid, host, space = [*holder.split(maxsplit=2), "", "", ""][:3]
    is_here = host in ("", socket.gethostname()) and space in ("", threads.pid_space())  # hosts may have one name
    if is_here and pid == str(os.getpid()):
        return f"by process {pid}, which is this one; close its run", False
    if pid and not is_here:
        return f"by process {pid} on host {host}; wait for it, end it", True
    if pid.isdecimal() and is_alive(int(pid)):
        return f"by process {pid}; wait for it, end it", False
    gone = f", and process {pid}, whose run was here last, is gone" if pid else ""
    return f"by another program: it holds the lock on the file {NAMES.lock}{gone}; end it (`fuser` finds it)", False


def is_alive(pid: int) -> bool:
    """Returns whether a process of this host is there, whoever's it is."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _lock_error(run_dir: str, error: OSError, name: str = NAMES.lock) -> CrankshaftError:
    problem = f"run_dir={run_dir}: its file {name} can't be locked ({error.strerror})"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):  # whose line has the cure
        return RunError(problem)
    if error.errno in _OF_DISK:
        return RunError(f"{problem}; remount its disk, or use another run_dir")
    return UsageError(f"{problem}; remove it, or use another run_dir")
