"""Compares a program's objects with what traced steps have captured of them, before each call and each save.

A step is traced once: it keeps the objects that it found, and the numbers, arrays and functions that it read. Values of
variables that it reads, and that no checkpoint has, are lost as the process ends. Here such changes are errors or, of
values that the step may not have read, a line.
"""

from __future__ import annotations

import dis
import functools
import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from . import logging
from .errors import UsageError
from .internals import keras
from .internals.variables import VARIABLES, items, own_copy, variable_path
from .machine.threads import TRACING

_PLAIN = (bool, int, float, str, bytes, np.generic, type(None))
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_LIBRARIES = ("crankshaft", "keras", "tensorflow")  # whose functions read constants alone
_COLLECTIONS = (dict, list, tuple, tf.Module)
_OBJECTS = (
    *VARIABLES,
    tf.Module,
    tf.keras.layers.Layer,
    tf.keras.metrics.Metric,
    tf.keras.optimizers.Optimizer,
    tf.keras.random.SeedGenerator,
)
# Larger arrays and collections are compared by their identity, since that is done before each call.
_CHECKED_BYTES, _CHECKED_ITEMS = 1 << 20, 1000


class _Reference:
    """An array, a function or an object in an attribute, equal to another by its checksum or by its identity."""

    def __init__(self, value: Any, text: str, checksum: int | None = None):
        self.value = value if checksum is None else None
        self.text, self.checksum = text, checksum

    def __eq__(self, other):
        return isinstance(other, _Reference) and self.value is other.value and self.checksum == other.checksum

    def __repr__(self):
        return self.text


class Captured:
    """What traced steps have captured of a trainer, its layers, and variables.

    Args:
      layers: returns all of the trainer's layers.
    """

    def __init__(self, trainer: tf.Module, layers: Callable[[], Iterable[tf.keras.layers.Layer]]):
        self._trainer, self._layers = trainer, layers
        # Of each attribute: its owner's title, the owner, its name and value, whether that can't change in itself, and
        # the values in it by path.
        self._attributes: list[tuple[str, Any, str, Any, bool, dict[str, Any]]] = []
        # Of those that can't change in themselves: the dictionary in which each is, its name and value there.
        self._fixed: list[tuple[Mapping[str, Any], str, Any]] = []
        self._varied: list[tuple[str, Any, str, Any, bool, dict[str, Any]]] = []  # the other attributes
        self._lengths: list[tuple[Mapping[str, Any], int]] = []  # of the owners' dictionaries
        self._is_traced = False
        self._warned: set[str] = set()
        self._read: dict[int, tuple[tf.Variable, bytes]] = {}  # with their checksums, by `id`

    def note(self, is_traced: bool = True) -> None:
        """Notes the attributes: once the trainer is built, and again after each trace."""
        self._is_traced |= is_traced
        self._attributes = [
            (title, owner, name, value, _is_fixed(value), values)
            for title, owner in ((type(self._trainer).__name__, self._trainer), *((x.name, x) for x in self._layers()))
            for name, value in _attributes(owner)
            if (values := dict(_values(value)))
        ]
        self._note_fixed()

    def _note_fixed(self) -> None:
        """Notes where the fixed attributes are, so that a call need not ask thousands of objects for theirs."""
        owners = {id(owner): owner for _, owner, *_ in self._attributes}
        self._varied = [attribute for attribute in self._attributes if not attribute[4]]
        self._lengths = [(vars(owner), len(vars(owner))) for owner in owners.values()]
        fixed = {
            (id(places[0]), name): (places[0], name, places[0][name])
            for _, owner, name, _, is_fixed, _ in self._attributes
            if is_fixed and (places := [x for x in map(vars, (owner, *type(owner).__mro__)) if name in x])
        }
        self._fixed = [*fixed.values()]

    def _is_as_noted(self) -> bool:
        """Returns whether each fixed attribute is the same object; a new one might hide that of a class."""
        try:
            for place, name, value in self._fixed:
                if place[name] is not value:
                    return False
        except KeyError:
            return False
        return all(len(place) == length for place, length in self._lengths)

    def note_read(self, variables: Iterable[tf.Variable]) -> None:
        """Notes variables that a step reads, and that no checkpoint has."""
        with tf.init_scope():
            self._read |= {id(v): (v, _checksum(v)) for v in variables if id(v) not in self._read}

    def check(self) -> None:
        """Warns, once each, of values that have changed since a step was traced. Call it before each call and save.

        Raises:
          UsageError: an object is another one, which checkpoints would have and no step would use.
        """
        with TRACING:
            self._check()

    def _check(self) -> None:
        is_as_noted = self._is_as_noted()
        for title, owner, name, value, is_fixed, before in self._varied if is_as_noted else self._attributes:
            now = getattr(owner, name, None)
            if is_fixed and (now is value or _function(now) is value):
                continue
            present = dict(_values(_function(now)))
            for part in {**before, **present}:
                self._compare(f"{title}.{name}{part}", before.get(part), present.get(part))
        if not is_as_noted:
            self._note_fixed()

    def _compare(self, path: str, before: Any, now: Any) -> None:
        if now is before or now == before or path in self._warned:
            return
        was_object, is_object = (isinstance(x, _Reference) and isinstance(x.value, _OBJECTS) for x in (before, now))
        if was_object or (is_object and self._is_traced):
            raise UsageError(
                f"{path} has been replaced ({before!r}, now {now!r}): the run's steps use the former, and checkpoints "
                "would have the new one; put the former back, and change its values (model.set_weights, "
                "variable.assign)"
            )
        if self._is_traced:
            self._warned.add(path)
            logging.warning(
                "%s: a step that reads it keeps %s, as it was traced, and it is %s now; have the step read a "
                "tf.Variable, which checkpoints keep, and assign that",
                *(path, f"{before!r:.60}", f"{now!r:.60}"),
            )

    def check_save(self) -> None:
        """Checks, as `check` does, that a checkpoint would have all with which the steps compute.

        Raises:
          UsageError: see `check`; or a variable that a step reads, and no checkpoint has, has changed since its trace.
        """
        self.check()
        for variable, before in sorted(self._read.values(), key=lambda read: variable_path(read[0])):  # a first copy
            if _checksum(variable) != before:
                raise UsageError(
                    f"{type(self._trainer).__name__}: its step reads {variable_path(variable)} "
                    f"{variable.shape.as_list()}, which has changed since the step was traced, and no checkpoint would "
                    "have it: a resumed run would begin with other values; make it "
                    f"{self._trainer.run_context.saved_places}"
                )


