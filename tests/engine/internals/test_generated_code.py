"""What AutoGraph generates is in memory: no file is left by a process that is killed, and errors show their source."""

import subprocess
import sys
import traceback

import pytest
import tensorflow as tf

from crankshaft.engine.internals import tensorflow as internals

pytestmark = pytest.mark.thorough

# Traces a function that AutoGraph converts, and ends as a kill does: nothing that is to be done at exit is done.
_KILLED = f"""
import os
import tensorflow as tf
import {internals.__name__}

@tf.function
def step(x):
    if x > 0:
        x += 1
    return x

print(int(step(tf.constant(1))), step.python_function.__name__, flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_process_that_is_killed_leaves_no_generated_file(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(_KILLED)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-9, "2 step\n"), done.stderr
    assert list((tmp_path / "temporary").iterdir()) == []


def test_an_error_in_generated_code_shows_the_line_that_was_written():
    @tf.function
    def step(x):
        for _ in tf.range(3):
            x += 1
        raise ValueError("mine")

    written = r'test_generated_code.py", line \d+, in step  \*\n +raise ValueError\("mine"\)'
    with pytest.raises(ValueError, match=written) as error:
        step(tf.constant(1))
    generated = [frame for frame in traceback.extract_tb(error.tb) if "__autograph_generated" in frame.filename]
    assert "'mine'" in generated[-1].line
