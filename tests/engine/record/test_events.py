"""What is an event of a run's record, and what a line that is none can't do."""

import json
import math
import pathlib

import numpy as np
import pytest

from crankshaft.engine.record import events
from crankshaft.engine.record.events import EventLog, NewestStep, line_of, parsed, read, record_restart
from crankshaft.engine.record.goodput import Goodput, Past
from tests.limits import files_no_larger_than
from tests.pages import ROOT

NOT_OF_THE_SCHEMA = [
    '{"event": "window", "time": 1, "step": "5"}',
    '{"event": "window", "time": 1, "step": true}',
    '{"event": "window", "time": 1, "step": -1}',
    '{"event": "window", "time": 1, "step": 1e400}',
    '{"event": "window", "time": 1, "step": 1' + "0" * 400 + "}",
    '{"event": "window", "time": 1' + "0" * 400 + ', "step": 1}',
    '{"event": "window", "time": -1, "step": 1}',
    '{"event": "window", "time": NaN, "step": 1}',
    '{"event": "window", "time": 1, "step": 3, "spent": {"total": "x", "steps": null}}',
    '{"event": "window", "time": 1, "step": 3, "spent": {"total": 1e300}}',
    '{"event": "window", "time": 1, "step": 3, "metrics": {"loss": 1' + "0" * 400 + "}}",
    '{"event": "window", "time": 1, "step": 3, "workers": ["x"]}',
    '{"event": "window", "time": 1, "step": 3, "workers": [{"name": "a", "step_ms": "x"}]}',
    '{"event": "window", "time": 1, "step": 3, "workers": [{"name": 3}]}',
    '{"event": "window", "time": 1, "step": 3, "servers": [{"name": "ps 0", "rows": [1]}]}',
    '{"event": "row", "time": 1, "step": 3, "train_loss": "0.5"}',
    '{"event": "evaluation", "time": 1, "step": 3, "seconds": "5"}',
    '{"event": "checkpoint", "time": 1, "step": 3, "seconds": "5"}',
    '{"event": "checkpoint", "time": 1, "step": 3, "best": "no"}',
    '{"event": "cluster", "time": 1, "step": 0, "workers": ["x"]}',
    '{"event": "cluster", "time": 1, "step": 0, "workers": {"name": "x"}}',
    '{"event": "start", "time": 1, "step": 0, "host": "here", "pid": "1"}',
    '{"event": "start", "time": 1, "step": 0, "until_step": 0.5}',
    '{"event": "end", "time": 1, "step": 0, "reason": ["x"]}',
    '{"event": "end", "time": 1, "step": 0, "goodput": {"seconds": {"steps": []}}}',
    '{"event": "fault", "time": 1, "step": 0, "text": "' + "x" * 20_000 + '"}',
]


LONGEST, LARGEST = "x" * (1 << 14), str(2**63 - 1)
AT_THE_EDGE = [
    # A line of the schema, and what one more makes none of it.
    ('{"event": "x", "time": 0, "step": 0}', '"time": 0', '"time": -1e-9'),
    ('{"event": "window", "time": 99999999999.5, "step": 0}', "99999999999.5", "1e11"),
    (f'{{"event": "window", "time": 1, "step": {LARGEST}}}', LARGEST, str(2**63)),
    (f'{{"event": "start", "time": 1, "step": 0, "pid": -{2**63}}}', f"-{2**63}", f"-{2**63 + 1}"),
    (f'{{"event": "start", "time": 1, "step": 0, "pid": {LARGEST}}}', LARGEST, str(2**63)),
    ('{"event": "start", "time": 1, "step": 0, "pid": null}', "null", "true"),
    (f'{{"event": "start", "time": 1, "step": 0, "host": "{LONGEST}"}}', LONGEST, f"{LONGEST}x"),
    ('{"event": "window", "time": 1, "step": 0, "epoch": 1.7e308}', "1.7e308", "1e309"),
    ('{"event": "window", "time": 1, "step": 0, "epoch": -1.7e308}', "-1.7e308", "-1e309"),
    ('{"event": "window", "time": 1, "step": 0, "spent": {"lost": -99999999999}}', "-99999999999", "-100000000000"),
    ('{"event": "end", "time": 1, "step": 0, "goodput": {"share": 0.5}}', "0.5", '"0.5"'),
    ('{"event": "window", "time": 1, "step": 0, "workers": [{"name": "a", "x": 1}]}', "[{", '{"a": {'),
    ('{"event": "row", "time": 1, "step": 0, "other": 1.5}', "1.5", "[1.5]"),
    ('{"event": "unknown", "time": 1, "step": 0, "other": [1.5]}', '"unknown"', "7"),
    ('{"event": "config", "time": 1, "step": 0, "values": {"a": []}}', '{"a": []}', "[]"),
    ('{"event": "x", "time": 1, "step": 0}', "{", "[{"),
    ('{"event": "x", "time": 1, "step": 0, "other": "\\u00e9\ufffd"}', "}", ""),
]


