"""Parquet: columns by name, whole row groups, and each mistake in one line."""

import dataclasses

import numpy as np
import pytest

from crankshaft.engine.data.entry import user_data
from crankshaft.engine.data.order import plain_order
from crankshaft.engine.data.reader import Reader
from crankshaft.engine.data.source import Spec
from crankshaft.engine.errors import BadRecordError
from crankshaft.input import parquet
from crankshaft.input.checks import InputError
from crankshaft.input.tables import fitting

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def table(rows, first=0, **more):
    number = np.arange(first, first + rows)
    return pa.table(
        {
            "id": number,
            "age": (number % 90).astype(np.int8),
            "price": number / 4,
            "city": pa.array([f"city {n % 3}" for n in number]).dictionary_encode(),
            "vector": pa.array([[n, n + 0.5] for n in number], pa.list_(pa.float32())),
            "label": number % 2 == 0,
            **more,
        }
    )


def written(folder, *tables, **how):
    folder.mkdir(exist_ok=True)
    for number, each in enumerate(tables):
        pq.write_table(each, folder / f"part-{number}.parquet", **{"row_group_size": 8, **how})
    return str(folder)


def all_of(source):
    return source.read(np.arange(len(source)))


def test_columns_are_read_by_name_in_the_order_of_rows(tmp_path):
    folder = written(tmp_path, table(20), table(11, 20))
    splits = parquet.load(folder, 0, numbers=("age",))
    assert splits.num_classes == 2
    assert splits.vocabulary == {"id": 31, "city": 4}
    assert splits.preprocessing.words == {"city": [b"city 0", b"city 1", b"city 2"]}
    source = splits.train
    assert source.element_spec == (
        {
            "id": Spec((), np.int64),
            "age": Spec((), np.float32),
            "price": Spec((), np.float32),
            "city": Spec((), np.int64),
            "vector": Spec((2,), np.float32),
        },
        Spec((), np.int64),
    )
    indices = np.random.default_rng(0).permutation(31)
    features, labels = source.read(indices)
    np.testing.assert_array_equal(features["id"], indices)
    np.testing.assert_array_equal(features["age"], indices % 90)
    np.testing.assert_array_equal(features["price"], indices / 4)
    np.testing.assert_array_equal(features["vector"], np.stack([indices, indices + 0.5], 1))
    np.testing.assert_array_equal(features["city"], indices % 3 + 1)
    np.testing.assert_array_equal(labels, indices % 2 == 0)
    dtypes = {name: array.dtype for name, array in features.items()}
    assert dtypes == {name: spec.dtype for name, spec in source.element_spec[0].items()}


def test_features_may_be_one_array_of_some_columns(tmp_path):
    splits = parquet.load(written(tmp_path, table(9)), 0, features=("age", "vector"), array=True)
    assert splits.train.element_spec[0] == Spec((3,), np.float32)
    features, _ = all_of(splits.train)
    np.testing.assert_array_equal(features, [[n, n, n + 0.5] for n in range(9)])
    assert splits.vocabulary is None


def test_without_a_label_examples_are_features_alone(tmp_path):
    splits = parquet.load(written(tmp_path, table(3)), 0, label="none", features=("age",))
    assert all_of(splits.train)["age"].tolist() == [0, 1, 2]


def test_labels_of_floats_and_negative_ones_are_no_classes(tmp_path):
    folder = written(tmp_path, table(3, debt=pa.array([-1, 0, 1])))
    assert parquet.load(folder, 0, label="price", features=("id",)).num_classes is None
    splits = parquet.load(folder, 0, label="debt")
    assert splits.num_classes is None
    splits = parquet.load(folder, 0, text="keep")
    assert set(splits.vocabulary) == {"id", "age"}
    assert splits.train.element_spec[0]["debt"] == Spec((), np.float32)


@pytest.mark.parametrize("statistics", [True, False])
def test_vocabulary_is_found_with_and_without_statistics(tmp_path, statistics):
    folder = written(tmp_path, table(20), table(3, 40), write_statistics=statistics)
    splits = parquet.load(folder, 0)
    assert splits.vocabulary == {"id": 43, "age": 43, "city": 4}
    assert splits.num_classes == 2


@pytest.fixture
def read_groups(monkeypatch):
    """The groups that were read, each time that one was."""
    found = []

    class Counted(parquet.ParquetTable):
        def read(self, group, names):
            found.append(group)
            return super().read(group, names)

    monkeypatch.setattr(parquet, "ParquetTable", Counted)
    return found


