"""Two processes that share updates out train what one device trains, and write one checkpoint."""

from __future__ import annotations

import numpy as np
import pytest

from tests.runs import tensors

RUN = (
    *("--model=mlp", "--model_arg=hidden_units=48,32", "--input=digits", "--mode=train", "--jit=off"),
    *("--optimizer=adamw", "--clip_norm=1", "--on_nonfinite=skip", "--seed=3", "--train_steps=20"),
    "--checkpoint_every_steps=10",
)


@pytest.mark.slow
def test_two_processes_train_what_one_device_trains(start_workers, inside, tmp_path):
    flags = (
        "--strategy=multi_worker",
        "--check_sync_every_steps=5",
        "--shard_optimizer",
        "--histogram_every_steps=10",
        f"--run_dir={tmp_path}/two",
    )
    start_workers(2, "-m", "crankshaft", "train", *RUN, *flags).ok()
    inside(*RUN, f"--run_dir={tmp_path}/one").ok()
    expected, found = tensors(tmp_path / "one"), tensors(tmp_path / "two")
    assert found.keys() == expected.keys()
    for name, value in expected.items():  # slots too, whole; Adam divides by small sums
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
