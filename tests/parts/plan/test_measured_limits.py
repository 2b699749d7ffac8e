"""The machine's limits."""

import pytest

from crankshaft.parts.plan import measured_limits


@pytest.mark.parametrize("sizes", ["small", pytest.param("as they are", marks=pytest.mark.slow)])
def test_probe_measures_products_memory_and_cache(sizes, request):
    if sizes == "small":
        request.getfixturevalue("small_probe")
    found = measured_limits.probe("/device:CPU:0", ("float32", "bfloat16"))
    assert set(found["matmul_gflops"]) == {"float32", "bfloat16"}
    for name in ("float32", "bfloat16"):
        assert sorted(found["samples"]["matmul_gflops"][name])[2] == found["matmul_gflops"][name] > 0
    assert min(found["memory_gb_per_sec"], found["cache_gb_per_sec"], found["cache_mb"]) > 0


def test_last_cache_is_that_of_all_cores_together(tmp_path):
    def cache(core, index, level, size, shared):
        folder = tmp_path / f"cpu{core}" / "cache" / f"index{index}"
        folder.mkdir(parents=True)
        for name, text in (("level", level), ("size", size), ("shared_cpu_list", shared)):
            (folder / name).write_text(f"{text}\n")

    for core, shared in enumerate(["0-1", "0-1", "2-3", "2-3"]):
        cache(core, 0, 1, "32K", str(core))
        cache(core, 1, 3, "24576K", shared)
    assert measured_limits.last_cache_bytes({0, 1, 2, 3}, tmp_path) == 48 << 20
    assert measured_limits.last_cache_bytes({1}, tmp_path) == 24 << 20
    assert measured_limits.last_cache_bytes({0}, tmp_path / "none") == 32 << 20  # as is assumed where nothing is told
