"""A plan as JSON, and as a table whose columns are numbers of hosts. Without TensorFlow."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from . import simulation
from .estimate import Estimate
from .hardware import Hardware

_SECTION_ENDS = ("replicas", "of a host, at least", "limited by", "examples per second")
_LEAST_COLUMNS = 34  # width of the figures' names and the first figure


def entry(estimate: Estimate, strategy: str, hardware: Hardware) -> dict[str, Any]:
    """Converts the estimate of one number of hosts to plain JSON; bytes are of one device unless they say otherwise."""
    work, memory = estimate.work, estimate.work.memory
    return {
        "hosts": work.hosts,
        "strategy": strategy,
        "replicas": work.replicas,
        "fits": estimate.fits,
        "uncertain": list(work.uncertain),
        "memory": {**dataclasses.asdict(memory), "total": memory.total},
        "host_bytes": estimate.host_bytes,
        "gpus_per_host": hardware.devices_per_host if hardware.kind == "gpu" else 0,
        "step": dataclasses.asdict(estimate.step),
        "examples_per_sec": estimate.examples_per_sec,
        "hours": estimate.hours,
        "cost": estimate.cost,
        "checkpoint": dataclasses.asdict(estimate.checkpoint),
        "failures": dataclasses.asdict(estimate.failures),
        "goodput": estimate.goodput,
    }


def text(plan: dict[str, Any], machine: Hardware, columns: int) -> str:
    """Formats a plan for a terminal."""
    entries = plan["hosts"]
    lines = [f"{plan['model']}, batches of {plan['global_batch_size']:,}; {machine.name}"]
    lines += ["", table(entries, columns)]
    if plan["jit"] == "auto" and machine.kind != "tpu":
        lines += ["", "One device is planned without XLA; --jit=auto times steps with it too, and takes the faster."]
    uncertain = dict.fromkeys(line for entry in entries for line in entry["uncertain"])
    lines += [f"\nUncertain: {line}." for line in uncertain]
    if machine.assumed:
        lines += ["", f"Assumptions: {', '.join(machine.assumed)}."]
    if "simulated" in entries[0]:
        lines += ["", *simulation.lines({entry["hosts"]: entry["simulated"] for entry in entries})]
    if not plan["fits"]:
        lines += ["", f"It does not fit into {size(1e9 * machine.device_memory_gb)} per device."]
        if plan["advice"]:
            lines += ["With these flags it does:", *(f"  {flags}" for flags in plan["advice"])]
        else:
            lines.append("No mesh, recomputation, sharded optimizer or micro-batch that was tried makes it fit.")
    return "\n".join(lines)


def table(entries: Sequence[dict[str, Any]], columns: int) -> str:
    """Formats entries as a table, with a column for each number of hosts."""
    shown = Table(show_edge=False, pad_edge=False)
    shown.add_column("hosts")
    for entry in entries:
        shown.add_column(f"{entry['hosts']:,}", justify="right")
    for name, figures in _lines(entries):
        shown.add_row(name, *figures, end_section=name in _SECTION_ENDS)
    output = io.StringIO()
    width = max(columns, _LEAST_COLUMNS + 10 * len(entries))
    Console(file=output, width=width, color_system=None).print(shown)
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines())


def _lines(entries: Sequence[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    lines: list[tuple[str, list[str]]] = []

    def line(name: str, show: Callable[[Any], str], *path: str) -> None:
        values: Sequence[Any] = entries
        for key in path:
            values = [value[key] for value in values]
        if any(value not in (None, 0) for value in values) or name in ("in all", "takes"):
            lines.append((name, ["-" if value is None else show(value) for value in values]))

    line("strategy", str, "strategy")
    line("replicas", "{:,}".format, "replicas")
    for part in ("weights", "optimizer", "gradients", "activations", "data"):
        line(f"{part} per device", size, "memory", part)
    line("in all", size, "memory", "total")
    line("activations with --recompute", size, "activations", "recomputed")
    line("and without", size, "activations", "kept")
    line("of a host, at least", size, "host_bytes")
    line("FLOPs per step and device", _count, "step", "flops")
    line("sent per step", size, "step", "wire_bytes")
    for part in ("compute", "memory", "dispatch", "network", "input"):
        line(part, time, "step", f"{part}_seconds")
    line("a step takes", time, "step", "seconds")
    line("limited by", str, "step", "bound")
    line("examples per second", _count, "examples_per_sec")
    line("checkpoint", size, "checkpoint", "bytes")
    line("written in", time, "checkpoint", "seconds")
    line("best interval", time, "checkpoint", "interval_seconds")
    if "simulated" in entries[0]:
        line("simulated examples per second", _count, "simulated", "examples_per_sec")
        line("simulated goodput", "{:.1%}".format, "simulated", "goodput")
    line("failures per day", lambda per_hour: f"{24 * per_hour:.2g}", "failures", "per_hour")
    line("a failure costs", time, "failures", "seconds")
    line("a lost host costs", time, "failures", "lost_host_seconds")
    line("goodput", "{:.1%}".format, "goodput")
    line("the run takes", lambda hours: time(3600 * hours), "hours")
    line("and costs", "{:,.3g}".format, "cost")
    line("fits", lambda fits: "yes" if fits else "no", "fits")
    return lines


def size(number: float) -> str:
    """Formats bytes in three digits: "1.25 GB"."""
    return _scaled(number, ("B", "kB", "MB", "GB", "TB", "PB"))


def _count(number: float) -> str:
    return _scaled(number, ("", "k", "M", "G", "T", "P", "E")).rstrip()


def _scaled(number: float, units: Sequence[str]) -> str:
    power = 0
    while number >= 999.5 and power < len(units) - 1:
        number, power = number / 1000, power + 1
    return f"{number:.3g} {units[power]}"


def time(seconds: float) -> str:
    """Formats seconds in two or three digits, in a unit that fits: "1.2 ms", "3.5 h"."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= (2 * length if length > 1 else length):
            return f"{seconds / length:.3g} {unit}"
    return f"{1e6 * seconds:.3g} us"
