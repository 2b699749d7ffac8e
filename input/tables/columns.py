"""Sources of tables in files: features and labels from columns by name, read by row groups."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ...engine import logging
from ...engine.data.preprocessing import MISSING, SECONDS, ColumnPreprocessing, Preprocessing
from ...engine.data.run_data import Data
from ...engine.data.source import Source, Spec
from ...engine.errors import BadRecordError
from ..checks import InputError
from ..data_json import as_bytes, as_text
from .fitting import NONE, Choice, Fitted, fitted
from .parquet_table import Group, ParquetTable
from .values import EXACT_FLOAT32, Column, Texts

_INDEX = re.compile(r"__index_level_\d+__|Unnamed: 0(\.\d+)?")  # pandas' index, as its to_parquet and to_csv write it
FILLS = ("refuse", "zero", "mean", "column")
TEXT = ("category", "hash", "keep")
_CACHED_GROUPS = 4  # a chunk may end in the group in which the next begins
_MOST_CLASSES = 1 << 20
_MOST_DENSE = 10_000  # ids up to here are not numbered: a table of all costs little
_MOST_SHOWN = 40  # columns in the table of them
_LABEL = None  # the labels' key among a group's arrays
# By the kind of a run's preprocessing: the kind as which `csv_types` reads a column, and those that a column may have.
_READ_AS = {
    **dict.fromkeys(("category", "hash"), ("text", ("text",))),
    "date": ("date", ("date",)),
    "timestamp": ("time", ("timestamp",)),
    "number": ("float", ("float32", "int64")),
    "id": ("int", ("int64", "float32")),
}
_TIMES = ("date", "timestamp")
T = TypeVar("T", bound=ParquetTable)


class ColumnFeature(NamedTuple):
    """How a column is read.

    Attributes:
      text: a description, for people.
      preprocessing: makes the features; None leaves the column unchanged.
    """

    column: str
    specs: dict[str, Spec]
    text: str
    preprocessing: ColumnPreprocessing | None

    @property
    def is_filled(self) -> bool:
        """Whether the preprocessing replaces missing values, or none of it has to."""
        if self.preprocessing is None or self.preprocessing.kind in ("category", "hash"):
            return True
        fill = self.preprocessing.fill
        return any(value is not None for value in (fill if isinstance(fill, list) else [fill]))


def read(make: Callable[[Mapping[str, str]], T], choice: Choice, trained_on: Data | None) -> T:
    """Makes a table with the kinds of columns that a run was trained on, since few rows may look like other kinds.

    Args:
      make: makes the table, from the kinds of some columns, as `csv_types` names them.
    """
    texts = dict.fromkeys(choice.texts, "text")
    table = make(texts)
    wanted = _kinds(trained_on, table, choice) if trained_on and trained_on.preprocessing.columns else {}
    columns = {name: column for name in wanted if (column := table.columns.get(name)) and not column.is_list}
    others = [name for name, column in columns.items() if column.kind not in _READ_AS[wanted[name]][1]]
    return make({**texts, **{name: _READ_AS[wanted[name]][0] for name in others}}) if others else table


def _kinds(trained_on: Data, table: ParquetTable, choice: Choice) -> dict[str, str]:
    """Returns the kind of each column by a run's preprocessing; text for columns that it leaves unchanged."""
    preprocessing = trained_on.preprocessing
    kinds = {name: column.kind for name, column in preprocessing.columns.items()}
    if preprocessing.array:
        columns = ((name, table.columns.get(name)) for name in preprocessing.array)
        kinds = {name: column.kind if column and column.kind in _TIMES else "number" for name, column in columns}
    else:
        names = [name for name in choice.features or table.columns if not _INDEX.fullmatch(name)]
        kinds = {**dict.fromkeys(names, "category"), **kinds}
    if choice.label != NONE:
        kinds.pop(choice.label, None)
        if trained_on.num_classes:
            kinds[choice.label] = "id" if trained_on.classes is None else "category"
    return kinds


