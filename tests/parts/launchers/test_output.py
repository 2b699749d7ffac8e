"""What a cluster's tasks print acts on a terminal by its colours alone."""

import os
import selectors

import pytest

from crankshaft.parts.launchers import output
from tests.limits import files_no_larger_than


@pytest.mark.holds("Nothing that arrives")
@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        (b"plain", b"plain"),
        (b"\x1b[31mred\x1b[0m", b"\x1b[31mred\x1b[0m"),
        (b"\x1b[38;5;208morange", b"\x1b[38;5;208morange\x1b[0m"),
        (b"\x1b[1;31mred\x1b[m", b"\x1b[1;31mred\x1b[m\x1b[0m"),
        (b"\x1b[8mhidden", b"\\x1b[8mhidden"),
        (b"\x1b[38;2;1;2;3;08m\x1b[6m", b"\\x1b[38;2;1;2;3;08m\\x1b[6m"),
        (b"a\tb", b"a\tb"),
        ("grün \u2713".encode(), "grün \u2713".encode()),
        (b"latin-1 \xe4", b"latin-1 \xe4"),
        (b"\x1b]0;title\x07", b"\\x1b]0;title\\x07"),
        (b"\x1b[2J\x1b[1;1H", b"\\x1b[2J\\x1b[1;1H"),
        (b"\x1b[31\x1b[0m", b"\\x1b[31\x1b[0m"),
        (b"\x08\x7f\x00", b"\\x08\\x7f\\x00"),
        (b"\x9b2J", b"\\udc9b2J"),
        ("\x9b2J".encode(), b"\\x9b2J"),
        ("\u202etxt".encode(), b"\\u202etxt"),
    ],
)
def test_of_commands_to_a_terminal_colours_alone_pass(printed, shown):
    assert output.without_controls(printed) == shown


def test_last_lines_have_no_commands_at_all():
    assert output.last_lines(b"\x1b[31mred\x1b[0m\x07\n" + "\x9b2J".encode()) == ("red", "2J")


def test_a_disk_that_is_full_for_a_while_leaves_a_gap_in_a_log_and_a_line(tmp_path):
    shown = os.open(os.devnull, os.O_WRONLY)
    with open(tmp_path / "log", "ab", buffering=0) as log, selectors.DefaultSelector() as selector:
        sink, task = output.Sink(shown, selector, False), output.TaskOutput("worker 0", "32", log)
        task.show([b"first"], sink)
        with files_no_larger_than(10):  # room for a part of the next
            task.show([b"second"], sink)
            task.show([b"third", b"fourth"], sink)
        task.show([b"fifth"], sink)
        task.show([b"sixth"], sink)
    os.close(shown)
    text = (tmp_path / "log").read_text()
    assert text == "first\n=== 3 lines missing: File too large ===\nfifth\nsixth\n"


def test_what_a_task_prints_acts_on_no_terminal_that_shows_its_log(tmp_path):
    shown = os.open(os.devnull, os.O_WRONLY)
    with open(tmp_path / "log", "ab", buffering=0) as log, selectors.DefaultSelector() as selector:
        task = output.TaskOutput("worker 0", "32", log)
        task.show([b"\x1b[31mred\x1b[0m \x1b[2J"], output.Sink(shown, selector, False))
    os.close(shown)
    assert (tmp_path / "log").read_text() == "\x1b[31mred\x1b[0m \\x1b[2J\n"
