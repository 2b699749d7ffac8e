"""The process that a run lives in."""

import contextlib
import errno
import fcntl
import functools
import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys
import time

import pytest

from crankshaft.engine.machine import cpus
from crankshaft.engine.machine.threads import pid_space
from crankshaft.runner.failures import RunError, UsageError
from crankshaft.runner.host import locks, process, signals, startup
from tests.forked import PYTHON_PATH
from tests.limits import files_no_larger_than
from tests.processes import ROOT, Program
from tests.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.thorough


def test_there_are_as_many_threads_as_a_quota_leaves_cores_unless_a_number_is_given():
    for usable, threads in ((8.0, set()), (2.0, {"2"}), (1.5, {"2"}), (0.25, {"1"}), (7.5, set())):
        variables = {}
        process.fit_threads(variables, usable, 8)
        assert set(variables.values()) == threads
    variables = {"TF_NUM_INTRAOP_THREADS": "3"}
    process.fit_threads(variables, 1.0, 4)
    assert variables["TF_NUM_INTRAOP_THREADS"] == "3"
    assert variables["TF_NUM_INTEROP_THREADS"] == "1"


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        (None, "--xla_cpu_prefer_vector_width=512"),
        ("--xla_dump_to=x", "--xla_dump_to=x --xla_cpu_prefer_vector_width=512"),
        ("--xla_cpu_prefer_vector_width=128", "--xla_cpu_prefer_vector_width=128"),
        ("/etc/xla_flags", "/etc/xla_flags"),
    ],
)
def test_xla_has_wide_vectors_unless_another_width_is_asked_for(given, flags):
    variables = {} if given is None else {"XLA_FLAGS": given}
    process.widen_vectors(variables)
    assert variables["XLA_FLAGS"] == flags


