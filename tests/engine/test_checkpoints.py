"""What is restored is what was there at the call of save, to the bit, whatever happened to the files or the process."""

import json
import logging
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from engine import manifest as manifests
from engine import snapshot
from engine.checkpoints import CheckpointError, Checkpoints, load_weights

ROOT = Path(__file__).resolve().parents[2]


class Slots(tf.Module):
    """As an optimizer's: a variable beside each of the model's, and a count."""

    def __init__(self, variables):
        super().__init__()
        self.moments = [tf.Variable(tf.zeros(variable.shape), name="moment") for variable in variables]
        self.iterations = tf.Variable(0, dtype=tf.int64)


class Training(tf.Module):
    def __init__(self, units=3, slots=True):
        super().__init__()
        self.model = tf.keras.Sequential(
            [
                tf.keras.Input((4,)),
                tf.keras.layers.Dense(units, activation="relu"),
                tf.keras.layers.BatchNormalization(),
                tf.keras.layers.Dropout(0.5, seed=1),
                tf.keras.layers.Dense(2),
            ]
        )
        if slots:
            self.optimizer = Slots(self.model.trainable_variables)


def make_state(units=3, slots=True):
    return tf.train.Checkpoint(
        trainer=Training(units, slots),
        step=tf.Variable(0, dtype=tf.int64),
        half=tf.Variable(tf.zeros([5], tf.bfloat16)),
    )


def variables_of(state):
    return [node for _, node in snapshot.walk(state) if snapshot.is_variable(node)]


def fill(state, seed):
    """Other values in every variable, from the whole range of the type's bits."""
    rng = np.random.default_rng(seed)
    for variable in variables_of(state):
        dtype = tf.as_dtype(variable.dtype)
        if dtype.is_integer:
            values = rng.integers(0, dtype.max, variable.shape, dtype=dtype.as_numpy_dtype)
        else:
            values = rng.normal(size=variable.shape) * 10.0 ** rng.integers(-30, 30, variable.shape)
        variable.assign(tf.cast(tf.constant(values), dtype))


def bits(state):
    """Each variable's bytes, of every replica."""
    found = []
    for variable in variables_of(state):
        variable = variable.value if isinstance(variable, tf.keras.Variable) else variable
        found += [copy.numpy().tobytes() for copy in getattr(variable, "values", [variable])]
    return found


def make(directory, state, keep=None):
    return Checkpoints(directory, state, keep=keep, about={"model": "mlp", "units": np.int64(3)})


def saved(directory, steps, keep=None):
    """(state, checkpoints) with each of `steps` saved, filled with its own number as the seed."""
    state = make_state()
    checkpoints = make(directory, state, keep)
    for step in steps:
        fill(state, step)
        checkpoints.save(step, {"best": step})
    checkpoints.wait()
    return state, checkpoints


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def names(directory):
    return sorted(os.listdir(directory))


def data_file(directory, step):
    return Path(directory) / f"ckpt-{step}.data-00000-of-00001"


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


def test_mirrored_and_single_states_read_each_other(tmp_path):
    state, _ = saved(tmp_path, [3])
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        mirrored = make_state()
        make(tmp_path, mirrored).restore()
    assert bits(mirrored)[::2] == bits(mirrored)[1::2] == bits(state)


def test_what_is_summed_on_read_is_saved_as_its_sum(tmp_path):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        total = tf.Variable(
            0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM
        )
    state = tf.train.Checkpoint(total=total)
    strategy.run(lambda: total.assign_add(1.5))
    make(tmp_path, state).save(1, {}, wait=True)
    strategy.run(lambda: total.assign_add(1.0))
    make(tmp_path, state).restore()
    assert float(total.read_value()) == 3.0


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
        checkpoints.save(number, {})
        for _ in range(5):
            change()
            step.assign_add(100)
        assert (table.numpy() != expected[0]).all()
        checkpoints.wait()
        reader = tf.train.load_checkpoint(checkpoints.latest().prefix)
        for key, value in zip(("table", "moments/0", "moments/1"), expected, strict=True):
            np.testing.assert_array_equal(reader.get_tensor(key + "/.ATTRIBUTES/VARIABLE_VALUE"), value)
        assert reader.get_tensor("step/.ATTRIBUTES/VARIABLE_VALUE") == number


