"""Preprocessing of tables: missing values are filled, text is looked up, hashed or converted to numbers.

One object, saved with a run, serves training, prediction and exports. The same code makes numbers by NumPy on the host
and by TensorFlow in the graph of an export; text is TensorFlow's in both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import zlib
from collections.abc import Mapping
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
      fill: replaces missing values (the empty text, NaN, `MISSING_ID`); None: NaN. For arrays and times, by column.
      is_flagged: whether a feature NAME.missing is 1 for missing values.
      places: for an array, the source of each column of the result: the number of the column that is filled, or -1
        minus the number of the column whose missing values it flags by 1.
      words: the words of a category: the first has id 1, and 0 is text that is empty or was not seen in training.
      values: the distinct values in training of an id that is numbered, sorted, as the bytes of an int64 array; the
        first has id 1, and 0 is any other. b"" leaves ids as they are.
    """

    kind: str
    fill: Any = None
    is_flagged: bool = False
    places: tuple[int, ...] = ()
    words: tuple[bytes, ...] = ()
    values: bytes = b""

    @property
    def is_of_text(self) -> bool:
        """Whether raw values are text."""
        return self.kind in KINDS[:4]

    @property
    def may_lack(self) -> bool:
        """Whether values may be missing."""
        fills = self.fill if isinstance(self.fill, list) else [self.fill]
        return self.is_of_text or any(fill is not None for fill in fills)

    def decoded(self, values: Any) -> tuple[Any, Any]:
        """Returns raw values of a column of numbers or times as numbers, and the mask of those that are missing.

        Times become days since 1970-01-01, with the seconds of the day on an axis of two if they are timestamps.
        Missing ones are NaN.

        Args:
          values: numbers; for times NumPy's, or text as ISO 8601 has it, a tensor.
        """
        import tensorflow as tf

        xp = _namespace(values)
        if self.kind in ("date", "timestamp"):
            if xp is np and values.dtype.kind == "M":
                missing = np.isnat(values)
                micros = np.where(missing, np.datetime64(0, "us"), values).astype("M8[us]").astype(np.int64)
                # The error that text of another form raises in TensorFlow, so that `_converted` explains both.
                if self.kind == "date" and (micros % _DAY_MICROSECONDS).any():
                    raise tf.errors.InvalidArgumentError(None, None, "not a day")
            else:
                missing = tf.reduce_any(tf.equal(tf.strings.strip(values)[..., tf.newaxis], MISSING_WORDS), -1)
                micros = microseconds(tf.where(missing, "1970-01-01", values), self.kind == "timestamp")
            times = [xp.where(missing, np.float32(np.nan), time) for time in days_and_seconds(micros)]
            return (times[0], missing) if self.kind == "date" else (xp.stack(times, -1), xp.stack([missing] * 2, -1))
        if self.kind != "id":
            values = xp.asarray(values, np.float32)
            return values, xp.isnan(values)
        if values.dtype == np.int64:
            return values, values == np.int64(MISSING_ID)
        if values.dtype not in (np.float32, np.float64) or (self.fill is None and not self.values):
            return values, None
        missing = xp.isnan(values)  # pandas converts ids to floats if one is missing
        return xp.asarray(xp.where(missing, xp.full_like(values, MISSING_ID), values), np.int64), missing

    def apply(self, name: str, values: Any, missing: Any) -> dict[str, Any]:
        """Converts a column's values to features by name.

        Args:
          values: numbers, as `decoded` returns them: an array, or a tensor of a graph.
          missing: mask of the values that are missing, of the values' shape; None if none is.
        """
        xp = _namespace(values)
        if self.kind != "id":
            values = xp.asarray(values, np.float32)
        elif self.values:
            values = _number_ids(values, np.frombuffer(self.values, np.int64))
        if missing is not None and self.fill is not None:
            fill = np.asarray(self.fill, np.float64)  # None is NaN
            values = xp.where(missing, xp.asarray(fill, values.dtype), values)
        is_time = self.kind == "timestamp"
        features = {name: values[..., 0], name + SECONDS: values[..., 1]} if is_time else {name: values}
        width = len(self.fill) if self.kind == "array" else 0
        if not self.is_flagged and self.places == (*range(width),):
            return features
        flags = xp.zeros_like(values, np.float32) if missing is None else xp.asarray(missing, np.float32)
        if self.kind != "array":
            return {**features, name + MISSING: flags[..., 0] if is_time else flags}
        at = [place if place >= 0 else width - 1 - place for place in self.places]
        return {name: xp.take(xp.concatenate([values, flags], 1), at, axis=1)}


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """Converts the columns of a table to the features of a model, in training, prediction and exports alike.

    Raw ids that are numbered can't be told from their numbers, so features are converted once.

    Attributes:
      columns: the preprocessing of each column; others stay unchanged. `""` is the array's.
      array: the columns that make one array of features, in its order; () for features by name.
      tables: the lookup tables so far, by column; the owner of a graph has to keep them.

    Example:
      >>> Preprocessing({"city": ColumnPreprocessing("category", words=(b"Bern", b"Rome"))})({"city": ["Rome", "?"]})
      {'city': array([2, 0])}
    """

    columns: Mapping[str, ColumnPreprocessing] = dataclasses.field(default_factory=dict)
    array: tuple[str, ...] = ()
    tables: dict[str, Any] = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def words(self) -> dict[str, list[bytes]]:
        """The words of each column of categories; the first has id 1."""
        return {name: [*column.words] for name, column in self.columns.items() if column.kind == "category"}

    @property
    def may_lack(self) -> bool:
        """Whether raw values may be missing."""
        return any(column.may_lack for column in self.columns.values())

    @property
    def digest(self) -> int:
        """Identifies it, the same where processors round means otherwise."""

        def rounded(column: ColumnPreprocessing) -> tuple:
            fills = [f"{x:.9g}" for x in np.ravel(np.asarray(column.fill, np.float64))]
            values = [zlib.crc32(column.values)] if column.values else []
            return column.kind, fills, bool(column.is_flagged), *map(tuple, (column.places, column.words)), *values

        columns = {name: rounded(self.columns[name]) for name in sorted(self.columns)}
        return zlib.crc32(repr((columns, tuple(self.array))).encode())

    def __call__(self, features: Any, missing: Mapping[str, Any] | None = None) -> Any:
        """Converts features; those that are converted already stay unchanged, except ids that are numbered.

        Args:
          features: arrays or tensors by column, or an array of columns.
          missing: masks of missing values, by column that has some, of values that are numbers or words already; None
            for raw values, in which missing ones are NaN, `MISSING_ID` or a marker in text.

        Raises:
          UsageError: text is not a date or time; a column of the array is not of numbers.
        """
        if isinstance(features, dict) and self.array:
            features, missing = self._joined(features, missing)
        if isinstance(features, dict):
            converted: dict[str, Any] = {}
            for name, values in features.items():
                converted |= self._converted(name, values, missing) if name in self.columns else {name: values}
            return converted | {name: values for name, values in features.items() if name not in self.columns}
        array = self.columns.get("")
        if array is None or np.shape(features)[1:] != (len(array.fill),):
            return features
        return self._converted("", features, missing)[""]

    def raw(self, specs: Any) -> Any:
        """Returns specs of raw features: text for those that are looked up, hashed or times.

        Args:
          specs: nest of `tf.TensorSpec`s of converted features, [examples, ...].
        """
        import tensorflow as tf

        if not isinstance(specs, dict):
            array = self.columns.get("")
            is_one = isinstance(specs, tf.TensorSpec)
            return tf.TensorSpec([None, len(array.fill)], specs.dtype) if array and is_one else specs
        used = {name: column for name, column in self.columns.items() if name in specs}
        added = {name + SECONDS for name, column in used.items() if column.kind == "timestamp"}
        added |= {name + MISSING for name, column in used.items() if column.is_flagged}
        text = {name: tf.TensorSpec(specs[name].shape, tf.string) for name in used if used[name].is_of_text}
        return {name: text.get(name, spec) for name, spec in specs.items() if name not in added}

    def _joined(self, features: dict[str, Any], missing: Mapping[str, Any] | None) -> tuple[Any, Any]:
        """Returns an array of all columns, and its missing mask under the name ""."""
        import tensorflow as tf

        is_eager = tf.executing_eagerly()
        columns = [np.asarray(features[name]) if is_eager else features[name] for name in self.array]
        kinds = [np.dtype(getattr(x.dtype, "as_numpy_dtype", x.dtype)).kind for x in columns]
        if text := [name for name, kind in zip(self.array, kinds, strict=True) if kind not in "biuf"]:
            raise UsageError(f"column {text[0]!r} is not of numbers, which this run's array is of; make numbers of it")
        if not is_eager:
            columns = [tf.cast(x, tf.float32) for x in columns]
            return tf.concat([tf.reshape(x, [tf.shape(x)[0], math.prod(x.shape[1:])]) for x in columns], 1), missing
        columns = [x.reshape(len(x), -1) for x in columns]
        if missing:
            masks = [missing.get(name, np.zeros(x.shape, bool)) for name, x in zip(self.array, columns, strict=True)]
            missing = {"": np.concatenate([x.reshape(len(x), -1) for x in masks], 1)}
        return np.concatenate(columns, 1, dtype=np.float32), missing

    def _converted(self, name: str, values: Any, missing: Mapping[str, Any] | None) -> dict[str, Any]:
        column = self.columns[name]
        if missing is not None and column.kind not in ("category", "hash"):
            return column.apply(name, values, missing.get(name))
        import tensorflow as tf

        is_eager = tf.executing_eagerly()
        if not tf.is_tensor(values):
            values = np.asarray(values)
        elif is_eager:
            values = values.numpy()
        is_text = values.dtype == tf.string or getattr(values.dtype, "kind", "") in ("O", "S", "U")
        is_time = getattr(values.dtype, "kind", "") == "M" and column.kind in ("date", "timestamp")
        with tf.device("CPU:0") if is_eager else contextlib.nullcontext():
            if column.kind in ("category", "hash") and is_text:
                converted = {name: self._ids(name, tf.convert_to_tensor(values))}
            elif column.is_of_text != (is_text or is_time):
                return {name: values}  # converted already, or of no form that the model takes
            else:
                try:
                    converted = column.apply(name, *column.decoded(tf.convert_to_tensor(values) if is_text else values))
                except tf.errors.InvalidArgumentError:  # running a graph raises it unchanged
                    raise UsageError(
                        f"feature {name!r} has a value that is not a {column.kind}; write 2024-02-29"
                        + " or 2024-02-29 12:30:00" * (column.kind == "timestamp")
                    ) from None
        return {feature: x.numpy() if is_eager and tf.is_tensor(x) else x for feature, x in converted.items()}

    def _ids(self, name: str, words: Any) -> Any:
        import tensorflow as tf

        if self.columns[name].kind == "hash":
            return hashed(words)
        if name not in self.tables:
            # Outside of the graph that is traced, so that one table serves all graphs.
            with tf.init_scope():
                keys = tf.constant(self.columns[name].words, tf.string)
                content = tf.lookup.KeyValueTensorInitializer(keys, tf.range(1, len(keys) + 1, dtype=tf.int64))
                self.tables[name] = tf.lookup.StaticHashTable(content, 0)
        return self.tables[name].lookup(words)


