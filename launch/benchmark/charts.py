"""A benchmark's result as charts in axes: step times, the roofline, scaling. Host code.

Each takes a result and returns a `Figure`, or None where the result lacks what the chart shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .markup import Element
from .plot import Axis, Plot
from .sections import bound, number, percent, quantity

_MAX_COLUMNS = 400  # of a timeline: more than its pixels can show are drawn together
_WARM_UP_SHARE = 0.18  # of the timed span: the width of the warm-up, which is not to scale
_TALL = 3.0  # times the median: a longer step is marked at the timeline's upper edge, so that others don't lie flat


class Figure(NamedTuple):
    """A chart, its title, and what a reader has to know about it."""

    title: str
    svg: Element
    caption: str


def histogram(result: Mapping[str, Any]) -> Figure | None:
    """Draws how long steps took: shares of all steps, with the quantiles."""
    calls = result.get("calls") or {}
    if not calls.get("steps"):
        return None
    steps = np.asarray(calls["steps"], float)
    ms = 1e3 * np.asarray(calls["seconds"], float) / steps
    quantiles = result.get("step_ms") or {}
    low, high = (float(ms.min()), float(ms.max())) if np.ptp(ms) else (0.95 * float(ms[0]), 1.05 * float(ms[0]))
    log = high > 4 * low > 0
    edges = _edges(ms, low, high, log)
    shares = np.histogram(ms, edges, weights=steps)[0] / steps.sum()

    text = ", ".join(f"{name} {number(value)} ms" for name, value in quantiles.items())
    top = 28 + 13 * len(quantiles)
    plot = Plot(
        "Step time",
        f"Shares of steps by their time. {text}.",
        Axis(low, high, log=log),
        _from_zero(shares.max()),
        top=top,
    )
    plot.y_ticks("share of steps", "{:.0%}".format)
    least = 0.012 * plot.y_axis.high  # high enough to be seen
    for left, right, share in zip(edges, edges[1:], shares, strict=False):
        if share:
            tip = f"{number(left)} – {number(right)} ms: {share:.1%} of steps"
            plot.box((left, right), (0, max(share, least)), "bar", tip)
    plot.x_ticks("ms a step" + (" (logarithmic)" if log else ""))
    for row, (name, value) in enumerate(quantiles.items()):
        x, y = plot.x(value), 26 + 13 * row
        plot.add("line", x1=x, x2=x, y1=y - 4, y2=plot.bottom, class_="mark")
        plot.beside(x, y, f"{name} {number(value)}", gap=5)
    return Figure(
        "Step time", plot.svg, f"{len(ms):,} calls; a step's time is its call's, divided evenly over the call's steps."
    )


def _edges(values: np.ndarray, low: float, high: float, log: bool) -> np.ndarray:
    """Returns bins' edges by Freedman and Diaconis's rule (1981), within 8 to 60 bins."""
    scaled = np.log(values) if log else values
    first, third = np.quantile(scaled, (0.25, 0.75))
    width = 2 * (third - first) / len(values) ** (1 / 3)
    span = math.log(high / low) if log else high - low
    count = round(min(max(span / width if width else 60, 8), 60))
    edges = np.geomspace(low, high, count + 1) if log else np.linspace(low, high, count + 1)
    edges[[0, -1]] = low, high  # rounding must leave no value out
    return edges


def timeline(result: Mapping[str, Any]) -> Figure | None:
    """Draws step time over time, the rounds one after another, with the part of it spent waiting."""
    calls = result.get("calls") or {}
    if not calls.get("steps"):
        return None
    columns = _columns(calls)
    cap = _cap(columns)
    end = float(columns["end"][-1])
    warm_up = result.get("compile_seconds")
    plot = Plot(
        "Step time over the run",
        f"{len(calls['steps']):,} calls over {end:.2f} s of training; median {number(_median(columns))} ms a step.",
        Axis(0 if warm_up is None else -_WARM_UP_SHARE * end, end),
        _from_zero(cap),
        top=46,
    )
    plot.y_ticks("ms a step")
    if warm_up is not None:
        plot.box((plot.x_axis.low, -0.1 * _WARM_UP_SHARE * end), (0, plot.y_axis.high), "untimed")
        x, y = plot.x(-0.55 * _WARM_UP_SHARE * end), (plot.top + plot.bottom) / 2
        plot.text(x, y, "warm-up", anchor="middle")
        plot.text(x, y + 14, f"{warm_up:.1f} s", anchor="middle")
    _draw_columns(plot, columns, cap)
    _draw_rounds(plot, columns)
    plot.x_ticks("seconds of timed training", values=[tick for tick in plot.x_axis.ticks() if tick >= 0])
    return Figure("Step time over the run", plot.svg, _timeline_caption(result, columns, cap))


def _columns(calls: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns calls as arrays of one length; neighbours of one round are joined where there are too many.

    begin, end: seconds; mean, low, high: milliseconds of a step; input, reduce: the part of them spent waiting; round:
    its number.
    """
    steps, seconds, waits = (np.asarray(calls[name], float) for name in ("steps", "seconds", "input_seconds"))
    reduce = np.asarray(calls.get("reduce_seconds") or np.zeros(len(steps)), float)
    rounds = np.asarray(calls.get("round") or np.zeros(len(steps)), int)
    together = math.ceil(len(steps) / _MAX_COLUMNS)
    new = np.flatnonzero(np.diff(rounds, prepend=rounds[0] - 1))  # where each round begins
    firsts = np.concatenate([np.arange(a, b, together) for a, b in zip(new, [*new[1:], len(steps)], strict=True)])
    in_column = np.add.reduceat(steps, firsts)
    ends = np.cumsum(np.add.reduceat(seconds, firsts))
    return {
        "begin": np.concatenate([[0.0], ends[:-1]]),
        "end": ends,
        "low": np.minimum.reduceat(1e3 * seconds / steps, firsts),
        "high": np.maximum.reduceat(1e3 * seconds / steps, firsts),
        "round": rounds[firsts],
        **{
            name: 1e3 * np.add.reduceat(values, firsts) / in_column
            for name, values in (("mean", seconds), ("input", waits), ("reduce", reduce))
        },
    }