def test_each_row_group_is_read_once_an_epoch(tmp_path, read_groups):
    source = parquet.load(written(tmp_path, table(64), table(60, 64)), 0, features=("id",)).train
    assert source.chunk_examples == 8
    read_groups.clear()
    order = plain_order(source, 31, 1, seed=1, shuffle_window=4)
    reader = Reader(source, order)
    found = []
    for block in range(4):
        features, _ = reader.read(order.examples(np.int64(block)), np.int64(block))
        found += features["id"].numpy().ravel().tolist()
    assert sorted(found) == [*range(124)]
    assert len({*read_groups}) == 16
    assert len(read_groups) <= 16 + 2 * 5  # those of the next epoch that are read ahead


def test_one_group_is_read_once_for_all_that_want_it(tmp_path, read_groups):
    source = parquet.load(written(tmp_path, table(100), row_group_size=100), 0, features=("id",)).train
    read_groups.clear()
    for first in range(0, 100, 10):
        source.read(np.arange(first, first + 10))
    assert read_groups == [0]


def test_missing_lists_and_texts_are_bad_records_or_filled(tmp_path):
    holes = {"city": pa.array(["a", "b", None]), "vector": pa.array([[1.0, 2.0], None, [3.0, 4.0]])}
    folder = written(tmp_path, table(3, **holes))
    for name, row in (("city", 2), ("vector", 1)):
        source = parquet.load(folder, 0, features=(name,)).train
        source.read(np.array([n for n in range(3) if n != row]))
        with pytest.raises(BadRecordError, match=rf"part-0.parquet, row {row}: column '{name}' has no value; fill it"):
            all_of(source)
    for arguments, city, vector in (
        ({"missing": "zero", "text": "keep"}, [b"a", b"b", b""], [0, 0]),
        ({"missing": "mean"}, [1, 2, 0], [2, 3]),
    ):
        features, _ = all_of(parquet.load(folder, 0, features=tuple(holes), **arguments).train)
        assert features["city"].tolist() == city
        assert features["vector"].tolist() == [[1, 2], vector, [3, 4]]


@pytest.mark.parametrize("dtype", [pa.float16(), pa.float32(), pa.float64()])
def test_nan_has_no_value(tmp_path, dtype):
    nan = float("nan")
    holes = {
        "price": pa.array(np.array([0.5, nan, 2]), pa.float64()).cast(dtype, safe=False),
        "vector": pa.array([[1.0, nan], [3.0, 4.0], [nan, nan]], pa.list_(pa.float32())),
    }
    folder = written(tmp_path, table(3, **holes))
    for name, row in (("price", 1), ("vector", 0)):
        with pytest.raises(BadRecordError, match=rf"part-0.parquet, row {row}: column '{name}' has no value"):
            all_of(parquet.load(folder, 0, features=(name,)).train)
    features, _ = all_of(parquet.load(folder, 0, features=tuple(holes), missing="zero").train)
    assert features["price"].tolist() == [0.5, 0, 2]
    assert features["vector"].tolist() == [[1, 0], [3, 4], [0, 0]]
    features, _ = all_of(parquet.load(folder, 0, features=tuple(holes), missing="column").train)
    assert features["price.missing"].tolist() == [0, 1, 0]
    assert features["vector.missing"].tolist() == [[0, 1], [0, 0], [1, 1]]


def test_integers_beyond_int64_are_text_and_never_wrap(tmp_path):
    small, large = pa.array([0, 2**63 - 1, 5], pa.uint64()), pa.array([0, 2**63, 2**64 - 1], pa.uint64())
    for statistics in (True, False):
        folder = written(tmp_path, table(3, small=small, large=large), write_statistics=statistics)
        splits = parquet.load(folder, 0, features=("small", "large"), keeps_ids=True)
        features, _ = all_of(splits.train)
        assert features["small"].tolist() == [0, 2**63 - 1, 5]
        assert splits.preprocessing.words == {"large": [b"0", b"18446744073709551615", b"9223372036854775808"]}
        assert features["large"].tolist() == [1, 3, 2]
        with pytest.raises(InputError, match="numbers=large makes a column of numbers, and column 'large' is text"):
            parquet.load(folder, 0, features=("large",), numbers=("large",))


