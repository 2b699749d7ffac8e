"""Memory for two snapshots, which outlives the process that writes them. Needs no TensorFlow.

Each slot is an anonymous file (memfd_create(2)), which exists as long as any process has it open: a task inherits those
that its supervisor made. A slot's header is cleared before the slot is written, and written last: a snapshot whose
process was killed meanwhile does not exist, and the other slot still has the one before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_NAME = "crankshaft-snapshot"
_HEADER = struct.Struct("<8sqqqq")  # mark, number, step, where the description begins, and its bytes
_MARK = b"snapshot"
_BEGIN = 4096  # offset of the values, which are whole pages
_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True)
class StoredSnapshot:
    """A whole snapshot in a slot.

    Attributes:
      number: counts the snapshots in these slots.
      record: plain JSON, as it was written.
      values: the description of each value, plain JSON, with its position in the file, "at", and its "bytes".
    """

    number: int
    step: int
    record: Mapping[str, Any]
    values: Sequence[Mapping[str, Any]]
    descriptor: int

    @property
    def part(self) -> tuple[str, int, list[int]]:
        """The attempt that took it, the process that it is of, and the processes that have shards of that state."""
        return self.record["attempt"], self.record["process"], self.record["parts"]

    def read(self, value: Mapping[str, Any]) -> bytearray:
        """Reads one of `values`."""
        return _read(self.descriptor, value["bytes"], value["at"])


class Slots:
    """Two slots of a process.

    Args:
      descriptors: the files', made by `make`; by default it makes its own at the first snapshot, which end with it.

    Attributes:
      descriptors: the files'; none before the first snapshot.
    """

    def __init__(self, descriptors: Sequence[int] = ()):
        self.descriptors = [*descriptors]
        self._is_own = not descriptors

    @property
    def num_bytes(self) -> int:
        """The memory that the slots have taken."""
        return sum(os.fstat(descriptor).st_size for descriptor in self.descriptors)

    def write(self, step: int, record: Mapping[str, Any], values: Iterable[tuple[Mapping[str, Any], Any]]) -> None:
        """Writes a snapshot to the slot that does not have the newest one.

        Args:
          values: (description, plain JSON; contiguous bytes) of each value.

        Raises:
          OSError: there is too little memory. That slot is then empty.
        """
        self.descriptors = self.descriptors or make()
        numbers = {descriptor: _header(descriptor)[0] for descriptor in self.descriptors}
        slot = min(self.descriptors, key=numbers.__getitem__)
        # From here on the slot has no snapshot, until its header is written, after all else.
        os.pwrite(slot, bytes(_HEADER.size), 0)
        at, described = _BEGIN, []
        for description, value in values:
            size = _write(slot, value, at)
            described.append({**description, "at": at, "bytes": size})
            at += -(-size // _ALIGNMENT) * _ALIGNMENT
        size = _write(slot, json.dumps({"record": record, "values": described}).encode(), at)
        os.pwrite(slot, _HEADER.pack(_MARK, max(numbers.values()) + 1, step, at, size), 0)

    def read(self) -> list[StoredSnapshot]:
        """Returns the snapshots that are whole, the newest first."""
        found = []
        for descriptor in self.descriptors:
            number, step, at, size = _header(descriptor)
            if number:
                content = json.loads(_read(descriptor, size, at))
                found.append(StoredSnapshot(number, step, content["record"], content["values"], descriptor))
        return sorted(found, key=lambda snapshot: -snapshot.number)

    def clear(self) -> None:
        """Empties both slots, and frees their memory."""
        for descriptor in self.descriptors:
            os.ftruncate(descriptor, 0)

    def close(self) -> None:
        """Frees the files, if they are this process's own."""
        if self._is_own:
            for descriptor in self.descriptors:
                os.close(descriptor)
            self.descriptors = []


def make() -> list[int]:
    """Makes the files of two slots. Raises `OSError`."""
    return [os.memfd_create(_NAME) for _ in range(2)]


def are_slots(descriptors: Sequence[int]) -> bool:
    """Returns whether open files are slots: a process's own children inherit its environment, but not its files."""
    with contextlib.suppress(OSError):
        return all(
            os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{_NAME}") for descriptor in descriptors
        )
    return False


def newest_whole(stored: Sequence[Mapping[int, tuple[str, int, Sequence[int]]]]) -> tuple[int, list[int]] | None:
    """Returns the newest step whose parts are all here, from one attempt, and the numbers of the processes with them.

    Args:
      stored: for each process, the `part` of each of its snapshots, by the snapshot's step. Processes may have had
        other numbers in the attempt that took it.
    """
    for step in sorted({step for each in stored for step in each}, reverse=True):
        parts = {process: steps[step] for process, steps in enumerate(stored) if step in steps}
        for attempt, _, needed in parts.values():
            holders = {process: part[1] for process, part in parts.items() if part[0] == attempt}
            if {*needed} <= {*holders.values()}:
                return step, [*holders]
    return None


def _header(descriptor: int) -> tuple[int, int, int, int]:
    """Returns the number of a slot's snapshot, 0 without one, its step, where its description begins, and its bytes."""
    header = os.pread(descriptor, _HEADER.size, 0).ljust(_HEADER.size, b"\0")
    mark, *numbers = _HEADER.unpack(header)
    return tuple(numbers) if mark == _MARK else (0, 0, 0, 0)


def _write(descriptor: int, value: Any, at: int) -> int:
    view, done = memoryview(value).cast("B"), 0
    while done < len(view):  # Linux writes 2 GiB at once at most
        done += os.pwrite(descriptor, view[done:], at + done)
    return done


def _read(descriptor: int, size: int, at: int) -> bytearray:
    data, done = bytearray(size), 0
    while done < size:
        count = os.preadv(descriptor, [memoryview(data)[done:]], at + done)
        if not count:
            raise OSError(f"a snapshot in memory ends after {done} of {size} bytes")
        done += count
    return data
