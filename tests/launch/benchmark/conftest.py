"""What tests of the benchmark share: `small_probe`, which spares them two seconds of all cores."""

from __future__ import annotations

import pytest


@pytest.fixture
def small_probe(monkeypatch):
    """Has the limits measured by matrices of 256 rows and arrays of a MiB."""
    from crankshaft.launch.benchmark.measure import machine

    monkeypatch.setattr(machine, "_MATMUL_SIZE", {"CPU": 256})
    monkeypatch.setattr(machine, "_MOST_ARRAY_BYTES", 1 << 20)
    monkeypatch.setattr(machine, "_SAMPLE_SECONDS", 0.01)
