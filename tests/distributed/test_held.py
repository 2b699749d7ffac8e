"""A run that two workers hold: what they compute is one device's, and a call that differs is named."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.pages import ROOT
from tests.waiting import PATIENCE

HELD = ROOT / "tests" / "distributed" / "held.py"


def held(run_dir, *other: str, local: tuple[str, ...] = ()) -> tuple[int, str, list[dict]]:
    """How the program ends, what is printed, and what each of its tasks found."""
    launcher = ["-m", "crankshaft", "local", *local, "--max_restarts=0", "--"] if local else []
    command = [sys.executable, *launcher, HELD, run_dir, *other]
    done = subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, timeout=PATIENCE, check=False)
    output = done.stdout + done.stderr
    return done.returncode, output, [json.loads(line) for line in re.findall(r"found (.*)", output)]


@pytest.mark.slow
def test_workers_hold_a_run_as_one_process_does_and_a_call_that_differs_is_named(tmp_path):
    code, output, (alone,) = held(tmp_path / "alone")
    assert code == 0, output[-3000:]
    code, output, found = held(tmp_path / "workers", "other", local=("--workers=2",))
    assert code != 0
    assert "train(steps=1) by worker 0, train(steps=2) by worker 1; have all make the same" in output
    assert len(found) == 2
    assert found[0] == found[1]
    assert found[0]["step"] == alone["step"] == 11
    for name in ("own", "evaluated", "predicted"):
        np.testing.assert_allclose(found[0][name], alone[name], rtol=1e-5)  # rounding of sums
    np.testing.assert_allclose(found[0]["given"], alone["given"], rtol=1e-5)
    assert found[0]["restored"][:2] == alone["restored"][:2] == [11, {"a": 1}]
