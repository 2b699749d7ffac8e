"""What is done to raw values by TensorFlow: dates are read as `pyarrow` reads them, and nothing else is."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import UsageError
from crankshaft.engine.data.preprocessing import (
    ColumnPreprocessing,
    Preprocessing,
    days_and_seconds,
    hashed,
    microseconds,
)


def test_times_are_read_as_they_are_in_files():
    pa = pytest.importorskip("pyarrow")
    local = [
        "0001-01-01",
        "1969-12-31 23:59:59.999999",
        "2024-02-29T12:30",
        "2000-12-31 00:00:01.5",
        "1900-02-28 10:00",
    ]
    zoned = ["2024-02-29T23:30:00-01:00", "1970-01-01 00:00:00+0230", "2024-03-01T00:00:00Z", "1960-06-15 12:00:00+14"]
    for text, zone in ((local, None), (zoned, "UTC")):
        micros = pa.array(text).cast(pa.timestamp("us", zone)).cast(pa.int64()).to_numpy()
        days, rest = np.divmod(micros, 24 * 3600 * 10**6)
        read = days_and_seconds(microseconds(tf.constant(text), with_time=True))
        np.testing.assert_array_equal(read[0], days.astype(np.float32))
        np.testing.assert_array_equal(read[1], (rest / 1e6).astype(np.float32))
    days = np.arange(-700_000, 400_000, 97)
    text = np.datetime_as_string(days.astype("M8[D]"))
    plain = np.char.str_len(text) == 10
    by_name = Preprocessing({"day": ColumnPreprocessing("date")})
    np.testing.assert_array_equal(by_name({"day": text[plain]})["day"], days[plain])
    np.testing.assert_array_equal(by_name({"day": days.astype("M8[D]").astype("M8[s]")})["day"], days)


@pytest.mark.parametrize("text", ["2023-02-29", "2024-13-01", "2024-00-10", "2024-1-1", "x", "2024-01-01 12:30", "12"])
def test_what_is_no_date_is_refused(text):
    with pytest.raises(UsageError, match="feature 'day' has a value that is not a date; write 2024-02-29"):
        Preprocessing({"day": ColumnPreprocessing("date", 0)})({"day": ["2024-01-01", text]})


def test_ids_that_pandas_has_made_floats_are_exact():
    values = np.array([2.0**52 + 1, np.nan, 3])
    ids = Preprocessing({"user": ColumnPreprocessing("id", 0, is_flagged=True)})({"user": values})
    assert ids["user"].tolist() == [2**52 + 1, 0, 3]
    assert ids["user.missing"].tolist() == [0, 1, 0]


def test_ids_are_numbered_from_1_on_and_others_are_0():
    ids, numbers = [[3, 9], [2, 10], [5, 4]], [[1, 3], [0, 0], [2, 0]]
    column = ColumnPreprocessing("id", values=np.array([3, 5, 9]).tobytes())
    for given in (np.array(ids), tf.constant(ids, tf.int32)):
        found = column.apply("user", given, None)["user"]
        assert np.asarray(found).tolist() == numbers


def test_columns_make_one_array_in_a_graph_as_outside():
    columns = {"a": np.arange(12.0).reshape(3, 2, 2), "b": np.array([1, 2, 3]), "c": np.ones([3, 1], bool)}
    joined = Preprocessing(array=("b", "a", "c"))
    found = joined(columns)
    assert found.tolist() == [[1, 0, 1, 2, 3, 1], [2, 4, 5, 6, 7, 1], [3, 8, 9, 10, 11, 1]]
    np.testing.assert_array_equal(
        tf.function(lambda given: joined(given))(tf.nest.map_structure(tf.constant, columns)), found
    )


def test_hashes_are_for_ever_alike():
    assert hashed(["", "dog", "Zürich"]).numpy().tolist() == [0, 7634539057392638305, 4282268324657427643]
