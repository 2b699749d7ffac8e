"""Criteo's click logs: fields read as they are, categories hashed for ever alike, a signal in what is sampled."""

import gzip
import sys

import numpy as np
import pytest

from crankshaft.input import criteo
from crankshaft.input.checks import InputError
from tests.arrays import assert_same


def line(label="1", integers=None, categories=None) -> str:
    """A line with the given fields by their position, from 0; the others missing."""
    fields = [label, *[""] * 39]
    for index, value in (integers or {}).items():
        fields[1 + index] = str(value)
    for index, value in (categories or {}).items():
        fields[14 + index] = value
    return "\t".join(fields)


def lines(count: int) -> list[str]:
    return [line(str(i % 3 % 2), {0: i, 12: -1}, {0: f"{i:08x}", 25: "68fd1e64"}) for i in range(count)]


@pytest.fixture
def load(tmp_path):
    def load(content, name="train.txt", **arguments):
        text = "\n".join(content) if isinstance(content, list) else content
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return criteo.load(str(tmp_path / name), 0, **arguments)

    return load


def whole(splits):
    """Both splits as one: dense, categories, labels."""
    (some, some_labels), (others, other_labels) = splits.train, splits.evaluation
    features = [np.concatenate([some[name], others[name]]) for name in ("dense", "categories")]
    return *features, np.concatenate([some_labels, other_labels])


def test_fields_become_logarithms_ids_and_labels(load):
    content = [line("1", {0: 0, 1: 1, 12: 99}, {0: "05db9164", 25: "5"}), line("0", {0: -3}), line("0", {0: 2**62})]
    splits = load(content, hash_buckets=1000)
    dense, categories, labels = whole(splits)
    assert (dense.dtype, categories.dtype, labels.dtype) == (np.float32, np.int64, np.float32)
    assert (dense.shape, categories.shape) == ((3, 13), (3, 26))
    np.testing.assert_array_equal(labels, [1, 0, 0])
    np.testing.assert_allclose(dense[0, [0, 1, 2, 12]], [0, np.log(2), 0, np.log(100)], rtol=1e-6)
    np.testing.assert_allclose(dense[1:, 0], [0, 62 * np.log(2)], rtol=1e-6)
    assert (categories[0] > 0).nonzero()[0].tolist() == [0, 25]
    assert not categories[1:].any()
    assert splits.num_classes == 2
    assert splits.vocabulary == {"categories": 1000}


def test_the_hash_is_the_same_in_every_column_version_and_process(load):
    _, categories, _ = whole(load([line(categories={0: "68fd1e64", 9: "68FD1E64", 25: "0"}), line()]))
    assert categories[0, [0, 9, 25]].tolist() == [11802, 11802, 11258]
    assert categories[0, 0] == categories[0, 9]


def test_hashes_fill_the_buckets_evenly_and_leave_0_to_the_missing(load):
    _, categories, _ = whole(load(lines(20_000), hash_buckets=11))
    counts = np.bincount(categories[:, 0], minlength=11)
    assert counts[0] == 0
    # 2,000 in each of ten; 6 standard deviations of a binomial count.
    assert np.abs(counts[1:] - 2000).max() < 6 * np.sqrt(2000 * 0.9)
    assert categories.max() == 10


def test_the_last_share_of_the_lines_is_for_evaluation(load):
    splits = load(lines(50), eval_share=0.2)
    assert len(splits.train[1]) == 40
    np.testing.assert_allclose(splits.evaluation[0]["dense"][:, 0], np.log1p(np.arange(40, 50)), rtol=1e-6)


