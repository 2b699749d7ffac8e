"""Variables sharded over a mesh: kept whole in slices, restored on any mesh with the same bits."""

import gc

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.checkpoints import Checkpoints, load_weights, slices, snapshot
from crankshaft.engine.errors import CheckpointError
from crankshaft.engine.mesh import sharded
from crankshaft.engine.mesh.sharded import Sharding
from crankshaft.parts.sharding import Mesh

RNG = np.random.default_rng(0)
# By name the whole, and how it is sharded: by columns, by rows that do not divide, a bias.
WHOLE = {
    "kernel": (RNG.normal(size=(6, 10)).astype(np.float32), {1: "model"}),
    "narrow": (RNG.normal(size=(3, 5)).astype(np.float32), {1: "model"}),
    "table": (RNG.normal(size=(7, 4)).astype(np.float32), {0: "model"}),
    "bias": (RNG.normal(size=10).astype(np.float32), {0: "model"}),
    "norm": (RNG.normal(size=5).astype(np.float32), {}),
}


class State:
    """What `WHOLE` has, on a mesh of this shape, with a slot of each; `sharded` ones are sharded over `data` too."""

    def __init__(self, distribution, data, model, sharded=False):
        self.strategy = distribution(data * model)
        self.mesh = Mesh(self.strategy, model)
        self.variables = {}
        with self.strategy.scope():
            for name, (whole, axes) in WHOLE.items():
                sharding = Sharding.over(self.mesh, whole.shape, axes if model > 1 else {})
                self._make(name, sharding)
                self._make(f"{name}_slot", sharding.further(0, "data") if sharded else sharding)
        self.tracked = tf.train.Checkpoint(**self.variables)

    def _make(self, name, sharding):
        self.variables[name] = tf.Variable(tf.fill(sharding.local_shape, 7.0))
        if sharding.axes:
            sharded.mark(self.variables[name], sharding)

    def fill(self, factor=1.0):
        for name, variable in self.variables.items():
            whole = self._whole(name, factor)
            if sharded.variable_sharding(variable):
                sharded.fill(variable, lambda box, whole=whole: tf.constant(whole[box.slices]))
            else:
                variable.assign(whole)

    def check(self, factor=1.0):
        """Each replica holds its shard, to the bit, and zeros where it is padded."""
        for name, variable in self.variables.items():
            sharding, whole = sharded.variable_sharding(variable), self._whole(name, factor)
            for replica, shard in sharded.local_shards(variable):
                expected = whole
                if sharding:
                    own = whole[sharding.box(replica).slices]
                    expected = np.pad(own, [(0, n - s) for n, s in zip(sharding.local_shape, own.shape, strict=True)])
                np.testing.assert_array_equal(shard.numpy(), expected)

    def _whole(self, name, factor):
        whole = WHOLE[name.removesuffix("_slot")][0]
        return whole * factor + 1 if name.endswith("_slot") else whole * factor


def checkpoints(directory, state):
    return Checkpoints(directory, state.tracked, keep=None, about={})


@pytest.fixture
def saved(tmp_path, distribution):
    state = State(distribution, 2, 2)
    state.fill()
    checkpoints(tmp_path, state).save(1, {}, wait=True)
    return state, tmp_path


@pytest.mark.parametrize("sharded", [False, True], ids=["", "sharded"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 1), (4, 1), (2, 2)], ids=str)
def test_restored_on_any_mesh_to_the_bit_and_back(saved, distribution, shape, sharded):
    first, directory = saved
    other = State(distribution, *shape, sharded=sharded)
    assert checkpoints(directory, other).restore().step == 1
    other.check()
    other.fill(2.0)
    checkpoints(directory, other).save(2, {}, wait=True)
    assert checkpoints(directory, first).restore().step == 2
    first.check(2.0)


def test_a_checkpoint_names_full_shapes_and_no_padding(saved):
    state, directory = saved
    manifest = checkpoints(directory, state).latest()
    names = [*WHOLE, *(f"{name}_slot" for name in WHOLE)]
    shapes = {f"{name}/.ATTRIBUTES/VARIABLE_VALUE": list(WHOLE[name.removesuffix("_slot")][0].shape) for name in names}
    assert {key: shape for key, (shape, _) in manifest.variables.items()} == shapes
    reader = tf.train.load_checkpoint(manifest.prefix)
    assert {key: reader.get_variable_to_shape_map()[key] for key in shapes} == shapes
    np.testing.assert_array_equal(reader.get_tensor("table/.ATTRIBUTES/VARIABLE_VALUE"), WHOLE["table"][0])
    plain = {name: tf.Variable(tf.zeros(WHOLE[name][0].shape)) for name in WHOLE}
    tf.train.Checkpoint(**plain).restore(manifest.prefix).expect_partial()  # TensorFlow alone reads it
    for name, variable in plain.items():
        np.testing.assert_array_equal(variable.numpy(), WHOLE[name][0])


