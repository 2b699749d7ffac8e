"""kill -9 at any moment, while a checkpoint is written too: the next start works, and the run ends on the same bits."""

from __future__ import annotations

import json
import pathlib
import random
import re
import time

import pytest

from tests.launch.test_exact import RUNS
from tests.runs import assert_equal_bits, manifests, newest

RUN = ("--model=mlp", "--model_arg=hidden_units=32", "--model_arg=dropout=0.2", "--input=digits", "--jit=off")
KEPT = ("--eval_every_steps=10", "--keep_checkpoints=3", "--summary_every_steps=4", "--progress=plain")

# The launcher, with a hook that notes each step that was done. What a killed process wrote is not lost.
NOTING = """
import sys
from crankshaft.engine.hooks import every_steps
from crankshaft.launch import train

noted, *flags = sys.argv[1:]
notes = open(noted, "a", buffering=1)
train.main(hooks=[every_steps(1, lambda status, means: print(status.step, file=notes))], argv=[sys.argv[0], *flags])
"""


def steps_noted(path: pathlib.Path) -> list[int]:
    """Whole lines: the last one may be cut."""
    return [int(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def sealed_next(run_dir: pathlib.Path) -> set[int]:
    """The steps of the manifests that were being written: whole ones are sealed by the next start."""
    listed = (run_dir / "checkpoints").glob("ckpt-*.manifest.json.writing")
    return {int(path.name.split(".")[0].removeprefix("ckpt-")) for path in listed}


def kill_again_and_again(crank, tmp_path, kills: int, every_steps: int) -> pathlib.Path:
    """Starts the same run `kills` times, kills each, and checks what is left. Returns the run_dir."""
    moments = random.Random(0)
    script, run_dir, noted = tmp_path / "noting.py", tmp_path / "run", tmp_path / "noted"
    script.write_text(NOTING)
    flags = (*RUN, *KEPT, "--train_steps=1000000", f"--checkpoint_every_steps={every_steps}", f"--run_dir={run_dir}")
    while_training = 0
    for number in range(kills):
        before, resumed_from = len(steps_noted(noted)), newest(run_dir)
        sealed = sealed_next(run_dir)
        program = crank.start(noted, *flags, script=script)
        if number % 4 == 3:  # some in the start: the import, the restore, the first compilation
            time.sleep(moments.uniform(0.5, 4.0))
        else:
            program.until(lambda before=before: len(steps_noted(noted)) > before)
            if number == kills - 1:  # what is compared at the end goes on from there
                program.until(lambda: newest(run_dir) > 0)
            time.sleep(moments.uniform(0.0, 0.8))
        program.process.kill()
        assert program.wait().code == -9
        assert "error: " not in program.err
        if "steps an epoch" in program.out:
            resumed = re.search("resumed at step ([0-9,]+) of", program.out)
            step = int(resumed[1].replace(",", "")) if resumed else 0
            assert step in {resumed_from} | sealed, program.out
            resumed_from = step
        mine = steps_noted(noted)[before:]
        if mine:
            while_training += 1
            assert mine == list(range(resumed_from + 1, mine[-1] + 1))
            # The last checkpoint due before this step may have been under way; it began when the one before was whole.
            assert newest(run_dir) >= max(resumed_from, ((mine[-1] - 1) // every_steps - 1) * every_steps)
        for manifest in manifests(run_dir):
            for name, file in manifest["files"].items():
                path = run_dir / "checkpoints" / name
                assert not path.exists() or path.stat().st_size == file["bytes"]
    assert while_training >= kills // 2
    return run_dir


def assert_goes_on_to_the_same_bits(crank, run_dir) -> None:
    resumed_from, sealed = newest(run_dir), sealed_next(run_dir)
    assert resumed_from > 0
    until = resumed_from + 9
    run = (*RUN, f"--train_steps={until}")
    straight = run_dir.parent / "straight"
    resumed = [*run, *KEPT, "--checkpoint_every_steps=3", f"--run_dir={run_dir}"]
    undisturbed = [*run, "--checkpoint_every_steps=0", "--eval_every_steps=10", f"--run_dir={straight}"]
    script = run_dir.parent / "runs.py"
    script.write_text(RUNS)
    outcome = crank(json.dumps([resumed, undisturbed]), script=script).ok()
    (step,) = re.findall(f"resumed at step ([0-9,]+) of {until:,}", outcome.out)
    assert int(step.replace(",", "")) in {resumed_from} | sealed
    assert_equal_bits(run_dir, straight)
    left = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert not [name for name in left if "_temp" in name or ".tmp" in name]
    assert len([name for name in left if name.endswith(".index")]) == 3


@pytest.mark.parametrize(("kills", "every_steps"), [(2, 1), pytest.param(10, 7, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_ends_on_the_same_bits(crank, tmp_path, kills, every_steps):
    assert_goes_on_to_the_same_bits(crank, kill_again_and_again(crank, tmp_path, kills, every_steps))


def test_sigterm_during_a_long_callback_saves_the_newest_snapshot_before_the_process_is_killed(crank, tmp_path):
    (script := tmp_path / "blocking.py").write_text("""
import time
from crankshaft.engine.hooks import every_steps
from crankshaft.launch import train

def block(status, means):
    print("blocked", flush=True)
    time.sleep(900)

train.main(hooks=[every_steps(200, block)])
""")
    run_dir = tmp_path / "run"
    often = (
        "--steps_per_loop=5",
        "--snapshot_seconds=0.001",
        "--checkpoint_every_steps=100000",
        "--eval_every_steps=0",
    )
    program = crank.start(*RUN, *often, "--train_steps=300", f"--run_dir={run_dir}", script=script)
    program.until(lambda: "blocked" in program.out)
    program.process.terminate()
    program.until(lambda: newest(run_dir) > 0)
    program.until(lambda: "is saved meanwhile, from memory" in program.err)
    program.process.kill()
    assert program.wait().code == -9
    (manifest,) = manifests(run_dir)
    assert 0 < manifest["step"] < 200
    assert f"step {manifest['step']} is saved meanwhile" in program.err
    assert (
        crank(*RUN, "--train_steps=200", f"--run_dir={run_dir}").ok().out.count(f"resumed at step {manifest['step']}")
    )
