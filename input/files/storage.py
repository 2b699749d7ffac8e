"""Reads pieces of the files of a source, by system calls or through `tf.io.gfile`.

TensorFlow is imported only for paths of other file systems (`gs://`, `ram://`).
"""

from __future__ import annotations

import bisect
import concurrent.futures
import contextlib
import errno
import functools
import gzip
import io
import itertools
import os
import re
import resource
import secrets
import stat
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple, TypeVar

from ...engine import logging
from ...engine.data.source import is_transient
from ...engine.errors import CrankshaftError, SourceError, UnavailableError, reason
from ...engine.machine import files
from ..checks import InputError

GZIP_MAGIC = b"\x1f\x8b"  # a file's first bytes, which say what its name may not
R = TypeVar("R")
_TRY_AGAIN_SECONDS = (0.1, 1.0, 5.0)  # waits after failed reads; networks recover within seconds
_OPEN_FILES = 256  # at once
_REMOTE_BLOCK_BYTES = 4 << 20  # a single read costs as much as about 64 KiB
_STREAM_BYTES = 1 << 20
_SAMPLE_BYTES = 1 << 16  # size of a sampled piece in a digest of the contents
_SAMPLES, _REMOTE_SAMPLES = 256, 16
READS_AT_ONCE = 16
_SLOW_READ_SECONDS = 1e-3  # in memory it takes some us, on a disk of its own 0.1 ms; over a network, milliseconds
_REMOTE_BLOCKS = 16  # kept per file
# Interval of checks of open files: a check costs 2 us locally, some 50 ms over a network.
_CHECK_EVERY_SECONDS = 1.0
_REMOTE_CHECK_EVERY_SECONDS = 60.0


def is_remote(path: str) -> bool:
    """Returns whether a path is for `tf.io.gfile`."""
    return re.match(r"[a-z][a-z0-9]*://", path) is not None


@contextlib.contextmanager
def new_file(path: str) -> Iterator[BinaryIO]:
    """Yields a file to write to, which replaces whatever is at `path` when complete. Raises OSError.

    If the body fails, no file remains.
    """
    if not is_remote(path):
        with files.new_file(path) as file:
            yield file
        return
    import tensorflow as tf

    temporary = f"{path}.{secrets.token_hex(8)}.tmp"
    try:
        gfile(path).makedirs(os.path.dirname(path))
        with tf.io.gfile.GFile(temporary, "wb") as file:
            yield file
        tf.io.gfile.rename(temporary, path, overwrite=True)
    except tf.errors.OpError as error:
        raise OSError(str(error).splitlines()[0]) from None


def retried(path: str, read: Callable[[], Any], before: Callable[[], None] | None = None) -> Any:
    """Returns the result of a function that reads a file; retries it if a disk or a network fails briefly.

    `before` is called before each retry.

    Raises:
      UnavailableError: all tries failed this way.
    """
    for seconds in (*_TRY_AGAIN_SECONDS, None):
        try:
            return read()
        except Exception as error:
            if isinstance(error, CrankshaftError) or not is_transient(error):
                raise
            why = getattr(error, "strerror", None) or reason(error)
            if seconds is None:
                tries = len(_TRY_AGAIN_SECONDS) + 1
                raise UnavailableError(
                    f"{path} can't be read ({why}), nor could it be {tries} times; see to the disk or the network, and "
                    "resume the run"
                ) from None
            logging.warning("%s can't be read (%s); trying again in %g s", path, why, seconds)
            time.sleep(seconds)
            if before:
                before()
    raise AssertionError  # the loop returns or raises


def at_once(read: Callable[[Any], R], arguments: Sequence[Any]) -> Iterator[R]:
    """Yields what a function that reads files returns for each argument, in order; calls it in several threads.

    On a network's disk each read takes long, and many at once hardly longer.
    """
    with concurrent.futures.ThreadPoolExecutor(READS_AT_ONCE) as pool:
        for start in range(0, len(arguments), READS_AT_ONCE):  # results that wait to be taken are few
            yield from pool.map(read, arguments[start : start + READS_AT_ONCE])


