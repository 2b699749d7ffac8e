"""Reads a run's description of its model and features, `RunDir.model`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...engine.checkpoints.run_dir import NAMES, RunDir
from ...engine.data import form
from ...engine.data.run_data import Data
from ...engine.data.source import Spec
from ...engine.machine.files import read_json
from ...input import data_json
from ..failures import UsageError
from .architecture import MODEL

_PADDED = {form.Padded: "padded", form.Ragged: "ragged", form.Unmeasured: "unmeasured"}  # their names in the file


class ModelDescription(NamedTuple):
    """A run's description of its model, as `weights.write_description` writes it.

    Attributes:
      architectures: Keras's configurations of models, by name.
      features: features of one example, zeros.
      data_info: the description of the data, without its examples.
      logits_kind: kind of the trainer's logits.
      model_is_forward: see `weights.model_is_forward`.
      content: the file's.
    """

    architectures: dict[str, dict[str, Any]]
    features: Any
    data_info: Data
    logits_kind: str | None
    model_is_forward: bool
    content: dict[str, Any]


def read(run_dir: str) -> ModelDescription:
    """Reads a run's description of its model. Raises `UsageError`."""
    try:
        content = read_json(RunDir(run_dir).model)
        models = {**content.get("models", {}), MODEL: content["keras"]}
        if wrong := [model for model in models.values() if not isinstance(model, (dict, type(None)))]:
            raise ValueError(f"keras is {wrong[0]!r:.60}, which is not an object")
        models = {name: model for name, model in models.items() if model is not None}
        features, data = _zeros(content["features"]), data_json.from_json(content, NAMES.model)
        is_forward = bool(content["model_is_forward"])
        return ModelDescription(models, features, data, content.get("logits_of"), is_forward, content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{run_dir}/{NAMES.model} does not describe the model ({error}); train the run on") from None


def _zeros(described: dict[str, Any]) -> Any:
    if "dict" in described:
        return {name: _zeros(value) for name, value in described["dict"].items()}
    for kind, name in _PADDED.items():
        if name in described:
            return kind(*map(_zeros, described[name]))
    if "tuple" in described:
        return tuple(_zeros(value) for value in described["tuple"])
    return form.zeros(Spec(tuple(described["shape"]), described["dtype"]))


def describe(features) -> Any:
    """Describes the shapes and dtypes of one example's features in plain JSON."""
    if isinstance(features, dict):
        return {"dict": {name: describe(value) for name, value in features.items()}}
    if isinstance(features, form.Padded):
        return {_PADDED[type(features)]: [*map(describe, features)]}
    if isinstance(features, (tuple, list)):
        return {"tuple": [describe(value) for value in features]}
    return {"shape": list(features.shape[1:]), "dtype": np.dtype(features.dtype).name}
