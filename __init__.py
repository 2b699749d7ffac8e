"""Explicit distributed training loops for TensorFlow 2: `from crankshaft import Trainer, mean, main`.

Names are imported on first use, so that a mistake on a command line does not wait for TensorFlow. The first name that
needs TensorFlow imports it, and hides its notes, but not its errors. Type checkers and editors read `__init__.pyi`.
"""

import sys
from importlib import import_module

_HOMES = {
    "Averaged": "crankshaft.engine.optimizers.averaging",
    "Data": "crankshaft.engine.data.run_data",
    "Embedding": "crankshaft.parts.tables",
    "KerasMetric": "crankshaft.parts.keras_models.keras_metrics",
    "KerasTrainer": "crankshaft.parts.keras_models.keras_trainer",
    "Mean": "crankshaft.engine.metrics.pairs",
    "Padded": "crankshaft.engine.data.form",
    "Run": "crankshaft.launch.composition.open_run",
    "RunError": "crankshaft.runner.failures",
    "Source": "crankshaft.engine.data.source",
    "Spec": "crankshaft.engine.data.source",
    "StepOptions": "crankshaft.engine.step.options",
    "Trainer": "crankshaft.engine.trainer",
    "Update": "crankshaft.engine.step.gradients",
    "UsageError": "crankshaft.runner.failures",
    "auc": "crankshaft.engine.metrics.means",
    "build_embeddings": "crankshaft.engine.build",
    "build_layers": "crankshaft.engine.build",
    "confusion_matrix": "crankshaft.engine.metrics.means",
    "fit": "crankshaft.launch.fit",
    "gather": "crankshaft.engine.step.gathering",
    "learning_rate": "crankshaft.engine.build",
    "load_model": "crankshaft.launch.api",
    "main": "crankshaft.launch.train",
    "make_optimizer": "crankshaft.engine.build",
    "mean": "crankshaft.engine.metrics.means",
    "minimize": "crankshaft.engine.step.gradients",
    "open_run": "crankshaft.launch.api",
    "root_mean_square": "crankshaft.engine.metrics.means",
    "run": "crankshaft.launch.api",
    "step_context": "crankshaft.engine.step.context",
    "weighed": "crankshaft.engine.step.batches",
    "__version__": "crankshaft.engine.version",
}

_WITHOUT_TENSORFLOW = (
    "crankshaft.engine.data.source",
    "crankshaft.engine.data.run_data",
    "crankshaft.engine.version",
    "crankshaft.runner.failures",
)

__all__ = sorted(_HOMES.keys() - {"__version__"})


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        if _HOMES[name] not in _WITHOUT_TENSORFLOW and "tensorflow" not in sys.modules:
            import_module("crankshaft.runner.host.startup").import_tensorflow(_HOMES[name])
        module = import_module(_HOMES[name])
    except AttributeError as error:  # of which `from crankshaft import` would drop the message
        raise ImportError(f"{name} can't be imported (AttributeError: {error})") from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return [*__all__, "__version__", *(name for name in globals() if name.startswith("__"))]
