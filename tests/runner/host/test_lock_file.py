"""A run_dir on a file system without `flock` is held by a file that names its owner."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys

import pytest

from crankshaft.runner.failures import UsageError
from crankshaft.runner.host import locks
from tests.launch.local_tasks import ROOT

pytestmark = pytest.mark.thorough

OWNER = ".lock.owner"

# As Lustre answers where it is mounted with noflock, and FUSE where its program has no locks.
WITHOUT_FLOCK = """
import errno, fcntl, os, sys
def flock(*_):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
fcntl.flock = flock
from crankshaft.runner.host import locks
with locks.lock(sys.argv[1]):
    print(os.getpid(), flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def without_flock(monkeypatch, request):
    number = getattr(request, "param", errno.ENOSYS)

    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)


def take_in_vain(tmp_path, monkeypatch, match, seconds=0.3):
    """Tries for so long to take the run_dir, which another holds: all that would be waited for is its end."""
    with monkeypatch.context() as patched:
        patched.setattr(locks, "_TAKE_OVER_SECONDS", seconds)
        with pytest.raises(UsageError, match=match), locks.lock(str(tmp_path)):
            pass


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the run_dir."""
    held = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_FLOCK, tmp_path], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert int(held.stdout.readline()) == held.pid
    yield held
    held.kill()
    held.communicate()


@pytest.mark.parametrize("without_flock", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK], indirect=True)
def test_another_lock_holds_and_a_line_warns(tmp_path, without_flock, monkeypatch, caplog):
    with caplog.at_level("WARNING", logger="crankshaft"), locks.lock(str(tmp_path)):
        (record,) = caplog.records
        assert f"run_dir={tmp_path}: its file system has no flock" in record.getMessage()
        take_in_vain(tmp_path, monkeypatch, f"in use by process {os.getpid()} on host")
    assert not (tmp_path / OWNER).exists()
    with locks.lock(str(tmp_path)):
        pass


def test_who_holds_it_is_named_and_one_that_was_killed_holds_nothing(tmp_path, without_flock, monkeypatch, holder):
    take_in_vain(tmp_path, monkeypatch, f"in use by process {holder.pid} on host {socket.gethostname()}")
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with locks.lock(str(tmp_path)):
        assert (tmp_path / OWNER).read_text().split()[0] == str(os.getpid())
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize(("text", "seconds"), [("4711\nanother-host\n12345\n", 0.3), ("", 3.0)])
def test_what_another_host_may_hold_is_left_to_the_user(tmp_path, without_flock, monkeypatch, text, seconds):
    """It can't be seen from here whether that process lives. A file that is half written would be removed after 2 s."""
    (tmp_path / OWNER).write_text(text)
    take_in_vain(tmp_path, monkeypatch, f"remove {OWNER} if it has ended", seconds)
    assert (tmp_path / OWNER).read_text() == text
    monkeypatch.setattr(locks.time, "sleep", lambda seconds: pytest.fail("it does not end with its process"))
    monkeypatch.setattr(locks, "_TAKE_OVER_SECONDS", 0.0)
    with pytest.raises(UsageError), locks.lock(str(tmp_path), wait_seconds=1e6, after_loss=True):
        pass


def test_another_host_of_this_name_may_hold_it(tmp_path, without_flock, monkeypatch):
    with locks.lock(str(tmp_path)):
        _, host, began = (tmp_path / OWNER).read_text().split()
    elsewhere, here = (f"{2**31 - 1}\n{host}\n{int(began) ^ other << 64}\n" for other in (1, 0))
    (tmp_path / OWNER).write_text(elsewhere)
    take_in_vain(tmp_path, monkeypatch, f"remove {OWNER} if it has ended")
    (tmp_path / OWNER).write_text(here)
    with locks.lock(str(tmp_path)):
        pass
