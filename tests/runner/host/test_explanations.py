"""What an engine's error says to whoever started the run."""

import errno
import os
import re
import resource
import zipfile

import pytest
import tensorflow as tf

from crankshaft.engine.errors import CheckpointError, SaveError
from crankshaft.engine.machine import cpus
from crankshaft.runner import explanations
from crankshaft.runner.failures import EXIT_FAILED, EXIT_USAGE, UsageError
from crankshaft.runner.host.text_files import write_user_file


def test_settings_are_named_alike_on_a_command_line_and_to_a_program():
    line = "run_dir=/run_dir/r is another's; use another run_dir, or input=y for the input"
    error = UsageError(line)
    assert explanations.explain(error) == (EXIT_USAGE, str(error)) == (EXIT_USAGE, line)

    @explanations.explained
    def call():
        raise error

    with pytest.raises(UsageError) as raised:
        call()
    assert raised.value is error
    assert error.message == str(error) == line


# TensorFlow's text of a failed op: all frames that made it.
PLACE = "/home/me/script.py:8 in loss"
STACK = f"""Graph execution error:

Detected at node Reshape defined at (most recent call last):
  File "/home/me/script.py", line 30, in <module>

  File "{explanations.__file__}", line 40, in border

  File "/home/me/script.py", line 7, in train_step

  File "/home/me/script.py", line 8, in loss

  File "{tf.__file__}", line 7, in reshape

refused
\t [[{{{{node Reshape}}}}]] [Op:__inference_function_1]"""


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (
            tf.errors.InvalidArgumentError(None, None, "assertion failed: [an id is 4, not in] [0..3] [here]"),
            EXIT_USAGE,
            "an id is 4, not in 0..3 here",
        ),
        (
            tf.errors.InvalidArgumentError(None, None, "indices[0,1] = -2 is not in [0, 20)"),
            EXIT_USAGE,
            "ids from 0 to below 20: an id of -2 was looked up; correct the data, or allow for more",
        ),
        (
            tf.errors.ResourceExhaustedError(None, None, "OOM when allocating"),
            EXIT_FAILED,
            "out of memory (OOM when allocating); lower global_batch_size or resident_data_mb, or raise "
            "accumulate_steps",
        ),
        (
            tf.errors.InvalidArgumentError(None, None, "Detected Infinity or NaN in output, in other words"),
            EXIT_USAGE,
            "InvalidArgumentError: Detected Infinity or NaN in output, in other words",
        ),
        (tf.errors.InvalidArgumentError(None, None, STACK), EXIT_USAGE, f"InvalidArgumentError: refused, at {PLACE}"),
        (
            tf.errors.InvalidArgumentError(None, None, f'refused\nFile "{__file__[1:]}", line 8, in loss'),  # XLA's
            EXIT_USAGE,
            f"InvalidArgumentError: refused, at {__file__}:8 in loss",
        ),
        *(
            (kind(None, None, STACK), EXIT_FAILED, f"{kind.__name__}: refused, at {PLACE}")
            for kind in (tf.errors.UnknownError, tf.errors.FailedPreconditionError)  # the second, of a restarted peer
        ),
        (
            tf.errors.InvalidArgumentError(None, None, "Unable to find the relevant tensor remote_handle: Op ID: 5"),
            EXIT_FAILED,
            "InvalidArgumentError: Unable to find",
        ),
        (MemoryError(), EXIT_FAILED, "out of memory (MemoryError); lower"),
        (
            tf.errors.InvalidArgumentError(None, None, "label value of 7 which is outside the valid range of [0, 5)."),
            EXIT_USAGE,
            "the data has a label of 7, and the loss takes labels from 0 to below 5, as many as the model has outputs",
        ),
        (
            tf.errors.FailedPreconditionError(
                None, None, "Input dataset was expected to contain 9 elements but contained only 8 elements."
            ),
            EXIT_USAGE,
            "an epoch of the data has only 8 examples, and the run goes by 9, as they were counted",
        ),
        (ValueError("another"), EXIT_USAGE, "ValueError: another"),
        (RuntimeError("another"), EXIT_FAILED, "RuntimeError: another"),
        (OSError("a network's"), EXIT_FAILED, "a network's"),
        (OSError(errno.EIO, "Broken", "a.npy"), EXIT_FAILED, "a.npy: Broken"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_of_tensorflow_that_decide_the_exit_code_are_explained(error, code, line):
    found = explanations.explain(error, has_debug=False)
    assert found[0] == code
    assert found[1].startswith(line)


def test_where_a_traceback_can_be_had_its_line_says_so_and_a_refused_call_its_file():
    by = "; debug=true shows the traceback"
    assert explanations.explain(RuntimeError("another"))[1] == f"RuntimeError: another{by}"
    line = explained(int, "x")[1].replace(f", at {__file__}", "")
    assert re.fullmatch(
        r"ValueError: invalid literal for int\(\) with base 10: 'x':\d+ in explained; debug=true .*", line
    )
    assert [
        explanations.explain_system_error(OSError(*arguments))
        for arguments in ((errno.EIO, "Broken", "a"), (errno.EIO, "Broken"), ("broken",))
    ] == ["a: Broken", "Broken", "broken"]


def test_a_full_disk_has_its_cure_once_and_a_limit_that_is_no_process_s_own_is_named(limited):
    numbers = errno.ENOSPC, errno.EDQUOT, errno.EMFILE
    full, quota, files = (OSError(number, os.strerror(number), "a") for number in numbers)
    for cause, code, end in (
        (full, EXIT_FAILED, ""),
        (quota, EXIT_FAILED, "; free space of this user's, or have the quota raised"),
    ):
        error = SaveError("no room; free some")
        error.__cause__ = cause
        assert explanations.explain(error) == (code, f"no room; free some{end}")
    limited(resource.RLIMIT_NOFILE, 777)
    assert explanations.explain(files) == (
        EXIT_USAGE,
        "a: Too many open files; this process may have 777 open files (ulimit -n); raise that, or use less",
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    assert explanations.explain(OSError(errno.EFBIG, "File too large", "a"))[1] == (
        "a: File too large; a limit on bytes in a file is met that is not this process's own (ulimit -f is unlimited); "
        "raise it"
    )


def test_an_error_is_one_line_within_a_layer_too():
    class Broken(tf.keras.layers.Layer):
        def call(self, x):
            raise CheckpointError("model is another; use a new run_dir")

    assert explained(Broken(), tf.ones([1])) == (EXIT_USAGE, "model is another; use a new run_dir")


def test_an_error_is_one_line_within_a_users_tf_function_too():
    @tf.function  # whose AutoGraph replaces an error by its own
    def broken(x):
        if tf.reduce_sum(x) > 0:
            raise CheckpointError("model is another; use a new run_dir")
        return x

    assert explained(broken, tf.ones([1])) == (EXIT_USAGE, "model is another; use a new run_dir")


def test_a_sentence_that_goes_on_in_the_next_line_is_not_cut():
    python = "\n    An attempt has been made\n    to start, here,\n    a process.\n\n    The rest is advice.\n"
    assert explanations.explain(RuntimeError(python), has_debug=False)[1] == (
        "RuntimeError: An attempt has been made to start, here, a process."
    )
    tensorflow = "Graph execution error:\n\nlogits are wrong:\n\t [[{{node loss}}]]\nat a node"
    assert explanations.explain(RuntimeError(tensorflow), has_debug=False)[1] == "RuntimeError: logits are wrong:"


def test_what_a_user_writes_in_backquotes_stays():
    assert "`seed` is mine" in explanations.explain(ValueError("`seed` is mine"))[1]


@pytest.fixture
def limited():
    """`limited(limit, most)` lowers a limit of this process for the test."""
    before = {}

    def lower(limit: int, most: int) -> None:
        before.setdefault(limit, resource.getrlimit(limit))
        resource.setrlimit(limit, (most, before[limit][1]))

    yield lower
    for limit, both in before.items():
        resource.setrlimit(limit, both)


def explained(operation, *arguments) -> tuple[int, str]:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - of many kinds
        operation(*arguments)
    return explanations.explain(raised.value)


def test_a_limit_that_is_met_is_named_with_the_file(limited, tmp_path, monkeypatch):
    limited(resource.RLIMIT_FSIZE, 1000)
    for write in (write_user_file, tf.io.write_file):
        code, line = explained(write, f"{tmp_path}/result.json", "x" * 9999)
        assert code == EXIT_USAGE  # the next process would meet it again
        assert f"{tmp_path}/result.json" in line
        assert line.endswith("; this process may have 1,000 bytes in a file (ulimit -f); raise that, or use less")
    code, line = explained(write_user_file, "/dev/full", "x" * 99999)
    assert "/dev/full" in line
    assert "No space left on device" in line
    assert line.endswith("; free space on its disk, or name a folder on another (for temporary files: TMPDIR)")
    for full in (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a.npy"), None):
        code, line = explanations.explain(full) if full else explained(tf.io.write_file, "/dev/full", "x" * 99999)
        assert code == EXIT_FAILED
        assert ("a.npy: No space left on device" if full else "/dev/full; No space left on device") in line
        assert line.endswith("; free space on its disk, or name a folder on another (for temporary files: TMPDIR)")
        assert "memory" not in line


@pytest.mark.thorough
def test_memory_that_ulimit_refuses_is_named_as_the_limit_and_lasts(limited):
    def refuse(error):
        raise error

    primitive = tf.errors.AbortedError(None, None, "Status:1, message: could not create a primitive. in file mkl_conv")
    most = 1 << 46
    assert "ulimit" not in explained(refuse, primitive)[1]
    limited(resource.RLIMIT_AS, most)
    for operation, argument in ((bytearray, most), (tf.zeros, [most]), (refuse, primitive)):
        code, line = explained(operation, argument)
        assert code == EXIT_USAGE
        assert line.endswith(
            f"; this process may have {most:,} bytes of address space (ulimit -v); raise that, or use less"
        )
    assert "ulimit" not in explained(refuse, tf.errors.AbortedError(None, None, "a peer is gone"))[1]


def test_a_clock_before_1980_is_named_with_the_cure():
    code, line = explained(zipfile.ZipInfo, "model.json", (1970, 1, 1, 0, 0, 0))  # as Keras's `save` makes it then
    assert code == EXIT_FAILED  # the clock may be set the next time
    assert line == "ZIP does not support timestamps before 1980; set this machine's clock, and try again"


def test_an_op_without_a_deterministic_kernel_names_the_variable_that_allows_it():
    def refused():
        raise tf.errors.UnimplementedError(None, None, "A deterministic GPU implementation of AdjustContrast is not")

    code, line = explained(refused)
    assert code == EXIT_USAGE
    assert "AdjustContrast" in line
    assert "TF_DETERMINISTIC_OPS=0" in line


def test_threads_that_cannot_be_started_name_the_limit(limited, monkeypatch, tmp_path):
    def refused():
        raise RuntimeError("can't start new thread")  # as `threading.Thread.start` does

    limited(resource.RLIMIT_NPROC, 777)
    code, line = explained(refused)
    assert code == EXIT_FAILED
    assert "this process may have 777 processes and threads of this user (ulimit -u)" in line

    (tmp_path / "pids.max").write_text("333\n")
    monkeypatch.setattr(cpus, "control_groups", lambda controller: [tmp_path] if controller == "pids" else [])
    _, line = explained(refused)
    assert line.endswith("this control group may have 333 processes and threads (pids.max); raise that, or use less")
    limited(resource.RLIMIT_NPROC, 111)
    assert "111 processes and threads of this user" in explained(refused)[1]


def test_an_error_of_a_users_model_is_shown_and_not_that_keras_looked_for_its_shapes():
    class Own(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.flat = tf.keras.layers.Flatten()

        def call(self, x):
            return self.flat(x)

    _, line = explained(Own(), {name: tf.keras.Input([]) for name in ("a", "b")})
    assert "expects 1 input(s), but it received 2" in line


def test_a_loop_of_pythons_over_a_tensor_in_a_step_is_one_line_with_its_place():
    def loop():
        tf.function(lambda x: 1 if x > 0 else 2, autograph=False)(tf.constant(1.0))

    code, line = explained(loop)
    assert code == EXIT_USAGE
    place = rf"{re.escape(__file__)}:\d+ in <lambda>"
    assert re.match(
        rf"in a step, which is compiled, Python can't branch by a tensor's value, or loop over it, at {place}; use",
        line,
    )
    assert "eager" not in line.lower()


def test_an_error_in_a_function_that_autograph_converts_is_one_line_with_its_place():
    @tf.function
    def wrong(x):
        return tf.reshape(x, [7])

    code, line = explained(wrong, tf.ones([3]))
    assert code == EXIT_USAGE
    assert re.match(rf"ValueError: Cannot reshape .*, at {re.escape(__file__)}:\d+ in wrong; debug=true", line)
