"""Compares two benchmarks: which is faster, and how sure that is. Host code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .. import errors
from .measure import intervals


def compare(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compares rates of examples.

    Args:
      ours: results with `calls`.
      theirs: as many results; those of the same index were measured one after the other.

    Returns:
      ratio: our rate over theirs; of several pairs the geometric mean. interval: its 95 % interval, [low, high], see
      `measure.intervals.ratio_interval`; None where a run was a single call. verdict: "faster" or "slower" if
      1 is outside the interval, else "no difference can be shown". rounds: of each pair {ours, theirs, ratio}, in
      examples per second.
    """
    ratio, interval = intervals.ratio_interval(list(zip(ours, theirs, strict=True)))
    verdict = "no difference can be shown"
    if interval and interval[0] > 1:
        verdict = "faster"
    elif interval and interval[1] < 1:
        verdict = "slower"
    rates = [[each["examples_per_sec"] for each in side] for side in (ours, theirs)]
    rounds = [{"ours": a, "theirs": b, "ratio": a / b} for a, b in zip(*rates, strict=True)]
    return {"ratio": ratio, "interval": interval, "verdict": verdict, "rounds": rounds}


def exit_code(comparison: Mapping[str, Any], fail_below: float | None) -> int:
    """Returns `EXIT_SLOWER`, and prints why, if the ratio is shown to be below `fail_below`; else 0."""
    interval = comparison["interval"]
    if fail_below is None or interval is None or interval[1] >= fail_below:
        return 0
    return errors.fail(
        errors.EXIT_SLOWER,
        f"--fail_below={fail_below:g}: the rate is {comparison['ratio']:.3f} times the baseline's "
        f"({interval[0]:.3f} to {interval[1]:.3f}); find what made it slower, or measure a new baseline",
    )
