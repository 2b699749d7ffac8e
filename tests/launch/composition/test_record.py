"""The record of a run, `events.jsonl`: as its schema has it, over a kill; what its time went to.

`crankshaft ask`: a running job answers by files in its run_dir; who asks one that can't gets one line.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

import crankshaft
from crankshaft.engine.hooks import every_steps
from crankshaft.engine.machine.files import file_system_time
from crankshaft.engine.machine.threads import pid_space
from crankshaft.engine.record import recorder
from crankshaft.engine.record.events import SCHEMA, EventLog, read
from crankshaft.launch import command
from crankshaft.parts.ask.requests import Requests, ask
from crankshaft.parts.dashboard.recorded_run import recorded_runs
from tests.engine.trainers import Squares
from tests.launch.conftest import MLP
from tests.processes import Outcome
from tests.runs import newest
from tests.waiting import wait_until

pytestmark = pytest.mark.thorough

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
    events = [line.event for line in read(run_dir / "events.jsonl")]
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


def test_each_attempts_configuration_and_early_warnings_are_recorded_and_what_changed_is_shown(
    inside, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    author = ("-c", "user.name=x", "-c", "user.email=x@x")
    git = functools.partial(subprocess.run, check=True, capture_output=True, text=True)
    git(["git", "init", "-q"])
    x, run = np.ones([16, 2], "float32"), ("--run_dir=run", "--global_batch_size=8", "--jit=off")
    commits = []
    for attempt, rate in enumerate((0.1, 0.2)):
        git(["git", *author, "commit", "-q", "--allow-empty", "-m", "x"])
        commits.append(git(["git", "rev-parse", "HEAD"]).stdout.strip())
        flags = (f"--learning_rate={rate}", f"--train_steps={2 + attempt}", "--allow_changed_config")
        inside(*run, *flags, trainer=Squares, data=((x + attempt, x[:, 0]), None)).ok()
    found = [line.event for line in read("run/events.jsonl")]
    configs = [event for event in found if event["event"] == "config"]
    assert [config["commit"] for config in configs] == commits
    assert configs[0]["versions"]["tensorflow"] == tf.__version__
    assert configs[0]["command"] == shlex.join(sys.argv)[:10_000]
    warnings = [event["text"] for event in found if event["event"] == "warning"]
    assert any("the training data is not that of ckpt-2" in text for text in warnings)
    (recorded,) = recorded_runs(["run"])
    (note,) = (note for note in recorded.shown(60.0)["view"]["notes"] if note["event"] == "config")
    changed = f"flags train_steps: 2 -> 3; flags learning_rate: 0.1 -> 0.2; commit: {commits[0]} -> {commits[1]}"
    assert note["text"] == changed


def test_what_a_runs_time_went_to_adds_up_over_a_kill(killed_and_resumed):
    run_dir, began, ended, program = killed_and_resumed
    goodput = json.loads((run_dir / "result.json").read_text())["goodput"]
    seconds = goodput["seconds"]
    whole = sum(value for kind, value in seconds.items() if kind != "total")
    assert seconds["total"] == pytest.approx(whole)
    starts = [line.event for line in read(run_dir / "events.jsonl") if line.kind == "start"]
    last = [line.event for line in read(run_dir / "events.jsonl")][-1]
    first_began = starts[0]["time"] - starts[0]["seconds"]["start"]
    assert began - 0.1 <= first_began
    assert last["time"] <= ended
    whole = last["time"] - first_began
    assert last["goodput"]["seconds"]["total"] == pytest.approx(whole, abs=less_than_a_start(seconds))
    assert min(seconds.values()) >= 0
    assert all(seconds[kind] > 0 for kind in ("steps", "start", "compile", "checkpoints", "lost", "down"))
    assert goodput["share"] == pytest.approx(seconds["steps"] / seconds["total"])
    assert f"goodput {goodput['share']:.0%}: " in program.out


def test_a_line_that_a_killed_writer_left_is_not_glued_to_the_next(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "window", "time": 1.0, "step": 3}\n{"event": "win')
    EventLog(str(path)).write("restart", 3, cause=float("nan"))
    assert [(line.kind, line.event.get("cause")) for line in read(path)] == [("window", None), ("restart", None)]
    kinds: list[str] = []
    EventLog(str(path)).cut(2, lambda line: kinds.append(line.kind))
    assert kinds == ["window", "restart"]
    assert [line.kind for line in read(path)] == ["restart"]


def test_an_error_that_ends_a_run_is_its_fault(inside, tmp_path):
    run_dir = tmp_path / "run"

    def fail(status, metrics):
        raise RuntimeError("enough of it")

    done = inside(*MLP, "--train_steps=40", f"--run_dir={run_dir}", hooks=[every_steps(20, fail)])
    *_, fault, end = [line.event for line in read(run_dir / "events.jsonl")]
    assert (fault["event"], end["event"], end["exit_code"], end["step"]) == ("fault", "end", done.code, 20)
    assert fault["text"] == end["reason"]
    assert "enough of it" in fault["text"]


ENDLESS_RUN = (*MLP, "--train_steps=10000000", "--checkpoint_every_steps=0", "--eval_every_steps=0", "--progress=off")

HANGS = """
import time

