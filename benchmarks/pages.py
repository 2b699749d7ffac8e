"""What of files the system holds in memory: found out by samples, read in, dropped. Host code, on Linux."""

from __future__ import annotations

import os
from collections.abc import Sequence

from crankshaft.engine.machine.files import open_regular

_SAMPLES = 256  # of all files together
_PIECE_BYTES = 8 << 20


class Pages:
    """The pages of some files, brought into the state in which reading them is to be timed.

    Args:
      paths: of local files.
      state: "as_found", "warm": read before the first round, "cold": dropped before each.

    Attributes:
      in_memory: the share of the pages that were in memory before the first round; None where it can't be known.
      bytes: of all files.
    """

    def __init__(self, paths: Sequence[str], state: str):
        self._paths, self._state = [*paths], state
        self._rounds = 0
        self.in_memory: float | None = None
        self.bytes = sum(os.path.getsize(path) for path in self._paths)

    def before_round(self) -> None:
        """Brings the files into their state."""
        if self._state == "warm" and not self._rounds:
            read_through(self._paths)
        elif self._state == "cold":
            drop(self._paths)
        if not self._rounds:
            self.in_memory = share_in_memory(self._paths)
        self._rounds += 1


def drop(paths: Sequence[str]) -> None:
    """Has the system forget the pages of files; those that another process maps stay."""
    for path in paths:
        descriptor = open_regular(path)
        try:
            os.fsync(descriptor)  # what is not written yet can't be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def read_through(paths: Sequence[str]) -> None:
    """Reads files from end to end, in large pieces."""
    piece = bytearray(_PIECE_BYTES)
    for path in paths:
        descriptor = open_regular(path)
        try:
            while os.readv(descriptor, [piece]):
                pass
        finally:
            os.close(descriptor)


def share_in_memory(paths: Sequence[str]) -> float | None:
    """Returns the share of files that a read finds in memory, of offsets evenly spread over them.

    `RWF_NOWAIT` of preadv2(2) reads only what is there, but Linux then fetches the page that it has not found. None
    where a file system does not know it, or files are empty.
    """
    sizes = [os.path.getsize(path) for path in paths]
    distance = max(1, sum(sizes) // _SAMPLES)
    there, samples = 0, 0
    for path, size in zip(paths, sizes, strict=True):
        descriptor = open_regular(path)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # fetch no neighbours
            for offset in range(min(size - 1, distance // 2), size, distance) if size else ():
                samples += 1
                there += _is_in_memory(descriptor, offset)
        except OSError:
            return None
        finally:
            os.close(descriptor)
    return there / samples if samples else None


def _is_in_memory(descriptor: int, offset: int) -> bool:
    try:
        return os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
