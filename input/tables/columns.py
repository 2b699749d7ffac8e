"""Tables in files, as sources: features by their columns' names, labels by one; read by row groups.

Host code.
"""

from __future__ import annotations

import abc
import threading
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from ...engine.data.source import BadRecordError, Source, Spec
from ..splits import InputError, Splits

NONE = "none"  # as the name of the label: there is none
MISSING = ("refuse", "zero")
_KEPT_GROUPS = 4  # a chunk that is not a group ends in one in which the next begins
_MOST_CLASSES = 1 << 20


class Group(NamedTuple):
    """Neighbouring rows of a table.

    Attributes:
      arrays: by column, [rows, ...]: int64, float32, bytes as objects, or the dtype of a column of several values.
      missing: by column, where any are: [rows] bool, which have no value; the array has 0 or b"" there.
      wrong: by column, where any are: [rows] bool, which have not as many values as the others; 0 likewise.
    """

    arrays: dict[str, np.ndarray]
    missing: dict[str, np.ndarray]
    wrong: dict[str, np.ndarray]


class Table(abc.ABC):
    """A table in files.

    Attributes:
      where: its first file, for messages.
      paths: of what is read.
      columns: what each column holds, by name, in order; those whose values are not numbers or text are None.
      group_rows: rows of each group, [groups] int64.
      identity: text that differs where the contents do.
    """

    where: str
    paths: Sequence[str] = ()
    columns: dict[str, Spec | None]
    group_rows: np.ndarray
    identity: str

    @abc.abstractmethod
    def read(self, group: int, names: list[str]) -> Group:
        """Reads some columns of a group of rows; may be called by several threads. Raises `SourceError`."""

    @abc.abstractmethod
    def describe_row(self, group: int, row: int) -> str:
        """Returns the file and the row in it of a group's row, for messages."""

    @abc.abstractmethod
    def extremes(self, name: str) -> tuple[int, int] | None:
        """Returns the least and the most value of a column of integers; None where it has no values."""

    def kind_of(self, name: str) -> str:
        """Names what a column holds, for messages."""
        return "text" if self.columns[name].dtype == object else str(self.columns[name].dtype)

    def texts(self, name: str) -> list[bytes]:
        """Returns the values of a column of text, each once, sorted."""
        found: set[bytes] = set()
        for group in range(len(self.group_rows)):
            found |= {*self.read(group, [name]).arrays[name]}
        return sorted(found)


class Choice(NamedTuple):
    """What is asked of a table's columns, by the arguments of an input.

    Attributes:
      label: the column of labels, or "none".
      features: columns; none are all others.
      numbers: columns of integers that are numbers, not ids.
      array: whether features are one array.
      missing: "refuse" or "zero".
    """

    label: str
    features: tuple[str, ...]
    numbers: tuple[str, ...]
    array: bool
    missing: str


def splits_of(train: Table, evaluation: Table | None, choice: Choice) -> Splits:
    """Makes the splits of tables. Raises `InputError` where the choice does not fit them."""
    if choice.missing not in MISSING:
        raise InputError(f"missing={choice.missing} is unknown; use {' or '.join(MISSING)}")
    choice = choice._replace(features=_features(train, choice))
    tables = [table for table in (train, evaluation) if table]
    classes, num_classes = None, None
    if choice.label != NONE:
        if train.columns[choice.label].dtype == object:
            classes = [text for text in train.texts(choice.label) if text]  # none is no class
            num_classes = len(classes)
        else:
            num_classes = _num_classes(tables, choice.label)
    vocabulary = {}
    for name in choice.features:
        spec = train.columns[name]
        if spec.dtype == np.int64 and name not in choice.numbers and not choice.array:
            least, most = train.extremes(name) or (0, 0)
            if least >= 0:
                vocabulary[name] = most + 1
    ids = zlib.crc32(b"\0".join(classes)) if classes else None
    sources = [Columns(table, choice, train, classes) for table in tables]
    return Splits(sources[0], sources[1] if evaluation else None, num_classes, vocabulary or None, ids)


def _features(table: Table, choice: Choice) -> tuple[str, ...]:
    """Checks the names of columns, and returns those of the features."""
    shown = ", ".join(table.columns)
    if choice.label not in {NONE, *table.columns}:
        raise InputError(
            f"{table.where} has no column {choice.label!r}; name the label's by --input_arg=label=NAME, one of "
            f"{shown}, or {NONE}"
        )
    for argument in ("features", "numbers"):
        for name in getattr(choice, argument):
            if name not in table.columns:
                raise InputError(f"{argument}={name}: {table.where} has no such column; its columns are {shown}")
    found = choice.features or tuple(name for name in table.columns if name != choice.label)
    readable = ",".join(name for name in found if table.columns[name])
    for name in (*found, *([choice.label] if choice.label != NONE else [])):
        if table.columns[name] is None:
            raise InputError(
                f"{table.where}: column {name!r} is neither of numbers nor of text; name those to be read by "
                f"--input_arg=features={readable}"
            )
    if not found:
        raise InputError(f"{table.where} has no column but the label {choice.label!r}; give it one of features")
    if choice.array:
        for name in found:
            if table.columns[name].dtype == object:
                raise InputError(f"array=true makes one array of numbers, and column {name!r} is text; leave it out")
    return found


def _num_classes(tables: list[Table], label: str) -> int | None:
    if tables[0].columns[label] != Spec((), np.int64):
        return None
    found = [extremes for table in tables if table.columns.get(label) and (extremes := table.extremes(label))]
    least, most = min(each[0] for each in found), max(each[1] for each in found)
    return most + 1 if least >= 0 and most < _MOST_CLASSES else None


