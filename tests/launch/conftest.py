"""What tests of the launcher share: `crank`, the program as a process, `inside`, the same main in this process,
`finished`, runs to read, `terminal`, one to write to, and `small_probe`, small sizes for a probe."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import pathlib
import pty
import runpy
import signal
import struct
import sys
import termios
import threading
from collections.abc import Sequence

import pytest
from absl import flags
from absl.testing import flagsaver

from tests import runs
from tests.forked import PYTHON_PATH
from tests.launch.local_tasks import TASK
from tests.processes import Outcome, Program

DIGITS = ("--input=digits", "--jit=off")
MLP = ("--model=mlp", "--model_arg=hidden_units=16", *DIGITS)
_WITHOUT_TENSORFLOW = "raise ImportError('TensorFlow was started')\n"
# Runs a command of `crankshaft` with each of some lists of arguments, each in a fork that begins where it is imported.
_EACH = """
import importlib, json, os, sys
from crankshaft.launch.command import COMMANDS, execute

name, folder, lines = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
importlib.import_module(COMMANDS[name].module)
codes = []
for index, arguments in enumerate(lines):
    if not (child := os.fork()):
        for number, stream in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{index}.{stream}", os.O_CREAT | os.O_WRONLY), number)
        execute(name, arguments)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(codes))
"""


class Crank:
    """Starts programs; called, it runs one to its end."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._programs: list[Program] = []

    def start(
        self, *arguments: str, script: str | os.PathLike | None = None, command: str = "train", tensorflow: bool = True
    ) -> Program:
        """Starts `crankshaft COMMAND ARGUMENTS`, or a script; without `tensorflow`, importing it is an error."""
        paths = [PYTHON_PATH]
        if not tensorflow:
            stub = self._folder / "stub" / "tensorflow"
            stub.mkdir(parents=True, exist_ok=True)
            (stub / "__init__.py").write_text(_WITHOUT_TENSORFLOW)
            paths.insert(0, str(stub.parent))
        program = Program(
            [*(["-m", "crankshaft", command] if script is None else [os.fspath(script)]), *map(str, arguments)],
            self._folder / f"program{len(self._programs)}",
            {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "100"},
        )
        self._programs.append(program)
        return program

    def __call__(self, *arguments: str, **how) -> Outcome:
        return self.start(*arguments, **how).wait()

    def each(self, lines: Sequence[Sequence[str]], command: str = "train") -> list[Outcome]:
        """How `crankshaft COMMAND` ends with each list of arguments, without TensorFlow, its modules imported once."""
        folder = self._folder / f"each{len(self._programs)}"
        folder.mkdir()
        (folder / "each.py").write_text(_EACH)
        done = self(command, str(folder), json.dumps(lines), script=folder / "each.py", tensorflow=False).ok()
        texts = ([(folder / f"{index}.{name}").read_text() for name in ("out", "err")] for index in range(len(lines)))
        return [Outcome(code, *text) for code, text in zip(json.loads(done.out), texts, strict=True)]

    def end(self) -> None:
        for program in self._programs:
            program.end()


@pytest.fixture
def crank(tmp_path_factory):
    """`crank(*flags)`, the launcher in a process of its own, which ends with the test."""
    programs = Crank(tmp_path_factory.mktemp("programs"))
    yield programs
    programs.end()


@pytest.fixture(scope="module")
def crank_each(tmp_path_factory):
    """`crank_each(lines, command="train")`: how that command ends with each list of arguments, see `Crank.each`."""
    programs = Crank(tmp_path_factory.mktemp("programs"))
    yield programs.each
    programs.end()