def make_splits(train: ParquetTable, evaluation: ParquetTable | None, choice: Choice, trained_on: Data | None) -> Data:
    """Makes the splits of tables, with a run's preprocessing, or one that is fitted to the rows to train on.

    Args:
      choice: the columns, and how they are read where no run decides it.
      trained_on: the data of a run, which decides: words, means and the greatest ids are not fitted again.

    Raises:
      InputError: the choice or the run does not fit the tables.
    """
    saved = trained_on if trained_on and trained_on.preprocessing.columns else None
    if saved:
        choice = choice._replace(array=bool(saved.preprocessing.array))
        train.follow(_column_contents(saved, train, choice))
    array = trained_on.preprocessing.array if trained_on else ()
    tables = [table for table in (train, evaluation) if table]
    label = choice.label
    if not (choice.needs_labels or all(label in table.columns for table in tables)):
        choice = choice._replace(label=NONE)
    names = _select_columns(train, choice, array, label)
    if array and {*array} != {*names}:
        saved = None  # refused later, with their names
    if not saved:
        train.read_ids([name for name in (*names, choice.label) if name != NONE and name not in choice.numbers])
    if evaluation:
        evaluation.follow(train.columns)
        for name in (*names, choice.label):
            evaluation.check(name, may_lack=bool(choice.features) and name != choice.label)
    choice = choice._replace(features=names)
    features, data, differ = _features_from_run(train, choice, saved) if saved else _fit(tables, choice)
    _check_names(train, features)
    _check_exact(tables, features, choice)
    classes = None if data.classes is None else [*map(as_bytes, data.classes)]
    sources = [Columns(table, choice, features, train, classes, data.preprocessing) for table in tables]
    shown = _column_table(train, choice, features, data.num_classes, differ)
    return dataclasses.replace(data, train=sources[0], evaluation=sources[1] if evaluation else None, columns=shown)


def _fit(tables: list[ParquetTable], choice: Choice) -> tuple[list[ColumnFeature], Data, list[str]]:
    """Returns the features, the data without its splits, and the columns whose values all differ."""
    train = tables[0]
    integers = [name for name in choice.features if train.column(name).is_integer]
    ends = train.extremes(integers)
    is_id = {name: (ends[name] or (0, 0))[0] >= 0 for name in integers}
    ids = [] if choice.array else [name for name in integers if is_id[name] and name not in choice.numbers]
    largest = {name: (ends[name] or (0, 0))[1] for name in ids}
    is_numbered = choice.text == "category" and not choice.keeps_ids
    found = fitted(
        train, choice, ids, {name: most for name, most in largest.items() if is_numbered and most > _MOST_DENSE}
    )
    vocabulary = {name: most + 1 for name, most in largest.items()}
    vocabulary |= {name: len(words) + 1 for name, words in found.words.items()}
    vocabulary |= {name: len(values) + 1 for name, values in found.values.items()}
    features = []
    for name in choice.features:
        column = train.column(name)
        preprocessing = _fit_column(name, column, ends.get(name), choice, found)
        features.append(_feature(name, column, preprocessing, vocabulary, choice.missing == "mean"))
    classes = found.classes
    numbering = [*(classes or []), *(word for words in found.words.values() for word in (b"", *words))]
    numbering += [values.tobytes() for values in found.values.values()]
    data = Data(
        None,
        num_classes=_num_classes(tables, choice.label) if classes is None else len(classes),
        vocabulary={name: vocabulary[name] for name in choice.features if name in vocabulary} or None,
        ids=zlib.crc32(b"\0".join(numbering)) if numbering else None,
        classes=None if classes is None else tuple(map(as_text, classes)),
        preprocessing=_preprocessing(features, choice),
    )
    return features, data, found.differ


