"""Local SGD on two workers: what differs by replica is saved by the chief and given back to each."""

import signal

import pytest

from tests.runs import assert_equal_bits, newest, tensors

MLP = ("--model=mlp", "--model_arg=hidden_units=24,16", "--model_arg=dropout=0.3")
RUN = (*MLP, "--input=digits", "--train_steps=400", "--steps_per_loop=3", "--progress=plain")
OFTEN = ("--eval_every_steps=200", "--checkpoint_every_steps=16")
DIFFERING = "trainer/optimizer/slots/0002_kernel/m/.ATTRIBUTES/VARIABLE_VALUE"  # of the checkpoint: a row per worker


@pytest.mark.slow
def test_a_preempted_run_ends_as_one_that_was_left_alone(start_workers, tmp_path):
    """SIGTERM to the worker that writes nothing: all stop where a period ends."""
    run, straight = tmp_path / "run", tmp_path / "straight"

    def start(run_dir):
        train = ("-m", "crankshaft", "train", "--strategy=multi_worker", "--sync_every_steps=8", f"--run_dir={run_dir}")
        return start_workers(2, *train, *RUN, *OFTEN)

    workers = start(run)
    workers.until(lambda: newest(run) >= 16)
    workers.programs[1].send(signal.SIGTERM)
    assert workers.wait() == [143, 143]
    assert 16 <= newest(run) < 400
    assert newest(run) % 8 == 0
    rows = tensors(run)[DIFFERING]
    assert len(rows) == 2
    assert (rows[0] != rows[1]).any()
    start(run).ok()
    start(straight).ok()
    assert_equal_bits(run, straight)
