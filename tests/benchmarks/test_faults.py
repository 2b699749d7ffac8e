"""Faults from a seed: what a seed determines, and that jobs end as if undisturbed."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.faults.campaign import Happened, Scenario, costs
from benchmarks.faults.job import STRATEGIES, kinds_of_files
from benchmarks.faults.table import FAULTS, Injection

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_seed_determines_a_run_and_seeds_in_a_row_have_every_fault(strategy):
    first, again = ([Scenario.from_seed(seed, strategy) for seed in range(30)] for _ in range(2))
    assert first == again
    met = {injection.fault for scenario in first for injection in scenario.injections}
    assert met == {name for name, fault in FAULTS.items() if strategy in fault.strategies}


def test_the_cost_of_a_fault_is_counted_from_the_restart_that_follows():
    kill, term = (Happened(Injection(name, "worker 0", 8, 0.0), at) for name, at in (("kill", 2.0), ("term", 9.0)))
    notes = [(1.0, "begins", 0), (1.9, "step", 8), (2.1, "step", 12)]  # a task goes on for a moment
    notes += [(5.0, "begins", 4), (5.1, "step", 8), (5.2, "step", 12), (5.3, "step", 16), (9.1, "step", 20)]
    assert costs([kill, term], notes) == [
        {"fault": "kill", "seconds": 3.3, "steps_lost": 8, "seconds_lost": 0.1},
        {"fault": "term", "seconds": 0.1, "steps_lost": 0, "seconds_lost": 0.0},
    ]


def test_temporary_files_count_as_left_but_for_the_code_of_autograph(tmp_path):
    generated = "tmp/__autograph_generated_file1a.py", "tmp/__pycache__/__autograph_generated_file1a.cpython-310.pyc"
    for name in (*generated, "tmp/ours12", "run/checkpoints/ckpt-20.index", "elsewhere/a"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert kinds_of_files(tmp_path) == {"tmp/ours0", "run/checkpoints/ckpt-0.index"}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_jobs_end_as_if_no_fault_had_happened(strategy, tmp_path):
    command = [sys.executable, "-m", "benchmarks.faults", f"--strategy={strategy}", "--faults=20"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
