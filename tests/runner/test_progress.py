"""What a person sees of a run, in a pseudo-terminal and in a pipe, with clocks that the tests set."""

from __future__ import annotations

import fcntl
import inspect
import io
import json
import os
import re
import struct
import sys
import termios
import types

import numpy as np
import pytest
import tensorflow as tf
from absl.logging import use_absl_handler

from crankshaft.engine import logging
from crankshaft.engine.build import prepare
from crankshaft.engine.data.arrays import ArraySource
from crankshaft.engine.errors import rounded
from crankshaft.engine.hooks import Hook, StopRequest
from crankshaft.engine.hooks.base import Periodic
from crankshaft.engine.hooks.evaluation import Evaluated, Evaluation
from crankshaft.engine.inventory import Inventory
from crankshaft.engine.metrics.sums import LoopSums
from crankshaft.engine.record.events import SCHEMA
from crankshaft.engine.state import TrainState
from crankshaft.engine.step.options import RunContext
from crankshaft.engine.strategies import StrategyOptions
from crankshaft.engine.strategies.replicated import Replicated
from crankshaft.models.mlp import Model
from crankshaft.runner import progress
from crankshaft.runner.progress import (
    Progress,
    duration,
    evaluation_line,
    metrics_shown,
    print_model_summary,
    watch,
)
from crankshaft.runner.terminal import fit_log
from tests.bench import train_with_hooks

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def compiled():
    """(strategy, state) of a small model on one device, and what puts its first values back."""
    rng = np.random.default_rng(0)
    source = rng.random((64, 4), dtype="float32"), rng.integers(0, 3, 64).astype("int32")
    options = StrategyOptions(steps_per_loop=8)
    strategy = Replicated("one_device", tf.distribute.OneDeviceStrategy("CPU:0"), options)
    with strategy.scope():
        example = source[0][:1] * 0, source[1][:1] * 0
        state = TrainState(prepare(Model(hidden_units=(4,)), RunContext(num_classes=3, example=example)))
        state.build()
    state.jit = False
    split = ArraySource(source)
    strategy.bind(state, strategy.feed(split, 16, 0), strategy.feed(split, 16, None))
    return strategy, state, state.make_restorer()


@pytest.fixture
def bound(compiled):
    """(strategy, state), at step 0."""
    strategy, state, put_back = compiled
    put_back()
    return strategy, state


class Steps(Hook):
    """Cuts the loop every so many steps, and moves a clock on by so many seconds in each call."""

    def __init__(self, steps, seconds=0.0):
        self.steps, self.seconds, self.now = steps, seconds, 0.0

    def next_due(self, step, status):
        self.now += self.seconds
        return step + self.steps

    def clock(self):
        return self.now


class Then(Hook):
    """Calls a function after each call of the loop."""

    def __init__(self, act):
        self.act = act

    def __call__(self, status):
        self.act(status)


def run(bound, hooks, until, **clock):
    strategy, state = bound
    return train_with_hooks(strategy, state, hooks, until, **clock)


def without_commands(text: str) -> list[str]:
    """The lines that a terminal was sent, without its commands."""
    return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).strip() for line in re.split(r"[\r\n]+", text)]


def plain(bound, until, *hooks, seconds=1.0, **arguments):
    """The lines of a run of calls of 2 steps, each of so many seconds."""
    file = io.StringIO()
    cut = Steps(2, seconds)
    run(bound, [cut, *hooks, Progress("plain", file=file, clock=cut.clock, **arguments)], until, clock=cut.clock)
    return file.getvalue().splitlines()


def test_lines_come_once_in_so_many_seconds_and_at_the_last_step(bound):
    lines = plain(bound, 24, line_seconds=4)
    assert [line.split("  ")[0] for line in lines] == ["step 8/24", "step 16/24", "step 24/24"]
    # 4 steps an epoch; 2 steps of 16 examples a second; 16 steps are left.
    assert re.fullmatch(r"step 8/24  loss \d\.\d{4}  accuracy \d\.\d{4}  epoch 2  32 examples/s  8s left", lines[0])


