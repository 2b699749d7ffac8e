"""Sources of tables in files: features and labels from columns by name, read by row groups. Host code."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import re
import threading
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...engine.data.data import Data
from ...engine.data.preprocessing import MISSING, SECONDS, ColumnPreprocessing, Preprocessing
from ...engine.data.source import Source, Spec
from ...engine.errors import BadRecordError, setting
from ..checks import InputError
from ..files.prepared import PreparedWriter, prepared
from ..known import as_bytes, as_text
from .parquet_table import Group, ParquetTable
from .values import EXACT_FLOAT32, Column, Texts

_INDEX = re.compile(r"__index_level_\d+__|Unnamed: 0(\.\d+)?")  # pandas' index, as its to_parquet and to_csv write it
NONE = "none"  # label name for data without labels
FILLS = ("refuse", "zero", "mean", "column")
TEXT = ("category", "hash", "keep")
_KEPT_GROUPS = 4  # a chunk may end in the group in which the next begins
_MOST_CLASSES = 1 << 20
_MOST_WORDS = 1 << 20  # of a column: some 100 MB in memory
_FEW_ROWS = 10  # whose values may all differ by chance
_MOST_SHOWN = 40  # columns in the table of them
_HASH = f"too many to fit; hash them, by {setting('input_arg')}=text=hash {setting('model_arg')}=hash_buckets=1000000"
_LABEL = None  # the labels' key among a group's arrays


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
      array_columns: columns that come first, in this order: those of a trained run's array.
    """

    label: str
    features: tuple[str, ...]
    numbers: tuple[str, ...]
    texts: tuple[str, ...]
    array: bool
    missing: str
    text: str
    validation_split: float
    array_columns: tuple[str, ...]


class ColumnFeature(NamedTuple):
    """How a column is read.

    Attributes:
      column: its name.
      specs: of the features made from it, by name.
      text: a description, for people.
      preprocessing: makes them; None leaves the column unchanged.
    """

    column: str
    specs: dict[str, Spec]
    text: str
    preprocessing: ColumnPreprocessing | None


class Fitted(NamedTuple):
    """Statistics of the columns over the training rows.

    Attributes:
      words: by text column, its distinct words except the empty one, sorted.
      means: by numeric column, if means are needed.
      has_missing: columns with missing values, if that is needed.
      differ: columns whose values all differ, like row numbers.
      classes: the words of text labels, of all rows.
    """

    words: dict[str, list[bytes]]
    means: dict[str, np.ndarray]
    has_missing: list[str]
    differ: list[str]
    classes: list[bytes] | None

    def as_json(self) -> dict[str, Any]:
        """Returns it as a JSON value."""
        words = {name: [*map(as_text, each)] for name, each in self.words.items()}
        means = {name: mean.tolist() for name, mean in self.means.items()}
        classes = None if self.classes is None else [as_text(word) for word in self.classes]
        return {**self._asdict(), "words": words, "means": means, "classes": classes}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Fitted:
        """Restores it from the result of `as_json`."""
        fitted = cls(**content)
        words = {name: [*map(as_bytes, each)] for name, each in fitted.words.items()}
        means = {name: np.array(mean) for name, mean in fitted.means.items()}
        classes = fitted.classes and [*map(as_bytes, fitted.classes)]
        return fitted._replace(words=words, means=means, classes=classes)


def splits_of(train: ParquetTable, evaluation: ParquetTable | None, choice: Choice) -> Data:
    """Makes the splits of tables. Raises `InputError` if the choice does not fit them."""
    names = _checked(train, choice)
    train.read_ids([name for name in (*names, choice.label) if name != NONE and name not in choice.numbers])
    if evaluation:
        evaluation.follow(train)
        for name in (*names, choice.label):
            evaluation.check(name, may_lack=bool(choice.features) and name != choice.label)
    choice = choice._replace(features=names, array_columns=())
    tables = [table for table in (train, evaluation) if table]
    integers = [name for name in choice.features if train.columns[name].is_integer]
    ends = train.extremes(integers)
    is_id = {name: ends[name] is None or ends[name][0] >= 0 for name in integers}
    ids = [] if choice.array else [name for name in integers if is_id[name] and name not in choice.numbers]
    fitted = _fitted(train, choice, ids)
    classes = fitted.classes
    num_classes = _num_classes(tables, choice.label) if classes is None else len(classes)
    features = [_feature(name, train.columns[name], ends.get(name), choice, fitted) for name in choice.features]
    _check_names(train, features)
    _check_exact(tables, features, choice)
    vocabulary = {name: (ends[name] or (0, 0))[1] + 1 for name in ids}
    vocabulary |= {name: len(words) + 1 for name, words in fitted.words.items()}
    numbering = [*(classes or []), *(word for words in fitted.words.values() for word in (b"", *words))]
    preprocessing = _preprocessing(features, choice)
    sources = [Columns(table, choice, features, train, classes, preprocessing) for table in tables]
    return Data(
        sources[0],
        sources[1] if evaluation else None,
        num_classes,
        {name: vocabulary[name] for name in choice.features if name in vocabulary} or None,
        zlib.crc32(b"\0".join(numbering)) if numbering else None,
        classes=None if classes is None else tuple(map(as_text, classes)),
        preprocessing=preprocessing,
        columns=_column_table(train, choice, features, num_classes, fitted.differ),
    )


