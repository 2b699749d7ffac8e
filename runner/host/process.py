"""The process that a run lives in: TensorFlow's start, and the lock on its run_dir."""

from __future__ import annotations

import contextlib
import errno
import math
import multiprocessing
import os
import resource
import signal
import socket
import stat
import sys
import time
from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module
from pathlib import Path

from filelock import SoftFileLock, Timeout, lock_descriptor

from ...engine import logging
from ...engine.checkpoints.run_dir import NAMES, RunDir
from ...engine.machine import allocator, cpus, threads
from ...engine.machine.files import open_lock, temporary_folder
from ...engine.machine.threads import PROCESS
from .. import terminal
from ..failures import CrankshaftError, RunError, UsageError
from . import imports

# The variables that set the number of threads: TensorFlow's (its process_util.cc, local_device.cc), other libraries'.
_THREADS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")
_VECTOR_WIDTH = "--xla_cpu_prefer_vector_width"
_OWNER = NAMES.lock_owner
# Address space for TensorFlow's threads and XLA, and for each core: two threads' stacks, and an arena of glibc's. Of
# 20 steps of mlp on two cores it is 850 MB, and 1,300 MB with XLA.
_STARTED_BYTES, _BYTES_PER_CORE = 1 << 30, 80 << 20
_OF_DISK = (errno.EROFS, errno.EIO, errno.ESTALE)  # which may work again later
_NO_FLOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK)
LOCK_SECONDS = 100.0  # a server of NFS ends the locks of a host that is lost after 90
_LOCK_POLL_SECONDS = 1.0
_TAKE_OVER_SECONDS = 3.0  # in which the file of an owner that has ended is taken over; half written, it takes 2


def prepare_streams() -> None:
    """Prepares a program's standard streams, before anything else: none is closed, and any character can be printed.

    /dev/null is opened as each that is closed. Otherwise a file of the run would get the stream's number, and receive
    what is printed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free, this one
            os.set_inheritable(number, True)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # as Python has it where the stream was closed at its start
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
    terminal.set_stream_errors(terminal.escaping_streams())


def arguments() -> list[str]:
    """Returns `sys.argv` as UTF-8, whatever encoding the locale has."""
    return [os.fsencode(word).decode(errors="surrogateescape") for word in sys.argv]


def refuse_within_import() -> None:
    """Raises `UsageError` in a process that `multiprocessing` has spawned and that imports its parent's script.

    Python refuses to start processes then, and a pool replaces those that end by it, again and again.
    So the parent gets SIGTERM.
    """
    if not getattr(multiprocessing.current_process(), "_inheriting", False):  # as multiprocessing.spawn has it
        return
    parent = os.getppid()
    with contextlib.suppress(OSError):  # it has ended, and another process, of another program, is the parent now
        if parent != 1 and os.path.samefile(f"/proc/{parent}/exe", "/proc/self/exe"):
            os.kill(parent, signal.SIGTERM)
    raise UsageError(
        "the script starts a process by `multiprocessing`, which imports the script and so begins its run again; put "
        'what starts the run below `if __name__ == "__main__":`'
    )


_began = time.monotonic()  # about when this program began, or the fork of it
_lacks_threads = False  # whether this is a fork of a process in which TensorFlow ran, or was being started


def _note_fork() -> None:
    global _began, _lacks_threads
    if is_free := PROCESS.acquire(blocking=False):
        PROCESS.release()
    else:  # another thread, which this process lacks, was changing the process
        PROCESS._at_fork_reinit()  # type: ignore[attr-defined]
    internals = sys.modules.get("crankshaft.engine.internals.tensorflow")
    has_started = getattr(internals, "has_started", lambda: False)
    _began, _lacks_threads = time.monotonic(), not is_free or has_started()


os.register_at_fork(after_in_child=_note_fork)


def refuse_forked_start() -> None:
    """Raises `UsageError` in a process that was forked while TensorFlow ran, whose threads it lacks: it would hang."""
    if _lacks_threads:
        raise UsageError(
            "this process was forked from one in which TensorFlow runs, and lacks its threads; start it by spawn, as "
            'by multiprocessing.get_context("spawn")'
        )


def age_seconds() -> float:
    """Returns the seconds since this module was imported, before TensorFlow; since the fork in a fork of a program."""
    return time.monotonic() - _began


class SturdyStream:
    """A standard stream whose reader may leave and whose disk may be full: the output is lost then, not the run.

    Attributes:
      lost: the first error that kept something from being written; None without one, or if nobody reads any more: a
        pipe's reader has seen enough, or the terminal is gone.
    """

    def __init__(self, stream):
        self._stream = stream
        self.lost: OSError | None = None

    def __getattr__(self, name: str):
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._guarded(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._guarded(self._stream.flush)

    def _guarded(self, operation, *arguments) -> None:
        try:
            operation(*arguments)
        except OSError as error:
            if self.lost is None and not has_no_reader(self._stream.fileno(), error):
                self.lost = error
                logging.warning("%s can't be written (%s); further output is lost", self._stream.name, error.strerror)
            # Else the stream would try to write what it holds back at each later call, and at the process's end.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # what the stream holds back is written there
            os.close(nowhere)


def has_no_reader(descriptor: int, error: OSError) -> bool:
    """Returns whether a write has failed as a pipe's or a terminal's other end is closed; no disk is at fault then."""
    is_terminal = stat.S_ISCHR(os.fstat(descriptor).st_mode)
    return error.errno == errno.EPIPE or (error.errno == errno.EIO and is_terminal)


def prepare(tunes_allocator: bool = True) -> None:
    """Sets this process's environment before TensorFlow starts: threads, vector width, optionally the allocator.

    Keras's backend is chosen when `engine` is imported.

    Raises:
      UsageError: TF_USE_LEGACY_KERAS makes tf.keras Keras 2, or no temporary file, which TensorFlow's import needs, can
        be written.
    """
    if (legacy := os.environ.get("TF_USE_LEGACY_KERAS")) in ("1", "true", "True"):  # as TensorFlow reads it
        raise UsageError(f"TF_USE_LEGACY_KERAS={legacy} asks for Keras 2, and models here are of Keras 3; unset it")
    temporary_folder()
    with PROCESS:
        imports.check_variables()
        fit_threads(os.environ, cpus.usable_cores(), len(cpus.usable_cpus([os.getpid()])))
        if cpus.has_fast_wide_vectors():
            widen_vectors(os.environ)
        if tunes_allocator and not sets_allocator(os.environ):
            allocator.keep_freed_memory()


def sets_allocator(variables: Mapping[str, str]) -> bool:
    """Returns whether variables such as MALLOC_TRIM_THRESHOLD_ configure glibc's allocator; see mallopt(3)."""
    return any(name.startswith("MALLOC_") and name.endswith("_") for name in variables)


