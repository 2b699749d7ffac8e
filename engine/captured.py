"""Compares a program's objects with what traced steps have captured, before calls and saves. Runs on the host.

A step is traced once: it keeps the objects that it found, and the numbers, arrays and functions that it read. Values of
variables that it reads, and that no checkpoint has, are lost as the process ends. Here such changes are errors or, of
values that the step may not have read, warnings.
"""

from __future__ import annotations

import dis
import functools
import operator
import types
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from . import logging
from .errors import UsageError
from .internals import keras
from .internals.variables import VARIABLES, items, own_copy, variable_path
from .machine.threads import TRACING

PLAIN = (bool, int, float, str, bytes, np.generic, type(None))
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
LIBRARIES = ("crankshaft", "keras", "tensorflow")  # whose functions read constants alone
_COLLECTIONS = (dict, list, tuple, tf.Module)
_OBJECTS = (
    *VARIABLES,
    tf.Module,
    tf.keras.layers.Layer,
    tf.keras.metrics.Metric,
    tf.keras.optimizers.Optimizer,
    tf.keras.random.SeedGenerator,
)
# Larger arrays, collections and attributes are compared by their identity, since that is done before each call.
CHECKED_BYTES, CHECKED_ITEMS, _CHECKED_PLACES = 1 << 20, 1000, 1000
_READ = ": "  # in a path, before the name of what a function reads of its module
_LEFT_OUT = (
    f"{{}} has more than {_CHECKED_PLACES:,} parts, too many to compare them before each call: if one changes, steps "
    "go on with the former, without a warning"
)
_CHANGED_CODE = "%s: steps go on with its code as it was traced, and it has changed; open another run to train with it"
_IN_A_GRAPH = object()  # a tensor that a trace has left: a cache of the last call, which each call sets again


class _Reference:
    """An array, a function or an object in an attribute, equal to another by its identity or, without, its contents."""

    def __init__(self, value: Any, text: str, contents: Any = None):
        self.value, self.text, self.contents = value, text, contents

    def __eq__(self, other):
        return isinstance(other, _Reference) and self.value is other.value and self.contents == other.contents

    def __repr__(self):
        return self.text


class _Function(_Reference):
    """A function: `%autoreload` replaces the code of one that stays itself, and makes a module's helpers again."""

    def __init__(self, value: Any):
        if not is_users(value):
            super().__init__(value, value.__qualname__)
            return
        code, *defaults = _code(value)
        contents = _computed(code, value.__doc__), dict(comparable(defaults))
        super().__init__(value if value.__closure__ else None, value.__qualname__, contents)


class _Large(_Reference):
    """An attribute of too many parts, which is compared as one object."""


