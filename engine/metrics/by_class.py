"""A classifier's evaluation by class: the confusion matrix, scores computed from it, and a picture."""

from __future__ import annotations

from typing import Any

import numpy as np

_PIXELS = 400  # approximate side of a picture
_LOW, _HIGH = np.array([255, 255, 255]), np.array([8, 48, 107])  # white to dark blue


def report(confusion: np.ndarray) -> dict[str, Any]:
    """Computes scores by class from a confusion matrix [classes, classes], labels by predictions. Plain JSON.

    The `matrix`, and by class `precision` (the fraction of its predictions that are right), `recall` (the fraction of
    its examples that are predicted), `f1` (the harmonic mean of both) and `support` (its number of examples). As in
    scikit-learn, 0 / 0 is 0: the precision of a class that is never predicted, the recall of one without examples.

    Example:
      >>> report(np.array([[3, 1], [0, 0]]))["recall"]
      [0.75, 0.0]
    """
    right = np.diagonal(confusion)
    predicted, support = confusion.sum(0), confusion.sum(1)
    fractions = {"precision": (right, predicted), "recall": (right, support), "f1": (2 * right, predicted + support)}
    return {
        "matrix": confusion.tolist(),
        **{name: np.divide(a, b, out=np.zeros(len(a)), where=b > 0).tolist() for name, (a, b) in fractions.items()},
        "support": support.tolist(),
    }


def picture(confusion: np.ndarray) -> np.ndarray:
    """Draws a confusion matrix: [pixels, pixels, 3] uint8, labels downwards, predictions to the right.

    A cell is darker the larger its fraction of its label's examples.
    """
    fractions = confusion / np.maximum(confusion.sum(1, keepdims=True), 1)
    cells = (_LOW + fractions[..., np.newaxis] * (_HIGH - _LOW)).astype(np.uint8)
    side = max(3, _PIXELS // len(confusion))
    drawn = cells.repeat(side, 0).repeat(side, 1)
    drawn[::side] = drawn[:, ::side] = 200  # lines between cells
    return drawn
