"""Explicit distributed training loops for TensorFlow 2: `from crankshaft import Trainer, mean, main`.

Names are imported when they are first asked for, so that a mistake on a command line does not wait for TensorFlow.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from crankshaft.engine.metrics import Mean, mean
    from crankshaft.engine.trainer import Trainer
    from crankshaft.launch.train import main

_HOMES = {
    "Mean": "crankshaft.engine",
    "Trainer": "crankshaft.engine",
    "main": "crankshaft.launch.train",
    "mean": "crankshaft.engine",
}

__all__ = ["Mean", "Trainer", "main", "mean"]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
