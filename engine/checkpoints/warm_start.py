"""Loads the weights of one object from another run's checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from ..errors import CheckpointError
from . import manifest as manifests
from . import objects
from .run_dir import RunDir
from .store import Checkpoints

T = TypeVar("T")


def load_weights(path, target, name: str = "trainer.model", may_grow: bool = False, final: bool = True) -> list[str]:
    """Loads `target`'s variables from `name` in another run's checkpoint, and nothing else.

    Of a run with `ema_decay` it loads the averages of weights, with which that evaluates and predicts; of one whose
    Keras optimizer has `use_ema` those with which training ends.

    Args:
      path: a run's directory or a directory of checkpoints, for the newest valid one; or one checkpoint's prefix, such
        as `.../ckpt-1000`. Checkpoints by plain `tf.train.Checkpoint` are read too.
      target: the object that is tracked under `name`: a Keras model, a tf.Module, a tf.train.Checkpoint.
      name: the attributes from the checkpoint's root to it, separated by dots; "" is the root.
      may_grow: whether tables (`parts.tables.Embedding`) may have more rows than in the checkpoint; rows
        that it lacks stay as they are.
      final: whether the averages of `use_ema` are loaded.

    Returns:
      The names of the variables that were loaded.

    Raises:
      CheckpointError: before any variable is changed, for a path without a valid checkpoint, for variables that are
        missing, extra or of another shape or type, and when nothing matches.
    """
    at = tuple(part for part in name.split(".") if part)

    def load(prefix: str) -> list[str]:
        why_not = (
            f"the weights in {prefix} do not fit this model; use the same model and model_arg as that run, or, in "
            "build_model, take the layers that fit: crankshaft.load_model(RUN_DIR).get_layer(NAME).get_weights()"
        )
        if (there := _holders(prefix)) and not any(name == holder or name.startswith(f"{holder}.") for holder in there):
            why_not = (
                f"{prefix} has no {name}; it has {', '.join(there)}, and crankshaft.engine.checkpoints."
                "load_weights(path, model, name) loads one of these, in Trainer.build"
            )
        return objects.restore(prefix, target, why_not, at, may_grow=may_grow, averages=averages(prefix, final))[0]

    return read_newest(path, load)


def averages(prefix: str, final: bool) -> dict[Any, str]:
    """Returns the keys of the averages of weights in a run's checkpoint, by the keys of these weights.

    Raises:
      CheckpointError: the run ended with averages, and does not say of which variable each is.
    """
    manifest = manifests.manifest_at(prefix)
    about = manifest.about if manifest and final and manifest.step else {}
    ends_with = about.get("final_averages", {})
    compiled = about.get("compile", {}).get("optimizer")
    has_averages = isinstance(compiled, dict) and compiled.get("use_ema") and not ends_with
    if manifest and has_averages and any("/keras_optimizer/" in key for key in manifest.variables):
        raise CheckpointError(
            f"{prefix}: its run ends with the averages of use_ema, and was written by a version that did not note of "
            "which weight each is; continue the run for an epoch, as its next checkpoints do"
        )
    return {weight + objects.ATTRIBUTE: average + objects.ATTRIBUTE for weight, average in ends_with.items()} | {
        name + objects.ATTRIBUTE: objects.checkpoint_key(("trainer", *owner.split("."), "shadows", str(number)))
        for owner, names in (manifest.about.get("updated", {}) if manifest else {}).items()
        if owner.endswith("weight_average")
        for number, name in enumerate(names)
    }


def _holders(prefix: str) -> list[str]:
    """Returns the dotted names of the objects that have a checkpoint's variables: for a run, the trainer's attributes.

    `""` stands for the root, if that is a Keras model.
    """
    try:
        keys = [key.split("/") for key, _ in tf.train.list_variables(prefix) if "/.ATTRIBUTES/" in key]
    except (tf.errors.OpError, ValueError, RuntimeError):
        return []  # reading it raises the explanation
    depths = [(key, 2 if key[0] == "trainer" and len(key) > 4 else 1) for key in keys]
    return sorted(
        {'""' if key[0][0] == "_" else ".".join(key[:depth]) for key, depth in depths if key[0] != "save_counter"}
    )


def read_newest(path, use: Callable[[str], T]) -> T:
    """Calls `use` with the prefix of the checkpoint at a path, and returns its result.

    If a run that is still writing removed the checkpoint before it was read, `use` is called again with a newer one, so
    all that has to be of one step is read in one call. `path` is as `load_weights` takes it.

    Raises:
      CheckpointError: the path has no valid checkpoint.
    """
    path = os.path.abspath(path)
    if any(os.path.isfile(path + ending) for ending in (".index", manifests.SUFFIX)):
        if problem := _sealed_problem(path):
            raise CheckpointError(f"{problem}, in {os.path.dirname(path)}; use another checkpoint")
        return use(path)
    problems = []
    for directory in (RunDir(path).checkpoints, path):
        if not (manifests.steps(directory) or manifests.is_being_written(directory)):
            continue  # at most TensorFlow's own
        reader = Checkpoints(directory, tf.train.Checkpoint(), keep=None, about={})
        if results := reader.read(lambda manifest: [use(manifest.prefix)]):
            return results[0]
        if problem := reader.problem():
            problems.append(
                f"no checkpoint in {directory} can be read ({problem}); repair it, or use another checkpoint"
            )
    # TensorFlow's own, last: a folder may have both, and only a manifest shows that its files are whole.
    plain = tf.train.latest_checkpoint(path) if os.path.isfile(os.path.join(path, "checkpoint")) else None
    if plain is not None and _sealed_problem(plain) is None:
        return use(plain)
    if problems:
        raise CheckpointError(problems[0])
    raise CheckpointError(
        f"no valid checkpoint at {path}; expected a run's directory, its checkpoints/, or a path such as .../ckpt-1000"
    )


def _sealed_problem(prefix: str) -> str | None:
    """Returns a checkpoint's problem by its manifest; None if it is valid, or if TensorFlow alone wrote it."""
    if not os.path.exists(prefix + manifests.SUFFIX):
        return None
    try:
        return manifests.read(prefix + manifests.SUFFIX).problem()
    except CheckpointError as error:
        return error.message