@pytest.mark.parametrize(
    ("features", "flags"),
    [({"avx512f", "avx512_vbmi2"}, "--xla_cpu_prefer_vector_width=512"), ({"avx2", "avx512f"}, None)],
)
def test_xla_has_wide_vectors_where_the_cpu_has_fast_ones(features, flags, monkeypatch):
    for name in ("XLA_FLAGS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # put back afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr(cpus, "features", lambda: features)
    process.prepare(tunes_allocator=False)
    assert os.environ.get("XLA_FLAGS") == flags


@pytest.mark.parametrize("value", ["1", "true", "True"])
def test_keras_2_is_refused(value, monkeypatch):
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", value)
    with pytest.raises(UsageError, match=f"TF_USE_LEGACY_KERAS={value} asks for Keras 2, .*; unset it"):
        process.prepare(False)


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_no_file_gets_the_number_of_a_stream_that_is_closed(tmp_path, closed):
    code = (
        "import os, sys; from crankshaft.runner.host import streams; streams.prepare_streams()\n"
        "file = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)\n"
        "print('printed', flush=True), print('printed', file=sys.stderr, flush=True), os.system('echo printed')\n"
        "os.write(file, b'%d' % (file > 2))"
    )
    path = tmp_path / "file"
    command = [sys.executable, "-c", code, path]
    subprocess.run(command, preexec_fn=lambda: [os.close(number) for number in closed], check=True, timeout=PATIENCE)
    assert path.read_text() == "1"


@pytest.mark.parametrize("make", ["mkdir", "none"])
def test_a_lock_that_cannot_be_opened_is_named(tmp_path, make, monkeypatch):
    def refused(path, *_):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    if make == "mkdir":
        (tmp_path / ".lock").mkdir()
    else:
        monkeypatch.setattr(process.os, "open", refused)
    with (
        pytest.raises(UsageError, match=rf"run_dir={tmp_path}: its file .lock can't be locked \(.*\); remove it"),
        locks.lock(str(tmp_path)),
    ):
        pass


def test_a_lock_that_a_broken_disk_refuses_may_be_tried_again(tmp_path, monkeypatch):
    def refused(path, *_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setattr(process.os, "open", refused)
    match = r"its file .lock can't be locked \(Read-only file system\); remount its disk"
    with pytest.raises(RunError, match=match), locks.lock(str(tmp_path)):
        pass
    assert not locks.can_lock(str(tmp_path))


def test_a_lock_of_another_user_is_held_by_reading_it(tmp_path, monkeypatch):
    def reads(path, flags, mode=0o777):
        if flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return opened(path, flags, mode)

    opened = os.open
    (tmp_path / ".lock").write_text("99999999")  # more than any process has
    with monkeypatch.context() as patch:
        patch.setattr(process.os, "open", reads)
        held = locks.lock(str(tmp_path))
        held.__enter__()
    with pytest.raises(UsageError, match="is in use by another program"), locks.lock(str(tmp_path)):
        pass
    held.__exit__(None, None, None)
    with locks.lock(str(tmp_path)):
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()} {socket.gethostname()} {pid_space()}"


def test_a_process_that_is_gone_is_not_blamed_for_anothers_lock(tmp_path):
    code = "import sys; from crankshaft.runner.host import locks\nwith locks.lock(sys.argv[1]): pass"
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], cwd=ROOT.parent) as last:
        assert last.wait(PATIENCE) == 0

    def line():
        with pytest.raises((UsageError, RunError)) as caught, locks.lock(str(tmp_path)):
            pass
        return caught.value.message

    with open(tmp_path / ".lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert f"in use by another program: it holds the lock on the file .lock, and process {last.pid}, " in line()
        for owner, words in (
            ("", "in use by another program: it holds the lock on the file .lock; end it"),
            (f"{os.getppid()}", f"in use by process {os.getppid()}; wait for it"),  # as older versions wrote it
            (f"{os.getpid()} elsewhere", f"in use by process {os.getpid()} on host elsewhere; wait for it"),
            (f"{os.getpid()} {socket.gethostname()}", f"in use by process {os.getpid()}, which is this one; close"),
            (
                f"{os.getpid()} {socket.gethostname()} another pid:[1]",
                f"in use by process {os.getpid()} on host {socket.gethostname()}",
            ),
            ("9" * 30, "in use by another program: it holds the lock on the file .lock, and process 999"),
        ):
            (tmp_path / ".lock").write_text(owner)
            assert words in line()


def test_a_lock_that_another_holds_leaves_nothing_open_and_one_that_is_held_is_this_runs_folder_s(tmp_path):
    run_dir, moved, words = tmp_path / "run", tmp_path / "moved", f"{os.getpid()} {socket.gethostname()} {pid_space()}"
    run_dir.mkdir()
    with locks.lock(str(run_dir)) as held:
        opened = len(os.listdir("/proc/self/fd"))
        assert not locks.can_lock(str(run_dir))
        assert len(os.listdir("/proc/self/fd")) == opened
        assert held.is_by_flock
        (run_dir / ".lock").unlink()  # by somebody who took it for a leftover
        held.check()
        assert (run_dir / ".lock").read_text() == words
        assert not locks.can_lock(str(run_dir))
        inode = (run_dir / ".lock").stat().st_ino
        held.check()
        assert (run_dir / ".lock").stat().st_ino == inode
        run_dir.rename(moved)
        for _ in range(2):
            assert not held.is_in_place
            with pytest.raises(UsageError, match=f"run_dir={run_dir} was removed or replaced while its run went on"):
                held.check()
            run_dir.mkdir(exist_ok=True)
    assert locks.can_lock(str(moved))
    assert not locks.can_lock(str(tmp_path / "none"))


@pytest.mark.parametrize("after_loss", [False, True])
def test_a_lost_hosts_lock_is_awaited_and_after_a_loss_any_but_a_later_ones(tmp_path, monkeypatch, caplog, after_loss):
    lock = functools.partial(locks.lock, str(tmp_path), wait_seconds=PATIENCE, after_loss=after_loss)
    waits = []

    def wait(seconds: float):
        waits.append(seconds)
        if len(waits) == 2:
            file.close()

    monkeypatch.setattr(locks.time, "sleep", wait)
    path = tmp_path / ".lock"
    file = open(path, "w")  # noqa: SIM115
    fcntl.flock(file, fcntl.LOCK_EX)
    path.write_text("7 elsewhere")
    with lock():
        assert len(waits) == 2
    assert caplog.text.count("by process 7 on host elsewhere; wait for it, end it, or use another run_dir; this") == 1
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        path.write_text(f"{os.getppid()}")
        if not after_loss:  # a mistake
            with pytest.raises(UsageError), lock():
                pass
            return
        monkeypatch.setattr(locks.time, "sleep", lambda seconds: path.write_text("8 elsewhere"))
        with pytest.raises(UsageError, match="by process 8 "), lock():
            pass


def test_a_run_waits_for_a_lost_hosts_lock_which_is_an_error_that_may_be_tried_again(tmp_path):
    with open(tmp_path / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (tmp_path / ".lock").write_text("7 elsewhere")
        with pytest.raises(RunError, match="by process 7 on host elsewhere"), locks.lock(str(tmp_path), None, 0.1):
            pass
        flags = ("--model=mlp", "--input=digits", "--train_steps=2", "--progress=plain", f"--run_dir={tmp_path}")
        run = Program(
            ["-m", "crankshaft", "train", *flags], tmp_path / "out", {**os.environ, "PYTHONPATH": PYTHON_PATH}
        )
        try:
            waits = "by process 7 on host elsewhere; wait for it, end it, or use another run_dir; this process waits"
            wait_until(lambda: waits in run.err, run.process)
            fcntl.flock(file, fcntl.LOCK_UN)
            run.wait().ok()
        finally:
            run.end()


def test_no_tensorflow_is_imported_before_mistakes_are_found():
    code = """
import importlib, sys
from crankshaft.launch import command
for each in command.COMMANDS.values():
    importlib.import_module(each.module)
    assert "tensorflow" not in sys.modules, each
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_script_without_a_folder_for_temporary_files_names_the_variable():
    code = "from crankshaft import Trainer"
    with files_no_larger_than(0):
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stderr.splitlines()[-1].endswith("; set the variable TMPDIR to a folder that can be written")


TRAIN = ("--model=cnn", "--input=digits", "--train_steps=100000", "--progress=plain")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "moments"),
    [
        (["train", *TRAIN], (3, 5)),
        (["train", *TRAIN, "--mode=benchmark"], (5,)),
        (["local", "--workers=2", "--", *TRAIN], (3,)),
        (["prepare", "--input=synthetic", "--input_arg=examples=3000000", "--output_dir=shards"], (3,)),
    ],
    ids=["train", "benchmark", "local", "prepare"],
)
def test_ctrl_c_before_a_program_is_at_work_ends_it_in_a_line(tmp_path, monkeypatch, command, moments):
    """While TensorFlow and the model start, which is the same in all; later it is saved first: other tests."""
    monkeypatch.chdir(tmp_path)
    for number, seconds in enumerate(moments):
        program = Program(
            ["-m", "crankshaft", *command], tmp_path / str(number), {**os.environ, "PYTHONPATH": PYTHON_PATH}
        )
        try:
            time.sleep(seconds)
            program.send(signal.SIGINT)
            outcome = program.wait()
        finally:
            program.end()
        assert outcome.code in (-signal.SIGINT, 128 + signal.SIGINT)
        assert "Traceback" not in outcome.out + outcome.err


@pytest.mark.parametrize(("before", "after"), [(signal.SIG_DFL, ["SIGHUP"]), (signal.SIG_IGN, [])])
def test_a_hang_up_asks_to_save_unless_it_is_ignored(before, after):
    asked, at_start = [], signal.signal(signal.SIGHUP, before)
    try:
        with signals.Signals(asked.append, ends_process=False):
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == before
    finally:
        signal.signal(signal.SIGHUP, at_start)
    assert asked == after


TWICE_AT_ONCE = """
import signal
from crankshaft.runner.host.signals import Signals

with Signals(print):
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
print("saved")
"""
# A warning some time before the end, which is not the first of two signals; then two handlers of the program's own.
WARNED = """
import faulthandler, os, signal, time
from crankshaft.runner.host.signals import Signals

with Signals(print):
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(1.2)
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.2)
print("saved")
assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
signal.signal(signal.SIGUSR1, lambda *_: print("program's"))
for _ in range(2):
    with Signals(print):
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.7)  # longer than a signal goes unanswered
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    faulthandler.register(signal.SIGUSR1, open(os.devnull, "w"))
"""
# A second lock of a mutex: a compiled call that never returns, within which no handler runs.
STUCK = """
import ctypes
from crankshaft.runner.host.signals import Signals

