"""PowerSGD and local SGD on two workers: what differs by replica is saved by the chief and given back to each."""

import signal

import pytest

from tests.runs import assert_equal_bits, newest, tensors

MLP = ("--model=mlp", "--model_arg=hidden_units=24,16", "--model_arg=dropout=0.3")
RUN = (*MLP, "--input=digits", "--train_steps=400", "--steps_per_loop=3", "--progress=plain")
OFTEN = ("--eval_every_steps=200", "--checkpoint_every_steps=16")
# What is asked for, and an entry of the checkpoint that has a row for each worker.
WAYS = {
    "powersgd": ("--powersgd_rank=2", "trainer/reduction/memory/0002_kernel"),
    "local sgd": ("--sync_every_steps=8", "trainer/optimizer/slots/0002_kernel/m"),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["powersgd", "local sgd"])
def test_a_preempted_run_ends_as_one_that_was_left_alone(start_workers, tmp_path, way):
    """SIGTERM to the worker that writes nothing; with local SGD, all stop where a round ends."""
    flag, differing = WAYS[way]
    run, straight = tmp_path / "run", tmp_path / "straight"

    def start(run_dir):
        command = ("-m", "crankshaft", "train", "--strategy=multi_worker", *RUN, *OFTEN, flag, f"--run_dir={run_dir}")
        return start_workers(2, *command)

    workers = start(run)
    workers.until(lambda: newest(run) >= 16)
    workers.programs[1].send(signal.SIGTERM)
    assert workers.wait() == [143, 143]
    assert 16 <= newest(run) < 400
    assert way != "local sgd" or newest(run) % 8 == 0
    rows = tensors(run)[f"{differing}/.ATTRIBUTES/VARIABLE_VALUE"]
    assert len(rows) == 2
    assert (rows[0] != rows[1]).any()
    start(run).ok()
    start(straight).ok()
    assert_equal_bits(run, straight)
