"""The page in a real browser: what it shows of a run, live and mailed, and what a run can't do to it."""

import http.client
import itertools
import json
import os
import urllib.parse

import pytest
from IPython.core.formatters import HTMLFormatter

from benchmarks.browser import monitor
from benchmarks.monitor_page import events, write
from crankshaft.engine.machine.threads import pid_space
from crankshaft.parts.dashboard import page as pages
from crankshaft.parts.dashboard import report
from crankshaft.parts.dashboard.record_reader import RecordReader
from crankshaft.parts.dashboard.recorded_run import RecordedRun, recorded_runs
from crankshaft.runner.results import SCHEMA
from tests.engine.record.test_events import NOT_OF_THE_SCHEMA
from tests.parts.dashboard.test_plan_file import PLAN
from tests.parts.dashboard.test_result_text import MORE, RESULT
from tests.waiting import PATIENCE

HOSTILE = "<img src=x onerror=document.title='hacked'></script><script>document.title='hacked'</script>"
NAMED = HOSTILE.replace("/", "")
GONE = {"pid": 2**22 + 1, "pid_space": pid_space()}  # beyond the largest process ID


def add(path, *lines):
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


@pytest.mark.holds("A content security policy")
def test_a_live_run_moves_and_a_stopped_worker_turns_red(opened, tmp_path):
    path = tmp_path / NAMED / "events.jsonl"
    lines = list(events(0, begin=4e9))  # in a time to come: nobody calls it late
    write(path, iter(lines[:40]))
    with monitor(path.parent) as link:
        page = opened(link)
        page.locator("#summary", has_text="3,600 of 20,000").wait_for()
        assert page.inner_text("#news") == f"{path.parent.name} runs"
        assert lines[39]["seconds_left"] == 164
        assert "about 2 min 44 s" in page.inner_text("#summary")
        assert page.locator("#curve-charts canvas").count() == 8
        loaded = page.evaluate("performance.getEntriesByType('resource').map(each => new URL(each.name).origin)")
        assert set(loaded) == {page.evaluate("location.origin")}
        add(path, *lines[40:60])
        page.locator("#summary", has_text="5,400 of 20,000").wait_for()
        text = HOSTILE.replace("hacked", "hacked too")
        add(path, {"event": "fault", "time": lines[59]["time"], "step": 1, "task": "worker 2", "text": text})
        row = page.wait_for_selector("tr.stopped")
        assert text in row.inner_text()
        assert page.inner_text("#news") == f"{path.parent.name}: worker 2 stopped"
        assert row.evaluate("row => getComputedStyle(row.cells[0]).color") == "rgb(196, 36, 43)"
        add(path, *lines[60:])
        page.locator("#news", has_text="ended: complete").wait_for()
        assert page.locator("tr.ended").count() == 4
        assert page.locator("img").count() == 0
        assert "hacked" not in page.title().split(" – ")[0]
        assert page.evaluate("document.querySelectorAll('script').length") == 3
    page.locator("#news", has_text="does not answer").wait_for()
    assert [error for error in opened.errors if "ERR_CONNECTION" not in error] == []


