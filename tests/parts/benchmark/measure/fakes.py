"""Stands for a strategy, its program and its clock, where only what is timed and when is looked at."""

from typing import NamedTuple

from crankshaft.engine.data.order import Order
from crankshaft.engine.metrics.pairs import Mean
from crankshaft.engine.strategies.loop_result import LoopResult


class Awaited:
    """Stands for the sums of a call that devices are still at work on: reading takes what they still need."""

    def __init__(self, wait=lambda: None, loss=0.5):
        self.reads = 0
        self._wait = wait
        self._loss = loss

    def read(self):
        self.reads += 1
        self._wait()
        return {"loss": Mean(self._loss * 8, 8.0), "unseen": Mean(0.0, 0.0)}


class Feed(NamedTuple):
    order: Order
    compilable: bool = True


class FakeProgram:
    step = 0
    feed: Feed

    def advance(self, steps):
        self.step += steps


class FakeStrategy:
    """Calls of given lengths, in steps, over and over; `work(steps)` is what each one takes."""

    in_step = True
    sync_period_steps = 1

    def __init__(self, program, lengths, work, *, examples=1 << 20, wait=lambda: None, input_seconds=0.0):
        program.feed = Feed(Order(examples, batch_size=8, block_steps=4))
        self.sums = []
        self.lengths = []
        self._ahead = list(lengths)
        self._work = work
        self._wait = wait
        self._input_seconds = input_seconds

    def run(self, program, limit):
        steps = min(limit, self._ahead.pop(0) if len(self._ahead) > 1 else self._ahead[0])
        self._work(steps)
        program.step += steps
        self.lengths.append(steps)
        self.sums.append(Awaited(self._wait))
        return LoopResult(self.sums[-1], steps, self._input_seconds)

    def exchange(self, value):
        return [value]


class Clock:
    now = 0.0

    def __call__(self):
        return self.now

    def advance(self, seconds):
        self.now += seconds
