"""A planted logistic model of clicks on ids with a power law, to sample from and to compare with.

NumPy only.
"""

import numpy as np

from .philox import mix

_SPREAD = np.sqrt(12.0)  # turns an even sample of variance 1/12 into one of variance 1


def power_law_ids(evens: np.ndarray, rows, exponent: float) -> np.ndarray:
    """Turns float64 uniform samples in [0, 1) into int64 ids 1..rows-1: id k about as often as k**-exponent.

    Inverts the continuous power law on [1, rows) and rounds down, which needs no table, however many rows there are.
    `rows` may be an array that broadcasts against `evens`.
    """
    if exponent == 1:
        sampled = np.power(np.asarray(rows, np.float64), evens)
    else:
        power = 1 - exponent
        sampled = (1 + evens * (np.power(np.asarray(rows, np.float64), power) - 1)) ** (1 / power)
    # Rounding may take a sample to either end.
    return np.clip(sampled.astype(np.int64), 1, np.asarray(rows) - 1)


def effects(seed: int, ids: np.ndarray) -> np.ndarray:
    """Returns the planted model's float64 weights of ids [N, columns], with mean 0 and variance 1 over ids.

    A weight is a function of the seed, the column and the id, so a table of any size needs no memory.
    """
    key = mix(np.array(seed % 2**64, np.uint64).reshape(1)) + np.arange(ids.shape[1], dtype=np.uint64)
    mixed = mix(mix(key) + ids.astype(np.uint64))
    return _SPREAD * ((mixed >> np.uint64(11)) * 2.0**-53 - 0.5)


def clicks(evens: np.ndarray, logits: np.ndarray, noise: float) -> np.ndarray:
    """Samples float32 labels 0 or 1: 1 at the logits' odds, but the fraction `noise` of them by a fair coin."""
    probabilities = noise / 2 + (1 - noise) / (1 + np.exp(-logits))
    return (evens < probabilities).astype(np.float32)


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Computes the area under the ROC curve: how often a click scores above a non-click; equal scores count half.

    Uses ranks (Mann, Whitney 1947); NaN where all labels are equal.
    """
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    clicked = labels > 0
    positives, negatives = int(clicked.sum()), int((~clicked).sum())
    if not positives or not negatives:
        return float("nan")
    return float((ranks[clicked].sum() - positives * (positives + 1) / 2) / (positives * negatives))
