"""What holds for every input of files: its examples, its splits, and files that are missing, empty or change."""

from __future__ import annotations

import functools
import gzip
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.data.run_data import Data
from crankshaft.engine.data.source import WithoutBadRecords
from crankshaft.engine.errors import BadRecordError, SourceError, UsageError
from crankshaft.input import array_record, criteo, csv, images, parquet, text, tfrecord
from crankshaft.input.checks import InputError
from crankshaft.input.files import storage
from tests.arrays import assert_same
from tests.input import test_array_record, test_criteo, test_images, test_tfrecord

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


class Input(NamedTuple):
    """Files of an input, whose examples are told apart by a number each.

    Attributes:
      load: loads the files that flags name.
      name: of a file, by its number.
      write: writes a file of examples with these numbers.
      numbers: of features and labels that were read.
      library: that reads them.
      divides: whether the input itself takes a part of the examples to evaluate on.
    """

    load: Callable[..., Data]
    name: str
    write: Callable[[pathlib.Path, Sequence[int]], None]
    numbers: Callable[..., list]
    library: str = ""
    divides: bool = False


def lines(form: Callable[[int], str], header: str = "") -> Callable[[pathlib.Path, Sequence[int]], None]:
    return lambda path, numbers: path.write_text(header + "".join(form(number) + "\n" for number in numbers))


def parquet_file(path, numbers):
    pq.write_table(pa.table({"id": [*numbers], "label": [*numbers]}), path, row_group_size=4)


def records(write):
    def of(path, numbers):
        write(path, [test_tfrecord.example(x=float(number), label=number) for number in numbers])

    return of


def image(path, numbers):
    test_images.write(path, test_images.png(*numbers))


@functools.cache
def pngs() -> list[bytes]:
    return [b"\1" + test_images.png(number) for number in range(4)]


INPUTS = {
    "csv": Input(csv.load, "{}.csv", lines("{0},{0}".format, "id,label\n"), lambda x, y: y.tolist(), "pyarrow"),
    "parquet": Input(parquet.load, "{}.parquet", parquet_file, lambda x, y: x["id"].tolist(), "pyarrow"),
    "tfrecord": Input(tfrecord.load, "{}.tfrecord", records(test_tfrecord.write), lambda x, y: y.tolist(), "crc32c"),
    "array_record": Input(
        array_record.load,
        "{}.array_record",
        records(test_array_record.write),
        lambda x, y: x.tolist(),
        "array_record",
    ),
    "text": Input(
        functools.partial(text.load, context=1),
        "{}.txt",
        lambda path, numbers: path.write_bytes(bytes(numbers)),
        lambda x, y: [token for token in x.ravel().tolist() if token < 256],
    ),
    "images": Input(
        functools.partial(images.load, augment=False), "{}.png", image, lambda x, y: sorted(map(pngs().index, x))
    ),
    "criteo": Input(
        criteo.load,
        "day_{}.txt",
        lines(lambda number: test_criteo.line("1", {0: number})),
        lambda x, y: np.rint(np.expm1(x["dense"][:, 0])).tolist(),
        "pyarrow",
        divides=True,
    ),
}
OF_LINES = ("csv", "criteo")


def of_names(*left_out: str):
    return pytest.mark.parametrize("of", [name for name in INPUTS if name not in left_out], indirect=True)


@pytest.fixture
def of(request) -> Input:
    return INPUTS[request.param]


def folder_of(of: Input, folder: pathlib.Path, sizes=(5, 1, 6)) -> list[int]:
    """Writes files of so many examples each, the numbers of images; returns the examples' numbers."""
    ends = np.cumsum([1] * 3 if of.name == "{}.png" else sizes)
    inner = folder / "a" if of.name == "{}.png" else folder
    inner.mkdir(parents=True)
    for number, (first, end) in enumerate(zip([0, *ends], ends, strict=False)):
        of.write(inner / of.name.format(number), range(first, end))
    return [*range(ends[-1])]


