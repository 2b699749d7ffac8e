"""A checkpoint that was cut, changed, tampered with or never finished is none; the one before it is restored."""

import json
import logging
import os
import re
import threading
from pathlib import Path

import pytest
import tensorflow as tf

from crankshaft.engine.checkpoints import Checkpoints, WritingProcess, load_weights, slices
from crankshaft.engine.checkpoints import manifest as manifests
from crankshaft.engine.errors import CheckpointError, SaveError
from tests.engine.checkpoints.checkpoint_cases import bits, data_file, fill, make, make_state, names, saved, warnings_of
from tests.limits import files_no_larger_than

pytestmark = pytest.mark.thorough


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
    (MANIFEST, lambda path: change(path, format=1), "expected format 2 or 3, found 1"),
    (
        MANIFEST,
        lambda path: change(path, format=4, versions={"crankshaft": "9.0.0"}),
        "expected format 2 or 3, found 4, by crankshaft '9.0.0'; install it",
    ),
]


@pytest.mark.holds("A manifest's SHA-256 sums")
@pytest.mark.parametrize(("file", "damage", "found"), DAMAGES)
def test_a_damaged_file_costs_its_checkpoint_alone_and_is_named_in_one_line(tmp_path, caplog, file, damage, found):
    directory = tmp_path / "checkpoints"
    state, checkpoints = saved(directory, [1, 2])
    manifest = checkpoints.latest()
    damage(directory / f"ckpt-2.{file}")
    before, pattern = names(directory), f"ckpt-2.{file}: {found}"
    if file != MANIFEST:  # asked for by name it is an error, and nothing is changed
        written = bits(state)
        with pytest.raises(CheckpointError, match=found):
            checkpoints.restore(manifest)
        assert bits(state) == written
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
    assert [manifest.step for manifest in make(directory, state).all()] == [1, 2]


def test_weights_are_taken_from_what_tensorflow_alone_wrote(tmp_path, caplog):
    state = make_state()
    fill(state, 1)
    wanted = bits(state.trainer.model)
    prefix = tf.train.CheckpointManager(state, str(tmp_path), max_to_keep=None).save()
    for path in (tmp_path, prefix):
        other = make_state()
        load_weights(path, other.trainer.model)
        assert bits(other.trainer.model) == wanted
    assert not caplog.records


def test_a_pipe_in_place_of_tensorflows_list_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        load_weights(tmp_path, make_state().trainer.model)


class Killed(BaseException):
    """In place of SIGKILL: nothing of the writer runs after it."""


def killed_while_publishing(monkeypatch, state, directory, step, moved):
    """Saves a step, and ends once `moved` files are in their place."""
    replace, count = os.replace, iter(range(moved))

    def until(source, target):
        is_moved = str(source).startswith("/proc/self/fd/") and "manifest" not in str(
            source
        )  # out of the save's folder
        if is_moved and next(count, None) is None:
            raise Killed
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(manifests.os, "replace", until)
        patch.setattr(threading.Thread, "start", threading.Thread.run)
        patch.setattr(os, "setpriority", lambda *_: None)  # it would be this thread's, for all tests to come
        with pytest.raises(Killed):
            make(directory, state).save(step, {})


@pytest.mark.parametrize("step", [pytest.param(2, marks=pytest.mark.thorough), 3])  # written again, and a new one
@pytest.mark.parametrize("moved", [0, 1])
def test_a_writer_killed_between_two_files_costs_that_checkpoint_at_most(tmp_path, monkeypatch, step, moved):
    state, _ = saved(tmp_path, [1, 2])
    fill(state, 3)
    killed_while_publishing(monkeypatch, state, tmp_path, step, moved)
    checkpoints = make(tmp_path, state)
    assert f"ckpt-{step}.manifest.json.writing" in checkpoints.clean()
    assert checkpoints.restore().step == (1 if (step, moved) == (2, 1) else 2)
    left = {"checkpoint", *(f"ckpt-{n}.{file}" for n in (1, 2) for file in (DATA, INDEX, MANIFEST))}
    assert {*names(tmp_path)} == left - ({f"ckpt-2.{DATA}"} if (step, moved) == (2, 1) else set())
    assert checkpoints.clean() == []  # nothing is there that it does not know


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
    path.write_text(json.dumps(manifests.with_digest(record)))
    checkpoints.save(1, {}, wait=True, force=True)
    assert more not in names(tmp_path)