def _checked(table: ParquetTable, choice: Choice) -> tuple[str, ...]:
    """Checks the choice, and returns the names of the features' columns."""
    if choice.missing not in FILLS and _number(choice.missing) is None:
        raise InputError(f"missing={choice.missing} is unknown; use {', '.join(FILLS)} or a number to be read instead")
    if choice.text not in TEXT:
        raise InputError(f"text={choice.text} is unknown; use one of {', '.join(TEXT)}")
    shown = _list(table.columns)
    if choice.label not in {NONE, *table.columns}:
        raise InputError(
            f"{table.path} has no column {choice.label!r}; name the label's by {setting('input_arg')}=label=NAME, one "
            f"of {shown}, or {NONE}"
        )
    for argument in ("features", "numbers", "texts"):
        for name in getattr(choice, argument):
            if name not in table.columns:
                raise InputError(f"{argument}={name}: {table.path} has no such column; its columns are {shown}")
    index = [name for name in table.columns if _INDEX.fullmatch(name) and name not in (*choice.features, choice.label)]
    names = choice.features or tuple(name for name in table.columns if name not in (choice.label, *index))
    if index and not choice.features:
        logging.warning("left out as pandas' index: %s", ", ".join(index))
    for name in (*names, *([choice.label] if choice.label != NONE else [])):
        table.check(name, may_lack=bool(choice.features) and name != choice.label)
        if table.columns[name] is None or (name == choice.label and table.columns[name].kind == "timestamp"):
            readable = _list((name for name in names if table.columns[name]), ",")
            raise InputError(
                f"{table.path}: column {name!r} is neither of numbers nor of text; name those to be read by "
                f"{setting('input_arg')}=features={readable}"
                if name != choice.label
                else f"{table.path}: column {name!r} is not of numbers or text, which labels are; choose another label"
            )
    if not names:
        raise InputError(f"{table.path} has no column but the label {choice.label!r}; give it one of features")
    for name in names:
        kind = "text" if table.columns[name].kind == "text" else "of any length" if table.columns[name].varies else ""
        if kind and (choice.array or name in choice.numbers):
            argument = "array=true makes one array" if choice.array else f"numbers={name} makes a column"
            raise InputError(f"{argument} of numbers, and column {name!r} is {kind}; leave it out")
    first = [name for name in choice.array_columns if name in names]
    return (*first, *(name for name in names if name not in first))


def _check_exact(tables: list[ParquetTable], features: list[ColumnFeature], choice: Choice) -> None:
    """Raises `InputError` if float32 would round integers of columns not in `numbers`."""
    integers = [each for each in features if tables[0].columns[each.column].kind.startswith(("int", "uint"))]
    floats = [each.column for each in integers if choice.array or each.specs[each.column].dtype.kind == "f"]
    names = [name for name in floats if name not in choice.numbers]
    for table in tables:
        for name, ends in table.extremes(names).items():
            most = max(map(abs, ends or (0,)))
            if most > EXACT_FLOAT32:
                raise InputError(
                    f"{table.path}: column {name!r} has {most:,}, and float32 tells whole numbers apart up to 2^24 "
                    "only; leave it out if these are ids, or have them rounded by "
                    f"{setting('input_arg')}=numbers={name}"
                )


