"""Micro-batches in parallel: how many there are, and that a run of them is exact when it resumes."""

import pytest

from crankshaft.launch.run import building
from tests.launch.command_line.test_config import asked
from tests.runs import assert_equal_bits


@pytest.mark.parametrize(
    ("flags", "threads", "micro_batches"),
    [
        ("--model=cnn", 4, 4),
        ("--model=cnn", 1, 1),
        ("--model=cnn", 5, 1),  # of 12 examples each
        ("--model=cnn --accumulate_steps=2", 4, 1),
        ("--model=cnn --model_arg=batch_norm=True", 4, 1),
        ("--model=cnn --strategy=mirrored", 4, 1),
        ("--model=cnn --jit=on", 4, 1),
        ("--model=mlp", 4, 1),
        ("--model=dlrm", 4, 4),
        ("--model=wide_deep --model_arg=table_capacity=100", 4, 1),
    ],
)
def test_there_are_as_many_micro_batches_as_cores_where_that_pays(monkeypatch, flags, threads, micro_batches):
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", str(threads))
    assert building.parallel_micro_batches(asked("--input=digits", *flags.split())) == micro_batches


@pytest.mark.slow
def test_a_run_by_micro_batches_is_exact_when_it_resumes(crank, monkeypatch, tmp_path):
    """In processes of their own, whose threads are not there yet: 12 steps, and 7 and then 12."""
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "2")
    for name, steps in (("straight", 12), ("cut", 7), ("cut", 12)):
        run = ("--model=cnn", "--input=digits", "--progress=plain", f"--train_steps={steps}")
        out = crank(*run, f"--run_dir={tmp_path / name}").ok().out
        assert "XLA off: each batch is computed in 2 micro-batches in parallel, a thread each" in out
    assert_equal_bits(tmp_path / "cut", tmp_path / "straight", "eval")
