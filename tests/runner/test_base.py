"""What a run says of itself, by its configuration, its strategy and its data."""

from __future__ import annotations

import types

import pytest

from crankshaft.runner.base import BaseRun


def made(trains=True, mode="train_and_eval", progress="auto", is_chief=True, sync=1, feeds=("eval",), **more):
    order = types.SimpleNamespace(steps_per_epoch=10, shift=3)
    training = types.SimpleNamespace(feed=types.SimpleNamespace(order=order))
    config = types.SimpleNamespace(
        trains=trains, mode=mode, progress=progress, sync_every_steps=sync, no_jit_reason=more.pop("flags_jit", None)
    )
    strategy = types.SimpleNamespace(is_chief=is_chief, training=training, no_jit_reason=more.pop("strategy_jit", None))
    inputs = types.SimpleNamespace(evaluation_feeds=dict.fromkeys(feeds))
    return BaseRun(config, strategy, inputs, None, None, *more.pop("checkpoints", (None, None)), **more)


@pytest.mark.parametrize(
    ("how", "printed"),
    [({}, "one\ntwo\n"), ({"progress": "off"}, ""), ({"is_chief": False}, ""), ({"progress": "json"}, "one\ntwo\n")],
)
def test_the_chief_prints_unless_it_is_to_show_nothing(how, printed, capsys):
    made(**how).log("one", "two")
    assert capsys.readouterr().out == printed


def test_a_run_that_trains_has_stopped_at_its_last_step_or_for_a_reason():
    run = made()
    for status, stop in (
        ({"step": 3, "last": False, "stop": None}, None),
        ({"step": 9, "last": True, "stop": None}, "step 9 is the last of the run"),
        ({"step": 3, "last": True, "stop": "enough"}, "enough"),
    ):
        run.loop = types.SimpleNamespace(status=types.SimpleNamespace(**status))
        assert run.stop == stop
    assert made(trains=False).stop is None  # it has no loop


def test_a_run_evaluates_where_it_is_to_and_has_data():
    assert (made().evaluates, made(mode="train").evaluates, made(feeds=()).evaluates) == (True, False, False)
    assert (made(mode="train").has_evaluation, made(feeds=()).has_evaluation) == (True, False)
    assert (made().epoch_period.steps, made(sync=4).epoch_period.steps, made().epoch_period.shift) == (10, 12, 3)
    reasons = [
        made(flags_jit=flags, strategy_jit=strategy).no_jit_reason for flags in ("a", None) for strategy in ("b", None)
    ]
    assert reasons == ["a", "a", "b", ""]


def test_checkpoints_are_the_runs_or_those_of_its_best_evaluation():
    run = made(checkpoints=("all", "best"))
    assert [run.checkpoints_for(which) for which in ("best", "latest", 7)] == ["best", "all", "all"]
    with run.timed_as("checkpoints") as timed:
        assert timed is None  # a worker has no record
