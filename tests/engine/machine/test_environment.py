"""The machine as it is found."""

import mmap
import os
import resource
from pathlib import Path

import pytest
import tensorflow as tf

from crankshaft.engine.machine import cpus, environment, memory


def test_environment_names_versions_and_the_flags_that_tune():
    found = environment.describe({"XLA_FLAGS": "--xla_a", "TF_ENABLE_ONEDNN_OPTS": "0", "HOME": "x", "SECRET": "y"})
    assert found["versions"]["tensorflow"] == tf.__version__
    assert found["flags"] == {"TF_ENABLE_ONEDNN_OPTS": "0", "XLA_FLAGS": "--xla_a"}
    assert found["usable_cores"] == cpus.usable_cores() > 0
    assert found["memory_mb"] == memory.usable_bytes() // 2**20 > 100
    assert found["gpus"] == environment.gpu_names()
    assert [*found["threads"]] == ["inter_op", "intra_op"]
    assert all(load == round(load, 2) >= 0 for load in found["load_average"])
    assert found["cpu"] in Path("/proc/cpuinfo").read_text()


def test_peak_memory_follows_an_allocation():
    before, statm = environment.peak_rss_mb(), Path("/proc/self/statm")
    held = int(statm.read_text().split()[1]) * resource.getpagesize() / 2**20 if statm.exists() else 0
    # With the block, more than the process has held so far. A map of its own: the allocator reuses what was freed.
    size = int(before - held + 64) << 20
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        for _ in range(size >> 20):
            block.write(bytes(1 << 20))
        assert before + 32 <= environment.rss_mb() <= environment.peak_rss_mb() < before + 2 * (size >> 20)


@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="there is a GPU")
def test_without_a_gpu_none_has_a_peak():
    assert environment.device_peak_mb() is None


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


def test_the_seconds_that_a_quota_stopped_a_process_are_those_of_its_groups(tmp_path, monkeypatch):
    groups = [tmp_path / name for name in ("v2", "v1", "none")]
    texts = "usage_usec 7\nthrottled_usec 2500000\n", "throttled_time 500000000\n"
    for group, text in zip(groups, texts, strict=False):
        group.mkdir()
        (group / "cpu.stat").write_text(f"nr_throttled 3\n{text}")
    monkeypatch.setattr(cpus, "control_groups", lambda: groups)
    assert cpus.throttled_seconds() == pytest.approx(3.0)


def test_cpu_seconds_are_those_of_processes_and_their_children_that_have_ended(tmp_path):
    for pid, name in ((7, "python"), (8, "a) b (c")):  # a program chooses its name
        (tmp_path / str(pid)).mkdir()
        times = " ".join(map(str, [1000, 200, 30, 4, 99999]))
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({name}) S {' '.join(['5'] * 10)} {times}\n")
    assert cpus.cpu_seconds([7, 8, 9], tmp_path) == 2 * 1234 / os.sysconf("SC_CLK_TCK")


def test_cpus_are_those_of_any_of_some_processes():
    gone = 2**22 + 1  # beyond the largest process ID
    assert cpus.usable_cpus([gone]) == set()
    assert cpus.usable_cpus([gone, os.getpid()]) == os.sched_getaffinity(0)


@pytest.mark.parametrize(
    ("membership", "usable", "available"),
    [
        ("0::/none", 8 << 20, 4 << 20),
        ("0::/job", 6 << 20, (6 << 20) - 1000 + 10),
        ("4:cpu,memory:/job", 5 << 20, (5 << 20) - 2000 + 20),
        ("4:cpu:/job", 8 << 20, 4 << 20),
        (None, 8 << 20, 4 << 20),
    ],
)
def test_memory_is_the_machines_or_less_by_a_groups_limit(tmp_path, membership, usable, available):
    files = {"meminfo": "MemFree: 1 kB\nMemTotal: 8192 kB\n\nMemAvailable: 4096 kB\n", "self/cgroup": membership}
    files |= {"fs/job/memory.max": "6291456", "fs/job/memory.current": "1000", "fs/job/memory.stat": "inactive_file 10"}
    files |= {f"fs/memory/job/memory.{name}_in_bytes": text for name, text in (("limit", "5242880"), ("usage", "2000"))}
    files |= {"fs/memory/job/memory.stat": "inactive_file 7\ntotal_inactive_file 20", "fs/memory.max": "max"}
    if available > 4 << 20:  # the machine has more
        files["meminfo"] = files["meminfo"].replace("4096", "8000")
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        if text:
            (tmp_path / path).write_text(text)
    assert memory.usable_bytes(tmp_path, tmp_path / "fs") == usable
    assert memory.available_bytes(tmp_path, tmp_path / "fs") == available


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


@pytest.mark.parametrize(
    ("flags", "row_bytes", "batched", "wide"),
    [
        ({"amx_tile"}, 8192, True, False),
        ({"amx_tile", "avx512_vbmi2"}, 8193, False, True),
        ({"avx512f"}, 8192, False, False),
    ],
)
def test_what_is_fast_is_told_by_the_cpus_features(monkeypatch, flags, row_bytes, batched, wide):
    monkeypatch.setattr(cpus, "features", lambda: flags)
    assert (cpus.prefers_batched_matmul(row_bytes), cpus.has_fast_wide_vectors()) == (batched, wide)