def test_numbers_above_a_thousand_have_no_exponent():
    assert [*map(rounded, (0, 0.0123, 12.34, 999.9, 1234.5))] == ["0", "0.0123", "12.3", "1,000", "1,234"]


def test_the_time_left_has_what_is_done_between_calls(bound):
    """Each call and what follows it takes 3 s in all, whatever the steps took."""
    file, cut = io.StringIO(), Steps(2, 1.0)
    slow = Then(lambda status: setattr(cut, "now", cut.now + 2.0))
    run(bound, [cut, slow, Progress("plain", file=file, clock=cut.clock, line_seconds=0)], 24, clock=cut.clock)
    assert [line.split("  ")[-1] for line in file.getvalue().splitlines()][1:4] == ["30s left", "27s left", "24s left"]


@pytest.mark.parametrize("began", [0, 32])
def test_the_time_left_has_evaluations_and_checkpoints_ahead(bound, began):
    """Every 8 steps, 10 s, and the first 30 s; every 2 steps, 1 s; the same where a run was resumed."""
    file, cut = io.StringIO(), Steps(2, 1.0)
    bound[1].advance(began)

    class Slow(Periodic):
        def act(self, status):
            cut.now += 30.0 if status.step == began + 8 else 10.0

    progress = Progress("plain", file=file, clock=cut.clock, line_seconds=0)
    run(bound, [cut, Slow(8), progress], began + 32, clock=cut.clock)
    left = [line.split("  ")[-1].removesuffix(" left") for line in file.getvalue().splitlines()]
    assert left[1:3] == ["14s", "13s"]  # of steps 4 and 6: none is measured
    assert left[3:5] == ["1m42s", "1m41s"]  # 3 are ahead, from steps 8 and 10
    assert left[7:10] == ["28s", "27s", "26s"]  # 2 are, from steps 16 to 20
    assert left[14:] == ["11s", "0s"]


def test_the_rate_is_that_since_the_last_line(bound):
    file, cut = io.StringIO(), Steps(2, 1.0)
    faster = Then(lambda status: setattr(cut, "seconds", 0.5 if status.step >= 8 else 1.0))
    run(bound, [cut, faster, Progress("plain", file=file, clock=cut.clock, line_seconds=0)], 12, clock=cut.clock)
    assert re.findall(r"(\d+) examples/s", file.getvalue()) == ["32"] * 4 + ["64"] * 2


def test_no_time_is_reckoned_from_the_first_call_alone(bound):
    lines = plain(bound, 6, line_seconds=0)
    assert [line.endswith(" left") for line in lines] == [False, True, True]
    assert lines[0].split("  ")[-2:] == ["epoch 0.5", "32 examples/s"]


METRICS = {"loss": 0.5, "accuracy": 0.25, "auc": 0.75, "precision": 0.125, "recall": 0.875}


