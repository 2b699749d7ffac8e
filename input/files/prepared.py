"""Prepared files, made once from a user's files: location, names, writing and checks.

A prepared file is in the folder `.crankshaft` beside the first of the files it was made from, or in `prepared_dir`; in
a temporary folder if that of the files is read-only. Its name is a digest of these files' names, sizes, times and some
of their bytes, and of the arguments. So a stale one is never read; you may delete it. It is written under another name
and renamed when complete, with a mark at its end.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import math
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from filelock import lock_descriptor

from ...engine import logging
from ...engine.errors import SourceError
from ...engine.machine.files import make_cache, open_lock, private_cache
from ..checks import InputError
from . import storage
from .storage import Files, is_remote

FOLDER = ".crankshaft"
BUNDLED = os.path.join(os.path.dirname(os.path.dirname(__file__)), "data")
_RULE = 1  # increment it when the way of preparing changes: names change
_END = struct.Struct("<QI8s")  # size of the metadata, their CRC-32, a mark
_MARK = b"crankpr\x01"
_SAMPLE_BYTES = 1 << 16  # sampled at a file's beginning, middle and end
_SAMPLED_FILES = 256  # the largest number of files that are sampled
_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)
_SECONDS = 10  # between lines of progress
_WAIT_LINE_SECONDS = 60.0  # between lines while another process prepares the file
_LOCK_POLL_SECONDS = 0.1


class Prepared:
    """A file that was prepared.

    Attributes:
      metadata: JSON value that is stored in the file.

    Raises:
      InputError: it is missing.
      SourceError: it is incomplete.
    """

    def __init__(self, path: str):
        self.path = path
        self._files = Files([path])
        size = self._files.sizes[0]
        length, checksum, mark = (
            _END.unpack(self.read(size - _END.size, _END.size)) if size >= _END.size else (0, 0, b"")
        )
        metadata = self.read(size - _END.size - length, length) if mark == _MARK and length <= size - _END.size else b""
        if mark != _MARK or zlib.crc32(metadata) != checksum:
            raise SourceError(f"{path} is not whole; remove it: it is rebuilt")
        self.metadata: dict[str, Any] = json.loads(metadata)

    def read(self, offset: int, length: int) -> bytes:
        """Returns some of its bytes. Raises `SourceError` if the file has shrunk or can't be read."""
        return self._files.pread(0, offset, length)

    def read_each(self, offsets: list[int], length: int) -> list[bytes]:
        """Returns as many bytes from each offset on; raises as `read` does."""
        return self._files.pread_each(0, offsets, [length] * len(offsets))

    def files(self) -> list[str]:
        """Returns the paths of the files that it reads."""
        return [self.path]

    def damaged(self, title: str) -> SourceError:
        """Returns the error for damaged bytes."""
        return SourceError(f"{self.path}: {title} is damaged (its checksum differs); remove the file: it is rebuilt")


class PreparedInMemory(Prepared):
    """A file prepared from bundled files, whose folder may be read-only: kept in memory."""

    def __init__(self, name: str, write: Callable[[PreparedWriter], None]):
        content = io.BytesIO()
        write(writer := PreparedWriter(content))
        self.path, self._content = name, content.getvalue()
        self.metadata = writer.end()

    def read(self, offset: int, length: int) -> bytes:
        return self._content[offset : offset + length]

    def read_each(self, offsets: list[int], length: int) -> list[bytes]:
        return [self.read(offset, length) for offset in offsets]

    def files(self) -> list[str]:
        return []


class PreparedWriter:
    """Writes a prepared file sequentially.

    Attributes:
      metadata: JSON value to store in the file.
      offset: bytes written so far.
    """

    def __init__(self, file):
        self._file = file
        self._digest = hashlib.blake2b(digest_size=8)
        self.metadata: dict[str, Any] = {}
        self.offset = 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self.offset += len(data)

    def end(self) -> dict[str, Any]:
        """Appends the metadata, including `digest`, that of the file's bytes, and returns them."""
        content = {**self.metadata, "digest": self._digest.hexdigest()}
        metadata = json.dumps(content).encode()
        self._file.write(metadata + _END.pack(len(metadata), zlib.crc32(metadata), _MARK))
        return content


