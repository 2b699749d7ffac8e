"""A run that a cluster holds: what it computes is one device's, and a call that differs is named."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

import crankshaft
from tests.pages import ROOT
from tests.waiting import PATIENCE

SCRIPT = ROOT / "tests" / "distributed" / "open_run.py"


def ran(run_dir, *other: str, local: tuple[str, ...] = ()) -> tuple[int, str, list[dict]]:
    """How the program ends, what is printed, and what each of its tasks found."""
    launcher = ["-m", "crankshaft", "local", *local, "--max_restarts=0", "--"] if local else []
    command = [sys.executable, *launcher, SCRIPT, run_dir, *other]
    done = subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, timeout=PATIENCE, check=False)
    output = done.stdout + done.stderr
    return done.returncode, output, [json.loads(line) for line in re.findall(r"found (.*)", output)]


@pytest.mark.slow
def test_workers_hold_a_run_as_one_process_does_and_a_call_that_differs_is_named(tmp_path):
    code, output, (alone,) = ran(tmp_path / "alone")
    assert code == 0, output[-3000:]
    code, output, found = ran(tmp_path / "workers", "other", local=("--workers=2",))
    assert code != 0
    assert "train(steps=1) by worker 0, train(steps=2) by worker 1; have all make the same" in output
    assert len(found) == 2
    assert found[0] == found[1]
    assert found[0]["step"] == alone["step"] == 11
    for name in ("own", "evaluated", "predicted"):
        np.testing.assert_allclose(found[0][name], alone[name], rtol=1e-5)  # rounding of sums
    np.testing.assert_allclose(found[0]["given"], alone["given"], rtol=1e-5)
    assert found[0]["restored"][:2] == alone["restored"][:2] == [11, {"a": 1}]


@pytest.mark.slow
def test_weights_that_a_program_sets_to_other_values_on_a_worker_are_named_in_the_next_call(tmp_path):
    code, output, _ = ran(tmp_path / "apart", "apart", local=("--workers=2",))
    assert code != 0
    assert re.search(r"step 11: replica 1 \(worker 1\) of 2 replicas holds other values of \S+/bias \[1\]", output)
    assert "train(steps=1)" not in output


@pytest.mark.slow
def test_workers_save_together_where_one_of_them_gets_sigterm_between_two_calls(tmp_path):
    _, output, _ = ran(tmp_path / "run", "term", local=("--workers=2",))
    assert "worker 0 was killed by SIGTERM" in output
    assert "worker 1 was killed by SIGTERM" in output
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["step"], result["stop"]) == (8, "SIGTERM")
    assert (tmp_path / "run" / "checkpoints" / "ckpt-8.index").exists()


@pytest.mark.slow
def test_clusters_report_each_class_and_predict_as_one_process_does(tmp_path):
    crankshaft.run(model="logistic", input="digits", run_dir=tmp_path / "alone", train_steps=5, jit="off")
    clusters = {"alone": (), "workers": ("--workers=2",), "servers": ("--workers=2", "--ps=2")}
    found = {}
    for name, local in clusters.items():
        if local:
            shutil.copytree(tmp_path / "alone", tmp_path / name)
        code, output, found[name] = ran(tmp_path / name, "look", local=local)
        assert code == 0, output[-3000:]
    (alone,) = found["alone"]
    assert {name: len(each) for name, each in found.items()} == {"alone": 1, "workers": 2, "servers": 1}
    assert alone["step"] == 5
    assert np.sum(alone["matrix"]) == len(alone["predicted"])
    for each in [*found["workers"], *found["servers"]]:
        assert each["matrix"] == alone["matrix"]
        assert each["of_zeros"] == pytest.approx(np.log(10), rel=1e-5)
        np.testing.assert_allclose(each["predicted"], alone["predicted"], rtol=1e-5, atol=1e-6)
