"""Comparisons of lists of arrays or variables, one by one."""

from __future__ import annotations

import numpy as np


def assert_same(found, expected) -> None:
    """Checks that there are as many arrays, with the same bits."""
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def assert_close(found, expected, **tolerance) -> None:
    """Checks that there are as many arrays, within a tolerance of `expected`."""
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, **tolerance)
