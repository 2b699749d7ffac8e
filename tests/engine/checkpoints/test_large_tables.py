"""Tables are written slice by slice: the same entries, the same bits, and little memory."""

import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.checkpoints import Checkpoints, slices, snapshot
from crankshaft.parts.tables import Embedding
from tests.arrays import assert_same


class Slots(tf.Module):
    def __init__(self, table):
        super().__init__()
        self.moments = [tf.Variable(tf.ones(shard.shape)) for shard in table.shards]


def make_state(rows=50, width=3, shards=2):
    table = Embedding("table", rows, width, num_shards=shards)
    table.build(seed=1)
    return tf.train.Checkpoint(table=table, slots=Slots(table), step=tf.Variable(7))


def touch(state):
    """A sparse update, after which TensorFlow copies a variable whenever it is read."""
    for variable in (*state.table.shards, *state.slots.moments):
        rows = tf.range(0, variable.shape[0], 7)
        variable.scatter_update(tf.IndexedSlices(tf.random.normal([len(rows), variable.shape[1]]), rows))


def values(state):
    return [variable.numpy() for variable in (*state.table.shards, *state.slots.moments)]


@pytest.mark.parametrize("copied", [0, 700])
def test_slices_are_entries_like_any_other(tmp_path, monkeypatch, copied):
    """Of four variables of 300 bytes all are cut, or two; slices of two rows, the last of one or none."""
    state = make_state()
    touch(state)
    wanted = values(state)
    whole = Checkpoints(tmp_path / "whole", state, keep=None, about={})
    whole.save(1, {}, wait=True)
    monkeypatch.setattr(snapshot, "COPIED_BYTES", copied)
    monkeypatch.setattr(slices, "SLICE_BYTES", 2 * 3 * 4)
    sliced = Checkpoints(tmp_path / "sliced", state, keep=None, about={})
    sliced.save(1, {})
    touch(state)  # as soon as it returns
    sliced.wait()
    forms = [tf.train.load_checkpoint(each.latest().prefix).get_variable_to_shape_map() for each in (whole, sliced)]
    assert forms[0] == forms[1]
    assert whole.latest().variables == sliced.latest().variables
    assert len(list((tmp_path / "sliced").glob("*.data-*"))) > 20
    assert not list((tmp_path / "sliced").glob("*temp*"))
    reader = tf.train.load_checkpoint(sliced.latest().prefix)
    np.testing.assert_array_equal(reader.get_tensor("table/shards/1/.ATTRIBUTES/VARIABLE_VALUE"), wanted[1])
    alone = tf.train.Checkpoint(table=state.table, slots=state.slots, step=state.step)
    for read in (sliced.restore, lambda: alone.restore(sliced.latest().prefix)):
        touch(state)
        read()
        assert_same(values(state), wanted)


def test_a_file_has_slices_of_one_device_and_no_more_copies_than_a_slice_may_be(tmp_path, monkeypatch):
    monkeypatch.setattr(slices, "SLICE_BYTES", 32)
    copied = [(0, 16), (0, 16), (0, 16), (0, 16), (0, 40), (0, 0), (0, 0), (1, 0), (1, 16)]
    entries = [
        slices.SlicedVariable(str(n), [slices.Slice("", f"CPU:{device}", lambda: tf.zeros([4]), num_bytes)])
        for n, (device, num_bytes) in enumerate(copied)
    ]
    prefixes = slices.write(entries, str(tmp_path / "part"))
    assert prefixes == [str(tmp_path / f"part-{n}") for n in range(5)]
    keys = ["".join(sorted(tf.train.load_checkpoint(prefix).get_variable_to_shape_map())) for prefix in prefixes]
    assert keys == ["01", "23", "4", "56", "78"]


def memory(name):
    return int(re.search(rf"{name}:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) / 1024


@pytest.mark.thorough
def test_a_save_takes_a_quarter_of_a_gigabyte_at_most(tmp_path):
    """A table of 183 MiB and its slot; their copies, which a kernel's sparse update makes of reads, would take 366."""
    state = make_state(rows=750_000, width=64, shards=1)
    table, slot = state.table.shards[0], state.slots.moments[0]
    tf.raw_ops.ResourceSparseApplyAdagrad(
        var=table.handle, accum=slot.handle, lr=0.1, grad=tf.ones([2, 64]), indices=[3, 99]
    )
    checkpoints = Checkpoints(tmp_path, state, keep=None, about={})
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the most so far is what it is now
    before = memory("VmRSS")
    checkpoints.save(1, {}, wait=True)
    assert memory("VmHWM") - before < 256
    assert checkpoints.latest().step == 1
