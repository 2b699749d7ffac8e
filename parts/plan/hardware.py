"""The figures of a machine that a plan computes with: published ones by name, or a file's.

Where a figure depends on a size, it is a table of points, and between two points it is interpolated.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import math
import os
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from ...runner.command_line import parsing
from ...runner.command_line.rules import (
    Integer,
    Number,
    OneOf,
    OtherTypeError,
    Text,
    ValueType,
    default_value,
    fields,
    flag,
)
from ...runner.command_line.values import short
from ...runner.failures import UsageError, nearest

_REQUIRED: Any = dataclasses.MISSING
_DTYPES = ("float32", "bfloat16", "float16", "float64")
Points: TypeAlias = tuple[tuple[float, float], ...]  # (size, figure)


class _Table(ValueType):
    """Figures by size, in ascending order.

    Args:
      least: the fewest points that a table has; with one, a number stands for all sizes.
    """

    def __init__(self, least: int, figure: Number):
        self._least, self._figure = least, figure
        table = "a table such as {0: 0.00002, 1e9: 0.04}"
        self.expected = f"{figure.expected}, or {table}" if least == 1 else f"{table}, of {least} sizes or more"

    def coerce(self, value: Any) -> Points:
        points = value if isinstance(value, Mapping) else {"0": value}
        if len(points) < self._least:
            raise ValueError(f"it takes {self.expected}")
        sizes = (size if isinstance(size, str) else float(size) for size in points)
        return tuple(sorted(zip(map(_FROM_ZERO.coerce, sizes), map(self._figure.coerce, points.values()), strict=True)))


class _Mapping(ValueType):
    """Maps names to tables, or other figures."""

    def __init__(self, names: Sequence[str], kind: ValueType):
        self._names, self._kind = names, kind
        self.expected = f"a mapping of {', '.join(names) or 'names'}, each to {kind.expected}"

    def coerce(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping) or not value:
            raise ValueError(f"it takes {self.expected}")
        if unknown := next((name for name in value if self._names and name not in self._names), None):
            raise ValueError(f"{unknown} is unknown; {nearest(unknown, self._names)}")
        return {name: self._kind.coerce(figure) for name, figure in value.items()}


_FROM_ZERO = Number(lower=0, upper=1e30)
_POSITIVE = Number(above=0, upper=1e30)
_RATIO = Number(lower=0, upper=1)
_TIMES = _Table(2, _FROM_ZERO)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """A host with its devices, and what connects it. A GB is 1e9 bytes.

    Times of transfers are tables {bytes: seconds} of one message; the figure at 0 bytes is the latency.
    """

    name: str = flag(Text("a name"), "", "Hardware name.")
    sources: Mapping[str, str] = flag(_Mapping((), Text("a source")), {}, "Sources of the figures, by name.")
    kind: str = flag(OneOf(("cpu", "gpu", "tpu")), _REQUIRED, "Kind of the devices.")
    devices_per_host: int = flag(Integer(1, 1024), _REQUIRED, "Devices that train; a host's CPUs are one.")
    device_memory_gb: float = flag(_POSITIVE, _REQUIRED, "Memory of one device.")
    host_memory_gb: float = flag(_POSITIVE, _REQUIRED, "Memory of one host.")
    matmul_tflops: Mapping[str, Points] = flag(
        _Mapping(_DTYPES, _Table(1, _POSITIVE)), _REQUIRED, "1e12 operations per second of n x n, by dtype and n."
    )
    memory_gb_per_sec: float = flag(_POSITIVE, _REQUIRED, "Read and written together, of one device.")
    cache_gb_per_sec: float | None = flag(_POSITIVE, None, "The same for arrays that fit into the last-level cache.")
    cache_mb: float | None = flag(_POSITIVE, None, "Last-level cache size in MiB.")
    step_seconds: float = flag(_FROM_ZERO, 0.0, "The loop's own, per step.")
    operation_seconds: float = flag(_FROM_ZERO, 0.0, "To start one operation of a step that XLA does not compile.")
    network_seconds: tuple[tuple[float, float], ...] = flag(_TIMES, _REQUIRED, "One message between hosts, by bytes.")
    link_seconds: tuple[tuple[float, float], ...] | None = flag(_TIMES, None, "One message between devices, by bytes.")
    network_overlap: float = flag(_RATIO, 1.0, "Share of the backward pass during which messages travel at full speed.")
    achieved: Mapping[str, float] = flag(
        _Mapping(("matmul", "memory", "network"), _RATIO), {}, "Share of published rates that programs reach; else 1."
    )
    read_gb_per_sec: float = flag(_POSITIVE, _REQUIRED, "From files, of one host.")
    write_gb_per_sec: float = flag(_POSITIVE, _REQUIRED, "To files, of one host.")
    copy_gb_per_sec: float = flag(_POSITIVE, _REQUIRED, "From a device's memory to the host's, for a checkpoint.")
    hours_between_failures: float = flag(_POSITIVE, _REQUIRED, "Mean, of one host, whatever fails.")
    lost_host_share: float = flag(_RATIO, 0.78, "Share of failures after which the scheduler has to replace the host.")
    recovery_seconds: float = flag(_POSITIVE, 10.0, "From a failure to the next step, on the same hosts.")
    lost_host_seconds: float = flag(_POSITIVE, 600.0, "From the loss of a host to the next step.")
    step_jitter: float = flag(_RATIO, 0.02, "Standard deviation of a step's time, as a share of it.")
    slow_host_share: float = flag(_RATIO, 0.0, "Share of hosts that are slow at a time; for simulations.")
    slow_host_factor: float = flag(Number(lower=1, upper=1e3), 1.5, "How many times as long a step takes there.")
    price_per_host_hour: float | None = flag(_POSITIVE, None, "In any currency.")

    @property
    def assumed(self) -> list[str]:
        """The figures that are neither measured nor published: assumptions, and defaults."""
        defaults = {name: default_value(field) for name, field in fields(Hardware).items()}
        return [
            name
            for name, default in defaults.items()
            if "assumption" in self.sources.get(name, "")
            or (name not in self.sources and isinstance(default, float) and default and getattr(self, name) == default)
        ]

    def matmul_seconds(self, dtype: str, flops: float) -> float:
        """Computes the seconds of one product of this many operations, by the rate of a square one with as many.

        Raises:
          UsageError: the rate of this dtype is unknown.
        """
        if dtype not in self.matmul_tflops:
            raise UsageError(
                f"--on={self.name} has no matmul_tflops of {dtype}, in which the model computes; add it "
                f"(it has {', '.join(self.matmul_tflops)})"
            )
        rate = between(self.matmul_tflops[dtype], (flops / 2) ** (1 / 3))
        return flops / (1e12 * rate * self.achieved.get("matmul", 1.0))

    def memory_seconds(self, moved_bytes: float, resident_bytes: float = math.inf) -> float:
        """Computes the seconds of moving bytes of tensors that take `resident_bytes`."""
        fits = resident_bytes <= 2**20 * (self.cache_mb or 0)
        rate = (self.cache_gb_per_sec if fits else None) or self.memory_gb_per_sec
        return moved_bytes / (1e9 * rate * self.achieved.get("memory", 1.0))

    def message_seconds(self, link: str, message_bytes: float) -> float:
        """Computes the seconds of one message over a link, "devices" or "hosts".

        Raises:
          UsageError: the link between devices is unknown.
        """
        points = self.network_seconds if link == "hosts" else self.link_seconds
        if points is None:
            raise UsageError(f"--on={self.name} has no link_seconds, the time of a message between devices")
        (before, earlier), (last, latest) = points[-2:]
        beyond = max(0.0, message_bytes - last) * max(0.0, latest - earlier) / (last - before)
        latency = between(points, 0)
        return latency + (between(points, message_bytes) + beyond - latency) / self.achieved.get("network", 1.0)


def between(points: Points, size: float) -> float:
    """Interpolates a table linearly; outside of it, its first or last figure holds."""
    index = bisect.bisect_left([point for point, _ in points], size)
    if index in (0, len(points)):
        return points[min(index, len(points) - 1)][1]
    (low, first), (high, last) = points[index - 1], points[index]
    return first + (last - first) * (size - low) / (high - low)


def read(name_or_path: str) -> Hardware:
    """Reads published hardware by its name, or a YAML or JSON file.

    Raises:
      UsageError: the file can't be read, lacks a required figure, has an unknown one, or one out of its range.
    """
    published = json.loads(pkgutil.get_data(__package__, "published.json") or b"")
    if name_or_path in published:
        return from_figures({"name": name_or_path, **published[name_or_path]}, name_or_path)
    if not os.path.exists(os.path.expanduser(name_or_path)) and os.sep not in name_or_path:
        fix = nearest(name_or_path, [*published], f"use {', '.join(published)}, or a path")
        raise UsageError(f"--on={name_or_path} is neither a file nor published hardware; {fix}")
    return from_figures(parsing.load_mapping("on", name_or_path, "hardware", "devices_per_host: 8"), name_or_path)


def from_figures(figures: Mapping[str, Any], source: str) -> Hardware:
    """Converts figures by name, each a number or text. `source` names them in errors; see `read`."""
    hardware_fields = fields(Hardware)
    coerced: dict[str, Any] = {"name": source}
    for name, value in figures.items():
        if name not in hardware_fields:
            raise UsageError(f"--on={source}: {name} is unknown; {nearest(name, hardware_fields)}")
        kind = hardware_fields[name].metadata["info"].kind
        try:
            coerced[name] = kind.coerce(value)
        except (OtherTypeError, ValueError) as error:
            why = str(error) or f"it takes {kind.expected}"
            shown = "nothing" if value in (None, "") else short(value)
            raise UsageError(f"--on={source}: {name} is {shown}; {why}") from None
    for name, field in hardware_fields.items():
        if name not in coerced and default_value(field) is dataclasses.MISSING:
            info = field.metadata["info"]
            raise UsageError(f"--on={source} has no {name} ({info.help[:-1]}); add it: {info.kind.expected}")
    return Hardware(**coerced)
