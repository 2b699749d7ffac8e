"""A folder is read completely, each file once, whatever the input; what is left out is logged."""

import logging
import os
import re

import pytest

from crankshaft.input.checks import InputError
from crankshaft.input.files import listing

KIND = listing.FileKind("rows (*.row, else *.line)", (r".*\.row", r".*\.line"), "expected rows")
RECORDS = listing.FileKind("shards", (r".*\.tfrec.*",), "expected records", beside=r".*\.(json|txt)")


@pytest.fixture(autouse=True)
def said(caplog):
    caplog.set_level(logging.WARNING)
    return caplog


def write(folder, *names: str, content: bytes = b"x") -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def found(where, kind=KIND, **arguments) -> list[str]:
    return [os.path.basename(path) for path in listing.find(str(where), kind, **arguments).paths]


@pytest.mark.parametrize("name", ["exp[12]", "what?", "all*", "one,two"])
def test_a_path_that_exists_is_never_read_as_a_glob(tmp_path, name):
    write(tmp_path, f"{name}/right.row", "exp1/wrong.row", "whatx/wrong.row", "all of it/wrong.row", "one/wrong.row")
    assert found(tmp_path / name) == ["right.row"]
    assert found(tmp_path / name / "right.row") == ["right.row"]


def test_a_glob_in_a_folder_whose_name_has_brackets_is_named_escaped_in_messages(tmp_path):
    write(tmp_path, "[v2]/a-00000-of-00002.row", "[v2]/a-00000-of-00003.row")
    with pytest.raises(InputError, match=r"sets with different numbers of files \(1 of 2 and 1 of 3\)") as refused:
        found(tmp_path / "[v2]")
    assert found(re.search(r"data_dir=(.*)", str(refused.value))[1]) == ["a-00000-of-00003.row"]


def test_all_suffixes_of_a_kind_are_read_packed_and_upper_case_ones_too(tmp_path):
    write(tmp_path, "a.ROW", "b.row", "c.row.gz", "D.Row.GZ")
    assert found(tmp_path) == ["D.Row.GZ", "a.ROW", "b.row", "c.row.gz"]
    folder = tmp_path / "records"
    names = ["0.tfrecord", "1.tfrecords", "2.tfrec", "3.tfrecord-00000-of-00001", "4.tfrecord.gz", "5.TFRECORD"]
    write(folder, *names)
    assert found(folder, RECORDS) == names


def test_what_is_packed_so_that_it_is_not_read_is_an_error(tmp_path):
    write(tmp_path, "a.row", "b.row.zst")
    with pytest.raises(InputError, match=r"b\.row\.zst is packed as zst, which is not read; unpack it, or use gzip"):
        found(tmp_path)


def test_what_is_left_out_is_logged_with_number_names_and_reason(tmp_path, said):
    write(tmp_path, "a.row", "b.row", "b.row.gz", ".c.row", "d.row~", "e.line", "f.md", "in/g.row", "features.json")
    write(tmp_path, "_SUCCESS", ".DS_Store", "a.row.index", "a.row.crc", "h.row.tmp.1234", "i.row.part", content=b"")
    assert found(tmp_path) == ["a.row", "b.row"]
    assert said.messages == [
        f"data_dir={tmp_path}: 8 not read: .c.row, d.row~, h.row.tmp.1234, i.row.part (hidden, backup or temporary); "
        "f.md (other names); in/ (folders); e.line (read only if there are no others); b.row.gz (there unpacked as "
        "well)"
    ]


def test_backups_and_parts_of_a_shard_are_left_out_by_a_glob_too(tmp_path, said):
    shard = "d.tfrecord-00000-of-00001"
    write(tmp_path, shard, *(f"{shard}{end}" for end in (".bak", "~", ".part", ".tmp.1f2e", ".index", ".incomplete.X")))
    write(tmp_path, "features.json", "d.txt")
    assert found(tmp_path, RECORDS) == found(tmp_path / "d*", RECORDS) == found(tmp_path / "*", RECORDS) == [shard]
    assert all("5 not read" in line or "6 not read" in line for line in said.messages)
    assert len(said.messages) == 3


@pytest.mark.parametrize("first", [0, 1])
def test_a_set_of_files_has_to_be_complete(tmp_path, said, first):
    names = [f"a-{number:05d}-of-00003.row" for number in range(first, first + 3)]
    write(tmp_path, *names, "other.row")
    assert found(tmp_path) == [*names, "other.row"]
    (tmp_path / names[1]).unlink()
    with pytest.raises(
        InputError, match=rf"a-{first + 1:05d}-of-00003\.row is missing, of a set of 3 files; restore it, or"
    ):
        found(tmp_path)
    assert found(tmp_path / "a-*") == [names[0], names[2]]  # as the message says
    assert f"2 of the 3 files of {tmp_path}/a are read, without {tmp_path}/a-{first + 1:05d}" in said.messages[-1]


