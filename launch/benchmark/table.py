"""Prints a benchmark's result: tables with titles in a terminal, plain lines elsewhere. Host code."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .sections import Section, sections

_APART = "  "


def print_benchmark(result: Mapping[str, Any], stream=None) -> None:
    """Prints `launch.benchmark.sections` of a result (what --result_json holds).

    Args:
      result: keys that are missing leave their line out.
      stream: a text file; None is standard output.
    """
    console = Console(file=stream or sys.stdout, highlight=False, soft_wrap=True)
    found = sections(result)
    # One width for all rows of a name and a value, so that the figures are aligned.
    width = max((len(name) for section in found if not section.columns for name, _ in section.rows), default=0)
    for index, section in enumerate(found):
        if index:
            console.print()
        if console.is_terminal:
            _print_table(console, section, width)
            continue
        for line in _plain_lines(section, width):
            console.print(line, markup=False)


def _print_table(console: Console, section: Section, width: int) -> None:
    style = "yellow" if section.title == "Warnings" else ""
    console.print(Text(section.title, style=style or "bold cyan"))
    if section.columns:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for name, right in zip(section.columns, section.figures, strict=True):
            table.add_column(name, justify="right" if right else "left")
    else:
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_column(style=style or "bold", min_width=0 if style else width, no_wrap=True)
        table.add_column(style=style, overflow="fold")
    for row in section.rows:
        table.add_row(*map(Text, row))  # as it stands: a bracket in it is no markup
    console.print(table, soft_wrap=False)


def _plain_lines(section: Section, width: int) -> list[str]:
    if section.title == "Warnings":
        return [f"warning: {text}" for _, text in section.rows]
    if not section.columns:
        return [f"{name:<{width}}{_APART}{value}" for name, value in section.rows]
    lines = [section.columns, *section.rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    justified = [
        [
            cell.rjust(size) if r else cell.ljust(size)
            for cell, size, r in zip(line, widths, section.figures, strict=True)
        ]
        for line in lines
    ]
    return [_APART.join(line).rstrip() for line in justified]
