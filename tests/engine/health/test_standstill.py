"""A process in which Python stands still, in one of its own."""

import subprocess
import sys

import pytest

from crankshaft.engine.health import standstill
from tests.waiting import PATIENCE

# By its file, without TensorFlow; `PyDLL` calls C with Python's lock held.
PROGRAM = """
import ctypes, runpy, time
watched = runpy.run_path({path!r})["watched"]
watched.__wrapped__.__globals__["_LEAST_SECONDS"] = 2.0
with watched({seconds}):
    time.sleep(2.5)
    {stand_still}(4)
print("went on")
"""


def run(seconds: float, stand_still: str) -> subprocess.CompletedProcess:
    program = PROGRAM.format(path=standstill.__file__, seconds=seconds, stand_still=stand_still)
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE, check=False
    )


def test_a_process_in_which_no_python_runs_ends_and_shows_where():
    found = run(2.0, "ctypes.PyDLL(None).sleep")
    assert (found.returncode, found.stdout) == (1, "")
    assert "Timeout" in found.stderr
    assert "<string>" in found.stderr


@pytest.mark.parametrize(("seconds", "stand_still"), [(2.0, "time.sleep"), (0.0, "ctypes.PyDLL(None).sleep")])
def test_one_that_waits_without_the_lock_or_is_not_watched_goes_on(seconds, stand_still):
    found = run(seconds, stand_still)
    assert (found.returncode, found.stdout) == (0, "went on\n")