@pytest.mark.holds("Other checkpoint files there")
@pytest.mark.parametrize("name", ["ckpt-0.index", "model-7.data-00000-of-00001", "checkpoint"])
def test_files_of_checkpoints_that_are_not_known_are_refused_by_name_and_stay(tmp_path, name):
    state = make_state()
    if name != "checkpoint":  # TensorFlow's, which a run writes itself
        saved(tmp_path, [1], keep=1)
    (tmp_path / name).write_bytes(b"dear")
    before = names(tmp_path)
    with pytest.raises(CheckpointError, match=rf"has checkpoint files that no manifest lists: {name}; restore"):
        make(tmp_path, state, keep=1).clean()
    assert names(tmp_path) == before


def test_files_of_a_copy_that_was_interrupted_are_set_aside_and_none_is_replaced(tmp_path, caplog):
    saved(tmp_path, [1])
    for content in (b"first", b"other"):
        (tmp_path / "ckpt-3.index").write_bytes(content)
        (tmp_path / "ckpt-0.index").write_bytes(b"")
        with pytest.raises(CheckpointError, match=r"ckpt-0.index, ckpt-3.index; restore"):
            make(tmp_path, make_state()).clean()
        assert (tmp_path / "ckpt-3.index").read_bytes() == content
        (tmp_path / "ckpt-0.index").unlink()
        checkpoints = make(tmp_path, make_state())
        checkpoints.clean()
        assert checkpoints.latest().step == 1
    aside = {path.name: path.read_bytes() for path in (tmp_path / "incomplete").iterdir()}
    assert aside == {"ckpt-3.index": b"first", "ckpt-3.index~": b"other"}
    assert f"lists ckpt-3.index, newer than ckpt-1, as if copied in part: moved to {tmp_path}/incomplete" in caplog.text


def test_files_beside_a_broken_checkpoint_alone_are_no_interrupted_copy(tmp_path):
    saved(tmp_path, [1])
    (tmp_path / "ckpt-1.index").write_bytes(b"")
    (tmp_path / "ckpt-3.index").write_bytes(b"dear")
    with pytest.raises(CheckpointError, match=r"ckpt-3.index; restore"):
        make(tmp_path, make_state()).clean()


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
    """A user's own files and folders, and a link with a leftover's name, and what it points to."""
    directory, victim = tmp_path / "run", tmp_path / "victim"
    saved(directory, [1, 2])
    (directory / "ckpt-3_temp_others").mkdir()  # TensorFlow's own
    (directory / "ckpt-3_temp_users_1").mkdir()
    (directory / "ckpt-3_temp_users_1" / "part").write_bytes(b"half")
    (directory / "notes.txt").write_text("the user's own")
    (directory / "notes.tmp").mkdir()
    (directory / "model.tmpl").write_text("dear")
    victim.mkdir()
    for name in ("file", ".crankshaft"):
        (victim / name).write_text("dear")
    (directory / "ckpt-2_temp_0a_1").symlink_to(victim)
    keep = names(directory)
    (directory / "ckpt-3_temp_0a_1" / "whole").mkdir(parents=True)
    for name in (".crankshaft", "whole/ckpt-3.index", "share-0.data-00000-of-00001"):
        (directory / "ckpt-3_temp_0a_1" / name).write_bytes(b"half")
    (directory / "ckpt-1.index").unlink()
    (directory / "ckpt-1.data-00000-of-00001").unlink()  # swept, but for its manifest
    assert sorted(make(directory, make_state()).clean()) == ["ckpt-1.manifest.json", "ckpt-3_temp_0a_1"]
    assert names(directory) == [name for name in keep if not name.startswith("ckpt-1.")]
    assert names(victim) == [".crankshaft", "file"]


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
    checkpoints.save(2, {}, wait=True)
    assert checkpoints.latest().step == 2