class Captured:
    """What traced steps have captured of a trainer, its layers, and variables.

    Args:
      layers: returns all of the trainer's layers.
    """

    def __init__(self, trainer: tf.Module, layers: Callable[[], Iterable[tf.keras.layers.Layer]]):
        self._trainer, self._layers = trainer, layers
        # Of each attribute: its owner's title, the owner, its name and the values in it by path.
        self._attributes: list[tuple[str, Any, str, dict[str, Any]]] = []
        # Of all that is in the attributes: the dictionary or list in which it is, its name there, and the object.
        self._places: Sequence[Sequence[Any]] = (), (), ()
        self._lengths: list[tuple[Any, int]] = []  # of these dictionaries and lists
        self._changing: list[tuple[Any, dict[str, Any]]] = []  # arrays, with their values
        self._code: list[tuple[Any, tuple]] = []  # of the user's functions
        self._is_traced = False
        self._steps: weakref.WeakSet[Any] = weakref.WeakSet()  # which keep their data
        self._warned: set[str] = set()
        self._unread: set[tuple[int, str]] = set()  # the `id`s of owners, and names
        self._read: dict[int, tuple[tf.Variable, bytes]] = {}  # with their checksums, by `id`

    def note(self, is_traced: bool = True) -> None:
        """Notes the attributes: once the trainer is built, and again after each trace."""
        self._is_traced |= is_traced
        self._attributes = [
            (title, owner, name, values)
            for title, owner in self.owners()
            for name, value in attributes(owner)
            if (values := _compared(value))
        ]
        self._note_places()
        for title, _, name, values in self._attributes:
            if isinstance(values.get(""), _Large) and (line := _LEFT_OUT.format(f"{title}.{name}")) not in self._warned:
                self._warned.add(line)
                logging.info("%s", line)

    def add_step(self, step: Any) -> None:
        """Adds a traced step, `engine.checks.python_state.Retrace`."""
        self._steps.add(step)
        self._unread.clear()

    def owners(self) -> list[tuple[str, Any]]:
        """Returns the trainer and its layers, with their titles."""
        return [(type(self._trainer).__name__, self._trainer), *((layer.name, layer) for layer in self._layers())]

    def _note_places(self) -> None:
        """Notes where all objects are, so that a call need not walk through thousands of them."""
        seen, found = set[int](), dict[tuple[int, Any], tuple[Any, Any, Any]]()
        lengths = {id(owner): vars(owner) for _, owner, *_ in self._attributes}
        for _, owner, name, values in self._attributes:
            for place in [x for x in map(vars, (owner, *type(owner).__mro__)) if name in x][:1]:
                inside = () if isinstance(values.get(""), _Large) else _places(unbound(place[name]), seen)
                found |= {(id(where), key): (where, key, x) for where, key, x in ((place, name, place[name]), *inside)}
        lengths |= {id(where): where for where, *_ in found.values() if not isinstance(where, types.MappingProxyType)}
        self._places = [*zip(*found.values(), strict=True)] or ((), (), ())
        self._lengths = [(where, len(where)) for where in lengths.values()]
        self._changing = [(x, dict(comparable(x))) for x in self._places[2] if isinstance(x, np.ndarray)]
        self._code = [(x, _code(x)) for x in map(unbound, self._places[2]) if is_users(x)]

    def _is_as_noted(self) -> bool:
        """Returns whether all objects and their values are the same; a new one might hide that of a class."""
        wheres, keys, values = self._places
        try:
            is_same = all(map(operator.is_, map(operator.getitem, wheres, keys), values))
        except LookupError:
            return False
        return (
            is_same
            and all(len(where) == length for where, length in self._lengths)
            and all(all(map(operator.is_, _code(function), before)) for function, before in self._code)
            and all(dict(comparable(value)) == before for value, before in self._changing)
        )

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
        if self._is_as_noted():
            return
        for change in self._changes():
            self._compare(*change)
        self._note_places()

    def _changes(self) -> Iterator[tuple[Any, str, str, Any, Any, bool]]:
        """Yields (owner, attribute, path, value before, value now, whether new) of what is not as it was noted."""
        for title, owner, name, before in self._attributes:
            present = _compared(unbound(getattr(owner, name, None)))
            for part in {**before, **present}:
                was, now = before.get(part), present.get(part)
                # A function whose code has changed may read other things of its module.
                is_read_by_both = _READ not in part or (was is not None and part in present)
                if now is not was and now != was and is_read_by_both:
                    yield owner, name, f"{title}.{name}{part}", was, now, part not in before

    def _compare(self, owner: Any, name: str, path: str, before: Any, now: Any, is_new: bool) -> None:
        if path in self._warned or (id(owner), name) in self._unread:
            return
        is_cache = is_new and isinstance(now, _Reference) and isinstance(now.value, tf.Tensor)
        if is_cache or _IN_A_GRAPH in (before, now):
            return
        was_object, is_object = (isinstance(x, _Reference) and isinstance(x.value, _OBJECTS) for x in (before, now))
        if was_object or (is_object and self._is_traced):
            raise UsageError(
                f"{path} has been replaced ({before!r}, now {now!r}): the run's steps use the former, and checkpoints "
                "would have the new one; put the former back, and change its values (model.set_weights, "
                "variable.assign)"
            )
        if self._is_traced and not self._is_read(owner, name, was_none=before is None):
            self._unread.add((id(owner), name))
        elif self._is_traced:
            self._warned.add(path)
            if isinstance(before, _Function) and isinstance(now, _Function):
                logging.warning(_CHANGED_CODE, path)
                return
            logging.warning(
                "%s: a step that reads it keeps %s, as it was traced, and it is %s now; have the step read a "
                "tf.Variable, which checkpoints keep, and assign that",
                *(path, f"{before!r:.60}", f"{now!r:.60}"),
            )

    def _is_read(self, owner: Any, name: str, was_none: bool) -> bool:
        """Whether a step may read an attribute; each is traced again to find out."""
        is_known = self._steps and name in vars(owner) and vars(owner)[name] is not None
        return not is_known or any(step.reads(owner, name, was_none) for step in self._steps)

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


def attributes(owner: Any) -> list[tuple[str, Any]]:
    """Returns the attributes that a step may read: all of a trainer and its class; public ones of a layer, its own."""
    if isinstance(owner, tf.keras.layers.Layer):
        own = {name: x for name, x in vars(owner).items() if name[0] != "_" and name not in keras.attributes()}
        found = {"call": owner.call, **own}
    else:
        inherited = {name: x for kind in reversed(type(owner).__mro__) for name, x in vars(kind).items()}
        found = {name: x for name, x in (inherited | vars(owner)).items() if not name.startswith(("__", "_self_"))}
    return [(name, unbound(x)) for name, x in found.items()]


def _compared(value: Any) -> dict[str, Any]:
    """Returns the values in an attribute by path, or the attribute alone where they are too many for a call."""
    if sum(1 for _ in _places(value, set())) > _CHECKED_PLACES:
        return {"": _Large(value, type(value).__name__)}
    return dict(comparable(value))


