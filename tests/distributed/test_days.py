"""A stop at a step, partial evaluations, an average, the next day: as on one device."""

from __future__ import annotations

import pytest

import crankshaft
from tests.distributed import days

pytestmark = pytest.mark.thorough

UPDATE = {"learning_rate": 0.05, "learning_rate_schedule": "cosine", "train_steps": 6, "global_batch_size": 16}
EVALUATION = {"eval_batch_size": 20, "eval_batches": 2, "jit": "off"}
STOP = {"stop_at_step": 4}


def in_turn(train, folder) -> list[dict]:
    """A day that stops, and is continued; then the next day. Returns the results."""
    first = {**UPDATE, **EVALUATION}
    stopped = train("first", 0, **first, **STOP)
    assert (stopped["step"], stopped["stop"], stopped["eval_batches"]) == (4, "stop_at_step=4", 2)
    continued = train("first", 0, **first)
    begun = {"init_from": str(folder / "first")}
    return [stopped, continued, train("next", 1, **UPDATE, **EVALUATION, **begun)]


def alone(folder, **where) -> list[dict]:
    folder.mkdir()

    def train(name, day, **how):
        how |= {"run_dir": folder / name, "progress": "off", **where}
        return crankshaft.run(days.Student, data=days.day(day), **how).result

    return in_turn(train, folder)


def assert_same(found: list[dict], expected: list[dict]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["step"] == theirs["step"]
        for split in ("train", "eval"):
            assert mine[split] == pytest.approx(theirs[split], rel=2e-5)  # sums of float32 in another order


def test_two_replicas_begin_stop_and_go_on_as_one_device(tmp_path):
    assert_same(alone(tmp_path / "two", strategy="mirrored", num_virtual_devices=2), alone(tmp_path / "one"))


@pytest.mark.slow
@pytest.mark.parametrize("local", [("--ps=0",), ("--workers=1", "--ps=1")], ids=["workers", "servers"])
def test_clusters_begin_stop_and_go_on_as_one_device(start, local, tmp_path):
    def train(name, day, **how):
        words = [
            f"--{key}" if value is True else f"--{key}={each}"
            for key, value in how.items()
            for each in (value if isinstance(value, list) else [value])
        ]
        return start(name, *words, f"--day={day}", local=local, script=days.__file__).ok().result

    assert_same(in_turn(train, tmp_path), alone(tmp_path / "one"))