def _attributes(owner: Any) -> list[tuple[str, Any]]:
    """Returns the attributes that a step may read: all of a trainer and its class; public ones of a layer, its own."""
    if isinstance(owner, tf.keras.layers.Layer):
        own = {name: x for name, x in vars(owner).items() if name[0] != "_" and name not in keras.attributes()}
        attributes = {"call": owner.call, **own}
    else:
        inherited = {name: x for kind in reversed(type(owner).__mro__) for name, x in vars(kind).items()}
        attributes = {name: x for name, x in (inherited | vars(owner)).items() if not name.startswith(("__", "_self_"))}
    return [(name, _function(x)) for name, x in attributes.items()]


def _is_fixed(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_fixed, value))
    return not isinstance(value, (np.ndarray, *_COLLECTIONS)) and not _read_outside(value)


def _function(value: Any) -> Any:
    """Returns the function of a method; anything else unchanged."""
    return value.__func__ if isinstance(value, (types.MethodType, staticmethod, classmethod)) else value


def _read_outside(value: Any) -> dict[str, Any]:
    """Returns the numbers and arrays that a user's function reads of its module, as a notebook's cells set them."""
    if type(value) is not types.FunctionType or str(value.__module__).partition(".")[0] in _LIBRARIES:
        return {}
    read = {name: value.__globals__.get(name) for name in _globals_in(value.__code__)}
    return {name: x for name, x in read.items() if x is not None and isinstance(x, (*_PLAIN, np.ndarray))}


@functools.cache
def _globals_in(code: types.CodeType) -> frozenset[str]:
    """Finds the names of a module that code reads, also in functions that it makes."""
    inner = (_globals_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    own = {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname == "LOAD_GLOBAL"}
    return frozenset(own).union(*inner)


def _values(value: Any, path: str = "", within: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yields (path, value) of all that can be compared in an attribute."""
    if isinstance(value, _PLAIN):
        yield path, value
    elif isinstance(value, np.ndarray):
        is_checked = value.nbytes <= _CHECKED_BYTES and value.dtype != object
        checksum = zlib.crc32(value.tobytes()) if is_checked else None
        described = f"{value.dtype}{[*value.shape]}"
        yield path, _Reference(value, f"{described} (checksum {checksum:x})" if is_checked else described, checksum)
    elif isinstance(value, _FUNCTIONS):
        yield path, _Reference(value, value.__qualname__)
        for name, read in _read_outside(value).items():
            yield from _values(read, f"{path}: {name}")
    elif isinstance(value, (dict, list, tuple)) and len(value) > _CHECKED_ITEMS:
        yield path, _Reference(value, f"{len(value)} items")
    elif isinstance(value, _COLLECTIONS) and id(value) not in within and (inside := [*items(value)]):
        for name, item in inside:
            yield from _values(_function(item), f"{path}.{name}", (*within, id(value)))
    elif isinstance(value, _OBJECTS) or (isinstance(value, tf.Tensor) and not tf.is_symbolic_tensor(value)):
        yield path, _Reference(value, f"{type(value).__name__} {getattr(value, 'name', '')}".rstrip())


def _checksum(variable: tf.Variable) -> bytes:
    value = tf.reshape(own_copy(variable).read_value(), [1, -1])
    return tf.raw_ops.Fingerprint(data=value, method="farmhash64").numpy().tobytes()
