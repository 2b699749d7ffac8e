"""What each worker of a window is said to have done, of the rows that end its calls."""

from __future__ import annotations

import numpy as np
import pytest

from crankshaft.engine.meter import Segment, Totals
from crankshaft.engine.strategies.loop_result import WorkerFigures

NAMES = ["seconds", "input_seconds", "steps", "reduce_seconds", "gradient_norm"]


def taken(*calls):
    totals = Totals()
    for rows in calls:
        totals.add(Segment(0, workers=WorkerFigures(NAMES, np.asarray(rows))))
    return totals.workers()


def test_a_worker_s_times_are_a_step_s_and_its_norm_of_the_newest_call_that_has_one():
    looked = [[1.0, 0.0, 10, 0.5, 3.0], [1.0, 0.2, 10, 0.1, 4.0]]
    unseen = [[1.0, 0.0, 10, 0.5, 0.0], [1.0, 0.0, 10, 0.1, 0.0]]  # nobody looked at its last step
    first, second = taken(looked, unseen)
    assert first == pytest.approx(
        {"step_ms": 100, "own_ms": 50, "reduce_wait_ms": 50, "input_wait_ms": 0, "gradient_norm": 3}
    )
    assert (second["own_ms"], second["input_wait_ms"], second["gradient_norm"]) == pytest.approx((90, 10, 4))
    assert ["gradient_norm" in row for row in taken(unseen)] == [False, False]
    assert taken() == []
