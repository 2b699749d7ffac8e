"""Workers with a GPU each, as far as that can be seen without one: TensorFlow warns, and the CPU computes."""

import json

import pytest
import tensorflow as tf

from tests.launch.conftest import MLP


@pytest.mark.slow
@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="there is a GPU")
@pytest.mark.parametrize("servers", [(), ("--ps=1",)])
def test_workers_that_are_given_different_gpus_train_together(crank, monkeypatch, tmp_path, servers):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    run = (*MLP, "--train_steps=4", "--mode=train", f"--run_dir={tmp_path}")
    outcome = crank("--workers=2", "--max_restarts=0", *servers, "--", *run, command="local").ok()
    for worker in range(2):
        assert f"GPU {worker} is asked for, and TensorFlow finds no GPU, so the CPU computes" in outcome.err
    assert json.loads((tmp_path / "result.json").read_text())["step"] == 4
