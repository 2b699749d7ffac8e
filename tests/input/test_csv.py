"""CSV: types are found over all files, records are read at random from a typed form, mistakes name file and record."""

import gzip
import re

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.data.preprocessing import MISSING_WORDS
from crankshaft.engine.data.source import Spec
from crankshaft.input import csv
from crankshaft.input.checks import InputError
from crankshaft.input.tables import fitting

arrow_csv = pytest.importorskip("pyarrow.csv")

HEADER = "id,price,city,label\n"


def written(folder, *texts, name="{}.csv"):
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        (folder / name.format(number)).write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(folder)


def records(first, stop):
    return "".join(f"{n},{n / 4},city {n % 3},{n % 2}\n" for n in range(first, stop))


def all_of(source):
    return source.read(np.arange(len(source)))


@pytest.mark.parametrize("rows", [1, 8191, 8192, 8193, 20_000])
def test_records_are_read_in_any_order(tmp_path, rows):
    half = rows // 2
    texts = [HEADER + records(0, half), HEADER + records(half, rows)] if half else [HEADER + records(0, rows)]
    splits = csv.load(written(tmp_path, *texts), 0)
    assert splits.vocabulary == {"id": rows, "city": min(rows, 3) + 1}
    assert splits.preprocessing.words == {"city": [b"city 0", b"city 1", b"city 2"][:rows]}
    source = splits.train
    assert source.element_spec == (
        {"id": Spec((), np.int64), "price": Spec((), np.float32), "city": Spec((), np.int64)},
        Spec((), np.int64),
    )
    indices = np.random.default_rng(0).permutation(rows)
    features, labels = source.read(indices)
    np.testing.assert_array_equal(features["id"], indices)
    np.testing.assert_array_equal(features["price"], (indices / 4).astype(np.float32))
    np.testing.assert_array_equal(features["city"], indices % 3 + 1)
    np.testing.assert_array_equal(labels, indices % 2)
    assert [features[name].dtype for name in features] == [np.int64, np.float32, np.int64]
    np.testing.assert_array_equal(source.between(rows // 3, rows).read_labels(), np.arange(rows)[rows // 3 :] % 2)


@pytest.mark.parametrize(
    ("fields", "kind", "values"),
    [
        (["1", "2", " 3"], np.int64, [1, 2, 3]),
        (["1", "-2", "+3"], np.float32, [1, -2, 3]),
        (["9223372036854775807", "0", "1"], np.int64, [2**63 - 1, 0, 1]),
        (["9223372036854775808", "0", "1"], object, [b"9223372036854775808", b"0", b"1"]),
        (["9223372036854775808", "0", "1.5"], np.float32, [2.0**63, 0, 1.5]),
        (["-9007199254740993", "0", "1"], np.int64, [-9007199254740993, 0, 1]),
        (["00123", "2", "3"], object, [b"00123", b"2", b"3"]),
        (["1.5", "2", "007"], object, [b"1.5", b"2", b"007"]),
        (["0", "-0", "0.5"], np.float32, [0, 0, 0.5]),
        (["0x10", "2", "3"], object, [b"0x10", b"2", b"3"]),
        (["1", "2", "2.5"], np.float32, [1, 2, 2.5]),
        (["1e3", "-.5", "+2E2"], np.float32, [1000, -0.5, 200]),
        (["1", "2.5", "x"], object, [b"1", b"2.5", b"x"]),
        (["1_0", "2", "3"], object, [b"1_0", b"2", b"3"]),
        (["", "", ""], object, [b"", b"", b""]),
        (["é", "", "雪"], object, ["é".encode(), b"", "雪".encode()]),
        (["1970-01-03", "2024-02-29", "1969-12-31"], np.float32, [2, 19782, -1]),
        (["1970-01-03", "2024-02-30", "1969-12-31"], object, [b"1970-01-03", b"2024-02-30", b"1969-12-31"]),
        (["2", "2024-02-29", ""], object, [b"2", b"2024-02-29", b""]),
    ],
)
def test_types_are_found_over_all_files(tmp_path, fields, kind, values):
    texts = [f"x,label\n{field},1\n" for field in fields]
    source = csv.load(written(tmp_path, *texts), 0, text="keep").train
    assert source.element_spec[0]["x"] == Spec((), kind)
    assert all_of(source)[0]["x"].tolist() == values


def test_times_are_days_and_seconds(tmp_path):
    local = "x,label\n1970-01-02 00:00:01.5,1\n2024-02-29T23:59:59,1\n1969-12-31,0\n"
    features, _ = all_of(csv.load(written(tmp_path / "local", local), 0).train)
    assert features["x"].tolist() == [1, 19782, -1]
    assert features["x.seconds"].tolist() == [1.5, 86399, 0]
    zoned = "x,label\n1970-01-02T00:00:01Z,1\n1970-01-02 01:00:00+02:00,1\n"
    features, _ = all_of(csv.load(written(tmp_path / "zoned", zoned), 0).train)
    assert (features["x"].tolist(), features["x.seconds"].tolist()) == ([1, 0], [1, 82800])
    mixed = csv.load(written(tmp_path / "mixed", local + "1970-01-02T00:00:01Z,1\n"), 0)
    assert mixed.preprocessing.words["x"][0] == b"1969-12-31"


def test_a_late_value_decides_a_type(tmp_path):
    text = "x,label\n" + "1,0\n" * 3000 + "2.5,0\n"
    assert csv.load(written(tmp_path, text), 0).train.element_spec[0]["x"].dtype == np.float32


@pytest.mark.parametrize("marker", ["", "NA", "NULL", "<NA>", "None", "nan", "-1.#IND", "#N/A N/A", " n/a "])
def test_the_markers_of_pandas_are_missing_values(tmp_path, marker):
    """Of columns of text they are words: NA is a country, None a diagnosis."""
    rows = [(f"{n}", f"{n / 4}", f"2024-03-{n % 9 + 1:02}", f"c{n % 3}") for n in range(40)]
    rows[13] = (marker,) * 4
    text = "id,price,day,city,label\n" + "".join(",".join(row) + ",1\n" for row in rows)
    splits = csv.load(written(tmp_path, text), 0, missing="column")
    features, _ = all_of(splits.train)
    assert splits.vocabulary["id"] == 40
    assert (features["id"][[12, 13, 14]]).tolist() == [12, 0, 14]
    assert features["price"][[12, 13, 14]].tolist() == [3, 0, 3.5]
    assert features["day.missing"].nonzero()[0].tolist() == features["price.missing"].nonzero()[0].tolist() == [13]
    assert splits.preprocessing.words["city"] == sorted({b"c0", b"c1", b"c2", marker.encode()} - {b""})
    later = splits.preprocessing({"day": [marker, "2024-03-02"]})
    assert later["day.missing"].tolist() == [1, 0]
    assert f"{marker.strip()!r} is a word like others" in splits.columns or not marker


def test_the_markers_are_those_of_pandas_and_pyarrow():
    readers = pytest.importorskip("pandas").io.parsers.readers
    assert {*MISSING_WORDS} == {*readers.STR_NA_VALUES} > {*arrow_csv.ConvertOptions().null_values}


@pytest.mark.parametrize(
    "field",
    ["1,75", "1.234,5", "1,234", "12,345,678.5", "1 234", "1'234.5", "45%", "4.5 %", "$12", "-3 \N{EURO SIGN}", "?"],
)
def test_a_number_that_is_written_otherwise_is_one_line_with_its_row(tmp_path, field):
    """Not a category of as many words as there are numbers, unless `texts` says so."""
    header = "x;label\n"
    others = "".join(f"{n / 8};1\n" for n in range(20))
    folder = written(tmp_path, header + others, header + others + f"NA;1\n{field};1\n" + others + f"{field}0;1\n")
    with pytest.raises(InputError) as caught:
        csv.load(folder, 0, delimiter=";")
    assert re.search(f"1.csv, row 22: column 'x': expected a number .* {re.escape(repr(field))}", str(caught.value))
    assert "input_arg=texts=x" in str(caught.value)
    assert f"{field}0".encode() in csv.load(folder, 0, delimiter=";", texts=("x",)).preprocessing.words["x"]
    assert csv.load(folder, 0, delimiter=";", features=("label",), label="none").vocabulary == {"label": 2}
    if field != "?":
        alone = written(tmp_path / "alone", header + f"{field};1\n" * 3)
        with pytest.raises(InputError, match=r"0.csv, row 1: column 'x': expected a number"):
            csv.load(alone, 0, delimiter=";")


@pytest.mark.parametrize("field", ["soon", "29.02.2024", "0"])
def test_what_is_no_date_among_dates_is_one_line(tmp_path, field):
    days = "".join(f"2024-02-{n + 10} 12:00,1\n" for n in range(9))
    folder = written(tmp_path, "x,label\n" + days + f"NA,1\n{field},1\n")
    with pytest.raises(InputError, match=rf"0.csv, row 11: column 'x': expected a date .*, found '{field}'"):
        csv.load(folder, 0)
    assert len(csv.load(folder, 0, texts=("x",)).preprocessing.words["x"]) == 11
    zones = written(tmp_path / "zones", "x,label\n" + days + "2024-02-29 12:00Z,1\n")
    assert "text (not dates of one kind)" in csv.load(zones, 0).columns


@pytest.mark.parametrize("field", ["10.0.0.{}", "2.{}.1", "A{}", "12:0{}", "0{}.03.2024", "98101-123{}"])
def test_what_only_looks_like_numbers_is_text(tmp_path, field):
    text = "x,label\n" + "".join(field.format(n) + ",1\n" for n in range(10)) + "7,1\n"
    assert len(csv.load(written(tmp_path, text), 0).preprocessing.words["x"]) == 11


def test_a_header_within_the_records_is_one_line(tmp_path):
    """Files that `cat` has made one: numbers would be words."""
    folder = written(tmp_path, HEADER + records(0, 3), HEADER + records(3, 9) + HEADER + records(9, 12))
    with pytest.raises(InputError, match=r"1.csv, row 7: expected values, found the header again; remove it"):
        csv.load(folder, 0)


@pytest.mark.parametrize("name", ["", "Unnamed: 0", "__index_level_0__"])
def test_the_index_of_a_data_frame_is_left_out(tmp_path, caplog, name):
    folder = written(tmp_path, f"{name},x,label\n" + "".join(f"{n + 7},{n % 3},1\n" for n in range(20)))
    features, _ = all_of(csv.load(folder, 0).train)
    assert [*features] == ["x"]
    name = name or "Unnamed: 0"
    assert caplog.messages == [f"left out as pandas' index: {name}"]
    assert all_of(csv.load(folder, 0, features=(name,)).train)[0][name].tolist() == [*range(7, 27)]
    twice = written(tmp_path / "twice", ",Unnamed: 0,x,label\n1,2,3,4\n")
    assert [*all_of(csv.load(twice, 0).train)[0]] == ["x"]


def test_files_without_records_are_left_out(tmp_path, caplog):
    folder = written(tmp_path, "", HEADER + records(0, 3), HEADER, "\n\n", HEADER + records(3, 5))
    for _ in range(2):  # also where the table is prepared already
        caplog.clear()
        assert all_of(csv.load(folder, 0).train)[0]["id"].tolist() == [*range(5)]
        assert caplog.messages[:2] == [
            f"1 left out as empty: {folder}/0.csv",
            f"2 left out as empty: {folder}/2.csv, {folder}/3.csv",
        ]


def test_columns_may_stand_in_another_order(tmp_path):
    other = "label,city,id,price\n1,city 1,3,0.75\n"
    folder = written(tmp_path / "train", HEADER + records(0, 3), other)
    features, labels = all_of(csv.load(folder, 0, eval_data_dir=written(tmp_path / "eval", other)).evaluation)
    assert (features["id"].tolist(), features["city"].tolist(), labels.tolist()) == ([3], [2], [1])
    assert all_of(csv.load(folder, 0).train)[0]["price"].tolist() == [0, 0.25, 0.5, 0.75]


def test_folders_named_by_keys_are_columns(tmp_path):
    """As Hive and Spark lay out a table; a folder above that all files are in says nothing of them."""
    for year, place in ((2023, "a%2Fb"), (2024, "__HIVE_DEFAULT_PARTITION__"), (2024, "c")):
        folder = tmp_path / "run=3" / "table" / f"year={year}" / f"place={place}"
        folder.mkdir(parents=True)
        written(folder, HEADER + records(year, year + 2))
    train = csv.load(str(tmp_path / "run=3" / "table"), 0, numbers=("year",), text="keep")
    features, _ = all_of(train.train)
    assert [*features] == ["id", "price", "city", "year", "place"]
    assert features["year"].tolist() == [2023, 2023, 2024, 2024, 2024, 2024]
    assert features["place"].tolist() == [b"a/b", b"a/b", b"", b"", b"c", b"c"]
    part = str(tmp_path / "run=3" / "table" / "year=2024" / "place=c")
    both = csv.load(str(tmp_path / "run=3" / "table"), 0, numbers=("year",), text="keep", eval_data_dir=part)
    assert all_of(both.evaluation)[0]["year"].tolist() == [2024, 2024]
    assert [*all_of(csv.load(part, 0).train)[0]] == ["id", "price", "city"]
    globbed = csv.load(str(tmp_path / "run=3" / "table" / "*" / "place=c" / "*.csv"), 0, numbers=("year",))
    assert all_of(globbed.train)[0]["year"].tolist() == [2024, 2024]
    written(tmp_path / "run=3" / "table", HEADER + records(0, 1))
    with pytest.raises(InputError, match=r"table/0.csv is in no folder year=..., and .*year=2023/.* is"):
        csv.load(str(tmp_path / "run=3" / "table"), 0)


def test_more_words_than_are_fitted_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(fitting, "_MOST_WORDS", 5)
    folder = written(tmp_path, "y,label\n" + "".join(f"c{n},1\n" for n in range(9)))
    with pytest.raises(InputError, match=r"'y' has more than 5 different words, .*text=hash model_arg=hash_buckets="):
        csv.load(folder, 0)
    assert len(all_of(csv.load(folder, 0, text="hash").train)[1]) == 9


def test_each_column_and_what_is_made_of_it_is_said(tmp_path):
    rows = "".join(f"{n},{n % 2},{n / 4},0{n % 7},2024-01-0{n % 9 + 1},x,{n % 3}\n" for n in range(20))
    folder = written(tmp_path, "row,id,price,zip,day,city,label\n" + rows)
    lines = csv.load(folder, 0, features=("row", "id", "price", "zip", "day")).columns.splitlines()
    said = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[1:-1]}
    assert said == {
        "row": "int64 id of 20",
        "id": "int64 id of 2",
        "price": "float32 number",
        "zip": "text (leading zeros) category of 7 words",
        "day": "date days since 1970-01-01",
        "city": "text left out",
        "label": "int64 label of 3 classes",
    }
    assert lines[-1].startswith("all values of row differ")
    assert lines[-1].endswith("input_arg=features=id,price,zip,day")


QUOTED = ['a "word"', "two\nlines", "with\r\nboth", "a,comma", ""]
AS_QUOTED = "".join('"' + field.replace('"', '""') + '",1\r\n' for field in QUOTED)


@pytest.mark.parametrize(
    ("text", "delimiter", "fields"),
    [
        ("\ufeffx , label\r\n\r\n" + AS_QUOTED + "\r\n", ",", QUOTED),
        ('x,label\n5" pipe,0\n"6"" pipe",1\n', ",", ['5" pipe', '6" pipe']),
        ("x::label\na:b::1\n::0\n" + "c::1\n" * 3, "::", ["a:b", "", "c", "c", "c"]),
        # As blocks that are parsed grow, no record is read twice.
        *(
            ("x,label\n" + "a,0\n" * 3000 + "b" * length + ",1\nc,1\n", ",", ["a"] * 3000 + ["b" * length, "c"])
            for length in (131_073, 5_000_000)
        ),
    ],
    ids=["quoted", "a quote within", "half a delimiter", "a long field", "a longer one"],
)
def test_fields_are_read_as_they_are_written(tmp_path, text, delimiter, fields):
    source = csv.load(written(tmp_path, text), 0, delimiter=delimiter, text="keep").train
    assert all_of(source)[0]["x"].tolist() == [field.encode() for field in fields]


@pytest.mark.parametrize(("delimiter", "characters"), [(";", ";"), ("tab", "\t"), ("::", "::")])
def test_other_delimiters_gzip_and_names_by_an_argument_make_no_difference(tmp_path, delimiter, characters):
    expected = all_of(csv.load(written(tmp_path / "plain", HEADER + records(0, 3000)), 0).train)
    for header, names in ((HEADER, ()), ("", tuple(HEADER.strip().split(",")))):
        text = gzip.compress((header + records(0, 3000)).replace(",", characters).encode())
        folder = written(tmp_path / f"packed{len(names)}", text, name="{}.tsv.gz")
        source = csv.load(folder, 0, delimiter=delimiter, names=names).train
        tf.nest.map_structure(np.testing.assert_array_equal, all_of(source), expected)
    with pytest.raises(InputError, match=r"0.tsv.gz:1: expected 3 fields, found 4 "):
        csv.load(folder, 0, delimiter=delimiter, names=("id", "price", "label"))
    with pytest.raises(InputError, match="names=id,id has one name twice"):
        csv.load(folder, 0, names=("id", "id"))


@pytest.mark.parametrize("columns", [300, pytest.param(30_000, marks=pytest.mark.slow)])
def test_a_table_of_many_columns_is_read(tmp_path, columns):
    """Twice as many take twice as long: nothing looks through all columns for each of them."""
    header = ",".join(f"c{n}" for n in range(columns))
    rows = "".join(",".join(["1.5"] * columns) + f",{n}\n" for n in range(3))
    source = csv.load(written(tmp_path, f"{header},label\n{rows}"), 0, array=True).train
    features, labels = all_of(source)
    assert (features.shape, labels.tolist()) == ((3, columns), [0, 1, 2])


def test_evaluation_has_the_types_of_training(tmp_path):
    folder = written(tmp_path / "train", "x,y,label\n1.5,a,0\n")
    splits = csv.load(folder, 0, eval_data_dir=written(tmp_path / "eval", "x,y,label\n1,007,1\n"), text="keep")
    features, _ = all_of(splits.evaluation)
    assert (features["x"].tolist(), features["y"].tolist()) == ([1.0], [b"007"])
    assert splits.num_classes == 2
    bad = written(tmp_path / "bad", "x,y,label\n1,b,1\n2,b,0.5\n")
    with pytest.raises(InputError, match=r"bad/0.csv, row 2: column 'label': expected an integer, as in .*train/0.cs"):
        csv.load(folder, 0, eval_data_dir=bad)
    other = written(tmp_path / "other", "y,z,label\nb,1,1\n")
    with pytest.raises(InputError, match=r"other/0.csv has other columns than .*train/0.csv \(unknown: z\); remove"):
        csv.load(folder, 0, eval_data_dir=other)


@pytest.mark.parametrize(
    ("texts", "line"),
    [
        (
            [HEADER + records(0, 2) + "7,1,x\n"],
            "0.csv:4: expected 4 fields, as the header has, found 3 ('7,1,x'); mend it",
        ),
        (
            [HEADER + '1,2,"two\nlines",1,5\n'],
            "0.csv:3: expected 4 fields, as the header has, found 5 ('1,2,two\\nlines,1,5'); mend it",
        ),
        ([HEADER + '1,2,"x,1\n'], "0.csv:2: unexpected end of data; mend the row, a quote may not be closed"),
        ([HEADER + '1,2,"x"y,1\n'], "0.csv:2: ',' expected after '\"'; mend the row"),
        ([HEADER], "0.csv has a header and no rows; give files that have some"),
        ([""], "0.csv is empty: expected rows, found 0 bytes"),
        (["id,id,label\n1,2,3\n"], "0.csv:1: expected a header, a name for each column, found two columns 'id'"),
        (["id,,label\n1,2,3\n"], "0.csv:1: expected a header, a name for each column, found a column without a name"),
        ([HEADER + records(0, 1), "id,label\n1,1\n"], "1.csv:1: the header is id, label, and that of"),
        (["\n\n"], "0.csv is empty: expected a header and rows, found nothing"),
        ([b"\x1f\x8b\x08"], "0.csv is not a whole gzip file: expected one that unpacks, found"),
        ([b"x,label\n\xff,1\n"], "expected text in UTF-8, found 0xff; convert the file"),
        (
            ["x,y\n1,2\n"],
            "0.csv has no column 'label'; name the label's by input_arg=label=NAME, one of x, y, or none",
        ),
    ],
)
def test_mistakes_are_one_line(tmp_path, texts, line):
    with pytest.raises(InputError) as caught:
        csv.load(written(tmp_path, *texts), 0)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
    kept = tmp_path / ".crankshaft"
    assert not kept.exists() or not [*kept.iterdir()] or "no column" in line


def test_a_line_between_two_character_delimiters_that_is_not_utf_8_is_named(tmp_path):
    with pytest.raises(InputError, match=r"0\.csv:3: expected UTF-8, to which .*, found '1::caf\\\\xe9'; mend it"):
        csv.load(written(tmp_path, b"label::name\n0::tea\n1::caf\xe9\n"), 0, delimiter="::")


@pytest.mark.parametrize("delimiter", ["", "ab", '"', "\n", "é"])
def test_what_is_no_delimiter_is_one_line(tmp_path, delimiter):
    with pytest.raises(InputError, match="is not a delimiter; give one character of ASCII, it twice, or tab"):
        csv.load(written(tmp_path, HEADER + records(0, 1)), 0, delimiter=delimiter)