UNCHANGED = Preprocessing()


def hashed(words: Any) -> Any:
    """Returns hashes of text, int64 of the same shape, 0 to 2^63-2, the same in all versions; 0 for the empty word."""
    import tensorflow as tf

    words = tf.convert_to_tensor(words, tf.string)
    return tf.where(tf.equal(words, ""), tf.constant(0, tf.int64), tf.strings.to_hash_bucket_fast(words, _MOST_HASHES))


def days_and_seconds(micros: Any) -> tuple[Any, Any]:
    """Returns days since 1970-01-01 and seconds of the day, float32, of microseconds since then, int64."""
    xp = _namespace(micros)
    seconds = xp.asarray(micros % _DAY_MICROSECONDS, np.float64) / 1e6
    return xp.asarray(micros // _DAY_MICROSECONDS, np.float32), xp.asarray(seconds, np.float32)


def _number_ids(ids: Any, values: np.ndarray) -> Any:
    """Returns each id's position among sorted values, from 1 on, int64 of the ids' shape; 0 if it is none of them."""
    if isinstance(ids, np.ndarray):
        at = np.minimum(np.searchsorted(values, ids), len(values) - 1)
        return np.where(values[at] == ids, at + 1, 0)
    import tensorflow as tf

    ids = tf.cast(ids, tf.int64)
    places = tf.searchsorted(values, tf.reshape(ids, [-1]), out_type=tf.int64)
    at = tf.reshape(tf.minimum(places, len(values) - 1), tf.shape(ids))
    return tf.where(tf.equal(tf.gather(values, at), ids), at + 1, tf.zeros_like(at))


def _namespace(values: Any) -> Any:
    """NumPy for an array; for a tensor TensorFlow's functions of the same names, which a graph can hold."""
    if isinstance(values, np.ndarray):
        return np
    import tensorflow as tf

    return tf.experimental.numpy


def microseconds(text: Any, with_time: bool) -> Any:
    """Returns microseconds since 1970-01-01, int64, in UTC if the text has a zone.

    Raises:
      tf.errors.InvalidArgumentError: some text is not a date, or with `with_time` a date and time, as ISO 8601 has it.
    """
    import tensorflow as tf

    pattern = f"^{_DATE}{_TIME if with_time else _BLANKS}$"
    is_time = tf.strings.regex_full_match(text, pattern)
    tf.debugging.Assert(tf.reduce_all(is_time), ["not a date or time such as 2024-02-29 12:30:00", text])

    def number(group: int, default: str = "0") -> Any:
        digits = tf.strings.regex_replace(text, pattern, rf"\{group}")
        return tf.strings.to_number(tf.where(tf.equal(digits, ""), default, digits), tf.int64)

    year, month, day = (number(group) for group in (1, 2, 3))
    days = _days(year, month) + day - 1
    is_day = (month >= 1) & (month <= 12) & (day >= 1) & (days < _days(year + month // 12, month % 12 + 1))
    tf.debugging.Assert(tf.reduce_all(is_day), ["not a day of the calendar", text])
    if not with_time:
        return _DAY_MICROSECONDS * days
    digits = tf.strings.substr(tf.strings.regex_replace(text, pattern, r"\7") + "000000", 0, 6)
    micros = tf.strings.to_number(digits, tf.int64)
    micros += 10**6 * (number(6) + 60 * (number(5) + 60 * number(4)))
    zone = tf.strings.regex_replace(tf.strings.regex_replace(text, pattern, r"\8"), "Z|:", "")
    zone = tf.strings.to_number(tf.strings.substr(zone + tf.where(tf.equal(zone, ""), "+0000", "00"), 0, 5), tf.int64)
    minutes = tf.sign(zone) * (60 * (tf.abs(zone) // 100) + tf.abs(zone) % 100)
    return micros + _DAY_MICROSECONDS * days - 60 * 10**6 * minutes


def _days(year: Any, month: Any) -> Any:
    """Days from 1970-01-01 to the first of a month. The year begins in March in these sums: a leap day is its last."""
    year -= 1 - (month + 9) // 12
    months = (month + 9) % 12
    return 365 * year + year // 4 - year // 100 + year // 400 + (153 * months + 2) // 5 - _EPOCH_DAYS
