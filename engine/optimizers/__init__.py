"""Optimizers, with learning rates, loss scales and averages of weights. Made on the host, applied on the replica."""

from .base import FusedOptimizer, Optimizer
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
    applied_options,
    build,
    make_from_options,
    named,
    outer,
    schedule_from_options,
)

__all__ = [
    "NAMES",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Ftrl",
    "FusedOptimizer",
    "KerasOptimizer",
    "Momentum",
    "Optimizer",
    "RMSprop",
    "applied_options",
    "build",
    "make_from_options",
    "named",
    "outer",
    "schedule_from_options",
]