def _check_names(table: ParquetTable, features: list[ColumnFeature]) -> None:
    names: dict[str, str] = {}
    for feature in features:
        for name in feature.specs:
            if name in names:
                raise InputError(
                    f"{table.path}: {name!r} is made of column {names[name]!r}, and of {feature.column!r}; rename one"
                )
            names[name] = feature.column


def _list(names, between: str = ", ") -> str:
    names = [*names]
    more = f" and {len(names) - _MOST_SHOWN:,} more" if len(names) > _MOST_SHOWN else ""
    return between.join(names[:_MOST_SHOWN]) + more


def _number(text: str) -> float | None:
    try:
        return float(text) if math.isfinite(float(text)) else None
    except ValueError:
        return None


def _num_classes(tables: list[ParquetTable], label: str) -> int | None:
    if label == NONE or not tables[0].columns[label].is_integer:
        return None
    both = [ends for table in tables if table.columns.get(label) and (ends := table.extremes([label])[label])]
    if not both:
        return None
    least, most = min(each[0] for each in both), max(each[1] for each in both)
    return most + 1 if least >= 0 and most < _MOST_CLASSES else None


def _groups(table: ParquetTable, names: Sequence[str], rows: int):
    """Yields (a group of some columns, the number of its rows among the table's first `rows`)."""
    for number, size in enumerate(table.group_rows.tolist()):
        if rows <= 0:
            return
        yield table.read(number, names), min(size, rows)
        rows -= size


def _words(table: ParquetTable, names: list[str], rows: int, cure: str = _HASH) -> dict[str, list[bytes]]:
    """Returns the distinct words of text columns in a table's first rows, sorted, without the empty one."""
    words: dict[str, set[bytes]] = {name: set() for name in names}
    for group, count in _groups(table, names, rows) if names else ():
        for name in names:
            codes, some = group.values[name]
            words[name].update(some[np.unique(codes[:count])])
            if len(words[name]) > _MOST_WORDS:
                raise InputError(f"{table.path}: column {name!r} has more than {_MOST_WORDS:,} different words, {cure}")
    return {name: sorted(each - {b""}) for name, each in words.items()}


def _fitted(table: ParquetTable, choice: Choice, ids: list[str]) -> Fitted:
    """Returns the statistics; keeps them beside the table if they take a while and can be written."""

    def write(writer: PreparedWriter) -> None:
        writer.metadata["fitted"] = _fit(table, choice, ids).as_json()

    takes_a_while = choice.missing in ("mean", "column") or any(
        column and column.kind == "text" for column in map(table.columns.get, (choice.label, *choice.features))
    )
    if takes_a_while:
        made_by = {**choice._asdict(), "ids": ids}
        with contextlib.suppress(InputError):  # raised again below, unless it is that nothing can be written
            file = prepared(table.source, "fitted", made_by, write, table.prepared_dir)
            return Fitted.from_json(file.metadata["fitted"])
    return _fit(table, choice, ids)


def _fit(table: ParquetTable, choice: Choice, ids: list[str]) -> Fitted:
    rows = sum(table.group_rows.tolist())
    if choice.validation_split:
        rows = math.floor(rows * (1.0 - choice.validation_split))  # as the run splits the rows
    texts = [name for name in choice.features if table.columns[name].kind == "text"]
    words = _words(table, texts if choice.text == "category" else [], rows)
    sums: dict[str, Any] = {}
    counts: dict[str, Any] = {}
    has_missing: set[str] = set()
    classes = None
    label = table.columns.get(choice.label) if choice.label != NONE else None
    if label and label.kind == "text":
        # None is not a class; validation_split leaves none unknown.
        cure = "which are too many classes; choose another label"
        classes = _words(table, [choice.label], sum(table.group_rows), cure)[choice.label]
    numeric = [name for name in choice.features if name not in texts and not table.columns[name].varies]
    if choice.missing in ("mean", "column"):
        for group, count in _groups(table, numeric, rows):
            for name in numeric:
                values = group.values[name][:count].astype(np.float64)  # 0 for missing values
                gone = group.missing[name][:count] if name in group.missing else np.zeros(1, bool)
                sums[name] = sums.get(name, 0) + values.sum(0)
                counts[name] = counts.get(name, 0) + count - gone.sum(0)
                has_missing |= {name} if gone.any() else set()
    means = {name: sums[name] / np.maximum(counts[name], 1) for name in numeric if name in sums}
    differ = {name for name, each in words.items() if len(each) == rows} | _all_differ(table, ids, rows)
    differ = differ if rows >= _FEW_ROWS else set()
    return Fitted(words, means, sorted(has_missing), [name for name in choice.features if name in differ], classes)


