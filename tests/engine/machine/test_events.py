"""What is an event of a run's record, and what a line that is none can't do."""

import json

import pytest

from crankshaft.engine.hooks.goodput import Goodput, Past
from crankshaft.engine.machine import events
from crankshaft.engine.machine.events import EventLog, parsed, read
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


@pytest.mark.parametrize("line", NOT_OF_THE_SCHEMA)
def test_a_line_that_does_not_match_the_schema_blocks_no_resume(tmp_path, line):
    assert parsed(line.encode()) is None
    path, past, goodput = tmp_path / "events.jsonl", Past(), Goodput()
    whole = [
        '{"event": "start", "time": 5, "step": 0, "spent": {"steps": null, "other": 2}}',
        '{"event": "x", "time": 6, "step": 1}',
    ]
    path.write_text("\n".join([whole[0], line, whole[1], ""]))
    EventLog(str(path)).cut(9, past.see)
    assert path.read_text().splitlines() == whole
    goodput.resume(past, None, 9, 7.0)
    assert goodput.report()["seconds"]["total"] == 4.0


def test_lines_that_are_skipped_are_counted_and_a_long_one_is_not_read_as_a_whole(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(events, "LONGEST_LINE", 100)
    path, event = tmp_path / "events.jsonl", '{"event": "window", "time": 1, "step": 2}\n'
    path.write_text(
        event + '{"event": "window", "time": 1, "step": 3, "x": "' + "y" * 500 + '"}\n[]\n' + event + '{"ev'
    )
    with caplog.at_level("WARNING", logger="absl"):
        EventLog(str(path)).cut(5, lambda event: None)
    assert "3 lines that are not events were removed" in caplog.text
    assert path.read_text() == 2 * event


def test_what_real_runs_recorded_is_of_the_schema():
    records = sorted((ROOT / "tests" / "launch" / "saved_runs").glob("*/events.jsonl"))
    assert len(records) == 4
    for path in records:
        lines = path.read_bytes().splitlines()
        assert [event for event, _ in read(str(path))] == [json.loads(line) for line in lines]
