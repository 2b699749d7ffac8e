"""Everything that tracing a step may read of a Keras model, as values that can be compared later. Host code."""

from __future__ import annotations

import collections
import functools
import inspect
import threading
import types
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from .keras import NOT_TRACED

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, np.dtype, tf.DType, tf.TensorShape, slice)
_LISTS = (list, tuple, set, frozenset, collections.deque)
_OURS = __package__.split(".")[0]
_KNOWN = ("keras", _OURS, "tensorflow", "numpy", "builtins", "math", "operator", "functools", "collections", "optree")
# Objects without attributes of their own to read, and those of TensorFlow, whose contents do not change a trace.
_CLOSED = (inspect.Signature, threading.local, type(threading.Lock()), type(threading.RLock()), weakref.ref)
KEPT = "_kept_by_fit"  # the attribute in which a `fit` keeps what it compiled
_MOST_BYTES = 1 << 16  # of an array that is compared


class Content(NamedTuple):
    """The attributes of objects by their ids, which stay theirs while `objects` has them."""

    attributes: dict[int, Any]
    objects: list[Any]


class TracedContent:
    """What the traces of a model's steps have read of it."""

    def __init__(self):
        self._contents: list[Content | None] = []

    def note(self, roots: Sequence[Any]) -> None:
        """Notes what a trace may read."""
        content = content_of(roots)
        if not self._contents or not _are_equal(content, self._contents[0]):
            self._contents.append(content)

    def is_still(self, roots: Sequence[Any]) -> bool:
        """Returns whether another trace would read the same as all before it, as far as that can be known."""
        return len(self._contents) == 1 and _are_equal(content_of(roots), self._contents[0])


def _are_equal(one: Content | None, other: Content | None) -> bool:
    return one is not None and other is not None and one.attributes == other.attributes


class _UnknownError(Exception):
    pass


def content_of(roots: Iterable[Any]) -> Content | None:
    """Returns the values of all attributes of objects and of what they refer to; None if there may be more to read.

    That is so if any of them is of a class, or a function, that is not Keras's or the engine's: its code may read
    anything else.
    """
    content, left = Content({}, []), list(roots)

    def value(x: Any) -> Any:
        if isinstance(x, _PLAIN):
            return type(x), x
        if isinstance(x, _LISTS):
            return type(x).__name__, [value(each) for each in x]
        if isinstance(x, dict):
            return type(x).__name__, [(value(name), value(each)) for name, each in x.items()]
        if isinstance(x, np.ndarray):
            if x.nbytes > _MOST_BYTES or x.dtype.hasobject:
                raise _UnknownError
            return x.dtype, x.shape, x.tobytes()
        left.append(x)
        return id(x)

    try:
        while left:
            x = left.pop()
            if id(x) not in content.attributes:
                content.objects.append(x)
                content.attributes[id(x)] = None
                content.attributes[id(x)] = value(_read_of(x))
    except (_UnknownError, RecursionError):
        return None
    return content


def _read_of(x: Any) -> Any:
    """Returns what may be read of an object: its attributes, or what a function refers to."""
    if isinstance(x, functools.partial):
        return x.func, x.args, x.keywords
    if isinstance(x, types.MethodType):
        return x.__func__, x.__self__
    if isinstance(x, _CLOSED):
        return None
    is_code = isinstance(x, (types.FunctionType, types.BuiltinFunctionType, type))
    package = (getattr(x if is_code else type(x), "__module__", None) or "").split(".")[0]
    if package not in _KNOWN:
        raise _UnknownError
    if isinstance(x, types.FunctionType):
        return [each.cell_contents for each in x.__closure__ or ()], x.__defaults__, x.__kwdefaults__
    if is_code or package not in ("keras", _OURS):
        return None
    own = getattr(x, "__dict__", {})
    return {
        name: own[name]
        for name in sorted(own)
        if name != KEPT and name not in NOT_TRACED and not name.startswith("_self_")
    }
