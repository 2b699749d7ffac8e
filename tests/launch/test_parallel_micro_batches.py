"""Micro-batches in parallel: how many there are, and that a run of them is exact when it resumes."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.launch.command_line import config, parsing
from crankshaft.launch.run import base
from tests.waiting import PATIENCE


def micro_batches(*given):
    """How many a command line comes to."""
    words = ["crankshaft train", "--input=digits", *given]
    return base.parallel_micro_batches(config.configure(parsing.from_argv(words), None, False, {}))


@pytest.mark.parametrize(
    ("given", "threads", "found"),
    [
        (["--model=cnn"], 4, 4),
        (["--model=cnn"], 1, 1),
        (["--model=cnn"], 5, 1),  # of 12 examples each
        (["--model=cnn", "--accumulate_steps=2"], 4, 1),
        (["--model=cnn", "--model_arg=batch_norm=True"], 4, 1),
        (["--model=cnn", "--strategy=mirrored"], 4, 1),
        (["--model=cnn", "--jit=on"], 4, 1),
        (["--model=mlp"], 4, 1),
        (["--model=dlrm"], 4, 4),
        (["--model=wide_deep", "--model_arg=table_capacity=100"], 4, 1),
    ],
)
def test_there_are_as_many_parts_as_cores_where_that_pays(monkeypatch, given, threads, found):
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", str(threads))
    assert micro_batches(*given) == found


@pytest.mark.slow
def test_a_run_by_parts_is_exact_when_it_resumes(tmp_path):
    """In processes of their own, whose threads are not there yet: 12 steps, and 7 and then 12."""
    command = [sys.executable, "-m", "crankshaft", "train", "--model=cnn", "--input=digits", "--progress=plain"]
    environment = {**os.environ, "TF_NUM_INTRAOP_THREADS": "2"}

    def train(run_dir, steps):
        path = tmp_path / f"{run_dir}.json"
        flags = [f"--run_dir={tmp_path / run_dir}", f"--train_steps={steps}", f"--result_json={path}"]
        done = subprocess.run(
            [*command, *flags], env=environment, capture_output=True, text=True, timeout=PATIENCE, check=True
        )
        assert "XLA off: each batch is computed in 2 micro-batches in parallel, a thread each" in done.stdout
        newest = max(
            (tmp_path / run_dir / "checkpoints").glob("*.index"), key=lambda file: int(file.stem.split("-")[-1])
        )
        return json.loads(path.read_text())["eval"], tf.train.load_checkpoint(str(newest.with_suffix("")))

    straight, wanted = train("straight", 12)
    train("cut", 7)
    resumed, found = train("cut", 12)
    assert resumed == straight
    names = [name for name in wanted.get_variable_to_shape_map() if "VARIABLE_VALUE" in name]
    assert len(names) > 20  # weights and slots
    for name in names:
        np.testing.assert_array_equal(found.get_tensor(name), wanted.get_tensor(name), name)
