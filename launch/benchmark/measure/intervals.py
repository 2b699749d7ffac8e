"""95 % intervals of a benchmark's rate, and of its ratio to another's, from timed calls. Host code, NumPy only.

Calls are not independent: a machine is slow for a while, then fast for a while. So they are resampled not one by one
but in blocks of neighbours, the circular block bootstrap (Politis & Romano, 1992, after Künsch, 1989).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

FEW_CALLS = 20
DRIFT = 0.05  # rounds whose rates are this much of the whole rate apart have drifted
_REPLICATES = 2000
_NORMAL = 1.959964  # the normal distribution's quantile 0.975
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571)  # Student's, of 1 to 5 degrees of freedom


def interval(calls: Mapping[str, Sequence], lost_share: float = 0.0) -> list[float] | None:
    """Returns the 95 % interval of examples per second, [low, high]; None for a single call, which has no spread.

    Args:
      calls: columns as `launch.benchmark.measure.statistics.columns` returns them.
      lost_share: 0 to 1, the share of the machine that others used: without them the rate would be up to
        1 / (1 - lost_share) times as high, and so is the interval's upper end.
    """
    rates = resampled_rates(calls, seed=0)
    if rates is None:
        return None
    low, high = _interval(rates)
    return [low, high / (1 - lost_share)]


def compare(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compares rates of examples.

    Args:
      ours: results with `calls`.
      theirs: as many results; those of the same index were measured one after the other.

    Returns:
      ratio: our rate over theirs; of several pairs the geometric mean. interval: its 95 % interval, [low, high], see
      `ratio_interval`; None where a run was a single call. verdict: "faster" or "slower" if
      1 is outside the interval, else "no difference can be shown". rounds: of each pair {ours, theirs, ratio}, in
      examples per second.
    """
    ratio, interval = ratio_interval(list(zip(ours, theirs, strict=True)))
    verdict = "no difference can be shown"
    if interval and interval[0] > 1:
        verdict = "faster"
    elif interval and interval[1] < 1:
        verdict = "slower"
    rates = [[each["examples_per_sec"] for each in side] for side in (ours, theirs)]
    rounds = [{"ours": a, "theirs": b, "ratio": a / b} for a, b in zip(*rates, strict=True)]
    return {"ratio": ratio, "interval": interval, "verdict": verdict, "rounds": rounds}


def ratio_interval(pairs: Sequence[tuple[Mapping, Mapping]]) -> tuple[float, list[float] | None]:
    """Returns the ratio of our rate to theirs, and its 95 % interval; None if a run had a single call.

    Args:
      pairs: (ours, theirs), results with `calls` and `noise`. Of several, measured in turn, the ratio is the geometric
        mean, and its interval holds that of Student's t over the pairs' ratios too: what differs from turn to turn
        shows between pairs only. What others took of the machine widens it as in `interval`, either end by its own
        run's; in turns, by what one run lost more than the other.
    """
    logs = [math.log(_rate(ours["calls"]) / _rate(theirs["calls"])) for ours, theirs in pairs]
    ratio = math.exp(np.mean(logs))
    ratios = []
    for index, (ours, theirs) in enumerate(pairs):
        both = [resampled_rates(each["calls"], 2 * index + i) for i, each in enumerate((ours, theirs))]
        if both[0] is None or both[1] is None:
            return ratio, None
        ratios.append(np.log(both[0]) - np.log(both[1]))
    low, high = _interval(np.exp(np.mean(ratios, axis=0)))
    if len(logs) > 1:
        error = student_t(len(logs) - 1) * np.std(logs, ddof=1) / math.sqrt(len(logs))
        low, high = min(low, ratio * math.exp(-error)), max(high, ratio * math.exp(error))
    lost = np.array([[(each.get("noise") or {}).get("lost_share", 0.0) for each in pair] for pair in pairs])
    if len(logs) > 1:
        lost = np.maximum(0.0, lost - lost[:, ::-1])
    ours_lost, theirs_lost = np.exp(np.mean(np.log(1 - lost), axis=0))
    return ratio, [float(low * theirs_lost), float(high / ours_lost)]