def test_days_are_read_in_order_and_other_files_left_alone(tmp_path):
    content = lines(30)
    for name, part in (("day_2", content[:10]), ("day_10", content[20:]), ("day_9.gz", content[10:20])):
        text = "\n".join(part).encode()
        (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    (tmp_path / "readme.txt").write_text("not data")
    dense, _, _ = whole(criteo.load(str(tmp_path), 0))
    np.testing.assert_allclose(dense[:, 0], np.log1p(np.arange(30)), rtol=1e-6)


def test_any_text_file_will_do_where_none_has_criteos_name(tmp_path):
    (tmp_path / "sample.txt").write_text("\n".join(lines(5)))
    (tmp_path / "notes.md").write_text("not data")
    assert len(whole(criteo.load(str(tmp_path), 0))[2]) == 5


@pytest.mark.parametrize(("examples", "expected"), [(2, 2), (25, 25), (30, 30), (1000, 30), (0, 30)])
def test_only_the_first_examples_are_taken(load, examples, expected):
    dense, _, _ = whole(load(lines(30), examples=examples))
    np.testing.assert_allclose(dense[:, 0], np.log1p(np.arange(expected)), rtol=1e-6)


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (line() + "\t", "expected 40 fields, found 41 ('1\\t\\t"),
        (line()[2:], "expected 40 fields, found 39"),
        (line("2"), "label: expected a label 0 or 1, found '2'"),
        (line(""), "label: expected a label 0 or 1, found ''"),
        (line(integers={0: "1.5"}), "I1: expected an integer or nothing, found '1.5'"),
        (line(integers={12: 2**63}), "I13: expected an integer or nothing, found '9223372036854775808'"),
        (line(integers={3: "9" * 400}), "I4: expected an integer or nothing, found '9999"),
        (line(categories={0: "xyz"}), "C1: expected up to 8 hexadecimal digits or nothing, found 'xyz'"),
        (
            line(categories={25: "123456789"}),
            "C26: expected up to 8 hexadecimal digits or nothing, found '123456789'",
        ),
        (
            line(categories={7: "12\0"}),
            "C8: expected up to 8 hexadecimal digits or nothing, found '12\\x00'"
            if sys.version_info >= (3, 11)
            else "expected no NUL, which Python 3.10 can't read, found ",
        ),
        (line(categories={7: "é"}), "C8: expected up to 8 hexadecimal digits or nothing, found 'é'"),
    ],
)
def test_a_malformed_line_is_named_and_can_be_skipped(load, bad, problem):
    content = [*lines(30)[:7], bad, *lines(30)[7:]]
    with pytest.raises(InputError) as caught:
        load(content)
    assert "train.txt:8: " in str(caught.value)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)
    assert_same(whole(load(content, max_bad_records=1)), whole(load(lines(30))))


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "is empty"), ("\n", "has no rows"), ([line()], "holds 1 usable rows: expected at least 2")],
)
def test_files_without_lines_enough_are_refused(load, content, message):
    with pytest.raises(InputError, match=message):
        load(content)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"examples": -1}, "examples=-1 is too small"),
        ({"examples": 1}, "examples=1 holds 1 usable rows"),
        ({"hash_buckets": 1}, "hash_buckets=1 is too small; use at least 2"),
        ({"eval_share": 1.5}, "eval_share=1.5 is not a share"),
        ({"max_bad_records": -1}, "max_bad_records=-1 is too small"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        criteo.load(None, 0, **arguments)


def test_sampled_examples_look_like_criteos_and_carry_a_signal():
    dense, categories, labels = whole(criteo.load(None, 0, examples=40_000))
    assert 0.15 < labels.mean() < 0.35
    # A tenth is missing: 6 standard deviations of a share.
    assert np.abs((categories == 0).mean(0) - 0.1).max() < 6 * np.sqrt(0.09 / 40_000)
    assert len(np.unique(categories[:, 8])) == 4  # of three values, and missing
    assert len(np.unique(categories[:, 2])) > 5000
    # Rates of clicks by the value of a small category differ by more than chance, 6 standard deviations, somewhere.
    rates = [labels[categories[:, 8] == value] for value in np.unique(categories[:, 8])]
    assert max(r.mean() for r in rates) - min(r.mean() for r in rates) > 6 * max(0.5 / np.sqrt(len(r)) for r in rates)
    weights = np.linalg.lstsq(np.c_[dense, np.ones(len(dense))], labels, rcond=None)[0]
    assert np.abs(weights[:-1]).max() > 0.02  # a correlation by chance would be some 0.003