class State(NamedTuple):
    """The state of a file, which shows whether it has changed.

    Attributes:
      written_ns: time of the last write, in nanoseconds since the epoch.
    """

    nbytes: int
    written_ns: int


class Files:
    """Files that any thread can read in pieces. They must not change.

    Each file is checked when it is opened and then once per second while it is read (once per minute over a network).
    If it was removed, replaced or written to, reading ends, although an open file would still return its old bytes.
    Without `states`, the present ones are read.

    Attributes:
      sizes: bytes of each file.
      are_slow: whether the last reads took so long each that several at once are faster.

    Raises:
      InputError: a file is missing, not regular (a FIFO would block for ever), or can't be read.
    """

    def __init__(self, paths: list[str], states: list[State] | None = None):
        self.paths = [*paths]
        states = [file_state(path) for path in paths] if states is None else states
        self.sizes = [state.nbytes for state in states]
        self.are_slow = False
        self._written_ns = array("q", [state.written_ns for state in states])
        # Holds lists, not this object: then a file is closed when the last thread has read it.
        self._file = functools.lru_cache(open_files(_OPEN_FILES))(functools.partial(_open, self.paths, self.sizes))

    def only(self, numbers: Sequence[int]) -> Files:
        """Returns some of the files, in their original state."""
        return Files([self.paths[n] for n in numbers], [State(self.sizes[n], self._written_ns[n]) for n in numbers])

    def pread(self, number: int, offset: int, length: int) -> bytes:
        """Returns `length` bytes of a file from `offset` on.

        Raises:
          SourceError: the file was replaced or can't be read.
        """
        return self.pread_each(number, [offset], [length])[0]

    def pread_each(self, number: int, offsets: list[int], lengths: list[int]) -> list[bytes]:
        """Returns `length` bytes from each of some offsets on; raises as `pread` does."""

        def read() -> list[bytes]:
            file = self._file(number)
            if time.monotonic() >= file.check_at:
                self.check(number)
                every = _REMOTE_CHECK_EVERY_SECONDS if isinstance(file, _Remote) else _CHECK_EVERY_SECONDS
                file.check_at = time.monotonic() + every
            return file.pread_each(offsets, lengths)

        began = time.perf_counter()
        try:
            pieces = retried(self.paths[number], read, self._file.cache_clear)  # a stale handle is opened again
        except OSError as error:
            self.check(number)  # which explains a missing file better
            raise self._unreadable(number, error) from None
        self.are_slow = time.perf_counter() - began > _SLOW_READ_SECONDS * len(offsets)
        if [*map(len, pieces)] == lengths:
            return pieces
        self.check(number)
        offset, length, piece = next(
            (offset, length, piece)
            for offset, length, piece in zip(offsets, lengths, pieces, strict=True)
            if len(piece) < length
        )
        raise SourceError(
            f"{self.paths[number]} ends at byte {offset + len(piece):,}, and bytes {offset:,} to {offset + length:,} "
            "were to be read; restore it, and resume the run"
        )

    def stream(self, number: int) -> io.BufferedReader:
        """Opens a file to be read from its beginning to its end, or anywhere; errors are those of `pread`."""
        return io.BufferedReader(_Stream(self, number), _STREAM_BYTES)

    def is_gzip(self, number: int) -> bool:
        """Returns whether a file is gzip, by its first bytes; raises as `pread` does."""
        return self.pread(number, 0, min(self.sizes[number], len(GZIP_MAGIC))) == GZIP_MAGIC

    def read(self, number: int) -> bytes:
        """Returns a whole file, opening and closing it, for files that are read rarely; raises as `pread` does."""
        path, nbytes = self.paths[number], self.sizes[number]
        self.check(number)
        try:
            data = retried(path, lambda: _open(self.paths, self.sizes, number).pread(0, nbytes))
        except OSError as error:
            raise self._unreadable(number, error) from None
        if len(data) < nbytes:
            self.check(number)
            raise SourceError(f"{path} gave {len(data):,} of its {nbytes:,} bytes; see to the disk that it is on")
        return data

    @functools.cached_property
    def sample(self) -> int:
        """A checksum of the files' bytes: of all up to 16 MiB, else of evenly spaced pieces, including both ends."""
        most = _REMOTE_SAMPLES if any(map(is_remote, self.paths)) else _SAMPLES
        ends = list(itertools.accumulate(self.sizes))
        total = ends[-1] if ends else 0
        starts: Sequence[int] = range(0, total, _SAMPLE_BYTES)
        if len(starts) > most:
            starts = [(total - _SAMPLE_BYTES) * n // (most - 1) for n in range(most)]
        pieces = list[tuple[int, int, int]]()
        for start in starts:
            stop = min(start + _SAMPLE_BYTES, total)
            while start < stop:  # a piece may span several files
                number = bisect.bisect_right(ends, start)
                length = min(stop, ends[number]) - start
                offset = start - (ends[number] - self.sizes[number])
                pieces.append((number, offset, length))
                start += length
        checksum = 0
        for data in at_once(lambda piece: self.pread(*piece), pieces):
            checksum = zlib.crc32(data, checksum)
        return checksum

    def check(self, number: int) -> None:
        """Raises `SourceError` if a file was removed, replaced or written to since this was made."""
        path, was = self.paths[number], State(self.sizes[number], self._written_ns[number])
        try:
            now = file_state(path)
        except InputError as error:
            raise SourceError(f"{error.message} (it was there as the run began)") from None
        fix = "let files be as they are while a run reads them: restore it, and resume the run"
        if now.nbytes != was.nbytes:
            raise SourceError(f"{path} has {now.nbytes:,} bytes, and had {was.nbytes:,} as the run began; {fix}")
        if now.written_ns != was.written_ns:
            raise SourceError(f"{path} was written to or replaced since the run began; {fix}")

    def _unreadable(self, number: int, error: OSError) -> SourceError:
        return SourceError(f"{self.paths[number]} can't be read ({error.strerror or error}); see that it is there")


@contextlib.contextmanager
def unpacked(stream: io.BufferedReader, path: str) -> Iterator[Any]:
    """Yields a stream of a file's contents, unpacked if its first bytes say gzip: browsers unpack and keep the name.

    Raises:
      InputError: what is read in this context is not a whole gzip file.
    """
    try:
        yield gzip.GzipFile(fileobj=stream) if stream.peek(2)[:2] == GZIP_MAGIC else stream
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(
            f"{path} is not a whole gzip file: expected one that unpacks, found: {error}; restore it"
        ) from error


def open_files(most: int) -> int:
    """Returns the number of files that may stay open: at most so many, and a quarter of this process's limit."""
    # The limit is 1,024 by default, and other data and libraries need some too.
    return max(1, min(most, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))


def _open(paths: list[str], sizes: list[int], number: int) -> _Local | _Remote:
    return _Remote(paths[number], sizes[number]) if is_remote(paths[number]) else _Local(paths[number])


class _Stream(io.RawIOBase):
    def __init__(self, files: Files, number: int):
        self._files, self._number, self._at = files, number, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._files.sizes[self._number]}[whence]
        self._at = start + offset
        return self._at

    def readinto(self, buffer) -> int:
        wanted = min(len(buffer), max(0, self._files.sizes[self._number] - self._at))
        if wanted:
            buffer[:wanted] = self._files.pread(self._number, self._at, wanted)
        self._at += wanted
        return wanted