def test_a_bar_of_80_columns_holds_five_metrics_and_what_else_there_is_room_for(bound, terminal, monkeypatch):
    file, read = terminal
    fcntl.ioctl(file.fileno(), termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    monkeypatch.setattr("crankshaft.engine.metrics.sums.Sums.means", lambda sums: METRICS)
    run(bound, [Steps(2, 1.0), Progress("bar", file=file)], 8)
    shown = [line for line in without_commands(read()) if "loss" in line]
    assert shown
    assert max(map(len, shown)) <= 80
    for name in METRICS:
        assert f"{name} " in shown[-1]
    assert "examples/s" not in shown[-1]


def test_evaluations_have_a_line_whatever_the_time(bound):
    evaluation = Evaluation(4)
    lines = plain(bound, 8, evaluation, line_seconds=1000)
    shown = [line for line in lines if "evaluation" in line]
    assert [line.split("  ")[0] for line in shown] == ["step 4/8", "step 8/8"]
    result = evaluation.result
    assert shown[-1].endswith(f"evaluation  loss {result['loss']:.4f}  accuracy {result['accuracy']:.4f}")


def test_json_is_one_object_per_line_with_the_keys_of_the_record(bound):
    file, cut, evaluation = io.StringIO(), Steps(2, 1.0), Evaluation(4)
    run(bound, [cut, evaluation, Progress("json", file=file, clock=cut.clock, line_seconds=1000)], 8, clock=cut.clock)
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    assert [(line["event"], line["step"]) for line in lines] == [
        *(("window", 4), ("evaluation", 4)),
        *(("window", 8), ("evaluation", 8)),
    ]
    assert lines[3]["metrics"] == evaluation.result  # with all digits, whatever their exponent
    assert set(lines[2]) == {
        *("event", "time", "step", "epoch", "until_step", "seconds_left", "steps_per_sec", "examples_per_sec"),
        "metrics",
    }
    for line in lines:  # what reads the record reads these
        assert line.keys() - {"until_step"} <= SCHEMA[line["event"]].keys() | {"event", "time", "step"}


def test_nothing_is_read_between_two_lines(bound, monkeypatch):
    class Watched(Progress):
        def __call__(self, status):
            reads.append(0)
            super().__call__(status)
            per_call.append(reads.pop())

    def spy(sums):
        if reads:
            reads[-1] += 1
        return read(sums)

    read, reads, per_call = LoopSums.read, [], []
    monkeypatch.setattr(LoopSums, "read", spy)
    cut = Steps(2, 1.0)
    run(bound, [cut, Watched("plain", file=io.StringIO(), clock=cut.clock, line_seconds=5)], 20)
    assert [count > 0 for count in per_call] == [False, False, False, False, True] * 2


def test_run_that_is_stopped_shows_where(bound):
    stop, file = StopRequest(), io.StringIO()
    ask = Then(lambda status: stop.request("asked") if status.step >= 6 else None)
    run(bound, [Steps(2), ask, Progress("plain", file=file), stop], 40)
    (line,) = file.getvalue().splitlines()
    assert line.startswith("step 6/40")


@pytest.mark.parametrize(("mode", "shown"), [("off", ""), ("auto", r"[^\x1b]*step 4/4  loss[^\x1b]+")])
def test_off_is_silent_and_auto_is_plain_lines_where_there_is_no_terminal(bound, mode, shown):
    file = io.StringIO()
    run(bound, [Evaluation(2), Progress(mode, file=file)], 4)
    assert re.fullmatch(shown, file.getvalue())


def test_unknown_mode_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="progress=loud is unknown; use one of auto, bar, plain, json, off"):
        Progress("loud")


def test_auto_is_a_bar_in_a_terminal_redrawn_in_place(bound, terminal):
    file, read = terminal
    cut = Steps(2, 0.1)
    progress = Progress("auto", file=file, clock=cut.clock, redraw_seconds=0.35)
    run(bound, [cut, progress], 40, clock=cut.clock)
    shown = read()
    assert "\x1b[2K" in shown  # clears the line that it draws again
    drawn = re.findall(r"step (\d+)/40", shown)
    assert set(drawn) == {"0", "8", "16", "24", "32", "40"}  # every fourth call
    assert re.search(r"loss \d\.\d{4}  accuracy \d\.\d{4}  epoch \d+  \ds left  320 examples/s", shown)
    assert "━" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # gives the cursor back


def test_bar_gives_the_cursor_back_after_an_exception_and_close(bound, terminal):
    file, read = terminal
    progress = Progress("bar", file=file)
    with pytest.raises(ZeroDivisionError):
        run(bound, [progress, Then(lambda status: 1 / 0)], 4)
    progress.close()
    progress.close()
    assert read().count("\x1b[?25h") == 1


