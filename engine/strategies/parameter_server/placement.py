"""Places variables on parameter servers, balanced by bytes or as the user wants. Coordinator code."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ... import logging
from ...internals.tensorflow import current_device, variable_without_value
from ...machine.threads import Thread

_LISTED = 20  # variables, of a table for people
# With less than both, a server's share of a step's work costs more in messages than it saves.
_LEAST_SHARE = 0.05  # of the fullest server's bytes
_LEAST_BYTES = 256 << 10


class Placed(NamedTuple):
    """A variable's path, size in bytes, server number, and whether it was placed beside another."""

    path: str
    bytes: int
    server: int
    beside: bool


class Rule(NamedTuple):
    """Variables whose path matches `pattern` are placed on server `server`."""

    pattern: str
    server: int


class Placement:
    """Places each variable created within `creator_scope` on the server with the fewest bytes.

    The biggest first, if a rehearsal has shown the variables (see `assign_servers`); else in the order of creation.
    Slots are placed with their variable, and count. An explicit `tf.device("/job:ps/task:0")` takes precedence, as does
    the first of `rules` that matches.

    Args:
      distribution: the `tf.distribute.ParameterServerStrategy`.
      num_servers: their number.
      rules: the user's.
    """

    def __init__(self, distribution, num_servers: int, rules: Sequence[Rule] = ()):
        self._distribution = distribution
        self._rules = [(re.compile(rule.pattern), rule.server) for rule in rules]
        self._anchors: list[tf.Variable] = []
        self._planned: dict[tuple[str, int], list[int]] = {}  # servers of variables by name and size, in order
        self.table: list[Placed] = []
        self.loads = [0] * num_servers

    def build(self) -> None:
        """Creates a variable per server, with which others are colocated: the strategy would place them in turn.

        Call it once, before any other variable is created.
        """
        with self._distribution.scope():
            made = [tf.Variable(0, trainable=False, name=f"anchor_{server}") for server in range(len(self.loads))]
        self._anchors = sorted(made, key=lambda variable: server_number(variable.device))

    def plan(self, make: Callable[[], Any]) -> None:
        """Determines, before `make` creates variables, their sizes and servers."""
        variables = dry_run(make)
        wanted = [self._wanted(each.device, each.path) for each in variables]
        servers = assign_servers([each.weight for each in variables], wanted, len(self.loads))
        for each, server in zip(variables, servers, strict=True):
            self._planned.setdefault((each.name, each.bytes), []).append(server)

    def creator_scope(self):
        """Returns the context in which variables are placed, within the strategy's scope."""
        return tf.variable_creator_scope(self._create)

    def lines(self) -> list[str]:
        """Formats a table for people: bytes, path, shards and servers of each variable, the biggest first.

        Sums include slots.
        """
        whole: dict[str, list[Placed]] = {}
        for each in self.table:
            if not each.beside:
                whole.setdefault(re.sub(r"/shard_\d+$", "", each.path), []).append(each)
        sizes = {path: sum(shard.bytes for shard in shards) for path, shards in whole.items()}
        biggest = sorted(whole, key=lambda path: -sizes[path])
        width = len(f"{max(sizes.values(), default=0):,}")
        lines = []
        for path in biggest[:_LISTED]:
            shards = whole[path]
            counted = f", {len(shards)} shards" if len(shards) > 1 else ""
            servers = ",".join(str(server) for server in sorted({shard.server for shard in shards}))
            lines.append(f"  ps {servers}  {sizes[path]:>{width},} bytes  {path}{counted}")
        if len(biggest) > _LISTED:
            lines.append(f"  and {len(biggest) - _LISTED} smaller ones")
        sums = ", ".join(f"ps {server} {load:,} bytes" for server, load in enumerate(self.loads))
        return [f"variables, with their slots: {sums}", *lines]

    def _create(self, next_creator, **keywords):
        name, path = _name_and_path(keywords)
        size = _bytes(*shape_and_dtype(keywords))
        beside = "colocate_with" in keywords
        if not beside:
            # As in the strategy's `colocate_vars_with`.
            keywords["colocate_with"] = self._anchors[self._server_for(name, path, size)]
        variable = next_creator(**keywords)
        server = server_number(variable.device)
        self.table.append(Placed(path, size, server, beside))
        self.loads[server] += size
        return variable

    def _server_for(self, name: str, path: str, size: int) -> int:
        planned = self._planned.get((name, size))
        server = planned.pop(0) if planned else self.loads.index(min(self.loads))
        wanted = self._wanted(current_device(), path)
        return server if wanted is None else wanted

    def _wanted(self, device: str | None, path: str) -> int | None:
        """Returns the server that the user wants for a variable."""
        if (there := server_number(device)) is not None:
            return there
        return next((server for pattern, server in self._rules if pattern.search(path)), None)