def test_the_host_state_is_that_of_the_call_too(tmp_path):
    host_state = {"best": 1.0}
    checkpoints = make(tmp_path, make_state())
    checkpoints.save(1, host_state)
    host_state["best"] = 2.0
    checkpoints.wait()
    assert checkpoints.latest().host_state == {"best": 1.0}


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


def test_the_newest_are_kept_and_nothing_of_the_others(tmp_path):
    _, checkpoints = saved(tmp_path, [1, 2, 10, 30], keep=2)
    assert [manifest.step for manifest in checkpoints.all()] == [10, 30]
    assert {manifests.step_of(name) for name in names(tmp_path) if name != "checkpoint"} == {10, 30}
    assert checkpoints.clean() == []


@pytest.mark.parametrize("keep", [None, 0])
def test_without_keep_all_stay(tmp_path, keep):
    _, checkpoints = saved(tmp_path, [1, 2, 3, 4], keep=keep)
    assert [manifest.step for manifest in checkpoints.all()] == [1, 2, 3, 4]


def test_a_stale_state_file_misleads_neither_restore_nor_sweep(tmp_path):
    _, checkpoints = saved(tmp_path, [1, 2], keep=2)
    stale = (tmp_path / "checkpoint").read_bytes()
    saved(tmp_path, [3], keep=2)
    (tmp_path / "checkpoint").write_bytes(stale)
    assert checkpoints.latest().step == 3
    _, checkpoints = saved(tmp_path, [4], keep=2)
    assert [manifest.step for manifest in checkpoints.all()] == [3, 4]
    assert tf.train.latest_checkpoint(tmp_path).endswith("ckpt-4")


def test_saving_the_same_step_again_writes_only_when_forced(tmp_path):
    state, checkpoints = saved(tmp_path, [5])
    before = data_file(tmp_path, 5).stat().st_mtime_ns
    checkpoints.save(5, {}, wait=True)
    assert data_file(tmp_path, 5).stat().st_mtime_ns == before
    again = make(tmp_path, state)
    again.restore()
    again.save(5, {}, wait=True)
    assert data_file(tmp_path, 5).stat().st_mtime_ns == before
    again.save(5, {"best": 0}, wait=True, force=True)
    assert data_file(tmp_path, 5).stat().st_mtime_ns != before
    assert checkpoints.latest().host_state == {"best": 0}


def test_a_run_taken_back_goes_on_from_where_it_was_taken_to(tmp_path):
    state, checkpoints = saved(tmp_path, [1, 2, 3])
    checkpoints.restore(checkpoints.all()[0])
    fill(state, 20)
    checkpoints.save(2, {"best": 20}, wait=True)
    manifest = make(tmp_path, state).restore()
    assert (manifest.step, manifest.host_state) == (2, {"best": 20})


def truncate(directory):
    os.truncate(data_file(directory, 2), 100)
    return r"ckpt-2.data-00000-of-00001: expected \d+ bytes, found 100"


def flip_a_bit(directory):
    path = data_file(directory, 2)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return r"ckpt-2.data-00000-of-00001: expected sha256 \w{16}..., found \w{16}..."


def remove_the_index(directory):
    (directory / "ckpt-2.index").unlink()
    return r"ckpt-2.index: expected \d+ bytes, found no file"


def remove_the_manifest(directory):
    (directory / "ckpt-2.manifest.json").unlink()
    return r"ckpt-2: expected ckpt-2.manifest.json, found none: unfinished"


