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

from crankshaft.launch.errors import UsageError
from crankshaft.launch.host import process
from tests.launch.local_tasks import ROOT

OWNER = ".lock.owner"

# As Lustre answers where it is mounted with noflock, and FUSE where its program has no locks.
WITHOUT_FLOCK = """
import errno, fcntl, os, sys
def flock(*_):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
fcntl.flock = flock
from crankshaft.launch.host import process
with process.lock(sys.argv[1]):
    print(os.getpid(), flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(params=[errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def without_flock(monkeypatch, request):
    def flock(*_):
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", flock)


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


def test_another_lock_holds_and_a_line_warns(tmp_path, without_flock, caplog):
    with caplog.at_level("WARNING", logger="absl"), process.lock(str(tmp_path)):
        (record,) = caplog.records
        assert f"--run_dir={tmp_path}: its file system has no flock" in record.getMessage()
        with pytest.raises(UsageError, match=f"in use by process {os.getpid()} on host"), process.lock(str(tmp_path)):
            pass
    assert not (tmp_path / OWNER).exists()
    with process.lock(str(tmp_path)):
        pass


def test_who_holds_it_is_named_and_one_that_was_killed_holds_nothing(tmp_path, without_flock, holder):
    with (
        pytest.raises(UsageError, match=f"in use by process {holder.pid} on host {socket.gethostname()}"),
        process.lock(str(tmp_path)),
    ):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with process.lock(str(tmp_path)):
        assert (tmp_path / OWNER).read_text().split()[0] == str(os.getpid())
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize("text", ["4711\nanother-host\n12345\n", ""])
def test_what_another_host_may_hold_is_left_to_the_user(tmp_path, without_flock, text):
    """It can't be seen from here whether that process lives."""
    (tmp_path / OWNER).write_text(text)
    with pytest.raises(UsageError, match=f"remove {OWNER} if it has ended"), process.lock(str(tmp_path)):
        pass
    assert (tmp_path / OWNER).read_text() == text