def test_a_report_opens_from_a_file_with_runs_over_each_other(opened, tmp_path):
    for seed, name in enumerate(("first", NAMED)):
        write(tmp_path / name / "events.jsonl", events(seed))
        (tmp_path / name / "logs").mkdir()
        (tmp_path / name / "logs" / "worker-0.log").write_text(f"\x1b[31m{HOSTILE}\x1b[0m\n")
    (tmp_path / "first" / "plan.json").write_text(json.dumps(PLAN))
    names = ["first", NAMED]
    shown = [RecordedRun(str(tmp_path / name)).shown(60) for name in names]
    (tmp_path / "report.html").write_text(pages.html({"runs": shown}), encoding="utf-8")
    link = (tmp_path / "report.html").as_uri()
    page = opened(link, viewport={"width": 360, "height": 700}, color_scheme="dark")
    page.wait_for_selector("#lanes canvas")
    assert page.title() == "20,000 – first – Crankshaft"
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
    # A column for what differs, and no other.
    assert page.eval_on_selector_all("#runs button", "heads => heads.map(head => head.innerText)") == [
        *("run ▴", "best", "step", "state", "duration", "learning rate", "seed")
    ]
    rows = "rows => rows.map(row => [row.cells[1].innerText.trim(), row.cells[6].innerText])"
    assert page.eval_on_selector_all("#runs-rows tr", rows) == [[NAMED, "0.002"], ["first", "0.001"]]
    page.click("#sort-learning_rate")
    assert page.eval_on_selector_all("#runs-rows tr", rows) == [["first", "0.001"], [NAMED, "0.002"]]
    # First what is not a default; the learning rate is.
    assert page.inner_text("#configuration-table tr:nth-child(1)").split("\t") == ["model", "mlp"]
    assert page.locator("#configuration-table tr.changed").count() == 1
    assert page.inner_text("#log-text").strip() == HOSTILE
    # 8,000 examples a second were planned for 4 workers; all else is as planned, or within a plan's error.
    slow = page.eval_on_selector_all("#plan-table tr.slow", "rows => rows.map(row => row.cells[0].innerText)")
    assert slow == ["examples a second"]
    assert page.locator("#plan-table tr").count() == 5  # with the memory, the waits and goodput
    page.emulate_media(color_scheme="light")
    # By keyboard alone: to the other run, along a curve.
    page.focus("#runs input[type=radio]")
    page.keyboard.press("ArrowDown")
    assert page.inner_text("#news") == f"{names[1]} ended: complete"
    page.focus("#curve-charts > div")
    page.keyboard.press("ArrowLeft")
    assert "20,000" in page.inner_text("#curve-charts > div .u-legend")
    page.focus("#axis")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.getElementById('axis').value") == "time"
    page.fill("#find", "worker 2")
    assert page.locator("#lanes tr").count() == 1
    page.reload()
    assert page.locator("img").count() == 0
    assert opened.errors == []


def test_many_runs_are_a_table_and_what_became_of_each_is_said(opened, tmp_path):
    """Of 23: the best and the one that is shown have colours; one was killed, one diverged before its first window."""
    shown = []
    for number in range(23):
        lines = list(events(number, windows=20 + number))
        if number == 1:
            lines = [{**line, **GONE} for line in lines if line["event"] != "end"]
        if number == 2:
            start, *_ = lines
            told = {"step": 12, "time": start["time"] + 2, "text": "loss is nan", "reason": "loss is nan"}
            lines = [*lines[:3], {"event": "fault", **told}, {"event": "end", **told, "exit_code": 65}]
        folder = tmp_path / f"trial_{number:02d}"
        write(folder / "events.jsonl", iter(lines))
        shown.append(RecordedRun(str(folder)).shown(60))
    (tmp_path / "report.html").write_text(pages.html({"runs": shown}), encoding="utf-8")
    page = opened((tmp_path / "report.html").as_uri())
    page.wait_for_selector("#curve-charts canvas")
    assert page.locator("#runs-rows tr").count() == 23
    assert page.locator("#runs-rows input[type=checkbox]:checked").count() == 8
    assert page.locator("#draw-0").is_checked()  # which the page shows
    colours = page.eval_on_selector_all("#runs-rows i", "keys => keys.map(key => key.style.color)")
    assert sorted(set(colours)) == [*(f"var(--c{number})" for number in range(8)), "var(--other)"]
    assert colours.count("var(--other)") == 15
    # A legend is not taller than its curves: the table is the key.
    assert page.locator("#curve-charts .u-legend").count() == 0
    states = page.eval_on_selector_all("#runs-rows tr", "rows => rows.map(row => row.cells[4].innerText)")
    assert states[1].startswith("was killed, or its machine stopped, at 2023-11-14 ")
    assert states[2] == "ended: loss is nan (exit code 65)"
    assert states[3] == "ended: complete"
    page.check("#focus-1")
    assert page.inner_text("#news").startswith("trial_01 was killed, or its machine stopped, at ")
    assert "its process is gone" in page.inner_text("#notes-table tr:nth-child(2)")
    assert page.inner_text("#lanes tr:first-child td").startswith(("ended", "slow"))
    page.check("#focus-2")
    assert page.inner_text("#news") == "trial_02 ended: loss is nan (exit code 65)"
    assert opened.errors == []


