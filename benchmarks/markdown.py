"""Tables of measurements in Markdown. Host code; nothing but the standard library."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], names: int = 1) -> str:
    """Formats a table; the first `names` columns are aligned left, the rest, which are figures, right."""
    lines = [header, ["---"] * names + ["---:"] * (len(header) - names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread(values: Sequence[float]) -> str:
    """Formats "median (least–most)"; a single value as it is, a dash for none."""
    if not values:
        return "–"
    middle = number(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({number(min(values))}–{number(max(values))})"


def number(value: float) -> str:
    """Formats a number with at least three digits, thousands apart."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
