"""Preprocessing of tables' raw values: missing ones are filled, text is hashed or converted to numbers.

TensorFlow's operations, eager on the host or in the graph of an export.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..errors import UsageError

MISSING = ".missing"  # the suffix of the feature that is 1 for a column's missing values
SECONDS = ".seconds"
KINDS = ("category", "hash", "date", "timestamp", "number", "id", "array")
# Markers of missing values in text: those of pandas' `read_csv` and of pyarrow.
MISSING_WORDS = (
    *("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN"),
    *("<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null"),
)
MISSING_ID = -(2**63)  # the integer of a missing value, as in NumPy's times
_MOST_HASHES = 2**63 - 1
_EPOCH_DAYS = 719468  # from 0000-03-01 to 1970-01-01
_DAY_MICROSECONDS = 24 * 3600 * 10**6
_DATE = r"\s*(\d{4})-(\d\d)-(\d\d)"
_TIME = r"(?:[T ](\d\d):(\d\d)(?::(\d\d)(?:\.(\d{1,9}))?)?(Z|[+-]\d\d(?::?\d\d)?)?)?\s*"
_BLANKS = r"\s*"


class ColumnPreprocessing(NamedTuple):
    """The preprocessing of a column, or of an array of columns.

    Attributes:
      kind: one of `KINDS`; the first four are text before.
      fill: the value that replaces missing ones (the empty text, NaN, `MISSING_ID`); None leaves them NaN. For arrays
        and times, one for each column.
      is_flagged: whether a feature NAME.missing is 1 for missing values.
      places: for an array, the source of each column of the result: the number of the column that is filled, or -1
        minus the number of the column whose missing values it flags by 1. Runs and exported models have it.
    """

    kind: str
    fill: Any = 0
    is_flagged: bool = False
    places: tuple[int, ...] = ()

    def checked(self) -> ColumnPreprocessing:
        """Returns it with `places` as a tuple. Raises `TypeError` if a field has another type."""
        if self.kind not in KINDS:
            raise UsageError(f"{self.kind!r:.40} is not one of {', '.join(KINDS)}")
        np.asarray(self.fill, np.float64)
        return self._replace(places=tuple(self.places))

    @property
    def is_of_text(self) -> bool:
        return self.kind in KINDS[:4]

    def made_of(self, name: str) -> list[str]:
        """Returns the names of the features that a column yields besides its own."""
        return [name + SECONDS] * (self.kind == "timestamp") + [name + MISSING] * self.is_flagged

    def apply(self, name: str, values: Any, table: Any = None) -> dict[str, Any]:
        """Converts a column's values, a tensor, to features, tensors by name.

        Values that are numbers already are not parsed.

        Args:
          name: of the column.
          values: its values; text of a date or time as ISO 8601 has it, [n].
          table: the lookup table of a category's words.
        """
        import tensorflow as tf

        is_text = values.dtype == tf.string
        if self.kind in ("category", "hash"):
            return {name: values if not is_text else table.lookup(values) if table else hashed(values)}
        if self.is_of_text and is_text:
            missing = tf.reduce_any(tf.equal(tf.strings.strip(values)[..., tf.newaxis], MISSING_WORDS), -1)
            columns = times(tf.where(missing, "1970-01-01", values), self.kind == "timestamp")
        elif self.kind == "id" and values.dtype.is_floating:  # pandas converts ids to floats if one is missing
            missing = tf.math.is_nan(values)
            columns = [tf.cast(tf.where(missing, tf.zeros([], values.dtype), values), tf.int64)]
        elif self.kind == "id":
            missing, columns = tf.equal(values, MISSING_ID), [values]
        else:
            missing, columns = tf.math.is_nan(tf.cast(values, tf.float32)), [tf.cast(values, tf.float32)]
        fill = np.asarray(self.fill, np.float64)  # None is NaN
        fills = fill if self.kind == "timestamp" else [fill]
        columns = [tf.where(missing, tf.cast(fill, x.dtype), x) for x, fill in zip(columns, fills, strict=False)]
        if self.kind == "array":
            return {name: self._placed(columns[0], tf.cast(missing, tf.float32))}
        made = dict(zip((name, name + SECONDS), columns, strict=False))
        return {**made, name + MISSING: tf.cast(missing, tf.float32)} if self.is_flagged else made

    def _placed(self, values: Any, missing: Any) -> Any:
        import tensorflow as tf

        width = len(self.fill)
        at = [place if place >= 0 else width - 1 - place for place in self.places]
        return tf.gather(tf.concat([values, missing], 1), at, axis=1)


def hashed(words: Any) -> Any:
    """Returns hashes of text, int64 of the same shape, from 0 to 2^63-2 and for ever alike; 0 of the empty word."""
    import tensorflow as tf

    words = tf.convert_to_tensor(words, tf.string)
    return tf.where(tf.equal(words, ""), tf.constant(0, tf.int64), tf.strings.to_hash_bucket_fast(words, _MOST_HASHES))


def times(text: Any, with_seconds: bool) -> list[Any]:
    """Returns days since 1970-01-01, and optionally the seconds of the day, in UTC if the text has a zone; float32.

    Raises:
      tf.errors.InvalidArgumentError: some text is not a date, or a date and time, as ISO 8601 has it.
    """
    import tensorflow as tf

    pattern = f"^{_DATE}{_TIME if with_seconds else _BLANKS}$"
    is_time = tf.strings.regex_full_match(text, pattern)
    tf.debugging.Assert(tf.reduce_all(is_time), ["not a date or time such as 2024-02-29 12:30:00", text])

    def number(group: int, default: str = "0") -> Any:
        digits = tf.strings.regex_replace(text, pattern, rf"\{group}")
        return tf.strings.to_number(tf.where(tf.equal(digits, ""), default, digits), tf.int64)

    year, month, day = (number(group) for group in (1, 2, 3))
    days = _days(year, month) + day - 1
    is_day = (month >= 1) & (month <= 12) & (day >= 1) & (days < _days(year + month // 12, month % 12 + 1))
    tf.debugging.Assert(tf.reduce_all(is_day), ["not a day of the calendar", text])
    if not with_seconds:
        return [tf.cast(days, tf.float32)]
    digits = tf.strings.substr(tf.strings.regex_replace(text, pattern, r"\7") + "000000", 0, 6)
    micros = tf.strings.to_number(digits, tf.int64)
    micros += 10**6 * (number(6) + 60 * (number(5) + 60 * number(4)))
    zone = tf.strings.regex_replace(tf.strings.regex_replace(text, pattern, r"\8"), "Z|:", "")
    zone = tf.strings.to_number(tf.strings.substr(zone + tf.where(tf.equal(zone, ""), "+0000", "00"), 0, 5), tf.int64)
    minutes = tf.sign(zone) * (60 * (tf.abs(zone) // 100) + tf.abs(zone) % 100)
    micros += _DAY_MICROSECONDS * days - 60 * 10**6 * minutes
    seconds = tf.cast(micros % _DAY_MICROSECONDS, tf.float64) / 1e6
    return [tf.cast(micros // _DAY_MICROSECONDS, tf.float32), tf.cast(seconds, tf.float32)]


def _days(year: Any, month: Any) -> Any:
    """Returns the days from 1970-01-01 to the first of a month ; the year begins in March in these sums."""
    year -= 1 - (month + 9) // 12
    months = (month + 9) % 12
    return 365 * year + year // 4 - year // 100 + year // 400 + (153 * months + 2) // 5 - _EPOCH_DAYS
