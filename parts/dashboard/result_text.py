"""Formats a benchmark's or a run's result as text and, for `crankshaft report`, as Markdown.

Both show the rows of one table, `_SECTIONS`. TensorFlow is not started.
"""

from __future__ import annotations

import os
import string
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ...engine.errors import visible
from ...engine.machine.files import read_json
from ...runner.failures import UsageError
from ...runner.results import MOST_BYTES, SCHEMA

# By section, rows of a name and a format of `_Figures`; a row whose first figure is missing is omitted. Sections that
# list (Rounds, Profile) have columns instead, whose figures are aligned right.
_SECTIONS = {
    "Run": {
        "model": "{model}",
        "input": "{input}",
        "strategy": "{strategy}",
        "replicas": "{num_replicas}",
        "global batch": "{global_batch_size:n}",
        "precision": "{precision}",
        "XLA": "{jit:on}",
        "timed": "{steps:,} steps in {wall_seconds:.2f} s",
        "warm-up": "{compile_seconds:.1f} s, compilation included",
    },
    "Result": {
        "step": "{step:n}",
        "evaluation": "{eval:n}",
        "best": "{best[metric]} {best[value]:n} at step {best[step]:n}",
        "goodput": "{goodput[share]:.1%} of {goodput[seconds][total]:,.0f} s",
        "stopped": "{stop}",
        "error": "{error}",
    },
    "Rate": {
        "steps/s": "{steps_per_sec:n}",
        "examples/s": "{examples_per_sec:n}",
        "  95 % interval": "{interval[0]:n} – {interval[1]:n}",
        "  mean over calls": "{mean:n} ± {stderr:n}, jitter {jitter:n}",
    },
    "Step": {
        "step ms": "{step_ms:n}",
        "first step": "{first_step_seconds:.2f} s",
        "input wait": "{input_wait_fraction:.1%} of the time",
        "reduction": "{reduce_fraction:.1%} of the time",
        "peak memory": "{peak_rss_mb:,.0f} MiB",
        "device peak": "{device_peak_mb:,.0f} MiB",
        "train": "{train:n}",
    },
    "Rounds": {
        "round": "{round:n}",
        "steps": "{steps:n}",
        "seconds": "{wall_seconds:.2f}",
        "steps/s": "{steps_per_sec:n}",
        "examples/s": "{examples_per_sec:n}",
    },
    "Limits": {
        "a step": "{flops_per_step:M} MFLOP: {flops_source}",
        "  moves at least": "{bytes_per_step:M} MB",
        "peak GFLOP/s": "{machine[matmul_gflops]:n}",
        "memory": "{machine[memory_gb_per_sec]:n} GB/s",
        "last cache": "{machine[cache_gb_per_sec]:n} GB/s",
        "bound by": "{roofline[bound]}: at most {roofline[limit_steps_per_sec]:n} steps/s",
        "  bandwidth of": "{roofline[bandwidth]}",
        "share of limit": "{roofline[share_of_limit]:.1%}",
    },
    "Profile": {"op": "{name}", "type": "{type}", "ms/step": "{ms_per_step:n}", "share": "{share:.1%}"},
    "Baseline": {
        "against": "{baseline[path]}",
        "verdict": "{baseline[verdict]}",
        "ratio": "{baseline[ratio]:.3f}",
        "  95 % interval": "{baseline[interval][0]:.3f} – {baseline[interval][1]:.3f}",
    },
    "Machine": {
        "machine": "{environment[cpu]}, {environment[usable_cores]:n} usable cores, {environment[memory_mb]:Ki} GiB",
        "GPUs": "{environment[gpus]:n}",
        "load before": "{environment[load_average]:n}",
        "others used": "{noise[other_cores]:.2f} cores during the rounds",
        "versions": "{environment[versions]:n}",
        "threads": "{environment[threads]:n}; of 0 TensorFlow chooses",
        "flags": "{environment[flags]:n}",
        "system": "{environment[platform]}",
    },
}
_NONE = "–"


class Section(NamedTuple):
    """Rows of text under a title.

    Attributes:
      columns: names of the columns; () if each row is a name and a value.
      figures: for each column, whether it holds figures, which are aligned right.
    """

    title: str
    columns: tuple[str, ...]
    figures: tuple[bool, ...]
    rows: list[tuple[str, ...]]


