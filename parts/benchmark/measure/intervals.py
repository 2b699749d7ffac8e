"""95 % intervals of a benchmark's rate, and of its ratio to another's, from timed calls. NumPy only.

Calls are not independent: a machine is slow for a while, then fast for a while. So the interval is that of batch means
(Schmeiser, 1982): the spread of the rates of few, long groups of neighbouring calls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

FEW_CALLS = 20
DRIFT = 0.05  # fraction of the whole rate by which drifted rounds differ
_MOST_GROUPS = 10
_NORMAL = 1.959964  # the normal distribution's quantile 0.975
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571)  # Student's t, 1 to 5 degrees of freedom


def interval(calls: Mapping[str, Sequence], lost_share: float = 0.0) -> list[float] | None:
    """Returns the 95 % interval of examples per second, [low, high]; None for a single call, which has no spread.

    Args:
      calls: columns as `parts.benchmark.measure.statistics.columns` returns them.
      lost_share: fraction of the machine that other processes used, 0 to 1; the interval's upper end is multiplied by
        1 / (1 - lost_share).
    """
    margins = log_margins(calls)
    if margins is None:
        return None
    rate, (below, above) = _rate(calls), margins
    return [rate * math.exp(-below), rate * math.exp(above) / (1 - lost_share)]


def compare(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compares rates of examples.

    Args:
      ours: our results, which have `calls`.
      theirs: as many results to compare with; those of the same index were measured one after the other.

    Returns:
      ratio: our rate divided by theirs, the geometric mean over pairs. interval: its 95 % interval, [low, high], see
      `ratio_interval`; None if a run was a single call. verdict: "faster" or "slower" if 1 is outside the interval,
      else "no difference can be shown". rounds: {ours, theirs, ratio} of each pair, in examples per second.
    """
    ratio, interval = ratio_interval(list(zip(ours, theirs, strict=True)))
    verdict = "no difference can be shown"
    if interval and interval[0] > 1:
        verdict = "faster"
    elif interval and interval[1] < 1:
        verdict = "slower"
    rates = [[result["examples_per_sec"] for result in side] for side in (ours, theirs)]
    rounds = [{"ours": a, "theirs": b, "ratio": a / b} for a, b in zip(*rates, strict=True)]
    return {"ratio": ratio, "interval": interval, "verdict": verdict, "rounds": rounds}


def ratio_interval(pairs: Sequence[tuple[Mapping, Mapping]]) -> tuple[float, list[float] | None]:
    """Returns the ratio of our rate to theirs, and its 95 % interval; None if a run had a single call.

    Args:
      pairs: (ours, theirs), results with `calls` and `noise`. Both runs' margins add up as squares do (Zou & Donner,
        2008). For several pairs, measured in turn, the ratio is the geometric mean, and its interval also includes that
        of Student's t over the pairs' ratios, since drift between turns shows only there. Load of other processes
        widens it as in `interval`, each end by its own run's fraction; for pairs, by their difference.
    """
    logs = [math.log(_rate(ours["calls"]) / _rate(theirs["calls"])) for ours, theirs in pairs]
    ratio = math.exp(np.mean(logs))
    margins = [margin for pair in pairs for result in pair if (margin := log_margins(result["calls"]))]
    if len(margins) < 2 * len(pairs):
        return ratio, None
    # A ratio's lower margin comes from our lower one and their upper one.
    both = list(zip(margins[::2], margins[1::2], strict=True))
    below, above = (
        math.sqrt(sum(ours[end] ** 2 + theirs[1 - end] ** 2 for ours, theirs in both)) / len(pairs) for end in (0, 1)
    )
    if len(logs) > 1:
        error = student_t(len(logs) - 1) * np.std(logs, ddof=1) / math.sqrt(len(logs))
        below, above = max(below, error), max(above, error)
    lost = np.array([[(result.get("noise") or {}).get("lost_share", 0.0) for result in pair] for pair in pairs])
    if len(logs) > 1:
        lost = np.maximum(0.0, lost - lost[:, ::-1])
    ours_lost, theirs_lost = np.exp(np.mean(np.log(1 - lost), axis=0))
    return ratio, [float(ratio * np.exp(-below) * theirs_lost), float(ratio * np.exp(above) / ours_lost)]


def log_margins(calls: Mapping[str, Sequence]) -> tuple[float, float] | None:
    """Returns the distances of the interval's ends from the rate, as logarithms; None for a single call.

    Student's t over the rates of at most ten consecutive groups of calls; if the rate has drifted, the interval
    includes each round's rate (see `round_rates`).
    """
    count = len(calls["seconds"])
    if count < 2:
        return None
    groups = min(count, _MOST_GROUPS)
    logs = np.log(_rates(calls, np.arange(count) * groups // count))
    margin = student_t(groups - 1) * float(np.std(logs, ddof=1)) / math.sqrt(groups)
    rates, rate = round_rates(calls), _rate(calls)
    if has_drifted(rates, rate):
        return max(margin, math.log(rate / min(rates))), max(margin, math.log(max(rates) / rate))
    return margin, margin


def round_rates(calls: Mapping[str, Sequence]) -> list[float]:
    """Returns examples per second of each round; for a single round, of each half of its calls."""
    number = np.asarray(calls["round"])
    if len(set(calls["round"])) == 1:
        number = np.arange(len(number)) * 2 // len(number)
    return _rates(calls, number)


def _rates(calls: Mapping[str, Sequence], groups: np.ndarray) -> list[float]:
    """Computes examples per second of each group of calls, given each call's group."""
    examples, seconds = np.asarray(calls["examples"], float), np.asarray(calls["seconds"], float)
    return [float(examples[groups == n].sum() / seconds[groups == n].sum()) for n in sorted(set(groups.tolist()))]


def has_drifted(rates: Sequence[float], rate: float) -> bool:
    """Returns whether the rounds' rates differ by more than a fraction `DRIFT` of the whole rate."""
    return max(rates) - min(rates) > DRIFT * rate


def student_t(freedom: int) -> float:
    """Returns Student's t quantile 0.975 of `freedom` degrees of freedom.

    Abramowitz & Stegun, 1964, 26.7.5, from 6 on.
    """
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z = _NORMAL
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def _rate(calls: Mapping[str, Sequence]) -> float:
    return math.fsum(calls["examples"]) / math.fsum(calls["seconds"])
