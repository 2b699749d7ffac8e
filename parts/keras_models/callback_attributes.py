"""Attributes of a user's Keras callback that has no `get_state`, as text in checkpoints."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import types
import zlib
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from ...engine.internals.variables import VARIABLES, own_copy, tf_variable

_PLAIN = (bool, int, float, str, type(None))
_WITHOUT_STATE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type, np.ufunc)
_OF_KERAS = frozenset(vars(tf.keras.callbacks.Callback()))
_COMPARED_BYTES = 1 << 28  # larger arrays are compared by their identity, since that is done at each save


class Attributes:
    """What has changed in a callback's attributes since it was given to the run.

    Args:
      saved: returns the variables that checkpoints have anyway, as those of the model.
      except_names: attributes that are saved in another way.
    """

    def __init__(
        self,
        callback: tf.keras.callbacks.Callback,
        saved: Callable[[], Iterable[tf.Variable]],
        except_names: Iterable[str] = (),
    ):
        self._callback, self._saved, self._except = callback, saved, {*_OF_KERAS, *except_names}
        self._before: dict[str, Any] = {}
        for name, value in self._own().items():
            with contextlib.suppress(TypeError):
                self._before[name] = _to_plain(value, _mark)

    def to_text(self) -> str | None:
        """Returns the changed values; None if there is one that no text has, as a file or an object of a program."""
        own, saved = self._own(), {id(variable) for variable in self._saved()}
        try:
            marks = {name: _to_plain(value, _mark, saved) for name, value in own.items()}
        except TypeError:
            return None
        changed = [name for name, mark in marks.items() if name not in self._before or self._before[name] != mark]
        return json.dumps({name: _to_plain(own[name], _encoded, saved) for name in changed})

    def restore(self, text: str) -> None:
        """Sets the values of `to_text`; variables, lists and dictionaries of the callback keep their identity."""
        for name, plain in json.loads(text).items():
            setattr(self._callback, name, _from_plain(plain, getattr(self._callback, name, None)))
            self._before.pop(name, None)  # it differs from what a new callback has, so that it is saved from now on

    def _own(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in vars(self._callback).items()
            if name not in self._except and not isinstance(value, _WITHOUT_STATE)
        }


class SavedHistory:
    """Keras's `History` as text, to which each save adds only what has come since the one before.

    A line is a JSON list of [name of a column, its new values]; the numbers of epochs are the column without a name.
    """

    def __init__(self, history: tf.keras.callbacks.History):
        self._history = history
        self._text, self._counts = "", dict[str | None, int]()

    def to_text(self) -> str:
        """Returns all of the history so far."""
        columns: dict[str | None, list] = {None: getattr(self._history, "epoch", []), **self._history.history}
        if any(len(columns.get(name, ())) < count for name, count in self._counts.items()):
            self._text, self._counts = "", {}  # a program has cut it
        new = [[name, values[self._counts.get(name, 0) :]] for name, values in columns.items()]
        if not self._text or any(values for _, values in new):
            self._text += json.dumps(new, default=lambda x: np.asarray(x).tolist()) + "\n"
        self._counts = {name: len(values) for name, values in columns.items()}
        return self._text

    def restore(self, text: str) -> None:
        """Sets the history to the result of `to_text`."""
        columns: dict[str | None, list] = {None: []}
        for name, values in itertools.chain(*map(json.loads, text.splitlines())):
            columns.setdefault(name, []).extend(values)
        self._text, self._counts = text, {name: len(values) for name, values in columns.items()}
        self._history.epoch = columns.pop(None)
        self._history.history = columns


def _to_plain(value: Any, array: Callable[[np.ndarray], Any], saved: Collection[int] = ()) -> Any:
    """Returns a value as JSON, its arrays as `array` returns them; a variable whose `id` is in `saved` is left out.

    Raises:
      TypeError: JSON can't hold it.
    """
    if type(value) in _PLAIN:
        return value
    if type(value) in (list, tuple):
        return {type(value).__name__: [_to_plain(item, array, saved) for item in value]}
    if type(value) is dict:
        return {"dict": [[_to_plain(item, array, saved) for item in pair] for pair in value.items()]}
    kind = "tensor" if isinstance(value, tf.Tensor) else "array"
    if isinstance(value, VARIABLES):
        if id(value := tf_variable(value)) in saved:
            return {}
        value = own_copy(value)
    value = np.asarray(value) if isinstance(value, (tf.Tensor, tf.Variable, np.generic)) else value
    if not isinstance(value, np.ndarray) or value.dtype == object or np.dtype(value.dtype.name) != value.dtype:
        raise TypeError(type(value).__name__)
    return {kind: array(value), "dtype": value.dtype.name, "shape": value.shape}


def _mark(value: np.ndarray) -> int:
    is_compared = value.nbytes <= _COMPARED_BYTES
    return zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data) if is_compared else id(value)


def _encoded(value: np.ndarray) -> str:
    return base64.b64encode(value.tobytes()).decode()


def _from_plain(plain: Any, present: Any) -> Any:
    """Reverses `_to_plain`, in the object that is present, if it can be changed."""
    if not isinstance(plain, dict):
        return plain
    if not plain:
        return present
    if "dict" in plain:
        into = present if type(present) is dict else {}
        pairs = [(_from_plain(key, None), value) for key, value in plain["dict"]]
        found = {key: _from_plain(value, into.get(key)) for key, value in pairs}
        into.clear()
        into.update(found)
        return into
    if (kind := next((kind for kind in (list, tuple) if kind.__name__ in plain), None)) is not None:
        values = plain[kind.__name__]
        before = [*present] if type(present) in (list, tuple) and len(present) == len(values) else [None] * len(values)
        items = kind(_from_plain(value, old) for value, old in zip(values, before, strict=True))
        if kind is list and type(present) is list:
            present[:] = items
            return present
        return items
    encoded = plain["tensor"] if "tensor" in plain else plain["array"]
    array = np.frombuffer(base64.b64decode(encoded), plain["dtype"]).reshape(plain["shape"]).copy()
    if isinstance(present, VARIABLES):
        present.assign(array)
        return present
    return tf.constant(array) if "tensor" in plain else array if array.shape else array[()]
