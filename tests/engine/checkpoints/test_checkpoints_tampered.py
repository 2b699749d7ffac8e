"""What a manifest says is checked before anything is done by it: read, restored, or removed."""

import json
import logging
import os

import pytest

from crankshaft.engine.checkpoints import manifest as manifests
from crankshaft.engine.errors import CheckpointError
from tests.engine.checkpoints.checkpoint_cases import fill, make, make_state, saved, warnings_of

DEEP = "[" * 5000 + "]" * 5000
OTHERS = [None, [], -1, 10**300, "x", {"a": {"b": 1}}, 1.5, True]


def sealed(directory, step, **changes):
    """Rewrites a manifest with other values, as whoever may write to the folder can: its digest fits."""
    path = directory / f"ckpt-{step}.manifest.json"
    path.write_text(json.dumps(manifests.sealed(json.loads(path.read_text()) | changes)))


def recorded(name):
    return {name: {"bytes": 3, "sha256": "0" * 64}}


@pytest.mark.parametrize("name", ["../../victim", "../../victim/file", "{victim}", "ckpt-1.index", "notes", "..", ""])
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


def test_a_users_folder_with_a_temporary_name_is_no_leftover(tmp_path):
    _, checkpoints = saved(tmp_path, [1])
    (tmp_path / "notes.tmp").mkdir()
    (tmp_path / "model.tmpl").write_text("dear")
    assert checkpoints.clean() == []
    assert {"notes.tmp", "model.tmpl"} <= set(os.listdir(tmp_path))


def test_a_link_with_a_leftovers_name_stays_and_so_does_what_it_points_to(tmp_path):
    (tmp_path / "victim").mkdir()
    for name in ("file", ".crankshaft"):
        (tmp_path / "victim" / name).write_text("dear")
    _, checkpoints = saved(tmp_path / "run", [1])
    (tmp_path / "run" / "ckpt-2_temp_0a_1").symlink_to(tmp_path / "victim")
    assert checkpoints.clean() == []
    assert (tmp_path / "victim" / "file").read_text() == "dear"


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
            path.write_text(json.dumps(manifests.sealed(changed)))
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


@pytest.mark.parametrize("text", ["[]", "3", "null", "", "\xff", '{"format": 2}', DEEP, f'{{"step": {DEEP}}}'])
def test_what_is_no_manifest_at_all_is_one_line(written, text):
    path, _ = written
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"^ckpt-2.manifest.json: expected .* found ") as caught:
        manifests.read(str(path))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("host_state", {"state": [1]}),
        ("host_state", {"hooks": "x"}),
        ("host_state", {"hooks": {"log": 3}}),
        ("about", {"deciding": 3}),
    ],
)
def test_parts_of_another_type_are_told_in_one_line(written, field, value):
    path, record = written
    path.write_text(json.dumps(manifests.sealed(record | {field: value})))
    with pytest.raises(CheckpointError, match=rf"expected '{field}\.[a-z_.]+' to be an object, found "):
        manifests.read(str(path))