class Columns(Source):
    """Rows of a table: (features, labels), or features alone.

    Args:
      table: what is read.
      choice: which columns, in which form.
      like: the table to train on, whose columns' types these are.
      classes: the labels' texts, whose indices in this list are the labels; None where they are numbers.

    Raises:
      InputError: the table has not those columns.
    """

    def __init__(self, table: Table, choice: Choice, like: Table, classes: list[bytes] | None):
        self._table, self._choice = table, choice
        self._label = None if choice.label == NONE else choice.label
        self._names = [*choice.features, *([self._label] if self._label else [])]
        for name in self._names:
            _check_alike(name, table, like)
        self._classes = None if classes is None else {text: number for number, text in enumerate(classes)}
        self._starts = np.concatenate([[0], np.cumsum(table.group_rows)]).astype(np.int64)
        sizes = np.asarray(table.group_rows)
        self.chunk_examples = int(np.max(sizes)) if len(sizes) else 1
        specs = {name: self._spec(name, like) for name in self._names}
        features: Any = {name: specs[name] for name in choice.features}
        if choice.array:
            features = Spec((sum(int(np.prod(spec.shape)) for spec in features.values()),), np.float32)
        self.element_spec = (features, specs[self._label]) if self._label else features
        self._kept: OrderedDict[int, Future] = OrderedDict()  # groups, the one used last at the end
        self._lock = threading.Lock()

    def _spec(self, name: str, like: Table) -> Spec:
        spec = like.columns[name]
        if name == self._label:
            return Spec((), np.int64) if self._classes is not None else spec
        return Spec(spec.shape, np.float32) if name in self._choice.numbers or self._choice.array else spec

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, indices: np.ndarray) -> Any:
        groups = np.searchsorted(self._starts, indices, side="right") - 1
        numbers = np.unique(groups)
        found: dict[str, np.ndarray] = {}
        for number in numbers.tolist():
            at = np.flatnonzero(groups == number) if len(numbers) > 1 else slice(None)
            rows = indices[at] - self._starts[number]
            group = self._group(number)
            self._check(group, number, rows)
            for name in self._names:
                part = group.arrays[name][rows]
                if name not in found:
                    found[name] = np.empty((len(indices), *part.shape[1:]), part.dtype)
                found[name][at] = part
        return self._in_form(found, indices)

    def _in_form(self, found: dict[str, np.ndarray], indices: np.ndarray) -> Any:
        features: Any = {name: found[name] for name in self._choice.features}
        if self._choice.array:
            features = np.concatenate([x.reshape(len(indices), -1).astype(np.float32) for x in features.values()], 1)
        else:
            features |= {name: features[name].astype(np.float32) for name in self._choice.numbers if name in features}
        if not self._label:
            return features
        labels = found[self._label]
        if self._classes is not None:
            try:
                labels = np.fromiter((self._classes[text] for text in labels), np.int64, len(labels))
            except KeyError as error:
                example = int(indices[[*labels].index(error.args[0])])
                known = ", ".join(text.decode(errors="replace") for text in [*self._classes][:5])
                raise self._bad(
                    example,
                    f"label {error.args[0].decode(errors='replace')!r} is not among those of training ({known})",
                ) from None
        return features, labels

    def files(self) -> Sequence[str]:
        return self._table.paths

    def identity(self) -> str:
        return f"{self._names} {self._choice.missing} of {self._table.identity}"

    def _group(self, number: int) -> Group:
        with self._lock:
            found = self._kept.get(number)
            mine = found is None
            if found is None:
                found = self._kept[number] = Future()
            self._kept.move_to_end(number)
            if len(self._kept) > _KEPT_GROUPS:
                self._kept.popitem(last=False)
        if mine:
            try:
                found.set_result(self._table.read(number, self._names))
            except BaseException as error:
                with self._lock:
                    self._kept.pop(number, None)
                found.set_exception(error)
        return found.result()

    def _check(self, group: Group, number: int, rows: np.ndarray) -> None:
        """Raises `BadRecordError` for the first of these rows that lacks a value."""
        for name in self._names:
            if name in group.wrong and (bad := np.flatnonzero(group.wrong[name][rows])).size:
                many = int(np.prod(self._table.columns[name].shape))
                raise self._bad(
                    int(self._starts[number] + rows[bad[0]]), f"column {name!r} has not {many} values, as others have"
                )
            if self._choice.missing != "refuse" or name not in group.missing:
                continue
            if (bad := np.flatnonzero(group.missing[name][rows])).size:
                raise self._bad(
                    int(self._starts[number] + rows[bad[0]]),
                    f"column {name!r} has no value; fill it, or have 0 read by --input_arg=missing=zero",
                )

    def _bad(self, example: int, problem: str) -> BadRecordError:
        group = int(np.searchsorted(self._starts, example, side="right")) - 1
        return BadRecordError(
            example, f"{self._table.describe_row(group, example - int(self._starts[group]))}: {problem}"
        )


def _check_alike(name: str, table: Table, like: Table) -> None:
    if name not in table.columns:
        raise InputError(f"{table.where} has no column {name!r}, and {like.where} has; give both the same columns")
    found, wanted = table.columns[name], like.columns[name]
    if found != wanted:
        kinds = ("nothing that is read" if found is None else f"{table.kind_of(name)} {[*found.shape]}").replace(
            " []", ""
        )
        raise InputError(
            f"{table.where}: column {name!r} holds {kinds}, and {like.kind_of(name)} in {like.where}; write both alike"
        )
