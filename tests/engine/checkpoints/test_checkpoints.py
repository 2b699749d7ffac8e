"""What is restored is what was there at the call of save, to the bit."""

import contextlib
import errno
import functools
import os
import threading

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.checkpoints import Checkpoints, load_weights, objects, read_newest, store
from crankshaft.engine.checkpoints import manifest as manifests
from crankshaft.engine.errors import CheckpointError, SaveError
from tests.arrays import assert_same
from tests.engine.checkpoints.checkpoint_cases import (
    bits,
    data_file,
    fill,
    make,
    make_state,
    names,
    saved,
    variables_of,
)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_round_trip_keeps_every_bit(tmp_path, replicas):
    devices = [f"CPU:{i}" for i in range(replicas)]
    strategy = tf.distribute.MirroredStrategy(devices) if replicas > 1 else tf.distribute.get_strategy()
    with strategy.scope():
        state = make_state()
        fill(state, 1)
        before = bits(state)
        make(tmp_path, state).save(7, {"best": np.float32(0.5), "patience": 3}, wait=True)
    fill(state, 2)
    with strategy.scope():
        manifest = make(tmp_path, state).restore()
    assert bits(state) == before
    assert len(before) > replicas * 10
    assert manifest.step == 7
    assert manifest.host_state == {"best": 0.5, "patience": 3}
    assert manifest.about == {"model": "mlp", "units": 3}
    alone = make_state()
    make(tmp_path, alone).restore()
    assert bits(alone) == before[::replicas]
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        mirrored = make_state()
        make(tmp_path, mirrored).restore()
    assert bits(mirrored)[::2] == bits(mirrored)[1::2] == before[::replicas]


def test_what_is_summed_on_read_is_saved_as_each_replicas_part_of_it(tmp_path):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        total = tf.Variable(
            0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM
        )
    state = tf.train.Checkpoint(total=total)
    strategy.run(
        lambda: total.assign_add(
            1.5 + tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
        )
    )
    make(tmp_path, state).save(1, {}, wait=True)
    strategy.run(lambda: total.assign_add(1.0))
    make(tmp_path, state).restore()
    assert [float(part) for part in strategy.experimental_local_results(total)] == [1.5, 2.5]
    assert float(total.read_value()) == 4.0
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"]).scope():  # another number: in equal parts
        more = tf.Variable(0.0, synchronization=total.synchronization, aggregation=total.aggregation)
        make(tmp_path, tf.train.Checkpoint(total=more)).restore()
    assert float(more.read_value()) == 4.0


def test_tensorflow_alone_reads_and_writes_the_same_files(tmp_path):
    state, checkpoints = saved(tmp_path / "ours", [1])
    before = bits(state)
    theirs = tf.train.Checkpoint(trainer=state.trainer, step=state.step, half=state.half).save(tmp_path / "theirs")
    ours = tf.train.load_checkpoint(checkpoints.latest().prefix)
    assert ours.get_variable_to_shape_map() == tf.train.load_checkpoint(theirs).get_variable_to_shape_map()
    assert set(checkpoints.latest().variables) == set(ours.get_variable_to_shape_map()) - {
        "_CHECKPOINTABLE_OBJECT_GRAPH",
        "save_counter/.ATTRIBUTES/VARIABLE_VALUE",
    }
    fill(state, 2)
    fresh = tf.train.Checkpoint(trainer=state.trainer, step=state.step, half=state.half)
    fresh.restore(checkpoints.latest().prefix).assert_consumed()
    assert bits(state) == before