def file_state(path: str) -> State:
    """Returns a file's present state. Raises `InputError` if it is not a readable regular file."""
    if is_remote(path):
        status = read_remote(path, "stat")
        if status.is_directory:
            raise InputError(f"{path} is a folder; give files")
        return State(int(status.length), int(status.mtime_nsec))
    try:
        status = retried(path, lambda: os.stat(path))
    except OSError as error:
        raise InputError(f"{path} can't be read ({error.strerror}); see that it is there") from None
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{path} is not a regular file; give files, not folders, FIFOs or devices")
    if not os.access(path, os.R_OK):
        raise InputError(f"{path} can't be read (permission denied); see to its permissions")
    return State(status.st_size, status.st_mtime_ns)


class _Local:
    check_at = 0.0  # time of the next check

    def __init__(self, path: str):
        # A FIFO that replaced the file must not block.
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)

    def pread(self, offset: int, length: int) -> bytes:
        data = os.pread(self._descriptor, length, offset)
        while 0 < len(data) < length:  # a read returns at most about 2 GiB
            piece = os.pread(self._descriptor, length - len(data), offset + len(data))
            if not piece:
                break
            data += piece
        return data

    def pread_each(self, offsets: list[int], lengths: list[int]) -> list[bytes]:
        # One call for each: for files in the page cache that is faster than fewer, larger reads.
        pread, descriptor = os.pread, self._descriptor
        pieces = [pread(descriptor, length, offset) for offset, length in zip(offsets, lengths, strict=True)]
        if [*map(len, pieces)] != lengths:
            return [self.pread(offset, length) for offset, length in zip(offsets, lengths, strict=True)]
        return pieces

    def __del__(self):
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


