"""A run_dir with a best checkpoint and no other: gone on with where a killed process left it, refused where the others
were removed. One with checkpoints of which nothing says that they are the run's: refused, and they stay."""

from __future__ import annotations

import shutil

import pytest

from tests.launch.conftest import MLP
from tests.runs import steps

EACH_TWO = ("--eval_every_steps=2", "--steps_per_loop=1", "--progress=plain")


def refused(outcome, run_dir) -> None:
    """With one line, and nothing changed."""
    assert outcome.code == 2
    best = steps(run_dir, "best")[-1]
    assert f"--run_dir={run_dir} holds best/ckpt-{best} of a run whose checkpoints/ are gone" in outcome.error
    assert f"restore them from a copy, or use another --run_dir, with --init_from={run_dir}/best" in outcome.error
    assert not (run_dir / "checkpoints").exists()


@pytest.mark.slow
def test_an_ended_run_whose_checkpoints_are_gone_does_not_begin_anew(inside, tmp_path):
    run = (*MLP, *EACH_TWO, "--train_steps=6", f"--run_dir={tmp_path}")
    inside(*run).ok()
    shutil.rmtree(tmp_path / "checkpoints")
    refused(inside(*run), tmp_path)
    refused(inside(*run, "--eval_every_steps=0", "--mode=train"), tmp_path)
    inside(*MLP, "--train_steps=2", f"--run_dir={tmp_path}/on", f"--init_from={tmp_path}/best").ok()
    shutil.rmtree(tmp_path / "best")  # all of it gone, it is no more than a folder that was used before
    inside(*run).ok()


def test_a_killed_run_whose_checkpoints_are_gone_does_not_begin_anew(crank, inside, tmp_path):
    run = (*MLP, *EACH_TWO, "--train_steps=1000000", "--checkpoint_every_steps=2", f"--run_dir={tmp_path}")
    program = crank.start(*run)
    program.until(lambda: max(steps(tmp_path, "best"), default=0) > 4)
    program.process.kill()
    program.wait()
    shutil.rmtree(tmp_path / "checkpoints")
    refused(inside(*run), tmp_path)


@pytest.mark.slow
def test_a_run_killed_between_its_first_best_checkpoint_and_its_first_other_goes_on(crank, inside, tmp_path):
    run = (*MLP, *EACH_TWO, f"--run_dir={tmp_path}")
    program = crank.start(*run, "--train_steps=1000000")
    program.until(lambda: steps(tmp_path, "best"))
    program.process.kill()
    program.wait()
    best = steps(tmp_path, "best")[-1]
    assert not (tmp_path / "checkpoints").exists()
    outcome = inside(*run, "--train_steps=6").ok()
    assert f"{tmp_path} has no checkpoint but best/ckpt-{best}: the run begins again" in outcome.err
    assert steps(tmp_path) == [6]
    assert max(steps(tmp_path, "best")) >= min(best, 6)
    assert "begins again" not in inside(*run, "--train_steps=8").ok().err


@pytest.mark.parametrize("folder", ["checkpoints", "best"])
def test_checkpoints_that_the_run_is_not_known_to_have_written_stay_and_it_does_not_begin(inside, tmp_path, folder):
    import tensorflow as tf

    run = (*MLP, "--progress=plain", f"--run_dir={tmp_path}")
    others = tf.train.CheckpointManager(tf.train.Checkpoint(v=tf.Variable(1.0)), tmp_path / folder, max_to_keep=None)
    for _ in range(3):
        others.save()
    before = sorted((tmp_path / folder).iterdir())
    outcome = inside(*run, "--train_steps=2")
    assert f"{tmp_path}/{folder} has checkpoint files that no manifest lists: ckpt-1.data-" in (outcome.mistake)
    assert "move them elsewhere, or use another --run_dir, with --init_from to begin with their" in outcome.error
    assert sorted((tmp_path / folder).iterdir()) == before
    assert not (tmp_path / "config.json").exists()


def test_a_run_whose_manifests_are_lost_stays_and_does_not_begin_anew(inside, tmp_path):
    run = (*MLP, "--progress=plain", "--mode=train", "--checkpoint_every_steps=2", f"--run_dir={tmp_path}/run")
    inside(*run, "--train_steps=6").ok()
    checkpoints = tmp_path / "run" / "checkpoints"
    for path in checkpoints.glob("*.manifest.json"):
        path.unlink()
    before = sorted(checkpoints.iterdir())
    assert "restore their .manifest.json files from a copy" in inside(*run, "--train_steps=8").mistake
    assert sorted(checkpoints.iterdir()) == before
    inside(*MLP, "--train_steps=1", "--mode=train", f"--init_from={checkpoints}/ckpt-6").ok()
