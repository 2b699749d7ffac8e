"""Turns an exception into one line for whoever started the run: what was asked, found, and is to be done. Host code."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping

from ..engine.data.source import SourceError, UnavailableError
from ..engine.internals.errors import reason
from ..input.data import InputError
from .cluster.meeting import ClusterError, PortTakenError
from .command_line.flags import ABOUT, GROUPS
from .errors import EXIT_DIVERGED, EXIT_FAILED, EXIT_PORT_TAKEN, EXIT_USAGE, RunError, UsageError

_HOUSE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OWN = tuple(os.path.join(_HOUSE, room, "") for room in ("engine", "models", "input", "launch"))
_LIBRARIES = ("site-packages", "dist-packages", f"lib{os.sep}python", "<frozen", "<string>", "__autograph_generated")

_LABEL = re.compile(r"label value of (\S+) which is outside the valid range of \[0, (\d+)\)")  # a kernel's, on CPUs
_ID = re.compile(r"= (-?\d+) is not in \[0, (\d+)\)")  # of a look-up, likewise
_LENGTH = re.compile(r"dataset was expected to contain (\d+) elements? but contained ((?:only|at least) \d+)")
_PARAMETER = re.compile(r"`([a-z_]+)`")
_FLAG = re.compile(r"--(?!help|debug)([a-z_0-9]+)")
_COMMAND = re.compile(r"\b(crankshaft|python3?|make) \S.*--")
_LASTING = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)


@contextlib.contextmanager
def as_lines(names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Turns what the body raises into `UsageError` or `RunError`: the border of what programs call in Python.

    What the program's own code has raised, in a hook, a callback or its data, is raised as it is.

    Args:
      names: the caller's arguments by the flags that they set, where they have other names.
    """
    try:
        yield
    except (UsageError, RunError) as error:
        error.args = (with_keywords(str(error), names or {}),)
        raise
    except Exception as error:
        if _is_of_program(error):
            raise
        code, line = explain(error, has_debug=False)  # its cause has the traceback
        raise (UsageError if code == EXIT_USAGE else RunError)(with_keywords(line, names or {})) from error


def explain(error: Exception, has_debug: bool = True) -> tuple[int, str]:
    """Returns (exit code, line); the code is 2 where the same command would fail again for the same reason.

    A limit of the machine's that was met is named with what it is here.

    Args:
      error: what was raised.
      has_debug: whether the command has --debug.
    """
    code, line = _explained(error, "; --debug shows the traceback" if has_debug else "")
    limit = _limit(line)
    return EXIT_FAILED if limit else code, f"{line}{limit}"


def of_system(error: OSError) -> str:
    """Returns the line of what the system refused: the file, why, and the limit that was met."""
    line = _refused(error)
    return f"{line}{_limit(line)}"


def _refused(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)


def _limit(line: str) -> str:
    return next((f"; {limit()}" for words, limit in _LIMITS.items() if words in line), "")


def _most(limit: int, unit: str, shell: str) -> Callable[[], str]:
    def line() -> str:
        most = resource.getrlimit(limit)[0]
        if most == resource.RLIM_INFINITY:
            return f"a limit on {unit} is met that is not this process's own (ulimit {shell} is unlimited); raise it"
        return f"this process may have {most:,} {unit} (ulimit {shell}); raise that, or use less"

    return line


# What the system says where a limit is met, and what the limit is.
_LIMITS = {
    os.strerror(errno.ENOSPC): lambda: "free space on its disk, or name a folder on another",
    os.strerror(errno.EDQUOT): lambda: "free space of this user's, or have the quota raised",
    os.strerror(errno.EFBIG): _most(resource.RLIMIT_FSIZE, "bytes in a file", "-f"),
    os.strerror(errno.EMFILE): _most(resource.RLIMIT_NOFILE, "open files", "-n"),
    "can't start new thread": _most(resource.RLIMIT_NPROC, "processes and threads of this user", "-u"),
}