mutex = ctypes.create_string_buffer(64)
lock = ctypes.CDLL(None).pthread_mutex_lock
lock(mutex)
with Signals(print, ends_process=ENDS):
    print("ready", flush=True)
    lock(mutex)
"""


# Processes that get SIGTERM at any moment of a start in which a library sets a handler of its own; how many outlive it.
REPLACED = """
import ctypes, os, random, signal, time
from crankshaft.runner.host.signals import keeping_sigterm

libc = ctypes.CDLL(None)
handler = ctypes.cast(libc.abs, ctypes.c_void_p)
deaf = 0
for _ in range(100):
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.write(writing, b".")
        with keeping_sigterm():
            time.sleep(0.004)
            libc.signal(signal.SIGTERM, handler)
            time.sleep(0.004)
        time.sleep(60)  # a signal that is not lost ends it before
        os._exit(0)
    os.read(reading, 1)
    time.sleep(0.012 * random.random())
    os.kill(child, signal.SIGTERM)
    deaf += not os.WIFSIGNALED(os.waitpid(child, 0)[1])
print(deaf)
"""


# A library's notes and its last words before its import fails; meanwhile Crankshaft's line, in another thread.
FAILED_IMPORT = """
import gc, logging, os, sys, threading
from crankshaft.runner.failures import print_line
from crankshaft.runner.host.startup import quiet_startup

