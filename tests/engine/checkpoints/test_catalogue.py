"""What checkpoints cost the more, the more of them there are: manifests parsed, files hashed."""

import os

import pytest

from crankshaft.engine.checkpoints import Checkpoints
from crankshaft.engine.checkpoints import manifest as manifests
from tests.engine.checkpoints.checkpoint_cases import make_state


@pytest.fixture
def calls(monkeypatch):
    """{"read", "sha256"}: the paths that are read."""
    found = {"read": [], "sha256": []}

    def noted(name):
        real = getattr(manifests, name)

        def call(path):
            found[name].append(os.path.basename(path))
            return real(path)

        monkeypatch.setattr(manifests, name, call)

    noted("read")
    noted("sha256")
    return found


def saved(directory, steps):
    checkpoints = Checkpoints(directory, make_state(), keep=None, about={"flags": {"seed": 1}})
    for step in range(1, steps + 1):
        checkpoints.save(step, {}, wait=True)
    return checkpoints


def test_a_manifest_is_parsed_once_however_many_are_kept(tmp_path, calls):
    saved(tmp_path, 6).save(7, {}, wait=True)
    assert sorted(calls["read"]) == [f"ckpt-{step}.manifest.json" for step in range(1, 8)]


def test_what_checkpoints_have_in_common_is_held_once(tmp_path):
    saved(tmp_path, 3)
    first, *others = Checkpoints(tmp_path, make_state(), keep=None, about={}).all()
    assert first.variables
    for other in others:
        assert other.variables is first.variables
        assert other.about is first.about
        assert other.step != first.step


def test_only_new_and_changed_files_are_hashed(tmp_path, calls):
    writer, reader = saved(tmp_path, 3), Checkpoints(tmp_path, make_state(), keep=None, about={})
    calls["sha256"].clear()
    reader.restore(reader.all()[-1])
    names = [f"ckpt-{step}.{part}" for step in (1, 2, 3) for part in ("data-00000-of-00001", "index")]
    assert sorted(calls["sha256"]) == names
    writer.save(4, {}, wait=True)
    broken = tmp_path / names[2]
    broken.write_bytes(b"\1" + broken.read_bytes()[1:])
    calls["sha256"].clear()
    assert [each.step for each in reader.all()] == [1, 3, 4]
    assert sorted(calls["sha256"]) == [names[2], "ckpt-4.data-00000-of-00001", "ckpt-4.index"]


def test_who_wants_new_ones_has_no_other_hashed(tmp_path, calls):
    saved(tmp_path, 3)
    calls["sha256"].clear()
    found = Checkpoints(tmp_path, make_state(), keep=None, about={}).all(lambda each: each.step > 2)
    assert [each.step for each in found] == [3]
    assert sorted(calls["sha256"]) == ["ckpt-3.data-00000-of-00001", "ckpt-3.index"]