def test_a_live_run_with_an_end_or_a_process_was_not_killed(tmp_path):
    """By its own process, by its supervisor's, which has the lock, and elsewhere, where process IDs are others."""
    lines = [line for line in events(0, windows=3) if line["event"] != "end"]
    killed = []
    for own, lock in (
        ({"pid": os.getpid()}, ""),
        ({}, f"{os.getpid()} here"),
        ({"pid_space": "another"}, ""),
        ({}, ""),
    ):
        write(tmp_path / "run" / "events.jsonl", iter({**line, **GONE, **own} for line in lines))
        (tmp_path / "run" / ".lock").write_text(lock)
        killed.append(RecordedRun(str(tmp_path / "run")).shown(60)["killed"])
    assert killed == [None, None, None, lines[-1]["time"]]


def test_checkpoints_in_a_row_are_one_row(opened, tmp_path):
    lines = [line for line in events(0, windows=100) if line["event"] not in ("fault", "restart")]
    begun = [line for line in lines if line["event"] != "start"]
    write(tmp_path / "run" / "events.jsonl", iter([lines[0], *begun]))
    (tmp_path / "report.html").write_text(pages.html({"runs": [RecordedRun(str(tmp_path / "run")).shown(60)]}))
    page = opened((tmp_path / "report.html").as_uri())
    page.wait_for_selector("#notes-table td")
    assert page.locator("#notes-table td:text-is('checkpoint')").count() == 1
    assert ", and 1 before" in page.inner_text("#notes-table")


def test_a_notebook_shows_a_runs_page_in_a_frame(opened, tmp_path):
    write(tmp_path / "run" / "events.jsonl", events(0, windows=10))
    cell = HTMLFormatter()(report.shown(str(tmp_path / "run")))
    (tmp_path / "notebook.html").write_text(f"<!doctype html><p>A cell</p>{cell}", encoding="utf-8")
    page = opened((tmp_path / "notebook.html").as_uri())
    (frame,) = page.frames[1:]
    frame.wait_for_selector("#curve-charts canvas")
    assert frame.inner_text("#news") == "run ended: complete"
    assert opened.errors == []


def test_one_bad_value_blanks_no_page(opened, tmp_path, capfd):
    """Among good lines: those that are not of the schema, nulls, and what only looks like text or a number."""
    numbers = {"seconds": None, "bytes": None, "best": None}
    for name in ("bad", "good"):
        write(tmp_path / name / "events.jsonl", events(0))
    lines = [{"event": "checkpoint", "time": 1.9e9, "step": 3, **numbers}, {"event": "start", "time": 1.9e9, "step": 3}]
    lines += [{"event": "window", "time": 1.9e9, "step": 3, "metrics": {"__proto__": 1e307, "\ud800": -1e307}}]
    add(tmp_path / "bad" / "events.jsonl", *map(json.loads, NOT_OF_THE_SCHEMA), *lines)
    logs = os.fsencode(tmp_path / "bad" / "logs")
    os.mkdir(logs)
    with open(logs + b"/\xff\xfe.log", "w") as file:
        file.write("a line")
    with monitor(tmp_path / "bad", tmp_path / "good") as link:
        page = opened(link)
        # The page is drawn as soon as a part of the record has been read. It shows no rows, and does not check them.
        left_out = sum('"row"' not in line for line in NOT_OF_THE_SCHEMA)
        page.locator("#facts", has_text=f"{left_out} lines of the record left out").wait_for()
        assert page.inner_text("#log-text") == "a line"
        assert page.inner_text("#notes-table tr:nth-child(2)").startswith("2030-")
        page.focus("#runs input[type=radio]")
        page.keyboard.press("ArrowDown")
        page.locator("#news", has_text="good ended: complete").wait_for()
    assert [error for error in opened.errors if "ERR_CONNECTION" not in error] == []
    assert "Traceback" not in capfd.readouterr().err