@pytest.mark.parametrize("value", [1e39, -3.5e38])
def test_a_list_with_a_number_beyond_float32_is_a_bad_record(tmp_path, value):
    source = parquet.load(written(tmp_path, table(2, vector=pa.array([[1.0, 2.0], [1.0, value]]))), 0).train
    with pytest.raises(BadRecordError, match=r"row 1: column 'vector' has .*, more than float32 can hold"):
        all_of(source)


def test_a_list_column_may_begin_with_rows_without_a_value(tmp_path):
    vectors = [*[None] * 20, [1.0, 2.0], [3.0, 4.0]]
    folder = written(tmp_path, table(22, vector=pa.array(vectors)))
    source = parquet.load(folder, 0, features=("vector",)).train
    assert source.element_spec[0]["vector"] == Spec((2,), np.float32)
    assert source.read(np.array([21, 20]))[0]["vector"].tolist() == [[3, 4], [1, 2]]


TEXTS = ["b", None, "a", ""]


@pytest.mark.parametrize(
    "column",
    [
        *(pa.array(TEXTS, kind) for kind in (pa.string(), pa.large_string(), pa.string_view())),
        *(pa.array([x and x.encode() for x in TEXTS], kind) for kind in (pa.binary(), pa.large_binary())),
        pa.array([x and x.encode() for x in TEXTS], pa.binary_view()),
        pa.array(TEXTS).dictionary_encode(),
        pa.array(TEXTS, pa.large_string()).dictionary_encode(),
        # What a dictionary has besides is not a word of the table.
        pa.DictionaryArray.from_arrays(pa.array([2, None, 0, 3]), pa.array(["a", "unused", "b", ""])),
    ],
    ids=lambda column: str(column.type),
)
def test_any_form_of_text_is_ids_by_its_words(tmp_path, column):
    splits = parquet.load(written(tmp_path, table(4, city=column)), 0, features=("city",), missing="zero")
    assert splits.preprocessing.words == {"city": [b"a", b"b"]}
    assert all_of(splits.train)[0]["city"].tolist() == [2, 0, 1, 0]


@pytest.mark.parametrize("can_be_kept", [True, False])
def test_words_and_means_are_fitted_once_where_they_can_be_kept(tmp_path, monkeypatch, can_be_kept):
    odd = pa.array([b"b", b"\xff\xfe", b"a", b""], pa.binary())
    folder = written(tmp_path / "data", table(4, city=odd, price=pa.array([1.0, None, 3.0, None])))
    if not can_be_kept:
        (tmp_path / "data" / ".crankshaft").write_text("a file in the way")
    arguments = {"features": ("city", "price"), "missing": "mean"}
    first = parquet.load(folder, 0, **arguments)
    with monkeypatch.context() as fitted_once:
        if can_be_kept:
            fitted_once.setattr(fitting, "_fit", None)
        again = parquet.load(folder, 0, **arguments)
    assert dataclasses.replace(first, train=None) == dataclasses.replace(again, train=None)
    assert again.preprocessing.words == {"city": [b"a", b"b", b"\xff\xfe"]}
    assert all_of(again.train)[0]["price"].tolist() == [1, 2, 3, 2]
    assert all_of(parquet.load(folder, 0, **{**arguments, "missing": "zero"}).train)[0]["price"].tolist() == [
        1,
        0,
        3,
        0,
    ]


def test_dates_and_times_are_days_and_seconds(tmp_path):
    moments = {
        "date": pa.array([0, -1, None], pa.date32()),
        "long_date": pa.array([86_400_000, 0, 0], pa.date64()),
        "time": pa.array([86_400 * 10**9 * 2 + 1_500_000_000, -1_000_000, 0], pa.timestamp("ns")),
        "zoned": pa.array([3600, 86_399, 0], pa.timestamp("s", "Europe/Berlin")),
    }
    splits = parquet.load(written(tmp_path, table(3, **moments)), 0, features=tuple(moments), missing="zero")
    features, _ = all_of(splits.train)
    assert {name: array.tolist() for name, array in features.items()} == {
        "date": [0, -1, 0],
        "long_date": [1, 0, 0],
        "time": [2, -1, 0],
        "time.seconds": [1.5, 86_400, 0],  # the last millisecond of a day
        "zoned": [0, 0, 0],
        "zoned.seconds": [3600, 86_399, 0],
    }
    assert {array.dtype for array in features.values()} == {np.dtype(np.float32)}
    assert splits.vocabulary is None


