"""A user's own trainer and data, without a mistake: what tests of mistakes begin with."""

from __future__ import annotations

import numpy as np

from tests.engine.trainers import Squares

RUN = ("--train_steps=4", "--global_batch_size=8", "--jit=off", "--progress=plain")
FEATURES = np.linspace(-1, 1, 32, dtype=np.float32).reshape(32, 1)
LABELS = 2 * FEATURES[:, 0]


def data():
    return (FEATURES, LABELS), (FEATURES, LABELS)


class Line(Squares):
    """Fits a line."""


def location_of(function) -> str:
    """file:line of a function's first statement."""
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno + 1} in {function.__name__}"
