"""The guide's hook of one's own (docs/monitoring.md), of twenty lines: it prints, stops the run, survives a restart."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from crankshaft.engine import loop
from crankshaft.engine.hooks import saving
from tests.engine.trainers import Squares
from tests.pages import ROOT, blocks

pytestmark = pytest.mark.thorough

POINTS = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)


@pytest.fixture
def budget():
    """The guide's class."""
    (text,) = (block.text for block in blocks(ROOT / "docs" / "monitoring.md") if block.title == "budget.py")
    assert len([line for line in text.splitlines() if line]) <= 20
    names: dict = {}
    exec(compile(text, "docs/monitoring.md", "exec"), names)
    return names["Budget"]


def test_a_hook_of_twenty_lines_prints_stops_the_run_and_goes_on_after_a_restart(bench, budget, tmp_path, capsys):
    """Each call of 2 steps takes half a second: 2.5 are spent in the sixth, the third after a restart."""
    steps, seconds = [], itertools.count(step=0.5)  # the clock is read before and after a call, and for each hook
    for until in (6, 20):
        made = bench(Squares(), (POINTS, POINTS[:, 0]), 16)
        hooks = [budget(seconds=2.5, every_steps=2)]
        saved = made.saves(tmp_path, hooks)
        run = loop.Loop(made.strategy, made.state, hooks, until, clock=lambda: next(seconds))
        saving.restore(saved, made.state, hooks, meter=run.meter)
        run.begin()
        run.train_to(until)
        run.end()
        steps.append((run.status.step, run.status.stop))
    assert steps == [(6, None), (12, "the budget is spent")]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"step {step}" for step in range(2, 14, 2)]
    assert all(line.endswith(", 64 examples/s") for line in lines)  # 32 in half a second