try:
    with quiet_startup():
        os.write(2, b"oneDNN custom operations are on\\nUnknown flag\\n")
        thread = threading.Thread(target=print_line, args=["meanwhile"])
        thread.start()
        thread.join()
        handler = logging.StreamHandler()  # which the library keeps
        print(gc.isenabled())
        raise ImportError
except ImportError:
    os.write(2, b"afterwards\\n")
    handler.handle(logging.makeLogRecord({"msg": "logged"}))
    print(gc.isenabled())
"""
# Two threads that start at once, the second within the first.
AT_ONCE = """
import os, threading, time
from crankshaft.runner.host.startup import quiet_startup

entered = threading.Event()

def first():
    with quiet_startup():
        os.write(2, b"first\\n")
        entered.set()
        time.sleep(0.5)

def second():
    entered.wait()
    with quiet_startup():
        os.write(2, b"second\\n")
        time.sleep(0.5)

threads = [threading.Thread(target=each, daemon=True) for each in (first, second)]
for each in threads:
    each.start()
for each in threads:
    each.join(20)
print(any(each.is_alive() for each in threads), flush=True)
"""
# A library that sets a handler in a thread, beside a program whose main thread answers the signal.
REPLACED_IN_THREAD = """
import ctypes, signal, threading
from crankshaft.runner.host.signals import keeping_sigterm

def start():
    with keeping_sigterm():
        libc = ctypes.CDLL(None)
        libc.signal(signal.SIGTERM, ctypes.cast(libc.abs, ctypes.c_void_p))

signal.signal(signal.SIGTERM, lambda *_: print("answered"))
thread = threading.Thread(target=start)
thread.start()
thread.join()
signal.raise_signal(signal.SIGTERM)
"""


def test_address_space_in_which_tensorflow_can_not_start_is_a_line(monkeypatch):
    used = 4096 * int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    for more, too_low in ((1 << 29, True), (1 << 45, False)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=used + more: (limit, limit))
        raised = (
            pytest.raises(UsageError, match=r"ulimit -v allows [\d,]+ MiB .* needs")
            if too_low
            else contextlib.nullcontext()
        )
        with raised:
            startup.refuse_small_address_space()


@pytest.mark.parametrize("ends_process", [True, False])
def test_a_signal_within_a_compiled_call_is_answered_and_a_second_ends_the_process(ends_process):
    script = STUCK.replace("ENDS", str(ends_process))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], text=True, **pipes) as stuck:
        try:
            stuck.stdout.readline()
            for _ in range(2):
                stuck.send_signal(signal.SIGTERM)
            answer = "SIGTERM: the run ends, saved in its run_dir, once the call, compilation or callback is done"
            at_once = "; a second signal ends the process at once" if ends_process else ""
            assert stuck.stderr.readline() == f"{answer}{at_once}\n"
            assert stuck.poll() is None
            time.sleep(1.5 * signals.SAME_REQUEST_SECONDS)
            stuck.send_signal(signal.SIGTERM)
            if ends_process:
                assert stuck.wait(PATIENCE) == 143
        finally:
            stuck.kill()


# Children that are forked while a run answers signals; the run's process goes on.
FORKING = """
import multiprocessing, os, signal, time
from crankshaft.runner.host.signals import Signals

