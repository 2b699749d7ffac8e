"""The memory that this process may still use: the machine's and its control groups'. Host code, no TensorFlow."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

from . import cpus

# Of a control group, v2 and v1: its limit, what it uses, and that part of it that the kernel frees when needed.
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> float:
    """Returns the bytes that can be used without swapping, or being killed; infinity if unknown."""
    free = [float(kilobytes) * 1024 for kilobytes in _values(proc / "meminfo", "MemAvailable:")]
    groups = (each for folder in cpus.control_groups(proc, cgroups, "memory") for each in _left(folder))
    return min((*free, *groups), default=math.inf)


def _left(folder: Path) -> Iterator[float]:
    for limit, used, freed in _FILES:
        with contextlib.suppress(ValueError, IndexError):  # no such file, or no limit: "max"
            cached = sum(map(int, _values(folder / "memory.stat", freed)))
            yield int(cpus.lines(folder / limit)[0]) - int(cpus.lines(folder / used)[0]) + cached


def _values(path: Path, name: str) -> list[str]:
    return [words[1] for words in map(str.split, cpus.lines(path)) if words and words[0] == name]
