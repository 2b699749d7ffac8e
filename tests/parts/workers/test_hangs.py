"""A process in which Python stands still, in one of its own."""

import subprocess
import sys

import pytest

from crankshaft.parts.workers import hangs
from tests.waiting import PATIENCE

pytestmark = pytest.mark.thorough

# By its file, without TensorFlow; `PyDLL` calls C with Python's lock held.
PROGRAM = """
import ctypes, runpy, time
watched = runpy.run_path({path!r})["watched"]
watched.__wrapped__.__globals__.update(_LEAST_SECONDS=3.0, _EVERY_SECONDS=0.2)
with watched({seconds}):
    time.sleep(3.5)
    {stand_still}(5)
print("went on")
"""
CASES = [(3.0, "ctypes.PyDLL(None).sleep"), (3.0, "time.sleep"), (0.0, "ctypes.PyDLL(None).sleep")]


@pytest.fixture(scope="module")
def ended():
    """By case, its (exit code, output, errors). The processes, which only wait, run at once."""
    programs = [PROGRAM.format(path=hangs.__file__, seconds=each, stand_still=how) for each, how in CASES]
    started = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for program in programs
    ]
    try:
        said = [process.communicate(timeout=PATIENCE) for process in started]
    finally:
        for process in started:
            process.kill()
    return {case: (process.returncode, *texts) for case, process, texts in zip(CASES, started, said, strict=True)}


def test_a_process_in_which_no_python_runs_ends_and_shows_where(ended):
    code, out, err = ended[CASES[0]]
    assert (code, out) == (1, "")
    assert "Timeout" in err
    assert "<string>" in err


@pytest.mark.parametrize("case", CASES[1:])
def test_one_that_waits_without_the_lock_or_is_not_watched_goes_on(ended, case):
    assert ended[case][:2] == (0, "went on\n")