@pytest.mark.parametrize("strange", [[1.0], [1.0, 2.0, 3.0], [1.0, None]])
def test_a_list_of_another_length_than_all_of_training_is_a_bad_record(tmp_path, strange):
    folder = written(tmp_path / "train", table(1, vector=pa.array([[1.0, 2.0]])))
    other = written(tmp_path / "eval", table(3, vector=pa.array([[1.0, 2.0], strange, [3.0, 4.0]])))
    source = parquet.load(folder, 0, features=("vector",), missing="zero", eval_data_dir=other).evaluation
    with pytest.raises(BadRecordError, match="row 1: column 'vector' has not 2 values, as others have"):
        all_of(source)
    assert source.read(np.array([2, 0]))[0]["vector"].tolist() == [[3, 4], [1, 2]]


@pytest.mark.parametrize(
    ("kind", "spec"),
    [(pa.list_(pa.int32()), "int32"), (pa.large_list(pa.int64()), "int64"), (pa.list_(pa.float64()), "float32")],
)
def test_lists_that_differ_in_length_are_examples_of_any_length(tmp_path, kind, spec):
    lists = [[1, 2], [3, 4], [], None, [5], [6, 7, 8], [9, 9]]
    # Those of the first file are of one length, and so are those of the evaluation.
    parts = [table(len(part), seen=pa.array(part, kind)) for part in (lists[:2], lists[2:])]
    folder = written(tmp_path / "train", *parts, row_group_size=2)
    other = written(tmp_path / "eval", table(2, seen=pa.array([[1], [2]], kind)))
    splits = parquet.load(folder, 0, features=("seen",), missing="zero", eval_data_dir=other)
    for split, expected in ((splits.train, [each or [] for each in lists]), (splits.evaluation, [[1], [2]])):
        assert split.element_spec[0] == {"seen": Spec([None], spec)}
        rows = np.arange(len(split))[::-1]
        found, _ = split.read(rows)
        assert [each.tolist() for each in found["seen"]] == expected[::-1]
        padded = user_data.split("train", split)
        np.testing.assert_array_equal(padded.lengths(rows)[:, 0], [*map(len, expected[::-1])])
    refusing = parquet.load(folder, 0, features=("seen",)).train
    with pytest.raises(BadRecordError, match=r"part-1.*row 1: column 'seen' has no value; fill it"):
        all_of(refusing)
    for arguments in ({"array": True}, {"numbers": ("seen",)}):
        with pytest.raises(InputError, match="of numbers, and column 'seen' is of any length; leave it out"):
            parquet.load(folder, 0, features=("seen",), **arguments)


@pytest.mark.parametrize("lists", [[[1], [2], [], [3]], [[1, 2], [3, 4], [5], [6, 7, 8]], [[]] * 4], ids=str)
def test_all_lists_show_whether_they_have_one_length(tmp_path, lists):
    """Files have the numbers of values alone, in which an empty list counts as one."""
    folder = written(tmp_path, table(4, seen=pa.array(lists, pa.list_(pa.int64()))), row_group_size=2)
    source = parquet.load(folder, 0, features=("seen",)).train
    assert [each.tolist() for each in all_of(source)[0]["seen"]] == lists


