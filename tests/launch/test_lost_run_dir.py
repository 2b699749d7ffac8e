"""A run whose run_dir is taken away while it goes on: one line, soon, and nothing is written where another's may be."""

import os
import shutil

import pytest

from crankshaft.engine.hooks import every_steps
from crankshaft.launch.errors import UsageError
from crankshaft.launch.host import process
from tests.runs import newest

RUN = (
    "--model=mlp",
    "--input=synthetic",
    "--input_arg=examples=200",
    "--jit=off",
    "--progress=plain",
    "--train_steps=60",
)
EVERY = ("--checkpoint_every_steps=20", "--summary_every_steps=5")


def remove(run_dir):
    """Moves it away first: files of a save that is being written come and go while a tree is removed."""
    os.rename(run_dir, f"{run_dir}-taken")
    shutil.rmtree(f"{run_dir}-taken", ignore_errors=True)


def replace(run_dir):
    """As another run begins there."""
    os.rename(run_dir, f"{run_dir}-moved")
    run_dir.mkdir()
    (run_dir / "notes").write_text("another's")


@pytest.mark.parametrize("take_away", [pytest.param(remove, marks=pytest.mark.slow), replace])
def test_a_run_whose_run_dir_is_taken_away_ends_with_one_line(inside, tmp_path, take_away):
    run_dir = tmp_path / "run"
    steps = []

    def act(status, means):
        steps.append(status.step)
        if status.step == 30:
            take_away(run_dir)

    outcome = inside(*RUN, *EVERY, f"--run_dir={run_dir}", hooks=[every_steps(10, act)])
    assert outcome.mistake.startswith(f"--run_dir={run_dir} was removed or replaced while its run went on")
    assert steps == [10, 20, 30]
    left = sorted(os.listdir(run_dir)) if run_dir.exists() else []
    assert not {"config.json", "result.json", ".lock", "checkpoints"} & set(left)


@pytest.mark.slow
def test_a_lock_that_is_removed_is_made_anew_and_the_run_goes_on(inside, tmp_path):
    def act(status, means):
        if status.step == 30:
            os.remove(tmp_path / ".lock")
        if status.step == 50:
            with pytest.raises(UsageError, match=f"is in use by process {os.getpid()}"), process.lock(str(tmp_path)):
                pass

    inside(*RUN, *EVERY, f"--run_dir={tmp_path}", hooks=[every_steps(10, act)]).ok()
    assert newest(tmp_path) == 60


def test_a_lock_that_is_removed_is_made_anew(tmp_path):
    with process.lock(str(tmp_path)) as opened:
        os.remove(tmp_path / ".lock")
        opened.check()
        with pytest.raises(UsageError, match=f"is in use by process {os.getpid()}"), process.lock(str(tmp_path)):
            pass


def test_a_lock_that_another_has_taken_meanwhile_ends_the_run(tmp_path):
    with process.lock(str(tmp_path)) as opened:
        opened.check()
        os.remove(tmp_path / ".lock")
        with process.lock(str(tmp_path)), pytest.raises(UsageError, match="is in use by process"):
            opened.check()
