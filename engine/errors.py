"""Crankshaft's errors, and one-line reasons of other exceptions. Runs on the host; needs no TensorFlow.

The message of each error is one line with the value, the expectation and the cure; a process that it ends has its exit
code. A setting in the message is NAME=VALUE, whether a flag or a keyword sets it.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import traceback
from collections.abc import Iterator

from .own_code import COMPUTING_MODULES

# Lines that TensorFlow and Keras add to the cause: where an operation was made, and how many have failed.
_AROUND = (
    *("Graph execution error", "Detected at node", "Exception enc", "File ", "From /job", "<stack"),
    "Could not automatically infer",
)
_AUTOGRAPH_PREFIX = r'in user code:\n\n(?: *File ".*\n.*\n)+\s*(?:\w+: )?'  # the stack in a function that it converts
_KERAS_PREFIX = "Exception encountered when calling"  # the beginning of its own error for one raised in a layer's call
_NAMES = r"\{\{.*?\}\}|\[\[.*?\]\]|\[Op:\w+\](?: name:)?"  # of nodes
_WRAPPED = r"(?<=[\w,;])\n[ \t]*(?=[a-z])"  # a line break within a sentence
_BOLD = r"\x1b\[[0-9;]*m"
_NUMBER = r"^\(\d+\) [A-Z_]+: +"  # of several errors
_PIPELINE_PREFIX = r"^Error in user-defined function passed to \S+ transformation with iterator: \S+: +"
# Characters that a terminal obeys or hides: C0 and C1 except tab and line feed, and marks that change the direction of
# text; C1 also as bytes that are not UTF-8.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\udc80-\udc9f]")
_LONGEST_WORD = 300  # characters

EXIT_FAILED = 1  # the run failed for a reason that may pass, such as a lost peer: start it again
EXIT_USAGE = 2  # a mistake in a setting, a model or data: the same command would fail again
EXIT_SLOWER = 3  # a benchmark is shown to be slower than fail_below allows
# Of sysexits(3), EX_DATAERR and EX_TEMPFAIL: scripts have small codes of their own.
EXIT_DIVERGED = 65  # not finite: a run repeats its numbers, so it would diverge again: do not retry
EXIT_PORT_TAKEN = 75  # another program took a port that no user has named: start all tasks again with other ports


class CrankshaftError(Exception):
    """A mistake or a failure, in one line: the value, the expectation, the cure.

    Attributes:
      exit_code: the exit code of a process that the error ends.
    """

    exit_code = EXIT_FAILED

    def __init__(self, message: str = ""):
        if message.startswith(_KERAS_PREFIX):
            message = _line(message)
        super().__init__(message)
        self.message = message


class UsageError(CrankshaftError, ValueError):
    """A mistake in a setting, a model or data. The same call fails again."""

    exit_code = EXIT_USAGE


class RunError(CrankshaftError, RuntimeError):
    """A run failed, for a reason that may pass unless the exit code says otherwise; `__cause__` is the reason."""


class InputError(UsageError):
    """A file or argument of an input can't be used."""


class SourceError(UsageError):
    """Data can't be read; the message names the file and the example."""


class BadRecordError(SourceError):
    """One example can't be read, but others can.

    Args:
      example: the example's index.
      message: the line that describes the failure.
    """

    def __init__(self, example: int, message: str):
        super().__init__(message)
        self.example = example


class UnavailableError(RunError):
    """Data can't be read because the system or the network failed. A retry may succeed."""


class StuckReadError(UnavailableError):
    """A read has taken too long."""


class StuckStreamError(StuckReadError):
    """A stream has yielded nothing for too long; TensorFlow would wait for it for ever."""


class NotCompilableError(UsageError):
    """XLA can't compile a step; the message names the op."""


class LabelError(UsageError):
    """Labels do not fit a loss or a metric."""


class LeaseError(UsageError):
    """A lease failed at each try; the message names the worker, the data and the cause."""


class CheckpointError(UsageError):
    """A checkpoint can't be read, or does not fit the state."""


class SaveError(RunError):
    """A checkpoint can't be written; a full disk may have space later."""


class NonfiniteError(RunError):
    """A loss, gradient or variable became inf or nan."""

    exit_code = EXIT_DIVERGED


class LostPeerError(RunError):
    """A process that trains together with this one is gone or stuck."""


class OutOfSyncError(RunError):
    """Replicas have different values of one variable."""


@contextlib.contextmanager
def importing(library: str, missing: str) -> Iterator[None]:
    """Turns a failed import of an optional library, in the body, into a `UsageError`.

    Args:
      library: The name by which it is imported.
      missing: The line for a library that is not installed; one that is and can't be imported has its own reason.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == library:
            raise UsageError(missing) from None
        raise UsageError(
            f"the library {library} is installed and can't be imported ({type(error).__name__}: {reason(error)}); "
            "install what it lacks, or another version of it"
        ) from None


def visible(text: str) -> str:
    r"""Escapes all characters that would act on a terminal, such as \\x1b at the beginning of a terminal's command."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def as_line(text: str) -> str:
    """Returns a text for one line: `visible`, with newlines escaped, as a file's name with one would forge a line."""
    return visible(text).replace("\n", r"\n").replace("\t", r"\t")


def counted(number: int, noun: str) -> str:
    """Returns "1 step", "2,000 steps"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def rounded(value: float) -> str:
    """Returns "0.0123", "12.3", "1,234": three digits, or all of those before the point."""
    text = f"{value:.3g}"
    return f"{value:,.0f}" if "e+" in text else text


def one_line(text: str) -> str:
    """Returns `as_line` of a text, with very long words truncated."""
    return as_line(re.sub(rf"(\S{{{_LONGEST_WORD}}})\S+", r"\1...", text))


def reason(error: BaseException) -> str:
    """Returns the line of an error's message with the reason, or the name of its class if it has none.

    A line that ends within a sentence, as in Python's longer messages, includes the next one.
    """
    return _line(str(error)) or type(error).__name__


def _line(text: str) -> str:
    text = re.sub(rf"{_BOLD}|{_AUTOGRAPH_PREFIX}", "", text)
    lines = [line.strip() for line in re.sub(_WRAPPED, " ", text).splitlines()]
    lines = [line for line in lines if line and not line.startswith(_AROUND) and "root error(s) found" not in line]
    first = re.sub(_NAMES, "", lines[0]).strip() if lines else ""
    return re.sub(_PIPELINE_PREFIX, "", re.sub(_NUMBER, "", first))


def chain(error: BaseException) -> list[BaseException]:
    """Returns an error, the one that it was raised for, and so on."""
    errors: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in errors:  # an error may be its own cause
        errors.append(following)
        following = following.__cause__ or following.__context__
    return errors


def free_frames(error: BaseException) -> None:
    """Frees the local variables of TensorFlow's and the engine's functions in an error's traceback, not users'.

    A traceback keeps each function's variables, such as a step's iterator.
    """
    for frame, _ in itertools.chain.from_iterable(traceback.walk_tb(raised.__traceback__) for raised in chain(error)):
        if frame.f_globals.get("__name__", "").startswith(("tensorflow.", *COMPUTING_MODULES)):
            with contextlib.suppress(RuntimeError):  # it is still running
                frame.clear()
