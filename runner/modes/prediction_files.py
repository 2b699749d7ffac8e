"""Writes a model's predictions for each example as CSV, Parquet or NumPy's .npz."""

from __future__ import annotations

import csv
import os
from typing import Any

import numpy as np

from ...engine.data.source import Source, Split
from ...engine.hooks import numerics
from ...engine.machine import files
from ...input.tables.parquet_table import library
from ..base import BaseRun
from ..failures import UsageError
from ..restored import restoring
from ..saved import fingerprints
from . import predicting
from .outcome import Outcome, run_result
from .predicting import RunView

_MOST_COLUMNS = 10_000
_ROWS = 1 << 14  # rows of CSV that are formatted at once


def predict(run: BaseRun) -> Outcome:
    """Writes the predictions of the latest (or chosen) checkpoint for the examples of a split."""
    config = run.config
    for manifest in restoring.restored(run):
        has_ids = bool(run.trainer.run_context.vocabulary)
        fingerprints.warn_of_other_data(config, manifest, run.checkpoints_for("latest").about, has_ids)
    numerics.check_weights(run.trainer, f"step {run.state.step}")
    predictor = predicting.Predictor(run, config.export_model)
    examples = predictor.checked(None, config.predict_split)
    outputs = predictor(examples)
    columns = prediction_columns(predicting.view_run(run), examples, outputs, config.export_model)
    count = len(next(iter(columns.values())))
    if run.strategy.is_chief:
        write(config.output_path, columns, run.names.classes)
    line = f"predictions of {count:,} examples by the model of step {run.state.step}: {config.output}"
    return Outcome({**run_result(run), "output": config.output, "examples": count}, lines=[line])


def prediction_columns(run: RunView, examples: Split, outputs: Any, name: str | None) -> dict[str, np.ndarray]:
    """Returns arrays [examples, ...] by name: `id` if examples have one, and the predictions.

    That is, of a classifier, `class`, `class_name` where the data names classes, and `probability`, [examples, classes]
    or of two classes [examples], or `output` where it is not known how outputs become probabilities; of a model of one
    output `prediction`; and of several each by its name, or `output_0` and so on.

    Args:
      outputs: outputs for the examples, a nest of arrays [examples, ...].
      name: name of the model that made the outputs; None is `Trainer.forward`.
    """
    named: dict[str, np.ndarray] = {}
    if isinstance(examples, Source) and (ids := examples.ids(np.arange(len(examples)))) is not None:
        named["id"] = np.array(ids)
    if isinstance(outputs, dict):
        return named | {name: np.asarray(output) for name, output in outputs.items()}
    if isinstance(outputs, (tuple, list)):
        return named | {f"output_{number}": np.asarray(output) for number, output in enumerate(outputs)}
    classes, names, logits_kind = run.data_info.num_classes, run.names.classes, None if name else run.logits_kind
    if logits_kind == "clicks":
        outputs = outputs.reshape(len(outputs)).astype(np.float64)
        # The sigmoid by tanh, and below the softmax of differences from the largest: no exponential overflows.
        numbers, name, values = (outputs > 0).astype(np.int64), "probability", 0.5 * (1 + np.tanh(outputs / 2))
    elif classes and outputs.shape[1:] == (classes,):
        numbers, name, values = outputs.argmax(1), "output", outputs
        if logits_kind == "classes":
            values = np.exp(outputs - outputs.max(1, keepdims=True), dtype=np.float64)
            name, values = "probability", values / values.sum(1, keepdims=True)
    else:
        return named | {"prediction": outputs[:, 0] if outputs.shape[1:] == (1,) else outputs}
    named["class"] = numbers
    if names:
        named["class_name"] = np.array(names)[numbers]
    return named | {name: values.astype(np.float32)}


def write(path: str, columns: dict[str, np.ndarray], classes: tuple[str, ...] | None) -> None:
    """Writes arrays to a file by its ending, whole or not at all. Raises `UsageError` where it exists.

    In a table each number has a column of its own: NAME_0, NAME_1_2, or by the names of classes NAME_cat.
    """
    if os.path.lexists(path):
        raise UsageError(f"output: {path} exists; remove it or use another output")
    table = columns if path.endswith(".npz") else _table(path, columns, classes)
    with files.replacing(path, files.make_file) as temporary:
        if path.endswith(".parquet"):
            pyarrow, parquet = library("parquet")
            arrays = [
                np.array([*map(_escaped, column.tolist())], str) if column.dtype.kind == "U" else column
                for column in table.values()
            ]
            parquet.write_table(pyarrow.table(arrays, [*map(_escaped, table)]), temporary)
        elif path.endswith(".csv"):
            with open(temporary, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(table)
                for first in range(0, len(next(iter(table.values()))), _ROWS):
                    # As text, numbers have as many digits as identify them.
                    rows = [_as_text(column[first : first + _ROWS]) for column in table.values()]
                    writer.writerows(zip(*rows, strict=True))
        else:
            with open(temporary, "wb") as file:
                by_name: dict[str, Any] = {name: _fixed_width(path, name, array) for name, array in table.items()}
                np.savez(file, **by_name)


def _as_text(column: np.ndarray) -> np.ndarray:
    if column.dtype == object:
        return np.frompyfunc(lambda text: text.decode(errors="surrogateescape"), 1, 1)(column)
    return column.astype(str)


def _fixed_width(path: str, name: str, array: np.ndarray) -> np.ndarray:
    """Converts text to NumPy's fixed-width type: without pickles .npz has no other."""
    fixed = array.astype("S") if array.dtype == object else array
    if array.dtype == object and (fixed != array).any():
        raise UsageError(
            f"output={path}: {name} has text that ends in zero bytes, which .npz can't hold; write .parquet"
        )
    return fixed


def _escaped(text: str) -> str:
    r"""Escapes the bytes of a file's name or a class's that are not UTF-8, which Parquet can't hold: \xe4."""
    return text.encode(errors="surrogateescape").decode(errors="backslashreplace")


def _table(path: str, columns: dict[str, np.ndarray], classes: tuple[str, ...] | None) -> dict[str, np.ndarray]:
    width = sum(int(np.prod(array.shape[1:])) for array in columns.values())
    if width > _MOST_COLUMNS:
        raise UsageError(f"output={path} would have {width:,} columns; write .npz, which keeps arrays as they are")
    table: dict[str, np.ndarray] = {}
    for name, array in columns.items():
        named_classes = classes if classes and name in ("probability", "output") else None
        flat = array.reshape(len(array), -1)
        for number, index in enumerate(np.ndindex(array.shape[1:])):
            parts = [named_classes[index[0]]] if named_classes and index else map(str, index)
            table["_".join([name, *parts])] = flat[:, number]
    return table
