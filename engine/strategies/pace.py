"""Chooses how many steps a call of the inner loop takes: few enough to answer a signal soon, enough to hide its cost.

One call is queued behind the running one, so the device never waits for the host, and the time between calls is the
device's own.
"""

from __future__ import annotations

import math
import time

from .loop_result import LoopResult

# Calls of several workers end, and leases of servers begin and end, by messages. Over a slow link, calls of 0.25 s
# would be single steps, and spend most of their time on these. So a call lasts until they take a tenth as long as its
# steps, but no longer for it than 4 s: a signal is answered between calls.
_OVERHEAD = 0.1
_LONGEST_SECONDS = 4.0


class Pace:
    """Fits calls of the inner loop to a duration. Changes no number: a loop may be divided anywhere.

    Args:
      steps_per_loop: a fixed number of steps, or 0 to fit them.
      sync_period_steps: a call that would come near a multiple of it, or pass one, ends there; a run can stop only
        there, and at a step at which a hook is due.
      target_seconds: the intended duration. A call costs 1 to 3 ms: the host's Python with cold caches, overlap lost at
        its ends, and with several workers the wait for the slowest.

    Attributes:
      steps: approximate number for the next call; calls divide those to the next due one evenly, if syncs allow.
      step_seconds: duration of a step in the newest call that the pace was fitted to; 0 before any.
    """

    def __init__(
        self,
        steps_per_loop: int = 0,
        sync_period_steps: int = 1,
        target_seconds: float = 0.25,
        clock=time.perf_counter,
    ):
        self.steps = steps_per_loop or 1
        self.step_seconds = 0.0
        self._fixed = steps_per_loop
        self._target_seconds = target_seconds
        self._sync_period_steps = sync_period_steps
        self.clock = clock
        self._calls = 0
        self._before: LoopResult | None = None  # of the previous call, which may still be running

    def next_steps(self, step: int, left: int, limit: int) -> int:
        """Returns how many of the `left` steps from `step` on, which a call can take, the next one takes.

        Something is due after `limit` steps.
        """
        # Calls of equal length, so that the last one before something due is not a short one.
        steps = min(left, self._fixed or math.ceil(left / max(1, round(left / self.steps))))
        if steps == limit:
            return limit
        end = round((step + steps) / self._sync_period_steps) * self._sync_period_steps
        if end > step + (steps if self._fixed else min(left, 2 * steps)):
            end -= self._sync_period_steps
        return end - step if end > step else steps

    def add_call(self, result: LoopResult, began: float) -> None:
        """Waits for the call before this one, and fits `steps` to the time since this one `began`, by the clock."""
        step_seconds = None  # without what a call takes beside them, where workers measure it
        if self._before is not None:
            self._before.sums.read()
            step_seconds = self._before.step_seconds
        self._before = result
        seconds = self.clock() - began
        self._calls += 1
        # A much shorter call than intended is no evidence, unless it took too long; the first one compiles.
        is_reliable = 2 * result.steps >= self.steps or (result.steps > 1 and seconds > self._target_seconds)
        if self._calls > 1 and is_reliable:
            overhead = 0.0
            if step_seconds is not None:  # to wait for data takes the longer the more steps there are
                overhead = max(0.0, seconds - result.steps * step_seconds - result.input_seconds)
            self.fit(result.steps, seconds - overhead, overhead)

    def fit(self, steps: float, seconds: float, overhead_seconds: float = 0.0) -> None:
        """Fits `steps` to the target; at most to 8 times as many. A fixed number does not change.

        Args:
          seconds: duration of the call's steps.
          overhead_seconds: time that the call takes beside its steps, whatever their number.
        """
        self.step_seconds = seconds / steps
        if not self._fixed:
            target = max(self._target_seconds - overhead_seconds, min(overhead_seconds / _OVERHEAD, _LONGEST_SECONDS))
            wanted = steps * target / max(seconds, 1e-6)
            self.steps = max(1, min(round(wanted), 8 * self.steps))
