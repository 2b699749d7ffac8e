"""What an engine's error says to whoever started the run."""

import errno
import os
import resource
import threading

import pytest
import tensorflow as tf

from crankshaft.engine.checkpoints import CheckpointError
from crankshaft.launch import explanations
from crankshaft.launch.command_line import flags  # noqa: F401 - defines them
from crankshaft.launch.errors import EXIT_FAILED, EXIT_USAGE, UsageError
from crankshaft.launch.host import files


def test_parameters_that_an_engine_error_names_are_told_as_flags():
    error = CheckpointError("ckpt-1 is of another model; use another `run_dir`, or `self.model`, or `no_flag`")
    line = "ckpt-1 is of another model; use another --run_dir, or `self.model`, or `no_flag`"
    assert explanations.explain(error) == (EXIT_USAGE, line)


def test_a_sentence_that_goes_on_in_the_next_line_is_not_cut():
    python = "\n    An attempt has been made\n    to start, here,\n    a process.\n\n    The rest is advice.\n"
    assert explanations.explain(RuntimeError(python), has_debug=False)[1] == (
        "RuntimeError: An attempt has been made to start, here, a process."
    )
    tensorflow = "Graph execution error:\n\nlogits are wrong:\n\t [[{{node loss}}]]\nat a node"
    assert explanations.explain(RuntimeError(tensorflow), has_debug=False)[1] == "RuntimeError: logits are wrong:"


def test_flags_are_keywords_where_a_program_called():
    line = "--seed=-1 is below 0; leave --norestore_best out, see --help, or --of_the_script"
    assert explanations.with_keywords(line, {}) == (
        "seed=-1 is below 0; leave restore_best=False out, see crankshaft train --help, or of_the_script"
    )
    assert (
        explanations.with_keywords("--train_epochs=0 is too few", {"train_epochs": "epochs"}) == "epochs=0 is too few"
    )
    command = "crankshaft train --mode=eval --run_dir=r"
    told = explanations.with_keywords(f"--seed=3 is another; look at it by {command}", {})
    assert told == f"seed=3 is another; look at it by {command}"
    with (
        pytest.raises(UsageError, match=r"^batch_size=0 of"),
        explanations.as_lines({"global_batch_size": "batch_size"}),
    ):
        raise UsageError("--global_batch_size=0 of")


def test_what_a_user_writes_in_backquotes_stays():
    assert "`seed` is mine" in explanations.explain(ValueError("`seed` is mine"))[1]


@pytest.fixture
def limited():
    """`limited(limit, most)` lowers a limit of this process for the test."""
    before = {}

    def lower(limit: int, most: int) -> None:
        before[limit] = resource.getrlimit(limit)
        resource.setrlimit(limit, (most, before[limit][1]))

    yield lower
    for limit, both in before.items():
        resource.setrlimit(limit, both)


def explained(do, *arguments) -> tuple[int, str]:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - of many kinds
        do(*arguments)
    return explanations.explain(raised.value)


def test_a_limit_that_is_met_is_named_with_the_file(limited, tmp_path, monkeypatch):
    limited(resource.RLIMIT_FSIZE, 1000)
    for write in (files.write_text, tf.io.write_file):
        code, line = explained(write, f"{tmp_path}/result.json", "x" * 9999)
        assert code == EXIT_FAILED
        assert f"{tmp_path}/result.json" in line
        assert line.endswith("; this process may have 1,000 bytes in a file (ulimit -f); raise that, or use less")
    code, line = explained(files.write_text, "/dev/full", "x" * 99999)
    assert "/dev/full" in line
    assert "No space left on device" in line
    assert line.endswith("; free space on its disk, or name a folder on another")
    for full in (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a.npy"), None):
        code, line = explanations.explain(full) if full else explained(tf.io.write_file, "/dev/full", "x" * 99999)
        assert code == EXIT_FAILED
        assert ("a.npy: No space left on device" if full else "/dev/full; No space left on device") in line
        assert line.endswith("; free space on its disk, or name a folder on another")
        assert "memory" not in line


def test_threads_that_cannot_be_started_name_the_limit(limited, monkeypatch):
    def refused(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading, "_start_new_thread", refused)
    limited(resource.RLIMIT_NPROC, 777)
    code, line = explained(threading.Thread(target=print).start)
    assert code == EXIT_FAILED
    assert "this process may have 777 processes and threads of this user (ulimit -u)" in line


def test_what_a_model_of_ones_own_raises_is_told_and_not_that_keras_looked_for_its_shapes():
    class Own(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.flat = tf.keras.layers.Flatten()

        def call(self, x):
            return self.flat(x)

    _, line = explained(Own(), {name: tf.keras.Input([]) for name in ("a", "b")})
    assert "expects 1 input(s), but it received 2" in line
