"""A process that has imported TensorFlow, and forks programs that need not import it again. Linux.

The import takes seconds, a fork some milliseconds, and the forks share the memory. TensorFlow's runtime must not have
started before the fork: its threads would be missing in the child. The template reads its environment as it imports, so
that forks with another one may need another template; what differs is known only to the runtime (TF_CONFIG).

  python -m crankshaft.parts.launchers.template DESCRIPTOR MODULE...

serves the requests of its parent, which it must be the direct child of: a fork becomes the parent's own child. A
request is a datagram, JSON and descriptors, at the socket of that number. Once the template is ready it sends a byte,
and it ends with its parent. `ps` shows its forks by this command.
"""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import functools
import gc
import io
import json
import os
import socket
import subprocess
import sys
import types
import warnings
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module, machinery, util
from typing import IO, Any

from ...runner.host import exits, imports, process
from ..memory_snapshots import task_memory
from . import reaper

_LONGEST_REQUEST = 1 << 20
_MOST_DESCRIPTORS = 64
_PROGRAMS = ("crankshaft", task_memory.__name__)  # read now, as their files may be replaced
_END_SECONDS = 5.0  # limit of what libraries do at the end, such as removing temporary folders


class Template:
    """A template process, as its parent sees it."""

    def __init__(self, env: Mapping[str, str], modules: Sequence[str]):
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The folder of -m is on the module search path. It is the user's program's, which its forks add, or nobody's.
        if paths := env.get("PYTHONPATH"):
            env = {**env, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, paths.split(os.pathsep)))}
        # A request is one datagram, with a whole environment in it.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LONGEST_REQUEST)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(other.fileno()), *modules],
                env=env,
                cwd=None if imports.has_working_folder() else os.sep,
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=reaper.die_with_parent,
            )
        self.pid = self._process.pid
        self._is_ready = False

    def fileno(self) -> int:
        """Returns the descriptor that is readable once the template is ready, or has failed."""
        return self._socket.fileno()

    def wait(self) -> bool:
        """Waits until it has imported; returns whether it can fork."""
        with contextlib.suppress(OSError):
            self._is_ready = self._is_ready or bool(self._socket.recv(1))
        return self._is_ready

    def fork(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        limits: tuple[Collection[int], float],
        report: int,
        *,
        cwd: str | None = None,
        pass_fds: Sequence[int] = (),
        **streams: int | IO | None,
    ) -> tuple[IO[bytes] | None, ...]:
        """Forks a program, kept below a reaper; returns the parent's ends of its streams' pipes, None without one.

        The arguments are those of `Children.start`, `reaper.fork_below_reaper` and `subprocess.Popen`.

        Raises:
          OSError: the template has ended, or the request is too long.
        """
        if not self.wait():
            raise OSError("its template has ended")
        pipes, opened, descriptors = list[IO[bytes] | None](), list[int](), list[int]()
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            stream, pipe = streams.get(name), None
            if stream == subprocess.PIPE:
                ends = os.pipe()
                stream, parents_end = ends if number == 0 else reversed(ends)
                opened.append(stream)
                pipe = open(parents_end, "wb" if number == 0 else "rb", buffering=0)  # noqa: SIM115 - the child's streams
            elif stream == subprocess.DEVNULL:
                stream = os.open(os.devnull, os.O_RDWR)
                opened.append(stream)
            elif stream == subprocess.STDOUT:
                stream = descriptors[1]
            pipes.append(pipe)
            descriptors.append(number if stream is None else stream if isinstance(stream, int) else stream.fileno())
        cores, stopped_seconds = limits
        request = {"command": [*command], "env": {**env}, "limits": ([*cores], stopped_seconds)}
        request |= {"cwd": cwd or os.getcwd(), "numbers": [*range(3), *pass_fds]}
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [report, *descriptors, *pass_fds])
        finally:
            for descriptor in opened:
                os.close(descriptor)
        return tuple(pipes)

    def close(self) -> None:
        """Ends the process; its forks go on."""
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS if self._is_ready else 0.0)  # else it imports
        self._process.kill()
        self._process.wait()


def import_libraries(modules: Sequence[str]) -> str | None:
    """Imports what tasks import; returns why this process can't be forked then, None if it can."""
    imports.import_whole(modules)
    started = import_module("crankshaft.engine.internals.tensorflow").has_started()
    return "TensorFlow has started before `main`, so that its threads would be missing in a fork" if started else None


