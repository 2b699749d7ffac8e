"""The program's standard streams and arguments: never closed, of any encoding, whose reader may leave."""

from __future__ import annotations

import errno
import os
import stat
import sys

from ...engine import logging
from .. import terminal


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
