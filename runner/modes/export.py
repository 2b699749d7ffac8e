"""Exports a trained model: a SavedModel with one serving signature for batches of any size, or a .keras file."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ...engine import logging
from ...engine.checkpoints import manifest as manifests
from ...engine.data import form
from ...engine.hooks import numerics
from ...engine.hooks.evaluation import averaged_weights
from ...engine.internals import keras, keras_scopes
from ...engine.internals.variables import own_copy, tf_variable
from ...engine.machine import files
from ...engine.trainer import Trainer
from ...input import data_json
from ..base import BaseRun
from ..failures import UsageError
from ..host.text_files import write_json
from ..restored import restoring, weights
from . import predicting
from .outcome import Outcome, run_result

_DEFAULT = "serving_default"
_DATA = "assets.extra/data.json"  # in a SavedModel's place for what TensorFlow does not read
_ORIGIN = "assets.extra/crankshaft.json"  # what the SavedModel was made of
_SIGNATURE_NAME = re.compile("[A-Za-z][A-Za-z0-9_]*")


def export(run: BaseRun) -> Outcome:
    """Writes the model of the latest (or chosen) checkpoint as a SavedModel or Keras file."""
    for manifest in restoring.restored(run):
        checkpoint = f"{'best' if run.config.eval_checkpoint == 'best' else 'checkpoints'}/{manifest.name}"
    numerics.check_weights(run.trainer, f"step {run.state.step}")
    config = run.config
    path, is_new = save(run, config.output_path, config.export_model, manifests.sha256(manifest.path))
    kind = "Keras model" if path.endswith(".keras") else "SavedModel"
    line = f"{kind} of step {run.state.step}, {checkpoint}: {path}{'' if is_new else ' has it already'}"
    return Outcome({**run_result(run), "export": path, "checkpoint": checkpoint}, lines=[line])


def save(run: BaseRun, path: str, name: str | None, checkpoint: str) -> tuple[str, bool]:
    """Writes the model of a run, whole or not at all; returns its path, and whether it was not there already.

    Args:
      run: run that the model was trained in, restored.
      path: path of a .keras file; or, for a SavedModel, of the parent of the version folders, one a step, as TensorFlow
        Serving wants it.
      name: name of a Keras model that the trainer holds; None is `Trainer.forward`, or `Trainer.model` for a .keras
        file.
      checkpoint: digest of the manifest of the run's checkpoint.
    """
    is_keras = path.endswith(".keras")
    path = path if is_keras else os.path.join(path, str(run.state.step))
    if is_keras and os.path.lexists(path):
        raise _there(path)
    if name:
        weights.keras_model(run.trainer, name)
    elif getattr(run.trainer, "model", None) is None:
        trainer, names = type(run.trainer).__name__, ", ".join(weights.keras_models(run.trainer)) or "none"
        raise UsageError(
            f"mode=export serves {trainer}.model, which is missing; name the model to serve self.model, or give "
            f"export_model={names}"
        )
    if is_keras:
        _save_keras(run, path, name)
        return path, True
    return path, _save_serving(run, path, name, checkpoint)


def _there(path: str) -> UsageError:
    return UsageError(f"output: {path} exists; remove it or use another output")


def _save_keras(run: BaseRun, path: str, name: str | None) -> None:
    """Writes `Trainer.model`, or that of a name, alone, with the weights that evaluation uses."""
    if not name and type(run.trainer).forward is not Trainer.forward:
        raise UsageError(
            f"output={path}: a .keras file can't hold {type(run.trainer).__name__}.forward; give output a folder, for "
            f"a SavedModel, or export_model={weights.MODEL} for the Keras model alone"
        )
    os.makedirs(os.path.dirname(path), exist_ok=True)
    trainer = run.trainer if weights.has_whole_trainer(run) else weights.TrainerCopy(run).trainer
    model = weights.keras_model(trainer, name or weights.MODEL)
    with files.replacing(path, files.make_file) as temporary, tempfile.TemporaryDirectory() as folder:
        model_path = os.path.join(folder, "model.keras")  # Keras goes by the ending
        try:
            with files.naming(folder):
                model.save(model_path)
        except NotImplementedError as error:  # Keras's error for a model without get_config
            raise UsageError(
                f"output={path}: Keras can't write a {type(model).__name__}, which has no get_config; give it one, or "
                "give output a folder, for a SavedModel"
            ) from error
        shutil.copyfile(model_path, temporary)
    kinds = {f"{type(layer).__module__}.{type(layer).__name__}" for layer in keras.layers_in(model)}
    if custom := sorted(kind for kind in kinds if not kind.startswith("keras.")):
        logging.warning(
            "%s has layers that are not Keras's, %s: import %s before load_model; a SavedModel needs TensorFlow alone",
            path,
            ", ".join(custom),
            ", ".join(sorted({kind.rpartition(".")[0] for kind in custom})),
        )


def _save_serving(run: BaseRun, path: str, name: str | None, checkpoint: str) -> bool:
    """Writes a SavedModel, unless the same is there, with the data's description (`input.data_json`) in `_DATA`.

    The signature `serving_default` takes the features of a batch: one array as `features`, others by the names of
    `_leaves`; as text those that were looked up. It returns what `Run.predict` does: one array as `outputs`, several by
    the names of `_leaves`.

    A Keras model may have more to serve: its method `export_signatures()` returns `tf.function`s by name, each with an
    input signature of named specs, and dicts of tensors as outputs.

    Returns whether it was not there. Raises `UsageError` for another that is.
    """
    trainer, preprocessing = weights.unsharded_trainer(run), run.data_info.preprocessing
    forward, forward_features = predicting.forward_and_features(trainer, run.example, name)
    model = weights.keras_model(trainer, name) if name else trainer.model
    layers = [model] if name else trainer.inventory.layers_without_averages
    # A layer that carries a state from batch to batch has one for each example, so it takes batches of that size alone.
    batch = next((state.shape[0] for state in keras.carried_states(layers)), None)
    features = tf.nest.map_structure(
        lambda spec: tf.TensorSpec([batch, *spec.shape[1:]], spec.dtype), preprocessing.raw(forward_features)
    )
    # A signature's names are a letter, then letters, digits and _. Those that keep theirs come first, and features
    # before lengths: so a name that is changed, and not one that is not, gets a number where two are alike.
    leaves = [*_leaves(features, "features")]
    order = sorted(leaves, key=lambda leaf: (not _SIGNATURE_NAME.fullmatch(leaf.name), leaf.is_lengths))
    plain = (re.sub("^(?![A-Za-z])", "x", re.sub("[^A-Za-z0-9_]", "_", leaf.name)) for leaf in order)
    names = dict(zip(map(id, order), _unique(plain), strict=True))
    specs = {names[id(leaf)]: tf.TensorSpec(leaf.value.shape, leaf.value.dtype, names[id(leaf)]) for leaf in leaves}

    def serve(**features_by_name):
        packed = tf.nest.pack_sequence_as(features, [features_by_name[name] for name in specs])
        with keras_scopes.with_states_of_zero(layers):  # requests have nothing to do with each other
            outputs = [*_leaves(forward(preprocessing(packed)), "outputs")]
        return dict(zip(_unique(leaf.name for leaf in outputs), (leaf.value for leaf in outputs), strict=True))

    signature = tf.function(serve, autograph=False).get_concrete_function(**specs)
    functions: dict[str, Any] = getattr(model, "export_signatures", dict)()
    more = {name: function.get_concrete_function() for name, function in functions.items()}
    module = _module(trainer, preprocessing.tables, [signature, *more.values()])
    digest = hashlib.sha256()
    for function in (signature, *more.values()):  # TensorFlow's own fingerprint is the same for other graphs
        digest.update(function.graph.as_graph_def().SerializeToString(deterministic=True))
    flags = {flag: run.config.values[flag] for flag in ("export_model", "export_since")}
    origin = {"checkpoint": checkpoint, "graph": digest.hexdigest(), **flags}
    if os.path.lexists(path):
        with contextlib.suppress(OSError, ValueError):
            if files.read_json(os.path.join(path, _ORIGIN)) == origin:
                return False
        raise _there(path)
    tables = [table for table in trainer.inventory.tables.values() if table.admissions]
    tables_by_name = dict(zip(_unique(table.name for table in tables), tables, strict=True))
    if (since := run.config.export_since) and not tables:
        raise UsageError(f"export_since={since}: the model has no table with admit_after to compare; leave it out")
    with files.replacing(path, os.mkdir) as temporary:
        with averaged_weights(trainer):
            if tables:
                tables[0].write_rows(temporary, tables_by_name, since)
            tf.saved_model.save(module, temporary, signatures={_DEFAULT: signature, **more})
        os.makedirs(os.path.dirname(os.path.join(temporary, _DATA)))
        write_json(os.path.join(temporary, _DATA), data_json.as_json(run.data_info))
        write_json(os.path.join(temporary, _ORIGIN), origin)
    return True


def _module(trainer: Trainer, tables: Mapping[str, Any], functions: Sequence) -> tf.Module:
    """Makes a module of the variables and tables that functions read, and of nothing else.

    They are TensorFlow's own, not Keras's variables and layers: TensorFlow would save those as second copies, and its
    converters (TFLite) would leave reads of variables in the graph that have no values there.

    Args:
      tables: lookup tables of the preprocessing, by name.
      functions: traced functions.

    Raises:
      UsageError: a function reads something else, such as a global table.
    """
    root = tf.Module()
    layers = keras.all_layers_in(trainer.inventory.layers.values())  # TensorFlow does not see those in lists of lists
    root.parts = [trainer, *layers, dict(tables)]
    variables = [variable for function in functions for variable in function.graph.variables]
    owners: dict[int, Any] = {}
    for part in (*tf.train.TrackableView(root).descendants(), *variables):
        if isinstance(part, tf.saved_model.experimental.TrackableResource):
            owners[id(part.resource_handle)] = part
        elif isinstance(variable := own_copy(tf_variable(part)), tf.Variable):
            owners[id(variable.handle)] = variable
    handles = {id(x) for function in functions for x in function.captured_inputs if x.dtype == tf.resource}
    if not handles <= owners.keys():
        raise UsageError(
            f"mode=export: {type(trainer).__name__} computes with a table or a generator that is none of its "
            "attributes, so an export can't hold it; make it self.NAME in build"
        )
    module = tf.Module()
    module.parts = [part for key, part in owners.items() if key in handles]
    return module


class _Leaf(NamedTuple):
    """A tensor of a nest, or its spec, by its name."""

    name: str
    value: Any
    is_lengths: bool = False


def _leaves(nest: Any, name: str, path: str = "") -> Iterator[_Leaf]:
    """Yields the tensors of a nest in the order of `tf.nest.flatten`, for a signature, which is flat.

    Their names are the keys of dictionaries, and `name` with the number in a tuple; those of nested ones are joined.
    The lengths of a `Padded` have its name and "_lengths".
    """
    if isinstance(nest, form.Padded):
        yield _Leaf(path or name, nest.values)
        yield _Leaf(f"{path or name}_lengths", nest.lengths, is_lengths=True)
    elif isinstance(nest, dict):
        for key in sorted(nest):
            yield from _leaves(nest[key], name, f"{path}_{key}" if path else key)
    elif isinstance(nest, (tuple, list)):
        for number, part in enumerate(nest):
            yield from _leaves(part, name, f"{path or name}_{number}")
    else:
        yield _Leaf(path or name, nest)


def _unique(names: Iterable[str]) -> list[str]:
    """Numbers the names that occur again."""
    unique: list[str] = []
    for name in names:
        numbered = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
        unique.append(next(candidate for candidate in numbered if candidate not in unique))
    return unique