from crankshaft import main
from crankshaft.engine.hooks import Hook


class Never:  # a value of a device that hangs
    def __array__(self, *_, **__):
        time.sleep(3600)


class Hang(Hook):
    name = "hang"

    def __call__(self, status):
        if status.step >= 1000:
            status.segment.sums._tensor = Never()


main(hooks=[Hang()])
"""


def traces(run_dir) -> list[str]:
    return [path.name for path in (run_dir / "tensorboard" / "plugins" / "profile").glob("*/*.xplane.pb")]


def trains(run_dir) -> bool:
    return (run_dir / "events.jsonl").exists() and '"window"' in (run_dir / "events.jsonl").read_text()


@pytest.fixture
def asked(capfd):
    """`asked(run_dir, *arguments)`: the command in this process."""

    def asked(*arguments) -> Outcome:
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            command.execute("ask", [*map(str, arguments)])
        return Outcome(end.value.code or 0, *capfd.readouterr())

    return asked


def test_a_running_job_answers_and_stops_clean(crank, asked, tmp_path):
    run_dir = tmp_path / "run"
    asked = functools.partial(asked, run_dir)
    program = crank.start(*ENDLESS_RUN, f"--run_dir={run_dir}")
    program.until(lambda: trains(run_dir))
    assert "examples/s" in crank(run_dir, "status", command="ask", tensorflow=False).ok().out
    assert "thread MainThread:" in asked("stacks").ok().out
    assert asked("checkpoint").ok().out.strip() == f"{run_dir}/checkpoints/ckpt-{newest(run_dir)} is written"
    said = asked("profile").ok().out
    first, last = (int(word.replace(",", "")) for word in (said.split()[4], said.split()[6]))
    assert last - first == 10
    assert len(traces(run_dir)) == 1
    asked("status", "--task=worker 7").refused("--task=worker 7 is not a task of this run; use 'this process'")
    asked("profil").refused("'profil' is not a request; did you mean profile")
    said = asked("stop").ok().out
    assert program.wait().ok()
    step = json.loads((run_dir / "result.json").read_text())["step"]
    assert said.startswith(f"the run has ended at step {step:,}, and is saved")
    assert newest(run_dir) == step
    assert [*(run_dir / "ask").iterdir()] == []
    ended = asked("status")
    assert (ended.code, ended.error) == (1, f"{run_dir}: the run has ended at step {step:,}: crankshaft ask stop")


@pytest.mark.slow
def test_a_job_whose_device_hangs_answers_and_a_second_signal_ends_it(crank, asked, tmp_path):
    run_dir, script = tmp_path / "run", tmp_path / "hangs.py"
    script.write_text(HANGS)
    program = crank.start(*ENDLESS_RUN, f"--run_dir={run_dir}", script=script)
    program.until(lambda: trains(run_dir))
    program.until(lambda: "in __array__" in asked(run_dir, "stacks").ok().out)
    assert re.search(r"step [\d,]+/10,000,000 .* as of \d+s ago", asked(run_dir, "status").ok().out)
    program.send(signal.SIGTERM)
    program.until(lambda: "a second signal ends the process at once" in program.err)
    program.until(lambda: program.send(signal.SIGTERM) or program.process.poll() is not None)
    assert program.wait().code == 143


@pytest.mark.slow
def test_any_worker_is_profiled_and_all_save_and_stop_at_one_step(crank, asked, tmp_path):
    run_dir = tmp_path / "run"
    program = crank.start("--workers=2", "--", *ENDLESS_RUN, f"--run_dir={run_dir}", command="local")
    program.until(lambda: trains(run_dir))

    def of_one(kind: str) -> str:
        return asked(run_dir, kind, "--task=worker 1").ok().out

    assert "a profile of steps" in of_one("profile")
    assert len(traces(run_dir)) == 1
    assert "thread MainThread:" in of_one("stacks")
    assert of_one("checkpoint") == f"{run_dir}/checkpoints/ckpt-{newest(run_dir)} is written\n"
    assert "the run has ended at step" in of_one("stop")
    assert program.wait().ok()
    assert newest(run_dir) == json.loads((run_dir / "result.json").read_text())["step"]


def recorded(run_dir, *events: dict) -> None:
    run_dir.mkdir(exist_ok=True)
    for event in events:
        EventLog(str(run_dir / "events.jsonl")).write(**{"step": 3, **event})


def test_who_asks_where_nobody_answers_gets_one_line(asked, tmp_path):
    def status(name: str) -> Outcome:
        return asked(tmp_path / name, "status", "--wait_seconds=0.3")

    (tmp_path / "none").mkdir()
    assert status("none").mistake.startswith(f"{tmp_path}/none holds no run (events.jsonl is missing)")
    nobody = 1 << 22
    here = {"host": os.uname().nodename, "pid_space": pid_space()}
    recorded(tmp_path / "killed", {"event": "start", "pid": nobody, **here})
    said = f"{tmp_path}/killed: process {nobody} ended without recording why; start the run again"
    assert status("killed").error == said
    recorded(tmp_path / "killed", {"event": "restart", "cause": "worker 1 was killed by SIGKILL"})
    assert (
        status("killed").error
        == f"{tmp_path}/killed: the run restarts, since worker 1 was killed by SIGKILL; ask again in a minute"
    )
    recorded(tmp_path / "killed", {"event": "end", "reason": "done"})
    assert status("killed").error == f"{tmp_path}/killed: the run has ended at step 3: done"
    # Another host may have the name of this one.
    recorded(tmp_path / "quiet", {"event": "start", "pid": nobody, **here, "pid_space": "another"})
    assert status("quiet").error.startswith(f"{tmp_path}/quiet: no answer in 0.3 s")
    assert [path.name for path in (tmp_path / "quiet").iterdir()] == ["events.jsonl"]


@pytest.mark.holds("`crankshaft ask` | who")
def test_only_small_regular_files_of_known_words_are_requests(tmp_path):
    requests = Requests(str(tmp_path / "ask"), lambda kind, task: task is None)
    assert requests.take() == []
    folder = tmp_path / "ask"
    assert folder.is_dir()  # a file system may remember for long that it was missing

    def put(number: int, content: str) -> None:
        (folder / f"{number:016x}.request").write_text(content)

    good = {"kind": "status", "task": None, "seconds": 100}
    put(1, json.dumps(good))
    wrongs = [{"kind": "rm -rf"}, {"task": "worker 1"}, {"task": 3}]
    wrongs += [{"seconds": -1}, {"seconds": None}, {"seconds": "9e9"}, {"kind": ["status"]}]
    for number, wrong in enumerate(wrongs):
        put(2 + number, json.dumps({**good, **wrong}))
    put(20, json.dumps(good) + " " * 5000)
    put(21, "[" * 4000)
    os.mkfifo(folder / f"{22:016x}.request")
    (folder / f"{23:016x}.request").symlink_to("/dev/zero")
    (tmp_path / "elsewhere").write_text(json.dumps(good))
    (folder / f"{24:016x}.request").symlink_to(tmp_path / "elsewhere")
    put(25, json.dumps([good]))
    assert [request.number for request in requests.take()] == [f"{1:016x}"]
    assert requests.take() == []  # each once


@pytest.mark.parametrize("ahead_seconds", [3600.0, -3600.0])
def test_a_request_counts_while_its_client_waits_by_the_clock_of_the_files(tmp_path, monkeypatch, ahead_seconds):
    """Whatever a task's or a client's own clock says."""
    requests, now = Requests(str(tmp_path), lambda kind, task: True), time.time()
    monkeypatch.setattr(time, "time", lambda: now + ahead_seconds)
    (tmp_path / f"{1:016x}.request").write_text(json.dumps({"kind": "status", "task": None, "seconds": 1}))
    assert [request.number for request in requests.take()] == [f"{1:016x}"]
    wait_until(lambda: file_system_time(str(tmp_path)) > (tmp_path / f"{1:016x}.request").stat().st_ctime + 1)
    assert Requests(str(tmp_path), lambda kind, task: True).take() == []  # a killed client has left it


def test_a_client_opens_no_answer_before_it_is_listed(tmp_path, monkeypatch):
    """A network file system remembers for half a minute that a name was missing."""
    opened, open_file = [], os.open
    monkeypatch.setattr(
        os, "open", lambda path, *args, **options: opened.append(path) or open_file(path, *args, **options)
    )
    assert ask(str(tmp_path / "ask"), "status", None, 0.3) is None
    assert [path for path in opened if "answer" in os.path.basename(path)] == []


def test_a_flood_of_requests_delays_no_later_one(tmp_path):
    requests = Requests(str(tmp_path), lambda kind, task: True)
    content = json.dumps({"kind": "stacks", "task": None, "seconds": 100})
    names = [f"{number:016x}" for number in range(200)]
    for name in names:
        (tmp_path / f"{name}.request").write_text(content)
        os.utime(tmp_path / f"{name}.request", (9e9, 9e9))  # as if they came later
    taken = [request.number for request in requests.take()]
    assert len(taken) < 50
    came = max(path.stat().st_ctime_ns for path in tmp_path.iterdir())
    later = tmp_path / "ffffffffffffffff.request"
    wait_until(lambda: later.write_text(content) and later.stat().st_ctime_ns > came)  # the clock of files is coarse
    taken += [request.number for request in requests.take()]
    assert "ffffffffffffffff" in taken
    while more := requests.take():
        taken += [request.number for request in more]
    assert sorted(taken) == [*names, "ffffffffffffffff"]  # each once


@pytest.mark.holds("Nothing that arrives")
def test_what_anyone_may_have_written_into_a_run_acts_on_no_terminal(crank, asked, tmp_path):
    lines = [
        {"event": "end", "step": "5"},
        {"event": "cluster", "step": 0, "workers": ["x"]},
        {"event": "start", "step": 0, "host": os.uname().nodename},
        {"event": "end", "step": 10**400, "reason": 3},
    ]
    for index, line in enumerate(lines):
        (tmp_path / str(index)).mkdir()
        (tmp_path / str(index) / "events.jsonl").write_text(json.dumps({"time": 1, **line}) + "\n")
    for index in range(len(lines)):
        done = asked(tmp_path / str(index), "status", "--wait_seconds=0.2")
        assert (done.code, done.error.split(";")[0]) == (1, f"{tmp_path}/{index}: no answer in 0.2 s")
    program, folder = crank.start(tmp_path / "2", "status", command="ask", tensorflow=False), tmp_path / "2" / "ask"
    program.until(lambda: folder.exists() and [*folder.glob("*.request")])
    (request,) = folder.glob("*.request")
    (folder / "new").write_text("\x1b]52;c;ZXZpbA==\x07\x1b[31mstep 9/9\r\x9b2K\n")
    os.rename(folder / "new", request.with_suffix(".answer"))
    out = program.wait().ok().out
    assert "step 9/9" in out
    assert not set("\x1b\x07\r\x9b") & set(out)


def test_an_asker_that_is_ended_takes_its_request_back(crank, tmp_path):
    recorded(tmp_path / "run", {"event": "start", "pid": 1, "host": "elsewhere"})
    program = crank.start(tmp_path / "run", "stop", command="ask", tensorflow=False)
    program.until(lambda: (tmp_path / "run" / "ask").exists() and any((tmp_path / "run" / "ask").iterdir()))
    program.send(signal.SIGINT)
    assert program.wait().error == "interrupted; the request is taken back"
    assert not (tmp_path / "run" / "ask").exists()
    assert ask(str(tmp_path / "run" / "ask"), "status", None, 0.01) is None


def test_a_task_that_stays_silent_is_named_to_people_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(recorder, "_WARN_SECONDS", 0.3)
    flags = {"model": "mlp", "input": "digits", "progress": "off", "strategy": "one_device"}
    with crankshaft.open_run(**flags, train_steps=2, run_dir=str(tmp_path / "run")) as run:
        run.strategy.silent = lambda seconds: ["worker 0", "worker 1"]
        run.train(1)
        line = "worker 0 and worker 1 have not answered for 0.3 s: stopped, or out of reach"
        wait_until(lambda: line in caplog.text)
        time.sleep(1.2)  # two more turns
        assert caplog.text.count("not answered") == 1