def fit_threads(variables: MutableMapping[str, str], usable: float, cores: int) -> None:
    """Limits threads to the cores that a CPU quota leaves; TensorFlow and other libraries take one for each core seen.

    More threads would use the quota up and then stand still, all at once. Has to run before TensorFlow starts.

    Args:
      variables: the process's environment variables; values that are set stay.
      usable: cores that the process may use; a part of one counts as one.
      cores: number of cores that the process sees.
    """
    threads = math.ceil(usable)
    if threads < cores:
        logging.debug("a CPU quota leaves %g of %d cores: %d threads", usable, cores, threads)
        for name in _THREADS:
            variables.setdefault(name, str(threads))


def widen_vectors(variables: MutableMapping[str, str]) -> None:
    """Makes XLA compile loops for vectors of 512 bits, where it defaults to 256. Has to run before XLA compiles.

    Args:
      variables: the process's environment variables; a width that they ask for stays, and so does the name of a file,
        which XLA reads where XLA_FLAGS does not begin with a flag.
    """
    flags = variables.get("XLA_FLAGS", "")
    if _VECTOR_WIDTH not in flags and flags.lstrip()[:1] in ("", "-"):
        variables["XLA_FLAGS"] = f"{flags} {_VECTOR_WIDTH}=512".lstrip()
        logging.debug("XLA_FLAGS=%s", variables["XLA_FLAGS"])


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


@contextlib.contextmanager
def lock(
    run_dir: str, held: LockedRunDir | None = None, wait_seconds: float = 0.0, after_loss: bool = False
) -> Iterator[LockedRunDir]:
    """Holds run_dir for this process alone; `held`: its parent has taken the lock for it.

    Args:
      wait_seconds: how long to wait for a process of another host, which may be lost.
      after_loss: whether to wait for the process that has it now instead, whichever it is, but for no later one.

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
    if os.fstat(lock).st_nlink > 1:  # by a hard link it is another file as well, whose contents stay
        return True
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
