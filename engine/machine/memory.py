"""The memory that this process may use: the machine's and its control groups'. Needs no TensorFlow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from . import cpus

# Of a control group, v2 and v1: its limit, what it uses, and that part of it that the kernel frees when needed.
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def usable_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the bytes that this process may use: the machine's, or less by a control group's limit."""
    return min(limit for limit, _ in _limits(proc, cgroups))


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the bytes that can be used without swapping, or being killed."""
    return min(limit - used for limit, used in _limits(proc, cgroups))


def _limits(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """Yields the bytes of the machine, and of each control group that has a limit, and how many of them are in use."""
    total, free = (int(_values(proc / "meminfo", name)[0]) for name in ("MemTotal:", "MemAvailable:"))
    yield total << 10, total - free << 10
    for folder in cpus.control_groups(proc, cgroups, "memory"):
        for limit, used, freed in _FILES:
            with contextlib.suppress(ValueError, IndexError):  # no such file, or no limit: "max"
                cached = sum(map(int, _values(folder / "memory.stat", freed)))
                yield int(cpus.lines(folder / limit)[0]), int(cpus.lines(folder / used)[0]) - cached


def _values(path: Path, name: str) -> list[str]:
    return [words[1] for words in map(str.split, cpus.lines(path)) if words and words[0] == name]
