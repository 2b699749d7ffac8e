"""Updates of variables from gradients, and what belongs to them: learning rates, loss scales, averages of weights."""

from crankshaft.engine.optimizers.base import Optimizer
from crankshaft.engine.optimizers.keras_adapter import KerasOptimizer
from crankshaft.engine.optimizers.rules import NAMES, SGD, Adagrad, Adam, AdamW, Ftrl, Momentum, RMSprop, build

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
]