def _all_differ(table: ParquetTable, names: list[str], rows: int) -> set[str]:
    """Returns the integer columns whose values all differ, judged by up to a million rows."""
    left, seen = [*names], 0  # candidates
    parts: dict[str, list[np.ndarray]] = {name: [] for name in names}
    check_at = 1
    for group, count in _groups(table, left, min(rows, _MOST_WORDS)) if names else ():
        seen += count
        for name in [*left]:
            parts[name].append(group.values[name][:count])
            if seen >= check_at or seen >= min(rows, _MOST_WORDS):
                parts[name] = [np.concatenate(parts[name])]
                if len(np.unique(parts[name][0])) < seen:
                    left.remove(name)
        if not left:
            break
        check_at = max(check_at, 2 * seen) if seen >= check_at else check_at
    return {*left}


def _feature(name: str, column: Column, ends: tuple[int, int] | None, choice: Choice, fitted: Fitted) -> ColumnFeature:
    """Decides how a column is read."""
    if column.kind == "text":
        return _text_feature(name, column, choice, fitted)
    if column.varies:
        text = f"{'numbers' if column.dtype.kind == 'f' else 'ids'} of any length, padded in batches"
        return ColumnFeature(name, {name: Spec(column.shape, column.dtype)}, text, None)
    is_exact = ends is None or (ends[0] >= -EXACT_FLOAT32 and ends[1] <= EXACT_FLOAT32)
    dtype: np.dtype[Any]
    as_numbers = name in choice.numbers or choice.array or (ends is not None and ends[0] < 0 and is_exact)
    if column.is_integer and not as_numbers:
        dtype, fill = np.dtype(np.int64), np.zeros((), np.int64)
        small = ends is None or ends[0] >= 0
        text = f"id of {(ends or (0, 0))[1] + 1:,}" if small else "id, any integer: for hash_buckets or table_capacity"
    else:
        is_float = as_numbers or column.kind in ("date", "timestamp")
        dtype = np.dtype(np.float32 if is_float else column.kind)
        fill = fitted.means[name] if choice.missing == "mean" else np.array(_number(choice.missing) or 0)
        fill = fill if dtype.kind == "f" else np.zeros((), dtype)  # lists of integers are ids, likewise
        text = {"date": "days since 1970-01-01", "timestamp": "days since 1970-01-01, and seconds of the day"}.get(
            column.kind, f"{math.prod(column.shape)} numbers" if column.shape else "number"
        )
        text += f" ({fill.item():g} where missing)" if choice.missing == "mean" and not fill.shape else ""
    flags = choice.missing == "column" and name in fitted.has_missing
    parts = [name, name + SECONDS] if column.kind == "timestamp" else [name]
    shape = () if column.kind == "timestamp" else column.shape
    specs = {part: Spec(shape, dtype) for part in parts} | ({name + MISSING: Spec(shape, np.float32)} if flags else {})

    kind = column.kind if len(parts) > 1 or column.kind == "date" else "number" if dtype.kind == "f" else "id"
    fills = choice.missing != "refuse" and (choice.missing != "column" or flags)
    known = np.broadcast_to(fill, 2 if kind == "timestamp" else fill.shape).tolist() if fills else None
    known = [None, None] if kind == "timestamp" and not fills else known
    preprocessing = ColumnPreprocessing(kind, known, flags)
    return ColumnFeature(name, specs, text + (f", and {name}{MISSING}" if flags else ""), preprocessing)


def _text_feature(name: str, column: Column, choice: Choice, fitted: Fitted) -> ColumnFeature:
    dtype = np.dtype(object if choice.text == "keep" else np.int64)
    words = tuple(fitted.words.get(name, ()))
    text = {
        "keep": "text",
        "hash": "category, hashed: for hash_buckets or table_capacity",
        "category": f"category of {len(words):,} words",
    }[choice.text]
    preprocessing = None if choice.text == "keep" else ColumnPreprocessing(choice.text, words=words)
    return ColumnFeature(name, {name: Spec((), dtype)}, text, preprocessing)