def halve_the_manifest(directory):
    path = directory / "ckpt-2.manifest.json"
    os.truncate(path, path.stat().st_size // 2)
    return r"ckpt-2.manifest.json: expected a manifest, found JSONDecodeError"


def another_format(directory):
    path = directory / "ckpt-2.manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    return r"ckpt-2.manifest.json: expected format 1, found 99"


@pytest.mark.parametrize(
    "break_it", [truncate, flip_a_bit, remove_the_index, remove_the_manifest, halve_the_manifest, another_format]
)
def test_a_broken_checkpoint_is_skipped_with_one_warning_and_the_one_before_restored(tmp_path, caplog, break_it):
    saved(tmp_path, [1, 2])
    pattern = break_it(tmp_path)
    before = names(tmp_path)
    state = make_state()
    checkpoints = make(tmp_path, state)
    with caplog.at_level(logging.WARNING):
        assert checkpoints.restore().step == 1
        checkpoints.latest()
    expected = make_state()
    fill(expected, 1)
    assert bits(state) == bits(expected)
    (warning,) = warnings_of(caplog)
    assert re.search(pattern, warning)
    assert str(tmp_path) in warning
    assert names(tmp_path) == before  # who reads changes nothing
    fill(state, 3)
    checkpoints.clean()
    checkpoints.save(2, {}, wait=True)
    assert make(tmp_path, state).latest().step == 2


def test_a_broken_checkpoint_asked_for_by_name_is_an_error(tmp_path):
    state, checkpoints = saved(tmp_path, [1, 2])
    manifest = checkpoints.latest()
    flip_a_bit(tmp_path)
    before = bits(state)
    with pytest.raises(CheckpointError, match="expected sha256"):
        checkpoints.restore(manifest)
    assert bits(state) == before


def test_what_a_killed_writer_leaves_is_cleaned_and_the_rest_stays(tmp_path):
    _, checkpoints = saved(tmp_path, [1, 2])
    keep = names(tmp_path)
    (tmp_path / "ckpt-3_temp").mkdir()
    (tmp_path / "ckpt-3_temp" / "part-00000-of-00001.data-00000-of-00001").write_bytes(b"half")
    for name in ("ckpt-3.manifest.json.tmp", "checkpoint.tmp1234", "ckpt-4.index", "ckpt-4.data-00000-of-00001"):
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("the user's own")
    assert checkpoints.latest().step == 2
    assert len(checkpoints.clean()) == 5
    assert names(tmp_path) == sorted([*keep, "notes.txt"])


def test_an_empty_or_absent_directory_restores_nothing(tmp_path):
    checkpoints = make(tmp_path / "none", make_state())
    assert checkpoints.restore() is None
    assert checkpoints.all() == []
    assert checkpoints.clean() == []
    assert not (tmp_path / "none").exists()


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
    assert "--run_dir" in message
    assert "--init_from" in message
    missing, extra, reshaped = message.splitlines()[1:]
    assert "missing in the checkpoint (11): extra[0] [] float32; " in missing
    assert missing.endswith("; and 3 more")
    assert "only in the checkpoint (7): trainer.optimizer.iterations [] int64; " in extra
    assert "[4, 5] float32 here, [4, 3] float32 in the checkpoint" in reshaped
    assert ".ATTRIBUTES" not in message
    assert "save_counter" not in message
    # What differs in shape can't be restored in part either.
    with pytest.raises(CheckpointError, match="of another shape"):
        make(tmp_path, state).restore(strict=False)
    assert bits(state) == before


def test_without_strict_what_both_have_is_restored(tmp_path):
    full, _ = saved(tmp_path, [1])
    state = make_state(slots=False)
    with pytest.raises(CheckpointError, match="only in the checkpoint"):
        make(tmp_path, state).restore()
    assert make(tmp_path, state).restore(strict=False).step == 1
    del full.trainer.optimizer
    assert bits(state) == bits(full)


def test_another_type_is_another_shape(tmp_path):
    make(tmp_path, tf.train.Checkpoint(v=tf.Variable([1.0]))).save(1, {}, wait=True)
    with pytest.raises(CheckpointError, match=r"v: \[1\] bfloat16 here, \[1\] float32 in the checkpoint"):
        make(tmp_path, tf.train.Checkpoint(v=tf.Variable(tf.ones([1], tf.bfloat16)))).restore()


def test_state_that_is_no_variable_is_refused_by_name(tmp_path):
    table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
    state = tf.train.Checkpoint(model=tf.train.Checkpoint(vocabulary=table))
    with pytest.raises(CheckpointError, match=r"model.vocabulary is a MutableHashTable, and only variables are saved"):
        make(tmp_path, state).save(1, {})


def test_weights_alone_come_from_a_run_a_directory_or_a_prefix(tmp_path):
    donor, checkpoints = saved(tmp_path / "checkpoints", [1, 2])
    wanted = [weight.numpy() for weight in donor.trainer.model.weights]
    for path in (tmp_path, tmp_path / "checkpoints", checkpoints.latest().prefix):
        state = make_state()
        slots_before = bits(tf.train.Checkpoint(slots=state.trainer.optimizer))
        loaded = load_weights(path, state.trainer.model, "trainer.model")
        assert len(loaded) == len(variables_of(state.trainer.model))
        for weight, value in zip(state.trainer.model.weights, wanted, strict=True):
            np.testing.assert_array_equal(weight.numpy(), value)
        assert bits(tf.train.Checkpoint(slots=state.trainer.optimizer)) == slots_before
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        load_weights(tmp_path / "elsewhere", state.trainer.model)


def test_weights_of_another_model_are_refused_before_any_is_changed(tmp_path):
    _, checkpoints = saved(tmp_path, [1])
    other = make_state(units=5)
    before = bits(other)
    with pytest.raises(CheckpointError, match=r"(?s)do not fit this model.*of another shape"):
        load_weights(tmp_path, other.trainer.model)
    with pytest.raises(CheckpointError, match="missing in the checkpoint"):
        load_weights(tmp_path, other.trainer.model, "trainer.no_such_name")
    assert bits(other) == before
    os.truncate(data_file(tmp_path, 1), 100)
    with pytest.raises(CheckpointError, match=r"expected .* bytes, found 100"):
        load_weights(checkpoints.directory + "/ckpt-1", other.trainer.model)


def test_a_directory_that_can_not_be_made_is_told_at_wait(tmp_path):
    (tmp_path / "file").write_text("in the way")
    checkpoints = make(tmp_path / "file" / "checkpoints", make_state())
    checkpoints.save(1, {})
    with pytest.raises(CheckpointError, match=r"ckpt-1 could not be written to .*Not a directory.*--run_dir"):
        checkpoints.wait()
    checkpoints.wait()  # told once
    (tmp_path / "file").unlink()
    checkpoints.save(1, {}, wait=True)
    assert checkpoints.latest().step == 1


def test_a_full_disk_is_told_and_leaves_the_checkpoint_before(tmp_path):
    state, checkpoints = saved(tmp_path, [1])
    before = names(tmp_path)
    state.large = tf.Variable(tf.random.stateless_uniform([500_000], [1, 2]))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        checkpoints.save(2, {})
        with pytest.raises(CheckpointError, match=r"ckpt-2 could not be written.*File too large") as caught:
            checkpoints.save(3, {})  # a save waits for the one before it, and tells of it
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(str(caught.value).splitlines()) == 1
    assert names(tmp_path) == before
    assert checkpoints.latest().step == 1


def test_what_json_can_not_hold_is_told_at_the_call(tmp_path):
    with pytest.raises(CheckpointError, match=r"host_state=.*can't be kept"):
        make(tmp_path, make_state()).save(1, {"hook": object()})


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.01)


