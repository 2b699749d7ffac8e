"""Workers started by hand, one with other settings: each names the worker that differs, and the setting."""

import json

import pytest

from tests.distributed import programs
from tests.processes import ROOT, assert_says

SCRIPT = f"""
import json, os, sys
sys.path.insert(0, {str(ROOT)!r})
import numpy as np
import tensorflow as tf
from crankshaft.launch import train
from tests.launch.line import Line

index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
sys.argv += ["--seed=1", "--learning_rate=0.5", "--steps_per_loop=4"] if index else ["--learning_rate=0.001"]
tf.keras.config.set_epsilon(1e-5 if index else 1e-7)  # as its keras.json may say
sys.argv += [f"--result_json=result-{{index}}.json"]


def data():
    x = np.random.default_rng(0).random((1000, 3), np.float32).astype(np.int64 if index else np.float32)
    return (x, x[:, 0]), (x[:16], x[:16, 0])


train.main(Line, data=data)
"""
FLAGS = ("--strategy=multi_worker", "--train_steps=4", "--mode=train", "--progress=plain", "--global_batch_size=8")


@pytest.mark.slow
def test_what_one_worker_was_asked_otherwise_is_named_by_all(start_workers, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    workers = start_workers(2, tmp_path / "script.py", *FLAGS)
    assert workers.wait() == [2, 2]
    for worker in range(2):
        (line,) = (each for each in workers.output(worker).splitlines() if each.startswith("error: "))
        assert line.startswith(
            "error: workers have different settings: Keras's epsilon 1e-07 at worker 0, 1e-05 at worker 1; "
            "learning_rate 0.001 at worker 0, 0.5 at worker 1; "
            "seed 0 at worker 0, 1 at worker 1; steps_per_loop 0 at worker 0, 4 at worker 1; "
            'the eval data ["float32 [3]", "float32 []"] at worker 0, ["int64 [3]", "int64 []"] at worker 1; '
            'the train data ["float32 [3]", "float32 []"] at worker 0, ["int64 [3]", "int64 []"] at worker 1; '
            "give all the same"
        )


@pytest.mark.slow
def test_a_run_dir_that_workers_do_not_share_is_found_before_the_first_step(start_workers, tmp_path):
    (flags,) = (line for line in SCRIPT.splitlines() if "--seed=1" in line)
    text = SCRIPT.replace(flags, f'sys.argv += [f"--run_dir={tmp_path}/run-{{index}}"]')
    text = text.replace("np.int64 if index else np.float32", "np.float32").replace("1e-5 if index", "1e-7 if index")
    (tmp_path / "script.py").write_text(text)
    workers = start_workers(2, tmp_path / "script.py", *FLAGS)
    assert workers.wait() == [2, 2]
    for worker in range(2):
        (line,) = (each for each in workers.output(worker).splitlines() if each.startswith("error: "))
        assert "is another folder at worker 1 than at the chief" in line
    assert not list(tmp_path.glob("run-*/.seen-by-all*"))


@pytest.fixture(scope="module")
def found(start_workers, tmp_path_factory):
    """What each of two workers found in runs whose programs are alike, or not."""
    folder = tmp_path_factory.mktemp("found")
    start_workers(2, programs.__file__, folder).ok()
    return [json.loads((folder / f"found-{index}.json").read_text()) for index in range(2)]


@pytest.mark.parametrize("case", programs.ALIKE)
def test_programs_that_compute_the_same_train_together(found, case):
    """Only a variable that chooses kernels is named, which differs; no path that another names."""
    one, other = (worker[case] for worker in found)
    assert one["loss"] == other["loss"]
    (line,) = (line for line in (*one["lines"], *other["lines"]) if "differ" in line)
    assert line.startswith("workers may round differently: TF_ENABLE_ONEDNN_OPTS [] at worker 0, ['1'] at worker 1; ")


@pytest.mark.parametrize(
    ("case", "shown"),
    [
        ("| scale", "training steps, first Mul of float32 (8,) by 1.0 at ... by 100.0 at ... in loss at worker 1"),
        (
            "| gelu",
            "training steps, first Relu of float32 (8, 8) at worker 0, Mul of float32 (8, 8) by 0.5 at worker 1",
        ),
        ("| sgd", "optimizer adam at worker 0, sgd at worker 1"),
        ("| layer", "variables, first trainer/model/ ... (8, 1) at worker 0, ... (8, 8) at worker 1"),
        ("| unused", "variables, first ... trainer/unused/_kernel/ float32 (3, 5) at worker 1"),
        ("| hook", "hooks that end calls ... [] at worker 0, ['print every 7 steps'] at worker 1"),
    ],
)
def test_a_worker_with_another_program_ends_all_before_the_first_step(found, case, shown):
    one, other = (worker[case] for worker in found)
    assert one == other
    assert one["code"] == 2
    assert_says(one["error"], shown)


@pytest.mark.parametrize(("case", "what"), [("| broken_model", "the model"), ("| broken_loss", "the training step")])
def test_a_mistake_of_one_worker_is_a_mistake_at_all(found, case, what):
    one = found[0][case]
    assert one["code"] == 2
    assert_says(one["error"], f"worker 1 can't make {what}: KeyError: ")


def test_steps_of_different_builds_go_on_with_a_line(found):
    """As in a rolling upgrade."""
    one, other = (worker[programs.UPGRADED] for worker in found)
    assert one["loss"] == other["loss"]
    (line,) = (line for line in one["lines"] if "steps" in line)
    assert_says(line, "workers compute different training steps ... by 100.0 ... at worker 1, by different builds")