def serve(requests: socket.socket) -> dict[str, Any]:
    """Forks a process for each request, and returns the request in the fork; the template ends with its parent."""
    parent = os.getppid()
    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, _LONGEST_REQUEST, _MOST_DESCRIPTORS)
        if not data:
            exits.leave(0)
        between = os.fork()
        if not between:
            if os.fork():
                os._exit(0)  # the fork becomes a child of `parent`, which adopts orphans
            return _begin(json.loads(data), descriptors, requests, parent)
        os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def _begin(request: dict[str, Any], descriptors: list[int], requests: socket.socket, parent: int) -> dict[str, Any]:
    """Makes this fork of the template a reaper, and its child a process such as `subprocess.Popen` starts."""
    between = os.getppid()
    while between not in (parent, 1) and os.getppid() == between:  # it has ended, or will in a moment
        os.sched_yield()
    if os.getppid() != parent:
        os._exit(1)
    report, *descriptors = descriptors
    reaper.fork_below_reaper(parent, report, *request["limits"])
    os.close(report)
    requests.close()
    numbers = request["numbers"]
    # Out of the way first: one may have the number that another is to get.
    above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, max(numbers) + 1) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(above, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["cwd"])
    return request


def become(request: dict[str, Any]) -> list[str]:
    """Gives this fork the state of a Python that starts the request's command.

    Returns:
      The command's program and arguments: "-m" and a module's name, or a script, and its arguments.
    """
    command, env = request["command"], request["env"]
    words, folder = command[2:] if command[1] == "-P" else command[1:], None
    for name in os.environ.keys() - env.keys():
        del os.environ[name]
    os.environ.update(env)
    sys.orig_argv[:] = command
    sys.argv[:] = words[1:] if words[0] == "-m" else words
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11's, which the user's environment sets
        del sys.path[0]  # the template's folder
        if command[1] != "-P":
            folder = os.getcwd() if words[0] == "-m" else os.path.dirname(os.path.realpath(words[0]))
            sys.path.insert(0, folder)
    # The template began with /dev/null there, so Python chose to write by blocks.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.isatty():
        sys.stdout.reconfigure(line_buffering=True)
    # A fork has the template's state: all would sample alike. Python seeds its own generator in each fork.
    import_module("numpy").random.seed()
    imports.note_start(command, folder)
    return words


def execute(request: dict[str, Any]) -> None:
    """Executes the request's script, or module after -m, as `__main__`, as Python does."""
    words = become(request)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main).update(__annotations__={}, __builtins__=builtins, __cached__=None)
    if words[0] == "-m":
        try:
            spec, code = _program(words[1])
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            imports.start_again(str(error))  # Python explains it
        sys.argv[0] = spec.origin or ""
        vars(main).update(__file__=spec.origin, __cached__=spec.cached, __loader__=spec.loader)
        vars(main).update(__package__=spec.parent, __spec__=spec)
    else:
        loader = machinery.SourceFileLoader("__main__", words[0])
        vars(main).update(__file__=words[0], __loader__=loader)
        code = compile(loader.get_data(words[0]), words[0], "exec", dont_inherit=True)
    exec(code, vars(main))


@functools.cache
def _program(name: str) -> tuple[Any, types.CodeType]:
    """Finds what `python -m` executes."""
    spec: Any = util.find_spec(name)
    if spec and spec.submodule_search_locations is not None:
        spec = util.find_spec(f"{name}.__main__")
    return spec, spec.loader.get_code(spec.name)


def _main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as requests, warnings.catch_warnings():
        os.set_inheritable(requests.fileno(), False)
        process.prepare()
        with imports.uncollected():
            obstacle = import_libraries(sys.argv[2:])
            for name in _PROGRAMS:
                _program(name)
        if obstacle:
            return
        gc.freeze()  # as Python's manual has it before a fork, where a collection would copy a million objects
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's: TensorFlow's import has started threads
        requests.send(b"!")
        request = serve(requests)
    sys.excepthook = _report
    exits.run_fork(functools.partial(execute, request))


def _report(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """Reports an exception as Python does, without the frames of this file and of `runpy`."""
    while trace and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


if __name__ == "__main__":
    _main()