def test_results_stand_beside_each_other_with_the_comparison_to_the_baseline(opened, tmp_path):
    for name, more in (("old.json", {"warnings": ["one", "two"]}), ("new.json", MORE)):
        (tmp_path / name).write_text(json.dumps({"schema": SCHEMA, **RESULT, **more}))
    shown = [RecordedRun(str(tmp_path / name)).shown(60) for name in ("old.json", "new.json")]
    (tmp_path / "report.html").write_text(pages.html({"runs": shown}), encoding="utf-8")
    page = opened((tmp_path / "report.html").as_uri())
    rows = page.eval_on_selector_all(
        "#benchmark-table tr", "rows => rows.map(row => [...row.cells].map(each => each.innerText))"
    )
    titles = [title for title, *rest in rows[1:] if not rest]
    assert titles == "Run Rate Step Limits Baseline Machine Warnings".split()  # the report's order
    assert rows[0] == ["", "old.json", "new.json"]
    assert ["steps/s", "4,000", "4,000"] in rows
    assert ["ratio", "–", "1.250"] in rows
    assert ["warning", "one\ntwo", "the load before the run was 3.2 [sic]"] in rows
    page.get_by_label("new.json", exact=True).check()
    assert "baseline: verdict\nfaster" in page.inner_text("#summary")
    assert opened.errors == []


@pytest.mark.holds("The page follows no link")
def test_no_link_leads_out_of_a_run(tmp_path):
    """As `logs -> /proc/self` would, and a log, a record or a result that is a link."""
    secret, run_dir = tmp_path / "secret", tmp_path / "run"
    (secret / "logs").mkdir(parents=True)
    (secret / "logs" / "key").write_text("SECRET")
    (secret / "line.jsonl").write_text(json.dumps({"event": "end", "time": 1, "step": 1, "reason": "SECRET"}) + "\n")
    (secret / "result.json").write_text(json.dumps({"schema": SCHEMA, **RESULT, "model": "SECRET"}))
    os.mkdir(run_dir)
    os.symlink(secret / "line.jsonl", run_dir / "events.jsonl")
    os.symlink(secret / "result.json", run_dir / "result.json")
    os.symlink(secret / "logs", run_dir / "logs")
    os.symlink(secret / "result.json", run_dir / "plan.json")
    shown = json.dumps(RecordedRun(str(run_dir)).shown(60))
    assert "events.jsonl can't be read: it is a link" in shown
    assert "SECRET" not in shown
    os.remove(run_dir / "logs")
    os.mkdir(run_dir / "logs")
    os.symlink(secret / "logs" / "key", run_dir / "logs" / "a")
    os.mkfifo(run_dir / "logs" / "b")
    (run_dir / "logs" / "c").write_text("whole")
    assert RecordedRun(str(run_dir)).shown(60)["view"]["logs"] == {"c": "whole"}