def _features_from_run(table: ParquetTable, choice: Choice, saved: Data) -> tuple[list[ColumnFeature], Data, list[str]]:
    """Returns the results of `_fit` from a run; columns that it lacks stay unchanged, and are refused later."""
    preprocessing = saved.preprocessing
    columns = _array_preprocessing(table, preprocessing) if preprocessing.array else preprocessing.columns
    features = []
    for name in choice.features:
        column, converter = table.column(name), columns.get(name)
        if converter and (column.varies or not (column.is_list or column.kind in _READ_AS[converter.kind][1])):
            raise InputError(
                f"{table.path}: column {name!r} holds {column}, and the run was trained on one of kind "
                f"{converter.kind}; write both in one type"
            )
        features.append(_feature(name, column, converter, saved.vocabulary or {}, choice.missing == "mean"))
    label = table.columns.get(choice.label)
    if label and (label.kind == "text") != (saved.classes is not None):
        raise InputError(
            f"{table.path}: the label {choice.label!r} holds {label}, and the run was trained on "
            f"{'names of classes' if saved.classes else 'numbers'}; write both in one type"
        )
    names = ("num_classes", "vocabulary", "ids", "classes", "preprocessing")
    return features, Data(None, **{name: getattr(saved, name) for name in names}), []


def _column_contents(saved: Data, table: ParquetTable, choice: Choice) -> dict[str, Column]:
    """Returns the contents of the columns that are read as the run was trained on them, whatever their own values.

    Those are columns without values, ids with missing values or floats, and lists that happen to have one length.
    """
    contents = {}
    kinds = _kinds(saved, table, choice)
    for name, column in table.columns.items():
        kind = kinds.get(name)
        if kind and (column is None or kind == "id"):
            contents[name] = Column(_READ_AS[kind][1][0], (2,) if kind == "timestamp" else ())
        elif column and column.is_list and kind == "category":
            contents[name] = column._replace(shape=(None,))
    return contents


def _array_preprocessing(table: ParquetTable, preprocessing: Preprocessing) -> dict[str, ColumnPreprocessing]:
    """Returns the preprocessing of each column of an array. Raises `InputError` if a table's columns are wider."""
    array, kinds, first = preprocessing.columns[""], {}, 0
    flagged = {-1 - place for place in array.places if place < 0}
    for name in preprocessing.array:
        column = table.column(name)
        kind = column.kind if column.kind in _TIMES else "number"
        fill = array.fill[first : first + math.prod(column.known_shape)] if not column.varies else []
        kinds[name] = ColumnPreprocessing(kind, fill if column.shape else fill[0], first in flagged)
        first += len(fill)
    if first != len(array.fill):
        raise InputError(
            f"{table.path}: its columns make an array of {first} numbers, and the run was trained on "
            f"{len(array.fill)}; write them as they were"
        )
    return kinds


def _select_columns(table: ParquetTable, choice: Choice, order: Sequence[str], label: str) -> tuple[str, ...]:
    """Checks the choice, and returns the names of the features' columns, in the order of a run's array if it has one.

    `label` is that of the labels' column, also if it is not read.
    """
    if choice.missing not in FILLS and _number(choice.missing) is None:
        raise InputError(f"missing={choice.missing} is unknown; use {', '.join(FILLS)} or a number to be read instead")
    if choice.text not in TEXT:
        raise InputError(f"text={choice.text} is unknown; use one of {', '.join(TEXT)}")
    shown = _list(table.columns)
    if choice.label not in {NONE, *table.columns}:
        raise InputError(
            f"{table.path} has no column {choice.label!r}; name the label's by input_arg=label=NAME, one of {shown}, "
            f"or {NONE}"
        )
    for argument in ("features", "numbers", "texts"):
        for name in getattr(choice, argument):
            if name not in table.columns:
                raise InputError(f"{argument}={name}: {table.path} has no such column; its columns are {shown}")
    index = [name for name in table.columns if _INDEX.fullmatch(name) and name not in (*choice.features, choice.label)]
    names = choice.features or tuple(name for name in table.columns if name not in (label, *index))
    if index and not choice.features:
        logging.warning("left out as pandas' index: %s", ", ".join(index))
    for name in (*names, *([choice.label] if choice.label != NONE else [])):
        table.check(name, may_lack=bool(choice.features) and name != choice.label)
        if (column := table.columns[name]) is None or (name == choice.label and column.kind == "timestamp"):
            readable = _list((name for name in names if table.columns[name]), ",")
            raise InputError(
                f"{table.path}: column {name!r} is neither of numbers nor of text; name those to be read by "
                f"input_arg=features={readable}"
                if name != choice.label
                else f"{table.path}: column {name!r} is not of numbers or text, which labels are; choose another label"
            )
    if not names:
        raise InputError(f"{table.path} has no column but the label {choice.label!r}; give it one of features")
    for name in names:
        column = table.column(name)
        kind = "text" if column.kind == "text" else "of any length" if column.varies else ""
        if kind and (choice.array or name in choice.numbers):
            argument = "array=true makes one array" if choice.array else f"numbers={name} makes a column"
            raise InputError(f"{argument} of numbers, and column {name!r} is {kind}; leave it out")
    first = [name for name in order if name in names]
    return (*first, *(name for name in names if name not in first))


