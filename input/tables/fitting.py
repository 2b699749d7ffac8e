"""Fits preprocessing to the rows of a table to train on: words, raw ids, means, columns that lack values."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..checks import InputError
from ..data_json import as_bytes, as_text, numbers_as_text, numbers_from_text
from ..files.prepared import PreparedWriter, prepared
from .parquet_table import ParquetTable

# Input arguments that only decide how columns are preprocessed: a trained run has its own preprocessing.
FITTED = ("numbers", "texts", "text", "array", "missing")
NONE = "none"  # label name for data without labels
_MOST_WORDS = 1 << 20  # per text column: some 100 MB in memory
_MOST_VALUES = 10**7  # per column of raw ids
_SPARSE = 4  # ids are numbered if the largest is this many times their number
_FEW_ROWS = 10  # whose values may all differ by chance
_HASH = "too many to fit; hash them, by input_arg=text=hash model_arg=hash_buckets=1000000"


class Choice(NamedTuple):
    """The choice of a table's columns, from the arguments of an input.

    Attributes:
      label: the column of labels, or "none".
      features: columns; all others if empty.
      numbers: columns of integers that are numbers, not ids.
      texts: columns that are text, whatever they contain; the tables know them.
      array: whether features are one array.
      missing: one of `FILLS`, or a number.
      text: one of `TEXT`.
      validation_split: fraction of the rows, the last ones, that are not for training.
      keeps_ids: whether ids stay as they are, however large, since the model takes any.
      needs_labels: whether it is an error if files lack the column of labels.
    """

    label: str
    features: tuple[str, ...]
    numbers: tuple[str, ...]
    texts: tuple[str, ...]
    array: bool
    missing: str
    text: str
    validation_split: float
    keeps_ids: bool = False
    needs_labels: bool = True


class Fitted(NamedTuple):
    """Statistics of the columns over the training rows.

    Attributes:
      words: distinct words of each text column except the empty one, sorted, by column.
      means: means of the numeric columns, by column; empty if means are not needed.
      has_missing: columns with missing values, if that is needed.
      differ: columns whose values all differ, like row numbers.
      classes: the words of text labels, of all rows.
      values: distinct values of each column of ids that are far larger than many, sorted, int64, by column.
    """

    words: dict[str, list[bytes]]
    means: dict[str, np.ndarray]
    has_missing: list[str]
    differ: list[str]
    classes: list[bytes] | None
    values: dict[str, np.ndarray]

    def as_json(self) -> dict[str, Any]:
        words = {name: [*map(as_text, column_words)] for name, column_words in self.words.items()}
        means = {name: mean.tolist() for name, mean in self.means.items()}
        classes = None if self.classes is None else [as_text(word) for word in self.classes]
        values = {name: numbers_as_text(numbers) for name, numbers in self.values.items()}
        return {**self._asdict(), "words": words, "means": means, "classes": classes, "values": values}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Fitted:
        fitted = cls(**content)
        words = {name: [*map(as_bytes, column_words)] for name, column_words in fitted.words.items()}
        means = {name: np.array(mean) for name, mean in fitted.means.items()}
        classes = fitted.classes and [*map(as_bytes, fitted.classes)]
        values = {name: numbers_from_text(numbers) for name, numbers in fitted.values.items()}
        return fitted._replace(words=words, means=means, classes=classes, values=values)


def _groups(table: ParquetTable, names: Sequence[str], rows: int):
    """Yields (a group of some columns, the number of its rows among the table's first `rows`)."""
    for number, size in enumerate(table.group_rows.tolist()):
        if rows <= 0:
            return
        yield table.read(number, names), min(size, rows)
        rows -= size


def _words(table: ParquetTable, names: list[str], rows: int, fix: str = _HASH) -> dict[str, list[bytes]]:
    """Returns the distinct words of text columns in a table's first rows, sorted, without the empty one."""
    words: dict[str, set[bytes]] = {name: set() for name in names}
    for group, count in _groups(table, names, rows) if names else ():
        for name in names:
            codes, some = group.values[name]
            words[name].update(some[np.unique(codes[:count])])
            if len(words[name]) > _MOST_WORDS:
                raise InputError(f"{table.path}: column {name!r} has more than {_MOST_WORDS:,} different words, {fix}")
    return {name: sorted(distinct - {b""}) for name, distinct in words.items()}


def _values(table: ParquetTable, largest: dict[str, int], rows: int) -> dict[str, np.ndarray]:
    """Returns the distinct ids of first rows, sorted, in the columns whose largest id is far above their number."""
    found = {name: np.zeros(0, np.int64) for name in largest}
    parts: dict[str, list[np.ndarray]] = {name: [] for name in largest}

    def add_parts(name: str) -> None:
        found[name] = np.unique(np.concatenate([found[name], *parts.pop(name)]))
        parts[name] = []
        if largest[name] <= _SPARSE * len(found[name]):
            del found[name], parts[name]
        elif len(found[name]) > _MOST_VALUES:
            raise InputError(
                f"{table.path}: column {name!r} has more than {_MOST_VALUES:,} different ids, up to {largest[name]:,}, "
                "too many to number; hash them, by model_arg=hash_buckets=1000000, or give those that training meets "
                "a row, by model_arg=table_capacity=1000000"
            )

    for group, count in _groups(table, [*found], rows) if found else ():
        for name in [*found]:
            ids = group.values[name][:count]
            parts[name].append(ids[~group.missing[name][:count]] if name in group.missing else ids)
            # Not for each group, since `np.unique` sorts everything again.
            if sum(map(len, parts[name])) > max(len(found[name]), _MOST_WORDS):
                add_parts(name)
        if not found:
            break
    for name in [*found]:
        add_parts(name)
    return {name: values for name, values in found.items() if len(values)}


def fitted(table: ParquetTable, choice: Choice, ids: list[str], largest: dict[str, int]) -> Fitted:
    """Returns the statistics; keeps them beside the table if they take a while and can be written.

    `largest` has the columns of `ids` that may have far fewer values.
    """

    def write(writer: PreparedWriter) -> None:
        writer.metadata["fitted"] = _fit(table, choice, ids, largest).as_json()

    has_text = any(
        column and column.kind == "text" for column in map(table.columns.get, (choice.label, *choice.features))
    )
    if has_text or largest or choice.missing in ("mean", "column"):
        recipe = {**choice._asdict(), "ids": ids, "largest": largest}
        with contextlib.suppress(InputError):  # raised again below, unless the error is that nothing can be written
            file = prepared(table.source, "fitted", recipe, write, table.prepared_dir)
            return Fitted.from_json(file.metadata["fitted"])
    return _fit(table, choice, ids, largest)


def _fit(table: ParquetTable, choice: Choice, ids: list[str], largest: dict[str, int]) -> Fitted:
    rows = sum(table.group_rows.tolist())
    if choice.validation_split:
        rows = math.floor(rows * (1.0 - choice.validation_split))  # as the run splits the rows
    texts = [name for name in choice.features if table.column(name).kind == "text"]
    words = _words(table, texts if choice.text == "category" else [], rows)
    sums: dict[str, Any] = {}
    counts: dict[str, Any] = {}
    has_missing: set[str] = set()
    classes = None
    label = table.columns.get(choice.label) if choice.label != NONE else None
    if label and label.kind == "text":
        # None is not a class; validation_split leaves none unknown.
        fix = "which are too many classes; choose another label"
        classes = _words(table, [choice.label], sum(table.group_rows), fix)[choice.label]
    numeric = [name for name in choice.features if name not in texts and not table.column(name).varies]
    if choice.missing in ("mean", "column"):
        for group, count in _groups(table, numeric, rows):
            for name in numeric:
                values = group.values[name][:count].astype(np.float64)  # 0 for missing values
                gone = group.missing[name][:count] if name in group.missing else np.zeros(1, bool)
                sums[name] = sums.get(name, 0) + values.sum(0)
                counts[name] = counts.get(name, 0) + count - gone.sum(0)
                has_missing |= {name} if gone.any() else set()
    means = {name: sums[name] / np.maximum(counts[name], 1) for name in numeric if name in sums}
    differ = {name for name, distinct in words.items() if len(distinct) == rows} | _all_differ(table, ids, rows)
    differ = differ if rows >= _FEW_ROWS else set()
    differing = [name for name in choice.features if name in differ]
    return Fitted(words, means, sorted(has_missing), differing, classes, _values(table, largest, rows))


def _all_differ(table: ParquetTable, names: list[str], rows: int) -> set[str]:
    """Returns the integer columns whose values all differ, judged by up to a million rows."""
    left, seen = [*names], 0  # candidates
    parts: dict[str, list[np.ndarray]] = {name: [] for name in names}
    check_at = 1
    for group, count in _groups(table, left, min(rows, _MOST_WORDS)) if names else ():
        seen += count
        for name in [*left]:
            parts[name].append(group.values[name][:count])
            # Each time at twice as many rows: all sorts together cost about as much as the last two.
            if seen >= check_at or seen >= min(rows, _MOST_WORDS):
                parts[name] = [np.concatenate(parts[name])]
                if len(np.unique(parts[name][0])) < seen:
                    left.remove(name)
        if not left:
            break
        check_at = max(check_at, 2 * seen) if seen >= check_at else check_at
    return {*left}