def _explained(error: Exception, traceback_by: str) -> tuple[int, str]:
    if isinstance(error, UnavailableError):
        return EXIT_FAILED, with_flags(str(error))
    if isinstance(error, (UsageError, InputError, SourceError)):
        return EXIT_USAGE, with_flags(str(error))
    if isinstance(error, PortTakenError):
        return EXIT_PORT_TAKEN, str(error)
    if isinstance(error, (ClusterError, RunError)):
        return EXIT_FAILED, str(error)
    if "tensorflow" in sys.modules and (explained := _by_engine(error)):
        code, line = explained
        return code, with_flags(line)
    if isinstance(error, (ValueError, TypeError, NotImplementedError)) and _is_our_check(error):
        return EXIT_USAGE, with_flags(" ".join(str(error).split()))
    frame_line = _users_frame(error)
    what = f"{type(error).__name__}: {reason(error)}"
    if frame_line is None and isinstance(error, OSError):
        return EXIT_FAILED, _refused(error)
    if frame_line is None:
        # A value that TensorFlow or Keras refused, it will refuse again.
        return EXIT_USAGE if isinstance(error, ValueError) else EXIT_FAILED, f"{what}{traceback_by}"
    # A network or a disk may be there the next time; a file that is not there, or is not ours, will not.
    passes = isinstance(error, OSError) and not isinstance(error, _LASTING)
    return EXIT_FAILED if passes else EXIT_USAGE, f"{what}, at {frame_line}{traceback_by}"


def with_flags(line: str) -> str:
    """Returns an engine's message with flags, `--run_dir`, in the place of the parameters that it names in backquotes.

    The engine knows no flags; a parameter of the engine that a user can set has the name of its flag.
    """
    names = {name for names in GROUPS.values() for name in names}
    return _PARAMETER.sub(lambda found: f"--{found[1]}" if found[1] in names else found[0], line)


def with_keywords(line: str, names: Mapping[str, str]) -> str:
    """Returns a message with the keywords of a program in Python in the place of flags; a command to paste stays.

    Args:
      line: the message, with flags such as `--run_dir` or `--norestore_best`.
      names: as `as_lines` takes them.
    """
    command = _COMMAND.search(line)
    end = command.start() if command else len(line)

    def keyword(found: re.Match) -> str:
        name = found[1]
        if name.startswith("no") and name not in ABOUT and name[2:] in ABOUT:
            return f"{names.get(name[2:], name[2:])}=False"
        return names.get(name, name)

    return _FLAG.sub(keyword, line[:end]).replace("see --help", "see crankshaft train --help") + line[end:]


def is_lost_peer(error: Exception) -> bool:
    """Returns whether the error is that a process which this one trained with is gone."""
    watchdog = sys.modules.get("crankshaft.engine.health.watchdog")  # not imported: no one can have raised it
    return watchdog is not None and isinstance(error, watchdog.LostPeerError)


