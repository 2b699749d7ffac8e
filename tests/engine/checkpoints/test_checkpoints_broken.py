"""A checkpoint that was cut, changed, or never finished is none; the one before it is restored."""

import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import tensorflow as tf

from crankshaft.engine.checkpoints import Checkpoints, load_weights
from crankshaft.engine.checkpoints import manifest as manifests
from crankshaft.engine.errors import CheckpointError, SaveError
from tests.engine.checkpoints.checkpoint_cases import (
    bits,
    data_file,
    fill,
    make,
    make_state,
    names,
    saved,
    warnings_of,
)
from tests.limits import files_no_larger_than
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def halve(path):
    os.truncate(path, path.stat().st_size // 2)


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


DATA, INDEX, MANIFEST = "data-00000-of-00001", "index", "manifest.json"
DAMAGES = [
    (DATA, lambda path: os.truncate(path, 100), r"expected \d+ bytes, found 100"),
    (DATA, flip_a_bit, r"expected sha256 \w{16}..., found \w{16}..."),
    (INDEX, Path.unlink, r"expected \d+ bytes, found no file"),
    (MANIFEST, halve, "expected a manifest, found JSONDecodeError: .*"),
    (MANIFEST, lambda path: change(path, format=1), "expected format 2, found 1"),
]


@pytest.mark.parametrize(("file", "damage", "found"), DAMAGES)
def test_a_damaged_file_costs_its_checkpoint_alone_and_is_named_in_one_line(tmp_path, caplog, file, damage, found):
    directory = tmp_path / "checkpoints"
    saved(directory, [1, 2])
    damage(directory / f"ckpt-2.{file}")
    before, pattern = names(directory), f"ckpt-2.{file}: {found}"
    state = make_state()
    checkpoints = make(directory, state)
    with caplog.at_level(logging.WARNING):
        assert checkpoints.restore().step == 1
        checkpoints.latest()
    expected = make_state()
    fill(expected, 1)
    assert bits(state) == bits(expected)
    (warning,) = warnings_of(caplog)
    assert re.search(pattern, warning)
    assert str(directory) in warning
    assert checkpoints.problem() is None
    assert names(directory) == before  # who reads changes nothing
    # Without the one before, there is a problem, and there are no weights.
    aside = tmp_path / "aside"
    aside.mkdir()
    for path in directory.glob("ckpt-1.*"):
        path.rename(aside / path.name)
    assert re.search(pattern, make(directory, make_state()).problem())
    for path in (tmp_path, directory, directory / "ckpt-2"):
        with pytest.raises(CheckpointError, match=pattern) as caught:
            load_weights(path, state.trainer.model)
        assert str(directory) in str(caught.value)
        assert str(caught.value).endswith("use another checkpoint")
        assert len(str(caught.value).splitlines()) == 1
    assert bits(state) == bits(expected)
    # With it the step is written again.
    for path in aside.iterdir():
        path.rename(directory / path.name)
    fill(state, 3)
    checkpoints.clean()
    checkpoints.save(2, {}, wait=True)
    assert make(directory, state).latest().step == 2


def test_a_broken_checkpoint_asked_for_by_name_is_an_error(tmp_path):
    state, checkpoints = saved(tmp_path, [1, 2])
    manifest = checkpoints.latest()
    flip_a_bit(data_file(tmp_path, 2))
    before = bits(state)
    with pytest.raises(CheckpointError, match="expected sha256"):
        checkpoints.restore(manifest)
    assert bits(state) == before


def test_weights_are_taken_from_what_tensorflow_alone_wrote(tmp_path):
    state = make_state()
    fill(state, 1)
    wanted = bits(state.trainer.model)
    prefix = tf.train.CheckpointManager(state, str(tmp_path), max_to_keep=None).save()
    for path in (tmp_path, prefix):
        other = make_state()
        load_weights(path, other.trainer.model)
        assert bits(other.trainer.model) == wanted


class Killed(BaseException):
    """In place of SIGKILL: nothing of the writer runs after it."""


def killed_while_publishing(monkeypatch, state, directory, step, moved):
    """Saves a step, and ends once `moved` files are in their place."""
    replace, count = os.replace, iter(range(moved))

    def until(source, target):
        if "_temp_" in str(source) and "manifest" not in str(source) and next(count, None) is None:
            raise Killed
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(manifests.os, "replace", until)
        patch.setattr(threading.Thread, "start", threading.Thread.run)
        with pytest.raises(Killed):
            make(directory, state).save(step, {})


@pytest.mark.parametrize("step", [2, 3])  # written again, and a new one
@pytest.mark.parametrize("moved", [0, 1])
def test_a_writer_killed_between_two_files_costs_that_checkpoint_at_most(tmp_path, monkeypatch, step, moved):
    state, _ = saved(tmp_path, [1, 2])
    fill(state, 3)
    killed_while_publishing(monkeypatch, state, tmp_path, step, moved)
    checkpoints = make(tmp_path, state)
    checkpoints.clean()
    assert checkpoints.restore().step == (1 if (step, moved) == (2, 1) else 2)
    assert not [name for name in names(tmp_path) if "temp" in name or "writing" in name or name.startswith("ckpt-3")]
    checkpoints.clean()  # nothing is there that it does not know


def test_a_writer_killed_before_the_manifest_has_its_name_costs_nothing(tmp_path):
    saved(tmp_path, [1, 2])
    os.rename(tmp_path / "ckpt-2.manifest.json", tmp_path / "ckpt-2.manifest.json.writing")
    checkpoints = make(tmp_path, make_state())
    assert checkpoints.latest().step == 1
    checkpoints.clean()
    assert checkpoints.latest().step == 2


def test_a_step_that_is_written_again_in_fewer_files_leaves_none_of_the_others(tmp_path):
    checkpoints = saved(tmp_path, [1])[1]
    more = "ckpt-1.data-00001-of-00002"
    (tmp_path / more).write_bytes(b"x")
    path = tmp_path / "ckpt-1.manifest.json"
    record = json.loads(path.read_text())
    record["files"][more] = {"bytes": 1, "sha256": manifests.sha256(tmp_path / more)}
    path.write_text(json.dumps(manifests.sealed(record)))
    checkpoints.save(1, {}, wait=True, force=True)
    assert more not in names(tmp_path)


@pytest.mark.parametrize("name", ["ckpt-3.index", "model-7.data-00000-of-00001", "checkpoint"])
def test_files_of_checkpoints_that_are_not_known_are_refused_by_name_and_stay(tmp_path, name):
    state = make_state()
    if name != "checkpoint":  # TensorFlow's, which a run writes itself
        saved(tmp_path, [1], keep=1)
    (tmp_path / name).write_bytes(b"dear")
    before = names(tmp_path)
    with pytest.raises(CheckpointError, match=rf"has checkpoint files that no manifest .*: {name}; restore"):
        make(tmp_path, state, keep=1).clean()
    assert names(tmp_path) == before


def test_a_file_that_has_come_into_a_checkpoints_place_is_not_replaced(tmp_path):
    checkpoints = saved(tmp_path, [1])[1]
    (tmp_path / "ckpt-2.index").write_bytes(b"dear")
    before = names(tmp_path)
    checkpoints.save(2, {})
    with pytest.raises(SaveError, match=r"ckpt-2.index exists, and no manifest lists it"):
        checkpoints.wait()
    assert names(tmp_path) == before
    assert (tmp_path / "ckpt-2.index").read_bytes() == b"dear"


def test_manifests_alone_are_a_run_that_lost_its_checkpoints(tmp_path):
    saved(tmp_path, [1, 2])
    for path in [*tmp_path.glob("ckpt-*.index"), *tmp_path.glob("ckpt-*.data-*")]:
        path.unlink()
    checkpoints = make(tmp_path, make_state())
    checkpoints.clean()
    assert checkpoints.problem() == "ckpt-2 was removed"


def test_what_a_killed_writer_leaves_is_cleaned_and_the_rest_stays(tmp_path):
    saved(tmp_path, [1, 2])
    (tmp_path / "ckpt-3_temp_others").mkdir()  # TensorFlow's own
    (tmp_path / "ckpt-3_temp_users_1").mkdir()
    (tmp_path / "ckpt-3_temp_users_1" / "part").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("the user's own")
    keep = names(tmp_path)
    (tmp_path / "ckpt-3_temp_0a_1" / "whole").mkdir(parents=True)
    for name in (".crankshaft", "whole/ckpt-3.index", "part-0.data-00000-of-00001"):
        (tmp_path / "ckpt-3_temp_0a_1" / name).write_bytes(b"half")
    (tmp_path / "ckpt-1.index").unlink()
    (tmp_path / "ckpt-1.data-00000-of-00001").unlink()  # swept, but for its manifest
    checkpoints = make(tmp_path, make_state())
    assert sorted(checkpoints.clean()) == ["ckpt-1.manifest.json", "ckpt-3_temp_0a_1"]
    assert names(tmp_path) == [name for name in keep if not name.startswith("ckpt-1.")]


def test_an_empty_or_absent_directory_restores_nothing(tmp_path):
    checkpoints = make(tmp_path / "none", make_state())
    assert checkpoints.restore() is None
    assert checkpoints.all() == []
    assert checkpoints.clean() == []
    assert not (tmp_path / "none").exists()


def test_a_directory_that_can_not_be_made_is_told_at_wait(tmp_path):
    (tmp_path / "file").write_text("in the way")
    checkpoints = make(tmp_path / "file" / "checkpoints", make_state())
    checkpoints.save(1, {})
    with pytest.raises(SaveError, match=r"ckpt-1 could not be written to .*Not a directory.*run_dir"):
        checkpoints.wait()
    checkpoints.wait()  # told once
    (tmp_path / "file").unlink()
    checkpoints.save(1, {}, wait=True)
    assert checkpoints.latest().step == 1


def test_a_full_disk_is_told_and_leaves_the_checkpoint_before(tmp_path):
    state, checkpoints = saved(tmp_path, [1])
    before = names(tmp_path)
    state.large = tf.Variable(tf.random.stateless_uniform([500_000], [1, 2]))
    with files_no_larger_than(1_000_000):
        checkpoints.save(2, {})
        with pytest.raises(SaveError, match=r"ckpt-2 could not be written.*File too large") as caught:
            checkpoints.save(3, {})  # a save waits for the one before it, and tells of it
    assert len(str(caught.value).splitlines()) == 1
    assert names(tmp_path) == before
    assert checkpoints.latest().step == 1


def test_a_step_written_again_costs_no_other(tmp_path):
    state, _ = saved(tmp_path, [1, 2, 3], keep=3)
    flip_a_bit(data_file(tmp_path, 3))
    checkpoints = make(tmp_path, state, keep=3)
    assert checkpoints.restore().step == 2
    checkpoints.save(3, {}, wait=True)
    assert [manifest.step for manifest in checkpoints.all()] == [1, 2, 3]


def test_what_was_restored_stays_until_the_next_is_whole(tmp_path):
    """With the right sizes, what is broken is found by its hash alone, which a save does not compute."""
    state, _ = saved(tmp_path, [1, 2, 3], keep=3)
    for step in (2, 3):
        flip_a_bit(data_file(tmp_path, step))
    checkpoints = make(tmp_path, state, keep=3)
    assert checkpoints.restore().step == 1
    with files_no_larger_than(10), pytest.raises(SaveError, match="ckpt-4 could not be written"):
        checkpoints.save(4, {}, wait=True)
    assert make(tmp_path, state).restore().step == 1
    checkpoints.save(4, {}, wait=True)
    assert [manifest.step for manifest in checkpoints.all()] == [4]
    assert len(list(tmp_path.glob("*.manifest.json"))) == 3


@pytest.mark.slow
@pytest.mark.parametrize("keep", [1, 3])  # swept after the write, and before it
def test_a_process_killed_while_it_writes_loses_no_finished_checkpoint(tmp_path, keep):
    """Four kills at random moments of a process that does nothing but save; the next one restores and goes on."""
    seed = random.randrange(1 << 30)
    moments = random.Random(seed)
    writer = subprocess.Popen(
        [sys.executable, ROOT / "tests/engine/checkpoints/checkpoint_writer.py", tmp_path, str(keep)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    newest, steps, unfinished, child = 0, [], 0, None
    try:
        for _ in range(4):
            writer.stdin.write("go\n")
            writer.stdin.flush()
            word, child, step, whole = writer.stdout.readline().split()
            child = int(child)
            assert (word, whole) == ("restored", "True"), f"seed {seed}"
            assert int(step) >= newest, f"seed {seed}: went back from {newest} to {step}"
            if not newest:  # on a busy machine a first write can take long, and without one nothing is tested
                wait_until(lambda: list(tmp_path.glob("*.manifest.json")), writer)
            time.sleep(moments.uniform(0.05, 0.4))
            os.kill(child, signal.SIGKILL)
            assert writer.stdout.readline() == "ended\n"
            child = None
            latest = Checkpoints(tmp_path, tf.train.Checkpoint(), keep=None, about={}).latest()
            newest = latest.step if latest else 0
            steps.append(newest)
            unfinished += any("_temp_" in name or "writing" in name for name in names(tmp_path))
    finally:
        if child is not None:
            os.kill(child, signal.SIGKILL)
        writer.stdin.close()
        writer.wait()
    print(f"newest after each kill: {steps}; {unfinished} of 4 kills left something unfinished")
    assert steps[-1] > 0
    assert len(names(tmp_path)) < 20  # each start cleaned up after the one before