def _median(columns: Mapping[str, np.ndarray]) -> float:
    return float(np.median(columns["mean"]))


def _cap(columns: Mapping[str, np.ndarray]) -> float:
    """Returns the timeline's upper end, in milliseconds: above all but a few that are far longer."""
    highest = float(columns["high"].max())
    limit = max(_TALL * _median(columns), 1.3 * float(np.quantile(columns["mean"], 0.9)))
    return min(highest, limit)


def _draw_columns(plot: Plot, columns: Mapping[str, np.ndarray], cap: float) -> None:
    def stairs(values):
        sides = zip(columns["begin"], columns["end"], np.minimum(values, cap), strict=True)
        return [point for begin, end, value in sides for point in ((begin, value), (end, value))]

    plot.area([*stairs(columns["high"]), *reversed(stairs(columns["low"]))], "band")
    legend, below = [], np.zeros_like(columns["mean"])
    for name, class_, text in (("input", "wait", "waiting for input"), ("reduce", "reduce", "reduction")):
        if columns[name].sum() > 0.002 * columns["mean"].sum():
            plot.area([*stairs(below + columns[name]), *reversed(stairs(below))], class_)
            below = below + columns[name]
            legend.append((class_, text))
    plot.line(stairs(columns["mean"]), "main")
    for begin, end, high in zip(columns["begin"], columns["end"], columns["high"], strict=True):
        if high > cap:
            x = plot.x((begin + end) / 2)
            plot.add("path", d=f"M{x - 4:.1f} {plot.top + 1}h8l-4 -7Z", class_="tall")
    x = plot.left + 30
    for class_, text in legend:
        plot.add("rect", x=x, y=4.0, width=10.0, height=10.0, class_=class_)
        plot.text(x + 15, 13, text)
        x += 30 + 6.2 * len(text)