@pytest.mark.parametrize("update", ["assign", "adam", "xla", "scatter"])
def test_the_file_holds_the_values_at_the_call_however_they_change_after(tmp_path, update):
    table = tf.Variable(tf.zeros([2_000, 500]))
    moments = [tf.Variable(tf.zeros_like(table)) for _ in range(2)]
    step = tf.Variable(0, dtype=tf.int64)
    state = tf.train.Checkpoint(table=table, moments=moments, step=step)
    ones = tf.ones_like(table)

    def adam():
        tf.raw_ops.ResourceApplyAdam(
            var=table.handle,
            m=moments[0].handle,
            v=moments[1].handle,
            beta1_power=0.9,
            beta2_power=0.9,
            lr=0.1,
            beta1=0.9,
            beta2=0.9,
            epsilon=1e-3,
            grad=ones,
        )

    change = {
        "assign": lambda: table.assign_add(ones),
        "adam": tf.function(adam),
        "xla": tf.function(lambda: table.assign(table * 0.5 + ones), jit_compile=True),
        "scatter": lambda: table.scatter_add(tf.IndexedSlices(ones, tf.range(2_000))),
    }[update]
    change()  # compiled, and its variables in whatever mode it puts them
    checkpoints = make(tmp_path, state)
    for number in range(1, 4):
        step.assign(number)
        expected = [variable.numpy().copy() for variable in (table, *moments)]
        host_state = {"best": number}
        checkpoints.save(number, host_state)
        host_state["best"] = 0
        for _ in range(5):
            change()
            step.assign_add(100)
        assert (table.numpy() != expected[0]).all()
        checkpoints.wait()
        reader = tf.train.load_checkpoint(checkpoints.latest().prefix)
        for key, value in zip(("table", "moments/0", "moments/1"), expected, strict=True):
            np.testing.assert_array_equal(reader.get_tensor(key + "/.ATTRIBUTES/VARIABLE_VALUE"), value)
        assert reader.get_tensor("step/.ATTRIBUTES/VARIABLE_VALUE") == number
        assert checkpoints.latest().host_state == {"best": number}


def test_variables_made_after_the_first_save_are_in_the_second(tmp_path):
    state, checkpoints = saved(tmp_path, [1])
    state.later = tf.Variable([1.0, 2.0])
    checkpoints.save(2, {}, wait=True)
    assert checkpoints.latest().variables["later/.ATTRIBUTES/VARIABLE_VALUE"] == [[2], "float32"]


def test_a_variable_under_two_names_is_saved_once_and_weights_are_found_under_either(tmp_path):
    shared = tf.Variable([1.0, 2.0])
    state = tf.train.Checkpoint(a=tf.train.Checkpoint(deep=tf.train.Checkpoint(v=shared)), model=[shared])
    checkpoints = make(tmp_path, state)
    checkpoints.save(1, {}, wait=True)
    assert list(checkpoints.latest().variables) == ["model/0/.ATTRIBUTES/VARIABLE_VALUE"]
    target = tf.train.Checkpoint(v=tf.Variable([0.0, 0.0]))
    assert load_weights(tmp_path, target, "a.deep") == ["a.deep.v"]
    assert target.v.numpy().tolist() == [1.0, 2.0]


@pytest.mark.parametrize(("keep", "left"), [(2, [10, 30]), (None, [1, 2, 10, 30]), (0, [1, 2, 10, 30])])
def test_the_newest_are_kept_and_nothing_of_the_others(tmp_path, keep, left):
    _, checkpoints = saved(tmp_path, [1, 2, 10, 30], keep)
    assert [manifest.step for manifest in checkpoints.all()] == left
    assert {manifests.step_from_name(name) for name in names(tmp_path) if name != "checkpoint"} == {*left}
    assert checkpoints.clean() == []


@pytest.mark.parametrize(("keep", "left"), [(1, [2, 3]), (2, [2, 3]), (3, [2, 3]), (4, [1, 2, 3])])
def test_room_is_made_before_a_write_but_two_stay_until_it_is_whole(tmp_path, monkeypatch, keep, left):
    state, checkpoints = saved(tmp_path, [1, 2, 3], keep=3)
    checkpoints = make(tmp_path, state, keep)
    at_write, write = [], manifests.publish

    def spy(*given):
        at_write.append([step for step in (1, 2, 3, 4) if data_file(tmp_path, step).exists()])
        write(*given)

    monkeypatch.setattr(manifests, "publish", spy)
    checkpoints.save(4, {}, wait=True)
    assert at_write == [left]
    assert [manifest.step for manifest in checkpoints.all()] == [1, 2, 3, 4][-keep:]