def test_a_missing_or_too_large_value_in_a_list_of_any_length_is_a_bad_record(tmp_path):
    lists = [[1.0], [1.0, 2.0], [3.0, None], [float("nan")], [1.0, 1e39]]
    source = parquet.load(written(tmp_path, table(5, x=pa.array(lists))), 0, features=("x",), missing="zero").train
    for row, problem in (
        (2, "a list without one of its values; fill it, or let max_bad_records leave such rows out"),
        (3, "a list without"),
        (4, "1e[+]39, more than float32"),
    ):
        with pytest.raises(BadRecordError, match=f"row {row}: column 'x' has {problem}"):
            source.read(np.array([row]))
    assert [each.tolist() for each in source.read(np.arange(2))[0]["x"]] == [[1], [1, 2]]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            {"label": "class"},
            "has no column 'class'; name the label's by input_arg=label=NAME, one of id, age, price",
        ),
        ({"features": ("size",)}, "features=size: "),
        ({"numbers": ("size",)}, "numbers=size: "),
        ({"texts": ("size",)}, "texts=size: "),
        ({"text": "hashed"}, "text=hashed is unknown; use one of category, hash, keep"),
        ({"missing": "drop"}, "missing=drop is unknown; use refuse, zero, mean"),
        ({"array": True}, "column 'city' is text; leave it out"),
        ({"features": ("when",)}, "column 'when' is neither of numbers nor of text; name those to be read"),
        ({}, "column 'when' is neither of numbers nor of text; name those to be read by input_arg=features=id,age"),
    ],
)
def test_mistakes_are_one_line(tmp_path, arguments, line):
    when = {"when": pa.array([0, 1, 2], pa.duration("s"))} if "when" in line else {}
    with pytest.raises(InputError) as caught:
        parquet.load(written(tmp_path, table(3, **when)), 0, **arguments)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_of_other_columns_are_one_line(tmp_path):
    folder = written(tmp_path, table(3), table(3).drop_columns("age"))
    with pytest.raises(InputError, match=r"part-1.parquet has no column 'age', and .*part-0.parquet has; give files"):
        parquet.load(folder, 0)
    written(tmp_path, table(3), table(3, age=pa.array([0.5, 1, 2])))
    with pytest.raises(InputError, match=r"part-1.parquet: column 'age' is double, and int8 in .*part-0.parquet"):
        parquet.load(folder, 0)
    written(tmp_path, table(0), table(0))
    with pytest.raises(InputError, match=r"part-0.parquet has no rows; give files that have some"):
        parquet.load(folder, 0)


@pytest.mark.parametrize("first", [0, 1])
def test_a_column_that_not_all_files_have_is_one_line_or_named(tmp_path, first):
    """Whichever of the files comes first."""
    tables = [table(3), table(3, size=pa.array([0.5, 1.5, 2.5]))]
    folder = written(tmp_path, *(tables if first == 0 else tables[::-1]))
    with pytest.raises(InputError, match=rf"part-{first}.parquet has no column 'size', and .*part-{1 - first}.parquet"):
        parquet.load(folder, 0)
    assert set(all_of(parquet.load(folder, 0, features=("id", "age")).train)[0]) == {"id", "age"}
    features, _ = all_of(parquet.load(folder, 0, features=("size",), missing="column").train)
    assert features["size"].reshape(2, 3)[:: 1 - 2 * first].tolist() == [[0, 0, 0], [0.5, 1.5, 2.5]]
    assert features["size.missing"].reshape(2, 3)[:: 1 - 2 * first].tolist() == [[1, 1, 1], [0, 0, 0]]
    with pytest.raises(InputError, match=r"has no column 'size', and .* has; give files of the same columns"):
        parquet.load(folder, 0, label="size")


NUMBERS = pa.array([1, 2, 3])
DAYS = pa.array([1, 2, 3], pa.date32())
ZONED = pa.timestamp("us", "UTC")


@pytest.mark.parametrize(
    ("parts", "values"),
    [
        ([NUMBERS.cast(pa.int32()), NUMBERS, NUMBERS.cast(pa.uint8())], [1, 2, 3]),
        ([NUMBERS.cast(pa.float32()), NUMBERS.cast(pa.float64())], [1, 2, 3]),
        ([NUMBERS.cast(pa.decimal128(20, 1)), NUMBERS.cast(pa.float16())], [1, 2, 3]),
        ([NUMBERS.cast(pa.string()), NUMBERS.cast(pa.string()).dictionary_encode()], [1, 2, 3]),
        ([NUMBERS.cast(pa.large_string()), NUMBERS.cast(pa.string()).cast(pa.binary())], [1, 2, 3]),
        (
            [NUMBERS.cast(pa.timestamp("ns")), NUMBERS.cast(pa.timestamp("ns")).cast(pa.timestamp("us"), safe=False)],
            [0] * 3,
        ),
        ([DAYS, DAYS.cast(pa.date64())], [1, 2, 3]),
        ([pa.array([[1]] * 3, pa.list_(pa.int8())), pa.array([[70_000]] * 3, pa.list_(pa.int64()))], [[1]] * 3),
        ([pa.array([[1]] * 3, pa.list_(pa.float32())), pa.array([[1]] * 3, pa.list_(pa.float64(), 1))], [[1]] * 3),
    ],
)
@pytest.mark.parametrize("null", [None, 0, 1])
def test_parts_of_types_that_can_be_widened_are_one_table(tmp_path, parts, values, null):
    tables = [table(3, x=part) for part in parts]
    if null is not None:
        tables.insert(null, table(3, x=pa.nulls(3)))
    for turn in (tables, tables[::-1]):
        features, _ = all_of(parquet.load(written(tmp_path, *turn), 0, features=("x",), missing="zero").train)
        rows = np.split(features["x"], len(turn))
        for part, row in zip(turn, rows, strict=True):
            first = np.zeros_like(values) if part.schema.field("x").type == pa.null() else values
            last = np.array(first) * 70_000 if part is tables[-1] and np.max(features["x"]) == 70_000 else first
            assert row.tolist() == np.array(last).tolist()