def _draw_rounds(plot: Plot, columns: Mapping[str, np.ndarray]) -> None:
    firsts = np.flatnonzero(np.diff(columns["round"], prepend=columns["round"][0] - 1))
    if len(firsts) < 2:
        return
    begins = [float(begin) for begin in columns["begin"][firsts]]
    for i, (begin, end) in enumerate(zip(begins, [*begins[1:], float(columns["end"][-1])], strict=True), 1):
        if i > 1:
            plot.add("line", x1=plot.x(begin), x2=plot.x(begin), y1=plot.top - 14, y2=plot.bottom, class_="mark")
        width = plot.x(end) - plot.x(begin)
        if width > 14:
            text = f"round {i}" if width > 52 else str(i)
            plot.text((plot.x(begin) + plot.x(end)) / 2, plot.top - 10, text, anchor="middle")


def _timeline_caption(result: Mapping[str, Any], columns: Mapping[str, np.ndarray], cap: float) -> str:
    parts = []
    if (first := result.get("first_step_seconds")) is not None:
        parts.append(f"The first step took {first:.2f} s; warm-up is not timed.")
    if len(columns["mean"]) < len(result["calls"]["steps"]):
        parts.append("Neighbouring calls are drawn together: their mean, in a band from least to most.")
    ms = 1e3 * np.asarray(result["calls"]["seconds"]) / np.asarray(result["calls"]["steps"])
    if tall := int((ms > cap).sum()):
        parts.append(f"{tall:,} longer than the axis (triangles): up to {number(float(ms.max()))} ms a step.")
    return " ".join(parts)


def _from_zero(highest: float) -> Axis:
    return Axis(0, 1.08 * float(highest) or 1.0)


def roofline(result: Mapping[str, Any]) -> Figure | None:
    """Draws what the machine could do at each intensity, and this run does (Williams, Waterman, Patterson 2009)."""
    found, flops = result.get("roofline") or {}, result.get("flops_per_step")
    intensity, limit, share = (
        found.get(name) for name in ("intensity_flops_per_byte", "limit_steps_per_sec", "share_of_limit")
    )
    if not (intensity and limit and share and flops):
        return None
    roof, reached = flops * limit, flops * limit * share
    peaks, slopes = _roofs(result.get("machine") or {}, found, flops)
    if not (peaks and slopes):
        return None
    ridges = [max(peaks.values()) / slope for slope in slopes.values()]
    x = Axis(min(intensity, *ridges) / 6, max(intensity, *ridges) * 6, log=True)
    y = Axis(min(reached, min(slopes.values()) * x.low) / 3, 2.5 * max(reached, *peaks.values()), log=True)
    text = f"{quantity(reached, 'FLOP/s')}, {percent(share)} of the limit"
    plot = Plot("Roofline", f"This run reaches {text}, which {bound(found)} sets.", x, y, top=24, left=64)
    plot.y_ticks("FLOP/s", lambda value: quantity(value, ""))
    plot.x_ticks("FLOP a byte", lambda value: f"{value:g}")
    _draw_roofs(plot, peaks, slopes, (found.get("matmul_dtype"), found.get("bandwidth") or "memory"))
    plot.line([(intensity, reached), (intensity, roof)], "gap")
    plot.dot(intensity, reached, "main", text)
    for line, words in enumerate((percent(share), "of the limit")):
        plot.beside(plot.x(intensity), plot.y(reached) + 4 + 14 * line, words, gap=10)
    caption = f"Lines: what a probe measured here. Dot: this run, {text}: {number(limit)} steps/s, by {bound(found)}."
    return Figure("Roofline", plot.svg, caption)


