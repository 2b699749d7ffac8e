"""The record of a run, `events.jsonl`: as its schema has it, over a kill; what its time went to."""

from __future__ import annotations

import json
import os
import re
import signal
import time

import pytest

from crankshaft.engine.hooks import every_steps
from crankshaft.engine.machine.events import SCHEMA, EventLog, read
from tests.launch.conftest import MLP
from tests.runs import newest

# The chief stands still after some steps; the other waits for it.
STANDS_STILL = """
import json, os, time
from crankshaft import main
from crankshaft.engine.hooks import Hook

class Still(Hook):
    name = "still"

    def __call__(self, status):
        if status.step >= 300 and json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0:
            time.sleep(3600)

main(hooks=[Still()])
"""
RUN = (*MLP, "--train_steps=60000", "--checkpoint_every_steps=200", "--progress=plain")


def less_than_a_start(seconds: dict[str, float]) -> float:
    """What would be missing, or counted twice, of two starts is longer; between two looks at clocks lies less."""
    return max(1.5, 0.4 * seconds["start"])


@pytest.fixture(scope="module")
def killed_and_resumed(tmp_path_factory):
    """(run_dir, when it began, when it ended): killed past a checkpoint, started again, and asked to end."""
    from tests.launch.conftest import Crank

    folder = tmp_path_factory.mktemp("recorded")
    run_dir, programs, began = folder / "run", Crank(folder / "programs"), time.time()
    (folder / "programs").mkdir()
    try:
        first = programs.start(*RUN, f"--run_dir={run_dir}")
        first.until(lambda: newest(run_dir) >= 400)
        first.send(signal.SIGKILL)
        first.wait()
        second = programs.start(*RUN, f"--run_dir={run_dir}")
        second.until(lambda: "resumed at step" in second.out and newest(run_dir) >= 800)
        second.send(signal.SIGTERM)
        assert second.wait().code == 143
        yield run_dir, began, time.time(), second
    finally:
        programs.end()


def test_each_line_of_a_real_run_is_of_the_schema(killed_and_resumed):
    run_dir, *_ = killed_and_resumed
    events = [event for event, _ in read(run_dir / "events.jsonl")]
    assert len(events) == len((run_dir / "events.jsonl").read_text().splitlines())
    assert {"start", "config", "cluster", "window", "row", "evaluation", "checkpoint", "end"} <= {
        event["event"] for event in events
    }
    for event in events:
        assert isinstance(event["step"], int)
        found = {re.sub("^(train|eval)_.*", r"\1_NAME", name) for name in event} - {"event", "time", "step"}
        assert found <= {*SCHEMA[event["event"]]} | {"input_wait_fraction"}, event
    starts = [event for event in events if event["event"] == "start"]
    assert [event["attempt"] for event in starts] == [0, 1]
    assert "killed" in starts[1]["cause"]
    windows = [event for event in events if event["event"] == "window"]
    steps = [event["step"] for event in windows]
    assert steps == sorted(set(steps))  # what was past the checkpoint is cut, and done once more
    assert windows[-1]["metrics"]["loss"] < windows[0]["metrics"]["loss"]
    # Not the one of step 400: the kill may have come between the checkpoint's files and its line.
    assert steps[-1] in {event["step"] for event in events if event["event"] == "checkpoint"}


def test_what_a_runs_time_went_to_adds_up_over_a_kill(killed_and_resumed):
    run_dir, began, ended, program = killed_and_resumed
    goodput = json.loads((run_dir / "result.json").read_text())["goodput"]
    seconds = goodput["seconds"]
    whole = sum(value for kind, value in seconds.items() if kind != "total")
    assert seconds["total"] == pytest.approx(whole)
    starts = [event for event, _ in read(run_dir / "events.jsonl") if event["event"] == "start"]
    last = [event for event, _ in read(run_dir / "events.jsonl")][-1]
    first_began = starts[0]["time"] - starts[0]["seconds"]["start"]
    assert began - 0.1 <= first_began
    assert last["time"] <= ended
    whole = last["time"] - first_began
    assert last["goodput"]["seconds"]["total"] == pytest.approx(whole, abs=less_than_a_start(seconds))
    assert min(seconds.values()) >= 0
    assert all(seconds[kind] > 0 for kind in ("steps", "start", "compile", "checkpoints", "lost", "down"))
    assert goodput["share"] == pytest.approx(seconds["steps"] / seconds["total"])
    assert f"goodput {goodput['share']:.0%}: " in program.out