def _preprocessing(features: list[ColumnFeature], choice: Choice) -> Preprocessing:
    """Returns the preprocessing of the columns, or of one array of their numbers side by side."""
    if not choice.array:
        return Preprocessing({each.column: each.preprocessing for each in features if each.preprocessing})
    fills: list[float | None] = []
    places: list[int] = []
    for feature in features:
        specs = [spec for name, spec in feature.specs.items() if not name.endswith(MISSING)]
        width = sum(math.prod(spec.shape) for spec in specs)
        first = len(fills)
        assert feature.preprocessing
        fills += np.broadcast_to(feature.preprocessing.fill, width).tolist()
        places += range(first, first + width)
        if feature.preprocessing.is_flagged:
            places += [-1 - place for place in range(first, first + math.prod(specs[0].shape))]
    return Preprocessing({"": ColumnPreprocessing("array", fills, places=tuple(places))}, choice.features)


def _column_table(
    table: ParquetTable, choice: Choice, features: list[ColumnFeature], num_classes: int | None, differ: list[str]
) -> str:
    """Formats a table of the columns: contents, how each is read, and which look like row numbers."""
    text = {feature.column: feature.text for feature in features}
    if choice.label != NONE:
        text[choice.label] = f"label of {num_classes} classes" if num_classes else "label, a number"
    rows = [("column", "holds", "read as")]
    for name, column in [*table.columns.items()][:_MOST_SHOWN]:
        holds = (
            "neither numbers nor text" if column is None else f"{column}" + (f" ({column.why})" if column.why else "")
        )
        rows.append((name, holds, text.get(name, "left out")))
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    lines = [f"{name:{widths[0]}}  {holds:{widths[1]}}  {read}" for name, holds, read in rows]
    if len(table.columns) > _MOST_SHOWN:
        lines.append(f"... and {len(table.columns) - _MOST_SHOWN:,} columns more")
    if differ:
        rest = _list((feature.column for feature in features if feature.column not in differ), ",")
        lines.append(
            f"all values of {_list(differ)} differ; if they are row numbers, leave them out by "
            f"--input_arg=features={rest}"
        )
    return "\n".join(lines)


class _Converted(NamedTuple):
    """A group as read: arrays by feature, and the problems of its rows."""

    arrays: dict[str | None, np.ndarray]
    problems: dict[int, str]


