"""Weights from elsewhere: those that a run begins with, and a run's model made outside of it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ...engine.build import prepare
from ...engine.checkpoints import Manifest, load_weights, objects, read_newest
from ...engine.checkpoints import manifest as manifests
from ...engine.checkpoints.run_dir import RunDir
from ...engine.checkpoints.warm_start import averages
from ...engine.data import form
from ...engine.errors import CheckpointError, reason
from ...engine.hooks import numerics
from ...engine.hooks.sync_check import hashes
from ...engine.internals import variables
from ...engine.mesh import sharded
from ...engine.optimizers.averaging import Averaged, WeightAverage
from ...engine.trainer import Trainer
from ...input import data_json
from ..base import BaseRun
from ..command_line.config import KERAS_FILES
from ..failures import UsageError, nearest
from ..host import isolation
from ..host.text_files import write_run_file
from ..saved import architecture, fingerprints, model_file, preprocessor
from ..saved.architecture import MODEL, keras_models
from ..saved.keras_weights import load_keras_weights


def write_description(run: BaseRun, run_dir: str) -> None:
    """Writes the file that `load` makes the model from: Keras's configuration of it, and the data's description."""
    content = {**architecture.describe(run.trainer), "features": model_file.describe(form.features(run.example))}
    content |= {"logits_of": run.logits_kind, "model_is_forward": model_is_forward(run.trainer)}
    write_run_file(RunDir(run_dir).model, {**content, **data_json.as_json(run.data_info)})


def model_is_forward(trainer: Trainer) -> bool:
    """Returns whether the model that is called "model" computes all that `Trainer.forward` does."""
    return type(trainer).forward is Trainer.forward and not trainer.inventory.tables


def keras_model(trainer: Trainer, name: str) -> tf.keras.Model:
    """Returns a trainer's Keras model by its name. Raises `UsageError` if it has none of that name."""
    models = keras_models(trainer)
    if name not in models:
        kind, there = type(trainer).__name__, ", ".join(models) or "none"
        raise UsageError(f"name={name!r}: {kind} has no Keras model of that name; it has {there}")
    return models[name]


def load_init_from(run: BaseRun) -> None:
    """Loads the weights of --init_from, another run's or Keras's."""
    names = list[str]()
    if not (source := run.config.init_from):
        return
    restarted = run.trainer.inventory.averages
    if source.endswith(KERAS_FILES):
        names = [""] * _load_keras_file(run, source)
    else:
        names, restarted = read_newest(source, functools.partial(_load_checkpoint, run))
    for average in restarted:
        average.reset()  # else it would still hold the weights that the model was made with
    numerics.check_weights(run.trainer, f"init_from={source}")
    grown = [name for name in names if name.endswith(" rows)")]
    more = f"; rows that it lacks begin as they were made: {', '.join(grown)}" if grown else ""
    run.log(f"{len(names)} weights taken from {source}{more}")


def initial_loader(source: str | None) -> Callable[[str, Any], None]:
    """Returns the `load_initial` of a run with --init_from; what it can't load, `load_init_from` reports."""

    def load(path: str, model: tf.keras.layers.Layer) -> None:
        # In a graph, that of a dry run, no variable has a value; shards are filled once they are there.
        if not source or not tf.executing_eagerly() or any(map(sharded.variable_sharding, model.variables)):
            return
        with contextlib.suppress(CheckpointError, UsageError):
            if source.endswith(KERAS_FILES):
                load_keras_weights(source, model)
            else:
                load_weights(source, model, f"trainer.{path}")

    return load


