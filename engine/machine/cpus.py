"""The CPUs that this process may use: affinity, control groups, /proc. Needs no TensorFlow."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

_CONFLICTING_BYTES = 8 << 10


def usable_cores(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> float:
    """Returns the cores that this process may use: its affinity, or less under a CPU quota (control group v1, v2)."""
    return min(float(len(usable_cpus([os.getpid()]))), quota_cores(proc, cgroups))


def usable_cpus(pids: Iterable[int]) -> set[int]:
    """Returns the numbers of the CPUs that these processes may run on, by their affinity."""
    cpus = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # ended meanwhile
            cpus |= os.sched_getaffinity(pid)
    return cpus


def quota_cores(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> float:
    """Returns the number of cores in a control group's (v1 or v2) CPU quota; infinity without one."""
    return min(map(_quota_cores, control_groups(proc, cgroups)), default=math.inf)


def features(proc: Path = Path("/proc")) -> set[str]:
    """Returns the features of this machine's CPUs, as named by the kernel (`flags` of /proc/cpuinfo), if known."""
    return set(value(proc / "cpuinfo", "flags").split())


def has_fast_wide_vectors() -> bool:
    """Returns whether this machine's CPUs are fast with 512-bit vectors.

    Those with AVX-512 are, except for the first (Skylake, Cascade Lake), which lower their clock for it (Intel's
    optimization manual, "Skylake Server Power Management"); these lack VBMI2.
    """
    return "avx512_vbmi2" in features()


def prefers_batched_matmul(row_bytes: int) -> bool:
    """Returns whether a float32 matrix product, with rows of this many bytes, is faster as a batch of one product.

    TensorFlow uses another oneDNN kernel for it. It is faster on Intel's CPUs from Sapphire Rapids on, which have AMX,
    if rows are multiples of 8 KiB and conflict in the caches; an AMD EPYC was near its peak with the plain product.
    """
    return row_bytes % _CONFLICTING_BYTES == 0 and "amx_tile" in features()


def throttled_seconds() -> float:
    """Returns the seconds, over CPUs, for which quotas throttled this process's control groups; 0 without quotas."""
    counted = (line.split() for folder in control_groups() for line in lines(folder / "cpu.stat"))
    units = {"throttled_usec": 1e-6, "throttled_time": 1e-9}  # control groups v2 and v1
    return sum(float(value) * units[name] for name, value in counted if name in units)


def cpu_seconds(pids: Iterable[int], proc: Path = Path("/proc")) -> float:
    """Returns the CPU seconds of these processes so far, including children that they have waited for."""
    ticks = 0
    for pid in pids:
        for line in lines(proc / str(pid) / "stat"):
            ticks += sum(map(int, line.rpartition(")")[2].split()[11:15]))  # after the name: utime to cstime, proc(5)
    return ticks / os.sysconf("SC_CLK_TCK")


def control_groups(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup"), controller: str = "cpu"
) -> Iterator[Path]:
    """Yields the folders of the control groups (v1 or v2) that may limit what this process uses, its own first."""
    for line in lines(proc / "self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root = cgroups
        elif controller in controllers.split(","):
            root = cgroups / controller
        else:
            continue
        # A group's quota also limits those below; in a container the path may be the host's, and the root is ours.
        group = Path(path.lstrip("/"))
        yield from (root / folder for folder in (group, *group.parents))


def _quota_cores(folder: Path) -> float:
    limits = lines(folder / "cpu.max")  # v2: "quota period", in microseconds
    limits = limits[0].split() if limits else lines(folder / "cpu.cfs_quota_us") + lines(folder / "cpu.cfs_period_us")
    # No quota is "max" in version 2, and -1 in version 1.
    if len(limits) < 2 or limits[0] in ("max", "-1"):
        return math.inf
    return int(limits[0]) / int(limits[1])


def value(path: Path, name: str) -> str:
    """Returns what follows a name's first colon in a file such as /proc/cpuinfo; "" without that name."""
    named = (line.partition(":") for line in lines(path))
    return next((text.strip() for key, _, text in named if key.strip() == name), "")


def lines(path: Path) -> list[str]:
    """Returns a file's lines; none if it can't be read."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:  # another system, which has no such file
        return []
