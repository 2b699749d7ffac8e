"""Turns an exception into one line for the user: the value, what was expected, and the cure.

Crankshaft's own errors have their line and exit code; `_EXPLANATIONS` is for everything else.
"""

from __future__ import annotations

import bdb
import contextlib
import errno
import functools
import os
import re
import resource
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import NamedTuple, ParamSpec, TypeVar

from ..engine.errors import LabelError, NonfiniteError, SaveError, chain, reason
from ..engine.machine import cpus
from ..engine.own_code import (
    FILES_LIKE_USERS,
    OWN_FILES,
    is_frameworks,
    is_users,
    note_passed,
    users_line,
    users_line_in,
)
from .failures import EXIT_FAILED, EXIT_USAGE, CrankshaftError, RunError, UsageError
from .host import forks

_CALLBACKS = os.path.join("keras", "src", "callbacks", "")
_LASTING = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)


P = ParamSpec("P")
R = TypeVar("R")


def explained(call: Callable[P, R]) -> Callable[P, R]:
    """Makes a call that Python programs make raise its exceptions as `CrankshaftError`s, with short tracebacks.

    Exceptions of the program's own code, in a hook, a callback or its data, stay themselves. In a process in which the
    call would hang, it is not made, see `process.refuse_forked_start`.
    """

    @functools.wraps(call)
    def border(*args: P.args, **keywords: P.kwargs) -> R:
        __tracebackhide__ = True  # in IPython and pytest
        try:
            forks.refuse_forked_start()
            note_passed(args, keywords)
            return call(*args, **keywords)
        except Exception as error:
            raised = _to_programs_error(error)
            debug = keywords.get("debug") or getattr(getattr([*args, None][0], "config", None), "debug", False)
            if not debug and not os.environ.get("CRANKSHAFT_FULL_TRACEBACK"):
                _shorten(error)
        try:
            raise raised
        finally:
            del raised  # it holds this frame

    return border


def _to_programs_error(error: Exception) -> Exception:
    """Converts an error to the one that a program gets, with its cause; it may be the same."""
    if isinstance(error, bdb.BdbQuit) or (not isinstance(error, CrankshaftError) and _is_programs(error)):
        return error  # of `q` in a debugger, wherever that was
    explained = _explained(error)
    explained.message = f"{explained.message}{_limit(error)}"
    explained.args = (explained.message,)
    if explained is not error:
        is_internal = isinstance(explained, UsageError) and _traced_line(error) is None
        explained.__cause__ = None if is_internal else error  # which has the traceback
    return explained


def _shorten(error: BaseException) -> None:
    """Leaves Crankshaft's, TensorFlow's and Keras's frames out of the tracebacks of errors that are the user's."""
    for raised in chain(error):
        if not isinstance(raised, CrankshaftError) and _traced_line(raised) is None:
            continue  # it is to be found in those frames
        frames, entry = list[TracebackType](), raised.__traceback__
        while entry is not None:
            frames, entry = [*frames, entry], entry.tb_next
        kept: TracebackType | None = None
        for frame in reversed(frames):
            if not is_internal(frame.tb_frame):
                kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
        raised.__traceback__ = kept


def is_internal(frame: FrameType) -> bool:
    """Whether a frame tells a program's author nothing: the package's own, TensorFlow's, Keras's, a context's."""
    file = frame.f_code.co_filename
    return file.startswith((*OWN_FILES, contextlib.__file__)) or is_frameworks(file)


def explain(error: Exception, has_debug: bool = True) -> tuple[int, str]:
    """Returns (exit code, line); the code is 2 if the same command would fail again for the same reason.

    If a limit of the machine was reached, the line has the limit's value here.
    """
    explained = _explained(error, "; debug=true shows the traceback" if has_debug else "")
    limit = _limit(error)
    code = explained.exit_code if not limit else EXIT_USAGE if _met_limit(error) in _LASTING_LIMITS else EXIT_FAILED
    return code, f"{explained.message}{limit}"


def explain_system_error(error: OSError) -> str:
    """Describes a refused system call in one line: the file, the reason, and the limit that was reached."""
    return f"{_refused(error)}{_limit(error)}"


def _refused(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)


def _limit(error: BaseException) -> str:
    """Describes the limit of the machine that an error has met; "" for none."""
    number = _met_limit(error)
    has_cure = number == errno.ENOSPC and isinstance(error, SaveError)
    return f"; {_LIMITS[number]()}" if number and not has_cure else ""


def _met_limit(error: BaseException) -> int | None:
    """Finds which of `_LIMITS` an error, or the one that it was raised for, has met; None for none."""
    return next((number for raised in chain(error) if (number := _system_errno(raised)) in _LIMITS), None)