def numbers_in(of: Input, data: Data) -> list[int]:
    if of.divides:
        return sorted([*of.numbers(*data.train), *of.numbers(*data.evaluation)])
    return of.numbers(*data.train.read(np.arange(len(data.train))))


@of_names()
def test_examples_of_all_files_are_read_each_once(of, tmp_path):
    numbers = folder_of(of, tmp_path / "in[put]")
    assert numbers_in(of, of.load(str(tmp_path / "in[put]"), 0)) == numbers


@of_names("criteo")
def test_examples_are_read_in_any_order_and_often(of, tmp_path):
    folder_of(of, tmp_path / "files")
    source = of.load(str(tmp_path / "files"), 0).train
    whole = tf.nest.flatten(source.read(np.arange(len(source))))
    for indices in (np.random.default_rng(0).permutation(len(source)), np.array([2, 0, 2]), np.array([1])):
        assert_same(tf.nest.flatten(source.read(indices)), [each[indices] for each in whole])
    if of.name != "{}.png":  # which are decoded later
        assert [each.dtype for each in whole] == [spec.dtype for spec in tf.nest.flatten(source.element_spec)]


@of_names("criteo", "images")
def test_one_example_is_enough(of, tmp_path):
    folder_of(of, tmp_path / "files", [1])
    assert numbers_in(of, of.load(str(tmp_path / "files"), 0)) == [0]


@of_names("criteo", "images")
def test_a_split_to_evaluate_on_has_the_form_of_the_one_to_train_on(of, tmp_path):
    for name, sizes in (("train", (2, 3)), ("eval", (4,))):
        folder_of(of, tmp_path / name, sizes)
    data = of.load(str(tmp_path / "train"), 0, eval_data_dir=str(tmp_path / "eval"))
    assert numbers_in(of, data) == [*range(5)]
    assert numbers_in(of, Data(data.evaluation)) == [*range(4)]
    assert data.evaluation.element_spec == data.train.element_spec


@of_names("array_record")
def test_files_elsewhere_are_read_by_tensorflow(of, tmp_path):
    numbers, there = folder_of(of, tmp_path / "files"), f"ram://{tmp_path.name}"
    for path in (path for path in (tmp_path / "files").rglob("*") if path.is_file()):
        to = str(path).replace(str(tmp_path / "files"), there)
        tf.io.gfile.makedirs(os.path.dirname(to))
        tf.io.gfile.copy(str(path), to)
    found = [of.load(where, 0) for where in (there, there, str(tmp_path / "files"))]  # prepared, and read again
    assert [numbers_in(of, data) for data in found] == [numbers] * 3
    if not of.divides:
        assert len({data.train.identity() for data in found}) == 1


@of_names("criteo")
def test_identity_tells_other_files_from_these(of, tmp_path):
    folder_of(of, tmp_path / "files")
    before, again = (of.load(str(tmp_path / "files"), 0).train.identity() for _ in range(2))
    changed = next((tmp_path / "files").rglob(of.name.format(1)))
    of.write(changed, [3])
    after = of.load(str(tmp_path / "files"), 0)
    assert before == again != after.train.identity()
    assert 3 in numbers_in(of, after)


@of_names("images")  # of which none is a bad record
def test_empty_files_are_left_out_with_a_line_unless_all_are(of, tmp_path, caplog):
    folder = tmp_path / "files"
    numbers = folder_of(of, folder)
    empty = [folder / of.name.format(number) for number in (4, 5)]
    for path in empty:
        if of.name == "{}.array_record":
            of.write(path, [])
        else:
            path.write_bytes(b"")
    for _ in range(2):  # also where they are prepared already
        caplog.clear()
        assert numbers_in(of, of.load(str(folder), 0)) == numbers
        assert f"2 left out as empty: {empty[0]}, {empty[1]}" in caplog.messages
    for path in folder.glob(of.name.format("[0-3]")):
        path.write_bytes(empty[0].read_bytes())
    with pytest.raises(InputError, match=r"is empty, as all 5 files are: expected .*"):
        of.load(str(folder), 0)


