"""Examples of varying length on two workers, and with a parameter server, train what one device trains."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.launch import varying
from tests.waiting import PATIENCE

FLAGS = ("--global_batch_size=8", "--learning_rate=0.01", "--seed=3", "--train_epochs=2", "--jit=off")


def losses(tmp_path, name, *flags, local=()):
    """The losses of training and of evaluation of a job."""
    result = tmp_path / f"{name}.json"
    command = [sys.executable, "-m", "crankshaft", "local", *local, "--"] if local else [sys.executable]
    words = [*command, varying.__file__, *FLAGS, *flags, f"--result_json={result}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    content = json.loads(result.read_text())
    return [content["train"]["loss"], content["eval"]["loss"], content["step"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("read", "buckets"),
    [("source", ()), ("source", ("--bucket_by=0:3,7,12:48",)), ("dataset", ("--bucket_by=0:3,7,12",))],
)
def test_workers_and_servers_train_what_one_device_trains(tmp_path, read, buckets):
    one = losses(tmp_path, "one", f"--read={read}", *buckets)
    # Sums of float32 in another order.
    workers = losses(tmp_path, "workers", f"--read={read}", *buckets, local=("--workers=2",))
    assert workers == pytest.approx(one, rel=1e-5)
    servers = losses(tmp_path, "servers", f"--read={read}", *buckets, local=("--workers=1", "--ps=1"))
    assert servers == pytest.approx(one, rel=1e-4)
