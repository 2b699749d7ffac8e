"""A trained model as a SavedModel: one serving signature, batches of any size, and a line that says how to ask."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import tensorflow as tf

from engine import Trainer
from engine.evaluation import averaged_weights
from launch.errors import UsageError


def save(trainer: Trainer, example, path: str) -> str:
    """Writes `path` (a version folder, as TensorFlow Serving wants it), whole or not at all, and returns it.

    The signature `serving_default` takes the features of a batch, by name if they are a dict, else as `features`, and
    gives `outputs`: what the model gives, in float32, with the weights that evaluation uses.
    """
    if os.path.exists(path):
        raise UsageError(f"--export_dir: {path} exists; remove it or use another --export_dir")
    features, _ = example
    named = isinstance(features, dict)
    inputs = features if named else {"features": features}
    specs = {
        name: tf.TensorSpec([None, *np.shape(value)[1:]], tf.as_dtype(value.dtype), name=name)
        for name, value in inputs.items()
    }
    module = tf.Module()
    module.model = trainer.model

    def serve(**features):
        outputs = trainer.model(features if named else features["features"], training=False)
        return {"outputs": tf.nest.map_structure(lambda x: tf.cast(x, tf.float32), outputs)}

    module.serve = tf.function(serve, autograph=False)
    temporary = f"{path}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    with averaged_weights(trainer):
        tf.saved_model.save(module, temporary, signatures=module.serve.get_concrete_function(**specs))
    with open(os.path.join(temporary, "README.md"), "w", encoding="utf-8") as file:
        file.write(_readme(trainer, inputs))
    os.replace(temporary, path)
    return path


def _readme(trainer: Trainer, inputs: dict) -> str:
    shapes = ", ".join(f"{name} {list(np.shape(x)[1:])} {x.dtype}" for name, x in inputs.items())
    request = json.dumps({"inputs": dict.fromkeys(inputs, "[one array a feature]")})
    arrays = ", ".join(
        f'{name}=tf.zeros([1, {", ".join(map(str, np.shape(x)[1:]))}], "{x.dtype}")' for name, x in inputs.items()
    )
    return (
        f"# {trainer.model.name}\n\nSignature `serving_default`: a batch of {shapes} in, `outputs` out.\n\n"
        f"Python: `tf.saved_model.load(FOLDER).signatures['serving_default']({arrays})['outputs']`\n\n"
        f"TensorFlow Serving, this folder's parent as the model's base path: `POST /v1/models/NAME:predict` of "
        f"`{request}`\n"
    )
