"""Finds the files of a source and reads pieces of them: local ones by system calls, others through `tf.io.gfile`.

Host code. TensorFlow is imported only where a path is of another file system (`gs://`, `ram://`).
"""

from __future__ import annotations

import glob
import os
import re
import stat
import threading
from collections import OrderedDict
from typing import Any

from crankshaft.engine.data.source import SourceError
from crankshaft.input.splits import InputError

_OPEN_FILES = 256  # at once: a process may have 1,024 by default
_REMOTE_BLOCK_BYTES = 4 << 20  # a single read costs as much as some 64 KiB do
_REMOTE_BLOCKS = 16  # of a file that are kept


def is_remote(path: str) -> bool:
    """Returns whether a path is for `tf.io.gfile`."""
    return re.match(r"[a-z][a-z0-9]*://", path) is not None


def find(data_dir: str | None, patterns: tuple[str, ...], expected: str, flag: str = "data_dir") -> list[str]:
    """Returns the files that a flag names, each once, in the order given; those of a folder or a glob sorted by name.

    Numbers in names count as numbers: day-2 stands before day-10.

    Args:
      data_dir: a folder, a file, a glob, or several with commas between.
      patterns: globs for the names of a folder's files, e.g. ("*.tfrecord",); the first that any file matches is used.
      expected: what is looked for, for messages: "shards of TFRecords (*.tfrecord)".
      flag: the flag's name, for messages.

    Raises:
      InputError: nothing is given, or nothing is there.
    """
    if not data_dir:
        raise InputError(f"--{flag} is not given; name a folder with {expected}, a glob, or files with commas between")
    found: dict[str, None] = {}
    for part in data_dir.split(","):
        part = os.path.expanduser(part.strip())
        files = _in_folder(part, patterns) if _is_folder(part) else _matching(part)
        if not files:
            raise InputError(f"--{flag}={part}: expected {expected}, found {_what_is_there(part)}")
        found |= dict.fromkeys(files)
    return [*found]


def _is_folder(path: str) -> bool:
    return _gfile().isdir(path) if is_remote(path) else os.path.isdir(path)


def _in_folder(folder: str, patterns: tuple[str, ...]) -> list[str]:
    for pattern in patterns:
        if files := _matching(
            f"{folder.rstrip('/')}/{pattern}" if is_remote(folder) else os.path.join(folder, pattern)
        ):
            return files
    return []


def _matching(pattern: str) -> list[str]:
    if is_remote(pattern):
        return sorted((path for path in _gfile().glob(pattern) if not _gfile().isdir(path)), key=_natural)
    if os.path.exists(pattern):  # also one whose name has a bracket
        return [pattern]
    return sorted((path for path in glob.glob(pattern) if not os.path.isdir(path)), key=_natural)


def _what_is_there(path: str) -> str:
    if not _is_folder(path):
        return "nothing"
    names = sorted(_gfile().listdir(path) if is_remote(path) else os.listdir(path))
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "an empty folder"


def _natural(path: str) -> list:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)]


class Files:
    """Files of which pieces are read by any thread. They must stay what they were when this was made.

    Args:
      paths: of the files.

    Attributes:
      paths: the same.
      sizes: their bytes.

    Raises:
      InputError: one is not there, is no regular file (a FIFO would let a read wait for ever), or can't be read.
    """

    def __init__(self, paths: list[str]):
        self.paths = [*paths]
        self.sizes = [size_of(path) for path in paths]
        self._open: OrderedDict[int, _Local | _Remote] = OrderedDict()  # the one used last at the end
        self._lock = threading.Lock()

    def pread(self, number: int, offset: int, length: int) -> bytes:
        """Returns `length` bytes of a file from `offset` on.

        Raises:
          SourceError: the file has become another, or can't be read.
        """
        path = self.paths[number]
        try:
            found = self._file(number).pread(offset, length)
        except OSError as error:
            raise SourceError(f"{path} can't be read ({error.strerror or error}); see that it is there") from None
        if len(found) < length:
            raise SourceError(
                f"{path} ends at byte {offset + len(found):,} and had {self.sizes[number]:,} bytes as the run began; "
                "restore it, and resume the run"
            )
        return found

    def check(self, number: int) -> None:
        """Raises `SourceError` if a file was replaced, has grown or has shrunk since this was made."""
        path = self.paths[number]
        try:
            size = size_of(path)
        except InputError as error:
            raise SourceError(f"{error} (it was there as the run began)") from None
        if size != self.sizes[number]:
            raise SourceError(
                f"{path} has {size:,} bytes, and had {self.sizes[number]:,} as the run began; let files be as they "
                "are while a run reads them: restore it, and resume the run"
            )

    def _file(self, number: int) -> _Local | _Remote:
        with self._lock:
            if number not in self._open:
                path = self.paths[number]
                self._open[number] = _Remote(path, self.sizes[number]) if is_remote(path) else _Local(path)
                if len(self._open) > _OPEN_FILES:
                    self._open.popitem(last=False)  # is closed when the last thread that reads it is done
            self._open.move_to_end(number)
            return self._open[number]


def size_of(path: str) -> int:
    """Returns a file's bytes. Raises `InputError` where there is no regular file that can be read."""
    if is_remote(path):
        try:
            return int(_gfile().stat(path).length)
        except Exception as error:  # of TensorFlow, which is imported only here
            raise InputError(f"{path} can't be read ({str(error).splitlines()[0]}); see that it is there") from None
    try:
        found = os.stat(path)
    except OSError as error:
        raise InputError(f"{path} can't be read ({error.strerror}); see that it is there") from None
    if not stat.S_ISREG(found.st_mode):
        raise InputError(f"{path} is no regular file; give files, not folders, FIFOs or devices")
    if not os.access(path, os.R_OK):
        raise InputError(f"{path} can't be read (permission denied); see to its permissions")
    return found.st_size


class _Local:
    def __init__(self, path: str):
        # A FIFO that has come in the file's place must not be waited for.
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)

    def pread(self, offset: int, length: int) -> bytes:
        found = os.pread(self._descriptor, length, offset)
        while 0 < len(found) < length:  # a read returns at most some 2 GiB
            piece = os.pread(self._descriptor, length - len(found), offset + len(found))
            if not piece:
                break
            found += piece
        return found

    def __del__(self):
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


class _Remote:
    """Reads in aligned blocks and keeps the last few: a single read through `tf.io.gfile` costs 160 us and more."""

    def __init__(self, path: str, size: int):
        self._path, self._size = path, size
        self._file: Any = _gfile().GFile(path, "rb")
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def pread(self, offset: int, length: int) -> bytes:
        stop = min(offset + length, self._size)
        numbers = range(offset // _REMOTE_BLOCK_BYTES, -(-stop // _REMOTE_BLOCK_BYTES))
        with self._lock:
            found = b"".join(self._block(number) for number in numbers)
        start = offset - numbers.start * _REMOTE_BLOCK_BYTES
        return found[start : start + length]

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            try:
                self._file.seek(number * _REMOTE_BLOCK_BYTES)
                self._blocks[number] = self._file.read(_REMOTE_BLOCK_BYTES)
            except Exception as error:  # of TensorFlow
                raise OSError(str(error).splitlines()[0]) from None
            if len(self._blocks) > _REMOTE_BLOCKS:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(number)
        return self._blocks[number]


def _gfile() -> Any:
    import tensorflow as tf

    return tf.io.gfile
