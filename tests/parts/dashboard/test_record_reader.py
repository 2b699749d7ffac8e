"""A run's record, read as it grows: what is kept of it, who is stopped, what a file can't do."""

import itertools
import json
import os

import pytest

from benchmarks.monitor_page import events, write
from crankshaft.parts.dashboard.record_reader import RecordReader
from crankshaft.parts.dashboard.track import Track
from tests.engine.record.test_events import NOT_OF_THE_SCHEMA

BEGIN = 1.7e9
OF_THE_SCHEMA = b"]" * 50 + b"}}"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "events.jsonl"


def read(path):
    record = RecordReader(str(path), unix_clock=lambda: BEGIN + 1e6)
    record.poll(60)
    return record


def add(path, *lines):
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def states(record, find=""):
    return {each["name"]: each["state"] for each in record.view(find, 50)["workers"]}


def test_means_of_a_long_run_are_kept_and_its_sums_are_the_last():
    track = Track(4, 2, lambda name: name == "time")
    for number in range(64):
        track.add({"time": number, "loss": number % 2, "third": 1})
    assert track.column("time") == [7, 15, 23, 31, 39, 47, 55, 63]
    assert track.column("loss") == [0.5] * 8
    assert track.column("third") == [None] * 8


def test_a_record_is_read_as_it_grows_a_line_at_a_time(path):
    lines = list(events(0))
    write(path, iter(lines[:50]))
    record = read(path)
    with open(path, "a") as file:
        file.write(json.dumps(lines[50])[:20])
    record.poll(60)
    assert record.view("", 50)["windows"]["step"][-1] == lines[49]["step"]
    with open(path, "a") as file:
        file.write(json.dumps(lines[50])[20:] + "\n")
    add(path, *lines[51:])
    record.poll(60)
    view = record.view("", 50)
    assert view == read(path).view("", 50)
    assert (view["starts"], view["latest"]["end"]["reason"]) == (2, "complete")
    assert [note["event"] for note in view["notes"]].count("checkpoint") == 4
    assert len(view["windows"]["metrics.loss"]) == 200


def test_a_record_that_was_cut_is_read_from_its_beginning(path):
    write(path, events(0))
    record = read(path)
    for how in ("replaced", "cut", "cut and longer"):
        if how == "replaced":
            os.remove(path)
        write(path, itertools.islice(events(1, windows=300), 30 if how != "cut and longer" else 400))
        record.poll(60)
        assert record.view("", 50) == read(path).view("", 50)


def test_who_has_a_fault_or_is_missing_is_stopped_until_it_is_back(path):
    lines = [line for line in events(0) if line["event"] in ("start", "cluster", "window")]
    write(path, iter(lines[:20]))
    record = read(path)
    assert states(record) == {"worker 0": "runs", "worker 1": "slow", "worker 2": "runs", "worker 3": "runs"}
    now = lines[19]["time"]
    add(path, {"event": "fault", "time": now, "step": 1, "task": "worker 2", "state": "silent", "text": "silent"})
    record.poll(60)
    assert states(record)["worker 2"] == "stopped"
    assert [each["name"] for each in record.view("", 1)["workers"]][:2] == ["worker 2", "worker 1"]
    add(path, {"event": "warning", "time": now, "step": 1, "task": "worker 2", "state": "answers", "text": "back"})
    for number in range(4):
        seconds = lines[20]["seconds"] + number  # of the process, whatever its clock says
        add(path, {**lines[20], "time": now - 86400, "seconds": seconds, "workers": lines[20]["workers"][:2]})
    record.poll(60)
    assert states(record) == {"worker 0": "runs", "worker 1": "slow", "worker 2": "stopped", "worker 3": "stopped"}
    assert states(record, find="ER 3") == {"worker 3": "stopped"}


