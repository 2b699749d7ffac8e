"""Times checkpoints alone: how fast they are written and read back, and what training loses meanwhile. Host code."""

from __future__ import annotations

import statistics
import time

from ....engine.checkpoints import Checkpoints, Writer
from ....engine.state import TrainState
from . import parts, rounds

_REPEATS = 3
_WRITES = 2.0  # steps are observed for so many times as long as the last write,
_MOST_SECONDS = 5.0  # but no longer than this


def checkpoint(strategy, state: TrainState, part: parts.Part, folder: str, clock=time.perf_counter) -> dict:
    """Writes and restores a run's checkpoint, and trains while one is written.

    Args:
      strategy: of the run; left bound to `part`.
      state: what is saved; its step goes on.
      part: what goes on meanwhile.
      folder: an empty one of the chief's, on the disk that is meant; where parts of variables are cut over several
        processes, all of them see it.
      clock: returns seconds.

    Returns:
      Medians over `repeats`, whose own figures are in `samples`: mb: a checkpoint's files, in 2**20 bytes; write_ms,
      write_mb_per_sec: until they are on the disk; restore_ms, restore_mb_per_sec: verified and read; blocked_ms:
      until training may go on; stall_ms: how much longer the steps beside a write took than as many before it,
      blocked_ms included: about 0 if a write costs training nothing. seconds: all of it.
    """
    began = clock()
    checkpoints = Checkpoints(folder, state.checkpoint, keep=1, about={}, writer=Writer(strategy.host, "benchmark"))
    bare = parts.timed(strategy, state, {"bare": part}, 0.3, clock)["bare"]
    samples = []
    for _ in range(_REPEATS):
        written = _seconds(clock, lambda: checkpoints.save(state.step, state.host_state(), wait=True, force=True))
        manifest = checkpoints.latest() if strategy.is_chief else None
        restored = _seconds(clock, lambda: manifest and checkpoints.restore(manifest))  # noqa: B023
        seconds = min(_WRITES * written, _MOST_SECONDS)
        steps = strategy.exchange(max(1, round(1e3 * seconds / bare["ms_per_step"])))[0]
        before = _steps_seconds(strategy, state, steps, clock)
        blocked = _seconds(clock, lambda: checkpoints.save(state.step, state.host_state(), force=True))
        beside = _steps_seconds(strategy, state, steps, clock)
        checkpoints.wait()
        size = sum(each["bytes"] for each in manifest.files.values()) / 2**20 if manifest else 0.0
        samples.append(
            {
                "mb": size,
                "write_ms": 1e3 * written,
                "restore_ms": 1e3 * restored,
                "write_mb_per_sec": size / written,
                "restore_mb_per_sec": size / restored,
                "blocked_ms": 1e3 * blocked,
                "stall_ms": 1e3 * (blocked + beside - before),
            }
        )
    medians = {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}
    return {"seconds": clock() - began, "repeats": _REPEATS, **medians, "samples": samples}


def _seconds(clock, act) -> float:
    before = clock()
    act()
    return clock() - before


def _steps_seconds(strategy, state: TrainState, steps: int, clock) -> float:
    return sum(call.seconds for call in rounds.timed_round(strategy, state, steps, clock)[0])
