"""Workers that hold a model together, or share its updates out, train and evaluate what one device does."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from tests.runs import assert_equal_bits, newest, result, tensors

PAIRS = pathlib.Path(__file__).with_name("pairs.py")
RUN = (
    *("--model=transformer_lm", "--model_arg=layers=2", "--model_arg=width=32", "--model_arg=heads=4", "--seed=1"),
    *("--input=text", "--input_arg=context=32", "--global_batch_size=8", "--learning_rate=0.003", "--train_steps=20"),
    *("--clip_norm=1", "--ema_decay=0.9", "--eval_every_steps=10", "--restore_best", "--checkpoint_every_steps=10"),
    *("--optimizer=adamw", "--on_nonfinite=skip", "--jit=off", "--progress=plain"),
)
WORKERS = ("--strategy=multi_worker", "--check_sync_every_steps=5", "--histogram_every_steps=10")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return tmp_path_factory.mktemp("alone") / "run"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "flags"),
    [
        pytest.param(["-m", "crankshaft", "train"], ["--recompute", "--shard_optimizer"], id="copies, updates shared"),
        pytest.param([PAIRS], ["--mesh=data:2,model:2"], id="two each, model within a worker"),
        pytest.param([PAIRS], ["--mesh=model:4", "--recompute"], id="two each, model over workers"),
    ],
)
def test_two_workers_are_one_device(start_workers, inside, alone, tmp_path, command, flags):
    if not alone.exists():
        inside(*RUN, f"--run_dir={alone}").ok()
    start_workers(2, *command, *RUN, *WORKERS, *flags, f"--run_dir={tmp_path}/run").ok()
    expected, found = result(alone), result(tmp_path / "run")
    for name, value in expected["eval"].items():  # by the average of 20 steps of Adam
        assert found["eval"][name] == pytest.approx(value, rel=1e-6)
    shards, whole = tensors(tmp_path / "run"), tensors(alone)
    assert shards.keys() == whole.keys()
    for name, value in whole.items():  # slots too, whole; Adam divides by small sums
        np.testing.assert_allclose(shards[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_a_model_over_two_workers_that_lost_one_ends_with_the_same_bits(start):
    flags = (*RUN, "--mesh=model:4", "--model_arg=dropout=0.1", "--checkpoint_every_steps=4")

    def run(name: str):
        return start(name, *flags, local=("--ps=0",), script=PAIRS)

    left_alone, killed = run("alone").ok(), run("killed")
    killed.until(lambda: newest(killed.run_dir) >= 4)
    killed.kill("worker 1")
    assert killed.ok().starts() == 2
    assert_equal_bits(killed.run_dir, left_alone.run_dir)
