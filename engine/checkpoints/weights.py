"""Takes the weights of one object from another run's checkpoint, and nothing else of it. Host code."""

from __future__ import annotations

import os

import tensorflow as tf

from . import graph
from . import manifest as manifests
from .manifest import CheckpointError
from .run_dir import RunDir
from .store import Checkpoints


def load_weights(path, target, name: str = "trainer.model") -> list[str]:
    """Loads `target`'s variables from `name` in another run's checkpoint, and nothing else.

    Args:
      path: a run's directory, a directory of checkpoints (of either, the newest valid one is taken), or one
        checkpoint's prefix, such as `.../ckpt-1000`. Checkpoints by plain `tf.train.Checkpoint` are taken too.
      target: what is tracked under `name` here: a Keras model, a tf.Module, a tf.train.Checkpoint.
      name: the attributes from the checkpoint's root to it, with dots; "" is the root.

    Returns:
      The names of the variables that were loaded.

    Raises:
      CheckpointError: before any variable is changed, for a path without a valid checkpoint, for variables that are
        missing, extra or of another shape or type, and when nothing matches.
    """
    prefix = _find_prefix(os.path.abspath(path))
    at = tuple(part for part in name.split(".") if part)
    why_not = f"the weights in {prefix} do not fit this model; use the same `model` and `model_arg` as that run"
    return graph.restore(prefix, target, why_not, at)[0]


def _find_prefix(path: str) -> str:
    if any(os.path.isfile(path + ending) for ending in (".index", manifests.SUFFIX)):
        if problem := _sealed_problem(path):
            raise CheckpointError(f"{problem}, in {os.path.dirname(path)}; use another checkpoint")
        return path
    problems = []
    for directory in (RunDir(path).checkpoints, path):
        reader = Checkpoints(directory, tf.train.Checkpoint(), keep=None, about={})
        if (manifest := reader.latest()) is not None:
            return manifest.prefix
        if problem := reader.problem():
            problems.append(f"no checkpoint in {directory} can be read ({problem}); mend it, or use another checkpoint")
    plain = tf.train.latest_checkpoint(path) if os.path.isfile(os.path.join(path, "checkpoint")) else None
    if plain is not None and _sealed_problem(plain) is None:
        return plain
    if problems:
        raise CheckpointError(problems[0])
    raise CheckpointError(
        f"no valid checkpoint at {path}; expected a run's directory, its checkpoints/, or a path such as .../ckpt-1000"
    )


def _sealed_problem(prefix: str) -> str | None:
    """Returns what is wrong with a checkpoint by its manifest; None if nothing is, or if TensorFlow alone wrote it."""
    if not os.path.exists(prefix + manifests.SUFFIX):
        return None
    try:
        return manifests.read(prefix + manifests.SUFFIX).problem()
    except CheckpointError as error:
        return str(error)
