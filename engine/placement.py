"""Which variable lives on which parameter server: balanced by bytes, or where it was asked to be. Coordinator code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf
from tensorflow.python.eager import context

_LISTED = 20  # variables, of a table for people


class Placed(NamedTuple):
    """A variable's path, its size in bytes, the number of its server, and whether it is there to be beside another."""

    path: str
    bytes: int
    server: int
    beside: bool


class Rule(NamedTuple):
    """Variables in whose path `pattern` is found go to server `server`."""

    pattern: str
    server: int


class Placement:
    """Places each variable that is made within `creator_scope` on the server that holds the fewest bytes.

    In the order in which they are made: what is to come is not known. Slots live with their variable, and weigh.
    An explicit `tf.device("/job:ps/task:0")` is honoured, and so are `rules`, the first that fits.

    Args:
      distribution: the `tf.distribute.ParameterServerStrategy`.
      num_servers: how many there are.
      rules: asked for by the user.
    """

    def __init__(self, distribution, num_servers: int, rules: Sequence[Rule] = ()):
        self._distribution = distribution
        self._rules = [(re.compile(rule.pattern), rule.server) for rule in rules]
        self._anchors: list[tf.Variable] = []
        self.table: list[Placed] = []
        self.loads = [0] * num_servers

    def build(self) -> None:
        """Makes a variable on each server, to be beside: the strategy places by that alone, or in turn.

        Once, before any other variable is made.
        """
        with self._distribution.scope():
            made = [tf.Variable(0, trainable=False, name=f"anchor_{server}") for server in range(len(self.loads))]
        self._anchors = sorted(made, key=lambda variable: _server_of(variable.device))

    def creator_scope(self):
        """The context in which variables are placed, within the strategy's scope."""
        return tf.variable_creator_scope(self._create)

    def lines(self) -> list[str]:
        """The table for people: bytes, server and path of each variable, the biggest first; slots are in the sums."""
        found = sorted((each for each in self.table if not each.beside), key=lambda each: -each.bytes)
        width = len(f"{max((each.bytes for each in found), default=0):,}")
        lines = [f"  ps {each.server}  {each.bytes:>{width},} bytes  {each.path}" for each in found[:_LISTED]]
        if len(found) > _LISTED:
            lines.append(f"  and {len(found) - _LISTED} smaller ones")
        sums = ", ".join(f"ps {server} {load:,} bytes" for server, load in enumerate(self.loads))
        return [f"variables, with their slots: {sums}", *lines]

    def _create(self, next_creator, **keywords):
        path = "/".join(filter(None, [tf.get_current_name_scope(), keywords.get("name") or "variable"]))
        size = _size(keywords)
        beside = "colocate_with" in keywords
        if not beside:
            # What the strategy's `colocate_vars_with` does.
            keywords["colocate_with"] = self._anchors[self._server_for(path)]
        variable = next_creator(**keywords)
        server = _server_of(variable.device)
        self.table.append(Placed(path, size, server, beside))
        self.loads[server] += size
        return variable

    def _server_for(self, path: str) -> int:
        if (asked := _server_of(context.context().device_name)) is not None:
            return asked
        for pattern, server in self._rules:
            if pattern.search(path):
                return server
        return self.loads.index(min(self.loads))


def _server_of(device: str | None) -> int | None:
    found = re.search(r"/job:ps\b.*/task:(\d+)", device or "")
    return int(found[1]) if found else None


def _size(keywords: dict) -> int:
    """Of the variable that is to be made. A function that gives the initial value is traced, not run."""
    value, shape, dtype = keywords.get("initial_value"), keywords.get("shape"), keywords.get("dtype")
    if shape is None or dtype is None:
        if callable(value):
            value = tf.function(value, autograph=False).get_concrete_function().structured_outputs
        value = value if hasattr(value, "dtype") and hasattr(value, "shape") else tf.convert_to_tensor(value)
        shape, dtype = value.shape if shape is None else shape, value.dtype if dtype is None else dtype
    return (tf.TensorShape(shape).num_elements() or 0) * tf.as_dtype(dtype).size
