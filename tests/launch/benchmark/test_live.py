"""What a person sees of a benchmark while it runs: in a pipe, and in a pseudo-terminal."""

import io
import re

import pytest

from crankshaft.launch.benchmark.live import Live

FIRST = {"steps": 1000, "wall_seconds": 0.5, "steps_per_sec": 2000.0, "examples_per_sec": 128_000.0}
SECOND = {"steps": 1000, "wall_seconds": 0.25, "steps_per_sec": 4000.0, "examples_per_sec": 256_000.0}


def watch(live):
    """Two rounds, each of which makes calls half a second apart."""
    with live:
        live.stage("warm-up")
        for done in ([], [FIRST]):
            live.watcher.at_round(done, 1000)
            for i in range(1, 6):
                if live.watcher.at_call:
                    live.watcher.at_call(200 * i, 0.5 * i)
        live.watcher.at_round([FIRST, SECOND], 1000)


def test_a_pipe_gets_a_line_a_round():
    file = io.StringIO()
    watch(Live("auto", 2, file))
    assert file.getvalue().splitlines() == [
        "warm-up",
        "round 1 of 2  1,000 steps in 0.50 s  2,000 steps/s  128,000 examples/s",
        "round 2 of 2  1,000 steps in 0.25 s  4,000 steps/s  256,000 examples/s",
    ]


def test_nobody_is_called_within_a_round_but_by_a_bar():
    assert Live("plain", 2, io.StringIO()).watcher.at_call is None
    assert Live("off", 2, io.StringIO()).watcher.at_call is None


def test_off_is_silent():
    file = io.StringIO()
    watch(Live("off", 2, file))
    assert file.getvalue() == ""


def test_a_terminal_gets_a_bar_drawn_once_a_second_with_the_rate_so_far(terminal):
    file, read = terminal
    watch(Live("auto", 2, file))
    drawn = re.findall(r"(warm-up|round \d of \d)[^\r\n]*?(?:\x1b\[0m) ([\w ,/.]*)", read())
    assert [text for text in drawn if text[1] != "starting"] == [
        ("warm-up", ""),
        ("round 1 of 2", ""),
        ("round 1 of 2", "400 steps/s  4s left"),
        ("round 1 of 2", "400 steps/s  3s left"),
        ("round 2 of 2", "2,000 steps/s  0s left"),
        ("round 2 of 2", "933.3 steps/s  1s left"),
        ("round 2 of 2", "720 steps/s  0s left"),
        ("round 2 of 2", "720 steps/s  0s left"),  # as it is closed
    ]


def test_the_bar_is_gone_and_the_cursor_back_at_the_end_and_after_an_exception(terminal):
    file, read = terminal

    def interrupted():
        with Live("bar", 2, file) as live:
            live.stage("warm-up")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    shown = read()
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    assert shown.endswith("\x1b[2K")  # the bar's line is cleared
