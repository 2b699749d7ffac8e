"""What a run's record has of calls, warnings and silent tasks, and what their time counts as; by a clock that moves."""

from __future__ import annotations

import os
import types

import pytest

from crankshaft.engine import logging
from crankshaft.engine.hooks.evaluation import Evaluated
from crankshaft.engine.meter import Meter, Segment
from crankshaft.engine.record import events, recorder
from crankshaft.engine.record.events import EventLog
from crankshaft.engine.record.recorder import Recorder
from crankshaft.engine.strategies.loop_result import WorkerFigures

AROUND = {
    "start": {"mode": "train"},
    "config": {"command": "crankshaft train"},
    "cluster": {"workers": [{"name": "worker 0"}, {"name": "worker 1"}], "servers": [{"name": "server 0"}]},
}


class Thread:
    """Does what it is given at once; `turn` is what it would do twice a second."""

    def __init__(self):
        self.turn, self.flushed = None, []

    def open(self, each_turn=None):
        self.turn = each_turn

    def submit(self, work):
        work()

    def flush(self, seconds=None):
        self.flushed.append(seconds)

    def close(self, each_turn=None):
        assert each_turn == self.turn
        self.turn = None


class Run:
    """A run of a record, begun at second 100 by the clock; its processes' clocks began with the Unix second 1000."""

    def __init__(self, path, monkeypatch, names=("worker 0",), step=0, began=100.0):
        self.now, self.path, self.silent, self.asked = began, path, [], []
        clock = types.SimpleNamespace(monotonic=lambda: self.now, time=lambda: 1000.0 + self.now)
        monkeypatch.setattr(recorder, "time", clock)
        monkeypatch.setattr(events, "clock", clock)
        self.pauses = types.SimpleNamespace(
            seconds=0.0, check=lambda: None, close=lambda: None, clock=lambda: self.now - self.pauses.seconds
        )
        self.writer, self.poller, self.meter = Thread(), Thread(), Meter()
        rate = types.SimpleNamespace(last_learning_rate=lambda: 0.5)
        inventory = types.SimpleNamespace(optimizers={"": rate}, loss_scale=None, table_figures=dict)
        strategy = types.SimpleNamespace(
            worker_names=list(names), activity=lambda: {"staleness": {"0": 3}}, silent=self.found_silent
        )
        self.status = types.SimpleNamespace(
            step=step,
            until_step=90,
            steps_per_epoch=8,
            epochs=0.5,
            seconds_left=7.0,
            hook_seconds={},
            evaluation=None,
            in_memory=False,
            strategy=strategy,
            state=types.SimpleNamespace(trainer=types.SimpleNamespace(inventory=inventory)),
        )
        log = EventLog(str(path))
        self.record = Recorder(log, self.writer, self.poller, AROUND, began, self.pauses)
        self.record.attach(self.status.state, self.meter)

    def found_silent(self, seconds):
        self.asked.append(seconds)
        return self.silent

    def begin(self, after=0.0):
        self.now += after
        self.record.begin(self.status)

    def call(self, seconds, steps, **more):
        """A call of the inner loop, and then this hook's."""
        self.meter.add(Segment(self.status.step, steps, 16 * steps, seconds=seconds, **more))
        self.now += seconds
        self.status.step += steps
        self.record(self.status)

    def all_of(self, *kinds):
        return [line.event for line in events.read(str(self.path)) if line.kind in kinds]


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """`begun(**how)`: a run that has made a record, closed at the end."""
    made = []

    def begin(**how):
        made.append(Run(tmp_path / "events.jsonl", monkeypatch, **how))
        return made[-1]

    yield begin
    for run in made:
        run.record.close()


def test_a_run_begins_with_what_it_is_and_the_warnings_before(begun):
    run = begun()
    logging.warning("as it was %s", "restored")
    logging.info("nothing")
    run.begin(3.0)
    logging.warning("later")
    first = {"time": 1103.0, "step": 0}
    start, *others = run.all_of("start", "config", "cluster", "warning")
    assert start.items() >= {**first, "version": 1, "attempt": 0, "pid": os.getpid(), "cause": None}.items()
    assert start.items() >= {"mode": "train", "until_step": 90, "steps_per_epoch": 8, "seconds": {"start": 3.0}}.items()
    assert (start["spent"]["total"], start["spent"]["start"]) == (3.0, 3.0)
    assert others[:2] == [{"event": name, **first, **AROUND[name]} for name in ("config", "cluster")]
    assert [(event["text"], event["task"]) for event in others[2:]] == [("as it was restored", None), ("later", None)]
    run.record.close()
    logging.warning("afterwards")
    assert len(run.all_of("warning")) == 2


