"""Manifests, and the names of checkpoint files: what can be read from them without TensorFlow."""

import dataclasses
import json
import os

import pytest

from crankshaft.engine.checkpoints import Manifest, RunDir
from crankshaft.engine.checkpoints import manifest as manifests
from crankshaft.engine.errors import CheckpointError, UsageError


def written(directory, step, serial, time="2026-01-01T00:00:00", **fields):
    """Publishes a checkpoint of two small files."""
    (folder := directory / "writing").mkdir(parents=True)
    for name in (f"ckpt-{step}.index", f"ckpt-{step}.data-00000-of-00001"):
        (folder / name).write_bytes(b"content of %d" % step)
    others = {"about": {}, "host_state": {}, "variables": {}, "versions": {}, **fields}
    files = manifests.describe_files(str(folder / f"ckpt-{step}"))
    made = Manifest(str(directory / f"ckpt-{step}"), step, serial, files=files, time=time, **others)
    manifests.publish(made, folder)
    folder.rmdir()
    return made


def test_what_is_published_is_read_and_the_newest_is_written_last(tmp_path):
    assert (manifests.newest_step(tmp_path), manifests.steps(tmp_path), manifests.listdir(tmp_path / "no")) == (
        -1,
        set(),
        [],
    )
    made = [written(tmp_path, step, serial) for serial, step in ((1, 5), (3, 20), (4, 10))]
    assert manifests.read_all(tmp_path) == (made[::-1], {})
    assert manifests.read(made[0].path) == made[0] == manifests.manifest_at(made[0].prefix)
    assert manifests.newest_step(tmp_path) == 10
    assert manifests.steps(tmp_path) == {5, 10, 20}
    assert manifests.manifest_at(str(tmp_path / "ckpt-6")) is None
    assert RunDir(str(tmp_path.parent)).steps() == []
    assert not manifests.is_being_written(tmp_path)
    os.rename(made[1].path, made[1].path + ".writing")
    assert manifests.is_being_written(tmp_path)
    assert manifests.steps(tmp_path) == {5, 10}
    os.remove(made[0].path)
    listed, problems = manifests.read_all(tmp_path)
    assert listed == made[2:]
    assert problems == {5: "ckpt-5: expected ckpt-5.manifest.json, found none"}  # 20's are being moved
    assert manifests.unlisted_files(tmp_path) == [
        *("ckpt-20.data-00000-of-00001", "ckpt-20.index", "ckpt-5.data-00000-of-00001", "ckpt-5.index")
    ]


def test_a_file_that_differs_is_named_with_what_was_expected(tmp_path):
    made = written(tmp_path, 5, 1)
    assert made.problem() is None
    index = tmp_path / "ckpt-5.index"
    index.write_bytes(b"Content of 5")
    digests = made.files[index.name]["sha256"][:16], manifests.sha256(index)[:16]
    assert made.problem() == "ckpt-5.index: expected sha256 {}..., found {}...".format(*digests)
    assert made.problem(content=False) is None
    assert made.problem(hashed=lambda path: made.files[os.path.basename(path)]["sha256"]) is None
    index.write_bytes(b"content of 50")
    assert made.problem(content=False) == "ckpt-5.index: expected 12 bytes, found 13"
    index.unlink()
    assert made.problem() == "ckpt-5.index: expected 12 bytes, found no file"
    assert not made.gone()
    (tmp_path / "ckpt-5.data-00000-of-00001").unlink()
    assert made.problem() == "ckpt-5 was removed"


def test_names_say_which_files_are_a_runs_and_of_which_step(tmp_path):
    assert manifests.step_from_name("ckpt-12.data-00000-of-00001") == 12
    assert [manifests.is_file_after(f"ckpt-{step}.index", 5) for step in (4, 5, 6)] == [False, False, True]
    assert not manifests.is_file_after("model-6.index", 5)
    for name in ("ckpt-7.index", "a-1.data-00000-of-00001", "checkpoint", "notes.txt", "ckpt-7.manifest"):
        (tmp_path / name).touch()
    assert manifests.unlisted_files(tmp_path) == ["a-1.data-00000-of-00001", "ckpt-7.index", "checkpoint"]
    assert manifests.remove(tmp_path / "notes.txt")
    assert not manifests.remove(tmp_path / "notes.txt")
    (tmp_path / "folder").mkdir()
    assert not manifests.remove(tmp_path / "folder")


def of_data(**data):
    return Manifest("ckpt-1", 1, 1, {"data": data}, {}, {}, {}, {}, "")


