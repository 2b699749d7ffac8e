"""Plots a plan: examples per second and goodput by the number of hosts. Host code."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import UsageError

_KINDS = (".png", ".svg", ".pdf")


def check(path: str) -> None:
    """Raises `UsageError` if a plot can't be written to such a file, before anything is computed for it."""
    if os.path.splitext(path)[1] not in _KINDS:
        raise UsageError(f"--plot={path} is not a name that ends in {', '.join(_KINDS[:-1])} or {_KINDS[-1]}")
    try:
        import matplotlib as _  # noqa: F401
    except ImportError:
        raise UsageError(f"--plot={path} needs matplotlib: pip install crankshaft[plan]") from None


def write(path: str, entries: Sequence[Mapping[str, Any]]) -> None:
    """Writes a plot of a plan's entries to a file whose name `check` has let pass."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    hosts = [each["hosts"] for each in entries]
    curves = {"planned": [(each["examples_per_sec"] * each["goodput"], each["goodput"]) for each in entries]}
    if all("simulated" in each for each in entries):
        found = [each["simulated"] for each in entries]
        curves["simulated"] = [(each["examples_per_sec"], each["goodput"]) for each in found]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, points in curves.items():
        for axes, values in zip((left, right), zip(*points, strict=True), strict=True):
            axes.plot(hosts, values, marker="o", label=name)
    first, _ = curves["planned"][0]
    left.plot(hosts, [first * each / hosts[0] for each in hosts], ":", color="gray", label="in proportion to hosts")
    left.set(xscale="log", yscale="log", xlabel="hosts", ylabel="examples per second")
    right.set(xscale="log", ylim=(0, 1.02), xlabel="hosts", ylabel="goodput")
    right.yaxis.set_major_formatter(PercentFormatter(1.0))
    for axes in (left, right):
        axes.set_xticks(hosts, [f"{each:,}" for each in hosts])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=150)