class _Figures(string.Formatter):
    """Formats figures by `n`: four digits, of mappings and lists each one; `M`: in millions, `Ki`: in 1024s; `on`."""

    def format_field(self, value: Any, spec: str) -> str:
        if value is None:
            return _NONE
        if spec == "on":
            return "on" if value else "off"
        if spec in ("M", "Ki"):
            return number(value / {"M": 1e6, "Ki": 1024}[spec])
        return number(value) if spec == "n" else super().format_field(value, spec)

    def row(self, template: str, values: Mapping[str, Any]) -> str | None:
        """Returns the text, or None if its first figure is missing or empty."""
        try:
            first = next(name for _, name, _, _ in self.parse(template) if name)
            value = self.get_field(first, (), values)[0]
            return None if value in (None, "", [], {}) else self.vformat(template, (), values)
        except (KeyError, TypeError):  # a part of the result that is missing, or null
            return None


def number(value: Any) -> str:
    """Formats a number, or each of a mapping or list, with four significant digits, or whole above a thousand."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {number(figure)}" for name, figure in value.items() if figure is not None)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(number, value))
    if value is None or isinstance(value, str):
        return value or _NONE
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def sections(result: Mapping[str, Any]) -> Iterator[Section]:
    """Yields the sections of a result (of --result_json) in reading order."""
    formatter, rounds = _Figures(), result.get("rounds") or ()
    lists = {
        "Rounds": [{"round": number, **figures} for number, figures in enumerate(rounds, 1)] if len(rounds) > 1 else [],
        "Profile": (result.get("profile") or {}).get("ops") or [],
    }
    for title, formats in _SECTIONS.items():
        if title in lists:
            rows = [tuple(formatter.row(cell, entry) or _NONE for cell in formats.values()) for entry in lists[title]]
            columns, figures = tuple(formats), tuple(":" in cell for cell in formats.values())
        else:
            rows = [(name, text) for name, cell in formats.items() if (text := formatter.row(cell, result)) is not None]
            columns, figures = (), (False, False)
        if rows:
            yield Section(title, columns, figures, rows)
    if lines := result.get("warnings"):
        yield Section("Warnings", (), (False, False), [("warning", str(line)) for line in lines])


def text(result: Mapping[str, Any]) -> str:
    """Formats a result for a terminal, in aligned lines."""
    shown = list(sections(result))
    # One width for all names, so that the values are aligned.
    width = max((len(row[0]) for section in shown if not section.columns for row in section.rows), default=0)
    return "\n\n".join("\n".join(aligned(section, width)) for section in shown)


def aligned(section: Section, width: int = 0) -> Iterator[str]:
    """Yields a section's lines in columns; `width` is that of the names in one without columns."""
    rows = [section.columns, *section.rows] if section.columns else section.rows
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)] if section.columns else [width, 0]
    for line in rows:
        cells = zip(line, widths, section.figures, strict=True)
        yield "  ".join(cell.rjust(size) if right else cell.ljust(size) for cell, size, right in cells).rstrip()


def markdown(result: Mapping[str, Any]) -> str:
    """Formats a result as Markdown, without figures that it lacks."""
    subject = ", ".join(str(result[name]) for name in ("model", "input", "strategy") if result.get(name))
    blocks = [f"# {'Benchmark' if 'schema' in result else 'Run'}: {subject}"]
    if "schema" in result:
        blocks += [str(result.get("date", "")), f"```console\n$ {result.get('command', '')}\n```"]
    for title, columns, figures, rows in sections(result):
        rules = ["---:" if right else "---" for right in figures]
        cells = [[cell.strip().replace("|", r"\|") for cell in row] for row in rows]
        lines = [f"| {' | '.join(line)} |" for line in (columns or ("", ""), rules, *cells)]
        blocks.append("\n".join([f"## {title}\n", *lines]))
    return visible("\n\n".join(blocks))


def read(path: str, flags: int = os.O_RDONLY, folder: int | None = None) -> dict[str, Any]:
    """Reads a benchmark's or a run's result. Raises `UsageError` for other files, in one line.

    `folder` is the descriptor of the folder of a relative path.
    """
    try:
        result = read_json(path, flags=flags, most_bytes=MOST_BYTES, folder=folder)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} can't be read ({error}); give a file of result_json") from None
    version = result.get("schema") if isinstance(result, dict) else None
    is_run = version is None and isinstance(result, dict) and {"mode", "run_dir"} <= result.keys()
    if version != SCHEMA and not is_run:  # other parts may be missing: those that exist are shown
        raise UsageError(f"{path} is of schema {version}, and this reads {SCHEMA}; give a file of result_json")
    try:
        list(sections(result))
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise UsageError(f"{path} holds a value of a wrong type ({error}); give a file of result_json") from None
    return result
