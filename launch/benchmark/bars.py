"""A benchmark's result as charts of labelled rows: parts, expensive ops, sweeps, ratios to a baseline. Host code.

Each takes a result and returns a `Figure`, or None where the result lacks what the chart shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .charts import Figure
from .markup import append, element
from .plot import WIDTH, Axis, Plot, drawing, shortened
from .sections import PART_NAMES, between, number, percent, settings

_ROW = 36  # a label, and what it labels
_COLOURS = {
    "step": "part-1",
    "model_sums": "reduce",
    "input": "wait",
    "reduce": "reduce",
    "update": "part-4",
    "unexplained": "untimed",
}


class Range(NamedTuple):
    """A value between two others; `low` and `high` are None where they are not known."""

    label: str
    value: float
    low: float | None
    high: float | None
    stressed: bool = False


def parts(result: Mapping[str, Any]) -> Figure | None:
    """Draws a step's time, stacked by its parts; what no part explains is shown as such."""
    shares = {name: share for name, share in ((result.get("parts") or {}).get("shares") or {}).items() if share}
    if not shares:
        return None
    whole = sum(share for share in shares.values() if share > 0)
    svg = drawing(
        "Parts", ", ".join(f"{name} {percent(share)}" for name, share in shares.items()), 62 + 20 * len(shares)
    )
    x = 0.0
    for row, (name, share) in enumerate(shares.items()):
        class_ = _COLOURS.get(name, "part-5")
        y = 66 + 20 * row
        append(svg, element("rect", x=0, y=y, width=11, height=11, class_=class_))
        append(svg, element("text", PART_NAMES.get(name, name), x=18, y=y + 10, class_="strong"))
        append(svg, element("text", percent(share), x=190, y=y + 10, text_anchor="end", class_="strong"))
        if share > 0:
            width = WIDTH * share / whole
            tip = element("title", f"{name}: {percent(share)}")
            append(svg, element("rect", tip, x=x, y=18, width=max(width - 2, 0.5), height=30, class_=class_))
            x += width
    caption = "Shares of a whole step, each part measured in isolation."
    if whole > 1.005:
        end = WIDTH / whole
        append(svg, element("line", x1=end, x2=end, y1=8, y2=54, class_="mark"))
        append(svg, element("text", "a whole step", x=end - 4, y=12, text_anchor="end", class_="tick"))
        caption += f" Together they take {percent(whole)} of one: in the loop they overlap."
    return Figure("Parts of a step", svg, caption)


def ops(result: Mapping[str, Any]) -> Figure | None:
    """Draws the most expensive ops of the profile."""
    found = [op for op in (result.get("profile") or {}).get("ops") or () if op.get("ms_per_step") is not None]
    if not found:
        return None
    longest = max(op["ms_per_step"] for op in found) or 1.0
    svg = drawing(
        "Most expensive ops",
        "; ".join(f"{op['name']} {number(op['ms_per_step'])} ms" for op in found),
        _ROW * len(found),
    )
    for row, op in enumerate(found):
        y = _ROW * row
        text = f"{number(op['ms_per_step'])} ms" + (f", {percent(op['share'])}" if op.get("share") is not None else "")
        name = f"{op['name']}  ({op['type']})" if op.get("type") else op["name"]
        label = shortened(op["name"], WIDTH - 7 * len(text) - 20, keep_end=True)  # an op's scope stands first
        append(svg, element("text", element("title", name), label, x=0, y=y + 14, class_="tick"))
        append(svg, element("text", text, x=WIDTH, y=y + 14, text_anchor="end", class_="strong"))
        append(svg, element("rect", x=0, y=y + 19, width=WIDTH, height=8, class_="track"))
        append(svg, element("rect", x=0, y=y + 19, width=WIDTH * op["ms_per_step"] / longest, height=8, class_="bar"))
    return Figure("Most expensive ops", svg, "Milliseconds a step, and the share of the profile's time.")


def sweep(result: Mapping[str, Any]) -> Figure | None:
    """Draws each setting's rate with its interval, the best one stressed."""
    best = (result.get("best") or {}).get("settings")
    rows = []
    for each in result.get("sweep") or ():
        if (rate := each.get("examples_per_sec")) is not None:
            low, high = each.get("interval") or (None, None)
            rows.append(Range(settings(each["settings"]), rate, low, high, each["settings"] == best))
    if not rows:
        return None
    highest = max(row.high or row.value for row in rows)
    return _ranges(
        "Sweep",
        rows,
        Axis(0, 1.04 * highest),
        "examples/s",
        "Dots: the rate; bars: its 95 % interval, where there is one.",
    )


def baseline(result: Mapping[str, Any]) -> Figure | None:
    """Draws the ratio to the baseline with its interval, beside 1."""
    found = result.get("baseline") or {}
    if found.get("ratio") is None:
        return None
    low, high = found.get("interval") or (None, None)
    label = found.get("verdict") or "ratio"
    pairs = [each["ratio"] for each in found.get("rounds") or ()]
    rows = [Range(f"{label}: {found['ratio']:.3f}", found["ratio"], low, high, stressed=True)]
    if len(pairs) > 1:
        rows += [Range(f"pair {i}: {ratio:.3f}", ratio, None, None) for i, ratio in enumerate(pairs, 1)]
    ends = [1.0, *(row.value for row in rows), *(end for end in (low, high) if end is not None)]
    room = 0.25 * (max(ends) - min(ends)) or 0.05
    axis = Axis(max(0.0, min(ends) - room), max(ends) + room)
    caption = "Bar: the 95 % interval. At 1 both are as fast."
    return _ranges("Ratio to the baseline", rows, axis, "rate over the baseline's", caption, 1.0)


def _ranges(
    title: str, rows: list[Range], axis: Axis, label: str, caption: str, reference: float | None = None
) -> Figure:
    description = "; ".join(f"{row.label}: {number(row.value)}" for row in rows)
    plot = Plot(title, description, axis, Axis(0, 1), height=_ROW * len(rows) + 62, left=10, right=10, top=8, bottom=44)
    plot.x_ticks(label)
    if reference is not None:
        x = plot.x(reference)
        plot.add("line", x1=x, x2=x, y1=plot.top, y2=plot.bottom, class_="mark")
    for i, row in enumerate(rows):
        y = plot.top + 12 + _ROW * i
        class_ = "main" if row.stressed else "plain"
        known = row.low is not None and row.high is not None
        tip = f"{row.label}: {number(row.value)}" + (f" ({between((row.low, row.high))})" if known else "")
        plot.text(plot.left, y, shortened(row.label), class_="strong" if row.stressed else "tick")
        plot.add("line", x1=plot.left, x2=plot.right, y1=y + 12, y2=y + 12, class_="grid")
        if known:
            plot.add("line", x1=plot.x(row.low), x2=plot.x(row.high), y1=y + 12, y2=y + 12, class_=f"range {class_}")
        plot.add("circle", element("title", tip), cx=plot.x(row.value), cy=y + 12, r=5, class_=f"dot {class_}")
    return Figure(title, plot.svg, caption)