def test_a_record_that_cannot_be_written_is_warned_of_once(tmp_path, caplog):
    (tmp_path / "events.jsonl").symlink_to(tmp_path / "elsewhere")
    log = EventLog(str(tmp_path / "events.jsonl"))
    with caplog.at_level("WARNING", logger="crankshaft"):
        for step in range(3):
            log.write("warning", step, text="x")
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(
        f"{tmp_path}/events.jsonl can't be written (it is a link); the run continues, and so does its"
    )


def test_a_line_that_a_killed_writer_left_is_not_glued_to_the_next(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "window", "time": 1.0, "step": 3}\n{"event": "win')
    EventLog(str(path)).write("restart", 3, cause=float("nan"))
    assert [(event["event"], event.get("cause")) for event, _ in read(path)] == [("window", None), ("restart", None)]
    kinds: list[str] = []
    EventLog(str(path)).cut(2, lambda event: kinds.append(event["event"]))
    assert kinds == ["window", "restart"]
    assert [event["event"] for event, _ in read(path)] == ["restart"]


def test_an_error_that_ends_a_run_is_its_fault(inside, tmp_path):
    run_dir = tmp_path / "run"

    def fail(status, metrics):
        raise RuntimeError("enough of it")

    done = inside(*MLP, "--train_steps=40", f"--run_dir={run_dir}", hooks=[every_steps(20, fail)])
    *_, fault, end = [event for event, _ in read(run_dir / "events.jsonl")]
    assert (fault["event"], end["event"], end["exit_code"], end["step"]) == ("fault", "end", done.code, 20)
    assert fault["text"] == end["reason"]
    assert "enough of it" in fault["text"]


@pytest.mark.slow
def test_workers_that_are_stopped_and_killed_are_recorded(crank, tmp_path):
    run_dir = tmp_path / "run"
    program = crank.start("--workers=2", "--", *RUN, f"--run_dir={run_dir}", command="local")

    def found(kind: str, **values) -> list[dict]:
        events = read(run_dir / "events.jsonl") if (run_dir / "events.jsonl").exists() else ()
        return [event for event, _ in events if event["event"] == kind and values.items() <= event.items()]

    def send(number: signal.Signals) -> None:
        os.kill(int(re.findall(r"worker 1 is process (\d+)", program.out + program.err)[-1]), number)

    program.until(lambda: newest(run_dir) >= 200)
    send(signal.SIGSTOP)
    program.until(lambda: found("fault", task="worker 1", state="silent"))
    send(signal.SIGCONT)
    program.until(lambda: found("warning", task="worker 1", state="answers"))
    saved = newest(run_dir)
    program.until(lambda: newest(run_dir) > saved)
    send(signal.SIGKILL)  # so that often no call ends between the checkpoint and the failure
    program.until(lambda: found("start", attempt=1) and found("window"))
    (restart,) = found("restart")
    assert (restart["task"], restart["exit_code"]) == ("worker 1", -9)
    first, second = found("start")
    kept = [window for window in found("window") if window["step"] <= second["step"]][-1]["spent"]
    for kind in ("steps", "input", "waiting", "other"):  # what came after the checkpoint is lost, whatever it was
        assert second["spent"][kind] == kept[kind]
    assert second["cause"] == restart["cause"] == "worker 1 was killed by SIGKILL"
    assert found("cluster")[0]["workers"][1]["name"] == "worker 1"
    program.send(signal.SIGTERM)
    assert program.wait().code == 143
    end = found("end")[-1]
    seconds = end["goodput"]["seconds"]
    assert seconds["down"] > 0
    assert seconds["lost"] > 0
    whole = end["time"] - first["time"] + first["seconds"]["start"]
    assert seconds["total"] == pytest.approx(whole, abs=less_than_a_start(seconds))


@pytest.mark.slow
def test_a_run_that_the_watchdog_ends_has_an_end_that_names_who_stood_still(crank, tmp_path):
    run_dir, script = tmp_path / "run", tmp_path / "script.py"
    script.write_text(STANDS_STILL)
    flags = ("--step_timeout_seconds=15", f"--run_dir={run_dir}")
    done = crank("--workers=2", "--max_restarts=0", "--", script, *RUN, *flags, command="local")
    assert done.code == 1
    *_, fault, end = [event for event, _ in read(run_dir / "events.jsonl")]
    assert (fault["event"], fault["task"], end["event"], end["exit_code"]) == ("fault", "worker 0", "end", 1)
    assert re.match(r"worker 0 \(.*, this process, has not arrived", end["reason"])
    assert end["goodput"]["seconds"]["lost"] > 5