@pytest.mark.parametrize(("line", "part", "other"), AT_THE_EDGE)
def test_a_line_of_the_schema_is_its_object_and_one_beyond_is_none(line, part, other):
    assert parsed(line.encode()) == json.loads(line)
    text = line.encode() + b"\n"
    found = line_of(text)
    assert (found.kind, found.time, found.step) == tuple(json.loads(line)[name] for name in ("event", "time", "step"))
    assert (found.text, found.event) == (text, json.loads(line))
    assert parsed(line.replace(part, other, 1).encode()) is None


def test_a_line_that_is_no_utf_8_or_nested_without_end_is_one_or_none():
    assert parsed(b'{"event": "x", "time": 1, "step": 0, "other": "\xff"}')["other"] == "\ufffd"
    assert parsed(b'{"event": "x", "time": 1, "step": 0, "other": ' + b"[" * 100_000) is None


def test_only_a_whole_line_of_many_is_taken_by_its_head():
    head = b'{"event": "window", "time": 12.5, "step": 7, "spent": '
    for text, step, event in (
        (head + b'"x"}\n', 7, {}),  # not of the schema, which is found where it is read
        (head + b'"x"}', None, None),
        (head + b"{}}", 7, {"event": "window", "time": 12.5, "step": 7, "spent": {}}),
        (b'{"event": "window", "time": 1, "step": 1234567890123456789}\n', 1234567890123456789, None),
        (b'{"event": "window", "time": 12345678901, "step": 7}\n', 7, None),
    ):
        found = line_of(text)
        assert (found and found.step) == step
        if event is not None:
            assert found.event == event


def test_what_is_written_is_json_whatever_its_type(tmp_path):
    path = tmp_path / "events.jsonl"
    EventLog(str(path)).write(
        *("x", 3),
        time=1.5,
        numbers=(np.float32(0.5), np.int64(2), math.inf, -math.inf, math.nan, np.float64("nan"), True, None),
        named={1: "a", "b": [np.array(3)]},
        path=pathlib.PurePosixPath("/at"),
    )
    EventLog(None).write("x", 3)
    EventLog(None).cut(0, lambda line: None)
    assert [*EventLog(None).read()] == [*EventLog(str(tmp_path / "none")).read()] == []
    numbers = [0.5, 2, None, None, None, None, True, None]
    assert json.loads(path.read_text()) == {
        "event": "x",
        "time": 1.5,
        "step": 3,
        "numbers": numbers,
        "named": {"1": "a", "b": [3]},
        "path": "/at",
    }


def test_a_restart_is_of_a_run_that_has_a_record(tmp_path):
    path = tmp_path / "events.jsonl"
    for there in (None, str(path)):
        record_restart(there, 2.5, 7, "worker 1 was killed", "worker 1", -9)
    assert not path.exists()
    path.write_text('{"event": "start", "time": 1, "step": 0}')  # cut off within its end
    record_restart(str(path), 2.5, 7, "worker 1 was killed", "worker 1", -9)
    assert [line.event for line in read(str(path))][1:] == [
        {
            "event": "restart",
            "time": 2.5,
            "step": 7,
            "cause": "worker 1 was killed",
            "task": "worker 1",
            "exit_code": -9,
        }
    ]
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="it is a link"):
        [*read(str(tmp_path / "link"))]


def test_the_newest_step_is_that_of_the_file_that_is_there_now(tmp_path):
    path = tmp_path / "events.jsonl"
    assert NewestStep(None)() == 0
    log, newest = EventLog(str(path)), NewestStep(str(path))
    log.write("start", 0, time=1)
    log.write("window", 9, time=1)
    log.write("window", 7, time=1)
    assert (newest(), newest()) == (9, 9)
    log.cut(5, lambda line: None)  # another file
    assert newest() == 0
    log.write("window", 6, time=1)
    assert newest() == 6
    path.write_text("")  # the same, which is shorter
    assert newest() == 0


@pytest.mark.parametrize("line", NOT_OF_THE_SCHEMA)
def test_a_line_that_does_not_match_the_schema_blocks_no_resume(tmp_path, line):
    assert parsed(line.encode()) is None
    path, past, goodput = tmp_path / "events.jsonl", Past(), Goodput()
    whole = [
        '{"event": "start", "time": 5, "step": 0, "spent": {"steps": null, "other": 2}}',
        '{"event": "x", "time": 6, "step": 1}',
    ]
    path.write_text("\n".join([whole[0], line, whole[1], ""]))
    EventLog(str(path)).cut(9, past.replay)
    assert [line.text.decode().strip() for line in read(str(path)) if line.event] == whole
    goodput.resume(past, None, 9, 7.0)
    assert goodput.report()["seconds"]["total"] == 4.0


