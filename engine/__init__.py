"""The training engine: explicit, distributed training loops for TensorFlow 2. Reads no flag and no environment.

Runs on the host, except what says "Replica code", and the folders whose first line says so. Its names are imported on
first use, so that code that runs before TensorFlow can use the folders that do not need it.

Raises:
  ImportError: Keras already runs on another backend than TensorFlow.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .build import build_embeddings, build_layers, learning_rate, make_optimizer
    from .keras_models.keras_metrics import KerasMetric
    from .layers.embeddings import Embedding
    from .metrics.means import auc, confusion_matrix, mean, root_mean_square
    from .metrics.pairs import Mean
    from .optimizers.averaging import Averaged
    from .step.batches import weighed
    from .step.context import step_context
    from .step.gathering import gather
    from .step.gradients import Update, minimize
    from .step.options import StepOptions
    from .trainer import Trainer

if __name__ == "engine":
    raise ImportError("engine is a part of crankshaft; write `import crankshaft.engine` instead of `import engine`")

# tf.keras works only on TensorFlow. Keras reads this variable when it is imported, also by TensorFlow; for other
# programs the variable or ~/.keras/keras.json may name another backend.
os.environ["KERAS_BACKEND"] = "tensorflow"
_keras = sys.modules.get("keras.src.backend.config")  # imported even if Keras failed because its backend is missing
if _keras is not None and _keras.backend() != "tensorflow":
    raise ImportError(
        f"Keras runs on {_keras.backend()}, by KERAS_BACKEND or keras.json, and was imported before engine, which "
        "needs tensorflow: set KERAS_BACKEND=tensorflow, or import crankshaft before tensorflow and keras"
    )

_HOMES = {
    "Averaged": "crankshaft.engine.optimizers.averaging",
    "Embedding": "crankshaft.engine.layers.embeddings",
    "KerasMetric": "crankshaft.engine.keras_models.keras_metrics",
    "KerasTrainer": "crankshaft.engine.keras_models.keras_trainer",
    "Mean": "crankshaft.engine.metrics.pairs",
    "StepOptions": "crankshaft.engine.step.options",
    "Trainer": "crankshaft.engine.trainer",
    "Update": "crankshaft.engine.step.gradients",
    "auc": "crankshaft.engine.metrics.means",
    "build_embeddings": "crankshaft.engine.build",
    "build_layers": "crankshaft.engine.build",
    "confusion_matrix": "crankshaft.engine.metrics.means",
    "gather": "crankshaft.engine.step.gathering",
    "learning_rate": "crankshaft.engine.build",
    "make_optimizer": "crankshaft.engine.build",
    "mean": "crankshaft.engine.metrics.means",
    "minimize": "crankshaft.engine.step.gradients",
    "root_mean_square": "crankshaft.engine.metrics.means",
    "step_context": "crankshaft.engine.step.context",
    "weighed": "crankshaft.engine.step.batches",
}

__all__ = [
    "Averaged",
    "Embedding",
    "KerasMetric",
    "KerasTrainer",
    "Mean",
    "StepOptions",
    "Trainer",
    "Update",
    "auc",
    "build_embeddings",
    "build_layers",
    "confusion_matrix",
    "gather",
    "learning_rate",
    "make_optimizer",
    "mean",
    "minimize",
    "root_mean_square",
    "step_context",
    "weighed",
]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
