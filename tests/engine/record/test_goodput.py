"""What a run's time went to adds up, over processes that end in every way."""

from __future__ import annotations

import json

import pytest

from crankshaft.engine.record.events import Line
from crankshaft.engine.record.goodput import Goodput, Past


def past(*events: dict) -> Past:
    made = Past()
    for event in events:
        step = event.setdefault("step", 0)
        made.replay(Line(event["event"], event["time"], step, json.dumps(event).encode()))
    return made


def test_a_call_that_compiles_counts_as_steps_as_far_as_its_steps_take_later():
    goodput = Goodput()
    goodput.add(10.0, (9.0, 10), (9.0, 10), aside={"evaluation": 0.5})
    assert goodput.spent["compile"] == 9.0  # as far as is known by then
    goodput.add(4.25, (4.0, 40), (0.0, 0), input_seconds=1.0, waiting_seconds=0.5, aside={"waiting": 0.25})
    spent = goodput.spent
    # A step takes 3 s / 40 without its input, so ten of them 0.75 s.
    assert spent["compile"] == pytest.approx(8.25)
    assert spent["steps"] == pytest.approx(0.75 + 2.5)
    assert (spent["input"], spent["waiting"], spent["other"]) == pytest.approx((1.0, 0.75, 0.5))
    assert spent["total"] == pytest.approx(14.25)


def test_waits_are_of_the_calls_alone():
    goodput = Goodput()
    assert goodput.report() == {"share": 0.0, "seconds": {"total": 0.0, **dict.fromkeys(goodput.seconds, 0.0)}}
    goodput.add(2.0, (1.0, 4), (0.0, 0), input_seconds=0.75, waiting_seconds=9.0)
    assert (goodput.spent["input"], goodput.spent["waiting"], goodput.spent["steps"]) == (0.75, 0.25, 0.0)
    goodput.add(2.0, (1.0, 4), (0.0, 0), input_seconds=9.0, waiting_seconds=9.0)
    assert (goodput.spent["input"], goodput.spent["waiting"], goodput.spent["other"]) == (1.75, 0.25, 2.0)
    goodput.add(1.0, (1.0, 4), (1.0, 4), input_seconds=0.5)  # the others' steps took no time beside their input
    assert (goodput.spent["compile"], goodput.spent["steps"]) == (0.5, 0.0)
    assert goodput.report()["share"] == 0.0


def test_a_record_without_seconds_loses_none(caplog):
    """Whatever may be in a record: the time from 1970 on is not lost."""
    goodput = Goodput()
    goodput.resume(Past(), {"steps": 3.0}, 0, 1e9)
    assert goodput.spent["total"] == 0.0
    goodput.resume(past({"event": "start", "time": 1e9}, {"event": "x", "time": 1e9 + 5}), None, 0, 1e9 + 7)
    assert {kind: seconds for kind, seconds in goodput.spent.items() if seconds} == {"total": 2.0, "down": 2.0}
    goodput.resume(past({"event": "start", "time": 1e9 + 5, "spent": {"steps": 4.0}}), None, 0, 1e9)
    assert (goodput.spent["lost"], goodput.spent["down"]) == (4.0, 0.0)
    assert caplog.text == ""  # clocks of hosts differ by seconds


def test_a_killed_process_loses_what_came_after_the_checkpoint():
    spent = {"steps": 50.0, "start": 10.0, "compile": 5.0, "input": 4.0}
    found = past(
        {"event": "start", "time": 100.0, "spent": {"start": 10.0}},
        {"event": "window", "time": 159.0, "step": 500, "spent": spent},
        {"event": "restart", "time": 161.0, "step": 500, "cause": "worker 0 was killed by SIGKILL"},
        {"event": "restart", "time": 169.0, "step": 500, "cause": "worker 1 was killed by SIGKILL"},  # as it started
    )
    assert (found.attempts, found.cause) == (1, "worker 1 was killed by SIGKILL")
    goodput = Goodput()
    goodput.resume(found, {"steps": 30.0, "start": 10.0, "compile": 5.0, "input": 2.0}, 300, began_at=170.0)
    assert goodput.spent == pytest.approx(
        {**dict.fromkeys(goodput.seconds, 0.0), "total": 80.0}
        | {"steps": 30.0, "start": 10.0, "compile": 5.0, "input": 2.0, "lost": 20.0 + 2.0 + 2.0, "down": 9.0}
    )


def test_what_a_clock_that_was_ahead_recorded_last_counts_up_to_now(caplog):
    found = past(
        {"event": "start", "time": 100.0, "spent": {"start": 10.0}},
        {"event": "window", "time": 110.0, "step": 5, "spent": {"start": 10.0, "steps": 10.0}},
        {"event": "warning", "time": 110.0 + 86400.0, "step": 5},
    )
    goodput = Goodput()
    goodput.resume(found, {"start": 10.0, "steps": 10.0}, 5, began_at=113.0)
    assert (goodput.spent["lost"], goodput.spent["down"], goodput.spent["total"]) == (3.0, 0.0, 23.0)
    assert "a clock 86397 s ahead of this host's" in caplog.text


@pytest.mark.parametrize(("exit_code", "down"), [(143, 60.0), (0, 0.0)])
def test_an_end_that_saved_loses_nothing_and_a_complete_runs_pause_does_not_count(exit_code, down):
    end = {"event": "end", "time": 140.0, "step": 300, "reason": "SIGTERM", "exit_code": exit_code}
    end["goodput"] = {"share": 0.8, "seconds": {"total": 41.0, "steps": 33.0, "start": 8.0}}
    goodput = Goodput()
    goodput.resume(past({"event": "start", "time": 100.0}, end), {"steps": 30.0}, 300, began_at=200.0)
    spent = {kind: seconds for kind, seconds in goodput.spent.items() if seconds}
    paused = {"down": down} if down else {}
    assert spent == pytest.approx({"total": 41.0 + down, "steps": 33.0, "start": 8.0, **paused})