def test_who_is_slow_is_slow_by_its_own_time_where_that_is_known(path):
    """In step all take as long: the slow one's steps are its own, the others' are waiting for it."""
    names = [f"worker {index}" for index in range(3)]
    figures = [{"name": name, "step_ms": 60.0, "own_ms": own} for name, own in zip(names, (10, 60, 12), strict=True)]
    write(path, itertools.islice(events(0, workers=3), 3))
    add(path, {"event": "window", "time": BEGIN + 1, "step": 1, "workers": figures})
    assert states(read(path)) == {"worker 0": "runs", "worker 1": "slow", "worker 2": "runs"}
    (first, *_) = read(path).view("", 50)["workers"]
    assert (first["why"], first["figures"]["own_ms"]) == ("5.0 times the median step", 60.0)


def test_with_servers_who_does_no_step_for_long_is_stopped_and_who_lags_is_not(path):
    def window(time, *steps):
        workers = [{"name": f"worker {i}", "steps": n, "lag": max(steps) - n} for i, n in enumerate(steps)]
        return {"event": "window", "time": BEGIN + time, "step": time, "seconds": time, "workers": workers}

    write(path, itertools.islice(events(0, workers=2), 3))
    add(path, window(1, 60, 20), window(2, 60, 0))
    record = read(path)
    assert states(record) == {"worker 0": "runs", "worker 1": "runs"}
    add(path, window(4, 90, 0))
    record.poll(60)
    assert states(record) == {"worker 0": "runs", "worker 1": "stopped"}
    assert record.view("", 50)["workers"][0]["why"] == "the others have gone on without it"
    add(path, window(5, 60, 10))
    record.poll(60)
    assert states(record) == {"worker 0": "runs", "worker 1": "runs"}


def test_a_run_is_late_once_it_is_silent_for_longer_than_it_uses_to_be(path):
    now, unix = 500.0, BEGIN + 39.0
    write(path, itertools.islice(events(0), 40))
    record = RecordReader(str(path), lambda: now, lambda: unix)
    record.poll(60)
    assert record.age() == {"age": pytest.approx(3, abs=0.1), "late": False}  # 36 windows, a second each
    now, unix = now + 3.0, unix - 86400.0  # the clock is set
    assert record.age()["late"]
    add(path, {"event": "warning", "time": 0, "step": 0})  # whatever its clock says: it has just written
    record.poll(60)
    assert record.age() == {"age": 0.0, "late": False}
    add(path, {"event": "end", "time": now, "step": 0})
    record.poll(60)
    now += 1e6
    assert not record.age()["late"]


def test_a_clock_that_is_set_within_a_run_changes_neither_its_pace_nor_its_age(path):
    """A day forth between two windows; then all of the record lies in the reader's future."""
    lines = [line | ({"time": line["time"] + 86400} if at > 20 else {}) for at, line in enumerate(events(0))]
    write(path, iter(lines[:40]))
    now = 0.0
    record = RecordReader(str(path), lambda: now, lambda: BEGIN + 39.0)
    record.poll(60)
    assert record.age() == {"age": 0.0, "late": False}
    now += 6.0
    assert record.age() == {"age": 6.0, "late": True}


def test_a_long_record_has_all_metrics_and_some_of_its_workers_figures(path, monkeypatch):
    monkeypatch.setattr("crankshaft.parts.dashboard.record_reader._WORKERS_BYTES", 20_000)
    write(path, events(0, workers=20, windows=150))
    view = read(path).view("", 50)
    assert len(view["windows"]["metrics.loss"]) == 150
    assert 5 < len(view["lane_time"]) < 30
    assert view["lane_time"][-1] == view["windows"]["time"][-1]


