"""Numbers over a run of any length, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np


class Track:
    """Keeps points in time, numbers by name: at twice `points`, each two neighbours become one.

    Args:
      points: the fewest points that a long run has.
      columns: the most names that are kept; a point's others are left out.
      is_last: whether a column's neighbours become the later value, as for a time or a running sum, instead of their
        mean.
    """

    def __init__(self, points: int, columns: int, is_last: Callable[[Any], bool]):
        self.names: dict[Any, int] = {}
        self._most = columns
        self._is_last = is_last
        self._table = np.full([2 * points, 8], np.nan)
        self._lasts = np.zeros(8, bool)
        self._filled = 0
        self._every, self._in_newest = 1, 0  # added points per kept point, and in the newest one

    def add(self, point: Mapping[Any, float]) -> None:
        """Adds a point; columns that it does not name, and NaN, are missing in it."""
        for name in point:
            if name in self.names or len(self.names) >= self._most:
                continue
            if len(self.names) == self._table.shape[1]:
                self._table = np.hstack([self._table, np.full_like(self._table, np.nan)])
                self._lasts = np.hstack([self._lasts, np.zeros_like(self._lasts)])
            self._lasts[len(self.names)] = self._is_last(name)
            self.names[name] = len(self.names)
        values = np.full(self._table.shape[1], np.nan)
        for name, value in point.items():
            if name in self.names:
                values[self.names[name]] = value
        if self._filled and self._in_newest < self._every:
            self._in_newest += 1
            self._table[self._filled - 1] = self._joined(self._table[self._filled - 1], values, 1 / self._in_newest)
            return
        if self._filled == len(self._table):
            self._filled //= 2
            self._table[: self._filled] = self._joined(self._table[::2], self._table[1::2], 0.5)
            self._every *= 2
        self._table[self._filled] = values
        self._filled, self._in_newest = self._filled + 1, 1

    def column(self, name: Hashable) -> list[float | None]:
        """Returns a column's values, in their order, with five digits; None where one is missing."""
        if name not in self.names:
            return [None] * self._filled
        values = self._table[: self._filled, self.names[name]]
        digits = 15 if self._lasts[self.names[name]] else 5
        return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values.tolist()]

    def _joined(self, earlier: np.ndarray, later: np.ndarray, weight: float) -> np.ndarray:
        """Returns the mean with this weight of the later, or one of the two if the other is missing."""
        weights = np.where(self._lasts, 1.0, weight)
        with np.errstate(over="ignore", invalid="ignore"):  # missing values are NaN
            mean = earlier + (later - earlier) * weights
        return np.where(np.isnan(later), earlier, np.where(np.isnan(earlier), later, mean))