def _load_checkpoint(run: BaseRun, prefix: str) -> tuple[list[str], list[WeightAverage | Averaged]]:
    """Loads a checkpoint's layers and tables; returns variables' names, and the averages that it did not load."""
    _check_source(run, prefix)
    inventory = run.trainer.inventory
    averaged = inventory.averaged
    layers = {path: layer for path, layer in inventory.layers.items() if path not in averaged}
    names = _load_components(prefix, {**layers, **inventory.tables}, may_grow=True)
    loaded = {path: average for path, average in averaged.items() if objects.has(prefix, ("trainer", *path.split(".")))}
    names += _load_components(prefix, loaded)
    if averages(prefix, final=True):
        run.log(f"{prefix} is of a run that averages its weights (ema_decay, use_ema), and the averages are taken")
    if lacking := sorted(averaged.keys() - loaded.keys()):
        run.log(f"{', '.join(lacking)}: not in {prefix}, so the average begins at the model's weights")
    return names, [average for average in inventory.averages if average not in loaded.values()]


def check_compatible(trainer: Trainer, manifest: Manifest, name: str = "", vocabulary: Any = None) -> None:
    """Raises `UsageError` if a checkpoint's weights, by its path or name, would have another meaning in a trainer."""
    arguments = manifest.about.get("deciding", {}).get("model_arg", {})
    trainer.check_compatible(name or manifest.path, arguments, vocabulary)


def _check_source(run: BaseRun, prefix: str) -> None:
    """Raises `UsageError` where weights of --init_from are of other features, or of ids that are numbered otherwise."""
    config, manifest = run.config, manifests.manifest_at(prefix)
    if manifest is None:
        return
    check_compatible(run.trainer, manifest)
    if config.allow_changed_config:
        return
    fingerprints.check_begun(config, manifest, run.data_info.ids)
    try:
        before = model_file.read(os.path.dirname(os.path.dirname(manifest.prefix)))
    except UsageError:  # a copy of the checkpoint alone
        return
    whole = f"init_from={config.init_from}: this run's data"
    preprocessor.check_trained(whole, (before.data_info, before.features), (run.data_info, run.features))
    check_compatible(run.trainer, manifest, f"init_from={config.init_from}", before.data_info.vocabulary or {})


def _load_keras_file(run: BaseRun, source: str) -> int:
    """Loads a Keras file into a run's model; of a sharded variable each replica takes its shard."""
    model = _only_model(run.trainer, source)
    if not any(map(sharded.variable_sharding, model.variables)):
        return load_keras_weights(source, model)
    whole = _only_model(fresh_trainer(run), source)
    count = load_keras_weights(source, whole)
    for variable, theirs in zip(model.variables, whole.variables, strict=True):
        if sharded.variable_sharding(variable):
            sharded.fill(variable, lambda box: theirs.value[box.slices])  # noqa: B023
        else:
            variable.assign(theirs)
    return count


def _only_model(trainer: Trainer, source: str) -> tf.keras.Model:
    models = [model for model in trainer.inventory.models if model.variables]
    if len(models) != 1:
        raise UsageError(
            f"init_from={source} holds the weights of one Keras model, and {type(trainer).__name__} has {len(models)}; "
            "load them in its build with load_weights, or give a run's checkpoint"
        )
    return models[0]


def has_whole_trainer(run: BaseRun) -> bool:
    """Returns whether a run's own models are whole, in this process, and those that evaluations use."""
    strategy = run.strategy
    return strategy.num_replicas == 1 and strategy.updates_here and not run.config.ema_decay


class TrainerCopy:
    """A copy of a run's trainer on this process's device, with the weights that evaluations use.

    A program may set weights of its models: `write_back` gives the run those that were set.
    """

    def __init__(self, run: BaseRun):
        self.trainer = copy_trainer(run)
        self._run = run
        self._run_variables = [variables.tf_variable(variable) for variable in _model_variables(run.trainer)]
        self._variables = [variables.tf_variable(variable) for variable in _model_variables(self.trainer)]
        self._note_weights()

    def refresh(self) -> None:
        """Gives the copy the run's present weights."""
        for mine, theirs in zip(_all_weights(self.trainer), _all_weights(self._run.trainer), strict=True):
            mine.assign(sharded.whole(theirs))
        self._note_weights()

    def write_back(self) -> None:
        """Gives the run the weights that were set in the copy, and as their averages."""
        changed = np.flatnonzero(hashes(self._variables).numpy() != self._hashes)
        if len(changed):
            _assign(self._run, [(self._run_variables[index], self._variables[index].numpy()) for index in changed])

    def _note_weights(self) -> None:
        hand_over_averages(self.trainer)
        self._hashes = hashes(self._variables).numpy()


