"""Converts data frames, series and lists to arrays, and loaders to datasets, without importing their libraries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from ..errors import SourceError

_EXACT_FLOAT32 = 1 << 24  # up to here float32 has all whole numbers


def as_arrays(nest: Any, may_lack: bool = False, as_one: bool = False) -> Any:
    """Converts data frames, series and lists in a nest to arrays.

    A data frame (pandas', polars') becomes a dictionary of its columns by name, a series an array, and a list of
    numbers or text, or of such lists, one array. Anything else is unchanged.

    Args:
      may_lack: whether columns may lack values, which become NaN or empty text.
      as_one: whether a data frame becomes one array of its columns, as in Keras.

    Raises:
      SourceError: names a column that lacks values, or lists that differ in length; or is of data of another form.
    """
    if type(nest).__module__ == "datasets.arrow_dataset":  # its Dataset and Column
        raise SourceError(
            f"a {type(nest).__name__} of Hugging Face's datasets is not arrays; give "
            "dataset.to_tf_dataset(batch_size=32, columns='x', label_cols='y')"
        )
    if isinstance(nest, (np.ma.MaskedArray, memoryview)):
        return to_array(nest, may_lack)
    if hasattr(nest, "to_numpy"):
        if not hasattr(nest, "columns"):
            return _column(f"series {getattr(nest, 'name', None)!r}", nest, may_lack)
        columns = {str(name): _column(f"column {name!r}", nest[name], may_lack) for name in nest.columns}
        return nest.to_numpy() if as_one else columns
    if isinstance(nest, dict):
        return {name: as_arrays(value, may_lack, as_one) for name, value in nest.items()}
    if isinstance(nest, list) and nest and _is_plain(nest):
        try:
            return np.array(nest)
        except ValueError as error:
            raise SourceError(
                f"a list of lists that are not of one length can't be an array ({error}); for examples that vary in "
                "length give tf.ragged.constant(list)"
            ) from None
    if isinstance(nest, (list, tuple)) and not hasattr(nest, "_fields"):
        return type(nest)(as_arrays(value, may_lack, as_one) for value in nest)
    return nest


def column_names(frame: Any) -> tuple[str, ...] | None:
    """Returns the names of a data frame's columns; None for anything else."""
    is_frame = hasattr(frame, "to_numpy") and hasattr(frame, "columns")
    return tuple(map(str, frame.columns)) if is_frame else None


def _is_plain(values: list) -> bool:
    """Whether a list has only numbers and text, at any depth; each list is judged by its first value."""
    first = values[0] if values else None
    return _is_plain(first) if isinstance(first, list) else isinstance(first, (int, float, str, bytes, np.generic))


def _column(name: str, series: Any, may_lack: bool) -> np.ndarray:
    array = np.asarray(series.to_numpy())
    is_missing = getattr(series, "isna", None) or getattr(series, "is_null", None)
    missing = np.zeros([len(array)], bool) if is_missing is None else np.array(is_missing())
    if array.dtype.kind == "f":
        missing |= np.isnan(array)
    if not missing.any():
        return array
    if may_lack:
        return np.where(missing, "", array) if array.dtype == object else array
    raise _lacks(name, missing)


def _lacks(name: str, missing: np.ndarray) -> SourceError:
    row = np.argmax(missing.reshape(len(missing), -1).any(1))
    return SourceError(
        f"{name} lacks {missing.sum():,} of {missing.size:,} values, the first in row {row:,}; fill them, or leave "
        "these rows out"
    )


