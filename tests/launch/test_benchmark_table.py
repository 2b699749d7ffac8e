"""A benchmark's result, read as people see it: in a pipe, and in a terminal."""

import io
import json

from launch.benchmark.table import print_benchmark

RESULT = {
    "model": "mlp",
    "strategy": "one_device",
    "num_replicas": 1,
    "steps": 2000,
    "wall_seconds": 0.5,
    "steps_per_sec": 4000.0,
    "examples_per_sec": 256_000.0,
    "mean": 255_500.0,
    "stderr": 812.5,
    "jitter": 95.25,
    "step_ms": {"p50": 0.24951, "p90": 0.26, "p99": 0.3},
    "input_wait_fraction": 0.0123,
    "compile_seconds": 2.34,
    "peak_rss_mb": 1234.5,
    "train": {"loss": 0.12345},
    "environment": {
        "cpu": "A CPU [rev 2]",
        "usable_cores": 1.5,
        "memory_mb": 2048,
        "gpus": [],
        "load_average": [0.5, 0.25, 0.0],
        "versions": {"python": "3.12.1", "crankshaft": None},
        "threads": {"inter_op": 0, "intra_op": 2},
        "flags": {"XLA_FLAGS": "--a --b"},
    },
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def printed(result, stream):
    print_benchmark(result, stream)
    return stream.getvalue()


def test_a_pipe_gets_one_plain_line_a_figure():
    lines = dict(line.strip().split("  ", 1) for line in printed(RESULT, io.StringIO()).splitlines())
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


def test_a_result_read_back_from_its_file_prints_alike():
    again = json.loads(json.dumps(RESULT))
    assert printed(again, io.StringIO()) == printed(RESULT, io.StringIO())
