"""Reads a plan that `crankshaft plan --result_json` wrote, for who uses its figures. Host code, no TensorFlow.

Anybody may have written the file: figures that a plan can't have are an error of one line.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

from ...engine.machine.files import read_json
from ..errors import UsageError

_MOST_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """The figures of a plan for one number of hosts.

    Attributes:
      hosts: workers.
      servers: parameter servers.
      gpus_per_host: of each worker.
      host_bytes: memory of a worker's task.
      server_bytes: memory of a parameter server's task.
      examples_per_sec: across all replicas.
      step_seconds: of one step.
      network_share: of a step's time, waiting for the network.
      goodput: share of the time that goes to steps that count.
    """

    hosts: int
    servers: int
    gpus_per_host: int
    host_bytes: float
    server_bytes: float
    examples_per_sec: float
    step_seconds: float
    network_share: float
    goodput: float


def read(path: str, flags: int = os.O_RDONLY) -> dict[int, PlannedRun]:
    """Returns a plan's figures by the number of hosts.

    Args:
      path: of the file.
      flags: as `open_regular` takes it.

    Raises:
      UsageError: the file can't be read, or is not a plan.
    """
    try:
        plan = read_json(path, flags=flags, most_bytes=_MOST_BYTES)
        planned = [_planned(each) for each in plan["hosts"]]
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError) as error:
        raise UsageError(f"{path} is not a plan ({error!r}); give a file of crankshaft plan --result_json") from None
    return {each.hosts: each for each in planned}


def _planned(values: dict[str, Any]) -> PlannedRun:
    step = values["step"]
    names = ("hosts", "servers", "gpus_per_host", "host_bytes", "server_bytes", "examples_per_sec", "goodput")
    own = sum(step[f"{part}_seconds"] for part in ("compute", "memory", "dispatch"))
    figures = PlannedRun(
        **{name: values[name] for name in names},
        step_seconds=step["seconds"],
        network_share=0.0 if step["bound"] == "input" else max(0.0, 1 - own / step["seconds"]),
    )
    for name, value in vars(figures).items():
        kind = int if name in ("hosts", "servers", "gpus_per_host") else (int, float)
        if type(value) is bool or not isinstance(value, kind) or not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value}")
    return figures