def test_a_full_disk_is_told_once_and_leaves_the_checkpoint_before(tmp_path, caplog):
    state, checkpoints = saved(tmp_path, [1])
    before = names(tmp_path)
    state.large = tf.Variable(tf.random.stateless_uniform([500_000], [1, 2]))
    with files_no_larger_than(1_000_000):
        for step in (2, 3):
            checkpoints.save(step, {})  # it waits for the one before, which may fail
        with pytest.raises(SaveError, match=r"ckpt-3 could not be written.*File too large") as caught:
            checkpoints.wait()
    assert len(str(caught.value).splitlines()) == 1
    assert names(tmp_path) == before
    assert checkpoints.latest().step == 1
    (line,) = (each.getMessage() for each in caplog.records)
    assert "ckpt-2 could not be written" in line
    # Another process found room for the mark of its share, after that.
    (late := tmp_path / f"ckpt-3_temp_{checkpoints.writer.attempt}_3").mkdir()
    (late / ".crankshaft").touch()
    checkpoints.save(4, {}, wait=True)
    assert checkpoints.latest().step == 4
    assert not late.exists()


def test_a_share_that_finds_no_room_leaves_the_reason_and_other_shares(tmp_path):
    checkpoints = Checkpoints(tmp_path, make_state(), keep=None, about={}, writer=WritingProcess(1, "attempt"))
    folder = tmp_path / "ckpt-1_temp_attempt_1"
    folder.mkdir()
    (folder / "share-10.index").write_bytes(b"another's")
    first, large = (slices.value_entry(tf.random.stateless_uniform([n], [1, 2]), str(n)) for n in (5, 500_000))
    with files_no_larger_than(1_000_000), pytest.raises(SaveError, match="File too large"):
        checkpoints.write(1, [first._replace(is_live=True), large], frozenset({1}), {})
    assert names(folder) == [".crankshaft", "share-1.json", "share-10.index"]
    assert json.loads((folder / "share-1.json").read_text())["why"].endswith("File too large")


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
    checkpoints.save(4, {}, wait=True, force=True)
    assert [manifest.step for manifest in checkpoints.all()] == [4]
    assert len(list(tmp_path.glob("*.manifest.json"))) == 3


# -- what a manifest says is checked before anything is done by it: read, restored, or removed

DEEP = "[" * 5000 + "]" * 5000
OTHERS = [None, [], -1, 10**300, "x", {"a": {"b": 1}}, 1.5, True]


def sealed(directory, step, **changes):
    """Rewrites a manifest with other values, as whoever may write to the folder can: its digest fits."""
    path = directory / f"ckpt-{step}.manifest.json"
    path.write_text(json.dumps(manifests.with_digest(json.loads(path.read_text()) | changes)))


def recorded(name):
    return {name: {"bytes": 3, "sha256": "0" * 64}}


OTHERS = ("../../victim/file", "{victim}", "ckpt-1.index", "notes", "..", "")
NAMES = ["../../victim", *(pytest.param(name, marks=pytest.mark.thorough) for name in OTHERS)]


@pytest.mark.holds("A run removes old checkpoints")
@pytest.mark.parametrize("name", NAMES)
def test_a_manifest_that_names_other_files_is_none_and_they_stay(tmp_path, caplog, name):
    """Swept or cleaned away, resumed or not: what it names is of nobody's concern here."""
    victim, run = tmp_path / "victim", tmp_path / "run" / "checkpoints"
    victim.mkdir()
    (victim / "file").write_text("dear")
    state, _ = saved(run, [1, 2], keep=2)
    (run / "notes").mkdir()
    (run / "notes" / "file").write_text("dear")
    sealed(run, 2, files=recorded(name.format(victim=victim)))
    checkpoints = make(run, state, keep=1)
    with caplog.at_level(logging.WARNING):
        checkpoints.clean()
        assert checkpoints.restore().step == 1
    (warning,) = warnings_of(caplog)
    assert "ckpt-2.manifest.json: expected files of ckpt-2, found " in warning
    for step in (3, 4, 5):
        fill(state, step)
        checkpoints.save(step, {}, wait=True)
    assert checkpoints.latest().step == 5
    for folder in (victim, run / "notes"):
        assert (folder / "file").read_text() == "dear"