def resampled_rates(calls: Mapping[str, Sequence], seed: int) -> np.ndarray | None:
    """Returns examples per second of resampled runs, [replicates]; None for a single call.

    Their distances from the measured rate are stretched (as logarithms, so that no rate falls below 0) by Student's t
    over the normal quantile, for the number of blocks, and, where the rate has drifted, until each part's rate (see
    `parts`) is within the middle 95 %.
    """
    examples, seconds = np.asarray(calls["examples"], float), np.asarray(calls["seconds"], float)
    count = len(seconds)
    if count < 2:
        return None
    rate = examples.sum() / seconds.sum()
    block = block_length(examples - rate * seconds)  # the rate's influence function, but for a factor
    blocks = -(-count // block)
    starts = np.random.default_rng(seed).integers(0, count, (_REPLICATES, blocks))
    # Sums over blocks from running sums; the last block is cut, so that a resampled run has as many calls.
    lengths = np.full(blocks, block)
    lengths[-1] = count - block * (blocks - 1)
    sums = [_running(column)[starts + lengths] - _running(column)[starts] for column in (examples, seconds)]
    logs = np.log(sums[0].sum(1) / sums[1].sum(1) / rate)
    stretch = student_t(blocks - 1) / _NORMAL
    rates = round_rates(calls)
    if has_drifted(rates, rate):
        low, high = np.quantile(logs, (0.025, 0.975))
        ends = [(math.log(min(rates) / rate), low), (math.log(max(rates) / rate), high)]
        stretch = max([stretch, *(wanted / end for wanted, end in ends if wanted * end > 0)])
    return rate * np.exp(stretch * logs)


def round_rates(calls: Mapping[str, Sequence]) -> list[float]:
    """Returns examples per second of each round; of a single round, of the two halves of its calls."""
    examples, seconds = np.asarray(calls["examples"], float), np.asarray(calls["seconds"], float)
    number = np.asarray(calls["round"])
    if len(set(calls["round"])) == 1:
        number = np.arange(len(seconds)) * 2 // len(seconds)
    return [float(examples[number == n].sum() / seconds[number == n].sum()) for n in sorted(set(number.tolist()))]


def has_drifted(rates: Sequence[float], rate: float) -> bool:
    """Returns whether the rounds' rates are further apart than `DRIFT` of the whole rate."""
    return max(rates) - min(rates) > DRIFT * rate


def block_length(values: np.ndarray) -> int:
    """Returns how many neighbours a block holds, for the mean of a series.

    As the series' autocorrelation requires (Politis & White, 2004, corrected by Patton, Politis & White, 2009, for the
    circular bootstrap), and between n^(1/3), the order that Hall, Horowitz & Jing (1995) find for a series of n, and n
    / 3, so that there are blocks to sample from.
    """
    count = len(values)
    most, least = max(1, count // 3), max(1, int(count ** (1 / 3) + 1e-9))
    centred = values - values.mean()
    window = max(5, math.ceil(math.sqrt(math.log10(count))))
    lags = min(count - 1, math.ceil(math.sqrt(count)) + window)
    covariance = np.array([centred[: count - lag] @ centred[lag:] for lag in range(lags + 1)]) / count
    if covariance[0] <= 1e-24 * np.mean(values**2) or lags < 1:
        return min(least, most)
    # Lags count up to the first after which all of a window are as small as chance makes them.
    small = np.abs(covariance[1:] / covariance[0]) < 2 * math.sqrt(math.log10(count) / count)
    last = next((lag for lag in range(lags) if small[lag : lag + window].all()), lags)
    reach = min(2 * last, lags)
    taper = np.minimum(1.0, 2 * (1 - np.arange(1, reach + 1) / max(1, reach)))
    both_sides = 2 * taper * covariance[1 : reach + 1]
    slope, spectrum = both_sides @ np.arange(1, reach + 1), covariance[0] + both_sides.sum()
    if spectrum <= 0:
        return min(least, most)
    wanted = (1.5 * (slope / spectrum) ** 2 * count) ** (1 / 3)
    return int(min(most, max(least, math.ceil(wanted))))


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


def _running(column: np.ndarray) -> np.ndarray:
    """Returns sums of the first 0, 1, 2, ... values of the column repeated twice, since blocks wrap around its end."""
    return np.concatenate([[0.0], np.cumsum(np.concatenate([column, column]))])


def _interval(values: np.ndarray) -> list[float]:
    return [float(end) for end in np.quantile(values, (0.025, 0.975))]