@of_names("images")
def test_backups_links_and_hidden_files_are_left_out_and_suffixes_may_be_upper_case(of, tmp_path):
    folder = tmp_path / "files"
    numbers = folder_of(of, folder)
    for name in (f"{of.name.format(6)}.bak", f".{of.name.format(5)}", f"{of.name.format(6)}.tmp"):
        of.write(folder / name, [99])
    (folder / of.name.format(7)).symlink_to(of.name.format(1))
    assert numbers_in(of, of.load(str(folder), 0)) == numbers
    (folder / of.name.format(0)).rename(folder / of.name.format(0).upper())
    assert sorted(numbers_in(of, of.load(str(folder), 0))) == numbers


@of_names()
def test_a_folder_without_files_is_one_line(of, tmp_path):
    with pytest.raises(InputError, match=r"absent: expected .*, found nothing"):
        of.load(str(tmp_path / "absent"), 0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"expected .*found an empty folder"):
        of.load(str(tmp_path / "empty"), 0)


@pytest.mark.parametrize("of", ["csv", "parquet", "tfrecord", "array_record"], indirect=True)
def test_a_folder_has_to_be_named(of):
    with pytest.raises(InputError, match="data_dir"):
        of.load(None, 0)


@pytest.mark.parametrize("of", ["csv", "parquet", "array_record", "criteo"], indirect=True)
def test_a_library_that_is_missing_or_broken_is_one_line_with_the_cure(of, tmp_path, monkeypatch):
    folder_of(of, tmp_path / "files")
    for name in [name for name in sys.modules if name.partition(".")[0] == of.library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    planted = tmp_path / f"{of.library}.py"
    planted.write_text(f"raise ModuleNotFoundError(name='{of.library}')")  # as Python does without it
    with pytest.raises(UsageError, match=r"needs? .*; pip install \w+"):
        of.load(str(tmp_path / "files"), 0)
    planted.write_text("raise ImportError('libstdc++.so.6: no GLIBCXX_3.4.29')")
    with pytest.raises(UsageError, match=r"can't be imported \(ImportError: libstdc\+\+.so.6: no GLIBCXX_3.4.29\)"):
        of.load(str(tmp_path / "files"), 0)


@pytest.mark.parametrize("of", OF_LINES, indirect=True)
def test_lines_may_be_packed_and_have_any_ends_and_a_cut_pack_is_one_line(of, tmp_path):
    numbers = folder_of(of, tmp_path / "files")
    for path, end in zip(sorted((tmp_path / "files").iterdir()), (b"\r\n", b"\n", b"\n"), strict=True):
        content = path.read_bytes().replace(b"\n", end).removesuffix(end)
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(content))
        path.unlink()
    assert numbers_in(of, of.load(str(tmp_path / "files"), 0)) == numbers
    path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(content)[:-5])
    with pytest.raises(InputError, match=f"{path.name}.gz is not a whole gzip file"):
        of.load(str(tmp_path / "files"), 0)


@pytest.mark.parametrize("change", [os.remove, lambda path: os.truncate(path, os.path.getsize(path) - 1)])
@of_names("criteo", "csv")  # csv is read as parquet is, from a file that is prepared
def test_a_file_that_vanishes_or_shrinks_during_the_run_ends_it(of, tmp_path, monkeypatch, change):
    monkeypatch.setattr(storage, "_CHECK_EVERY_SECONDS", 0)
    folder_of(of, tmp_path / "files")
    source = WithoutBadRecords(of.load(str(tmp_path / "files"), 0).train, 3, print)
    source.read(np.arange(2))
    changed = source.files()[-1]
    change(changed)
    with pytest.raises(SourceError, match="as the run began") as caught:
        source.read(np.arange(len(source)))
    assert changed in str(caught.value)
    assert not isinstance(caught.value, BadRecordError), "it is not one to be left out"
