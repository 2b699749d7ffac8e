"""The number of steps per compiled call, and how far the host may run ahead of the devices.

Few enough steps to respond to a signal soon, enough to hide the call's own cost. One call is queued behind the running
one: the device never waits for the host, and the time between calls is the device's own.
"""

from __future__ import annotations

import math
import time

# Calls of several workers end, and leases of servers begin and end, by messages. Over a slow link, calls of 0.25 s
# would be single steps, and spend most of their time on these. So a call lasts until they take a tenth as long as its
# steps, but no longer for it than 4 s: a signal is answered between calls.
_OVERHEAD = 0.1
_LONGEST_SECONDS = 4.0
ASSIGN_SECONDS = 3e-3  # of the one coordinator, per lease; 2.3 ms with 8 workers, 4.1 with 256: benchmarks.leases
_LEASE_SECONDS = 0.25
_WORKERS_AT_THAT = 8


def lease_seconds(workers: int) -> float:
    """Returns how long a lease is to last: longer with many workers, as the one coordinator takes all leases back."""
    return _LEASE_SECONDS * max(1.0, workers / _WORKERS_AT_THAT)


def lease_steps(left: int, workers: int, most: int, step_seconds: float, assign_seconds: float = ASSIGN_SECONDS) -> int:
    """Returns the number of steps of the next lease, at most `most`, if `left` steps remain until all must be complete.

    The shares become smaller, so that no worker delays the end for long. But if the one coordinator assigns the rest as
    n leases of equal length, they end after about n * assign_seconds + left / n * step_seconds: smaller ones than those
    for which this is least would end later.

    Args:
      left: number of steps that remain.
      workers: number of workers that run leases.
      most: the largest number of steps of a lease.
      step_seconds: duration of a step on a worker; 0 if unknown.
      assign_seconds: time that the coordinator takes to assign a lease.
    """
    quickest = math.sqrt(left * assign_seconds / step_seconds) if step_seconds else 0.0
    return min(most, left, math.ceil(max(left / workers, quickest)))


class Pace:
    """Fits calls of the inner loop to a duration. Changes no number: a loop may be divided anywhere.

    Args:
      steps_per_loop: a fixed number of steps, or 0 to fit them.
      sync_period_steps: a call that would come near a multiple of it, or pass one, ends there; a run can stop only
        there, and at a step at which a hook is due.
      target_seconds: the intended duration. A call costs 1 to 3 ms: the host's Python with cold caches, overlap lost at
        its ends, and with several workers the wait for the slowest.
      clock: returns the time in seconds; for tests.

    Attributes:
      steps: approximate number of steps of the next call. Calls divide the steps up to the next due one evenly, as far
        as sync periods allow.
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
        self._clock = clock
        self._calls = 0
        self._before = None  # the result of the previous call, which may still be running

    def run(self, loop, step: int, limit: int, *loop_inputs):
        """Calls loop(step, at most `limit` steps, *loop_inputs); returns its result. Something is due after `limit`."""
        before = self._clock()
        result = loop(step, self._steps_from(step, loop.reach(step, limit), limit), *loop_inputs, due=step + limit)
        step_seconds = None  # without what a call takes beside them, where workers measure it
        if self._before is not None:
            self._before.sums.read()
            step_seconds = self._before.step_seconds
        self._before = result
        seconds = self._clock() - before
        self._calls += 1
        # A much shorter call than intended is no evidence, unless it took too long; the first one compiles.
        is_reliable = 2 * result.steps >= self.steps or (result.steps > 1 and seconds > self._target_seconds)
        if self._calls > 1 and is_reliable:
            overhead = 0.0
            if step_seconds is not None:  # to wait for data takes the longer the more steps there are
                overhead = max(0.0, seconds - result.steps * step_seconds - result.input_seconds)
            self.fit(result.steps, seconds - overhead, overhead)
        return result

    def fit(self, steps: float, seconds: float, overhead_seconds: float = 0.0) -> None:
        """Fits `steps` to the target; at most to 8 times as many. A fixed number does not change.

        Args:
          steps: number of steps of a call.
          seconds: duration of the call's steps.
          overhead_seconds: time that the call takes beside its steps, whatever their number.
        """
        self.step_seconds = seconds / steps
        if not self._fixed:
            target = max(self._target_seconds - overhead_seconds, min(overhead_seconds / _OVERHEAD, _LONGEST_SECONDS))
            wanted = steps * target / max(seconds, 1e-6)
            self.steps = max(1, min(round(wanted), 8 * self.steps))

    def _steps_from(self, step: int, left: int, limit: int) -> int:
        steps = min(left, self._fixed or math.ceil(left / max(1, round(left / self.steps))))
        if steps == limit:
            return limit
        end = round((step + steps) / self._sync_period_steps) * self._sync_period_steps
        if end > step + (steps if self._fixed else min(left, 2 * steps)):
            end -= self._sync_period_steps
        return end - step if end > step else steps