def set_weights(run: BaseRun, values: Sequence | Mapping[str, Any], name: str | None) -> None:
    """Sets weights of a run, all of a model's or some by name; see `Run.set_weights`. Raises `UsageError`."""
    if isinstance(values, Mapping):
        named_targets = [(key, _find_weight(run.trainer, key)) for key in values]
        arrays = list(values.values())
    else:
        is_forward = name is None and type(run.trainer).forward is not Trainer.forward
        layers = (
            run.trainer.inventory.layers_without_averages if is_forward else [keras_model(run.trainer, name or MODEL)]
        )
        weights = [weight for layer in layers for weight in layer.weights]  # in Keras's order
        named_targets = [(variables.variable_path(weight), weight) for weight in weights]
        arrays = list(values)
        if len(arrays) != len(named_targets):
            raise UsageError(
                f"set_weights: {len(arrays)} arrays, and the model has {len(named_targets)} weights; give them in the "
                "order of run.model.get_weights()"
            )
    pairs, tables = list[tuple[Any, np.ndarray]](), run.trainer.inventory.tables.values()
    for (path, target), value in zip(named_targets, arrays, strict=True):
        pairs += _assignments(path, target, value, any(target is table for table in tables))
    _assign(run, pairs)


def _find_weight(trainer: Trainer, name: str) -> Any:
    """Finds the only weight or table of a name. Raises `UsageError`."""
    inventory = trainer.inventory
    # Not the layers that are averages of others.
    layers = [layer for path, layer in sorted(inventory.layers.items()) if path not in inventory.averaged]
    weights = [(variables.variable_path(weight), weight) for layer in layers for weight in layer.variables]
    weights += [(table.name, table) for table in inventory.tables.values()]
    chosen = [weight for path, weight in weights if path == name]
    if len(chosen) != 1:
        paths = [path for path, _ in weights]
        why = f"{len(chosen)} weights have this name; set_weights(list, name=MODEL) sets those of a model"
        raise UsageError(f"set_weights: {name!r}: {why if chosen else nearest(str(name), paths)}")
    return chosen[0]


def _assignments(path: str, target, value, is_table: bool) -> list[tuple[Any, np.ndarray]]:
    """Divides a weight's value into (variable, value) pairs: of a table, one for each shard. Raises `UsageError`."""
    sharding = None if is_table else sharded.variable_sharding(target)
    shape = (target.rows, target.width) if is_table else tuple(sharding.shape if sharding else target.shape)
    try:
        array = np.asarray(value, np.float32 if is_table else variables.tf_variable(target).dtype.as_numpy_dtype)
    except (TypeError, ValueError) as error:
        raise UsageError(f"set_weights: {path} takes an array of numbers ({reason(error)})") from None
    if array.shape != shape:
        raise UsageError(f"set_weights: {path} has the shape {[*shape]}, and its array {[*array.shape]}")
    if not is_table:
        return [(variables.tf_variable(target), array)]
    return [(shard, array[number :: len(target.shards)]) for number, shard in enumerate(target.shards)]


def _assign(run: BaseRun, pairs: Sequence[tuple[Any, np.ndarray]]) -> None:
    """Assigns whole values to a run's variables, on all replicas, and to their averages."""
    shadows = dict[int, list[Any]]()
    for optimizer in run.trainer.inventory.optimizers.values():
        if (average := optimizer.weight_average) is not None:
            for variable, shadow in zip(average.all_variables, average.shadows, strict=True):
                shadows[id(variable)] = [shadow]
    for variable, value in pairs:
        for target in [variable, *shadows.get(id(variable), ())]:
            if sharded.variable_sharding(target):
                sharded.fill(target, lambda box: value[box.slices])  # noqa: B023
            else:
                target.assign(value)
    if run.checkpoints:
        run.checkpoints.outdate()