def assign_servers(weights: Sequence[int], wanted: Sequence[int | None], num_servers: int) -> list[int]:
    """Chooses a server for each weight, in bytes: the wanted one, or, from the heaviest on, the least loaded.

    Graham 1969, Bounds on multiprocessing timing anomalies: at most 4/3 of the best.

    A server that would get almost nothing gets nothing, unless it is wanted.
    """
    _, loads = _spread(weights, wanted, range(num_servers))
    least = min(_LEAST_SHARE * max(loads.values()), _LEAST_BYTES)
    worth_it = [server for server, load in loads.items() if load >= least or server in wanted]
    return _spread(weights, wanted, worth_it)[0]


def _spread(weights: Sequence[int], wanted: Sequence[int | None], among: Sequence[int]) -> tuple[list[int], dict]:
    """Returns (a server for each weight, the servers' loads)."""
    servers, loads = list(wanted), dict.fromkeys(among, 0)
    for index in sorted(range(len(weights)), key=lambda index: (wanted[index] is None, -weights[index])):
        if servers[index] is None:
            servers[index] = min(loads, key=loads.get)
        loads[servers[index]] += weights[index]
    return servers, loads


@dataclasses.dataclass
class PlannedVariable:
    """A variable to be created.

    Attributes:
      name, path: without, and with the scopes around it.
      bytes: its own.
      device: the requested one, or empty.
      weight: its bytes, including those placed beside it.
    """

    name: str
    path: str
    bytes: int
    device: str
    weight: int


def dry_run(make: Callable[[], Any]) -> list[PlannedVariable]:
    """Returns the variables that `make` creates independently of others, in order; [] if unknown.

    Calls it in a graph that is never run, so nothing has a variable's size, and in its own thread, where Keras numbers
    layers from the start. A `make` that reads values (e.g. of a variable) fails there.
    """
    by_op: dict[str, PlannedVariable] = {}

    def record(next_creator, **keywords):
        name, path = _name_and_path(keywords)
        shape, dtype = shape_and_dtype(keywords)
        size = _bytes(shape, dtype)
        variable = variable_without_value(shape, dtype, keywords.get("name"), keywords.get("trainable"))
        op = variable.handle.op
        (group,) = (name.decode().removeprefix("loc:@") for name in op.colocation_groups())
        if group == op.name:  # beside nothing
            by_op[op.name] = PlannedVariable(name, path, size, variable.device, size)
        else:
            by_op[group].weight += size
        return variable

    def build() -> None:
        try:
            with tf.Graph().as_default(), tf.variable_creator_scope(record):
                make()
        except Exception as error:  # of any kind: a mistake will be raised again
            by_op.clear()
            logging.info("variables are placed in the order in which they are made: %s", error)

    thread = Thread(target=build, name="rehearsal")
    thread.start()
    thread.join()
    return list(by_op.values())


def server_number(device: str | None) -> int | None:
    """Returns the server number of a device; None if it is on no server."""
    task = re.search(r"/job:ps\b.*/task:(\d+)", device or "")
    return int(task[1]) if task else None


def _name_and_path(keywords: dict) -> tuple[str, str]:
    name = keywords.get("name") or "variable"
    return name, "/".join(filter(None, [tf.get_current_name_scope(), name]))


def shape_and_dtype(keywords: dict) -> tuple[tf.TensorShape, tf.DType]:
    """Returns the shape and dtype of a variable to be created. Traces a function for the initial value."""
    value, shape, dtype = keywords.get("initial_value"), keywords.get("shape"), keywords.get("dtype")
    if shape is None or dtype is None:
        if callable(value):
            value = tf.function(value, autograph=False).get_concrete_function().structured_outputs
        value = value if hasattr(value, "dtype") and hasattr(value, "shape") else tf.convert_to_tensor(value)
        shape, dtype = value.shape if shape is None else shape, value.dtype if dtype is None else dtype
    return tf.TensorShape(shape), tf.as_dtype(dtype)


def _bytes(shape: tf.TensorShape, dtype: tf.DType) -> int:
    return (shape.num_elements() or 0) * dtype.size