requests, contexts = [], multiprocessing.get_context("fork")
usual = signal.getsignal(signal.SIGTERM)
with Signals(requests.append):
    for _ in range(50):  # ended at any moment of their start
        child = contexts.Process(target=time.sleep, args=(60,), daemon=True)
        child.start()
        child.terminate()
        child.join(20)
        assert child.exitcode == -signal.SIGTERM, child.exitcode
    with contexts.Pool(2) as pool:
        assert pool.map(signal.getsignal, [signal.SIGTERM] * 4) == [usual] * 4
        assert pool.map(signal.set_wakeup_fd, [-1]) == [-1]
    time.sleep(1)  # longer than a signal goes unanswered
    assert requests == []
    os.kill(os.getpid(), signal.SIGTERM)
assert requests == ["SIGTERM"]
"""


# A call that never returns and holds Python's lock, as TensorFlow's as it joins a cluster.
LOCKED = """
import ctypes, os, signal, time
from crankshaft.runner.host.signals import ended_by_ctrl_c, interruptible

waiting = os.getpid()
with interruptible(), ended_by_ctrl_c():
    if not os.fork():
        time.sleep(0.5)
        os.kill(waiting, signal.SIGINT)
        os._exit(0)
    mutex, lock = ctypes.create_string_buffer(64), ctypes.PyDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)
"""


ENDS = {
    "Ctrl-C ends a call that holds Python's lock": (LOCKED, -signal.SIGINT, "", ""),
    "SIGTERM is not lost while a library replaces its handler": (REPLACED, 0, "0\n", ""),
    "what a failing import says is shown, and a line of another thread at once": (
        FAILED_IMPORT,
        0,
        "False\nTrue\n",
        "meanwhile\nUnknown flag\nafterwards\nlogged\n",
    ),
    "threads start one after the other": (AT_ONCE, 0, "False\n", "first\nsecond\n"),
    "a program answers SIGTERM though a thread's library has set a handler": (REPLACED_IN_THREAD, 0, "answered\n", ""),
    "what comes with a signal is the same request": (TWICE_AT_ONCE, 0, "SIGTERM\nsaved\n", ""),
    "SIGUSR1 asks for the end, unless the program has a handler": (
        WARNED,
        0,
        "SIGUSR1\nsaved\nprogram's\n",
        "SIGUSR1: the run ends, saved in its run_dir, once the call, compilation or callback is done; one after the "
        "next ends the process at once\n",
    ),
    "a signal to a forked child is not the run's": (FORKING, 0, "", ""),
}


@pytest.mark.parametrize(("script", "code", "out", "err"), ENDS.values(), ids=ENDS)
def test_a_script_of_signals_ends_so(script, code, out, err):
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE)
    assert (done.returncode, done.stdout, done.stderr) == (code, out, err)


@pytest.mark.skipif(subprocess.run(["unshare", "-pf", "true"], check=False).returncode, reason="may not unshare")
@pytest.mark.parametrize("restarts", [0, 2])
def test_the_first_process_of_a_container_ends_at_sigterm_while_it_starts(tmp_path, restarts):
    """The kernel gives SIGTERM no effect there but by a handler."""
    begin = [
        "unshare",
        "-pf",
        "--kill-child",
        sys.executable,
        "-m",
        "crankshaft",
        "train",
        f"--max_restarts={restarts}",
    ]
    command = [*begin, "--model=mlp", "--input=digits", "--train_steps=100000", f"--run_dir={tmp_path / 'run'}"]
    with subprocess.Popen(command, cwd=ROOT.parent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as outer:
        try:
            children = pathlib.Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
            wait_until(children.read_text, outer)
            pid = int(children.read_text())

            def catches_sigterm() -> int:
                caught = pathlib.Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()[0]
                return int(caught, 16) >> signal.SIGTERM - 1 & 1

            wait_until(catches_sigterm, outer)
            os.kill(pid, signal.SIGTERM)
            assert outer.wait(PATIENCE) == 143
        finally:
            outer.kill()
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("encoding", ["ascii", "ascii:strict", "latin-1", "utf-8"])
def test_what_a_console_has_no_characters_for_is_escaped(encoding):
    program = (
        "import sys; from crankshaft.runner.host import streams; streams.prepare_streams()\n"
        "print('k\\xe4se \\u732b \\udcff'); print('k\\xe4se \\u732b', file=sys.stderr)"
    )
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
    name = encoding.partition(":")[0]
    assert done.stdout == "k\xe4se \u732b \udcff\n".encode(name, "backslashreplace")
    assert done.stderr == "k\xe4se \u732b\n".encode(name, "backslashreplace")