@pytest.fixture
def inside(capfd, monkeypatch):
    """`inside(*flags, trainer=, data=, hooks=)`: launch.train.main in this process, where starting costs nothing;
    `inside.script(path, *flags)`: a script that calls it."""
    import tensorflow as tf

    from crankshaft.launch import train
    from tests.logical_cpus import make_four, use_new_collective_keys

    make_four()

    def ended(start) -> Outcome:
        capfd.readouterr()
        # TensorFlow numbers each strategy's collectives from here; two strategies of one process must not share them.
        use_new_collective_keys()
        with flagsaver.flagsaver(), pytest.raises(SystemExit) as exit:
            start()
        out, err = capfd.readouterr()
        return Outcome(exit.value.code or 0, out, err)

    def run(*arguments, trainer=None, data=None, hooks=()) -> Outcome:
        return ended(lambda: train.main(trainer, data=data, hooks=hooks, argv=["script", *map(str, arguments)]))

    def script(path, *arguments) -> Outcome:
        monkeypatch.setattr(sys, "argv", [os.fspath(path), *map(str, arguments)])
        return ended(lambda: runpy.run_path(os.fspath(path), run_name="__main__"))

    run.script = script
    yield run
    # What a run sets for its process, and a process has for itself.
    tf.keras.config.set_dtype_policy("float32")


@dataclasses.dataclass(frozen=True)
class Finished:
    """A run that has ended; whoever goes on with it or damages it copies its folder.

    Attributes:
      folder: its run_dir.
      result: of its result.json.
      tensors: every variable of its newest checkpoint.
      out: what it printed.
    """

    folder: pathlib.Path
    result: dict
    tensors: dict
    out: str


@pytest.fixture(scope="module")
def _finished_runs():
    return {}


@pytest.fixture
def finished(inside, _finished_runs, tmp_path_factory):
    """`finished(*flags)`: the module's run of `crankshaft train` with these flags, to be read."""

    def find(*flags: str) -> Finished:
        if flags not in _finished_runs:
            folder = tmp_path_factory.mktemp("finished") / "run"
            out = inside(*flags, f"--run_dir={folder}").ok().out
            _finished_runs[flags] = Finished(folder, runs.result(folder), runs.tensors(folder), out)
        return _finished_runs[flags]

    return find


@pytest.fixture
def script_flags():
    """`absl.flags`; what a test defines with it, as a script does, is removed."""
    with flagsaver.flagsaver():
        yield flags


@pytest.fixture
def answers_ctrl_c():
    """As in a terminal: what a shell starts in its background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def terminal():
    """(file, read): a terminal of 120 columns to write to; `read()` closes it and returns all that was written."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    file = os.fdopen(child, "w", buffering=1)
    got = []

    def collect():
        while True:
            try:
                part = os.read(parent, 65536)
            except OSError:  # Linux's way of saying that the other side is closed
                return
            if not part:
                return
            got.append(part)

    reader = threading.Thread(target=collect)
    reader.start()

    def read():
        if not file.closed:
            file.close()
        reader.join()
        return b"".join(got).decode()

    yield file, read
    read()
    os.close(parent)


@pytest.fixture
def local(crank, tmp_path):
    """`local(script, *flags)` starts a cluster whose tasks run a script of these lines; it ends with the test."""
    script = tmp_path / "task.py"

    def start(lines: str, *flags: str, own: tuple = ()):
        script.write_text(TASK + lines)
        (tmp_path / "supervisor").unlink(missing_ok=True)
        program = crank.start(*flags, "--", script, *own, command="local", tensorflow=False)
        (tmp_path / "supervisor").symlink_to(program.err_path)
        return program

    return start


@pytest.fixture
def small_probe(monkeypatch):
    """Has the limits measured by matrices of 256 rows and arrays of a MiB."""
    from crankshaft.parts.plan import measured_limits

    monkeypatch.setattr(measured_limits, "_MATMUL_SIZE", {"CPU": 256})
    monkeypatch.setattr(measured_limits, "_MOST_ARRAY_BYTES", 1 << 20)
    monkeypatch.setattr(measured_limits, "_SAMPLE_SECONDS", 0.01)
