"""The training engine: explicit, distributed training loops for TensorFlow 2. Reads no flag, no environment.

Its names are imported when they are first asked for: what starts before TensorFlow uses rooms that do without it.
"""

from importlib import import_module

_HOMES = {
    "Mean": "engine.metrics",
    "StepOptions": "engine.options",
    "Trainer": "engine.trainer",
    "mean": "engine.metrics",
}

__all__ = ["Mean", "StepOptions", "Trainer", "mean"]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
