"""Requests to a running job, by files in its run_dir, without an open port.

The client puts a request into a folder there; each task checks it, and the addressed one puts its answer beside it.
Files are only data: anything but a small regular file with known words is ignored. The client removes both.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple

from ...engine.errors import UsageError
from ...engine.machine.files import file_system_time, open_regular, write_text

KINDS = ("profile", "stacks", "checkpoint", "status", "stop")
_REQUEST = re.compile(r"([0-9a-f]{16})\.request")
_MOST_BYTES = {"request": 1 << 12, "answer": 1 << 24}
_POLL_SECONDS = 0.1
_MOST_A_TURN = 32
LONGEST_SECONDS = 1e6  # that a client waits


class Request(NamedTuple):
    """A request: its kind, its task (None: the chief), and its random number."""

    kind: str
    task: str | None
    number: str


class Requests:
    """The requests to one task.

    Args:
      folder: the folder of requests, see `RunDir.requests`; None disables them.
      is_mine: returns whether a request of a kind, to a task, is for this one.
    """

    def __init__(self, folder: str | None, is_mine: Callable[[str, str | None], bool]):
        self._folder = folder
        self._is_mine = is_mine
        self._came: dict[str, int] = {}  # arrival times of the folder's files, by the file system's clock
        self._taken: set[str] = set()

    def take(self) -> list[Request]:
        """Returns new requests, except those whose client no longer waits.

        Of many, the newest are returned first, and the others by later calls: flooding the folder delays no later
        client, and no call takes long.
        """
        if self._folder is None:
            return []
        try:
            names = {match[1] for name in os.listdir(self._folder) if (match := _REQUEST.fullmatch(name))}
        except FileNotFoundError:  # which a file system may remember for longer than a client waits
            with contextlib.suppress(OSError):  # this host does not share run_dir
                os.mkdir(self._folder)
            return []
        except OSError:
            return []
        self._taken &= names
        # 0 if it could not be read: then it is asked for again at the next call.
        self._came = {number: self._came.get(number) or _changed(self._folder, number) for number in names}
        waiting = sorted(names - self._taken, key=lambda number: (-self._came[number], number))[:_MOST_A_TURN]
        self._taken.update(waiting)
        now = file_system_time(self._folder) if waiting else 0.0
        return [request for number in waiting if (request := self._read(self._folder, number, now))]

    def _read(self, folder: str, number: str, now: float) -> Request | None:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            values = json.loads(_read(folder, number, "request"))
            if not isinstance(values, dict):
                return None
            values = {"kind": None, "task": None, "seconds": None, **values}
            kind, task, seconds = values["kind"], values["task"], values["seconds"]
            is_known = kind in KINDS and (task is None or isinstance(task, str)) and type(seconds) in (int, float)
            age = now - self._came[number] / 1e9  # one that a killed client has left does not count
            if is_known and age < min(seconds, LONGEST_SECONDS) and self._is_mine(kind, task):
                return Request(kind, task, number)
        return None

    def answer(self, request: Request, text: str) -> None:
        """Answers a request. Raises OSError if the answer can't be written."""
        if self._folder and os.path.isdir(self._folder):
            whole = text.encode(errors="backslashreplace").decode()  # a file's name in it may not be UTF-8
            write_text(_path(self._folder, request.number, "answer"), whole)


def answer_stacks(requests: Requests) -> None:
    """Answers requests for stacks, in a task with no other requests."""
    for request in requests.take():
        with contextlib.suppress(OSError):
            requests.answer(request, stacks())


def stacks() -> str:
    """Returns the stack of each thread of this process, the newest call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames().items()
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames
    )


def ask(folder: str, kind: str, task: str | None, seconds: float) -> str | None:
    """Sends a request to a task of a run; returns its answer, or None after so many seconds. Raises OSError."""
    number = secrets.token_hex(8)
    is_new = not os.path.lexists(folder)
    os.makedirs(folder, exist_ok=True)
    try:
        end = time.monotonic() + seconds
        request = {"kind": kind, "task": task, "seconds": seconds}
        write_text(_path(folder, number, "request"), json.dumps(request))
        while time.monotonic() < end:
            with contextlib.suppress(FileNotFoundError):
                # To ask for a name that is missing would have a file system remember that.
                if f"{number}.answer" in os.listdir(folder):
                    return _read(folder, number, "answer")
            time.sleep(_POLL_SECONDS)
        return None
    finally:
        for ending in ("request", "answer"):
            with contextlib.suppress(OSError):
                os.remove(_path(folder, number, ending))
        if is_new:
            with contextlib.suppress(OSError):  # it contains another request
                os.rmdir(folder)


def _changed(folder: str, number: str) -> int:
    with contextlib.suppress(OSError):
        return os.lstat(_path(folder, number, "request")).st_ctime_ns  # which can't be forged
    return 0


def _path(folder: str, number: str, ending: str) -> str:
    return os.path.join(folder, f"{number}.{ending}")


def _read(folder: str, number: str, ending: str) -> str:
    with os.fdopen(open_regular(_path(folder, number, ending), os.O_NOFOLLOW), "rb") as file:
        content = file.read(_MOST_BYTES[ending] + 1)
    if len(content) > _MOST_BYTES[ending]:
        raise UsageError(f"{number}.{ending} is too large")
    return content.decode(errors="replace")
