"""Ratings: the same data from any layout, split as asked, ids numbered by the training split alone."""

import numpy as np
import pytest

from crankshaft.input import ratings
from crankshaft.input.checks import InputError

# By time, the last of ten is d's; b comes before a in the file.
ROWS = [("b", "x", 1.0, 50), ("a", "x", 2.5, 40), ("a", "y z", 3.0, 30), ("d", "w", 4.0, 99), ("c", "y z", 5.0, 10)]
ROWS += [(user, "x", 1.5, 20) for user in "abcba"]
TYPED = "user_id:token\titem_id:token\trating:float\ttimestamp:float"


def text(separator="\t", header=(), rows=ROWS):
    return "\n".join([*header, *(separator.join(map(str, row)) for row in rows)]) + "\n"


@pytest.fixture
def load(tmp_path):
    """`load(content, name=..., **arguments)`: the splits of one file."""

    def load(content, name="ratings.tsv", seed=0, **arguments):
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return ratings.load(str(path), seed, **arguments)

    return load


@pytest.fixture
def refusal(load):
    """The message with which a file is refused: always a single line."""

    def refusal(content, **arguments):
        with pytest.raises(InputError) as caught:
            load(content, **arguments)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return refusal


def check_rows(splits):
    """That the splits are ROWS', split by time."""
    features, labels = splits.train
    # By first appearance in training: b a c, and x, "y z".
    np.testing.assert_array_equal(features["user"], [1, 2, 2, 3, 2, 1, 3, 1, 2])
    np.testing.assert_array_equal(features["item"], [1, 1, 2, 2, 1, 1, 1, 1, 1])
    np.testing.assert_array_equal(labels, [1, 2.5, 3, 5, 1.5, 1.5, 1.5, 1.5, 1.5])
    held_out, held_out_labels = splits.evaluation
    assert (held_out["user"].tolist(), held_out["item"].tolist(), held_out_labels.tolist()) == ([0], [0], [4.0])
    assert splits.num_classes is None
    assert splits.vocabulary == {"user": 4, "item": 3}
    for array in (features["user"], features["item"], held_out["user"]):
        assert array.dtype == np.int64
    assert labels.dtype == held_out_labels.dtype == np.float32


def reordered():
    return text(",", ["rating,ts,note,movieId,userId"], [(r, t, "-", item, user) for user, item, r, t in ROWS])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.tsv", text()),
        ("a.data", text()),
        ("a.inter", text(header=[TYPED])),
        ("a.csv", text(",")),
        ("a.csv", text(",", ["userId,movieId,rating,timestamp"])),
        ("a.csv", text(",", ['"User ID","Item ID","Rating","Timestamp"'])),
        ("a.csv", reordered()),
        ("a.dat", text("::")),
        ("a.inter", "\ufeff" + text(header=[TYPED])),
        ("a.csv", text(",").replace("y z", '"y z"')),
        ("a.csv", text()),  # tabs under another name are told by the line
    ],
)
def test_any_layout_gives_the_same_examples(load, name, content):
    check_rows(load(content, name))


def test_quotes_hold_commas_and_quotes_in_csv_and_mean_nothing_between_tabs(load):
    rows = [("u", item, 1, time) for time, item in enumerate(['"a,b"', '"a,b"', '"say ""a"""', "a", "last"])]
    assert load(text(",", rows=rows), "a.csv").train[0]["item"].tolist() == [1, 1, 2, 3]
    rows = [("u", item, 1, time) for time, item in enumerate(['"a', '"a', "a", 'a"', "last"])]
    assert load(text(rows=rows)).train[0]["item"].tolist() == [1, 1, 2, 3]


def test_ids_are_any_text(load):
    rows = [("Zoë", "映画", 1, 1), ("zoe", "07", 2, 2), ("Zoë", "7", 3, 3), ("q", "q", 1, 4)]
    features, _ = load(text(rows=rows)).train
    assert features["user"].tolist() == [1, 2, 1]
    assert features["item"].tolist() == [1, 2, 3]


def test_files_of_a_folder_are_one_table_each_with_its_own_layout(tmp_path):
    (tmp_path / "1.csv").write_text(text(",", ["user,item,rating,timestamp"], ROWS[:3]))
    (tmp_path / "2.inter").write_text(text("\t", [TYPED], ROWS[3:6]))
    (tmp_path / "10.data").write_text(text("::", [], ROWS[6:]))
    (tmp_path / "README").write_text("not a table")
    check_rows(ratings.load(str(tmp_path), 0))


def test_time_puts_the_latest_into_evaluation_and_ties_by_their_order(load):
    rows = [("u", "i", index, time) for index, time in enumerate([9, 5, 5, 1, 5, 5, 5, 5, 2, 3])]
    assert load(text(rows=rows), eval_share=0.3).evaluation[1].tolist() == [0, 6, 7]