def _system_errno(error: BaseException) -> int | None:
    """Finds the system's reason for an error; None if it is another, or unknown."""
    lacks_memory = isinstance(error, MemoryError) or re.search(_NO_MEMORY, str(error))
    if lacks_memory and resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return errno.ENOMEM
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if isinstance(error, RuntimeError) and error.args in _NO_THREAD:
        return errno.EAGAIN
    # TensorFlow's status code stands for several reasons, and its message has the system's text, as array_record's has.
    if not (isinstance(error, OSError) or _kinds(error).intersection(_STATUSES_OF_LIMITS)):
        return None
    return next((number for number in _LIMITS if os.strerror(number) in reason(error)), None)


def _kinds(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def _limit_line(limit: int, unit: str, shell: str) -> Callable[[], str]:
    def line() -> str:
        most = resource.getrlimit(limit)[0]
        if most == resource.RLIM_INFINITY:
            return f"a limit on {unit} is met that is not this process's own (ulimit {shell} is unlimited); raise it"
        return f"this process may have {most:,} {unit} (ulimit {shell}); raise that, or use less"

    return line


def thread_limit() -> str:
    """Describes the lowest limit on processes and threads: of this process's control groups, or of its user."""
    files = (folder / "pids.max" for folder in cpus.control_groups(controller="pids"))
    limits = [int(line) for file in files for line in cpus.lines(file) if line.isdecimal()]
    user_limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if limits and (user_limit == resource.RLIM_INFINITY or min(limits) < user_limit):
        return f"this control group may have {min(limits):,} processes and threads (pids.max); raise that, or use less"
    return _limit_line(resource.RLIMIT_NPROC, "processes and threads of this user", "-u")()


# Python's whole report, of `threading` and of `faulthandler`.
_NO_THREAD = (("can't start new thread",), ("unable to start watchdog thread",))
# The system's reason for each limit, and how to read the limit's value.
_LIMITS: dict[int, Callable[[], str]] = {
    errno.ENOSPC: lambda: "free space on its disk, or name a folder on another (for temporary files: TMPDIR)",
    errno.EDQUOT: lambda: "free space of this user's, or have the quota raised",
    errno.EFBIG: _limit_line(resource.RLIMIT_FSIZE, "bytes in a file", "-f"),
    errno.EMFILE: _limit_line(resource.RLIMIT_NOFILE, "open files", "-n"),
    errno.EAGAIN: thread_limit,
    errno.ENOMEM: _limit_line(resource.RLIMIT_AS, "bytes of address space", "-v"),
}
_LASTING_LIMITS = (errno.EFBIG, errno.EMFILE, errno.ENOMEM)  # of this process alone: the next one meets them again
# What Python, oneDNN, TensorFlow on CPUs and the linker say where memory can't be mapped.
_NO_MEMORY = rf"{os.strerror(errno.ENOMEM)}|could not create a primitive|(?i:allocator \w*cpu)|failed to map segment"
# TensorFlow's for them (`ErrnoToCode` in its platform/errors.cc).
_STATUSES_OF_LIMITS = ("ResourceExhaustedError", "OutOfRangeError")


class _Explanation(NamedTuple):
    """An exception of TensorFlow, Keras or Python that would have another exit code without it.

    Attributes:
      kinds: the names of its class and of those that it is raised as.
      words: a regular expression that its message has.
      error: the class of the error that it becomes.
      line: a format of the error's line; it has the groups of `words` by number, `reason`, and `at`: ", at" the user's
        line, or nothing.
    """

    kinds: tuple[str, ...]
    words: str
    error: type[CrankshaftError]
    line: str


_INVALID = ("InvalidArgumentError",)
# TensorFlow's of what may be otherwise the next time, although an op of the user's met it.
_PASSING = [
    f"{status}Error"
    for status in ("Aborted", "Cancelled", "DataLoss", "DeadlineExceeded", "Internal", "Unavailable", "Unknown")
]
_OF_A_RESTARTED_TASK = r"(?i)unknown device|tensor remote_handle"  # an InvalidArgumentError of TensorFlow's
_EXPLANATIONS = (
    _Explanation(
        ("ResourceExhaustedError", "MemoryError"),
        "",
        RunError,
        "out of memory ({reason}){at}; lower global_batch_size or resident_data_mb, or raise accumulate_steps",
    ),
    _Explanation(
        ("RuntimeError",),
        "`merge_call` called while defining",
        UsageError,
        "a step sums over replicas within tf.cond, a loop or a tf.function{at}, where they can't meet, as "
        "BatchNormalization(synchronized=True) does with accumulate_steps; leave one out. So does a Keras optimizer's "
        "apply; give it to crankshaft.make_optimizer(self, variables, optimizer) in build",
    ),
    _Explanation(
        ("RuntimeError", "ValueError", "UnimplementedError"),
        r"Mixing different tf\.distribute|created in this tf\.distribute|was expecting a DTensor",
        UsageError,
        "a run distributes by a strategy of its own, and the program uses another's scope(), run() or variables{at}; "
        "leave these out: build_model is called within the run's scope, train_step gets a replica's part of the batch, "
        "and strategy=mirrored, or mesh, places the variables",
    ),
    _Explanation(
        ("OperatorNotAllowedInGraphError",),
        "symbolic `tf.Tensor`",
        UsageError,
        "in a step, which is compiled, Python can't branch by a tensor's value, or loop over it{at}; use tf.where, "
        "tf.cond or tf.while_loop, or a tf.function, or a number that is not a tensor",
    ),
    _Explanation(
        ("UnimplementedError", "FailedPreconditionError"),
        "(?i)determinis",
        UsageError,
        "TensorFlow has no kernel of an op that computes the same bits each time on GPUs ({reason}){at}; use another "
        "op, or set the variable TF_DETERMINISTIC_OPS=0: then a run does not repeat, nor resume, to the bit",
    ),
    _Explanation(  # by a kernel on CPUs
        _INVALID,
        r"label value of (\S+) which is outside the valid range of \[0, (\d+)\)",
        LabelError,
        "the data has a label of {0}, and the loss takes labels from 0 to below {1}, as many as the model has outputs"
        "{at}; number labels from 0, those that the loss computes too, and end the model in a layer of one unit for "
        "each class",
    ),
    _Explanation(  # of a look-up, by a kernel on CPUs
        _INVALID,
        r"= (-?\d+) is not in \[0, (\d+)\)",
        LabelError,
        "ids from 0 to below {1}: an id of {0} was looked up{at}; correct the data, or allow for more",
    ),
    _Explanation(
        ("FailedPreconditionError",),
        r"dataset was expected to contain (\d+) elements? but contained ((?:only|at least) \d+)",
        UsageError,
        "an epoch of the data has {1} examples, and the run goes by {0}, as they were counted as it began, or as "
        "assert_cardinality says; give the data that it began with, a seed to what samples in it, such as "
        "rejection_resample, or use another run_dir",
    ),
    _Explanation(  # of `zipfile`, by which Keras and NumPy write
        ("ValueError",),
        "ZIP does not support timestamps before 1980",
        RunError,
        "{reason}; set this machine's clock, and try again",
    ),
)


def _explained(error: Exception, traceback_by: str = "") -> CrankshaftError:
    """Makes the error that explains an error to the user; one of Crankshaft's stays itself."""
    if type(error).__name__ == "StagingError":  # what AutoGraph raises instead of an error of a user's function
        error = error.__context__ if isinstance(error.__context__, CrankshaftError) else error
    if isinstance(error, CrankshaftError):
        return error
    kinds, text = _kinds(error), str(error)
    traced = _traced_line(error)
    line = users_line_in(text) or traced  # the text's stack is that of an op, or the deeper one
    at = f", at {line}" if line else ""
    if kinds.intersection(_INVALID) and "Detected Infinity or NaN in output" in text:
        from ..engine.hooks import numerics

        if nonfinite := numerics.explain(error):
            return NonfiniteError(nonfinite)
    if kinds.intersection(_INVALID) and "assertion failed: " in text:  # whose operands TensorFlow puts in brackets
        return UsageError(reason(error).removeprefix("assertion failed: ").replace("] [", " ").strip("[]") + at)
    for explanation in () if _limit(error) else _EXPLANATIONS:  # TensorFlow calls a disk exhausted, too
        if kinds.intersection(explanation.kinds) and (match := re.search(explanation.words, text)):
            return explanation.error(explanation.line.format(*match.groups(), reason=reason(error), at=at))
    named = f"{type(error).__name__}: {reason(error)}"
    if line is None and isinstance(error, OSError):
        return RunError(_refused(error))
    # A network or a disk may be available the next time; a missing file, or another user's, will not. And TensorFlow or
    # Keras will refuse the same value again.
    is_refused = isinstance(error, OSError) and not isinstance(error, _LASTING)
    passes = is_refused or kinds.intersection(_PASSING) or re.search(_OF_A_RESTARTED_TASK, text)
    is_mistake = not passes and (traced or isinstance(error, ValueError) or kinds.intersection(_INVALID))
    return (UsageError if is_mistake else RunError)(f"{named}{at}{traceback_by}")


def _is_programs(error: Exception) -> bool:
    """Whether the program, a library it called or a Keras callback raised an error outside step tracing.

    So is Python's own of arguments that a call does not have, with the border's frame alone.
    """
    if isinstance(error, TypeError) and error.__traceback__ and error.__traceback__.tb_next is None:
        return True
    for file, *_ in traceback.extract_tb(error.__traceback__):
        if _CALLBACKS in file or (is_users(file) and not file.startswith(FILES_LIKE_USERS)):
            return True
        if f"{os.sep}tensorflow{os.sep}python{os.sep}" in file:
            return False
    return False


def _traced_line(error: BaseException) -> str | None:
    """Finds "file:line in function" of the innermost frame in the user's code, a model or an input; else None."""
    return users_line(traceback.extract_tb(error.__traceback__))
