"""At which step a call of an open run ends, and which signal has ended it."""

from __future__ import annotations

import math
import types

import numpy as np
import pytest

from crankshaft.engine.meter import Totals
from crankshaft.engine.strategies.base import Stop
from crankshaft.launch.composition import training
from crankshaft.runner.failures import UsageError


class Open:
    """An open run of 10 steps an epoch, and the steps to which it was trained."""

    def __init__(self, step=0, last=None, period=1, stop=None, hosts=1):
        self.step, self.train_steps, self.stop, self.is_ready, self.ends = step, last, stop, True, []
        feed = types.SimpleNamespace(order=types.SimpleNamespace(steps_per_epoch=10))
        self.strategy = types.SimpleNamespace(
            sync_period_steps=period, training=types.SimpleNamespace(feed=feed), num_hosts=hosts
        )
        status = types.SimpleNamespace(stop=None, agreed_stop=None)
        self.loop = types.SimpleNamespace(train_to=self.train_to, status=status)
        self.stop_request = types.SimpleNamespace(reason=None)

    def train_to(self, until):
        self.ends.append(until)
        return Totals()


@pytest.mark.parametrize(
    ("run", "asked", "end"),
    [
        (Open(), {"steps": 5}, 5),
        (Open(3), {"steps": np.int64(5)}, 8),
        (Open(3, 6), {"steps": 5}, 6),
        (Open(3, 9), {"steps": 5}, 8),
        (Open(3), {"epochs": 0.25}, 6),
        (Open(3), {"epochs": 1.1}, 14),
        (Open(), {"epochs": 2}, 20),
        (Open(3, 7), {}, 7),
        (Open(period=4), {"steps": 8}, 8),
        (Open(period=4, last=6), {"steps": 8}, 6),
        (Open(2, period=4), {"steps": 2}, 4),
    ],
)
def test_a_call_ends_after_its_steps_or_epochs_or_with_the_run(run, asked, end):
    assert {**training.train(run, asked.get("steps"), asked.get("epochs"))} == {}
    assert run.ends == [end]


@pytest.mark.parametrize(
    ("run", "asked", "line"),
    [
        (Open(), {}, r"train\(\): how long\? give steps or epochs, or open the run with train_steps$"),
        (Open(), {"steps": 1, "epochs": 2}, r"train\(steps=1, epochs=2\): both are given; use one of them$"),
        *(
            (Open(), {"steps": wrong}, rf"train\(steps={wrong!r}\): give a number above 0, a whole one of steps$")
            for wrong in (0, -1, 1.5, True, "3")
        ),
        *(
            (Open(), {"epochs": wrong}, r"train\(epochs=.*\): give a number above 0")
            for wrong in (0.0, math.inf, math.nan)
        ),
        (
            Open(period=4),
            {"steps": 6},
            r"train\(\): step 6 is between two syncs, which are 4 steps apart \(sync_every_st",
        ),
        (Open(period=4, last=9), {"steps": 6}, r"train\(\): step 6 is between two syncs"),
        (Open(stop="enough"), {"steps": 1}, r"train\(\): the run has stopped \(enough\); look at run.stop before each"),
    ],
)
def test_a_length_that_is_none_is_one_line_and_nothing_is_trained(run, asked, line):
    with pytest.raises(UsageError, match=line):
        training.train(run, asked.get("steps"), asked.get("epochs"))
    assert run.ends == []


@pytest.mark.parametrize(
    ("agreed", "requested", "hosts", "found", "is_kept"),
    [
        (None, None, 1, None, False),
        (None, "SIGTERM", 1, "SIGTERM", True),
        (None, "enough", 1, None, True),
        (None, "SIGINT", 1, "SIGINT", False),  # after Ctrl-C the program goes on
        (Stop("SIGINT"), None, 1, "SIGINT", False),
        (Stop("SIGINT"), None, 2, "SIGINT", True),
        (Stop("SIGTERM"), "SIGINT", 1, "SIGTERM", True),
    ],
)
def test_a_signal_ends_a_call_and_all_but_ctrl_c_the_run(agreed, requested, hosts, found, is_kept):
    run = Open(hosts=hosts)
    run.loop.status.agreed_stop, run.loop.status.stop = agreed, agreed and str(agreed)
    run.stop_request.reason = requested
    assert training.ending_signal(run) == found
    left = run.loop.status.agreed_stop, run.stop_request.reason
    assert left == ((agreed, requested) if is_kept else (None, None))
    if not is_kept:
        assert run.loop.status.stop is None