def _places(value: Any, seen: set[int]) -> Iterator[tuple[Any, Any, Any]]:
    """Yields (dictionary or list, name, object) of all that is in an attribute, at any depth, each once.

    Of a user's function these are what it reads of its module, and what the helpers there read that it calls.

    Args:
      seen: the `id`s of the objects whose parts were yielded before; these are added.
    """
    if id(value) in seen:
        return
    if is_users(value):
        seen.add(id(value))
        for name, item, is_compared in read_outside(value):
            yield types.MappingProxyType(value.__globals__), name, item
            if is_compared:
                yield from _places(item, seen)
    elif _is_searched(value):
        seen.add(id(value))
        place = vars(value) if isinstance(value, tf.Module) else value
        for name, item in items(value):
            yield place, name, item
            yield from _places(item, seen)


def _is_searched(value: Any) -> bool:
    is_many = isinstance(value, (dict, list, tuple)) and len(value) > CHECKED_ITEMS
    return isinstance(value, _COLLECTIONS) and not is_many


def unbound(value: Any) -> Any:
    """Returns the function of a method; anything else unchanged."""
    return value.__func__ if isinstance(value, (types.MethodType, staticmethod, classmethod)) else value


def is_users(value: Any) -> bool:
    """Whether it is a function in Python that is not a library's."""
    return type(value) is types.FunctionType and str(value.__module__).partition(".")[0] not in LIBRARIES


def read_outside(function: Any) -> Iterator[tuple[str, Any, bool]]:
    """Yields (name, value, whether it is compared) of what a function reads of its module or notebook.

    Numbers, arrays and the module's own functions are compared. Of anything else, such as a class, only the kind is: a
    module makes it again each time that it is loaded.
    """
    module = function.__globals__
    for name in _globals_in(function.__code__):
        if (value := module.get(name, module)) is not module:
            is_helper = is_users(value) and value.__globals__ is module
            yield name, value, is_helper or isinstance(value, (*PLAIN, np.ndarray))


def _code(function: Any) -> tuple[types.CodeType, Any, Any]:
    return function.__code__, function.__defaults__, function.__kwdefaults__


@functools.cache
def _computed(code: types.CodeType, doc: str | None = None) -> tuple:
    """Returns what decides what code computes, without its lines' numbers and its docstring."""
    constants = code.co_consts[1:] if code.co_consts[:1] == (doc,) else code.co_consts
    nested = (_computed(x) if isinstance(x, types.CodeType) else repr(x) for x in constants)
    return code.co_code, code.co_names, *nested


@functools.cache
def _globals_in(code: types.CodeType) -> frozenset[str]:
    """Finds the names of a module that code reads, also in functions that it makes."""
    inner = (_globals_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    own = {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname == "LOAD_GLOBAL"}
    return frozenset(own).union(*inner)


def comparable(value: Any, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """Yields (path, value) of all that can be compared in an attribute; parts of an object once, by its first path."""
    seen = set() if seen is None else seen
    if isinstance(value, PLAIN):
        yield path, value
    elif isinstance(value, np.ndarray):
        is_checked = value.nbytes <= CHECKED_BYTES and value.dtype != object
        checksum = zlib.crc32(value.tobytes()) if is_checked else None
        described = f"{value.dtype}{[*value.shape]}"
        text = f"{described} (checksum {checksum:x})" if is_checked else described
        yield path, _Reference(None if is_checked else value, text, checksum)
    elif isinstance(value, _FUNCTIONS):
        yield path, _Function(value)
        if is_users(value) and id(value) not in seen:
            seen.add(id(value))
            for name, read, is_compared in read_outside(value):
                kind = _Reference(None, type(read).__name__, type(read).__qualname__)
                inside = comparable(read, "", seen) if is_compared else [("", kind)]
                yield from ((f"{path}{_READ}{name}{part}", x) for part, x in inside)
    elif isinstance(value, (dict, list, tuple)) and len(value) > CHECKED_ITEMS:
        yield path, _Reference(value, f"{len(value)} items")
    elif isinstance(value, _COLLECTIONS) and id(value) not in seen and (inside := [*items(value)]):
        seen.add(id(value))
        for name, item in inside:
            yield from comparable(unbound(item), f"{path}.{name}", seen)
    elif isinstance(value, tf.Tensor) and tf.is_symbolic_tensor(value):
        yield path, _IN_A_GRAPH
    elif isinstance(value, (*_OBJECTS, tf.Tensor)):
        yield path, _Reference(value, f"{type(value).__name__} {getattr(value, 'name', '')}".rstrip())


def _checksum(variable: tf.Variable) -> bytes:
    value = tf.reshape(own_copy(variable).read_value(), [1, -1])
    return tf.raw_ops.Fingerprint(data=value, method="farmhash64").numpy().tobytes()