def test_an_older_set_beside_a_newer_one_is_an_error(tmp_path):
    write(tmp_path, *(f"a-{n:05d}-of-00002.row" for n in range(2)), *(f"a-{n:05d}-of-00003.row" for n in range(3)))
    for where in (tmp_path, tmp_path / "a-*"):
        with pytest.raises(InputError, match=r"\(2 of 2 and 3 of 3\); one may be an older one: remove that"):
            found(where)
    assert found(tmp_path / "a-*-of-00002*") == ["a-00000-of-00002.row", "a-00001-of-00002.row"]
    write(tmp_path / "b", "a-00000-of-00001.row", "a-00000-of-00001-copy.row")
    with pytest.raises(InputError, match="are one part of a set of 1; remove one of them"):
        found(tmp_path / "b")


def test_each_file_is_read_once_by_whatever_paths(tmp_path, said, monkeypatch):
    write(tmp_path, "f/a.row", "f/b.row")
    (tmp_path / "f" / "latest.row").symlink_to("a.row")
    (tmp_path / "link").symlink_to("f")
    monkeypatch.chdir(tmp_path)
    assert found("f") == ["a.row", "b.row"]
    assert "latest.row (the same file as a.row)" in said.messages[-1]
    assert found("f/a.row,./f/a.row,f,link,link/*.row") == ["a.row", "b.row"]
    (tmp_path / "f" / "lost.row").symlink_to("nowhere")
    with pytest.raises(InputError, match=r"lost\.row can't be read \(No such file"):
        found("f")


def test_a_folder_of_several_splits_is_read_by_the_flag_it_is_named_in(tmp_path, said):
    sets = {"toy-train.tfrecord": 2, "toy-test.tfrecord": 1, "toy-extra.tfrecord": 1}
    write(tmp_path, *(f"{name}-{n:05d}-of-{count:05d}" for name, count in sets.items() for n in range(count)))
    assert [name[:9] for name in found(tmp_path, RECORDS)] == ["toy-train"] * 2
    assert "toy-extra.tfrecord-00000-of-00001, toy-test.tfrecord-00000-of-00001 (not of the split train" in said.text
    assert [name[:8] for name in found(tmp_path, RECORDS, flag="eval_data_dir")] == ["toy-test"]
    (tmp_path / "toy-train.tfrecord-00000-of-00002").unlink()
    (tmp_path / "toy-train.tfrecord-00001-of-00002").rename(tmp_path / "toy-val.tfrecord-00000-of-00001")
    with pytest.raises(InputError, match=r"has files of several splits \(test, val\); name those of one by a glob"):
        found(tmp_path, RECORDS)
    assert [name[:7] for name in found(tmp_path, RECORDS, flag="eval_data_dir")] == ["toy-val"]


def test_subfolders_are_read_where_a_kind_says_so_and_a_circle_of_links_ends(tmp_path):
    write(tmp_path, "day=1/a.row", "day=2/hour=3/b.row", "other/c.row", ".day=4/d.row")
    (tmp_path / "day=1" / "day=up").symlink_to("..")
    kind = KIND._replace(subfolders=r"\w+=\w+")
    assert found(tmp_path, kind) == ["a.row", "b.row"]


def test_a_folders_files_come_by_their_numbers_and_no_hidden_ones(tmp_path):
    write(tmp_path, "day_10", "day_9.gz", "day_2", "day_2.gz", ".day_1", "days", "day_3.txt.bak")
    (tmp_path / "day_5").mkdir()
    assert found(tmp_path, listing.FileKind("days", (r"day_[0-9]+",))) == ["day_2", "day_9.gz", "day_10"]
    assert found(tmp_path, listing.FileKind("days", ("absent", r"days|day_10"))) == ["day_10", "days"]
    assert found(tmp_path / "days", listing.FileKind("days", ("any",))) == ["days"]  # a file is taken whatever its name


def test_a_folder_without_such_files_is_refused_with_what_it_holds(tmp_path):
    with pytest.raises(InputError, match=r"expected rows .*, found an empty folder"):
        found(tmp_path)
    write(tmp_path, "notes.md")
    with pytest.raises(InputError, match=r"expected rows .*, found notes\.md"):
        found(tmp_path)
    with pytest.raises(InputError, match=r"absent: expected rows .*, found nothing"):
        found(tmp_path / "absent")