def _check_exact(tables: list[ParquetTable], features: list[ColumnFeature], choice: Choice) -> None:
    """Raises `InputError` if float32 would round integers of columns not in `numbers`."""
    integers = [feature for feature in features if tables[0].column(feature.column).kind.startswith(("int", "uint"))]
    floats = [feature.column for feature in integers if choice.array or feature.specs[feature.column].dtype.kind == "f"]
    names = [name for name in floats if name not in choice.numbers]
    for table in tables:
        for name, ends in table.extremes(names).items():
            most = max(map(abs, ends or (0,)))
            if most > EXACT_FLOAT32:
                raise InputError(
                    f"{table.path}: column {name!r} has {most:,}, and float32 tells whole numbers apart up to 2^24 "
                    f"only; leave it out if these are ids, or have them rounded by input_arg=numbers={name}"
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
    if label == NONE or not tables[0].column(label).is_integer:
        return None
    both = [ends for table in tables if table.columns.get(label) and (ends := table.extremes([label])[label])]
    if not both:
        return None
    least, most = min(ends[0] for ends in both), max(ends[1] for ends in both)
    return most + 1 if least >= 0 and most < _MOST_CLASSES else None


def _fit_column(
    name: str, column: Column, ends: tuple[int, int] | None, choice: Choice, found: Fitted
) -> ColumnPreprocessing | None:
    """Decides how a column is converted; None leaves it unchanged."""
    if column.kind == "text":
        words = tuple(found.words.get(name, ()))
        return None if choice.text == "keep" else ColumnPreprocessing(choice.text, words=words)
    if column.varies:
        return None
    is_exact = ends is None or (ends[0] >= -EXACT_FLOAT32 and ends[1] <= EXACT_FLOAT32)
    as_numbers = name in choice.numbers or choice.array or (ends is not None and ends[0] < 0 and is_exact)
    kind = "number" if as_numbers or column.kind == "float32" else "id"
    kind = column.kind if column.kind in _TIMES else kind
    fill = np.zeros(())
    if kind != "id":  # missing ids are 0
        fill = found.means[name] if choice.missing == "mean" else np.array(_number(choice.missing) or 0)
    flags = choice.missing == "column" and name in found.has_missing
    fills = choice.missing != "refuse" and (choice.missing != "column" or flags)
    fill_values = np.broadcast_to(fill, 2 if kind == "timestamp" else fill.shape).tolist() if fills else None
    fill_values = [None, None] if kind == "timestamp" and not fills else fill_values
    values = found.values[name].tobytes() if name in found.values else b""
    return ColumnPreprocessing(kind, fill_values, flags, values=values)


def _feature(
    name: str,
    column: Column,
    preprocessing: ColumnPreprocessing | None,
    vocabulary: Mapping[str, int],
    shows_fill: bool,
) -> ColumnFeature:
    """Describes the features that a column's preprocessing makes of it."""
    if preprocessing is None:
        kind = "numbers" if column.kind.startswith("float") else "ids"
        text = "text" if column.kind == "text" else f"{kind} of any length, padded in batches"
        dtype = np.dtype(object) if column.kind == "text" else column.dtype
        return ColumnFeature(name, {name: Spec(column.shape, dtype)}, text, None)
    if preprocessing.kind in ("category", "hash"):
        hashed = "category, hashed: for hash_buckets or table_capacity"
        text = hashed if preprocessing.kind == "hash" else f"category of {len(preprocessing.words):,} words"
        return ColumnFeature(name, {name: Spec((), np.dtype(np.int64))}, text, preprocessing)
    is_time = preprocessing.kind == "timestamp"
    if preprocessing.values:
        text = f"id, {vocabulary[name] - 1:,} values"
    elif preprocessing.kind == "id" and not column.shape:
        has_largest = name in vocabulary
        text = f"id of {vocabulary[name]:,}" if has_largest else "id, any integer: for hash_buckets or table_capacity"
    else:
        times = {"date": "days since 1970-01-01", "timestamp": "days since 1970-01-01, and seconds of the day"}
        text = times.get(preprocessing.kind, f"{math.prod(column.known_shape)} numbers" if column.shape else "number")
        if shows_fill and isinstance(preprocessing.fill, (int, float)):
            text += f" ({preprocessing.fill:g} where missing)"
    shape: tuple[int | None, ...] = () if is_time else column.shape
    dtype = np.dtype(column.kind if preprocessing.kind == "id" else np.float32)
    specs = {part: Spec(shape, dtype) for part in ([name, name + SECONDS] if is_time else [name])}
    if preprocessing.is_flagged:
        specs[name + MISSING] = Spec(shape, np.float32)
        text += f", and {name}{MISSING}"
    return ColumnFeature(name, specs, text, preprocessing)


def _preprocessing(features: list[ColumnFeature], choice: Choice) -> Preprocessing:
    """Returns the preprocessing of the columns, or of one array of their numbers side by side."""
    if not choice.array:
        return Preprocessing({feature.column: feature.preprocessing for feature in features if feature.preprocessing})
    fills: list[float | None] = []
    places: list[int] = []
    for feature in features:
        specs = [spec for name, spec in feature.specs.items() if not name.endswith(MISSING)]
        width = sum(spec.size for spec in specs)
        first = len(fills)
        assert feature.preprocessing
        fills += np.broadcast_to(feature.preprocessing.fill, width).tolist()
        places += range(first, first + width)
        if feature.preprocessing.is_flagged:
            places += [-1 - place for place in range(first, first + specs[0].size)]
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
            f"input_arg=features={rest}"
        )
    return "\n".join(lines)


