"""Divides one machine between the tasks of a cluster: its ports, its cores and its GPUs. Supervisor code."""

from __future__ import annotations

import contextlib
import os
import random
import socket

from ..clusters import listeners
from ..clusters.rendezvous import ClusterError

_PORTS = range(10_000, 60_000)
_TRIES = 10_000


def loopback() -> str:
    """Finds where this machine's tasks reach each other: 127.0.0.1, or [::1] without IPv4."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET) as probe:
        probe.bind(("127.0.0.1", 0))
        return "127.0.0.1"
    return "[::1]"


def free_ports(count: int) -> list[int]:
    """Finds `count` different ports free on all interfaces, since TensorFlow's servers listen on all.

    They are outside of the range that the kernel gives to outgoing connections: a port of that range could be taken in
    the seconds until the task listens there.

    Raises:
      ClusterError: there are fewer.
    """
    first, last = 32_768, 60_999  # where the system does not say (ip(7), ip_local_port_range)
    path = "/proc/sys/net/ipv4/ip_local_port_range"
    with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
        first, last = map(int, file.read().split())
    candidates = [port for port in _PORTS if not first <= port <= last] or list(_PORTS)
    # At random, since jobs that begin together would all try the first ones.
    tried = random.sample(candidates, min(_TRIES, len(candidates)))
    ports: list[int] = []
    for port in tried:
        if len(ports) == count:
            break
        with contextlib.suppress(OSError):
            listeners.listen(port, only_here=False).close()
            ports.append(port)
    if len(ports) < count:
        raise ClusterError(f"only {len(ports)} of the {count} ports that are needed are free on this machine")
    return ports


def usable_cores() -> list[int]:
    """Lists the logical cores that this process may use; those of one physical core and socket are neighbours."""

    def place(core: int) -> tuple[int, int, int]:
        socket_and_core = [0, core]
        for index, name in enumerate(("physical_package_id", "core_id")):
            path = f"/sys/devices/system/cpu/cpu{core}/topology/{name}"
            with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
                socket_and_core[index] = int(file.read())
        return socket_and_core[0], socket_and_core[1], core

    return sorted(os.sched_getaffinity(0), key=place)


def divide_cores(cores: list[int], tasks: int, per_task: int) -> list[list[int] | None]:
    """Assigns `per_task` cores to each task; None if there are too few, so that all tasks share all cores."""
    if per_task * tasks > len(cores):
        return [None] * tasks
    return [cores[first : first + per_task] for first in range(0, per_task * tasks, per_task)]