@pytest.mark.parametrize(
    ("before", "now", "others"),
    [
        ({"train": {"a": 1}}, {"train": {"a": 1}}, set()),
        ({"train": {"a": 1}}, {"train": {"a": 2}}, {"train"}),
        ({"train": {"a": 1, "written": 3, "sample": 1.0}}, {"train": {"a": 1, "written": 4, "sample": 2.0}}, set()),
        ({"train": 1}, {"train": 2, "eval": 3}, {"train"}),  # a split that one side lacks
        ({"train": 1, "eval": 3}, {"eval": 4}, {"eval"}),
        (
            {"train": 1, "eval/a": 3, "eval/b": 1},
            {"train": 1, "eval/b": 2, "eval/c": 1},
            {"eval/a", "eval/b", "eval/c"},
        ),
        ({"train": 1, "eval": 3}, {"train": 1, "eval/c": 1}, {"eval", "eval/c"}),
        ({}, {"train": 1}, set()),
    ],
)
def test_splits_are_compared_by_their_contents(before, now, others):
    assert of_data(**before).other_splits({"data": now}) == others
    assert of_data(**before).other_data({"data": now}) == {name[:5].rstrip("/") for name in others}
    assert of_data(**before).other_splits({}) == set()


def test_the_best_is_the_newest_if_it_is_later_by_step_and_time(tmp_path):
    run_dir = RunDir(str(tmp_path))
    assert run_dir.newest() is None
    assert not run_dir.is_runs
    best = written(tmp_path / "best", 8, 1, "2026-01-01T00:00:08")
    assert run_dir.newest() == best
    assert run_dir.is_runs
    earlier = written(tmp_path / "checkpoints", 5, 1, "2026-01-01T00:00:05")

    def at(manifest, seconds):
        os.utime(manifest.path, (seconds, seconds))

    at(best, 8)
    at(earlier, 5)
    assert run_dir.newest() == best
    for step, time in ((5, "2026-01-01T00:00:08"), (8, "2026-01-01T00:00:05")):
        assert not best.is_after(dataclasses.replace(earlier, step=step, time=time))
    at(earlier, 8)
    assert run_dir.newest() == earlier
    at(earlier, 5)
    earlier.renew()  # the run has returned to it
    assert run_dir.newest() == earlier
    later = written(tmp_path / "checkpoints", 10, 2, "2026-01-01T00:00:10")
    assert run_dir.newest() == later
    (tmp_path / "checkpoints" / "ckpt-10.index").unlink()
    assert run_dir.newest() == later
    assert run_dir.newest(is_whole=True) == earlier
    assert (run_dir.steps(), run_dir.steps(5), run_dir.steps("best")) == ([5, 10], [5, 10], [8])


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"a": float("nan")}, r"Out of range float values are not JSON compliant"),
        ({1: 2}, "its keys are not all strings"),
        ({"a": [{"b": {2: 3}}]}, "its keys are not all strings"),
        ({"a": {1, 2}}, "Object of type set is not JSON"),
        ([1], "it is of type list, not a dictionary"),
    ],
)
def test_what_a_resumed_run_would_not_read_back_is_refused(values, problem):
    with pytest.raises(UsageError, match=rf"^extra=.* can't be saved in a checkpoint \(.*{problem}"):
        manifests.check_extra(values)


def test_a_program_may_keep_a_mebibyte_of_plain_values():
    manifests.check_extra({"a": [1, 2.5, None, True, ("b", [])], "c": {"d": "e"}})
    around = len('{"a": ""}')
    manifests.check_extra({"a": "x" * ((1 << 20) - around)})
    with pytest.raises(UsageError, match=r"^extra takes 1,048,577 bytes, and a checkpoint keeps 1,048,576 at most"):
        manifests.check_extra({"a": "x" * ((1 << 20) - around + 1)})


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"ckpt-6.index": {"bytes": 3, "sha256": "0" * 64}}, "files of ckpt-5, found 'ckpt-6.index'"),
        ({"ckpt-5.index": {"bytes": -1, "sha256": "0" * 64}}, "bytes and sha256 of ckpt-5.index, found {'bytes': -1, "),
        ({"ckpt-5.index": {"bytes": 1 << 63, "sha256": "0" * 64}}, "bytes and sha256 of ckpt-5.index, found "),
        ({"ckpt-5.index": {"bytes": True, "sha256": "0" * 64}}, "bytes and sha256 of ckpt-5.index, found "),
        ({"ckpt-5.index": {"bytes": 3, "sha256": "0" * 63}}, "bytes and sha256 of ckpt-5.index, found "),
        ({"ckpt-5.index": 3}, "bytes and sha256 of ckpt-5.index, found 3"),
    ],
)
def test_a_manifest_lists_its_own_files_with_sizes_and_digests(tmp_path, files, found):
    made = written(tmp_path, 5, 1)
    for size in (0, (1 << 63) - 1):
        of_size = dataclasses.replace(made, files={"ckpt-5.index": {"bytes": size, "sha256": "0" * 64}})
        rewrite(of_size)
        assert manifests.read(made.path) == of_size
    rewrite(dataclasses.replace(made, files=files))
    with pytest.raises(CheckpointError) as caught:
        manifests.read(made.path)
    assert caught.value.message.startswith(f"ckpt-5.manifest.json: expected {found}")


def rewrite(manifest):
    record = {"format": manifests.FORMAT} | dataclasses.asdict(manifest)
    del record["prefix"]
    with open(manifest.path, "w") as file:
        json.dump(manifests.with_digest(record), file)