class _ConvertedGroup(NamedTuple):
    """A group as read: arrays by feature, and the problems of its rows."""

    arrays: dict[str | None, np.ndarray]
    problems: dict[int, str]


class _Slot:
    """The place of a group of rows, and the lock for filling it."""

    def __init__(self, number: int):
        self.number, self.lock = number, threading.Lock()
        self.group: _ConvertedGroup | None = None


class Columns(Source):
    """Rows of a table: (features, labels), or features alone.

    Args:
      like: the training table, whose column types these are.
      classes: the texts of labels, whose indices in this list are the labels; None for numbers.

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
            if name not in table.columns:
                raise InputError(
                    f"{table.path} has no column {name!r}, and {like.path} has; give both the same columns"
                )
            holds, wanted = table.columns[name], like.column(name)
            if holds is None or holds[:2] != wanted[:2]:
                raise InputError(
                    f"{table.path}: column {name!r} holds {holds or 'nothing that is read'}, and {wanted} in "
                    f"{like.path}; write both in one type"
                )
        self.preprocessing_digest = zlib.crc32(repr(classes).encode(), preprocessing.digest)
        self._classes = None if classes is None else {text: number for number, text in enumerate(classes)}
        self._starts = np.concatenate([[0], np.cumsum(table.group_rows)]).astype(np.int64)
        self.chunk_examples = int(np.max(table.group_rows))
        specs: Any = {name: spec for feature in features for name, spec in feature.specs.items()}
        if choice.array:
            specs = Spec((sum(spec.size for spec in specs.values()),), np.float32)
        self.element_spec = specs
        if self._label:
            column = like.column(self._label)
            is_number = classes is None and column.kind != "date"
            label = (
                Spec(column.shape, column.kind) if is_number else Spec((), np.float32 if classes is None else np.int64)
            )
            self.element_spec = (specs, label)
        self._slots = functools.lru_cache(_CACHED_GROUPS)(_Slot)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, indices: np.ndarray) -> Any:
        groups = np.searchsorted(self._starts, indices, side="right") - 1
        numbers = np.unique(groups)
        arrays: dict[str | None, np.ndarray] = {}
        for number in numbers.tolist():
            # The usual case is one group: then rows are taken without a copy of their positions.
            at = np.flatnonzero(groups == number) if len(numbers) > 1 else slice(None)
            rows = indices[at] - self._starts[number]
            slot = self._slots(number)
            with slot.lock:  # one thread reads a group, the others wait
                if slot.group is None:
                    slot.group = self._convert(self._table.read(number, self._names))
            group = slot.group
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

    def read_labels(self) -> np.ndarray | None:
        if not self._label:
            return None
        groups = (self._table.read(number, [self._label]) for number in range(len(self._table.group_rows)))
        return np.concatenate([self._labels(group, problems={}) for group in groups])

    def files(self) -> Sequence[str]:
        return self._table.paths

    def identity(self) -> str:
        return f"{self._names} {self._choice.missing} of {self._table.identity}"

    def _convert(self, group: Group) -> _ConvertedGroup:
        problems: dict[int, str] = {}
        is_refused = self._choice.missing == "refuse"
        for feature in self._features:
            lacks_fill = not is_refused and not feature.is_filled
            _add_problems(problems, group, feature.column, is_refused or lacks_fill, lacks_fill)
        raw = {feature.column: group.values[feature.column] for feature in self._features}
        codes = {name: values.codes for name, values in raw.items() if isinstance(values, Texts)}
        raw = {name: values.words if name in codes else values for name, values in raw.items()}
        converted = self._preprocessing(raw, group.missing)
        converted = {"": converted} if self._choice.array else converted
        arrays: dict[str | None, np.ndarray] = {
            name: values[codes[name]] if name in codes else values for name, values in converted.items()
        }
        if self._label:
            arrays[_LABEL] = self._labels(group, problems)
        return _ConvertedGroup(arrays, problems)

    def _labels(self, group: Group, problems: dict[int, str]) -> np.ndarray:
        name = self._label
        assert name is not None
        labels = group.values[name]
        _add_problems(problems, group, name, refuses_missing=self._choice.missing != "zero", lacks_fill=False)
        if self._classes is not None:
            numbers = np.array([self._classes.get(word, -1) for word in labels.words], np.int64)[labels.codes]
            some_classes = ", ".join(text.decode(errors="replace") for text in [*self._classes][:5])
            for row in np.flatnonzero(numbers < 0).tolist():
                word = labels.words[labels.codes[row]].decode(errors="replace")
                problems.setdefault(row, f"label {word!r} is not among those of training ({some_classes})")
            labels = np.maximum(numbers, 0)
        return labels

    def _check(self, group: _ConvertedGroup, number: int, rows: np.ndarray) -> None:
        """Raises `BadRecordError` for the first bad one of these rows."""
        for row in rows.tolist():
            if problem := group.problems.get(row):
                location = self._table.describe_row(number, row)
                raise BadRecordError(int(self._starts[number]) + row, f"{location}: {problem}")


def _add_problems(problems: dict[int, str], group: Group, name: str, refuses_missing: bool, lacks_fill: bool) -> None:
    """Adds the problems that a column's values make of rows; the first of a row stays."""
    for row, problem in group.wrong.get(name, {}).items():
        problems.setdefault(row, f"column {name!r} {problem}")
    if name not in group.missing or not refuses_missing:
        return
    fix = (
        "and has one in each row to train on, so nothing replaces it; fill it"
        if lacks_fill
        else "fill it, or have another read by input_arg=missing=zero, mean, column or a number"
    )
    missing = group.missing[name]
    for row in np.flatnonzero(missing.reshape(len(missing), -1).any(1)).tolist():
        problems.setdefault(row, f"column {name!r} has no value{' ' if lacks_fill else '; '}{fix}")