class Columns(Source):
    """Rows of a table: (features, labels), or features alone.

    Args:
      table: the table.
      choice: the columns and their form.
      features: how each is read.
      like: the training table, whose column types these are.
      classes: the texts of labels, whose indices in this list are the labels; None for numbers.
      preprocessing: makes the features.

    Raises:
      InputError: the table lacks these columns.
    """

    def __init__(
        self,
        table: ParquetTable,
        choice: Choice,
        features: list[ColumnFeature],
        like: ParquetTable,
        classes: list[bytes] | None,
        preprocessing: Preprocessing,
    ):
        self._table, self._choice, self._features, self._preprocessing = table, choice, features, preprocessing
        self._label = None if choice.label == NONE else choice.label
        self._names = [*choice.features, *([self._label] if self._label else [])]
        for name in self._names:
            _check_alike(name, table, like)
        self._classes = None if classes is None else {text: number for number, text in enumerate(classes)}
        self._starts = np.concatenate([[0], np.cumsum(table.group_rows)]).astype(np.int64)
        self.chunk_examples = int(np.max(table.group_rows))
        specs: Any = {name: spec for feature in features for name, spec in feature.specs.items()}
        if choice.array:
            specs = Spec((sum(math.prod(spec.shape) for spec in specs.values()),), np.float32)
        self.element_spec = specs
        if self._label:
            column = like.columns[self._label]
            is_number = classes is None and column.kind != "date"
            label = (
                Spec(column.shape, column.kind) if is_number else Spec((), np.float32 if classes is None else np.int64)
            )
            self.element_spec = (specs, label)
        self._kept = functools.lru_cache(_KEPT_GROUPS)(_no_group_yet)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, indices: np.ndarray) -> Any:
        groups = np.searchsorted(self._starts, indices, side="right") - 1
        numbers = np.unique(groups)
        arrays: dict[str | None, np.ndarray] = {}
        for number in numbers.tolist():
            at = np.flatnonzero(groups == number) if len(numbers) > 1 else slice(None)
            rows = indices[at] - self._starts[number]
            group = self._group(number)
            if group.problems:
                self._check(group, number, rows)
            for name, array in group.arrays.items():
                part = array[rows]
                if len(numbers) == 1:
                    arrays[name] = part
                    continue
                if name not in arrays:
                    arrays[name] = np.empty((len(indices), *part.shape[1:]), part.dtype)
                arrays[name][at] = part
        labels = arrays.pop(_LABEL, None)
        features: Any = arrays[""] if self._choice.array else arrays
        return (features, labels) if self._label else features

    def files(self) -> Sequence[str]:
        return self._table.paths

    def identity(self) -> str:
        return f"{self._names} {self._choice.missing} of {self._table.identity}"

    def _group(self, number: int) -> _Converted:
        lock, group = self._kept(number)
        with lock:  # one thread reads a group, the others wait
            if not group:
                group.append(self._converted(self._table.read(number, self._names)))
        return group[0]

    def _converted(self, group: Group) -> _Converted:
        problems: dict[int, str] = {}
        for feature in self._features:
            name = feature.column
            missing = group.missing.get(name)
            for row, problem in group.wrong.get(name, {}).items():
                problems.setdefault(row, f"column {name!r} {problem}")
            lacks_flag = self._choice.missing == "column" and name + MISSING not in feature.specs
            lacks_flag &= feature.preprocessing is not None and not isinstance(group.values[name], Texts)
            if missing is not None and (self._choice.missing == "refuse" or lacks_flag):
                _add_missing(problems, name, missing, lacks_flag)
        raw = {feature.column: group.values[feature.column] for feature in self._features}
        codes = {name: values.codes for name, values in raw.items() if isinstance(values, Texts)}
        raw = {name: values.words if name in codes else values for name, values in raw.items()}
        made = self._preprocessing(raw, group.missing)
        made = {"": made} if self._choice.array else made
        arrays: dict[str | None, np.ndarray] = {
            name: values[codes[name]] if name in codes else values for name, values in made.items()
        }
        if self._label:
            self._add_labels(group, arrays, problems)
        return _Converted(arrays, problems)

    def _add_labels(self, group: Group, arrays: dict[str | None, np.ndarray], problems: dict[int, str]) -> None:
        name = self._label
        assert name is not None
        missing, labels = group.missing.get(name), group.values[name]
        for row, problem in group.wrong.get(name, {}).items():
            problems.setdefault(row, f"column {name!r} {problem}")
        if missing is not None and self._choice.missing != "zero":
            _add_missing(problems, name, missing, lacks_flag=False)
        if self._classes is not None:
            numbers = np.array([self._classes.get(word, -1) for word in labels.words], np.int64)[labels.codes]
            known = ", ".join(text.decode(errors="replace") for text in [*self._classes][:5])
            for row in np.flatnonzero(numbers < 0).tolist():
                word = labels.words[labels.codes[row]].decode(errors="replace")
                problems.setdefault(row, f"label {word!r} is not among those of training ({known})")
            labels = np.maximum(numbers, 0)
        arrays[_LABEL] = labels

    def _check(self, group: _Converted, number: int, rows: np.ndarray) -> None:
        """Raises `BadRecordError` for the first bad one of these rows."""
        for row in rows.tolist():
            if problem := group.problems.get(row):
                location = self._table.describe_row(number, row)
                raise BadRecordError(int(self._starts[number]) + row, f"{location}: {problem}")


def _no_group_yet(number: int) -> tuple[threading.Lock, list[_Converted]]:
    """Returns the slot of a group, and the lock for filling it."""
    return threading.Lock(), []


def _add_missing(problems: dict[int, str], name: str, missing: np.ndarray, lacks_flag: bool) -> None:
    cure = (
        "and has one in each row to train on, so it has no column of its own; fill it"
        if lacks_flag
        else f"fill it, or have another read by {setting('input_arg')}=missing=zero, mean, column or a number"
    )
    for row in np.flatnonzero(missing.reshape(len(missing), -1).any(1)).tolist():
        problems.setdefault(row, f"column {name!r} has no value{' ' if lacks_flag else '; '}{cure}")


def _check_alike(name: str, table: ParquetTable, like: ParquetTable) -> None:
    if name not in table.columns:
        raise InputError(f"{table.path} has no column {name!r}, and {like.path} has; give both the same columns")
    column, wanted = table.columns[name], like.columns[name]
    if column is None or column[:2] != wanted[:2]:
        raise InputError(
            f"{table.path}: column {name!r} holds {column or 'nothing that is read'}, and {wanted} in {like.path}; "
            "write both alike"
        )
