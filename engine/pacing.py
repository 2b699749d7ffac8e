"""How many steps one compiled call takes, and how far the host may run ahead of the devices.

Few enough steps to answer a signal soon, enough to hide the call's own cost. One call is queued behind the one that
runs: the device never waits for the host, and the time from call to call is the device's own.
"""

from __future__ import annotations

import time


class Pace:
    """Fits calls of the inner loop to a length in seconds. Changes no number: a loop may be cut anywhere.

    Args:
      steps_per_loop: a fixed number of steps, or 0 to fit them.
      target_seconds: the length aimed at. A call costs about 1 ms of the host by itself (its caches are cold
        by then), so 0.1 s makes that 1 %.
      clock: seconds, for tests.

    Attributes:
      steps: how many the next call is to take at most.
      round_steps: where a call would go past a multiple of it, it ends at the last one.
    """

    def __init__(self, steps_per_loop: int = 0, target_seconds: float = 0.1, clock=time.perf_counter):
        self.steps = steps_per_loop or 1
        self.round_steps = 1
        self._fixed = steps_per_loop
        self._target_seconds = target_seconds
        self._clock = clock
        self._calls = 0
        self._before = None  # the result of the call before, which may still be at work

    def run(self, loop, step: int, limit: int, *told):
        """Calls loop(step, at most `limit` steps, *told) and returns its result. After `limit` something is due."""
        before = self._clock()
        steps = self._steps_from(step)
        result = loop(step, min(limit, steps), *told, due=step + limit)
        if self._before is not None:
            self._before.sums.read()
        self._before = result
        seconds = self._clock() - before
        self._calls += 1
        if not self._fixed and self._calls > 1 and result.steps == steps:  # the first call compiles
            wanted = steps * self._target_seconds / max(seconds, 1e-6)
            self.steps = max(1, min(round(wanted), 8 * self.steps))
        return result

    def _steps_from(self, step: int) -> int:
        end = (step + self.steps) // self.round_steps * self.round_steps
        return end - step if end > step else self.steps