def test_a_breakpoint_leaves_the_terminal_to_a_debugger_that_begins_in_its_caller(terminal, monkeypatch):
    def debugger(*_, header):
        caller = inspect.currentframe().f_back
        found.append((caller.f_code.co_name, header, sys.stdout is stdout))
        monkeypatch.setattr(sys, "gettrace", lambda: debugger)  # a debugger's prompt comes once this has returned

    (file, read), found, stdout = terminal, [], sys.stdout
    monkeypatch.setattr(sys, "breakpointhook", debugger)
    bar = progress.Bar(file, "step 0/9", 9)
    assert sys.stdout is not stdout  # what is printed goes above the bar
    breakpoint(header="look")
    bar.draw(1, "step 1/9", "at the prompt")
    monkeypatch.setattr(sys, "gettrace", lambda: None)
    bar.draw(2, "step 2/9", "it goes on")
    assert sys.stdout is not stdout
    bar.close()
    assert found == [(inspect.currentframe().f_code.co_name, "look", True)]
    assert (sys.breakpointhook, sys.stdout) == (debugger, stdout)
    bar = progress.Bar(file, "step 0/9", 9)
    sys.breakpointhook = print  # the program's own, meanwhile
    bar.close()
    assert sys.breakpointhook is print
    shown = read()
    assert "it goes on" in shown
    assert "at the prompt" not in shown


def test_evaluations_and_log_stand_above_the_bar(bound, terminal, monkeypatch):
    file, read = terminal
    errors = os.fdopen(os.dup(file.fileno()), "w", buffering=1)
    monkeypatch.setattr(sys, "stderr", errors)
    use_absl_handler()  # as `main` does
    fit_log()
    log = Then(lambda status: logging.warning("a warning meanwhile"))
    run(bound, [Evaluation(2), log, Progress("bar", file=file)], 4)
    assert sys.stderr is errors
    logging.warning("a warning afterwards")
    monkeypatch.undo()
    fit_log()
    errors.close()
    lines = without_commands(read())
    evaluations = [line for line in lines if "evaluation" in line]
    assert [line.split("  ")[0] for line in evaluations] == ["step 2/4", "step 4/4"]
    warnings = [line for line in lines if "a warning" in line]
    assert [line.split()[-1] for line in warnings] == ["meanwhile", "meanwhile", "afterwards"]
    assert all("━" not in line for line in evaluations + warnings)


def test_model_summary_is_printed_once_and_fits(bound, capsys):
    file = io.StringIO()
    print_model_summary(Inventory(bound[1].trainer).models, file)
    text = file.getvalue()
    assert text.count('Model: "mlp"') == 1
    assert "logits" in text
    assert max(len(line) for line in text.splitlines()) <= 100
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (61, "1m01s"), (3599, "59m59s"), (3599.5, "1h00m")),
        *((3600, "1h00m"), (7509, "2h05m"), (86399, "23h59m"), (86400, "1d00h"), (90000, "1d01h"), (273700, "3d04h")),
    ],
)
def test_duration_has_its_two_largest_units(seconds, text):
    assert duration(seconds) == text


def test_metrics_are_shown_to_four_decimals_or_digits_the_loss_first():
    found = metrics_shown({"b": 0.001, "a": 0.00099994, "skipped": 3.0, "loss": 12.34567, "c": 0.0, "d": -1e-9})
    assert found == ["loss 12.3457", "a 9.999e-04", "b 0.0010", "c 0.0000", "d -1.000e-09"]


def test_an_evaluation_has_all_digits_for_programs_and_six_for_people():
    some = Evaluated({"loss": 1 / 3, "accuracy": 12345678.0}, partial=(2, 9))
    assert evaluation_line(7, {"loss": 1 / 3, "accuracy": 12345678.0}, "text") == (
        "evaluation at step 7: accuracy 1.23457e+07, loss 0.333333"
    )
    assert evaluation_line(7, some, "text").startswith(f"{some.title} at step 7: ")
    line = json.loads(evaluation_line(7, some, "json"))
    assert line.pop("time") > 1e9
    assert line == {
        "event": "evaluation",
        "step": 7,
        "metrics": {"loss": 1 / 3, "accuracy": 12345678.0},
        **some.batches,
    }
    assert '"metrics":{"loss":null,"a\\u007f":1}' in evaluation_line(7, {"loss": float("nan"), "a\x7f": 1}, "json")