def test_lines_that_are_skipped_are_counted_and_a_long_one_is_not_read_as_a_whole(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(events, "LONGEST_LINE", 100)
    path, event = tmp_path / "events.jsonl", '{"event": "window", "time": 1, "step": 2}\n'
    path.write_text(
        event + '{"event": "window", "time": 1, "step": 3, "x": "' + "y" * 500 + '"}\n[]\n' + event + '{"ev'
    )
    with caplog.at_level("WARNING", logger="crankshaft"):
        EventLog(str(path)).cut(5, lambda line: None)
    assert "3 lines that are not of its schema removed" in caplog.text
    assert path.read_text() == 2 * event


def test_a_disk_that_is_full_for_a_while_leaves_a_gap_and_a_line_that_says_so(tmp_path, caplog):
    path, log = tmp_path / "events.jsonl", EventLog(str(tmp_path / "events.jsonl"))
    with caplog.at_level("WARNING", logger="crankshaft"):
        log.write("window", 10, time=1, metrics={"loss": 0.5})
        with files_no_larger_than(path.stat().st_size + 20):  # room for a part of a line
            for step in (20, 30, 40):
                log.write("window", step, time=2)
            assert len(path.read_bytes().splitlines()) == 1
        with files_no_larger_than(path.stat().st_size + 200):  # room for the gap's line, and not for the event
            log.write("window", 45, time=2, cause="x" * 300)
        log.write("window", 50, time=3)
        log.write("window", 60, time=4)
    found = [(line.kind, line.step, line.event.get("text")) for line in read(str(path))]
    assert len(path.read_bytes().splitlines()) == 4
    gap = ("warning", 50, "4 events of steps 20 to 45 are missing: File too large")
    assert found == [("window", 10, None), gap, ("window", 50, None), ("window", 60, None)]
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} can't be written (File too large); the run continues, and so does its record once it can be"
    ]


def test_one_event_that_is_missing_and_one_line_that_is_none_are_told_as_one(tmp_path, caplog):
    path, log = tmp_path / "events.jsonl", EventLog(str(tmp_path / "events.jsonl"))
    with files_no_larger_than(10):
        log.write("window", 1000, time=2)
    log.write("window", 1001, time=3)
    assert next(iter(read(str(path)))).event["text"] == "1 event of step 1,000 is missing: File too large"
    path.write_bytes(path.read_bytes() + b"[]\n")
    log.cut(2000, lambda line: None)
    assert "1 line that is not of its schema removed" in caplog.text


def test_a_record_that_could_not_be_cut_at_a_resume_is_cut_before_it_goes_on(tmp_path):
    path, seen = tmp_path / "events.jsonl", []
    for step in range(10, 60, 10):
        EventLog(str(path)).write("window", step, time=step)
    log = EventLog(str(path))
    with files_no_larger_than(100):
        log.cut(30, lambda line: seen.append(line.step))
        log.write("window", 40, time=70)
    log.write("window", 50, time=80)
    assert seen == [10, 20, 30, 40, 50]
    assert [(line.step, line.kind) for line in read(str(path))] == [
        *((10, "window"), (20, "window"), (30, "window"), (50, "warning"), (50, "window"))
    ]


def test_what_came_before_the_newest_start_is_kept_unread(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "_PIECE", 100)  # so that lines span pieces
    path, seen = tmp_path / "events.jsonl", []
    log, newest = EventLog(str(path)), NewestStep(str(path))
    assert newest() == 0
    for attempt, until in enumerate((400, 50, 60)):
        log.cut(40 * (attempt > 0), lambda line: None)
        log.write("start", 40 * (attempt > 0), time=1, attempt=attempt)
        for step in range(40 * (attempt > 0) + 5, until, 5):
            log.write("window", step, time=step, text="x" * step)
        assert newest() == until - 5
    before = path.read_bytes()
    log.write("end", 55, time=70)
    log.cut(50, seen.append)
    assert [(line.kind, line.step) for line in seen] == [
        *[("start", 40), ("window", 45), ("window", 50), ("window", 55), ("end", 55)]
    ]
    lines = [line for line in before.splitlines() if b'"step": 55' not in line]
    assert path.read_bytes().splitlines()[:-1] == lines
    assert newest() == 55
    past = Past()
    log.cut(30, past.replay)  # the first attempt has the newest start before it
    assert (past.attempts, newest()) == (3, 55)
    assert [line.step for line in read(str(path)) if line.kind == "window"] == [*range(5, 31, 5)]


def test_what_real_runs_recorded_is_of_the_schema():
    records = sorted((ROOT / "tests" / "launch" / "saved_runs").glob("*/*/events.jsonl"))
    assert len(records) % 4 == 0 < len(records)
    for path in records:
        lines = path.read_bytes().splitlines()
        assert [line.event for line in read(str(path))] == [json.loads(line) for line in lines]
