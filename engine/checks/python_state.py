"""Finds whether a step computes with what it changes in Python, such as its own count. Runs on the host.

A step is traced once, so all steps compute with the values that Python had then. That a trace changes some tells
little, since caches and lists of names change, too: a second trace decides, by whether it has other constants.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import operator
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from .. import logging
from ..captured import CHECKED_BYTES, CHECKED_ITEMS, PLAIN, Captured, attributes, comparable, is_users, read_outside
from ..internals import graphs, keras
from ..own_code import is_users as is_users_file
from . import digests

_MOST_VALUES = 10_000  # parts of those beyond are not compared
# Which can be copied.
_ITERATORS: tuple[type, ...] = (type(iter(())), type(iter(list[int]())), type(iter(range(0))), itertools.count)
_HOLDERS = (tf.Module, types.SimpleNamespace)  # whose attributes are the program's
_CHANGED = (
    "%s: a step changes it only as it is traced, and %s changes with it, so all steps compute with the trace's value; "
    "keep it in a tf.Variable, which the step assigns, or use step_context().step"
)


class _NoValue:
    """An object that can be passed on, and nothing else."""

    def _refuse(self, *_: Any) -> Any:
        raise TypeError("no value")

    __bool__ = __eq__ = __hash__ = __str__ = __format__ = _refuse


class PythonState:
    """The values that a trainer's objects have in Python at this time: those that the program's own code defines.

    Args:
      owners: returns the trainer and its layers, with their titles.
    """

    def __init__(self, owners: Callable[[], Iterable[tuple[str, Any]]]):
        self._owners, self._values = owners, dict[str, Any]()
        self._parts: list[tuple[Any, Any]] = []  # what has values, and a copy of it
        self._iterators: dict[int, Any] = {}  # copies, by `id`
        queue, seen = [*owners()], dict[int, Any]()
        for path, value in queue:
            if isinstance(value, (*PLAIN, np.ndarray)):
                self._values.update(comparable(value, path))
            elif isinstance(value, _ITERATORS):
                self._values[path] = operator.length_hint(value) or repr(value)
            if id(value) not in seen and not isinstance(value, PLAIN) and len(queue) <= _MOST_VALUES:
                seen[id(value)] = value
                queue += [(f"{path}{name}", item) for name, item in self._note(value)]

    def warn_if_computed(self, graph: tf.Graph, trace: Callable[[], Any], after: Callable[[], Any]) -> None:
        """Warns if a step whose trace has changed values since has other constants when `trace` traces it again.

        `after` is called after that trace.
        """
        if not (changed := self._changes()):
            return
        traced = PythonState(self._owners)
        try:
            again = trace().graph
            places = {path.rstrip("0123456789") for path in traced._changes()}  # a list may have grown
        except Exception:  # as of a cache with tensors of the first trace
            return
        finally:
            traced._put_back()
            after()
        was, now = (digests.digest(each, integers=True).ops for each in (graph, again))
        constants = [Counter(value for value, op in ops if op.type == "Const") for ops in (was, now)]
        others, hashes = {op for value, op in was if value in constants[0] - constants[1]}, {value for value, _ in now}
        computed = [op for value, op in was if value not in hashes and any(x.op in others for x in op.inputs)]
        if computed:
            op = next(filter(graphs.program_line, computed), computed[0])
            twice = {path: x for path, x in changed.items() if path.rstrip("0123456789") in places}  # no cache
            named = [f"{path} ({change})" for path, change in (twice or changed).items()]
            more = f" and {len(named) - 3} more" if named[3:] else ""
            logging.warning_once(_CHANGED, ", ".join(named[:3]) + more, digests.describe(op))

    def _changes(self) -> dict[str, str]:
        """Describes, by path, the values that are others now. A tensor is none: each trace sets its own."""
        now, before = PythonState(self._owners)._values, self._values
        paths = [path for path, x in now.items() if path not in before or not (x is before[path] or x == before[path])]
        was = {path: f"{before[path]!r:.60}" if path in before else "unset" for path in paths}
        return {path: f"from {was[path]} to {now[path]!r:.60}" for path in paths}

    def _note(self, value: Any) -> Iterable[tuple[str, Any]]:
        """Copies what an object has, and returns its parts by the ends of their paths."""
        if isinstance(value, np.ndarray):
            self._parts += [(value, value.copy())] if value.nbytes <= CHECKED_BYTES and value.flags.writeable else []
        elif isinstance(value, types.CellType):
            with contextlib.suppress(ValueError):  # it is empty
                self._parts.append((value, self._kept(value.cell_contents)))
                return [("", value.cell_contents)]
        elif is_users(value) and _is_programs(value):
            read = {name: item for name, item, _ in read_outside(value)}
            self._parts.append((value.__globals__, {name: self._kept(x) for name, x in read.items()}))
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            return [(f": {name}", item) for name, item in (*read.items(), *cells)]
        elif isinstance(value, types.MethodType):
            return [("", value.__self__), ("", value.__func__)]
        elif isinstance(value, functools.partial):
            return [("", value.func), (".args", value.args), (".keywords", value.keywords)]
        elif isinstance(value, (dict, list, tuple)):
            if len(value) <= CHECKED_ITEMS:
                pairs = [*(value.items() if isinstance(value, dict) else enumerate(value))]
                copies = {name: self._kept(x) for name, x in pairs}
                self._parts.append((value, copies if isinstance(value, dict) else [*copies.values()]))
                return [(f".{name}", item) for name, item in pairs]
        elif isinstance(value, type) or not hasattr(value, "__dict__"):
            return ()
        elif _is_programs(type(value)) or isinstance(value, tf.keras.layers.Layer) or type(value) in _HOLDERS:
            found = dict(attributes(value))
            if isinstance(value, tf.keras.layers.Layer) and _is_programs(type(value)):
                found |= {name: x for name, x in vars(value).items() if name not in keras.attributes()}
            for place in (value, *filter(_is_programs, type(value).__mro__)):
                own = {name: self._kept(x) for name, x in vars(place).items() if name in found}
                self._parts.append((place if isinstance(place, type) else vars(place), own))
            return [(f".{name}", item) for name, item in found.items()]
        return ()

    def _kept(self, value: Any) -> Any:
        return self._iterators.setdefault(id(value), copy.copy(value)) if isinstance(value, _ITERATORS) else value

    def _put_back(self) -> None:
        """Gives all that has values those that it had. What a dictionary has got since, it keeps."""
        for part, before in self._parts:
            if isinstance(part, np.ndarray):
                part[...] = before
            elif isinstance(part, types.CellType):
                part.cell_contents = before
            elif isinstance(part, list):
                if len(part) != len(before) or not all(map(operator.is_, part, before)):
                    del part[:]
                    part.extend(before)
            elif not isinstance(part, tuple):
                now = vars(part) if isinstance(part, type) else part
                for name, value in before.items():
                    if now.get(name) is not value:
                        setattr(part, name, value) if isinstance(part, type) else part.update({name: value})


class Retrace:
    """A traced step, which `captured` has traced again to find whether it reads an attribute, as long as this lives.

    Args:
      trace: traces it.
      after: called after each trace.
    """

    def __init__(self, captured: Captured, trace: Callable[[], Any], after: Callable[[], Any]):
        self._owners, self._trace, self._after = captured.owners, trace, after
        captured.add_step(self)

    def reads(self, owner: Any, name: str, was_none: bool) -> bool:
        """Whether the step reads an attribute: its trace fails, with an object there that has no value.

        Whether it asks for None is found by a trace with None there, which is another then.

        Args:
          was_none: whether the attribute was None as the step was traced.
        """
        state, before, found = PythonState(self._owners), vars(owner)[name], set[str]()
        try:
            for value in (_NoValue(), None) if was_none else (_NoValue(),):
                vars(owner)[name] = value
                found.add(digests.digest(self._trace().graph, integers=True).value)
        except Exception:
            return True
        finally:
            state._put_back()
            vars(owner)[name] = before
            self._after()
        return len(found) > 1


def _is_programs(value: Any) -> bool:
    """Whether a function is, or an object's class, of the program's own code."""
    name = str(getattr(value, "__module__", None))
    file = getattr(sys.modules.get(name), "__file__", None)  # a notebook has none
    return hasattr(value, "__dict__") and name not in sys.builtin_module_names and (file is None or is_users_file(file))