@pytest.mark.parametrize(
    "parts",
    [
        (NUMBERS, NUMBERS.cast(pa.float64())),
        (NUMBERS, NUMBERS.cast(pa.string())),
        (DAYS, NUMBERS.cast(pa.timestamp("us"))),
        (NUMBERS.cast(ZONED), NUMBERS.cast(pa.timestamp("us"))),
        (pa.array([[1]] * 3), NUMBERS),
        (pa.array([[1]] * 3), pa.array([[1.0]] * 3)),
        (pa.array([{"a": 1}] * 3), NUMBERS),
    ],
)
@pytest.mark.parametrize("turn", [1, -1])
def test_parts_of_types_that_cannot_be_widened_name_both_files(tmp_path, parts, turn):
    folder = written(tmp_path, *(table(3, x=part) for part in parts[::turn]))
    with pytest.raises(
        InputError, match=r"part-1.parquet: column 'x' is .*, and .* in .*part-0.parquet; write both in one"
    ):
        parquet.load(folder, 0)
    assert len(parquet.load(folder, 0, features=("id",)).train) == 6


def test_parts_without_rows_are_left_out(tmp_path, caplog):
    """Whatever they say of the columns: an engine writes no types where it has no values."""
    empty = pa.table({"id": pa.array([], pa.string()), "label": pa.array([], pa.null())})
    folder = written(tmp_path, table(0), table(3), empty, table(4, 3))
    (tmp_path / "part-4.parquet").write_bytes(b"")
    assert all_of(parquet.load(folder, 0).train)[0]["id"].tolist() == [*range(7)]
    assert [line for line in caplog.messages if "left out" in line] == [
        f"1 left out as empty: {folder}/part-4.parquet",
        f"2 left out as empty: {folder}/part-0.parquet, {folder}/part-2.parquet",
    ]


USERS = 16_777_216.0 + np.array([5, 6, 1, 7])


@pytest.mark.parametrize("missing", [None, float("nan")])
@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize("kind", [pa.float64(), pa.decimal128(20, 2)])
def test_whole_numbers_beyond_float32_are_ids(tmp_path, missing, statistics, kind):
    """As a data frame has ids where one is missing."""
    if missing is not None and kind != pa.float64():
        return
    users = pa.array([*USERS, missing]).cast(kind) if missing is None else pa.array([*USERS, missing], kind)
    folder = written(tmp_path, table(5, user=users), write_statistics=statistics, row_group_size=2)
    splits = parquet.load(folder, 0, missing="zero", keeps_ids=True)
    assert all_of(splits.train)[0]["user"].tolist() == [*USERS.astype(int), 0]
    assert splits.vocabulary["user"] == 16_777_224
    assert all_of(parquet.load(folder, 0, missing="zero").train)[0]["user"].tolist() == [2, 3, 1, 4, 0]
    with pytest.raises(BadRecordError, match="row 4: column 'user' has no value"):
        all_of(parquet.load(folder, 0).train)
    named = parquet.load(folder, 0, numbers=("user",), missing="zero")
    assert named.train.element_spec[0]["user"] == Spec((), np.float32)
    with pytest.raises(InputError, match=r"column 'user' has 16,777,223, and float32 tells .*numbers=user"):
        parquet.load(folder, 0, features=("user",), array=True)
    labels = parquet.load(folder, 0, label="user", features=("id",), missing="zero")
    assert all_of(labels.train)[1].tolist() == [*USERS.astype(int), 0]