def test_weights_are_taken_by_their_parts(saved, distribution):
    _, directory = saved
    other = State(distribution, 1, 2)
    target = tf.train.Checkpoint(kernel=other.variables["kernel"])
    with pytest.raises(CheckpointError, match="only in the checkpoint"):
        load_weights(directory, target, "")
    alone = tf.train.Checkpoint(model=tf.train.Checkpoint(kernel=other.variables["kernel"]))
    Checkpoints(directory / "alone", alone, keep=None, about={}).save(1, {}, wait=True)
    other.fill(3.0)
    assert load_weights(directory / "alone", alone.model, "model") == ["model.kernel"]
    for _, shard in sharded.local_shards(other.variables["kernel"]):
        np.testing.assert_array_equal(shard.numpy(), tf.fill(shard.shape, 7.0))


def test_a_model_of_another_size_is_refused_by_its_full_shape(saved, distribution):
    state, directory = saved
    sharding = Sharding.over(state.mesh, (6, 12), {1: "model"})
    with state.strategy.scope():
        state.tracked.kernel = tf.Variable(tf.zeros(sharding.local_shape))
    sharded.mark(state.tracked.kernel, sharding)
    with pytest.raises(CheckpointError, match=r"kernel: \[6, 12\] float32 here, \[6, 10\] float32 in the checkpoint"):
        checkpoints(directory, state).restore()


def test_a_broken_part_is_not_read_as_whole(saved):
    state, directory = saved
    found = sorted(directory.glob("ckpt-1.data-*"), key=lambda path: path.stat().st_size)[-1]
    content = bytearray(found.read_bytes())
    content[len(content) // 2] ^= 1
    found.write_bytes(content)
    assert checkpoints(directory, state).restore() is None
    assert "expected sha256" in checkpoints(directory, state).problem()


def test_what_is_saved_is_what_was_there_when_save_was_called(tmp_path, distribution):
    state = State(distribution, 2, 2)
    state.fill()
    kept = checkpoints(tmp_path, state)
    kept.save(1, {})
    state.fill(2.0)
    kept.wait()
    kept.restore()
    state.check()


@pytest.mark.parametrize(("width", "slice_bytes", "cut"), [(3, 32 << 20, 1), (16, 32 << 20, 1), (3, 200, 4)])
def test_writing_shares_the_memory_of_shards(distribution, monkeypatch, width, slice_bytes, cut):
    """Nothing of 1 GiB of them is copied, also where each is written in slices."""
    monkeypatch.setattr(slices, "SLICE_BYTES", slice_bytes)
    sharding = Sharding.over(Mesh(distribution(2), 2), (128, width), {0: "model"})
    with distribution(2).scope():
        variable = tf.Variable(tf.zeros(sharding.local_shape))
    sharded.mark(variable, sharding)
    sharded.fill(variable, lambda box: tf.ones(box.size))  # replicas share zeros
    (found,) = entries_of(tf.train.Checkpoint(variable=variable))
    memory = [
        range(at := _address(shard.read_value()), at + 64 * width * 4) for _, shard in sharded.local_shards(variable)
    ]
    held = [_address(piece.read()) for piece in found.slices]
    assert not found.is_live
    assert [[at in shard for at in held] for shard in memory] == [
        [True] * cut + [False] * cut,
        [False] * cut + [True] * cut,
    ]
    assert not any(piece.copied_bytes for piece in found.slices)


def test_slices_that_are_copied_say_so(distribution, monkeypatch):
    """Those that are padded, and those that do not end where a tensor may begin."""
    monkeypatch.setattr(slices, "SLICE_BYTES", 64)
    state = State(distribution, 1, 2)
    found = {
        each.key.partition("/")[0]: [piece.copied_bytes for piece in each.slices] for each in entries_of(state.tracked)
    }
    assert found["narrow"] == [36, 24]
    assert found["table"] == [0, 48]
    assert found["kernel"] == [120, 120]


def entries_of(state):
    return snapshot.take(state).entries[2:]  # behind what is TensorFlow's own


def _address(tensor):
    return np.asarray(tensor).__array_interface__["data"][0]


def test_what_was_written_is_kept_nowhere(tmp_path, distribution):
    """An update changes a shard where it is, as soon as it is written: nothing else has its memory."""
    state = State(distribution, 1, 2)
    state.fill()
    gc.disable()
    try:
        checkpoints(tmp_path, state).save(1, {}, wait=True)
        for _, shard in sharded.local_shards(state.variables["kernel"]):
            before = _address(shard.read_value())
            shard.assign_add(tf.ones(shard.shape))
            assert _address(shard.read_value()) == before
    finally:
        gc.enable()


def test_shards_whose_reading_copies_them_are_written_before_they_change(tmp_path, distribution, monkeypatch):
    """As a table's, which sparse updates changed; slices of two rows."""
    monkeypatch.setattr(snapshot, "COPIED_BYTES", 0)
    monkeypatch.setattr(slices, "SLICE_BYTES", 2 * 4 * 4)
    state = State(distribution, 1, 2)
    state.fill()
    for _, shard in sharded.local_shards(state.variables["table"]):
        shard.scatter_update(tf.IndexedSlices(shard[:1], [0]))
    kept = checkpoints(tmp_path, state)
    assert [each.key.partition("/")[0] for each in entries_of(state.tracked) if each.is_live] == ["table"]
    kept.save(1, {})
    state.fill(2.0)
    kept.wait()
    kept.restore()
    state.check()