@pytest.mark.holds("The page follows no link")
def test_a_run_that_becomes_a_link_while_the_page_is_served_shows_nothing_of_where_it_leads(tmp_path):
    """Whoever owns a folder of runs may exchange one; the folder that the user has named may be a link."""
    (tmp_path / "private" / "logs").mkdir(parents=True)
    (tmp_path / "private" / "logs" / "a").write_text("SECRET")
    write(tmp_path / "private" / "events.jsonl", itertools.islice(events(0), 10))
    for name in ("a", "b"):
        write(tmp_path / "runs" / name / "events.jsonl", itertools.islice(events(0), 10))
    (tmp_path / "named").symlink_to("runs")
    runs = recorded_runs([str(tmp_path / "named")])
    assert [run.shown(60)["view"]["logs"] for run in runs] == [{}, {}]
    os.rename(tmp_path / "runs" / "a", tmp_path / "runs" / "moved")
    (tmp_path / "runs" / "a").symlink_to(tmp_path / "private")
    first, second = (run.shown(60)["view"] for run in runs)
    assert first == {"problem": "a can't be shown: [Errno 40] it is a link: " + repr(f"{tmp_path}/named/a")}
    assert second["logs"] == {}


def test_a_log_that_becomes_a_link_while_it_is_read_is_not_followed(tmp_path, monkeypatch):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a").write_text("whole")
    (tmp_path / "secret").write_text("SECRET")
    (tmp_path / "of_others").mkdir()
    (tmp_path / "of_others" / "a").write_text("SECRET")

    def swap(*arguments):  # between the look at the folder and the reading of its files
        os.rename(tmp_path / "logs", tmp_path / "kept")
        os.symlink("of_others", tmp_path / "logs")
        os.remove(tmp_path / "kept" / "a")
        os.symlink(tmp_path / "secret", tmp_path / "kept" / "a")
        return {}

    monkeypatch.setattr(RecordReader, "view", swap)
    assert RecordedRun(str(tmp_path)).shown(60)["view"]["logs"] == {"a": "it is a link\n"}


@pytest.mark.holds("`crankshaft monitor` | on this machine", "a reader of the page")
def test_only_who_has_the_link_is_answered(tmp_path):
    write(tmp_path / "run" / "events.jsonl", itertools.islice(events(0), 10))

    def asked(link, path, host=None):
        connection = http.client.HTTPConnection(link.hostname, link.port, timeout=PATIENCE)
        connection.request("GET", path, headers={"Host": host} if host else {})
        answer = connection.getresponse()
        framed.append(answer.headers["Content-Security-Policy"])
        return answer.status, answer.read()

    framed = []

    told = (403, b"Open the whole link that crankshaft monitor has printed.\n")
    for address in ("127.0.0.1", "127.0.0.2", "0.0.0.0"):
        with monitor(f"--bind={address}", tmp_path / "run") as printed:
            link = urllib.parse.urlsplit(printed)
            here = urllib.parse.urlsplit(f"http://{address}:{link.port}")
            assert address == "0.0.0.0" or link.hostname == address
            for path in ("/", "/data", "/data?token=", "/data?token=%C3%BF"):
                assert asked(here, path) == told
            assert asked(here, f"/data?{link.query}")[0] == 200
            assert asked(here, f"/?{link.query}", "any.example")[0] == 200
            assert asked(here, f"/../../etc/passwd?{link.query}")[0] == 404
    with monitor("--no_token", tmp_path / "run") as printed:
        link = urllib.parse.urlsplit(printed)
        assert (link.hostname, link.query) == ("127.0.0.1", "")
        assert asked(link, "/data")[0] == 200
        assert asked(link, "/data", "localhost:6007")[0] == 200
        assert asked(link, "/data", "evil.example:6007")[0] == 400
    assert set(framed) == {"frame-ancestors 'none'", None}  # None where no application has answered
    with monitor("--allow_host=hub.example.org", tmp_path / "run") as printed:
        link = urllib.parse.urlsplit(printed)
        assert link.hostname == "127.0.0.1"
        assert asked(link, "/data", "hub.example.org")[0] == 403
        assert asked(link, f"/data?{link.query}", "hub.example.org")[0] == 200
        assert framed[-1] == "frame-ancestors hub.example.org:*"
