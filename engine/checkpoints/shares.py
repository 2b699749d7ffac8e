"""Lets processes that have shards of one state write its checkpoint together, in a shared directory.

Each writes its *share*, files of its own in one temporary folder, and then atomically a *note* that lists the files or
gives the reason why they could not be written. The process that seals the checkpoint reads the notes. Nothing else is
exchanged: checkpoints are written beside training, whose collectives must not be disturbed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import threading
import time
import uuid
from collections.abc import Iterable

from ..errors import SaveError
from ..machine import files

_POLL_SECONDS = 0.05
_LEFT_ALONE_SECONDS = 5.0  # how long a process that is ending waits for the others' shares


@dataclasses.dataclass(frozen=True)
class WritingProcess:
    """This process among those that write a checkpoint together.

    Attributes:
      process: the process's number; process 0 seals checkpoints.
      attempt: a name for this attempt of the job, of letters, digits and _, the same in all processes: shares
        that an earlier attempt left behind are not read.
      timeout_seconds: how long to wait for another process that writes nothing; 0 waits for ever.
    """

    process: int = 0
    attempt: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    timeout_seconds: float = 0.0


def write_note(folder: str, process: int, names: Iterable[str]) -> None:
    """Writes the note that a process's share, the checkpoints `names` in the folder, is complete and on the disk."""
    names = [os.path.basename(name) for name in names]
    # First the files: once the note is there, the first process moves them and publishes the checkpoint.
    for file in os.listdir(folder):
        if file.split(".")[0] in names:
            files.sync(os.path.join(folder, file))
    files.write_text(_note(folder, process), json.dumps({"names": names}))


def discard(folder: str, process: int) -> None:
    """Removes the files of a process's share, which is not complete: a note needs space, too. Raises OSError."""
    for file in os.listdir(folder):
        if re.match(rf"share-{process}\b", file) and os.path.isfile(path := os.path.join(folder, file)):
            os.remove(path)


def write_failure(folder: str, process: int, why: str) -> None:
    """Writes the note with the reason why a process could not write its share. Raises OSError."""
    files.write_text(_note(folder, process), json.dumps({"why": why}))


def collect(folder: str, processes: Iterable[int], timeout_seconds: float) -> list[str]:
    """Waits for other processes' shares, and returns the paths of the checkpoints in them.

    Args:
      timeout_seconds: limit on time without a change of the folder; 0 is none. An ending process waits a few seconds.

    Raises:
      SaveError: a share could not be written, or not in time.
    """
    waiting, paths = set(processes), []
    seen, since = None, time.monotonic()
    while waiting:
        for process in sorted(waiting):
            if os.path.exists(_note(folder, process)):
                paths += _read(folder, process)
                waiting.discard(process)
        if not waiting:
            break
        if (now := _sizes(folder)) != seen:
            seen, since = now, time.monotonic()
        patience = timeout_seconds if threading.main_thread().is_alive() else _LEFT_ALONE_SECONDS
        if patience and time.monotonic() - since > patience:
            raise SaveError(f"worker {min(waiting)} wrote nothing of its share for {patience:g} s")
        time.sleep(_POLL_SECONDS)
    return paths


def _read(folder: str, process: int) -> list[str]:
    note = files.read_json(_note(folder, process))
    if "why" in note:
        raise SaveError(f"worker {process} could not write its share: {note['why']}")
    return [os.path.join(folder, name) for name in note["names"]]


def _note(folder: str, process: int) -> str:
    return os.path.join(folder, f"share-{process}.json")


def _sizes(folder: str) -> dict[str, int]:
    """Returns the size in bytes of each file in the folder: a change shows that a process is still writing."""
    sizes = {}
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                sizes[os.path.join(path, name)] = os.path.getsize(os.path.join(path, name))
            except OSError:
                continue  # it was renamed in between
    return sizes
