"""Some of Keras's own tests, with `crankshaft.fit` instead of Keras's, by the benchmark that runs all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import keras
import pytest

from benchmarks import keras_suite

pytestmark = pytest.mark.thorough

SAMPLE = (
    "callbacks/early_stopping_test.py",
    "callbacks/lambda_callback_test.py",
    "callbacks/learning_rate_scheduler_test.py",
    "layers/core/dense_test.py",
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_tests_of_keras_pass_unchanged(tmp_path):
    folder = Path(keras.__file__).parent / "src"
    if missing := [name for name in SAMPLE if not (folder / name).exists()]:
        pytest.skip(f"the installed Keras is without its tests ({missing[0]})")
    out = tmp_path / "result.json"
    command = ["-m", "benchmarks.keras_suite", f"--files={'|'.join(SAMPLE)}", f"--out={out}"]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    tests = json.loads(out.read_text())["tests"]
    assert len({name.split("::")[0] for name in tests}) == len(SAMPLE)
    assert {name: each["kind"] for name, each in tests.items() if each["kind"] != "passed"} == {}


def test_a_comparison_fails_where_a_test_passed_before(capsys):
    before = {"tests": {"a.py::A::one": {"kind": "passed"}, "a.py::A::two": {"kind": "wrong"}}, "without": []}
    after = {"tests": {"a.py::A::one": {"kind": "refused", "message": "no"}, "a.py::A::two": {"kind": "passed"}}}
    assert keras_suite.compare(before, after) == 1
    assert capsys.readouterr().out == "a.py::A::one: passed -> refused  no\na.py::A::two: wrong -> passed  \n"
    assert keras_suite.compare(before, before) == 0
    assert "| passed unchanged | 1 |" in keras_suite.report(before)
