"""A benchmark's result as a report: one HTML file with its charts in it, which needs no network and no script.

`crankshaft report RESULT.json REPORT.html` writes one from a file of --result_json. Host code; nothing here starts
TensorFlow.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import errors
from ..errors import UsageError
from ..host.files import write_text
from . import bars, charts, schema
from .charts import Figure
from .markup import Element, append, document, element
from .sections import Section, between, bound, number, percent, sections, settings

# The charts that stand with a section, by its title.
_CHARTS: dict[str, tuple[Callable[[Mapping[str, Any]], Figure | None], ...]] = {
    "Step": (charts.histogram, charts.timeline),
    "Limits": (charts.roofline,),
    "Parts": (bars.parts,),
    "Profile": (bars.ops,),
    "Scaling": (charts.scaling,),
    "Sweep": (bars.sweep,),
    "Baseline": (bars.baseline,),
}
# The page's policy: nothing is loaded and nothing runs, whatever a result holds.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def write(path: str | os.PathLike, result: Mapping[str, Any]) -> None:
    """Writes a result's report, whole or not at all. Raises OSError.

    Args:
      path: the HTML file's.
      result: what --result_json holds; what it lacks has no chart.
    """
    write_text(path, page(result))


def page(result: Mapping[str, Any]) -> str:
    """Returns the report as HTML."""
    title = _title(result)
    css = pathlib.Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("link", rel="icon", href="data:,"),
        element("title", title),
        element("style", css),
    )
    main = element("main", _warnings(result), _tiles(result))
    for section in sections(result):
        if section.title != "Warnings":
            append(main, _section(section, result))
    return document(element("html", head, element("body", _header(title, result), main), lang="en"))


def _title(result: Mapping[str, Any]) -> str:
    about = [str(result[name]) for name in ("model", "input", "strategy") if result.get(name)]
    return "Benchmark: " + ", ".join(about) if about else "Benchmark"


def _header(title: str, result: Mapping[str, Any]) -> Element:
    header = element("header", element("h1", title))
    if result.get("date"):
        append(header, element("p", str(result["date"])))
    if command := result.get("command"):
        append(header, element("p", element("code", *_breakable(command))))
    return header


def _warnings(result: Mapping[str, Any]) -> Element | None:
    found = result.get("warnings")
    if not found:
        return None
    lines = element("ul", *(element("li", str(warning)) for warning in found))
    return element("div", element("h2", "Read with care"), lines, class_="warnings")


def _tiles(result: Mapping[str, Any]) -> Element | None:
    """Returns the figures that most readers look for."""
    tiles = [
        element("div", name, element("b", value), element("span", more), class_="tile")
        for name, value, more in _headlines(result)
    ]
    return element("div", *tiles, class_="tiles") if tiles else None


def _headlines(result: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Lists (what, the figure, what has to be known about it)."""
    found = []
    if result.get("examples_per_sec") is not None:
        interval = result.get("interval")
        found.append(("examples/s", number(result["examples_per_sec"]), interval and f"95 %: {between(interval)}"))
    if result.get("steps_per_sec") is not None:
        timed = f"{result['steps']:,} steps timed" if result.get("steps") else ""
        found.append(("steps/s", number(result["steps_per_sec"]), timed))
    if quantiles := result.get("step_ms"):
        (name, value), *others = quantiles.items()
        found.append((f"ms a step ({name})", number(value), ", ".join(f"{p} {number(ms)}" for p, ms in others)))
    roofline = result.get("roofline") or {}
    if roofline.get("share_of_limit") is not None:
        found.append(("of the limit", percent(roofline["share_of_limit"]), f"set by {bound(roofline)}"))
    if best := _best(result):
        found.append(("examples/s, best", number(best["examples_per_sec"]), settings(best["settings"])))
    baseline = result.get("baseline") or {}
    if baseline.get("ratio") is not None:
        interval = baseline.get("interval")
        ends = " (" + " – ".join(f"{end:.3f}" for end in interval) + ")" if interval else ""
        found.append(("times the baseline", f"{baseline['ratio']:.3f}", f"{baseline.get('verdict') or ''}{ends}"))
    if result.get("peak_rss_mb") is not None:
        device = result.get("device_peak_mb")
        found.append(("MiB at most", number(result["peak_rss_mb"]), device and f"{number(device)} on a device"))
    return [(what, figure, more or "") for what, figure, more in found]


def _best(result: Mapping[str, Any]) -> Mapping[str, Any] | None:
    rates = [each for each in result.get("sweep") or () if each.get("examples_per_sec") is not None]
    return max(rates, key=lambda each: each["examples_per_sec"], default=None)


def _section(section: Section, result: Mapping[str, Any]) -> Element:
    figures = [figure for chart in _CHARTS.get(section.title, ()) if (figure := chart(result))]
    shown = [
        element(
            "figure",
            element("h3", figure.title) if len(figures) > 1 else None,
            figure.svg,
            element("p", figure.caption),
        )
        for figure in figures
    ]
    body = element("div", *shown, element("div", _table(section), class_="table"))
    return element("section", element("h2", section.title), body, class_="wide" if figures else "narrow")


def _table(section: Section) -> Element:
    styles = [{}, *({"class_": "figure"} if figures else {} for figures in section.figures[1:] or (False,))]
    table = element("table", class_="grid" if section.columns else "pairs")
    if section.columns:
        names = [element("th", name, scope="col", **style) for name, style in zip(section.columns, styles, strict=True)]
        append(table, element("thead", element("tr", *names)))
    rows = []
    for first, *others in section.rows:
        cells = [element("td", *_breakable(text), **style) for text, style in zip(others, styles[1:], strict=True)]
        rows.append(element("tr", element("th", *_breakable(first), scope="row"), *cells))
    append(table, element("tbody", *rows))
    return table


def _breakable(text: str) -> list[Element | str]:
    """Splits a text at the joints of a path, an op's name or a flag, so that lines may break there."""
    first, *others = re.split(r"(?<=[/=;])(?=\w)|(?<=,)(?=[a-z_])", text)
    return [first, *(part for other in others for part in (element("wbr"), other))]


def main(argv: Sequence[str]) -> None:
    """Writes the report of a file of --result_json, and exits the process."""
    sys.exit(_run(argv))


def _run(argv: Sequence[str]) -> int:
    try:
        if len(argv) != 3:
            raise UsageError(f"{len(argv) - 1} arguments; use crankshaft report RESULT.json REPORT.html")
        result = _read(argv[1])
        try:
            write(argv[2], result)
        except OSError as error:
            raise UsageError(f"{argv[2]} can't be written ({error.strerror}); use a path that can") from None
    except UsageError as error:
        return errors.fail(errors.EXIT_USAGE, str(error))
    return 0


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            result = json.load(file)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} can't be read ({error}); give a file of --result_json") from None
    found = result.get("schema") if isinstance(result, dict) else None
    if found != schema.VERSION:  # the rest may be missing: what is there is shown
        raise UsageError(f"{path} is of schema {found}, and this reads {schema.VERSION}; give a file of --result_json")
    return result
