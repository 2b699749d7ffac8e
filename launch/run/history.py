"""A run's history: a row for each window of training metrics or evaluation, written as the run goes. Host code."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from absl import logging

from ...engine.hooks import Status, Windowed
from ...engine.machine.files import open_regular, write_text
from ..errors import UsageError

_FIRST = ("step", "epoch")


class Rows(list):
    """The rows of a history, dictionaries, in their order.

    Attributes:
      history: of `crankshaft.fit`, as Keras's History has it: the values of each epoch by name.
      epoch: likewise, the epochs' numbers.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()):
        super().__init__(rows)
        self.history: dict[str, list[Any]] = {}
        self.epoch: list[int] = []

    def column(self, name: str) -> list[Any]:
        """Returns a column's values, of `eval_loss` for example, from the rows that have one."""
        return [row[name] for row in self if name in row]

    def to_pandas(self):
        """Returns a `pandas.DataFrame` with a column for each name in any row.

        Raises:
          UsageError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise UsageError("pandas is not installed; pip install pandas") from None
        return pandas.DataFrame(list(self))


class History(Windowed):
    """Keeps `rows`, and appends each to `history.jsonl` and `history.csv`.

    A row is plain JSON: step, epoch (with its fraction), seconds since the run began in this process, examples_per_sec
    of the window and what `Window.input` has of it, `train_NAME` of each metric of the window that ends there and
    `eval_NAME` of each metric of an evaluation made there. A resumed run first cuts off the rows past its checkpoint.

    Args:
      directory: where the files are written; None keeps the rows in memory alone.
      periods: windows of the training metrics, in steps, 0 for none; the run's end and evaluations end one too.
    """

    name = "history"

    def __init__(self, directory: str | None, periods: Collection[int]):
        super().__init__(0, at_end=True, more=periods)
        self.rows = Rows()
        self._directory = directory
        self._columns: list[str] = []
        self._seconds = 0.0

    def begin(self, status: Status) -> None:
        rows = self.rows if self._directory is None else _read(self._path("jsonl"))
        self.rows[:] = [row for row in rows if row["step"] <= status.step]
        self._write("jsonl", "".join(map(_json_line, self.rows)))
        self._write_table()

    def is_due(self, status: Status) -> bool:
        return status.evaluation is not None or super().is_due(status)

    def __call__(self, status: Status) -> None:
        self._seconds += status.seconds
        super().__call__(status)

    def act(self, status: Status) -> None:
        row = {
            "step": status.step,
            "epoch": status.step / status.steps_per_epoch,
            "seconds": self._seconds,
            "examples_per_sec": self.window.speeds.get("examples_per_sec"),
            **self.window.input,
            **{f"train_{name}": mean for name, mean in self.window.steady_means().items()},
            **{f"eval_{name}": value for name, value in (status.evaluation or {}).items()},
        }
        self._add({name: value if _is_finite(value) else None for name, value in row.items()})

    def _add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self._write("jsonl", _json_line(row), adds=True)
        if set(row) <= set(self._columns):
            self._write("csv", _csv_lines(self._columns, [row]), adds=True)
        else:
            self._write_table()

    def _write_table(self) -> None:
        """Writes the CSV whole, with a column for each name in any row."""
        names = {name: None for row in self.rows for name in row}
        self._columns = [*_FIRST, *(name for name in names if name not in _FIRST)]
        header = {name: name for name in self._columns}
        self._write("csv", _csv_lines(self._columns, [header, *self.rows]))

    def _write(self, ending: str, text: str, adds: bool = False) -> None:
        """Writes a file whole, or appends to it; an error ends the writing of the history, not the run."""
        if self._directory is None:
            return
        path = self._path(ending)
        try:
            if not adds:
                write_text(path, text)
                return
            with open(open_regular(path, os.O_WRONLY | os.O_APPEND), "a", encoding="utf-8", newline="") as file:
                file.write(text)
        except OSError as error:
            logging.warning("%s can't be written (%s); the run goes on without a history", path, error.strerror)
            self._directory = None

    def _path(self, ending: str) -> str:
        return os.path.join(self._directory, f"history.{ending}")


def _json_line(row: Mapping[str, Any]) -> str:
    return json.dumps(row) + "\n"


def _csv_lines(columns: list[str], rows: Iterable[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    csv.DictWriter(text, columns, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _is_finite(value) -> bool:
    return value is None or math.isfinite(value)


def _read(path: str) -> list[dict[str, Any]]:
    """Reads the rows of a file, up to the first line that a killed writer has left unfinished."""
    rows: list[dict[str, Any]] = []
    if not os.path.exists(path):
        return rows
    with open(open_regular(path), encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
                rows.append({**row, "step": int(row["step"])})
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
                break
    return rows