def test_a_process_killed_while_it_writes_loses_no_finished_checkpoint(tmp_path):
    """Ten kills at random moments of a process that does nothing but save; the next one restores and goes on."""
    seed = random.randrange(1 << 30)
    moments = random.Random(seed)
    writer = subprocess.Popen(
        [sys.executable, ROOT / "tests/engine/checkpoint_writer.py", tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    newest, steps, unfinished, child = 0, [], 0, None
    try:
        for _ in range(10):
            writer.stdin.write("go\n")
            writer.stdin.flush()
            word, child, step, whole = writer.stdout.readline().split()
            child = int(child)
            assert (word, whole) == ("restored", "True"), f"seed {seed}"
            assert int(step) >= newest, f"seed {seed}: went back from {newest} to {step}"
            if not newest:  # on a busy machine a first write can take long, and without one nothing is tested
                wait_until(lambda: list(tmp_path.glob("*.manifest.json")))
            time.sleep(moments.uniform(0.05, 0.6))
            os.kill(child, signal.SIGKILL)
            assert writer.stdout.readline() == "ended\n"
            child = None
            latest = Checkpoints(tmp_path, tf.train.Checkpoint(), keep=None, about={}).latest()
            newest = latest.step if latest else 0
            steps.append(newest)
            unfinished += bool(manifests.leftovers(str(tmp_path)))
    finally:
        if child is not None:
            os.kill(child, signal.SIGKILL)
        writer.stdin.close()
        writer.wait()
    print(f"newest after each kill: {steps}; {unfinished} of 10 kills left something unfinished")
    assert steps[-1] > 0
    assert len(names(tmp_path)) < 20  # each start cleaned up after the one before
