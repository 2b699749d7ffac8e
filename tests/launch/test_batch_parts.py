"""A batch by parts: how many there are, and that a run by parts is exact when it resumes."""

import json
import subprocess
import sys
import types

import pytest

from launch import session
from launch.errors import UsageError
from models.cnn import Model as Cnn
from models.mlp import Model as Mlp


class Asked:
    """What `launch.config.Config` says by default."""

    batch_parts, strategy, jit, global_batch_size, accumulate_steps, model_arg = 0, "one_device", "auto", 64, 1, {}

    def __init__(self, **other):
        vars(self).update(other)


@pytest.mark.parametrize(
    ("trainer", "asked", "threads", "parts"),
    [
        (Cnn, {}, "4", 4),
        (Cnn, {}, "1", 1),
        (Cnn, {}, "5", 1),  # of 12 examples each
        (Cnn, {"accumulate_steps": 2}, "4", 1),
        (Cnn, {"batch_parts": 1}, "4", 1),
        (Cnn, {"batch_parts": 7}, "4", 7),
        (Cnn, {"model_arg": {"batch_norm": True}}, "4", 1),
        (Cnn, {"strategy": "mirrored"}, "4", 1),
        (Cnn, {"jit": "on"}, "4", 1),
        (Mlp, {}, "4", 1),
    ],
)
def test_there_are_as_many_parts_as_cores_where_that_pays(monkeypatch, trainer, asked, threads, parts):
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", threads)
    assert session._batch_parts(Asked(**asked), trainer) == parts


def test_a_model_that_takes_whole_batches_is_given_no_parts():
    asked = Asked(batch_parts=2, model_entry=types.SimpleNamespace(name="mlp"))
    with pytest.raises(UsageError, match=r"--batch_parts=2: mlp does not say that a batch may be cut; .* splits_batch"):
        session._batch_parts(asked, Mlp)


def test_a_run_by_parts_is_exact_when_it_resumes(tmp_path):
    """In processes of their own, whose threads are not there yet: 12 steps, and 7 and then 12."""
    command = [
        sys.executable,
        "-m",
        "launch.train",
        "--model=cnn",
        "--input=digits",
        "--batch_parts=2",
        "--progress=off",
    ]

    def train(run_dir, steps):
        path = tmp_path / f"{run_dir}.json"
        flags = [f"--run_dir={tmp_path / run_dir}", f"--train_steps={steps}", f"--result_json={path}"]
        done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=300, check=True)
        assert "XLA off: 2 cores take a part of each batch each, which XLA cannot do" in done.stdout
        return json.loads(path.read_text())["eval"]

    straight = train("straight", 12)
    train("cut", 7)
    assert train("cut", 12) == straight
