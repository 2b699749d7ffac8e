"""The machine as it is found."""

import mmap
import resource
from pathlib import Path

import pytest
import tensorflow as tf

from crankshaft.engine.machine import cpus, environment


def test_environment_names_versions_and_the_flags_that_tune():
    found = environment.describe({"XLA_FLAGS": "--xla_a", "TF_ENABLE_ONEDNN_OPTS": "0", "HOME": "x", "SECRET": "y"})
    assert found["versions"]["tensorflow"] == tf.__version__
    assert found["flags"] == {"TF_ENABLE_ONEDNN_OPTS": "0", "XLA_FLAGS": "--xla_a"}
    assert found["usable_cores"] > 0
    assert found["cpu"]


def test_peak_memory_follows_an_allocation():
    before, statm = environment.peak_rss_mb(), Path("/proc/self/statm")
    held = int(statm.read_text().split()[1]) * resource.getpagesize() / 2**20 if statm.exists() else 0
    # With the block, more than the process has held so far. A map of its own: the allocator reuses what was freed.
    size = int(before - held + 64) << 20
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        for _ in range(size >> 20):
            block.write(bytes(1 << 20))
        assert environment.peak_rss_mb() >= before + 32


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/a/b", {"a/cpu.max": "50000 100000", "a/b/cpu.max": "max 100000"}, 0.5),
        ("0::/../host", {"cpu.max": "25000 100000"}, 0.25),
        ("4:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "200000"}, 0.25),
        ("4:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "200000"}, None),
        ("0::/", {}, None),
    ],
)
def test_cpu_quota_bounds_usable_cores(tmp_path, membership, files, cores):
    proc, cgroups = tmp_path / "proc", tmp_path / "fs"
    for path, text in {"proc/self/cgroup": membership, **{f"fs/{name}": text for name, text in files.items()}}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n", encoding="utf-8")
    affinity = cpus.usable_cores(tmp_path / "none", cgroups)
    assert cpus.usable_cores(proc, cgroups) == (cores or affinity)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("processor: 0\nflags\t\t: fpu avx2 avx512f\n", {"fpu", "avx2", "avx512f"}),
        ("Features: neon\n", set()),
        (None, set()),
    ],
)
def test_cpu_features_are_those_of_the_kernel(tmp_path, text, found):
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text, encoding="utf-8")
    assert cpus.features(tmp_path) == found
