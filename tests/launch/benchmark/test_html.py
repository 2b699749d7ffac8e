"""The report of a benchmark: whole HTML whose charts show the result's figures, in one file that loads nothing."""

from __future__ import annotations

import html.parser
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import zlib
from xml.etree import ElementTree

import pytest

from crankshaft.launch.benchmark import bars, charts
from crankshaft.launch.benchmark import html as report
from crankshaft.launch.benchmark.plot import WIDTH, Axis
from tests.launch.benchmark.results import CALLS, MORE, RESULT
from tests.waiting import PATIENCE

WHOLE = {
    **RESULT,
    **MORE,
    "schema": "crankshaft.benchmark/1",
    "date": "2026-11-20T13:00:00+00:00",
    "command": "crankshaft train --mode=benchmark",
    "bytes_per_step": 4_000_000,
    "first_step_seconds": 1.93,
    "roofline": {**MORE["roofline"], "intensity_flops_per_byte": 9.75, "matmul_dtype": "float32"},
    "calls": CALLS,
}
TITLES = [
    *("Run", "Rate", "Step", "Rounds", "Limits", "Parts", "Reduction", "Checkpoint", "Profile", "Scaling", "Sweep"),
    *("Baseline", "Pairs", "Machine"),
]
_VOID = {"meta", "link", "wbr"}


