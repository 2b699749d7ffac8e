"""Optimizers, with learning rates, loss scales and averages of weights."""

from .base import Optimizer
from .keras_adapter import KerasOptimizer
from .rules import (
    NAMES,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Ftrl,
    Momentum,
    RMSprop,
    build,
    make_from_options,
    named,
    options_of,
    outer,
    rate_of_options,
)

__all__ = [
    "NAMES",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Ftrl",
    "KerasOptimizer",
    "Momentum",
    "Optimizer",
    "RMSprop",
    "build",
    "make_from_options",
    "named",
    "options_of",
    "outer",
    "rate_of_options",
]
