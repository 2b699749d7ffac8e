"""What is printed goes where the program's streams go, whatever these are by then."""

import ast
import errno
import io
import json
import os
import pty
import sys

import pytest
import tensorflow as tf

from crankshaft.engine import logging
from crankshaft.runner import failures, progress
from crankshaft.runner import terminal as terminals
from crankshaft.runner.command_line import help
from crankshaft.runner.host import streams
from crankshaft.runner.host.isolation import Isolation
from tests.processes import ROOT


@pytest.mark.holds("Nothing that arrives")
def test_what_is_printed_acts_on_no_terminal(tmp_path, terminal):
    """A class's name, for example, which is from a file."""
    file, read = terminal
    with open(tmp_path / "out", "w") as out:
        for to in (file, out):
            print(terminals.fitted("cat\x1b]52;c;ZXZpbA==\x07 0.5\r\n\tdog \x9b2J 0.25", to), file=to)
    for text in (read(), (tmp_path / "out").read_text()):
        assert "0.5" in text
        assert "dog" in text
        assert not set("\x1b\x07\x9b") & set(text)


@pytest.mark.holds("A line break in a name")
def test_a_name_with_a_line_break_makes_no_line_of_its_own(tmp_path, monkeypatch, terminal):
    name = "dog\nevaluation at step 9: accuracy 1\x1b[2J\x7f"
    file, read = terminal
    monkeypatch.setattr(sys, "stderr", file)
    failures.print_line(f"{name} is read")
    record = logging.logger.makeRecord("crankshaft", 30, "f", 1, "%s is read", (name,), None)
    assert logging.logger.filter(record)
    assert record.getMessage() == r"dog\nevaluation at step 9: accuracy 1\x1b[2J\x7f is read"
    bar = progress.Bar(file, "step 1/9", 9)
    bar.print(name)
    bar.close()
    progress.CellBar(9).print(name)
    with progress.watch("plain", file)(name, 3) as done:
        done(3)
    assert not [line for line in read().splitlines() if line.startswith("evaluation")]
    line = progress.evaluation_line(9, {name: 0.5}, "json")
    assert json.loads(terminals.fitted(line, io.StringIO()))["metrics"] == {name: 0.5}


def test_each_print_escapes_what_may_be_from_a_file():
    """Those beside: text of this package alone, figures, or what a program has generated or drawn for a terminal."""
    own = {"parts/clusters/arrival.py", "runner/command_line/help.py", "parts/dashboard/metrics.py"}
    own |= {"parts/dashboard/server.py", "runner/host/exits.py", "parts/plan/main.py", "runner/progress.py"}
    own |= {"launch/composition/open_run.py", "runner/modes/generate.py"}
    missed = []
    folders = ("engine", "input", "launch", "models", "parts", "runner")
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            is_print = isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "print"
            if is_print and str(path.relative_to(ROOT)) not in own:
                text = " ".join(map(ast.unparse, call.args))
                if not any(name in text for name in ("fitted(", "as_line(", "one_line(", "visible(")):
                    missed.append(f"{path}:{call.lineno}")
    assert not missed


def test_what_is_printed_to_a_terminal_that_is_gone_is_not_missed(monkeypatch):
    """Nobody is there to read it; a disk that is full is another matter."""
    ours, theirs = pty.openpty()
    os.close(ours)
    full = os.open("/dev/full", os.O_WRONLY)
    for descriptor, error in ((theirs, None), (full, errno.ENOSPC)):
        with open(descriptor, "w") as stream:
            monkeypatch.setattr(sys, "stderr", stream)
            assert failures.fail(7, "why it ends") == 7
            sturdy = streams.SturdyStream(stream)
            for _ in range(2):
                print("a line", file=sturdy, flush=True)
            assert (sturdy.lost and sturdy.lost.errno) == error


@pytest.mark.parametrize("columns", [1, 9, 15])
def test_a_terminal_of_few_columns_is_enough(terminal, monkeypatch, columns):
    file, read = terminal
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stdout", file)
    monkeypatch.setattr(sys, "stderr", file)
    failures.print_line("a long line of text")
    print(help.short_help_text("train", "Doc"), help.help_text("train", "Doc", [], []))
    model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(2)])
    progress.print_model_summary([model], file)
    assert os.environ["COLUMNS"] == str(columns)
    bar = progress.Bar(file, "step 1/9", 9)
    bar.draw(1, "2/9", "loss 0.5")
    bar.print("step 2/9  evaluation")
    bar.close()
    shown = read()
    for words in ("a long line of\r\ntext", "--run_dir", "Trainable params: 8", "evaluation"):
        assert words in shown


@pytest.mark.parametrize("errors", ["backslashreplace", "replace"])
def test_a_stream_may_be_redirected_from_a_file_into_a_pipe(errors, tmp_path, monkeypatch):
    """As while TensorFlow starts and standard output is a file, or in Ray's workers: no setting can be changed then."""
    with open(tmp_path / "out", "w", encoding="ascii", errors=errors) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        stream.write("\u732b")
        stream.flush()
        reads, writes = os.pipe()
        try:
            before = os.dup(stream.fileno())
            os.dup2(writes, stream.fileno())
            with Isolation().entered():
                pass
            os.dup2(before, stream.fileno())
        finally:
            for each in (reads, writes, before):
                os.close(each)
        assert stream.errors == errors
    assert (tmp_path / "out").read_text(encoding="ascii") == {"backslashreplace": "\\u732b", "replace": "?"}[errors]