@pytest.mark.parametrize(("number", "left"), [(errno.EINVAL, [1, 2]), (errno.ENOTSUP, [1, 2]), (errno.EIO, [])])
def test_only_a_file_system_that_has_no_fsync_keeps_what_it_did_not_sync(tmp_path, monkeypatch, number, left):
    def fsync(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    with contextlib.nullcontext() if left else pytest.raises(SaveError, match="Input/output error"):
        _, checkpoints = saved(tmp_path, [1, 2])
        assert [manifest.step for manifest in checkpoints.all()] == left


def test_what_is_broken_makes_room_first(tmp_path):
    state, _ = saved(tmp_path, [1, 2, 3], keep=3)
    data_file(tmp_path, 3).write_bytes(b"cut")
    checkpoints = make(tmp_path, state, keep=3)
    checkpoints.save(4, {}, wait=True)
    assert [manifest.step for manifest in checkpoints.all()] == [1, 2, 4]


def test_a_stale_state_file_misleads_neither_restore_nor_sweep(tmp_path):
    _, checkpoints = saved(tmp_path, [1, 2], keep=2)
    stale = (tmp_path / "checkpoint").read_bytes()
    saved(tmp_path, [3], keep=2)
    (tmp_path / "checkpoint").write_bytes(stale)
    assert checkpoints.latest().step == 3
    _, checkpoints = saved(tmp_path, [4], keep=2)
    assert [manifest.step for manifest in checkpoints.all()] == [3, 4]
    assert tf.train.latest_checkpoint(tmp_path).endswith("ckpt-4")


def test_tensorflows_list_has_no_checkpoint_of_which_the_manifest_alone_is_left(tmp_path):
    saved(tmp_path, [1, 2])
    for path in [*tmp_path.glob("ckpt-1.index"), *tmp_path.glob("ckpt-1.data-*")]:
        path.unlink()
    saved(tmp_path, [3])
    listed = tf.train.get_checkpoint_state(tmp_path).all_model_checkpoint_paths
    assert [os.path.basename(path) for path in listed] == ["ckpt-2", "ckpt-3"]


def test_saving_the_same_step_again_writes_only_when_forced(tmp_path):
    state, checkpoints = saved(tmp_path, [5])
    before = data_file(tmp_path, 5).stat().st_ino
    checkpoints.save(5, {}, wait=True)
    assert data_file(tmp_path, 5).stat().st_ino == before
    again = make(tmp_path, state)
    again.restore()
    again.save(5, {}, wait=True)
    assert data_file(tmp_path, 5).stat().st_ino == before
    again.save(5, {"best": 0}, wait=True, force=True)
    assert data_file(tmp_path, 5).stat().st_ino != before
    assert checkpoints.latest().host_state == {"best": 0}


def test_a_run_taken_back_goes_on_from_where_it_was_taken_to(tmp_path):
    state, checkpoints = saved(tmp_path, [1, 2, 3])
    checkpoints.restore(checkpoints.all()[0])
    fill(state, 20)
    checkpoints.save(2, {"best": 20}, wait=True)
    manifest = make(tmp_path, state).restore()
    assert (manifest.step, manifest.host_state) == (2, {"best": 20})


def test_another_model_is_told_in_one_message_and_nothing_is_changed(tmp_path):
    saved(tmp_path, [1])
    state = make_state(units=5, slots=False)
    state.extra = [tf.Variable(float(i)) for i in range(11)]
    before = bits(state)
    with pytest.raises(CheckpointError) as caught:
        make(tmp_path, state).restore()
    assert bits(state) == before
    message = str(caught.value)
    assert "ckpt-1" in message
    assert "run_dir" in message
    assert "init_from" in message
    assert "\n" not in message
    assert ": missing in the checkpoint (11): extra[0] [] float32; " in message
    assert " and 3 more; only in the checkpoint (7): trainer.optimizer.iterations [] int64; " in message
    assert "[4, 5] float32 here, [4, 3] float32 in the checkpoint" in message
    assert ".ATTRIBUTES" not in message
    assert "save_counter" not in message
    assert bits(state) == before


def of(**variables):
    return tf.train.Checkpoint(**{name: tf.Variable(value) for name, value in variables.items()})


@pytest.fixture
def with_optimizer(tmp_path):
    """with_optimizer(**slots): restores a checkpoint of a weight and an optimizer into one with these slots.

    Returns what `objects.restore` does, the state, and which keys are new.
    """
    optimizer = tf.train.Checkpoint(count=tf.Variable(5), a=of(m=[1.0], v=[2.0]), b=of(m=[3.0], v=[4.0]), old=of(m=1.0))
    make(tmp_path, tf.train.Checkpoint(w=tf.Variable([9.0]), optimizer=optimizer)).save(1, {}, wait=True)

    def restore(w=(0.0,), count=0, allow_changed=True, may_differ=("optimizer/",), **slots):
        here = tf.train.Checkpoint(count=tf.Variable(count), **{name: of(**each) for name, each in slots.items()})
        state, keys = tf.train.Checkpoint(w=tf.Variable([*w]), optimizer=here), []
        matching = objects.Matching(
            may_differ=may_differ,
            together=("optimizer/a/", "optimizer/b/"),
            fixed_shape_keys=(objects.checkpoint_key(("optimizer", "count")),),
            initialize_new=lambda is_new: keys.extend(
                ".".join(path)
                for path, node in objects.walk(state)
                if objects.is_variable(node) and is_new(objects.checkpoint_key(path))
            ),
        )
        return objects.restore(str(tmp_path / "ckpt-1"), state, "WHY", (), matching, allow_changed), state, sorted(keys)

    return restore


def test_what_may_differ_is_read_where_all_that_belongs_together_is_there(with_optimizer):
    (read, differences), state, new = with_optimizer(
        a={"m": [0.0], "v": [0.0]}, b={"m": [0.0], "s": [0.5]}, c={"m": 0.5}
    )
    assert read == ["w", "optimizer.count", "optimizer.a.m", "optimizer.a.v"]
    assert [v.numpy().tolist() for v in (state.w, state.optimizer.count)] == [[9.0], 5]
    assert [v.numpy().tolist() for v in (state.optimizer.a.m, state.optimizer.a.v)] == [[1.0], [2.0]]
    assert [v.numpy().tolist() for v in (state.optimizer.b.m, state.optimizer.b.s)] == [[0.0], [0.5]]
    assert new == ["optimizer.b.m", "optimizer.b.s", "optimizer.c.m"]
    assert differences == (
        "missing in the checkpoint (2): optimizer.b.s [1] float32; optimizer.c.m [] float32; "
        "only in the checkpoint (2): optimizer.b.v [1] float32; optimizer.old.m [] float32"
    )


def test_what_differs_is_refused_unless_it_may_and_the_model_is_the_same(with_optimizer):
    same = {"a": {"m": [0.0], "v": [0.0]}, "b": {"m": [0.0], "v": [0.0]}, "old": {"m": 0.0}}
    (read, differences), _, new = with_optimizer(**same, allow_changed=False)
    assert (len(read), differences, new) == (7, "", [])
    refused = (
        r"ckpt-1 has the variables of this model, and other averages or another optimizer state \(only in the .*1\): "
    )
    with pytest.raises(CheckpointError, match=refused):
        with_optimizer(a=same["a"], b=same["b"], allow_changed=False)
    reshaped = {**same, "a": {"m": [0.0, 0.0], "v": [0.0]}}
    (read, differences), state, new = with_optimizer(**reshaped)
    assert state.optimizer.a.v.numpy().tolist() == [0.0]  # beside a slot that is not read
    assert new == ["optimizer.a.m", "optimizer.a.v"]
    for changed, line in (
        (
            {**reshaped, "may_differ": ()},
            "of another shape or type .1.: optimizer.a.m: .2. float32 here, .1. float32 in",
        ),
        ({**same, "count": [0, 0]}, r"of another shape or type .1.: optimizer.count: \[2\] int32 here, \[\] int32 in"),
        ({**same, "w": (0.0, 0.0)}, "of another shape or type .1.: w: "),
    ):
        with pytest.raises(CheckpointError, match=f"^WHY: {line}"):
            with_optimizer(**changed)
    with pytest.raises(CheckpointError, match=r"^WHY: "):  # counts alone may fit by chance
        with_optimizer(**same, may_differ=("optimizer/", "w/"))


def test_the_counter_that_tensorflows_own_save_adds_is_no_part_of_the_state(tmp_path):
    model = tf.Module()
    model.save_counter = tf.Variable(3.0)
    state = tf.train.Checkpoint(model=model)
    state.save(tmp_path / "theirs")
    make(tmp_path / "ours", state).save(1, {}, wait=True)
    state.model.save_counter.assign(0.0)
    manifest = make(tmp_path / "ours", state).restore()
    assert [*manifest.variables] == ["model/save_counter/.ATTRIBUTES/VARIABLE_VALUE"]
    assert state.model.save_counter.numpy() == 3.0
    assert state.save_counter.numpy() == 1


@pytest.mark.parametrize("saved", [False, True])
def test_a_run_may_get_keras_metrics(tmp_path, saved):
    def made(has_metric):
        model = tf.Module()
        model.weight = tf.Variable(0.0)
        if has_metric:
            model.metric = tf.keras.metrics.Mean()
            model.metric.update_state([2.0, 4.0])
        return tf.train.Checkpoint(model=model)

    state = made(saved)
    state.model.weight.assign(7.0)
    if saved:
        state.model.metric.update_state(9.0)
    make(tmp_path, state).save(1, {}, wait=True)
    state = made(True)
    make(tmp_path, state).restore()
    assert state.model.weight.numpy() == 7.0
    assert state.model.metric.result() == (5.0 if saved else 3.0)


def test_another_type_is_another_shape(tmp_path):
    make(tmp_path, tf.train.Checkpoint(v=tf.Variable([1.0]))).save(1, {}, wait=True)
    with pytest.raises(CheckpointError, match=r"v: \[1\] bfloat16 here, \[1\] float32 in the checkpoint"):
        make(tmp_path, tf.train.Checkpoint(v=tf.Variable(tf.ones([1], tf.bfloat16)))).restore()


def test_a_variable_of_any_length_gets_that_of_the_checkpoint(tmp_path):
    def made(values, *width):
        return tf.train.Checkpoint(v=tf.Variable(values, shape=tf.TensorShape([None, *width])))

    make(tmp_path, made([1.0, 2.0])).save(1, {}, wait=True)
    state = made([0.0, 0.0, 0.0])
    make(tmp_path, state).restore()
    assert state.v.numpy().tolist() == [1.0, 2.0]
    with pytest.raises(CheckpointError, match=r"v: \[None, 1\] float32 here, \[2\] float32 in the checkpoint"):
        make(tmp_path, made([[0.0]], 1)).restore()


def test_state_that_is_no_variable_is_refused_by_name(tmp_path):
    table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
    state = tf.train.Checkpoint(model=tf.train.Checkpoint(vocabulary=table))
    make(tmp_path, state).save(1, {}, wait=True)  # empty, as Keras's lookup layers leave theirs
    table.insert("word", 1)
    with pytest.raises(CheckpointError, match=r"model.vocabulary is a MutableHashTable, and only variables are saved"):
        make(tmp_path, state).save(2, {})


def test_weights_alone_come_from_a_run_a_directory_or_a_prefix(tmp_path):
    donor, checkpoints = saved(tmp_path / "checkpoints", [1, 2])
    wanted = [weight.numpy() for weight in donor.trainer.model.weights]
    for path in (tmp_path, tmp_path / "checkpoints", checkpoints.latest().prefix):
        state = make_state()
        slots_before = bits(tf.train.Checkpoint(slots=state.trainer.optimizer))
        loaded = load_weights(path, state.trainer.model, "trainer.model")
        assert sorted(loaded) == sorted(variable.path for variable in variables_of(state.trainer.model))
        assert_same(state.trainer.model.weights, wanted)
        assert bits(tf.train.Checkpoint(slots=state.trainer.optimizer)) == slots_before
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        load_weights(tmp_path / "elsewhere", state.trainer.model)


def test_weights_of_another_model_are_refused_before_any_is_changed(tmp_path):
    _, checkpoints = saved(tmp_path, [1])
    other = make_state(units=5)
    before = bits(other)
    with pytest.raises(CheckpointError, match=r"(?s)do not fit this model.*of another shape"):
        load_weights(tmp_path, other.trainer.model)
    with pytest.raises(
        CheckpointError, match=r"has no trainer\.critic; it has .*trainer\.model, .*\.load_weights\(path, "
    ):
        load_weights(tmp_path, other.trainer.model, "trainer.critic")
    of_another_program = tf.train.Checkpoint(net=make_state().trainer.model).write(tmp_path / "net")
    with pytest.raises(CheckpointError, match=r"has no trainer\.model; it has net, and crankshaft"):
        load_weights(of_another_program, other.trainer.model)
    assert bits(other) == before
    os.truncate(data_file(tmp_path, 1), 100)
    with pytest.raises(CheckpointError, match=r"expected .* bytes, found 100"):
        load_weights(checkpoints.directory + "/ckpt-1", other.trainer.model)


@pytest.mark.parametrize(
    ("host_state", "problem"),
    [
        ({"hook": object()}, "can't keep .*object is not JSON"),
        ({"hooks": {"log": [3, 5]}}, r"expected 'host_state.hooks.log' to be an object, found \[3, 5\]"),
        ({"hooks": "all"}, r"expected 'host_state.hooks' to be an object, found 'all'"),
        ({"hooks": {"log": functools.reduce(lambda inner, _: [inner], range(20_000), [])}}, "recursion"),
    ],
)
def test_what_no_manifest_can_be_read_with_is_an_error_at_the_call(tmp_path, host_state, problem):
    with pytest.raises(CheckpointError, match=problem):
        make(tmp_path, make_state()).save(1, host_state)
    assert not list(tmp_path.iterdir())


@pytest.mark.holds("A run removes old checkpoints", "Links there are refused")
def test_a_folder_that_becomes_a_link_leads_to_no_other_runs_checkpoints(tmp_path):
    """Whoever may write to a run's folder could have them removed."""
    saved(tmp_path / "own", [1, 2], keep=2)
    saved(tmp_path / "others", [1, 2], keep=None)
    state = make_state()
    checkpoints = make(tmp_path / "own", state, keep=2)
    before = sorted((tmp_path / "others").iterdir())
    os.rename(tmp_path / "own", tmp_path / "moved")
    (tmp_path / "own").symlink_to("others")
    with pytest.raises(SaveError, match="it is a link"):
        checkpoints.save(3, {}, wait=True)
    assert sorted((tmp_path / "others").iterdir()) == before
    with pytest.raises(OSError, match="it is a link"):
        manifests.remove(str(tmp_path / "own" / "ckpt-1.index"))


def test_a_save_moves_only_what_it_wrote(tmp_path, monkeypatch):
    """Whoever may write to a run's folder could have another's files moved to it."""
    (private := tmp_path / "private").mkdir()
    (private / "id_key").write_text("key")
    _, checkpoints = saved(tmp_path / "run", [1])
    make_folder, merge = store.files.make_folder, tf.raw_ops.MergeV2Checkpoints

    def planted(path):
        os.symlink(private, path)
        return make_folder(path)

    def swapped(destination_prefix, **given):
        with open(f"{os.path.dirname(destination_prefix)}/notes", "w"):
            merge(destination_prefix=destination_prefix, **given)
        (save,) = (tmp_path / "run").glob("ckpt-*_temp_*")
        (save / "whole").rename(save / "away")
        (save / "whole").symlink_to(private)

    with monkeypatch.context() as patched:
        patched.setattr(store.files, "make_folder", planted)
        with pytest.raises(SaveError, match="File exists"):
            checkpoints.save(2, {}, wait=True)
    monkeypatch.setattr(tf.raw_ops, "MergeV2Checkpoints", swapped)
    checkpoints.save(3, {}, wait=True)
    assert [manifest.step for manifest in checkpoints.all()] == [1, 3]
    assert os.listdir(private) == ["id_key"]
    assert not {"id_key", "notes"} & {*names(tmp_path / "run")}


@pytest.mark.parametrize("moment", ["after listing", "before hashing", "before the values"])
def test_a_reader_takes_the_newer_checkpoint_if_the_writer_removed_its_own(tmp_path, monkeypatch, moment):
    state, other = make_state(), make_state()
    writer = Checkpoints(tmp_path, state, keep=1, about={})
    reader = Checkpoints(tmp_path, other, keep=None, about={}, writes=False)
    fill(state, 1)
    writer.save(5, {}, wait=True)
    left, listdir = [9, 14], manifests.listdir  # the reader comes too late twice

    def write(at: str) -> None:
        if at == moment and left and (step := left.pop(0)):
            fill(state, step)
            with monkeypatch.context() as patch:
                patch.setattr(manifests, "listdir", listdir)
                writer.save(step, {}, wait=True)

    def listed(directory):
        names = listdir(directory)
        write("after listing")
        return names

    def use(manifest):
        write("before the values")
        objects.restore(manifest.prefix, other, "")
        return manifest.step

    with monkeypatch.context() as patch:
        patch.setattr(manifests, "listdir", listed)
        assert reader.read(use, lambda manifest: write("before hashing") is None) == 14
    assert [v.numpy().tobytes() for v in variables_of(other)] == [v.numpy().tobytes() for v in variables_of(state)]
    assert reader.read(use, lambda manifest: manifest.step == 5) is None  # removed, and nothing is written


def test_weights_of_a_run_that_goes_on_are_all_of_one_step(tmp_path):
    state, model = make_state(), make_state().trainer.model
    writer = Checkpoints(tmp_path, state, keep=1, about={})
    fill(state, 1)
    writer.save(1, {}, wait=True)

    def use(prefix: str) -> str:
        load_weights(prefix, model, "trainer.model")  # as the first of several parts
        if prefix.endswith("ckpt-1"):
            fill(state, 2)
            writer.save(2, {}, wait=True)
        load_weights(prefix, model, "trainer.model")
        return prefix

    assert read_newest(tmp_path, use).endswith("ckpt-2")
    assert_same(state.trainer.model.variables, model.variables)


@pytest.mark.fast
def test_the_best_is_written_beside_the_run_the_newest_alone_and_before_what_follows_it(tmp_path):
    state, steps, may_end = make_state(), [], threading.Event()
    best = Checkpoints(tmp_path / "best", state, keep=1, about={}, overtakes=True)
    others = Checkpoints(tmp_path / "others", state, keep=None, about={}, after=best)

    def written(manifest, seconds):
        steps.append(manifest.step)
        assert may_end.wait(60)  # a disk that is slow from here on

    best.written = written
    expected = {}
    for step in (1, 2, 3):  # none waits, though the first one is not done
        fill(state, step)
        expected[step] = bits(state)
        best.save(step, {})
    fill(state, 4)
    others.save(4, {})
    assert steps in ([], [1])
    assert not manifests.steps(tmp_path / "others")
    may_end.set()
    others.wait()
    assert steps == [1, 3]
    best.wait()
    best.restore()
    assert bits(state) == expected[3]
    assert manifests.steps(tmp_path / "others") == {4}


@pytest.mark.fast
def test_a_save_leaves_no_file_open(tmp_path):
    state = make_state()
    checkpoints = make(tmp_path, state, keep=2)
    counts = []
    for step in range(1, 5):
        checkpoints.save(step, {}, wait=True)
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[0] == counts[-1]
