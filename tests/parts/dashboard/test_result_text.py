"""A benchmark's result, read as people see it: as text and as Markdown."""

import re

import pytest

from crankshaft.parts.dashboard import result_text
from crankshaft.parts.dashboard.result_text import number

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

# What only some runs have.
MORE = {
    "interval": [250_000.0, 260_000.0],
    "rounds": [
        {"steps": 1000, "wall_seconds": 0.25, "steps_per_sec": 4000.0, "examples_per_sec": 256_000.0},
        {"steps": 1000, "wall_seconds": 0.2, "steps_per_sec": 5000.0, "examples_per_sec": 320_000.0},
    ],
    "reduce_fraction": None,
    "flops_per_step": 39_010_304,
    "flops_source": "products",
    "machine": {
        "matmul_gflops": {"float32": 105.5, "bfloat16": None},
        "memory_gb_per_sec": 12.5,
        "cache_gb_per_sec": 50.0,
    },
    "roofline": {"bound": "memory", "limit_steps_per_sec": 8000.0, "share_of_limit": 0.5},
    "profile": {"trace": "x", "ops": [{"name": "mlp/[a]", "type": "MatMul", "ms_per_step": 0.1, "share": 0.4}]},
    "baseline": {
        "path": "old.json",
        "ratio": 1.25,
        "interval": [1.2, 1.3],
        "verdict": "faster",
    },
    "noise": {"other_cores": 0.125},
    "warnings": ["the load before the run was 3.2 [sic]"],
}


def test_text_has_a_line_a_figure_and_leaves_out_what_is_missing():
    lines = dict(line.strip().split("  ", 1) for line in result_text.text(RESULT).splitlines() if line)
    lines = {name: value.strip() for name, value in lines.items()}
    assert lines["timed"] == "2,000 steps in 0.50 s"
    assert lines["steps/s"] == "4,000"
    assert lines["mean over calls"] == "255,500 ± 812.5, jitter 95.25"
    assert lines["step ms"] == "p50 0.2495, p90 0.26, p99 0.3"
    assert lines["input wait"] == "1.2% of the time"
    assert lines["machine"] == "A CPU [rev 2], 1.5 usable cores, 2 GiB"
    assert lines["versions"] == "python 3.12.1"
    assert lines["threads"] == "inter_op 0, intra_op 2; of 0 TensorFlow chooses"
    assert "GPUs" not in lines
    text = result_text.text({"steps_per_sec": 10.0, "stderr": None, "mean": 80.0, "jitter": 0.0})
    assert text.splitlines() == ["steps/s            10", "  mean over calls  80 ± –, jitter 0"]
    assert result_text.text({}) == ""


def test_every_part_of_a_result_has_its_lines():
    lines = [re.sub(r" {2,}", "  ", line.strip()) for line in result_text.text({**RESULT, **MORE}).splitlines()]
    for line in (
        "95 % interval  250,000 – 260,000",
        "2  1,000  0.20  5,000  320,000",
        "a step  39.01 MFLOP: products",
        "peak GFLOP/s  float32 105.5",
        "memory  12.5 GB/s",
        "bound by  memory: at most 8,000 steps/s",
        "share of limit  50.0%",
        "last cache  50 GB/s",
        "others used  0.12 cores during the rounds",
        "mlp/[a]  MatMul  0.1  40.0%",
        "ratio  1.250",
        "verdict  faster",
        "warning  the load before the run was 3.2 [sic]",
    ):
        assert line in lines, line
    assert not any(line.startswith("reduction") for line in lines)  # null: one replica has none


def test_a_tables_figures_stand_at_its_right_side():
    lines = result_text.text({"rounds": MORE["rounds"] * 5}).splitlines()
    assert [line[:5] for line in lines] == ["round", *(f"{i:5}" for i in range(1, 11))]
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize(("value", "text"), [(0.12345, "0.1235"), (-1234.5, "-1,234"), (1e6, "1,000,000"), (None, "–")])
def test_numbers_have_four_digits_that_say_something(value, text):
    assert number(value) == text


def test_a_hostile_name_stays_in_its_cell():
    ops = [{"name": "a|b", "type": "MatMul", "ms_per_step": 1.0, "share": 1.0}]
    assert r"| a\|b | MatMul | 1 | 100.0% |" in result_text.markdown({"profile": {"ops": ops}})
