"""A worker at an address that the tasks of a job with parameter servers do not know joins them while they train."""

from __future__ import annotations

import re

import pytest

from crankshaft.engine.record.events import read
from tests import runs
from tests.distributed.jobs import STEPS_PER_EPOCH
from tests.forked import PYTHON_PATH

# The last process is the newcomer, which waits until the others have begun; then they wait for it.
TASK = """
import json, os, pathlib, sys, time
from crankshaft.engine.hooks import every_steps
from crankshaft.launch import train
from tests.distributed.counting import Counting, data

here = pathlib.Path(__file__).parent
task = json.loads(os.environ.pop("TF_CONFIG"))
index, hosts = task["task"]["index"], task["cluster"]["worker"]
newcomer = hosts.pop()
if index == 3:
    index, hosts = 2, [*hosts[:2], newcomer, hosts[2]]
    while not list(here.glob("run/events.jsonl")):
        time.sleep(0.1)
argv = [*sys.argv, f"--cluster_hosts={','.join(hosts)}", f"--task_index={index}", "--num_ps=1"]

def slow(status, means):
    while len(list(here.glob("run/workers/*"))) < 2:
        time.sleep(0.1)
    if not (here / "included").exists():
        time.sleep(1.0)

train.main(Counting, data=data, hooks=[every_steps(32, slow)], argv=argv + ["--max_restarts=1"] * (index == 0))
"""
EPOCHS = 20
STEPS = EPOCHS * STEPS_PER_EPOCH


@pytest.mark.slow
def test_a_worker_at_a_new_address_is_included_and_no_step_is_repeated(start_workers, tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    flags = (f"--train_steps={STEPS}", "--mode=train", "--checkpoint_every_steps=32", f"--run_dir={tmp_path / 'run'}")
    tasks = start_workers(4, tmp_path / "task.py", *flags, "--progress=plain", PYTHONPATH=PYTHON_PATH)
    tasks.until(lambda: "to include" in tasks.output(0))
    (tmp_path / "included").touch()
    chief = tasks.ok().output(0)
    address = re.escape(tasks.addresses[3])
    (step,) = re.findall(rf"stopped at step (\d+): to include worker 1 \({address}\), which has come\n", chief)
    assert f"resumed at step {int(step):,} of {STEPS}" in chief
    assert "parameter_server, 2 replicas" in chief
    seen = {name: value for name, value in runs.tensors(tmp_path / "run").items() if "seen/" in name}
    assert (*seen.values(),)[0].tolist() == [EPOCHS] * 1000
    windows = [line.event for line in read(tmp_path / "run" / "events.jsonl") if line.kind == "window"]
    by_newcomer = [row["steps"] for window in windows for row in window["workers"] if row["name"] == "worker 1"]
    assert sum(by_newcomer) > 0