class _Remote:
    """Reads in aligned blocks and caches the last few: a single read through `tf.io.gfile` costs 160 us or more."""

    check_at = 0.0

    def __init__(self, path: str, size: int):
        self._size = size
        self._block = functools.lru_cache(_REMOTE_BLOCKS)(functools.partial(_block, gfile(path).GFile(path, "rb")))
        self._lock = threading.Lock()  # a file has one position

    def pread(self, offset: int, length: int) -> bytes:
        stop = min(offset + length, self._size)
        numbers = range(offset // _REMOTE_BLOCK_BYTES, -(-stop // _REMOTE_BLOCK_BYTES))
        with self._lock:
            data = b"".join(self._block(number) for number in numbers)
        start = offset - numbers.start * _REMOTE_BLOCK_BYTES
        return data[start : start + length]

    def pread_each(self, offsets: list[int], lengths: list[int]) -> list[bytes]:
        return [self.pread(offset, length) for offset, length in zip(offsets, lengths, strict=True)]


def _block(file: Any, number: int) -> bytes:
    try:
        file.seek(number * _REMOTE_BLOCK_BYTES)
        return file.read(_REMOTE_BLOCK_BYTES)
    except Exception as error:  # of TensorFlow
        raise OSError(errno.EIO if is_transient(error) else None, reason(error)) from None


def read_remote(path: str, function: str) -> Any:
    """Calls a function of `tf.io.gfile` that reads what is at a path: `stat`, `exists`, `listdir` or `glob`.

    Raises:
      InputError: it can't be read.
      UnavailableError: nor could it be several times, since the network failed.
    """
    try:
        return retried(path, lambda: getattr(gfile(path), function)(path))
    except CrankshaftError:
        raise
    except Exception as error:  # TensorFlow's, which is imported only here
        raise InputError(f"{path} can't be read ({reason(error)}); see that it is there") from None


def gfile(path: str) -> Any:
    """Imports TensorFlow's module for remote files, which only they need.

    Raises:
      InputError: TensorFlow has no file system for the path's scheme.
    """
    import tensorflow as tf

    scheme, _, _ = path.partition("://")
    if scheme not in tf.io.gfile.get_registered_schemes():
        raise InputError(
            f"{path}: TensorFlow has no file system for {scheme}://; mount the bucket and give the folder's path, or "
            "import a library that adds it, such as tensorflow-io, in your script"
        )
    return tf.io.gfile