def prepared(
    files: Files, kind: str, recipe: dict[str, Any], write: Callable[[PreparedWriter], None], folder: str | None = None
) -> Prepared:
    """Returns the file prepared from `files`, creating it if needed; other processes wait for the creating one.

    Files prepared from bundled ones are kept in memory.

    Args:
      kind: first word of the prepared file's name.
      recipe: everything else that determines its contents, a JSON value.
      folder: where to put it, instead of the folder beside the files or, if that can't be written, a temporary one.

    Raises:
      InputError: it can't be written; and the errors of `write`.
    """
    if os.path.dirname(files.paths[0]) == BUNDLED:
        return PreparedInMemory(files.paths[0], write)
    beside = os.path.join(os.path.dirname(files.paths[0]), FOLDER)
    path = os.path.join(os.path.expanduser(folder or beside), f"{kind}-{_digest(files, kind, recipe)}")

    def write_checked(writer: PreparedWriter) -> None:
        write(writer)
        for number in range(len(files.paths)):
            files.check(number)  # may have grown meanwhile

    try:
        if not is_remote(path) and not make_cache(os.path.dirname(path), files.paths[0]):
            raise PermissionError(errno.EPERM, "another user's, in a folder in which anybody may make files", path)
        if (file := _open_if_whole(path)) or is_remote(path):
            return file or _write(path, write_checked)
        with _locked(f"{path}.lock", path):
            return _open_if_whole(path) or _write(path, write_checked)  # exists if this process waited for another
    except OSError as error:
        may_write = os.access(os.path.dirname(path), os.W_OK, effective_ids=True)
        is_planted = error.errno == errno.EPERM and error.filename == path
        if is_planted or (
            not folder and error.errno in _NOT_WRITABLE and not (may_write and os.path.lexists(f"{path}.lock"))
        ):
            with contextlib.suppress(OSError):
                if (mine := private_cache()) != folder:
                    use = "used" if is_planted else "written"
                    logging.warning("%s can't be %s (%s), so %s is used", folder or beside, use, error.strerror, mine)
                    return prepared(files, kind, recipe, write, mine)
        raise InputError(
            f"{error.filename or path}, prepared of {files.paths[0]}, can't be written ({error.strerror or error}); "
            "name a folder for it by input_arg=prepared_dir=FOLDER"
        ) from None


def progress(title: str, total: int) -> Callable[[int], None]:
    """Returns a function that takes the amount done of a total, and logs it now and then."""
    logged_at = time.monotonic()

    def at(done: int) -> None:
        nonlocal logged_at
        if time.monotonic() - logged_at > _SECONDS:
            logged_at = time.monotonic()
            logging.warning("%s: %.0f %%", title, 100 * done / max(total, 1))

    return at


def _digest(files: Files, kind: str, recipe: dict[str, Any]) -> str:
    digest = hashlib.blake2b(json.dumps([_RULE, kind, recipe], sort_keys=True).encode(), digest_size=10)
    every = -(-len(files.paths) // _SAMPLED_FILES)
    for number, (path, size) in enumerate(zip(files.paths, files.sizes, strict=True)):
        digest.update(json.dumps([os.path.basename(path), size, storage.file_state(path).written_ns]).encode())
        for offset in sorted({0, size // 2, max(size - _SAMPLE_BYTES, 0)}) if number % every == 0 else ():
            digest.update(
                zlib.crc32(files.pread(number, offset, min(_SAMPLE_BYTES, size - offset))).to_bytes(4, "little")
            )
    return digest.hexdigest()


def _open_if_whole(path: str) -> Prepared | None:
    try:
        return Prepared(path)
    except InputError:
        return None
    except SourceError as error:
        logging.warning("%s", error)
        return None


def _write(path: str, write: Callable[[PreparedWriter], None]) -> Prepared:
    with storage.new_file(path) as file:
        writer = PreparedWriter(file)
        write(writer)
        writer.end()
    return Prepared(path)


@contextlib.contextmanager
def _locked(lock_path: str, title: str) -> Iterator[None]:
    """Holds a lock by a file; waits for another process that holds it."""
    while True:
        with open(open_lock(lock_path), "rb") as lock:
            with contextlib.suppress(OSError):  # a file system without locks: each process prepares a whole file
                told_at = -math.inf
                while not lock_descriptor(lock.fileno(), blocking=False):
                    if time.monotonic() - told_at >= _WAIT_LINE_SECONDS:
                        told_at = time.monotonic()
                        logging.warning("waiting for another process, which prepares %s, or holds %s", title, lock_path)
                    time.sleep(_LOCK_POLL_SECONDS)
            if not os.fstat(lock.fileno()).st_nlink:
                continue  # who held it has removed it, and others lock a new one
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(lock_path)
            return
