"""Explicit distributed training loops for TensorFlow 2: `from crankshaft import Trainer, mean, main`.

Names are imported on first use, so that a mistake on a command line does not wait for TensorFlow. The first name that
needs TensorFlow imports it. Whoever imports it, its notes at the start are hidden, but not its errors.
"""

import os
import sys
from importlib import import_module
from importlib.machinery import PathFinder

TYPE_CHECKING = False  # a type checker takes it for true; typing takes as long to import as all that stands before it
if TYPE_CHECKING:
    from .engine.build import learning_rate, make_optimizer
    from .engine.data.data import Data
    from .engine.data.form import Padded
    from .engine.data.source import Source, Spec
    from .engine.keras_models.keras_metrics import KerasMetric
    from .engine.keras_models.keras_trainer import KerasTrainer
    from .engine.metrics.means import auc, confusion_matrix, mean, root_mean_square
    from .engine.metrics.pairs import Mean
    from .engine.step.batches import weighed
    from .engine.step.context import step_context
    from .engine.step.gathering import gather
    from .engine.step.gradients import Update, minimize
    from .engine.trainer import Trainer
    from .launch.api import load_model, open_run, run
    from .launch.errors import RunError, UsageError
    from .launch.fit import fit
    from .launch.run.run import Run
    from .launch.train import main

_HOMES = {
    "Data": "crankshaft.engine.data.data",
    "KerasMetric": "crankshaft.engine",
    "KerasTrainer": "crankshaft.engine",
    "Mean": "crankshaft.engine",
    "Padded": "crankshaft.engine.data.form",
    "Run": "crankshaft.launch.run.run",
    "RunError": "crankshaft.launch.errors",
    "Trainer": "crankshaft.engine",
    "Source": "crankshaft.engine.data.source",
    "Spec": "crankshaft.engine.data.source",
    "Update": "crankshaft.engine",
    "UsageError": "crankshaft.launch.errors",
    "auc": "crankshaft.engine",
    "confusion_matrix": "crankshaft.engine",
    "fit": "crankshaft.launch.fit",
    "gather": "crankshaft.engine",
    "learning_rate": "crankshaft.engine",
    "load_model": "crankshaft.launch.api",
    "main": "crankshaft.launch.train",
    "make_optimizer": "crankshaft.engine",
    "mean": "crankshaft.engine",
    "minimize": "crankshaft.engine",
    "open_run": "crankshaft.launch.api",
    "root_mean_square": "crankshaft.engine",
    "run": "crankshaft.launch.api",
    "step_context": "crankshaft.engine",
    "weighed": "crankshaft.engine",
}

_WITHOUT_TENSORFLOW = ("crankshaft.engine.data.source", "crankshaft.engine.data.data", "crankshaft.launch.errors")

__all__ = [
    "Data",
    "KerasMetric",
    "KerasTrainer",
    "Mean",
    "Padded",
    "Run",
    "RunError",
    "Source",
    "Spec",
    "Trainer",
    "Update",
    "UsageError",
    "auc",
    "confusion_matrix",
    "fit",
    "gather",
    "learning_rate",
    "load_model",
    "main",
    "make_optimizer",
    "mean",
    "minimize",
    "open_run",
    "root_mean_square",
    "run",
    "step_context",
    "weighed",
]


class _Imports:
    """Acts where a program imports TensorFlow or Keras itself, once this package is imported.

    TensorFlow's notes are kept from standard error. The layers of the models here are registered once Keras is there,
    so that `load_model` opens their .keras files; to import Keras for that would keep a mistake on a command line
    waiting.
    """

    def find_spec(self, name, path=None, target=None):
        import_as = {"keras": _with_layers, "tensorflow": _without_notes}.get(name)
        spec = PathFinder.find_spec(name, path) if import_as else None
        if spec is not None:
            execute = spec.loader.exec_module
            vars(spec.loader)["exec_module"] = lambda module: import_as(execute, module)
        return spec


def _with_layers(execute, module) -> None:
    execute(module)
    _register_layers()


def _without_notes(execute, module) -> None:
    if "crankshaft.launch.host.process" in sys.modules:  # it hides them itself
        execute(module)
    else:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # notes that come later, such as when data is first read
        with import_module("crankshaft.launch.host.noise").filtered_stderr():
            execute(module)


def _register_layers() -> None:
    # A process that has begun to import the engine imports its layers as well; they need Keras on TensorFlow.
    if "crankshaft.engine" not in sys.modules and sys.modules["keras"].config.backend() == "tensorflow":
        import_module("crankshaft.engine.layers")


if "keras" in sys.modules:
    _register_layers()
else:
    sys.meta_path.insert(0, _Imports())


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _HOMES[name] not in _WITHOUT_TENSORFLOW and "tensorflow" not in sys.modules:
        import_module("crankshaft.launch.host.process").import_tensorflow(_HOMES[name])
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
