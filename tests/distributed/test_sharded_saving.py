"""Two processes that hold halves of a state write one checkpoint together, or none."""

from __future__ import annotations

import signal

import pytest
import tensorflow as tf

from crankshaft.engine.checkpoints import Checkpoints
from tests.distributed import sharded_writer
from tests.processes import ROOT


@pytest.mark.slow
def test_both_write_their_halves_and_a_half_alone_is_never_read(start_workers, tmp_path):
    workers = start_workers(2, ROOT / "tests" / "distributed" / "sharded_writer.py", tmp_path)
    codes = workers.wait()
    said = [[line.split(": ", 1) for line in workers.output(worker).splitlines()] for worker in (0, 1)]
    chief, other = (dict(line for line in lines if len(line) == 2) for lines in said)
    assert codes == [0, -signal.SIGKILL], workers.output(0)[-3000:] + workers.output(1)[-3000:]
    assert (chief["step 1"], other["step 1"], chief["bits"], other["bits"]) == ("saved", "saved", "True", "True")
    for error in (chief["step 2"], other["step 2"]):
        assert error.startswith(f"ckpt-2 could not be written to {tmp_path}: ")
        assert "File too large" in error
    assert "worker 1 could not write its share" in chief["step 2"]
    assert "worker 1 wrote nothing of its share for 10 s" in chief["step 3"]
    assert chief["newest"].startswith("1 left: ['checkpoint', 'ckpt-1.data-")
    assert "ckpt-2" not in chief["newest"]
    assert "ckpt-3" not in chief["newest"]
    table = tf.Variable(tf.zeros([sharded_writer.ROWS, sharded_writer.WIDTH]))
    state = tf.train.Checkpoint(table=table, copy=tf.Variable(0.0))
    assert Checkpoints(tmp_path, state, keep=None, about={}).restore().step == 1
    expected = sharded_writer.whole(sharded_writer.sharded.Box((0, 0), (sharded_writer.ROWS, sharded_writer.WIDTH)))
    assert bool(tf.reduce_all(table == expected))
