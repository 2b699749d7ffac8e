"""Two workers on a stream, by files and by examples: a run in two parts has the bits of one."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

from crankshaft.models.mlp import Model
from tests.launch import streamed_digits
from tests.runs import assert_equal_bits, manifests, tensors

RUN = ("--model_arg=hidden_units=16", "--model_arg=dropout=0.3", "--global_batch_size=32", "--shuffle_buffer=60")
RUN += ("--progress=plain", "--strategy=multi_worker")


@pytest.mark.slow
@pytest.mark.parametrize("files", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_two_workers_go_on_where_each_was(start_workers, inside, tmp_path, files):
    (tmp_path / "files").mkdir()
    streamed_digits.write_files(tmp_path / "files", files)

    def run(name, steps):
        flags = [*RUN, f"--run_dir={tmp_path}/{name}", f"--train_steps={steps}"]
        workers = start_workers(2, pathlib.Path(streamed_digits.__file__), tmp_path / "files", json.dumps([flags]))
        return workers.ok().output(0)

    first = run("run", 19)
    again = run("run", 50)
    run("straight", 50)
    by = manifests(tmp_path / "run")[-1]["about"]["input"]["train"]
    assert sum(by["counts"]) == streamed_digits.EXAMPLES
    said = {7: "divided by files, ", 1: "divided by examples, each worker reads all and takes its part of a batch"}
    assert f"a dataset of 461 examples, 2 workers: {said[files]}" in first
    assert "counting examples" in first
    assert "counting examples" not in again
    assert "reading the epoch again" not in again
    assert_equal_bits(tmp_path / "run", tmp_path / "straight")
    if files == 7:
        assert len(by["counts"]) == 2
        alone = (*RUN[:-1], f"--run_dir={tmp_path}/run", "--train_steps=55")
        outcome = inside(*alone, trainer=Model, data=lambda: streamed_digits.data(tmp_path / "files"))
        assert "divided its training data by files among 2 workers" in outcome.mistake


@pytest.mark.slow
def test_two_workers_with_files_of_unequal_length_train_what_one_device_trains(start_workers, inside, tmp_path):
    """Every step has all examples, 71 on one worker and 390 on the other."""
    (tmp_path / "files").mkdir()
    streamed_digits.write_files(tmp_path / "files", 7)
    flags = ["--model_arg=hidden_units=16", "--global_batch_size=800", "--optimizer=momentum", "--train_steps=20"]
    flags += ["--learning_rate=0.5", "--jit=off", "--progress=plain"]
    cluster = [*flags, "--strategy=multi_worker", f"--run_dir={tmp_path}/workers"]
    script = pathlib.Path(streamed_digits.__file__)
    start_workers(2, script, tmp_path / "files", json.dumps([cluster])).ok()
    assert sorted(manifests(tmp_path / "workers")[-1]["about"]["input"]["train"]["counts"]) == [71, 390]
    inside(
        *flags, f"--run_dir={tmp_path}/alone", trainer=Model, data=lambda: streamed_digits.data(tmp_path / "files")
    ).ok()
    found, expected = tensors(tmp_path / "workers"), tensors(tmp_path / "alone")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
