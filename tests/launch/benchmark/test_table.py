"""A benchmark's result, read as people see it: in a pipe, and in a terminal."""

import io
import json
import re

import pytest

from crankshaft.launch.benchmark.sections import number, quantity
from crankshaft.launch.benchmark.table import print_benchmark
from tests.launch.benchmark.results import MORE, RESULT


class Terminal(io.StringIO):
    def isatty(self):
        return True


def printed(result, stream):
    print_benchmark(result, stream)
    return stream.getvalue()


def test_a_pipe_gets_one_plain_line_a_figure():
    shown = printed(RESULT, io.StringIO())
    lines = dict(line.strip().split("  ", 1) for line in shown.splitlines() if line)
    lines = {name: value.strip() for name, value in lines.items()}
    assert lines["timed"] == "2,000 steps in 0.50 s"
    assert lines["steps/s"] == "4,000"
    assert lines["mean over calls"] == "255,500 ± 812.5, jitter 95.25"
    assert lines["step ms"] == "p50 0.2495, p90 0.26, p99 0.3"
    assert lines["input wait"] == "1.2% of the time"
    assert lines["machine"] == "A CPU [rev 2], 1.5 usable cores, 2.0 GiB"
    assert lines["versions"] == "python 3.12.1"
    assert lines["threads"] == "inter_op TensorFlow chooses, intra_op 2"


def test_a_terminal_gets_the_same_figures(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    text = printed(RESULT, Terminal())
    assert "\x1b[" in text
    for figure in ("4,000", "256,000", "0.2495", "A CPU [rev 2]", "--a --b"):
        assert figure in text


def test_what_is_missing_leaves_its_line_out():
    text = printed({"steps_per_sec": 10.0, "stderr": None, "mean": 80.0, "jitter": 0.0}, io.StringIO())
    assert text.splitlines() == ["steps/s            10", "  mean over calls  80, jitter 0"]
    assert printed({}, io.StringIO()) == ""


def test_every_part_of_a_result_has_its_lines():
    text = printed({**RESULT, **MORE}, io.StringIO())
    lines = [re.sub(r" {2,}", "  ", line.strip()) for line in text.splitlines()]
    for line in (
        "95 % interval  250,000 – 260,000",
        "2  1,000  0.20  5,000  320,000",
        "a step  39 MFLOP",
        "peak float32  106 GFLOP/s",
        "peak bfloat16  –",
        "memory  12.5 GB/s",
        "bound by  memory: at most 8,000 steps/s",
        "share of limit  50.0%",
        "last cache  50 GB/s",
        "whole  0.25  100.0%",
        "forward, backward  0.2  80.0%",
        "unexplained  0.05  20.0%",
        "as in this run  0.02  0.5  0.75",
        "bfloat16  one  0.01  0.25  0.375",
        "4 bytes  0.125  –  –",
        "write  1,500 MiB/s",
        "training waits  3 ms a checkpoint",
        "1  120  100  1.200",
        "others used  0.12 cores during the rounds",
        "mlp/[a]  MatMul  0.1  40.0%",
        "ratio  1.250",
        "verdict  faster",
        "warning: the load before the run was 3.2 [sic]",
    ):
        assert line in lines, line
    assert not any(line.startswith("reduction") for line in lines)  # null: one replica has none


def test_a_part_by_itself_says_so():
    text = printed({"parts": {"input": {"ms_per_step": 0.5, "repeats": 7}}}, io.StringIO())
    assert [line.split("  ")[-1].strip() for line in text.splitlines()] == ["input alone", "", "share", "–"]
    assert "input alone      0.5      –" in text


def test_a_columns_figures_stand_at_its_right_side():
    text = printed({"rounds": MORE["rounds"] * 5}, io.StringIO()).splitlines()
    assert [line[:5] for line in text] == ["round", *(f"{i:5}" for i in range(1, 11))]
    assert len({len(line) for line in text}) == 1


def test_a_terminal_shows_warnings_in_yellow(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    text = printed(MORE, Terminal())
    assert re.search(r"\x1b\[33m[^\x1b]*the load before", text)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0 B"), (999.4, "999 B"), (999.6, "1 kB"), (2.35e9, "2.35 GB"), (5e18, "5e+03 PB"), (None, "–")],
)
def test_quantities_have_the_prefix_that_keeps_them_short(value, text):
    assert quantity(value, "B") == text


@pytest.mark.parametrize(("value", "text"), [(0.12345, "0.1235"), (-1234.5, "-1,234"), (1e6, "1,000,000"), (None, "–")])
def test_numbers_have_four_digits_that_say_something(value, text):
    assert number(value) == text


def test_a_result_read_back_from_its_file_prints_alike():
    again = json.loads(json.dumps(RESULT))
    assert printed(again, io.StringIO()) == printed(RESULT, io.StringIO())
