"""Workers that hold a model together train and evaluate what one device does."""

from __future__ import annotations

import pathlib

import pytest

from tests.runs import result, tensors

PAIRS = pathlib.Path(__file__).with_name("pairs.py")
RUN = (
    *("--model=transformer_lm", "--model_arg=layers=2", "--model_arg=width=32", "--model_arg=heads=4", "--seed=1"),
    *("--input=text", "--input_arg=context=32", "--global_batch_size=8", "--learning_rate=0.003", "--train_steps=20"),
    *("--clip_norm=1", "--ema_decay=0.9", "--eval_every_steps=10", "--restore_best", "--checkpoint_every_steps=10"),
    *("--jit=off", "--progress=plain"),
)
WORKERS = ("--strategy=multi_worker", "--check_sync_every_steps=5")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return tmp_path_factory.mktemp("alone") / "run"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "flags"),
    [
        pytest.param(["-m", "crankshaft", "train"], ["--recompute", "--shard_optimizer"], id="copies, recomputed"),
        pytest.param([str(PAIRS)], ["--mesh=data:2,model:2"], id="two each, model within a worker"),
        pytest.param([str(PAIRS)], ["--mesh=model:4", "--recompute"], id="two each, model over workers"),
    ],
)
def test_two_workers_are_one_device(start_workers, inside, alone, tmp_path, command, flags):
    if not alone.exists():
        inside(*RUN, f"--run_dir={alone}").ok()
    start_workers(2, *command, *RUN, *WORKERS, *flags, f"--run_dir={tmp_path}/run").ok()
    expected, found = result(alone), result(tmp_path / "run")
    for name, value in expected["eval"].items():  # by the average of 20 steps of Adam
        assert found["eval"][name] == pytest.approx(value, rel=1e-6)
    held, whole = tensors(tmp_path / "run"), tensors(alone)
    assert {name: value.shape for name, value in held.items()} == {name: value.shape for name, value in whole.items()}