def hand_over_averages(trainer: Trainer) -> None:
    """Replaces weights by their moving averages, if any."""
    for optimizer in trainer.inventory.optimizers.values():
        if optimizer.weight_average is not None:
            optimizer.weight_average.hand_over()


def unsharded_trainer(run: BaseRun) -> Trainer:
    """Returns the run's trainer; if weights are sharded over a mesh, a whole copy on this process's device."""
    return copy_trainer(run) if any(map(sharded.variable_sharding, _all_weights(run.trainer))) else run.trainer


def copy_trainer(run: BaseRun) -> Trainer:
    """Makes the run's trainer again, on this process's device, with its weights and their averages."""
    trainer = fresh_trainer(run)
    try:
        for copied, theirs in zip(_all_weights(trainer), _all_weights(run.trainer), strict=True):
            copied.assign(sharded.whole(theirs))
    except ValueError as error:
        raise UsageError(
            f"{error}, so no process has the model; make it of the run's checkpoint, in one process: crankshaft train "
            "mode=export, or crankshaft.load_model"
        ) from error
    return trainer


def _model_variables(trainer: Trainer) -> list:
    inventory = trainer.inventory
    listed = [variable for _, layer in sorted(inventory.layers.items()) for variable in layer.variables]
    return [*listed, *inventory.unlisted_variables, *inventory.variables]


def _all_weights(trainer: Trainer) -> list:
    """Lists the variables of layers, the trainer and tables, by which ids have their rows, and the weights' averages.

    Also those of a compiled model's optimizer, with which Keras can train a copy further.
    """
    inventory = trainer.inventory
    table_variables = [variable for _, table in sorted(inventory.tables.items()) for variable in table.variables]
    averages: list[Any] = [optimizer.weight_average for _, optimizer in sorted(inventory.optimizers.items())]
    shadows = [shadow for average in averages if average is not None for shadow in average.shadows]
    return [*_model_variables(trainer), *table_variables, *shadows, *trainer.compiled_variables]


def fresh_trainer(run: BaseRun) -> Trainer:
    """Makes the run's trainer again, on this process's device, with initial weights."""
    with isolation.Isolation(run.config.keras_defaults).entered():
        context = dataclasses.replace(run.trainer.run_context, in_place=False)
        return prepare(type(run.trainer)(**run.config.configured_arguments("model_arg")), context)


def _load_components(prefix: str, components: Mapping[str, Any], **options: bool) -> list[str]:
    """Loads a checkpoint's weights into components of a trainer, by their paths in it; returns variables' names."""
    names = list[str]()
    for path, component in components.items():
        if any(objects.is_variable(node) for _, node in objects.walk(component)):  # a Dropout's seeds are not saved
            names += load_weights(prefix, component, f"trainer.{path}", **options)
    return names


def load_for_prediction(trainer: Trainer, prefix: str, final: bool) -> Trainer:
    """Loads all that predictions depend on from a checkpoint: layers, tables, the trainer's variables, and averages.

    Args:
      final: whether the averages of Keras's `use_ema`, with which training ends, replace the weights.
    """
    inventory = trainer.inventory
    _load_components(prefix, {**inventory.layers, **inventory.tables}, final=final)
    own = {id(variable) for variable in variables.tracked_variables(trainer).values()}
    for at, variable in [(at, node) for at, node in objects.walk(trainer) if id(node) in own]:
        load_weights(prefix, variable, ".".join(("trainer", *at)), final=final)
    for path, optimizer in inventory.optimizers.items():
        if optimizer.weight_average is not None:
            load_weights(prefix, optimizer.weight_average, f"trainer.{path}.weight_average")
    hand_over_averages(trainer)
    return trainer
