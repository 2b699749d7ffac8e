"""A trained model as a SavedModel: one serving signature, batches of any size, and a line that says how to ask."""

from __future__ import annotations

import json
import os
import re
import shutil

import numpy as np
import tensorflow as tf

from crankshaft.engine import Trainer
from crankshaft.engine.hooks.evaluation import averaged_weights
from crankshaft.launch.errors import UsageError

_WRITTEN_OUT = 64  # values; an example of more is built by a line of Python


def save(trainer: Trainer, example, path: str) -> str:
    """Writes `path` (a version folder, as TensorFlow Serving wants it), whole or not at all, and returns it.

    The signature `serving_default` takes the features of a batch, by name if they are a dict, else as `features`, and
    gives `outputs`: what `Trainer.forward` gives, in float32, with the weights that evaluation uses. Of several outputs
    it gives each, by its name if they are a dict, else as `outputs_0` and so on.
    """
    if os.path.exists(path):
        raise UsageError(f"--export_dir: {path} exists; remove it or use another --export_dir")
    if getattr(trainer, "model", None) is None:
        found = type(trainer).__name__
        raise UsageError(f"--mode=export serves {found}.model, and there is none; name the model to serve self.model")
    features, _ = example
    named = isinstance(features, dict)
    if not all(hasattr(x, "dtype") for x in (features.values() if named else [features])):
        raise UsageError("--mode=export takes features that are one array, or a dictionary of arrays by name")
    inputs = features if named else {"features": features}
    specs = {
        name: tf.TensorSpec([None, *np.shape(value)[1:]], tf.as_dtype(value.dtype), name=name)
        for name, value in inputs.items()
    }
    if wrong := [name for name in inputs if not re.fullmatch("[A-Za-z][A-Za-z0-9_]*", name)]:
        raise UsageError(
            f"--mode=export: a signature can't name a feature {wrong[0]!r}; use a letter, then letters, digits and _"
        )
    module = tf.Module()
    module.layers, module.embeddings = trainer.held_layers, trainer.embedding_tables

    def serve(**features):
        return _by_name(trainer.forward(features if named else features["features"], training=False))

    module.serve = tf.function(serve, autograph=False)
    temporary = f"{path}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    with averaged_weights(trainer):
        signature = module.serve.get_concrete_function(**specs)
        tf.saved_model.save(module, temporary, signatures=signature)
    with open(os.path.join(temporary, "README.md"), "w", encoding="utf-8") as file:
        file.write(_readme(trainer, inputs, list(signature.structured_outputs)))
    os.replace(temporary, path)
    return path


def _by_name(outputs) -> dict[str, tf.Tensor]:
    """A signature's outputs are flat."""
    if isinstance(outputs, dict) and len(tf.nest.flatten(outputs)) == len(outputs):
        found = outputs
    elif tf.nest.is_nested(outputs):
        found = {f"outputs_{place}": each for place, each in enumerate(tf.nest.flatten(outputs))}
    else:
        found = {"outputs": outputs}
    return {name: tf.cast(each, tf.float32) for name, each in found.items()}


def _readme(trainer: Trainer, inputs: dict, outputs: list[str]) -> str:
    shapes = ", ".join(f"{name} {list(np.shape(x)[1:])} {x.dtype}" for name, x in inputs.items())
    arrays = ", ".join(f'{name}=tf.zeros({list(np.shape(x))}, "{x.dtype}")' for name, x in inputs.items())
    given = ", ".join(f"`{name}`" for name in outputs)
    return (
        f"# {trainer.model.name}\n\nSignature `serving_default`: a batch of {shapes} in, {given} out.\n\n"
        "In Python, FOLDER being this one:\n\n```python\nimport tensorflow as tf\n\n"
        "serve = tf.saved_model.load(FOLDER).signatures['serving_default']\n"
        f"print(serve({arrays})['{outputs[0]}'])\n```\n\n"
        "From TensorFlow Serving, this folder's parent being the base path of a model called NAME, for a batch of one "
        f"example, zeros:\n\n```sh\n{_request(inputs)}\n```\n"
    )


def _request(inputs: dict) -> str:
    """A shell command that asks TensorFlow Serving's REST API (https://www.tensorflow.org/tfx/serving/api_rest)."""
    url = "http://localhost:8501/v1/models/NAME:predict"
    if sum(np.size(x) for x in inputs.values()) <= _WRITTEN_OUT:
        zeros = {name: np.asarray(x).tolist() for name, x in inputs.items()}
        return f"curl -d '{json.dumps({'inputs': zeros})}' {url}"
    # JSON tells whole numbers from others, and so does the server.
    zeros = ", ".join(f'"{name}": np.zeros({list(np.shape(x))}, {_kind(x)}).tolist()' for name, x in inputs.items())
    build = f'import json, numpy as np; print(json.dumps({{"inputs": {{{zeros}}}}}))'
    return f"python -c '{build}' | curl -d @- {url}"


def _kind(x) -> str:
    return {"b": "bool", "i": "int", "u": "int"}.get(np.dtype(x.dtype).kind, "float")
