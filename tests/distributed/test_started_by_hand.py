"""Tasks that are started by hand, by --cluster_hosts and --task_index: each says what it is, and all end with 0."""

import re
import signal
import socket

import pytest

from tests.runs import newest

pytestmark = pytest.mark.thorough

BY_FLAGS = """
import json, os, sys
from crankshaft.launch import train

config = json.loads(os.environ.pop("TF_CONFIG"))
index = config["task"]["index"]
hosts = ",".join(config["cluster"]["worker"]).replace("localhost", os.environ["HOST"])
train.main(argv=["crankshaft train", f"--cluster_hosts={hosts}", f"--task_index={index}", *sys.argv[1:]])
"""
RUN = ("--model=mlp", "--input=digits", "--jit=off", "--train_steps=4", "--eval_every_steps=0", "--progress=plain")


@pytest.mark.slow
def test_servers_and_workers_end_well_with_their_coordinator(start_workers, tmp_path, monkeypatch):
    monkeypatch.setenv("HOST", "localhost")
    (tmp_path / "task.py").write_text(BY_FLAGS)
    tasks = start_workers(3, tmp_path / "task.py", *RUN, "--num_ps=1", f"--run_dir={tmp_path / 'run'}").ok()
    assert "evaluation at step 4" in tasks.output(0)


@pytest.mark.slow
def test_an_evaluator_that_does_not_share_the_run_dir_says_so(start_workers, tmp_path, monkeypatch):
    monkeypatch.setenv("HOST", "localhost")
    (tmp_path / "task.py").write_text(BY_FLAGS.replace("*sys", f'f"--run_dir={tmp_path}/{{index == 3}}", *sys'))
    tasks = start_workers(4, tmp_path / "task.py", *RUN, "--train_steps=9000000", "--num_ps=1", "--evaluator")
    tasks.until(lambda: "True is another folder here than at the coordinator" in tasks.output(3))


@pytest.mark.parametrize("lost", [1, 0])
def test_who_is_left_saves_what_it_holds_in_memory(start_workers, tmp_path, lost):
    """No parent holds its memory, and no checkpoint is due. Without the chief, a worker takes its lock on run_dir."""
    run = f"--run_dir={tmp_path / 'run'}"
    command = (
        "-m",
        "crankshaft",
        "train",
        *RUN[:3],
        "--train_steps=900000",
        "--snapshot_seconds=0.01",
        "--progress=plain",
    )
    tasks = start_workers(2, *command, run)
    tasks.until(lambda: re.search(r"step [\d,]{3,}/", tasks.output(0)))
    tasks.programs[lost].send(signal.SIGKILL)
    assert tasks.programs[1 - lost].wait().code == 1
    step = re.search(r"^step ([\d,]+) was in memory, and is saved now$", tasks.output(1 - lost), re.MULTILINE)[1]
    assert newest(tmp_path / "run") == int(step.replace(",", ""))


def test_a_task_says_what_it_is_and_joins_past_a_proxy(start_workers, tmp_path, monkeypatch):
    # A name, as hosts have: who starts tasks at loopback's says it itself.
    monkeypatch.setenv("HOST", socket.gethostname())
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # where nothing listens
    monkeypatch.setenv("no_proxy", "example.com")
    (tmp_path / "task.py").write_text(BY_FLAGS)
    tasks = start_workers(1, tmp_path / "task.py", *RUN, "--strategy=multi_worker", "--cluster_timeout_seconds=20").ok()
    assert f"cluster: worker 0 at {socket.gethostname()}:" in tasks.output(0)
    assert ", task 0 of 1 worker; from cluster_hosts" in tasks.output(0)