def test_a_folder_in_a_files_place_is_left_alone_and_saves_go_on(tmp_path):
    state, checkpoints = saved(tmp_path, [1, 2], keep=1)
    name = "ckpt-2.data-00000-of-00001"
    os.remove(tmp_path / name)
    (tmp_path / name).mkdir()
    (tmp_path / name / "file").write_text("dear")
    checkpoints = make(tmp_path, state, keep=1)
    checkpoints.clean()
    for step in (3, 4):
        fill(state, step)
        checkpoints.save(step, {}, wait=True)
    assert (tmp_path / name / "file").read_text() == "dear"


def _places(value, path=()):
    """The path of every value in a nest, its own excepted."""
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield (*path, key)
            yield from _places(inner, (*path, key))


def _changed(record, path, *value):
    """A copy in which one value is another, or missing."""
    copy = json.loads(json.dumps(record))
    place = copy
    for key in path[:-1]:
        place = place[key]
    place.pop(path[-1])
    if value and isinstance(place, dict):
        place[path[-1]] = value[0]
    elif value:
        place.insert(path[-1], value[0])
    return copy


@pytest.fixture
def written(tmp_path):
    """(path, record) of a manifest."""
    saved(tmp_path, [2])
    path = tmp_path / "ckpt-2.manifest.json"
    return path, json.loads(path.read_text())


def test_no_changed_value_goes_unnoticed(written):
    path, record = written
    for place in _places(record):
        for value in [(), *((other,) for other in OTHERS)]:
            changed = _changed(record, place, *value)
            if changed == record:
                continue
            path.write_text(json.dumps(changed))
            with pytest.raises(CheckpointError, match=r"^ckpt-2.manifest.json: expected .* found ") as caught:
                manifests.read(str(path))
            assert len(str(caught.value).splitlines()) == 1
            assert len(str(caught.value)) < 200


def test_a_changed_value_whose_digest_fits_is_one_line_or_harmless(written):
    path, record = written
    checkpoints = make(path.parent, make_state())
    for place in _places(record):
        for value in [(), *((other,) for other in OTHERS)]:
            changed = _changed(record, place, *value)
            path.write_text(json.dumps(manifests.with_digest(changed)))
            problems = []
            try:
                manifest = manifests.read(str(path))
                assert manifest.other_data({"data": {"train": {}}}) <= {"train"}
                checkpoints.all()
                problems.append(checkpoints.problem())
            except CheckpointError as error:
                problems.append(str(error))
            for problem in filter(None, problems):
                assert len(problem.splitlines()) == 1
                assert len(problem) < 250


NO_MANIFESTS = ("[]", "3", "null", "", "\xff", '{"format": 2}', DEEP, f'{{"step": {DEEP}}}')
OF_ANOTHER_TYPE = [
    {"host_state": {"state": [1]}},
    {"host_state": {"hooks": "x"}},
    {"host_state": {"hooks": {"log": 3}}},
    {"about": {"deciding": 3}},
    {"variables": {"v": 3}},
    {"variables": {"v": ["float32", [3]]}},
]


@pytest.mark.parametrize("content", [*NO_MANIFESTS, *OF_ANOTHER_TYPE], ids=lambda content: str(content)[:40])
def test_what_is_no_manifest_or_has_parts_of_another_type_is_one_line(written, content):
    path, record = written
    is_text = isinstance(content, str)
    part = "" if is_text else next(iter(content))
    of_a_part = "shape and dtype of v" if part == "variables" else rf"'{part}\.[a-z_.]+' to be an object"
    found = "expected .* found " if is_text else f"expected {of_a_part}, found "
    path.write_bytes((content if is_text else json.dumps(manifests.with_digest(record | content))).encode("latin-1"))
    with pytest.raises(CheckpointError, match=rf"^ckpt-2.manifest.json: {found}") as caught:
        manifests.read(str(path))
    assert len(str(caught.value).splitlines()) == 1
