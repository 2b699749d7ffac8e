"""A plan as JSON and as a table, whose columns are numbers of hosts. Host code; nothing here starts TensorFlow."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from . import simulation
from .estimate import Estimate
from .hardware import Hardware

_ENDS = ("replicas", "of a host, at least", "limited by", "examples per second")  # of sections
_LEAST_COLUMNS = 34  # of the figures' names, and the first of them


def entry(found: Estimate, strategy: str, hardware: Hardware) -> dict[str, Any]:
    """Returns the estimate of one number of hosts as plain JSON; bytes are of one device unless they say otherwise."""
    work, memory = found.work, found.work.memory
    return {
        "hosts": work.hosts,
        "strategy": strategy,
        "replicas": work.replicas,
        "servers": work.servers,
        "fits": found.fits,
        "uncertain": list(work.uncertain),
        "memory": {**dataclasses.asdict(memory), "total": memory.total},
        "host_bytes": found.host_bytes,
        "server_bytes": work.server_bytes,
        "gpus_per_host": hardware.devices_per_host if hardware.kind == "gpu" else 0,
        "step": dataclasses.asdict(found.step),
        "examples_per_sec": found.examples_per_sec,
        "hours": found.hours,
        "cost": found.cost,
        "checkpoint": dataclasses.asdict(found.checkpoint),
        "failures": dataclasses.asdict(found.failures),
        "goodput": found.goodput,
    }


_PARTS = ("compute", "memory", "dispatch", "network", "input")


def text(plan: dict[str, Any], machine: Hardware, columns: int) -> str:
    """Returns what a terminal shows of a plan."""
    title = f"{plan['model']}, batches of {plan['global_batch_size']:,}; {machine.name}"
    lines = [title, "", table(plan["hosts"], machine, columns)]
    if plan["jit"] == "auto" and machine.kind != "tpu":
        lines += ["", "One device is planned without XLA; jit=auto times steps with it too, and takes the faster."]
    lines += [f"\nUncertain: {line}." for line in dict.fromkeys(x for each in plan["hosts"] for x in each["uncertain"])]
    if machine.assumed:
        lines += ["", f"Assumptions: {', '.join(machine.assumed)}."]
    if "simulated" in plan["hosts"][0]:
        lines += ["", *simulation.lines({each["hosts"]: each["simulated"] for each in plan["hosts"]})]
    if not plan["fits"]:
        lines += [
            "",
            f"It does not fit into {size(1e9 * machine.device_memory_gb)} per device.",
            *_advice(plan["advice"]),
        ]
    return "\n".join(lines)


def _advice(advice: Sequence[str]) -> list[str]:
    if not advice:
        return [
            "No mesh, recomputation, sharded optimizer, micro-batch or number of servers that was tried makes it fit."
        ]
    return ["With these flags it does:", *(f"  {each}" for each in advice)]


def table(entries: Sequence[dict[str, Any]], hardware: Hardware, columns: int) -> str:
    """Returns a table of entries, with a column for each number of hosts."""
    shown = Table(show_edge=False, pad_edge=False)
    shown.add_column("hosts")
    for each in entries:
        shown.add_column(f"{each['hosts']:,}", justify="right")
    for name, figures in _rows(entries, hardware):
        shown.add_row(name, *figures, end_section=name in _ENDS)
    console = Console(file=io.StringIO(), width=max(columns, _LEAST_COLUMNS + 10 * len(entries)), color_system=None)
    console.print(shown)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]


def _rows(entries: Sequence[dict[str, Any]], hardware: Hardware) -> list[tuple[str, list[str]]]:
    def row(name: str, show, *path: str) -> None:
        values: Sequence[Any] = entries
        for key in path:
            values = [each[key] for each in values]
        if any(value not in (None, 0) for value in values) or name in ("in all", "takes"):
            rows.append((name, ["-" if value is None else show(value) for value in values]))

    rows: list[tuple[str, list[str]]] = []
    row("strategy", str, "strategy")
    row("replicas", "{:,}".format, "replicas")
    for part in ("weights", "optimizer", "gradients", "activations", "data"):
        row(f"{part} per device", size, "memory", part)
    row("in all", size, "memory", "total")
    row("activations with --recompute", size, "activations", "recomputed")
    row("and without", size, "activations", "kept")
    row("of a host, at least", size, "host_bytes")
    row("of a server", size, "server_bytes")
    row("FLOPs per step and device", _count, "step", "flops")
    row("sent per step", size, "step", "wire_bytes")
    for part in _PARTS:
        row(part, time, "step", f"{part}_seconds")
    row("a step takes", time, "step", "seconds")
    row("limited by", str, "step", "bound")
    row("examples per second", _count, "examples_per_sec")
    row("checkpoint", size, "checkpoint", "bytes")
    row("written in", time, "checkpoint", "seconds")
    row("best interval", time, "checkpoint", "interval_seconds")
    if "simulated" in entries[0]:
        row("simulated examples per second", _count, "simulated", "examples_per_sec")
        row("simulated goodput", "{:.1%}".format, "simulated", "goodput")
    row("failures per day", lambda each: f"{24 * each:.2g}", "failures", "per_hour")
    row("a failure costs", time, "failures", "seconds")
    row("a lost host costs", time, "failures", "lost_host_seconds")
    row("goodput", "{:.1%}".format, "goodput")
    row("the run takes", lambda each: time(3600 * each), "hours")
    row("and costs", "{:,.3g}".format, "cost")
    row("fits", lambda each: "yes" if each else "no", "fits")
    return rows


def size(number: float) -> str:
    """Returns bytes in three digits: "1.25 GB"."""
    return _scaled(number, ("B", "kB", "MB", "GB", "TB", "PB"))


def _count(number: float) -> str:
    return _scaled(number, ("", "k", "M", "G", "T", "P", "E")).rstrip()


def _scaled(number: float, units: Sequence[str]) -> str:
    power = 0
    while number >= 999.5 and power < len(units) - 1:
        number, power = number / 1000, power + 1
    return f"{number:.3g} {units[power]}"


def time(seconds: float) -> str:
    """Returns seconds in two or three digits, in a unit that fits: "1.2 ms", "3.5 h"."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= (2 * length if length > 1 else length):
            return f"{seconds / length:.3g} {unit}"
    return f"{1e6 * seconds:.3g} us"