def test_a_window_ends_with_the_first_call_after_a_second_and_has_all_since_the_last(begun):
    run = begun()
    run.begin()
    run.call(0.5, 2, input_seconds=0.25)
    assert run.all_of("window") == []
    run.call(0.5, 6, input_seconds=0.125)  # a second, to the bit
    (window,) = run.all_of("window")
    assert window.pop("memory_mb") > 10
    assert window.pop("spent").items() >= {"total": 1.0, "steps": 0.625, "input": 0.375}.items()
    assert window == {
        "event": "window",
        "time": 1101.0,
        "step": 8,
        "epoch": 0.5,
        "seconds": 1.0,
        "seconds_left": 7.0,
        "metrics": {},
        "learning_rate": 0.5,
        "staleness": {"0": 3},
        "steps_per_sec": 8.0,
        "examples_per_sec": 128.0,
        "input_wait_fraction": 0.375,
        "reduce_fraction": None,
        "workers": [{"name": "worker 0", "step_ms": 125.0, "input_wait_ms": 46.875}],
    }
    assert run.record.latest.items() >= {"step": 8, "until_step": 90, "seconds": 1.0}.items()
    run.now += 2.5
    assert run.record.age == 2.5
    run.call(0.5, 1)
    assert [(event["step"], event["seconds"]) for event in run.all_of("window")] == [(8, 1.0), (9, 4.0)]
    assert run.record.spent["other"] == 2.5  # between the calls


def test_a_window_is_a_thousandth_of_a_runs_age(begun):
    run = begun()
    run.begin(2000.0)
    run.call(1.5, 1)
    assert run.all_of("window") == []
    run.call(0.5, 1)
    assert len(run.all_of("window")) == 1


def test_time_of_hooks_pauses_and_between_calls_is_its_own(begun):
    run = begun()
    run.status.hook_seconds = {"checkpoints": 9.0}  # of before
    run.begin()
    run.status.hook_seconds = {"checkpoints": 9.25, "evaluation": 0.5}
    run.now += 0.75
    with run.record.timed_as("evaluation"):
        run.now += 1.0
    with run.record.timed_as("checkpoints"), run.record.timed_as("evaluation"):
        run.now += 0.5
    run.now += 4.0
    run.pauses.seconds = 4.0
    run.call(2.0, 4)
    spent = {kind: seconds for kind, seconds in run.record.spent.items() if seconds}
    assert spent == {
        "total": 8.25,
        "steps": 2.0,
        "checkpoints": 0.75,
        "evaluation": 2.0,
        "down": 4.0,
        "other": 8.25 - 2.0 - 0.75 - 2.0 - 4.0,
    }
    run.status.hook_seconds = {"checkpoints": 9.25, "evaluation": 0.5}
    run.call(1.0, 2)  # counts none of it again
    assert (run.record.spent["down"], run.record.spent["evaluation"]) == (4.0, 2.0)


SYNCHRONOUS = ["seconds", "steps", "input_seconds", "reduce_seconds"], [[2.0, 4, 0.5, 0.4], [2.0, 4, 0.25, 0.1]]
WITH_SERVERS = ["seconds", "steps", "input_seconds", "staleness"], [[1.5, 6, 0.5, 12.0], [0.5, 2, 0.25, 2.0]]


@pytest.mark.parametrize(
    ("figures", "fraction", "waiting"),
    [(SYNCHRONOUS, 0.125, 2.0 * (0.125 - 0.05)), (WITH_SERVERS, None, 2.0 * (1 - (0.75 + 0.25) / 2))],
    ids=["synchronous", "servers"],
)
def test_workers_wait_for_each_other_and_all_but_the_exchange_itself_is_not_steps(begun, figures, fraction, waiting):
    run = begun(names=("worker 0", "worker 1"))
    run.begin()
    run.call(2.0, 4, input_seconds=0.1, workers=WorkerFigures(*figures))
    (window,) = run.all_of("window")
    assert [worker["name"] for worker in window["workers"]] == ["worker 0", "worker 1"]
    assert window["workers"][1]["input_wait_ms"] == 1e3 * 0.25 / figures[1][1][1]
    assert window["reduce_fraction"] == (fraction and pytest.approx(fraction))
    assert window["spent"]["waiting"] == pytest.approx(waiting)
    assert window["spent"]["input"] == pytest.approx(0.375)  # the mean of the workers'
    assert run.record.goodput()["seconds"]["total"] == pytest.approx(2.0)  # a window without calls adds nothing