def to_array(array: Any, may_lack: bool = False) -> np.ndarray:
    """Converts anything like an array to a NumPy array, in the machine's byte order.

    Args:
      may_lack: whether a masked array may lack values, which become NaN or empty text.

    Raises:
      SourceError: a masked array lacks values.
    """
    if isinstance(array, np.ma.MaskedArray) and (missing := np.ma.getmaskarray(array)).any():
        if not may_lack:
            raise _lacks("a masked array", np.atleast_1d(missing))
        array = np.ma.filled(array, np.nan) if array.dtype.kind == "f" else np.ma.filled(array.astype(object), "")
    array = np.asarray(array)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def as_float32(array: Any, is_searched: bool = True) -> Any:
    """Converts an array of float64, NumPy's and pandas' default, to float32; other arrays stay.

    Args:
      is_searched: whether to search its columns for ids. In batched data only the first batch is searched, since any
        few values may be whole. Arrays of more than two axes and those in files are not searched.

    Raises:
      SourceError: a column has only whole numbers, like ids, and float32 would round one.
    """
    if getattr(array, "dtype", None) != np.float64:
        return array
    if is_searched and isinstance(array, np.ndarray) and array.ndim in (1, 2) and array.size:
        columns = array.reshape(len(array), -1)
        large = np.fmax(np.fmax.reduce(columns, 0), -np.fmin.reduce(columns, 0)) > _EXACT_FLOAT32
        for number in np.flatnonzero(large).tolist():
            _check_exact(columns[:, number])
    return array.astype(np.float32)


def _check_exact(column: np.ndarray) -> None:
    finite = column[np.isfinite(column)]
    rounded = np.flatnonzero(column.astype(np.float32) != column)
    rounded = rounded[np.isfinite(column[rounded])]
    if len(rounded) and (finite == np.floor(finite)).all():
        value = column[rounded[0]]
        raise SourceError(
            f"a column of float64 has only whole numbers, like ids, and float32 would make {np.float32(value):.0f} "
            f"of {value:.0f} in row {rounded[0]:,}; convert it by astype('int64'), or to 'float32' if it may be rounded"
        )


def is_loader(data: Any) -> bool:
    """Returns whether data is a loader of batches, like PyTorch's DataLoader, or a Grain dataset or loader."""
    if _is_grains(data):
        return not isinstance(data, Iterator)
    return all(hasattr(data, name) for name in ("__iter__", "dataset", "batch_size", "collate_fn"))


def shows_batches(loader: Any) -> bool:
    """Returns whether a loader's elements are known to be batches: of Grain, by its operations; of others, always."""
    return not _is_grains(loader) or _batches(loader)


def _batches(part: Any) -> bool:
    """Returns whether a Grain dataset, loader or operation, or all that it is made of, makes batches."""
    names = [kind.__name__ for kind in type(part).__mro__]
    if any("Batch" in name or "FlatMap" in name for name in names):  # what is flattened is examples again
        return not any("FlatMap" in name for name in names)
    if operations := getattr(part, "_operations", ()):  # of a DataLoader
        return any(map(_batches, operations))
    inputs = getattr(part, "_parents", ())
    return bool(inputs) and all(map(_batches, inputs))


def _is_grains(data: Any) -> bool:
    return any(kind.__module__.split(".")[0] == "grain" for kind in type(data).__mro__)


def loader_dataset(loader: Any) -> tf.data.Dataset:
    """Returns a loader's batches as a dataset; each of its iterators reads the loader once, from its beginning.

    Raises:
      SourceError: it yields no batch, or one that is not arrays.
    """
    name = type(loader).__name__
    first = next(iter(loader), None)
    if first is None:
        raise SourceError(f"the {name} is empty; give at least one batch")

    specs = tf.nest.map_structure(
        lambda x: tf.TensorSpec([None, *x.shape[1:]], tf.as_dtype(x.dtype)), _batch(first, name, is_first=True)
    )
    return tf.data.Dataset.from_generator(lambda: (_batch(batch, name) for batch in loader), output_signature=specs)


def _batch(batch: Any, name: str, is_first: bool = False) -> Any:
    batch = tuple(batch) if isinstance(batch, list) else batch
    arrays = tf.nest.map_structure(to_array, as_arrays(batch))
    if any(not array.ndim or array.dtype == object for array in tf.nest.flatten(arrays)):
        raise SourceError(f"the {name} gives no batch of arrays; have its collate_fn return (features, labels)")
    return tf.nest.map_structure(lambda x: as_float32(x, is_first), arrays)
