"""The contents of a table's column, and its values in NumPy, converted from `pyarrow`'s."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...engine.data.preprocessing import days_and_seconds

EXACT_FLOAT32 = 1 << 24  # float32 has all whole numbers up to this
EXACT_FLOAT64 = 1 << 53


class Column(NamedTuple):
    """The contents of a column.

    Attributes:
      kind: `int64`, `float32`, `text`, `date` (float32 days since 1970-01-01) or `timestamp` (float32 [2]: such days,
        and seconds of the day, in UTC if it has a zone); for lists, the dtype of their numbers.
      shape: shape of one value; (None,) for lists that differ in length.
      why: the reason for the kind, if its values look like another.
    """

    kind: str
    shape: tuple[int | None, ...] = ()
    why: str = ""

    @property
    def known_shape(self) -> tuple[int, ...]:
        """The shape, where values have one."""
        return tuple(size for size in self.shape if size is not None)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of its values in NumPy; not for text."""
        return np.dtype("float32" if self.kind in ("date", "timestamp") else self.kind)

    @property
    def is_integer(self) -> bool:
        return self[:2] == ("int64", ())

    @property
    def is_list(self) -> bool:
        return bool(self.shape) and self.kind != "timestamp"

    @property
    def varies(self) -> bool:
        """Whether values differ in length."""
        return None in self.shape

    def __str__(self) -> str:
        if self.varies:
            return f"{self.kind}, any length"
        return f"{self.kind} {[*self.shape]}" if self.is_list else self.kind


class Texts(NamedTuple):
    """A column of text: row i has `words[codes[i]]`; a missing value is the word b""."""

    codes: np.ndarray
    words: np.ndarray


def flat(array, pa) -> np.ndarray:
    """Returns all numbers of a column, including its lists', float64, without missing ones."""
    array = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
    array = array.flatten() if pa.types.is_nested(array.type) else array
    values = array.drop_null().cast(pa.float64()).to_numpy(zero_copy_only=False)
    return values[~np.isnan(values)]


def as_integers(
    values: np.ndarray, missing: np.ndarray | None, wrong: dict[int, str]
) -> tuple[np.ndarray, np.ndarray | None, dict[int, str]]:
    """Converts floats to int64: NaN is missing and becomes 0; other values that are not integers are wrong."""
    is_nan = np.isnan(values)
    if is_nan.any():
        missing = is_nan if missing is None else missing | is_nan
    is_odd = ~is_nan & ((values != np.floor(values)) | (np.abs(values) > EXACT_FLOAT64))
    rows = np.flatnonzero(is_odd.reshape(len(values), -1).any(1)).tolist()
    problems = {row: f"has {values[row][is_odd[row]].flat[0]:.17g}, and integers up to 2^53 are read" for row in rows}
    return np.where(is_nan | is_odd, 0, values).astype(np.int64), missing, {**problems, **wrong}


def as_float32(
    values: np.ndarray, missing: np.ndarray | None, wrong: dict[int, str]
) -> tuple[np.ndarray, np.ndarray | None, dict[int, str]]:
    """Converts floats: NaN is missing and becomes 0; a value that is infinite, or becomes so, is wrong."""
    with np.errstate(over="ignore"):
        converted = values.astype(np.float32, copy=False)
    if np.isfinite(converted).all():
        return converted, missing, wrong
    is_nan = np.isnan(values)
    if is_nan.any():
        missing = is_nan if missing is None else missing | is_nan
    beyond = np.isinf(converted)
    rows = np.flatnonzero(beyond.reshape(len(values), -1).any(1)).tolist()
    problems = {row: f"has {values[row][beyond[row]].flat[0]:g}, more than float32 can hold (3.4e38)" for row in rows}
    return np.where(is_nan | beyond, np.float32(0), converted), missing, {**problems, **wrong}


def times(array, kind: str, pa) -> np.ndarray:
    """Returns days since 1970-01-01, [rows], or for timestamps also seconds of the day, [rows, 2]; float32."""
    if kind == "date":
        return array.cast(pa.date32()).cast(pa.int32()).fill_null(0).to_numpy(zero_copy_only=False).astype(np.float32)
    loses_nanoseconds = array.type.unit == "ns"  # anything else that overflows is an error
    microseconds = array.cast(pa.timestamp("us", array.type.tz), safe=not loses_nanoseconds)
    microseconds = microseconds.cast(pa.int64()).fill_null(0)
    return np.stack(days_and_seconds(microseconds.to_numpy(zero_copy_only=False)), 1)


def rows_of_lists(array, column: Column) -> tuple[np.ndarray, np.ndarray | None, dict[int, str]]:
    """Returns (values [rows, length], missing mask, rows of another length, whose values are zeros)."""
    (length,) = column.shape
    assert length is not None
    dtype = array.type.value_type.to_pandas_dtype()
    flat = array.flatten()
    # The usual case is without a copy of each list in Python.
    if not array.null_count and not flat.null_count and len(flat) == len(array) * length:
        lengths = np.diff(array.offsets.to_numpy()) if hasattr(array, "offsets") else np.full(len(array), length)
        if (lengths == length).all():
            return flat.to_numpy(zero_copy_only=False).reshape(-1, length), None, {}
    values, missing, wrong = np.zeros((len(array), length), dtype), np.zeros((len(array), length), bool), {}
    for row, items in enumerate(array.to_pylist()):
        if items is None:
            missing[row] = True
        elif len(items) != length or None in items:
            wrong[row] = f"has not {length} values, as others have; write it so, or let max_bad_records leave it out"
        else:
            values[row] = items
    return values, missing, wrong


def split_lists(array, numbers: np.ndarray, pa) -> tuple[np.ndarray, np.ndarray]:
    """Returns lists that differ in length: (arrays, object [rows]; the row of each number).

    Args:
      array: `pyarrow` array of lists; missing ones count as empty.
      numbers: numbers of all lists, side by side.
    """
    lengths = pa.compute.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    rows, ends = np.empty(len(array), object), np.cumsum(lengths)
    for row, (start, end) in enumerate(zip(ends - lengths, ends, strict=True)):
        rows[row] = numbers[start:end]
    return rows, np.repeat(np.arange(len(array)), lengths)