def read(watched, clock, *counts, total):
    with watched("counting", total) as done:
        for seconds, count in counts:
            clock[0] += seconds
            done(count)


def test_reading_beside_training_is_shown_now_and_then_and_at_its_end(terminal):
    clock = [100.0]
    file, now = io.StringIO(), lambda: clock[0]
    counts = ((9.0, 1000), (1.0, 2000), (9.5, 3000), (0.5, 4000), (1.0, 5000))
    read(watch("plain", file, clock=now), clock, *counts, total=5000)
    read(watch("plain", file, 0.5, clock=now), clock, (0.5, 7), (0.25, 8), total=None)
    assert file.getvalue().splitlines() == [
        *("counting: 2,000 of 5,000 so far", "counting: 4,000 of 5,000 so far", "counting: 5,000 of 5,000"),
        *("counting: 7 so far", "counting: 8"),
    ]
    read(watch("off", silent := io.StringIO(), clock=now), clock, *counts, total=5000)
    assert silent.getvalue() == ""
    to, shown = terminal
    read(watch("auto", to, clock=now), clock, (0.125, 10), (0.125, 20), (0.125, 30), (0.125, 40), total=50)
    text = shown()
    assert [number for number in (10, 20, 30, 40) if f"{number} of 50" in text] == [20, 40]  # a fifth of a second
    assert without_commands(text)[-2] == "counting: 40 of 50"
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


class Notebook:
    """What `IPython` has that a bar uses: displays, each with what it was shown as, and the cell that is executed."""

    def __init__(self):
        self.cell, self.displays = 1, []
        self.display = types.SimpleNamespace(display=self._show)

    def get_ipython(self):
        return types.SimpleNamespace(execution_count=self.cell)

    def _show(self, bundle, raw, display_id):
        assert raw
        assert display_id
        self.displays.append(shown := [bundle])
        return types.SimpleNamespace(update=lambda bundle, raw: shown.append(bundle))


def test_a_cell_of_a_notebook_has_one_bar_and_lines_below_it(bound, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "IPython", notebook := Notebook())
    monkeypatch.setattr(progress, "Console", lambda: types.SimpleNamespace(is_jupyter=True))
    assert [progress.resolved_mode(mode, sys.stdout) for mode in ("auto", "bar", "plain", "off")] == [
        *("cell", "cell", "plain", "off")
    ]
    assert progress.resolved_mode("bar", io.StringIO()) == "bar"  # of another file
    bar = progress.CellBar(40)
    bar.draw(10, "step 10/40", "a<b")
    bar.draw(20, "step 20/40", "")
    notebook.cell = 2
    bar.draw(30, "step 30/40", "")
    progress.CellBar(None).draw(1, "step 1", "")
    bar.print("a line")
    assert [[each["text/plain"] for each in shown] for shown in notebook.displays] == [
        *(["step 10/40  a<b", "step 20/40  "], ["step 30/40  "], ["step 1  "])
    ]
    assert [shown[0]["text/html"] for shown in notebook.displays] == [
        '<progress value="10" max="40"></progress> <code>step 10/40  a&lt;b</code>',
        '<progress value="30" max="40"></progress> <code>step 30/40  </code>',
        "<code>step 1  </code>",
    ]
    assert capsys.readouterr().out == "a line\n"
    run(bound, [Evaluation(4), Progress("auto")], 4)
    assert notebook.displays[-1][-1]["text/plain"].startswith("step 4/4  loss ")
    assert capsys.readouterr().out.startswith("step 4/4  evaluation  loss ")
