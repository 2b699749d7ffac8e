"""A classifier's evaluation by class: the confusion matrix, what is computed of it, and a picture of it. Host code."""

from __future__ import annotations

from typing import Any

import numpy as np

_PIXELS = 400  # of a picture's side, about
_LOW, _HIGH = np.array([255, 255, 255]), np.array([8, 48, 107])  # white to dark blue


def report(confusion: np.ndarray) -> dict[str, Any]:
    """Returns what a confusion matrix [classes, classes], of labels by predictions, says of each class. Plain JSON.

    That is the `matrix` itself, and by class `precision`, the share of right ones among those predicted as it,
    `recall`, the share of those of it that are found, `f1`, the harmonic mean of both, and `support`, how many are of
    it. As in scikit-learn 0 / 0 is 0: the precision of a class that is never predicted, the recall of one that does
    not occur.

    Example:
      >>> report(np.array([[3, 1], [0, 0]]))["recall"]
      [0.75, 0.0]
    """
    right = np.diagonal(confusion)
    predicted, support = confusion.sum(0), confusion.sum(1)
    shares = {"precision": (right, predicted), "recall": (right, support), "f1": (2 * right, predicted + support)}
    return {
        "matrix": confusion.tolist(),
        **{name: np.divide(a, b, out=np.zeros(len(a)), where=b > 0).tolist() for name, (a, b) in shares.items()},
        "support": support.tolist(),
    }


def picture(confusion: np.ndarray) -> np.ndarray:
    """Samples a confusion matrix: [pixels, pixels, 3] uint8, labels downwards, predictions to the right.

    A cell is the darker the larger its share of the examples of its label.
    """
    shares = confusion / np.maximum(confusion.sum(1, keepdims=True), 1)
    cells = (_LOW + shares[..., np.newaxis] * (_HIGH - _LOW)).astype(np.uint8)
    side = max(3, _PIXELS // len(confusion))
    drawn = cells.repeat(side, 0).repeat(side, 1)
    drawn[::side] = drawn[:, ::side] = 200  # lines between cells
    return drawn