def _roofs(machine: Mapping[str, Any], found: Mapping[str, Any], flops: float) -> tuple[dict, dict]:
    """Returns FLOP/s by dtype and bytes/s by kind of memory, of all devices that shared the work."""
    peaks = {dtype: 1e9 * rate for dtype, rate in (machine.get("matmul_gflops") or {}).items() if rate}
    slopes = {name: 1e9 * rate for name in ("memory", "cache") if (rate := machine.get(f"{name}_gb_per_sec"))}
    used = slopes.get(found.get("bandwidth") or "memory")
    if used and found.get("memory_seconds"):
        devices = flops / found["intensity_flops_per_byte"] / found["memory_seconds"] / used
        peaks, slopes = ({name: devices * rate for name, rate in rates.items()} for rates in (peaks, slopes))
    return peaks, slopes


def _draw_roofs(plot: Plot, peaks: Mapping[str, float], slopes: Mapping[str, float], binding: tuple) -> None:
    """Draws the roofs: this run's, of `binding` (dtype, memory), is solid, the others dashed."""
    highest, lowest = max(peaks.values()), plot.x_axis.low
    fastest = max(slopes.values())
    corner = peaks.get(binding[0], highest), slopes.get(binding[1], fastest)
    free = 0.0  # below the label before; a label that has no room above its line stands below it
    for dtype, peak in sorted(peaks.items(), key=lambda item: -item[1]):
        first, class_ = (corner[1], "roof") if dtype == binding[0] else (fastest, "dashed")
        plot.line([(peak / first, peak), (plot.x_axis.high, peak)], class_)
        above = plot.y(peak) - 6
        y = above if above >= free else max(free, plot.y(peak) + 14)
        plot.text(plot.right, y, f"{dtype} {quantity(peak, 'FLOP/s')}", anchor="end")
        free = y + 14
    for name, slope in slopes.items():
        last, class_ = (corner[0], "roof") if name == binding[1] else (highest, "dashed")
        plot.line([(lowest, slope * lowest), (last / slope, last)], class_)
        # Along the slope, in the middle of it; the faster one's above, the slower one's below it.
        middle = math.sqrt(lowest * highest / slope)
        x, y = plot.x(middle), plot.y(slope * middle)
        rise = (plot.y(slope * lowest) - plot.y(highest)) / (plot.x(highest / slope) - plot.x(lowest))
        turn = f"rotate({-math.degrees(math.atan(rise)):.1f} {x:.1f} {y:.1f})"
        side = -7 if slope == fastest else 15
        plot.text(x, y + side, f"{name} {quantity(slope, 'B/s')}", anchor="middle", transform=turn)


def scaling(result: Mapping[str, Any]) -> Figure | None:
    """Draws the efficiency over the number of replicas; 100 % is a rate that grows as they do."""
    found = [each for each in result.get("scaling") or () if each.get("efficiency") is not None]
    if not found:
        return None
    replicas = sorted({each["replicas"] for each in found})
    x = Axis(replicas[0] / 1.15, replicas[-1] * 1.15, log=True)
    plot = Plot(
        "Scaling",
        ", ".join(f"{each['replicas']} replicas, {each.get('kind', '')}: {each['efficiency']:.0%}" for each in found),
        x,
        _from_zero(max(1.0, *(each["efficiency"] for each in found))),
        top=28,
        right=60,
    )
    plot.y_ticks("efficiency", "{:.0%}".format)
    plot.x_ticks("replicas", str, replicas)
    plot.line([(x.low, 1), (x.high, 1)], "dashed")
    plot.text(plot.right + 6, plot.y(1) + 4, "ideal")
    ends = []
    for kind, class_ in (("weak", "main"), ("strong", "second")):
        points = sorted((each["replicas"], each["efficiency"]) for each in found if each.get("kind") == kind)
        if not points:
            continue
        plot.line(points, class_)
        for at, value in points:
            plot.dot(at, value, class_, f"{at} replicas, {kind}: {value:.1%}")
        ends.append((plot.y(points[-1][1]), kind))
    last = plot.y(1)
    for y, kind in sorted(ends):
        last = max(y, last + 14)  # labels of lines that end near each other stand under each other
        plot.text(plot.right + 6, last + 4, kind, class_="strong")
    return Figure(
        "Scaling",
        plot.svg,
        "Weak: the batch a replica stays; strong: the global batch stays. 100 % is a rate that grows as they do.",
    )
