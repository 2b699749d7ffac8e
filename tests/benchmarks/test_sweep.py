"""Sweeps and scaling: which runs there are, and what is made of their results. One test, slow, has the real program."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from benchmarks import sweep
from benchmarks.sweep import Point
from tests.launch.local_tasks import ROOT
from tests.waiting import PATIENCE


def test_points_are_all_combinations_and_a_backslash_keeps_a_comma():
    assert sweep.combinations(r"model_arg=hidden_units=8\,8,dropout=0.5;precision=float32,bfloat16") == [
        ["--model_arg=hidden_units=8,8", "--precision=float32"],
        ["--model_arg=hidden_units=8,8", "--precision=bfloat16"],
        ["--model_arg=dropout=0.5", "--precision=float32"],
        ["--model_arg=dropout=0.5", "--precision=bfloat16"],
    ]


@pytest.mark.parametrize("text", ["precision", "precision=", "seed=1,,2"])
def test_a_sweep_that_cannot_be_read_says_why(text):
    with pytest.raises(argparse.ArgumentTypeError, match="has no values; write NAME=VALUE,VALUE"):
        sweep.combinations(text)


def test_weak_scaling_keeps_a_replicas_batch_and_strong_that_of_all(monkeypatch):
    monkeypatch.setattr(sweep.resources, "usable_cores", lambda: [0, 1, 2, 3])
    points = sweep.scaled([4, 1, 2], 32, False, ["--model=mlp"])
    assert [point.title for point in points] == [
        *("1 replicas, weak, batch 32", "1 replicas, strong, batch 32", "2 replicas, weak, batch 64"),
        *("2 replicas, strong, batch 32", "4 replicas, weak, batch 128", "4 replicas, strong, batch 32"),
    ]
    assert [len(point.cores) for point in points] == [1, 1, 2, 2, 4, 4]  # each replica one of its own
    assert "--num_virtual_devices=2" in points[2].command


def test_replicas_may_be_workers(monkeypatch):
    monkeypatch.setattr(sweep.resources, "usable_cores", lambda: [0, 1])
    point = sweep.scaled([1, 2], 64, True, ["--model=mlp"])[2]
    assert point.command[2:6] == ["crankshaft", "local", "--workers=2", "--max_restarts=0"]
    assert point.command[-3:] == ["--global_batch_size=128", "--model=mlp", "--mode=benchmark"]


def test_the_table_names_the_best_what_failed_and_the_efficiency_of_a_replica():
    points = [Point("one", (), replicas=1), Point("two", (), replicas=2), Point("four", (), replicas=4)]
    measured = {"steps_per_sec": 10.0, "examples_per_sec": 1000.0, "interval": [900.0, 1100.0]}
    results = [measured, {**measured, "examples_per_sec": 1800.0}, {"error": "exit code 1"}]
    lines = sweep.shown(points, results).splitlines()[2:]
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in lines] == [
        ["one", "10", "1,000 (900 – 1,100)", "100.0%"],
        ["two (best)", "10", "1,800 (900 – 1,100)", "90.0%"],
        ["four", "failed", "", ""],
    ]


@pytest.mark.slow
def test_a_sweep_of_the_real_program_names_what_fails_and_goes_on():
    flags = ("--model=mlp", "--input=digits", "--jit=off", "--benchmark_arg=steps=20")
    command = [sys.executable, "-m", "benchmarks.sweep", "global_batch_size=0,64", "--", *flags]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert outcome.returncode == 1
    assert "global_batch_size=0" in outcome.stderr
    assert "| --global_batch_size=64 (best) |" in outcome.stdout