def test_evaluation_reads_ids_as_training_does(tmp_path):
    train = written(tmp_path / "train", table(4, user=pa.array(USERS)))
    small = written(tmp_path / "small", table(3, user=pa.array([1.0, 2.0, 3.5])))
    source = parquet.load(train, 0, features=("user",), eval_data_dir=small, keeps_ids=True).evaluation
    assert source.read(np.arange(2))[0]["user"].tolist() == [1, 2]
    with pytest.raises(BadRecordError, match=r"row 2: column 'user' has 3.5, and integers up to 2\^53 are read"):
        all_of(source)
    whole = written(tmp_path / "whole", table(3, user=pa.array([1, 2, 3])))
    again = parquet.load(small, 0, features=("user",), eval_data_dir=whole)
    assert all_of(again.evaluation)[0]["user"].tolist() == [1, 2, 3]
    assert again.evaluation.element_spec == again.train.element_spec
    none = written(tmp_path / "none", table(3, user=pa.nulls(3)))
    again = parquet.load(small, 0, features=("user",), eval_data_dir=none, missing="zero")
    assert all_of(again.evaluation)[0]["user"].tolist() == [0, 0, 0]


def test_numbers_with_fractions_are_no_ids_however_large(tmp_path):
    folder = written(tmp_path, table(3, x=pa.array([2.0**24 + 1, 3e9, 0.5]), y=pa.array([1e20, 1e22, 5e30])))
    features, _ = all_of(parquet.load(folder, 0, features=("x", "y")).train)
    np.testing.assert_array_equal(features["x"], np.array([2.0**24 + 1, 3e9, 0.5], np.float32))
    assert features["y"].dtype == np.float32
    folder = written(tmp_path, table(2, x=pa.array([2.0**53 + 2, 1.0])))
    with pytest.raises(InputError, match=r"'x' holds whole numbers up to 9007199254740994 .*2\^53 .*numbers=x if"):
        parquet.load(folder, 0)


def test_integers_are_never_rounded_but_where_they_are_called_numbers(tmp_path):
    users = pa.array(USERS.astype(int))
    lists = pa.array([[int(user), 1] for user in USERS])
    folder = written(tmp_path / "train", table(4, user=users, lists=lists, debt=pa.array([-1, 2, 3, 4])))
    for name in ("user", "lists"):
        with pytest.raises(InputError, match=rf"column '{name}' has 16,777,223, and float32 tells whole numbers apart"):
            parquet.load(folder, 0, features=(name,), array=True)
        array, _ = all_of(parquet.load(folder, 0, features=(name,), array=True, numbers=(name,)).train)
        assert array[:, 0].tolist() == USERS.astype(np.float32).tolist()
    other = written(tmp_path / "eval", table(2, debt=pa.array([-(2**25), 1])))
    with pytest.raises(InputError, match=r"eval/part-0.parquet: column 'debt' has 33,554,432, and float32"):
        parquet.load(folder, 0, features=("debt",), eval_data_dir=other)


def test_folders_named_by_keys_are_columns(tmp_path):
    """As Hive, Spark and pandas lay out a table."""
    for place, number in (("day=2024-02-28", 0), ("day=2024-02-29", 3), ("day=__HIVE_DEFAULT_PARTITION__", 6)):
        (tmp_path / "train" / "half=1" / place).mkdir(parents=True)
        written(tmp_path / "train" / "half=1" / place, table(3, number))
    folder = str(tmp_path / "train")
    splits = parquet.load(folder, 0, missing="zero")
    features, _ = all_of(splits.train)
    assert features["id"].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert features["day"].tolist() == [19781] * 3 + [19782] * 3 + [0] * 3
    assert features["half"].tolist() == [1] * 9
    assert splits.vocabulary["half"] == 2
    other = parquet.load(folder, 0, label="half", missing="zero", eval_data_dir=f"{folder}/half=1/day=2024-02-29")
    assert all_of(other.evaluation)[0]["day"].tolist() == [19782] * 3
    assert all_of(other.evaluation)[1].tolist() == [1] * 3
    assert other.train.identity() != parquet.load(f"{folder}/half=1/*/*.parquet", 0, missing="zero").train.identity()
    (tmp_path / "eval" / "half=1" / "day=soon").mkdir(parents=True)
    written(tmp_path / "eval" / "half=1" / "day=soon", table(3))
    with pytest.raises(InputError, match=r"expected a date .* for day in the folder's name, as in .*, found 'soon'"):
        parquet.load(folder, 0, missing="zero", eval_data_dir=str(tmp_path / "eval"))