class Page(html.parser.HTMLParser):
    """A page read: its text, its tags, and what it refers to. Fails on tags that are not nested as they were opened."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.references, self.words = [], [], []
        self._open = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.references += [value for name, value in attributes if name in ("src", "href", "xlink:href", "srcset")]
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return "".join(self.words)


def drawings(page: str) -> dict[str, ElementTree.Element]:
    """Each chart by its title; XML's parser takes nothing that is not well-formed."""
    found = map(ElementTree.fromstring, re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    return {svg.findtext("title"): svg for svg in found}


def assert_all_within(svg: ElementTree.Element) -> None:
    """No mark and no label leaves the drawing; of the labels' widths, a guess."""
    height = float(svg.get("viewBox").split()[-1])
    for mark in svg.iter():
        number = {name: float(value) for name, value in mark.items() if re.fullmatch(r"-?[\d.]+", value)}
        assert all(map(math.isfinite, number.values()))
        for name, value in number.items():
            if name.startswith(("x", "cx", "y", "cy")):
                assert -1 <= value <= (WIDTH if "x" in name else height) + 1, ElementTree.tostring(mark)
        if mark.tag == "rect":
            assert number["x"] + number["width"] <= WIDTH + 1
            assert number["y"] + number["height"] <= height + 1
        if mark.tag == "text" and not mark.get("transform"):
            width = 5.5 * len("".join(mark.itertext()))
            start = number["x"] - {"start": 0, "middle": width / 2, "end": width}[mark.get("text-anchor", "start")]
            assert start >= -2, ElementTree.tostring(mark)
            assert start + width <= WIDTH + 2, ElementTree.tostring(mark)


def test_whole_result_has_every_section_and_chart():
    text = report.page(WHOLE)
    page = Page(text)
    assert re.findall(r"<h2>(.*?)</h2>", text) == ["Read with care", *TITLES]
    found = drawings(text)
    assert list(found) == [
        "Step time",
        "Step time over the run",
        "Roofline",
        "Parts",
        "Most expensive ops",
        "Scaling",
        "Sweep",
        "Ratio to the baseline",
    ]
    for svg in found.values():
        assert svg.findtext("desc")
        assert svg.get("role") == "img"
        assert_all_within(svg)
    for figure in (
        "256,000",
        "250,000 – 260,000",
        "50.0%",
        "1.250",
        "39 MFLOP",
        "memory 12.5 GB/s",
        "1,234 MiB",
        "0.2495",
    ):
        assert figure in page.text, figure


def test_page_loads_nothing_and_runs_nothing():
    text = report.page(WHOLE)
    page = Page(text)
    assert page.references == ["data:,"]
    assert "script" not in page.tags
    assert not re.search(r"https?:|url\(|@import", text)
    assert "default-src 'none'" in text


def test_what_a_result_says_is_text_wherever_it_stands():
    evil = "</style></title><script>alert(1)</script>\"'&\x00\x1b\ud800"
    result = {
        **WHOLE,
        "model": evil,
        "command": evil,
        "warnings": [evil],
        "train": {evil: 1.0},
        "flops_source": evil,
        "step_ms": {evil: 0.25},
        "environment": {**RESULT["environment"], "cpu": evil, "flags": {evil: evil}},
        "roofline": {**WHOLE["roofline"], "bound": evil},
        "machine": {**WHOLE["machine"], "matmul_gflops": {evil: 100.0}},
        "parts": {"whole": {"ms_per_step": 1.0}, "shares": {evil: 1.0}},
        "profile": {"ops": [{"name": evil, "type": evil, "ms_per_step": 1.0}]},
        "scaling": [{"replicas": 1, "kind": evil, "efficiency": 1.0}],
        "sweep": [{"settings": {evil: evil}, "examples_per_sec": 1.0}, {"settings": {}, "error": evil}],
        "baseline": {"path": evil, "verdict": evil, "ratio": 1.0},
    }
    text = report.page(result)
    assert text.count("</style>") == 1
    assert text.count("</title><style>") == 1
    page = Page(text)
    assert "script" not in page.tags
    assert page.text.count("<script>alert(1)</script>") > 15
    drawings(text)


@pytest.mark.parametrize(
    ("part", "titles"),
    [
        ({}, []),
        ({"sweep": MORE["sweep"], "best": MORE["best"]}, ["Sweep"]),
        ({"scaling": MORE["scaling"]}, ["Scaling"]),
        ({"baseline": MORE["baseline"]}, ["Ratio to the baseline"]),
        ({"calls": CALLS}, []),  # charts stand with the figures that they show
        ({"calls": CALLS, "step_ms": RESULT["step_ms"]}, ["Step time", "Step time over the run"]),
        ({"roofline": MORE["roofline"], "machine": MORE["machine"]}, []),  # no place to draw the run at
    ],
)
def test_charts_stand_only_where_the_result_has_their_data(part, titles):
    assert list(drawings(report.page(part))) == titles


def test_every_key_may_be_null():
    Page(report.page(dict.fromkeys(WHOLE)))
    inner = {key: dict.fromkeys(value) if isinstance(value, dict) else value for key, value in WHOLE.items()}
    Page(report.page(inner))


@pytest.mark.parametrize(
    "seconds", [[0.1], [0.1, 0.1, 0.1], [1e-9, 1.0, 3600.0], [0.1 + 0.001 * (i % 97) for i in range(5000)]]
)
def test_step_times_of_any_kind_are_drawn(seconds):
    calls = {
        "steps": [10] * len(seconds),
        "seconds": seconds,
        "input_seconds": [0.0] * len(seconds),
        "reduce_seconds": None,
        "round": [3 * i // len(seconds) for i in range(len(seconds))],
    }
    result = {"calls": calls, "step_ms": {"p50": 100 * sorted(seconds)[len(seconds) // 2]}}
    for chart in (charts.histogram, charts.timeline):
        assert_all_within(chart(result).svg)
    marks = sum(1 for _ in charts.timeline(result).svg.iter())
    assert marks < 500  # however many calls there were


def test_histogram_holds_all_steps():
    svg = charts.histogram({"calls": CALLS, "step_ms": RESULT["step_ms"]}).svg
    shares = [
        float(found[1]) for tip in svg.iter("title") if (found := re.search(r": ([\d.]+)% of steps", tip.text or ""))
    ]
    assert sum(shares) == pytest.approx(100, abs=0.1 * len(shares))
    assert len(shares) >= 2  # the long call has a bar of its own


def test_a_call_too_long_for_the_timeline_is_marked_and_said():
    figure = charts.timeline({"calls": CALLS, "compile_seconds": 2.0})
    assert len([mark for mark in figure.svg.iter("path") if mark.get("class") == "tall"]) == 1
    assert "1 longer than the axis (triangles): up to 2.5 ms a step" in figure.caption


def test_a_hiccup_in_every_column_leaves_the_others_room():
    seconds = [0.5 if i % 50 == 0 else 0.01 for i in range(40_000)]
    calls = {"steps": [10] * len(seconds), "seconds": seconds, "input_seconds": [0.0] * len(seconds)}
    figure = charts.timeline({"calls": calls})
    assert "800 longer than the axis (triangles): up to 50 ms a step" in figure.caption


def test_parts_that_overlap_say_so():
    shares = {"step": 0.9, "input": 0.3, "unexplained": -0.2}
    figure = bars.parts({"parts": {"shares": shares}})
    assert "Together they take 120.0% of one" in figure.caption
    assert_all_within(figure.svg)


def test_the_runs_dot_is_as_far_below_the_roof_as_its_share():
    svg = charts.roofline(WHOLE).svg
    (dot,) = svg.iter("circle")
    assert "156 GFLOP/s, 50.0% of the limit" in svg.findtext("desc")  # half of 8,000 steps/s of 39 MFLOP
    (gap,) = (mark for mark in svg.iter("path") if mark.get("class") == "line gap")
    ends = [float(number) for number in re.findall(r"[\d.]+", gap.get("d"))]
    assert ends[:2] == pytest.approx([float(dot.get("cx")), float(dot.get("cy"))], abs=0.1)
    assert ends[3] < ends[1]


def test_the_roof_is_of_all_devices_that_share_the_work():
    # 2 us for 4 MB are 2,000 GB/s: of 12.5 GB/s each, 160 devices.
    found = {**WHOLE["roofline"], "intensity_flops_per_byte": WHOLE["flops_per_step"] / 4e6, "memory_seconds": 2e-6}
    words = " ".join(charts.roofline({**WHOLE, "roofline": found}).svg.itertext())
    assert "memory 2 TB/s" in words
    assert "float32 16.9 TFLOP/s" in words
    assert "cache 8 TB/s" in words


@pytest.mark.parametrize(
    ("axis", "ticks"),
    [
        (Axis(0, 10), [0, 2, 4, 6, 8, 10]),
        (Axis(0, 0.27), [0, 0.1, 0.2]),
        (Axis(0.9, 1.3), [0.9, 1.0, 1.1, 1.2, 1.3]),
        (Axis(0.5, 2000, log=True), [1, 10, 100, 1000]),
        (Axis(0.15, 1.2, log=True), [0.2, 0.5, 1]),
        (Axis(5, 5), [5]),
    ],
)
def test_ticks_are_round_numbers_within_the_axis(axis, ticks):
    assert axis.ticks() == pytest.approx(ticks)


# -- the program ------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "result.json").write_text(json.dumps(WHOLE))
    (tmp_path / "other.json").write_text('{"steps_per_sec": 3}')
    (tmp_path / "broken.json").write_text("{")
    return tmp_path


def test_a_report_is_made_from_a_result_file(folder):
    with pytest.raises(SystemExit) as exit:
        report.main(["html", str(folder / "result.json"), str(folder / "report.html")])
    assert exit.value.code == 0
    assert (folder / "report.html").read_text(encoding="utf-8") == report.page(WHOLE)
    assert sorted(path.name for path in folder.iterdir()) == ["broken.json", "other.json", "report.html", "result.json"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["result.json"], "1 arguments; use crankshaft report RESULT.json REPORT.html"),
        (["none.json", "x.html"], "none.json can't be read"),
        (["broken.json", "x.html"], "broken.json can't be read"),
        (["other.json", "x.html"], "other.json is of schema None, and this reads crankshaft.benchmark/1"),
        (["result.json", "none/x.html"], "none/x.html can't be written (No such file or directory)"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(folder, arguments, line, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as exit:
        report.main(["html", *arguments])
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {line}")
    assert error.count("\n") == 1


def test_reports_are_made_without_starting_tensorflow():
    code = "import sys; from crankshaft.launch.benchmark import html; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE).returncode == 0


def test_a_benchmark_writes_its_report(inside, tmp_path):
    path = tmp_path / "report.html"
    inside(
        "--mode=benchmark",
        "--model=logistic",
        "--input=digits",
        "--jit=off",
        "--benchmark_steps=20",
        f"--result_html={path}",
    ).ok()
    text = path.read_text(encoding="utf-8")
    assert list(drawings(text))[:2] == ["Step time", "Step time over the run"]
    assert "Benchmark: logistic, digits, one_device" in Page(text).text


# -- in a browser -----------------------------------------------------------------------------------------------------

_BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(_BROWSER is None, reason="no Chromium on this machine to open the report in")
@pytest.mark.parametrize("scheme", [1, 0], ids=["light", "dark"])
def test_chromium_shows_the_page_without_a_complaint(folder, scheme):
    report.write(folder / "report.html", WHOLE)
    done = subprocess.run(
        [
            _BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            f"--user-data-dir={folder / 'profile'}",
            f"--blink-settings=preferredColorScheme={scheme}",
            "--window-size=800,1000",
            f"--screenshot={folder / 'page.png'}",
            (folder / "report.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "HOME": str(folder)},
    )
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr
    width, height, pixels = read_png(folder / "page.png")
    assert (width, height) == (800, 1000)
    corner = pixels[1:4]
    assert (sum(corner) < 150) == (scheme == 0)  # the page's own colours, in the scheme that was asked for
    assert len({pixels[i : i + 3] for i in range(1, len(pixels) - 3, 997)}) > 3  # and something stands on them


def read_png(path) -> tuple[int, int, bytes]:
    """Width, height, and the pixels as they are filtered: rows of a filter's number and three bytes a pixel."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    place, parts = 8, []
    while place < len(data):
        (size,) = struct.unpack(">I", data[place : place + 4])
        if data[place + 4 : place + 8] == b"IDAT":
            parts.append(data[place + 8 : place + 8 + size])
        place += 12 + size
    return *struct.unpack(">II", data[16:24]), zlib.decompress(b"".join(parts))
