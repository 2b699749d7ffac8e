"""Forks of a process that has imported TensorFlow: beside new processes. Real processes, below one template."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time

import pytest

from crankshaft.launch.command import TASK_MODULES
from crankshaft.parts.launchers.children import Children
from tests.waiting import wait_until

# A traceback's frames before the script's: in Python 3.10 with a line of code each.
_RUNPY_FRAME = re.compile(r'  File "[^"]*runpy.*\n(    .*\n)?')
STATE = """
import atexit, gc, json, locale, logging, multiprocessing, os, random, resource, signal, sys, threading
main = {name: str(value) for name, value in vars().items() if name.startswith("__") and name != "__builtins__"}
main = {name: value.split(" object at ")[0] for name, value in main.items()}
state = dict(
    main=main, argv=sys.argv, orig_argv=sys.orig_argv, path=sys.path, folder=os.getcwd(), flags=str(sys.flags),
    is_main=sys.modules["__main__"].__dict__ is globals(), daemon=multiprocessing.current_process().daemon,
    environment=dict(os.environ), input=sys.stdin.read(), limits=resource.getrlimit(resource.RLIMIT_NOFILE),
    handlers=[str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
    cores=sorted(os.sched_getaffinity(0)),
    threads=threading.active_count(), leads=os.getsid(0) == os.getpgid(0) == os.getpid(),
    collects=gc.isenabled(),
    streams=[(s.encoding, s.errors, s.line_buffering, s.write_through, s.isatty()) for s in (sys.stdout, sys.stderr)],
    files=sorted(os.listdir("/proc/self/fd")), locale=locale.setlocale(locale.LC_ALL), umask=os.umask(0),
    extra=os.read(int(sys.argv[-1]), 3).decode() if sys.argv[-1].isdigit() else None,
)
atexit.register(lambda: print(json.dumps(state)))
if "fails" in sys.argv:
    raise ValueError("fails")
sys.exit(3)
"""
RANDOM = """
import random
import numpy as np, tensorflow as tf
from crankshaft.runner.host import forks
print(random.random(), np.random.rand(), float(tf.random.uniform([])), forks.age_seconds())
"""
BACKEND = """
import os, sys
os.environ["KERAS_BACKEND"] = "numpy"
print("at first", flush=True)
from crankshaft.runner.host import process
had = "tensorflow" in sys.modules
process.prepare()
os.environ["KERAS_BACKEND"] = "jax"
process.prepare()
print(had, sys.argv)
"""


# What a library does as it is imported: here each Python of these tests, and so the template.
LIBRARY = """
import tempfile
folder = tempfile.TemporaryDirectory(dir={!r})
"""
ENDS = """
import os, sys, tempfile, weakref
import sitecustomize
folder, log = tempfile.TemporaryDirectory(dir="."), open(f"log-{sys.argv[1]}", "w")
print(os.path.isdir(sitecustomize.folder.name), file=log)
weakref.finalize(log, print, "done", file=sys.stdout)
if sys.argv[1] == "interrupted":
    raise KeyboardInterrupt
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Where it has its temporary folder."""
    code, folder = tmp_path_factory.mktemp("code"), tmp_path_factory.mktemp("temporary")
    (code / "sitecustomize.py").write_text(LIBRARY.format(str(folder)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(code), prepend=os.pathsep)
        patch.setenv("PYTHONUNBUFFERED", "")
        yield folder


@pytest.fixture(scope="module")
def children(library):
    with Children() as children:
        yield children
    assert not [*library.iterdir()]  # the template has ended, and so has the library


@pytest.fixture(scope="module")
def template(children):
    template = children.template(dict(os.environ), TASK_MODULES)
    assert template.wait()
    return template


def outcome(children, template, *command, **options):
    child = children.start(
        [sys.executable, *map(str, command)],
        **{"env": {**os.environ, "TF_CONFIG": "{}"}, "template": template, "stdout": -1, "stderr": -1, **options},
    )
    with child.stdout, child.stderr:
        out, error = child.stdout.read().decode(), child.stderr.read().decode()
    wait_until(lambda: child.code is not None)
    return *children.end([child]), out, error


def test_a_fork_has_the_state_of_a_new_python(children, template, tmp_path):
    (tmp_path / "state.py").write_text(STATE)
    script, (reading, writing) = tmp_path / "state.py", os.pipe()
    core = max(os.sched_getaffinity(0))
    how = {"cores": [core], "pass_fds": [reading], "cwd": str(tmp_path)}
    for words in ([script, "--flag", reading], ["-m", "state", "fails"], [script, "fails"]):
        found = []
        for each in (None, template):
            os.write(writing, b"abc")
            code, out, error = outcome(children, each, *words, **how)
            found.append((code, json.loads(out), _RUNPY_FRAME.sub("", error)))
            if not str(words[-1]).isdigit():
                os.read(reading, 3)
        (code, state, error), (forked_code, forked, forked_error) = found
        assert state.pop("main").items() ^ forked.pop("main").items() == set()
        assert {name: (state[name], forked[name]) for name in state if state[name] != forked[name]} == {}
        assert (code, error) == (forked_code, forked_error)
    os.close(reading)
    os.close(writing)


def test_a_fork_ends_what_it_has_begun_and_not_what_the_template_has(children, template, tmp_path):
    (tmp_path / "ends.py").write_text(ENDS)
    for word in ("first", "interrupted"):
        code, out, error = outcome(children, template, tmp_path / "ends.py", word, cwd=str(tmp_path))
        assert code == (0 if word == "first" else -signal.SIGINT), error
        assert out == "done\n"
        assert (tmp_path / f"log-{word}").read_text() == "True\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ends.py", "log-first", "log-interrupted"]


def test_forks_draw_other_random_numbers_and_begin_with_their_fork(children, template, tmp_path):
    (tmp_path / "draws.py").write_text(RANDOM)
    began = time.monotonic()
    outcomes = [outcome(children, template, tmp_path / "draws.py") for _ in range(2)]
    assert [code for code, _, _ in outcomes] == [0, 0], outcomes
    *numbers, ages = zip(*(out.split() for _, out, _ in outcomes), strict=True)
    assert all(len(set(pair)) == 2 for pair in numbers)
    assert all(float(age) < time.monotonic() - began for age in ages)


def test_a_script_with_other_imports_starts_again_and_imports_by_itself(children, template, tmp_path):
    (tmp_path / "backend.py").write_text(BACKEND)
    code, out, error = outcome(children, template, tmp_path / "backend.py", "--flag")
    arguments = [str(tmp_path / "backend.py"), "--flag"]
    first, why, *again = out.splitlines()
    assert [first, *again] == ["at first", "at first", f"False {arguments}"], error
    assert why.startswith("KERAS_BACKEND is set after")
    assert code == 0
    (tmp_path / "termcolor.py").write_text("")
    (tmp_path / "shadow.py").write_text("import sys, termcolor; print('tensorflow' in sys.modules, termcolor.__file__)")
    code, out, error = outcome(children, template, "-m", "shadow", cwd=str(tmp_path))
    assert out.splitlines()[1:] == [f"False {tmp_path}/termcolor.py"], error
    assert out.startswith(f"termcolor in {tmp_path} is another module")


def test_a_template_that_cannot_import_forks_nothing(children, tmp_path):
    failed = children.template({**os.environ, "TF_USE_LEGACY_KERAS": "1"}, TASK_MODULES)
    assert not failed.wait()
    with pytest.raises(OSError, match="its template has ended"):
        outcome(children, failed, "script.py")


@pytest.mark.holds("the folder that you give a command in")
def test_a_relative_entry_of_pythonpath_brings_no_module_of_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "csv.py").write_text("open('planted', 'w')")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "own_library.py").touch()
    paths = os.pathsep.join(["lib", *filter(None, [os.environ.get("PYTHONPATH")])])
    with Children() as children:
        assert children.template({**os.environ, "PYTHONPATH": paths}, ("own_library", "csv")).wait()
    assert not (tmp_path / "planted").exists()
