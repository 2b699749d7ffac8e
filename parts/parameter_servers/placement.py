"""Places variables on parameter servers, balanced by bytes or as the user wants. Coordinator code."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ...engine.internals.tensorflow import current_device
from .dry_run import dry_run, name_and_path, num_bytes, shape_and_dtype

_LISTED = 20  # variables, of a table for people
# With less than both, a server's part of a step's work costs more in messages than it saves.
_LEAST_FRACTION = 0.05  # of the fullest server's bytes
_LEAST_BYTES = 256 << 10


class Placed(NamedTuple):
    """A variable's path, size in bytes, server number, and whether it was placed beside another."""

    path: str
    bytes: int
    server: int
    beside: bool


class Placement:
    """Places each variable on the server with the fewest bytes, by `create` in the strategy's scope.

    The biggest first, if a rehearsal has shown the variables (see `assign_servers`); else in the order of creation.
    Slots are placed with their variable, and count. An explicit `tf.device("/job:ps/task:0")` takes precedence, as does
    the first of `rules` that matches.

    Args:
      distribution: the `tf.distribute.ParameterServerStrategy`.
    """

    def __init__(self, distribution: tf.distribute.Strategy, num_servers: int, rules: Sequence[tuple[str, int]]):
        self._distribution = distribution
        self._rules = [(re.compile(pattern), server) for pattern, server in rules]
        self._anchors: list[tf.Variable] = []
        self._planned: dict[tuple[str, int], list[int]] = {}  # servers of variables by name and size, in order
        self.table: list[Placed] = []
        self.loads = [0] * num_servers

    def build(self) -> None:
        """Creates a variable per server, with which others are colocated: the strategy itself places round robin.

        Call it once, before any other variable is created.
        """
        with self._distribution.scope():
            anchors = [tf.Variable(0, trainable=False, name=f"anchor_{server}") for server in range(len(self.loads))]
        self._anchors = sorted(anchors, key=variable_server)

    def plan(self, make: Callable[[], Any]) -> None:
        """Determines, before `make` creates variables, their sizes and servers."""
        variables = dry_run(make)
        wanted = [self._wanted(variable.device, variable.path) for variable in variables]
        servers = assign_servers([variable.weight for variable in variables], wanted, len(self.loads))
        for variable, server in zip(variables, servers, strict=True):
            self._planned.setdefault((variable.name, variable.bytes), []).append(server)

    def lines(self) -> list[str]:
        """Formats a table of the variables for people, the biggest first; a server's sum includes slots."""
        whole: dict[str, list[Placed]] = {}
        for placed in self.table:
            if not placed.beside:
                whole.setdefault(re.sub(r"/shard_\d+$", "", placed.path), []).append(placed)
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

    def create(self, next_creator, **keywords):
        """Creates a variable in its place, for `tf.variable_creator_scope`."""
        name, path = name_and_path(keywords)
        size = num_bytes(*shape_and_dtype(keywords))
        beside = "colocate_with" in keywords
        if not beside:
            planned = self._planned.get((name, size))
            chosen = planned.pop(0) if planned else self.loads.index(min(self.loads))
            wanted = self._wanted(current_device(), path)
            # As in the strategy's `colocate_vars_with`.
            keywords["colocate_with"] = self._anchors[chosen if wanted is None else wanted]
        variable = next_creator(**keywords)
        server = variable_server(variable)
        self.table.append(Placed(path, size, server, beside))
        self.loads[server] += size
        return variable

    def _wanted(self, device: str, path: str) -> int | None:
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
    least = min(_LEAST_FRACTION * max(loads.values()), _LEAST_BYTES)
    worth_it = [server for server, load in loads.items() if load >= least or server in wanted]
    return _spread(weights, wanted, worth_it)[0]


def _spread(weights: Sequence[int], wanted: Sequence[int | None], allowed: Sequence[int]) -> tuple[list[int], dict]:
    """Returns (a server for each weight, the servers' loads)."""
    servers, loads = [0] * len(weights), dict.fromkeys(allowed, 0)
    for index in sorted(range(len(weights)), key=lambda index: (wanted[index] is None, -weights[index])):
        server = wanted[index]
        servers[index] = min(loads, key=loads.__getitem__) if server is None else server
        loads[servers[index]] += weights[index]
    return servers, loads


def variable_server(variable: tf.Variable) -> int:
    """Returns the number of the server that a variable is on."""
    server = server_number(variable.device)
    assert server is not None, f"{variable.name} is on no server"
    return server


def server_number(device: str) -> int | None:
    """Returns the server number of a device; None if it is on no server."""
    task = re.search(r"/job:ps\b.*/task:(\d+)", device)
    return int(task[1]) if task else None
