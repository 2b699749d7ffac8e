"""Host code: a benchmark's result for people to read, as a table in a terminal and as plain lines elsewhere."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text


def print_benchmark(result: dict, stream=None) -> None:
    """Prints what `engine.benchmark.rounds.run` returned (and what `launch` added: model, strategy, ...).

    Args:
      result: keys that are missing leave their line out.
      stream: a text file; None is standard output.
    """
    console = Console(file=stream or sys.stdout, highlight=False, soft_wrap=True)
    rows = [*_run_rows(result), *_rate_rows(result), *_environment_rows(result.get("environment", {}))]
    if console.is_terminal:
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(name, Text(value))  # as it stands: a bracket in it is no markup
        console.print(table, soft_wrap=False)
        return
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        console.print(f"{name:<{width}}  {value}", markup=False)


def _run_rows(result: dict) -> list[tuple[str, str]]:
    rows = [(name, str(result[name])) for name in ("model", "input", "strategy") if result.get(name)]
    if "num_replicas" in result:
        rows.append(("replicas", str(result["num_replicas"])))
    if "steps" in result and "wall_seconds" in result:
        rows.append(("timed", f"{result['steps']:,} steps in {result['wall_seconds']:.2f} s"))
    return rows


def _rate_rows(result: dict) -> list[tuple[str, str]]:
    rows = [
        (title, _number(result[name]))
        for title, name in (("steps/s", "steps_per_sec"), ("examples/s", "examples_per_sec"))
        if name in result
    ]
    if "mean" in result:
        error = "" if result.get("stderr") is None else f" ± {_number(result['stderr'])}"
        rows.append(("  mean over calls", f"{_number(result['mean'])}{error}, jitter {_number(result['jitter'])}"))
    if "step_ms" in result:
        quantiles = ", ".join(f"{name} {_number(value)}" for name, value in result["step_ms"].items())
        rows.append(("step ms", quantiles))
    for title, name, form in (
        ("input wait", "input_wait_fraction", "{:.1%} of the time"),
        ("warm-up", "compile_seconds", "{:.1f} s, compilation included"),
        ("peak memory", "peak_rss_mb", "{:,.0f} MiB"),
    ):
        if result.get(name) is not None:
            rows.append((title, form.format(result[name])))
    if result.get("train"):
        rows.append(("train", ", ".join(f"{name} {value:.4g}" for name, value in result["train"].items())))
    return rows


def _environment_rows(found: dict) -> list[tuple[str, str]]:
    rows = []
    if "cpu" in found:
        memory = f", {found['memory_mb'] / 1024:.1f} GiB" if found.get("memory_mb") else ""
        rows.append(("machine", f"{found['cpu']}, {found['usable_cores']:g} usable cores{memory}"))
    if found.get("gpus"):
        rows.append(("GPUs", ", ".join(found["gpus"])))
    if "load_average" in found:
        rows.append(("load before", ", ".join(f"{load:.2f}" for load in found["load_average"])))
    if "versions" in found:
        rows.append(("versions", ", ".join(f"{name} {value}" for name, value in found["versions"].items() if value)))
    if "threads" in found:
        threads = [f"{name} {value or 'TensorFlow chooses'}" for name, value in found["threads"].items()]
        rows.append(("threads", ", ".join(threads)))
    if found.get("flags"):
        rows.append(("flags", " ".join(f"{name}={value}" for name, value in found["flags"].items())))
    return rows


def _number(value: float) -> str:
    """Four digits that say something, thousands apart."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