def test_of_a_very_long_record_windows_are_read_evenly_and_the_last_ones_all(path, monkeypatch):
    monkeypatch.setattr("crankshaft.parts.dashboard.record_reader._MOST_WINDOWS", 30)
    monkeypatch.setattr("crankshaft.parts.dashboard.record_reader._LAST_BYTES", 6_000)
    lines = list(events(0, windows=300))
    write(path, iter(lines))
    windows = [line["time"] for line in lines if line["event"] == "window"]
    read_of = [windows.index(time) for time in read(path).view("", 50)["windows"]["time"]]
    assert 30 < len(read_of) < 50
    assert read_of[0] == 0
    assert read_of[-4:] == [296, 297, 298, 299]
    assert max(after - before for before, after in itertools.pairwise(read_of)) <= 11


@pytest.mark.parametrize(
    "line",
    [
        b"[1]",
        b'"text"',
        b"{",
        b"[" * 100_000,
        b"\xff\xfe",
        b'{"event": ["window"], "time": 1}',
        b'{"event": "window"}',
        b'{"event": "window", "time": 1e400, "step": "x"}',
        b'{"event": "window", "time": 1' + b"0" * 5000 + b"}",
        b'{"event": "window", "time": 1, "workers": [1, {"name": ["]"], "lag": "x"}], "metrics": 3, "spent": []}',
        b'{"event": "window", "time": 1, "\\ud800": 1}',
        b'{"event": "start", "time": 1, "version": {"a": 1}, "cause": 3}',
        b'{"event": "end", "time": NaN, "goodput": 1}',
        b'{"event": "fault", "time": 1, "task": {}, "text": []}',
        b'{"event": "cluster", "time": 1, "workers": {"name": 1}}',
        b'{"event": "config", "time": 1, "step": 1, "values": {"a": ' + b"[" * 50 + OF_THE_SCHEMA,
        *(line.encode() for line in NOT_OF_THE_SCHEMA),
    ],
)
def test_a_line_that_is_not_of_the_schema_does_no_harm(path, line):
    write(path, itertools.islice(events(0), 30))
    before = read(path).view("", 50)["windows"]["step"]
    with open(path, "ab") as file:
        file.write(line + b"\n")
    add(path, {"event": "window", "time": BEGIN + 99, "step": 9999})
    record = read(path)
    is_read = not line.startswith(b'{"event": "row"')  # those are not shown
    assert record.view("", 50)["skipped"] == (is_read and not line.endswith(OF_THE_SCHEMA))
    json.dumps([record.view("", 50), record.age()], allow_nan=False)
    assert record.view("", 50)["windows"]["step"][: len(before)] == before
    assert record.view("", 50)["windows"]["step"][-1] == 9999


def test_lines_names_and_texts_are_bounded(path, monkeypatch):
    monkeypatch.setattr("crankshaft.parts.dashboard.record_reader.LONGEST_LINE", 4096)
    monkeypatch.setattr("crankshaft.parts.dashboard.record_reader._MOST_WORKERS", 5)
    write(path, iter({"event": "fault", "time": 1, "step": 1, "text": "x" * length} for length in (3000, 9000)))
    for number in range(9):
        workers = [{"name": f"{number} {each}", "lag": 1} for each in range(9)]
        add(path, {"event": "window", "time": number, "step": 1, "workers": workers})
    view = read(path).view("", 50)
    assert [note["text"] for note in view["notes"]] == ["x" * 500]
    assert len(view["workers"]) == 5
    assert view["skipped"] == 1


def test_many_notes_of_many_values_take_little(path):
    line = {"event": "warning", "time": 1, "step": 1, "text": "x" * 900, "reason": "y" * 900}
    more = {f"{number:0999}": "z" * 900 for number in range(100)}
    write(path, iter([{"event": "config", "time": 1, "step": 1, "values": more}, *[line | more] * 300]))
    view = read(path).view("", 50)
    assert len(json.dumps(view)) < 200 * 1_200 + 120_000
    assert view["notes"][-1] == {**line, "text": "x" * 500, "reason": "y" * 500}


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_not_a_file_is_named_and_not_waited_for(path, make):
    path.parent.mkdir()
    make(path)
    record = read(path)
    assert "events.jsonl can't be read" in record.view("", 50)["problem"]
    assert record.read == 1.0