def test_random_split_hangs_on_the_seed_alone_and_needs_no_timestamps(load):
    rows = [(f"u{i % 7}", f"i{i}", i) for i in range(200)]
    one, same, other = (load(text(rows=rows), seed=seed, split="random") for seed in (1, 1, 2))
    assert len(one.evaluation[1]) == 20
    assert sorted([*one.train[1], *one.evaluation[1]]) == list(range(200))
    np.testing.assert_array_equal(one.evaluation[1], same.evaluation[1])
    assert set(one.evaluation[1]) != set(other.evaluation[1])
    assert one.vocabulary == {"user": 8, "item": 181}
    assert one.train[0]["item"].tolist() == list(range(1, 181))
    assert not one.evaluation[0]["item"].any()


@pytest.mark.parametrize(("share", "held_out"), [(0.001, 1), (0.25, 2), (0.999, 9)])
def test_neither_split_is_ever_empty(load, share, held_out):
    splits = load(text(), eval_share=share)
    assert (len(splits.train[1]), len(splits.evaluation[1])) == (10 - held_out, held_out)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"a\tx\t3", "expected 4 fields, as the header has, found 3 ('a\\tx\\t3')"),
        (b"a\tx\t3\t4\t5", "expected 4 fields, as the header has, found 5"),
        (b"a\tx\tgood\t4", "rating: expected a number, found 'good'"),
        (b"a\tx\t\t4", "rating: expected a number, found ''"),
        (b"a\tx\tnan\t4", "rating: expected a number, found 'nan'"),
        (b"a\tx\t-inf\t4", "rating: expected a number, found '-inf'"),
        (b"a\tx\t1e39\t4", "rating: expected a number, found '1e39'"),
        (b"a\tx\t3\tnoon", "timestamp: expected a number, of seconds, found 'noon'"),
        (b"\tx\t3\t4", "user: expected the id of a user, found ''"),
        (b"a\t\t3\t4", "item: expected the id of an item, found ''"),
        (b"\xff\tx\t3\t4", "expected UTF-8, found '\\\\xff\\tx\\t3\\t4'"),
    ],
)
def test_a_malformed_line_is_named_and_can_be_skipped(load, refusal, line, problem):
    lines = text(header=[TYPED]).encode().split(b"\n")
    content = b"\n".join([*lines[:4], line, *lines[4:]])
    message = refusal(content)
    assert f"ratings.tsv:5: {problem}" in message
    assert "input_arg max_bad_records=10" in message
    check_rows(load(content, max_bad_records=1))


def test_a_first_line_that_is_malformed_is_not_taken_for_a_header(refusal):
    assert "ratings.tsv:1: rating: expected a number, found 'x'" in refusal("1\t2\tx\t4\n" + text())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "ratings.tsv is empty"),
        ("\n\n", "ratings.tsv:1: expected user, item, rating[, timestamp] between tabs, commas or '::', found ''"),
        (TYPED, "has a header and no records"),
        (text(rows=ROWS[:1]), "holds 1 usable records: expected at least 2"),
        ("a;b;c\n", "ratings.tsv:1: expected user, item, rating[, timestamp] between tabs, commas or '::'"),
        ("a\tb\tbad\n", "ratings.tsv:1: expected columns user, item, rating[, timestamp], found no user in 'a,b,bad'"),
        ("movieId,title,genres\n1,Heat,Crime\n", "pass the file of ratings as data_dir"),
        ("user\tuser_id\titem\trating\n", "expected one column for user, found 'user' and 'user_id'"),
        ("1\t2\t3\t4\t5\n", "expected 3 or 4 columns, since the first line does not name them, found 5"),
        ("a\tb\t1\n" * 3, "split=time needs a fourth column, the timestamp, found 'a\\tb\\t1'; use input_arg split="),
        ("user,item,rating\na,b,1\n", "split=time needs a fourth column, the timestamp, found 'user,item,rating'"),
        (b"\xff\xfeu\0s\0e\0r\0", "ratings.tsv:1: expected UTF-8"),
    ],
)
def test_files_without_usable_ratings_are_refused(refusal, content, message):
    assert message in refusal(content)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "user"}, "split=user is unknown; use time or random"),
        *(({"eval_share": share}, f"eval_share={share:g} is not a share") for share in (0.0, 1.0, float("nan"))),
        ({"max_bad_records": -1}, "max_bad_records=-1 is too small"),
    ],
)
def test_arguments_out_of_range_are_refused(refusal, arguments, message):
    assert message in refusal(text(), **arguments)
