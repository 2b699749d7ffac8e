"""Pauses of a process, by clocks that the test moves."""

from __future__ import annotations

import pytest

from crankshaft.engine.machine.pauses import Pauses


class Machine:
    """Wall and CPU time. `run` looks twice a second, as the thread does."""

    def __init__(self):
        self.wall = self.cpu = 100.0
        self.pauses = Pauses(lambda: self.wall, lambda: self.cpu)

    def run(self, seconds: float, cpus: float) -> None:
        for _ in range(round(2 * seconds)):
            self.wall, self.cpu = self.wall + 0.5, self.cpu + 0.5 * cpus
            self.pauses.check()


@pytest.mark.parametrize("cpus", [0.01, 1.0, 16.0])
def test_a_process_that_stood_still_has_paused_and_its_clock_too(cpus):
    machine = Machine()
    machine.run(5, cpus)
    before = machine.pauses.clock()
    machine.wall, machine.cpu = machine.wall + 0.2 + 30.0, machine.cpu + 0.2 * cpus
    after = machine.pauses.clock()
    assert 0 <= after - before < 1
    assert machine.pauses.seconds == pytest.approx(30, abs=0.5)
    machine.run(10, cpus)
    assert machine.pauses.clock() - after == pytest.approx(10)


def test_a_thread_that_could_not_look_while_the_process_computed_is_no_pause():
    machine = Machine()
    machine.run(5, 2.0)
    machine.wall, machine.cpu = machine.wall + 30, machine.cpu + 30
    machine.pauses.check()
    assert machine.pauses.seconds == 0


def test_nothing_is_a_pause_where_no_thread_looks():
    machine = Machine()
    before = machine.pauses.clock()
    machine.wall += 30
    assert machine.pauses.clock() - before == 30