def test_evaluations_have_their_own_seconds_and_a_checkpoint_a_window_before_it(begun):
    run = begun()
    run.begin()
    run.call(0.25, 2)
    for seconds, partial in ((0.5, None), (0.75, (3, 9))):
        run.status.evaluation = Evaluated({"loss": seconds}, partial=partial)
        run.status.hook_seconds = {"evaluation": seconds}
        run.record(run.status)
    of_all, of_some = run.all_of("evaluation")
    assert of_all == {"event": "evaluation", "time": 1100.25, "step": 2, "metrics": {"loss": 0.5}, "seconds": 0.5}
    assert (of_some["metrics"], of_some["seconds"], of_some["eval_batches"]) == ({"loss": 0.75}, 0.25, 3)
    run.status.in_memory = True
    run.record.before_save(run.status)
    assert (run.all_of("window"), run.writer.flushed) == ([], [0.0])
    run.status.in_memory = False
    for _ in range(2):
        run.record.before_save(run.status)
    assert (len(run.all_of("window")), run.writer.flushed) == (1, [0.0, None, None])
    run.record.checkpoint(True, "best/ckpt-2", 2, 0.1, 5)
    assert (run.record.saved, run.record.saved_at) == ("", 0.0)
    run.record.checkpoint(False, "checkpoints/ckpt-2", 2, 0.1, 5)
    assert (run.record.saved, run.record.saved_at) == ("checkpoints/ckpt-2", 1100.25)
    assert [(event["best"], event["bytes"]) for event in run.all_of("checkpoint")] == [(True, 5), (False, 5)]
    run.call(0.25, 2)
    run.record.end(run.status)
    run.record.end(run.status)
    assert [event["step"] for event in run.all_of("window")] == [2, 4]


def test_a_task_that_falls_silent_and_answers_again_is_recorded_once_each_time(begun, caplog):
    run = begun(names=("worker 0", "worker 1"))
    run.begin()
    for now, silent in (
        *((0, []), (1, ["worker 1"]), (2, ["worker 1", "worker 0"]), (9, ["worker 1", "worker 0"])),
        *((9.5, ["worker 1", "worker 0"]), (10.5, ["worker 1", "worker 0"]), (11, ["worker 0"]), (12, [])),
        *((13, ["worker 1"]), (21, ["worker 1"]), (21.5, ["worker 1"])),
    ):
        run.now, run.silent = 100.0 + now, silent
        run.poller.turn()
    assert set(run.asked) == {1.5}
    found = [event for event in run.all_of("fault", "warning") if "state" in event]
    assert [(event["time"] - 1100, event["state"], event["task"]) for event in found] == [
        *((1, "silent", "worker 1"), (2, "silent", "worker 0"), (11, "answers", "worker 1")),
        *((12, "answers", "worker 0"), (13, "silent", "worker 1")),
    ]
    assert [record.getMessage() for record in caplog.records] == [
        f"worker {number} has not answered for 8 s: stopped, or out of reach" for number in (1, 0, 1)
    ]


@pytest.mark.parametrize(
    ("reason", "blamed"),
    [("worker 1 (10.0.0.2:80) is lost", "worker 1"), ("server 0 (a) is lost", "server 0"), ("worker 10 (b)", None)],
)
def test_a_run_that_ends_by_a_fault_loses_what_came_after_its_last_window(begun, reason, blamed):
    run = begun()
    run.record.finish("before it began", 1, True)
    run.begin()
    run.call(1.0, 4)
    run.now += 0.5
    run.record.finish(reason + "x" * 3000, 1, True)
    fault, end = run.all_of("fault", "end")
    assert (fault["task"], len(fault["text"]), fault["step"]) == (blamed, 2000, 4)
    assert (end["reason"], end["exit_code"]) == (fault["text"], 1)
    assert end["goodput"]["seconds"].items() >= {"total": 1.5, "steps": 1.0, "lost": 0.5, "other": 0.0}.items()
    run.record.finish("done", 0, False)
    assert len(run.all_of("fault")) == 1


def test_a_run_goes_on_with_its_rows_and_its_time_and_says_what_ended_it(begun):
    first = begun()
    first.begin(1.0)
    first.call(1.0, 4)
    first.record.write("row", train_loss=0.5)
    kept = first.record.host_state()
    first.call(3.0, 4)
    first.record.write("row", train_loss=0.25)
    first.record.close()

    again = begun(step=4, began=110.0)
    again.record.restore_host_state(kept)
    again.begin(2.0)
    again.record.write("row", train_loss=0.125)
    (_, start) = again.all_of("start")
    assert (start["attempt"], start["cause"]) == (1, "it ended without a message: it was killed, or its host was lost")
    assert start["spent"].items() >= {"total": 12.0, "start": 3.0, "steps": 1.0, "lost": 3.0, "down": 5.0}.items()
    assert again.record.past_rows(4) == [{"step": 4, "train_loss": 0.5}]
    assert [event["step"] for event in again.all_of("window", "row")] == [4, 4, 4]  # what came after was cut


def test_a_run_that_is_taken_back_loses_the_events_of_later_steps(begun):
    run = begun()
    run.begin()
    run.call(1.0, 4)
    run.call(0.5, 4)
    run.status = types.SimpleNamespace(**{**vars(run.status), "step": 4})
    run.record.rewind(run.status)
    assert [event["step"] for event in run.all_of("window")] == [4]
    assert run.record.spent["total"] == 1.5
    run.call(1.0, 2)
    assert [event["step"] for event in run.all_of("window")] == [4, 6]