def _by_engine(error: Exception) -> tuple[int, str] | None:
    try:
        import tensorflow as tf

        from ..engine.checkpoints import CheckpointError
        from ..engine.health.watchdog import LostPeerError
        from ..engine.hooks import numerics
        from ..engine.hooks.sync_check import OutOfSyncError
        from ..engine.strategies.devices import DeviceError
        from ..engine.strategies.parameter_server.coordinator import LeaseError
    except Exception:  # the engine can't be imported, which is what `error` says
        return None
    if isinstance(error, (DeviceError, LeaseError)):
        return EXIT_USAGE, str(error)
    if isinstance(error, CheckpointError):  # a full disk may have room the next time
        return EXIT_FAILED if "could not be written" in str(error) else EXIT_USAGE, str(error)
    if isinstance(error, (numerics.LabelError, LostPeerError, OutOfSyncError)):
        return EXIT_FAILED, str(error)
    if line := str(error) if isinstance(error, numerics.NonfiniteError) else numerics.explain(error):
        return EXIT_DIVERGED, line
    full = any(words in str(error) for words in _LIMITS)  # a disk, which TensorFlow calls exhausted too
    if isinstance(error, (tf.errors.ResourceExhaustedError, MemoryError)) and not full:
        return EXIT_FAILED, (
            f"out of memory ({reason(error)}); lower --global_batch_size or --resident_data_mb, or raise "
            "--accumulate_steps"
        )
    if isinstance(error, RuntimeError) and "`merge_call` called while defining" in str(error):
        return EXIT_USAGE, (
            "a step sums over replicas within tf.cond, a loop or a tf.function, where they can't meet, as "
            "BatchNormalization(synchronized=True) does with --accumulate_steps; leave one out. So does a Keras "
            "optimizer's apply; give it to crankshaft.make_optimizer(self, variables, optimizer) in build"
        )
    if isinstance(error, ValueError) and "If an RNN is stateful" in str(error):
        return EXIT_USAGE, (
            "a stateful layer has another batch size than its step; give the model batch_shape=[n, ...], n being "
            "--global_batch_size over the number of replicas and --accumulate_steps"
        )
    if isinstance(error, RuntimeError) and "must be configured at program startup" in str(error):
        return EXIT_USAGE, (
            "this process has used TensorFlow before its run could join the other workers; make tensors and datasets "
            "in the data function, or once the run is open"
        )
    if isinstance(error, tf.errors.InvalidArgumentError) and (label := _LABEL.search(str(error))):
        return EXIT_USAGE, (
            f"the loss was given a label of {label[1]} and takes labels from 0 to below {label[2]}, as many as the "
            "model has outputs; number labels from 0, those that the loss computes too, and end the model in a layer "
            "of one unit for each class"
        )
    if isinstance(error, tf.errors.InvalidArgumentError) and (found := _ID.search(str(error))):
        return EXIT_USAGE, (
            f"ids from 0 to {int(found[2]) - 1}: an id of {found[1]} was looked up; correct the data, or allow for more"
        )
    if isinstance(error, tf.errors.FailedPreconditionError) and (length := _LENGTH.search(str(error))):
        return EXIT_USAGE, (
            f"an epoch of the data has {length[2]} examples, and the run goes by {length[1]}, as they were counted as "
            "it began, or as assert_cardinality says; give the data that it began with, or use another --run_dir"
        )
    if isinstance(error, tf.errors.InvalidArgumentError) and "assertion failed" in str(error):
        return EXIT_USAGE, reason(error)
    return None


def _is_our_check(error: Exception) -> bool:
    """Returns whether this project's own code raised it on purpose, so that its message is complete."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return False
    return os.path.abspath(frames[-1].filename).startswith(_OWN) and (frames[-1].line or "").startswith("raise")


def _is_of_program(error: Exception) -> bool:
    """Returns whether the program's own code raised an error, or what it called, other than as a step was traced."""
    if isinstance(error, (UnavailableError, InputError, SourceError, ClusterError)):
        return False
    for frame in traceback.extract_tb(error.__traceback__):
        path = os.path.abspath(frame.filename)
        if f"{os.sep}tensorflow{os.sep}python{os.sep}" in path:
            return False
        if not path.startswith(_OWN) and not any(part in frame.filename for part in _LIBRARIES):
            return True
    return False


def _users_frame(error: Exception) -> str | None:
    """Returns "file:line in function" of the innermost frame in the user's code, a model or an input; else None."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        path = os.path.abspath(frame.filename)
        inside = path.startswith(os.path.join(_HOUSE, "")) and not path.startswith(
            (os.path.join(_HOUSE, "models", ""), os.path.join(_HOUSE, "input", ""), os.path.join(_HOUSE, "tests", ""))
        )
        if not inside and not any(part in frame.filename for part in _LIBRARIES):
            return None if frame.name == "<module>" and frame is frames[0] else f"{path}:{frame.lineno} in {frame.name}"
    return None
