"""A run's history: an entry for each window, those of the record first, and what the newest has."""

from __future__ import annotations

import types

import pytest

from crankshaft.engine.hooks.evaluation import Evaluated
from crankshaft.engine.meter import Meter, Segment
from crankshaft.engine.metrics.pairs import Mean
from crankshaft.engine.metrics.sums import KnownResult
from crankshaft.runner.history import History, HistoryEntries, Means


class Record:
    """The record of a run: what is written, and what an earlier process has written."""

    def __init__(self):
        self.written, self.asked = [], []

    def write(self, event, **values):
        self.written.append((event, values))

    def past_rows(self, step):
        self.asked.append(step)
        return [{"step": each, "train_loss": 9.0} for each in (4, 8) if each <= step]


class Sums(KnownResult):
    """Metrics of a call that are read, as `LoopSums` of a device."""

    @property
    def specs(self):
        return [types.SimpleNamespace(name=name) for name in self.values]


class Steps:
    """Calls of a loop, each of 4 steps in half a second, and a hook that sees them."""

    def __init__(self, record=None, step=0):
        self.meter, self.hook = Meter(), History(record, {4})
        self.status = types.SimpleNamespace(step=step, epochs=0.5, evaluation=None, last=False, stop=None)
        self.hook.attach(None, self.meter)
        self.hook.begin(self.status)

    def call(self, total, steps=4, evaluation=None, **more):
        sums = {"loss": Mean(total, 2.0), "gradient_norm": Mean(1.0, 1.0)}
        segment = Segment(self.status.step, steps, 16 * steps, Sums(sums), seconds=0.5, **more)
        self.meter.add(segment)
        self.status.step, self.status.segment, self.status.evaluation = self.status.step + steps, segment, evaluation
        self.hook(self.status)


def test_each_window_and_evaluation_is_an_entry_of_plain_json():
    run = Steps(record := Record())
    record.past_rows = lambda step: []
    run.call(1.0, input_seconds=0.125)
    run.call(3.0, steps=2)
    run.call(float("inf"), steps=1, evaluation=Evaluated({"loss": 0.25, "auc": float("nan")}, partial=(1, 3)))
    rate = {"examples_per_sec": 128.0, "input_wait_fraction": 0.25}
    assert run.hook.entries[0] == {"step": 4, "epoch": 0.5, "seconds": 0.5, **rate, "train_loss": 0.5}
    assert run.hook.entries[1] == {
        "step": 7,
        "epoch": 0.5,
        "seconds": 1.5,
        "examples_per_sec": 48.0,
        "input_wait_fraction": 0.0,
        "train_loss": None,
        "eval_loss": 0.25,
        "eval_auc": None,
        **Evaluated({}, partial=(1, 3)).batches,
    }
    assert [
        (event, {"step": entry["step"], **values})
        for (event, values), entry in zip(record.written, run.hook.entries, strict=True)
    ] == [("row", entry) for entry in run.hook.entries]
    assert run.hook.means() == {"loss": None}


def test_entries_of_earlier_processes_are_read_when_they_are_asked_for_up_to_where_the_run_is():
    run = Steps(record := Record(), step=8)
    run.call(1.0)
    assert run.hook.means() == {"loss": 0.5}
    assert record.asked == []
    run.status.step = 4
    run.hook.rewind(run.status)
    assert run.hook.means() == {"loss": 9.0}
    assert record.asked == [4]
    assert [entry["step"] for entry in run.hook.entries] == [4]
    run.call(3.0)
    assert [entry["step"] for entry in run.hook.entries] == [4, 8]
    run.status.step = 0
    run.hook.rewind(run.status)
    assert run.hook.entries == []
    assert record.asked == [4]


def test_before_the_first_entry_means_are_those_of_the_steps_so_far_and_rates_leave_out_the_first_call():
    run = Steps()
    assert run.hook.rates() == {"steps_per_sec": None, "examples_per_sec": None}
    run.call(4.0, steps=1)
    assert (run.hook.means(), run.hook.entries) == ({"loss": 2.0}, [])
    assert run.hook.rates() == {"steps_per_sec": 2.0, "examples_per_sec": 32.0, "input_wait_fraction": 0.0}
    run.call(4.0, steps=2)
    assert run.hook.rates()["steps_per_sec"] == 4.0


def test_entries_are_columns_and_means_a_mapping():
    entries = HistoryEntries()
    entries += [{"step": 1, "eval_loss": 0.5}, {"step": 2}, {"step": 3, "eval_loss": None}]
    assert entries.column("eval_loss") == [0.5, None]
    assert (entries.history, entries.epoch) == ({}, [])
    pandas = pytest.importorskip("pandas")
    frame = entries.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert frame["step"].tolist() == [1, 2, 3]
    run = Steps()
    run.call(4.0)
    means = Means(run.hook.window.totals)
    assert (len(means), repr(means), {**means}) == (0, "{}", {})
    run.call(4.0, steps=1)
    means = Means(run.hook.window.totals)
    assert (len(means), repr(means), {**means}, means["loss"]) == (1, "{'loss': 2.0}", {"loss": 2.0}, 2.0)
