"""Weights from elsewhere: those that a run begins with, and a run's model made outside of it. Host code."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging

from ...engine import StepOptions, Trainer
from ...engine.build import prepare
from ...engine.checkpoints import CheckpointError, Checkpoints, Manifest, load_weights
from ...engine.checkpoints.run_dir import NAMES, RunDir
from ...engine.data.source import Spec
from ...engine.holdings import Holdings
from ...engine.hooks import numerics
from ...engine.hooks.sync_check import hashes
from ...engine.internals import variables
from ...engine.machine.files import read_json
from ...engine.mesh import cuts
from ...engine.optimizers.averaging import WeightAverage
from ...engine.reduction import Reduction
from ...engine.step import batches
from ...input import known
from ...input.data import Data
from ...models.classification import Classifier
from ...models.tabular import Tabular
from ..command_line import config as configs
from ..command_line import own_files, registry
from ..command_line.config import KERAS_FILES
from ..command_line.values import differences
from ..errors import UsageError
from ..host import isolation
from ..host.files import write_of_run
from . import splits
from .keras_weights import load_keras_weights
from .session import Session

MODEL = "model"  # the attribute of the one that `Trainer.forward` computes, unless the trainer says otherwise


def write(session: Session, run_dir: str) -> None:
    """Writes what `load` makes the model from: Keras's own configuration of it, and what is known of the data."""
    models = {name: _architecture(model) for name, model in models_of(session.trainer).items()}
    model = models.pop(MODEL, None)
    features = _described(batches.features(session.example))
    content = {"keras": model, **({"models": models} if models else {}), "features": features}
    content["logits_of"] = logits_of(session.trainer)
    write_of_run(RunDir(run_dir).model, {**content, **known.as_json(session.known)})


def logits_of(trainer: Trainer) -> str | None:
    """Returns what the outputs of `Trainer.forward` are logits of, "clicks" or "classes"; None if that is not known."""
    if isinstance(trainer, Tabular) and trainer.predicts_clicks:
        return "clicks"
    return "classes" if isinstance(trainer, Classifier) else None


def _architecture(model: tf.keras.Model) -> dict[str, Any] | None:
    """Returns Keras's configuration of a model; None of a subclassed one that has none."""
    try:
        architecture = json.loads(model.to_json())
    except (NotImplementedError, TypeError, ValueError):  # as Keras has it of subclassed models
        return None
    architecture.pop("compile_config", None)  # weights are loaded, and no optimizer's state
    return architecture


def models_of(trainer: Trainer) -> dict[str, tf.keras.Model]:
    """Returns the Keras models among a trainer's attributes, by their names."""
    return variables.held(trainer, tf.keras.Model)


def named(trainer: Trainer, name: str) -> tf.keras.Model:
    """Returns a trainer's Keras model by its name. Raises `UsageError` where there is none of that name."""
    models = models_of(trainer)
    if name not in models:
        kind, there = type(trainer).__name__, ", ".join(models) or "none"
        raise UsageError(f"name={name!r}: {kind} has no Keras model of that name; it has {there}")
    return models[name]


def load(run_dir: str, which: str, trainer_class: type[Trainer] | None, name: str) -> tf.keras.Model:
    """Makes a Keras model of a run's checkpoint; see `crankshaft.load_model`."""
    manifest, saved = _find(run_dir, which), about(run_dir)
    architecture = saved.architectures.get(name)
    if trainer_class is None and name != MODEL and (architecture is None or _averages(manifest)):
        why = "an average of its weights" if architecture else f"{', '.join(saved.architectures) or 'no model'} alone"
        raise UsageError(
            f"load_model(name={name!r}): {run_dir}/{NAMES.model} has {why}; give load_model its trainer_class, which "
            "says what the model is"
        )
    with isolation.Isolation():
        if trainer_class is None and architecture is not None:
            return _of_architecture(architecture, manifest, name)
        return named(_trainer_of(trainer_class, manifest, saved), name)


class About(NamedTuple):
    """What `write` has written: Keras's configurations of models, by name; features of one example; what is known.

    And `logits_of`, as the function of that name returns it.
    """

    architectures: dict[str, dict[str, Any]]
    features: Any
    known: Data
    logits_of: str | None


def about(run_dir: str) -> About:
    """Reads what a run has written of its model. Raises `UsageError`."""
    try:
        content = read_json(RunDir(run_dir).model)
        models = {**content.get("models", {}), MODEL: content["keras"]}
        if wrong := [each for each in models.values() if not isinstance(each, (dict, type(None)))]:
            raise ValueError(f"keras is {wrong[0]!r:.60}, which is not an object")
        models = {name: each for name, each in models.items() if each is not None}
        features, data = _zeros(content["features"]), known.of_json(content, NAMES.model)
        return About(models, features, data, content.get("logits_of"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{run_dir}/{NAMES.model} does not say what the model is ({error}); train the run on"
        ) from None


def start(session: Session) -> None:
    """Loads the weights, and nothing else, of --init_from: another run's checkpoint or a Keras file."""
    if not (source := session.config.init_from):
        return
    held = Holdings(session.trainer)
    if source.endswith(KERAS_FILES):
        taken = _load_keras_file(session, source)
    else:
        taken = _load(source, {**held.layers, **held.tables})
    for optimizer in held.optimizers.values():
        if optimizer.weight_average is not None:
            optimizer.weight_average.reset()  # else it would still hold the weights that the model was made with
    numerics.check_weights(session.trainer, f"--init_from={source}")
    session.say(f"{taken} weights taken from {source}")


def _load_keras_file(session: Session, source: str) -> int:
    """Loads a Keras file into a session's model; of what is cut over a mesh each replica takes its part."""
    model = _only_model(session.trainer, source)
    if not any(map(cuts.cut_of, model.variables)):
        return load_keras_weights(source, model)
    whole = _only_model(_copy(session), source)
    taken = load_keras_weights(source, whole)
    for variable, theirs in zip(model.variables, whole.variables, strict=True):
        if cuts.cut_of(variable):
            cuts.fill(variable, functools.partial(_part, theirs))
        else:
            variable.assign(theirs)
    return taken


def _part(variable, box: cuts.Box) -> tf.Tensor:
    return variable.value[box.slices]


def _only_model(trainer: Trainer, source: str) -> tf.keras.Model:
    models = [model for model in Holdings(trainer).models if model.variables]
    if len(models) != 1:
        raise UsageError(
            f"--init_from={source} holds the weights of one Keras model, and {type(trainer).__name__} has "
            f"{len(models)}; load them in its build with load_weights, or give a run's checkpoint"
        )
    return models[0]


def trained(session: Session, name: str = MODEL) -> tf.keras.Model:
    """Returns a model of a session by its name, with the weights that evaluations use."""
    trainer = session.trainer if trains_what_it_hands_out(session) else HandedOut(session).trainer
    return getattr(trainer, name, None) or named(trainer, name)


def trains_what_it_hands_out(session: Session) -> bool:
    """Returns whether a session's own models are whole, in this process, and those that evaluations use."""
    strategy = session.strategy
    return strategy.num_replicas == 1 and strategy.updates_here and not session.config.ema_decay


class HandedOut:
    """A copy of a session's trainer on this process's device, with the weights that evaluations use.

    A program may set weights of its models: `give_back` gives the run those that were set.

    Attributes:
      trainer: the copy.
    """

    def __init__(self, session: Session):
        self.trainer = _copied(session)
        self._run_weights = _weights(session.trainer)
        averages: list[Any] = [each.weight_average for each in Holdings(session.trainer).optimizers.values()]
        shadows = {
            id(variable): shadow
            for average in filter(None, averages)
            for variable, shadow in zip(average.of_variables, average.shadows, strict=True)
        }
        theirs = [variables.tf_variable(each) for each in _layers(session.trainer)]
        self._targets = [[each, shadows[id(each)]] if id(each) in shadows else [each] for each in theirs]
        self._own = [variables.tf_variable(each) for each in _layers(self.trainer)]
        self._settle()

    def refresh(self) -> None:
        """Gives the copy the run's weights of now."""
        for mine, theirs in zip(_weights(self.trainer), self._run_weights, strict=True):
            mine.assign(cuts.whole(theirs))
        self._settle()

    def give_back(self) -> None:
        """Gives the run the weights that were set in the copy, and as their averages."""
        for place in np.flatnonzero(hashes(self._own) != self._known):
            value = self._own[place].read_value()
            for target in self._targets[place]:
                cuts.fill(target, lambda box: value[box.slices]) if cuts.cut_of(target) else target.assign(value)  # noqa: B023

    def _settle(self) -> None:
        for optimizer in Holdings(self.trainer).optimizers.values():
            if optimizer.weight_average is not None:
                optimizer.weight_average.hand_over()
        self._known = hashes(self._own)


def alone(session: Session) -> Trainer:
    """Returns the session's trainer; where weights are cut over a mesh a copy on this process's device, with all."""
    layers = Holdings(session.trainer).layers.values()
    return _copied(session) if any(cuts.cut_of(v) for layer in layers for v in layer.variables) else session.trainer


def restored(session: Session, prefix: str) -> tf.keras.Model:
    """Returns a copy of a session's model, with the weights of a checkpoint that evaluations use."""
    trainer = _copy(session)
    _take(trainer, prefix)
    return trainer.model


def _copied(session: Session) -> Trainer:
    """Makes the session's trainer again, on this process's device, with its weights and their averages."""
    trainer = _copy(session)
    try:
        for to, theirs in zip(_weights(trainer), _weights(session.trainer), strict=True):
            to.assign(cuts.whole(theirs))
    except ValueError as error:
        raise UsageError(
            f"{error}, so no process has the model; make it of the run's checkpoint, in one process: crankshaft train "
            "--mode=export, or crankshaft.load_model"
        ) from error
    return trainer


def _layers(trainer: Trainer) -> list:
    """Lists the layers' variables."""
    return [variable for _, layer in sorted(Holdings(trainer).layers.items()) for variable in layer.variables]


def _weights(trainer: Trainer) -> list:
    """Lists the layers' variables, and their averages."""
    optimizers = sorted(Holdings(trainer).optimizers.items())
    averages: list[Any] = [optimizer.weight_average for _, optimizer in optimizers]
    return _layers(trainer) + [shadow for average in averages if average is not None for shadow in average.shadows]


def _copy(session: Session) -> Trainer:
    """Makes the session's trainer again, on this process's device."""
    if not models_of(session.trainer):
        raise UsageError(f"{type(session.trainer).__name__} has no Keras model; name the one to hand out self.model")
    with isolation.Isolation():
        trainer = type(session.trainer)(**session.config.given_arguments("model_arg"))
        own = session.trainer.given
        prepare(trainer, own.options, Reduction(), session.example, own.num_classes, own.vocabulary, own.num_servers)
    return trainer


def _load(source: str, parts: Mapping[str, Any]) -> int:
    """Loads a checkpoint's weights into parts of a trainer, by their paths in it; returns how many there are."""
    return sum(len(load_weights(source, part, f"trainer.{path}")) for path, part in parts.items() if part.variables)


def _take(trainer: Trainer, prefix: str) -> None:
    held = Holdings(trainer)
    _load(prefix, held.layers)
    for path, optimizer in held.optimizers.items():
        if optimizer.weight_average is not None:
            load_weights(prefix, optimizer.weight_average, f"trainer.{path}.weight_average")
            optimizer.weight_average.hand_over()


def _averages(manifest: Manifest) -> bool:
    return bool(manifest.about.get("flags", {}).get("ema_decay"))


def _of_architecture(architecture: dict[str, Any], manifest: Manifest, name: str) -> tf.keras.Model:
    from ...engine import layers  # noqa: F401 - so that Keras knows them by name

    try:
        model = tf.keras.models.model_from_json(json.dumps(architecture))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"Keras can't make this run's model from its configuration ({' '.join(str(error).split())[:200]}); "
            "register its layers with keras.saving.register_keras_serializable, or give load_model(..., trainer_class=)"
        ) from None
    load_weights(manifest.prefix, model, f"trainer.{name}")
    if _averages(manifest):
        average = WeightAverage(0.0)
        average.build(model.trainable_variables)
        load_weights(manifest.prefix, average, "trainer.optimizer.weight_average")
        average.hand_over()
    return model


def _trainer_of(trainer_class: type[Trainer] | None, manifest: Manifest, saved: About) -> Trainer:
    where = manifest.path
    flags, deciding = (configs.of_run(where, manifest.about)[part] for part in ("flags", "deciding"))
    if trainer_class is None:
        own_files.refuse_of_file(where, {"model": flags.get("model")}, cure="load_model its trainer_class")
        if not flags.get("model"):
            name = deciding["model"]
            raise UsageError(f"this run's model is {name}'s; give load_model(..., trainer_class={name})")
        entry = registry.find("model", str(flags["model"]))
        if wrong := registry.wrong_argument(deciding["model_arg"], entry):
            raise UsageError(f"{where}: model_arg {wrong}; restore it from a copy")
        trainer_class = entry.make
    trainer = trainer_class(**deciding["model_arg"])
    options = StepOptions(precision=flags.get("precision", "float32"), ema_decay=flags.get("ema_decay") or 0.0)
    prepare(trainer, options, Reduction(), (saved.features, None), saved.known.num_classes, saved.known.vocabulary)
    _take(trainer, manifest.prefix)
    return trainer


def _find(run_dir: str, which: str) -> Manifest:
    """Finds the newest whole checkpoint, the best, or that of a step. Raises `UsageError`."""
    if (run := configs.read(run_dir)) is None:
        raise UsageError(f"{run_dir} holds no run (no {NAMES.config}); give the folder of a run")
    folder = RunDir(run_dir).folder(which)
    checkpoints = Checkpoints(folder, tf.train.Checkpoint(), keep=None, about={}, writes=False)
    if which in ("latest", "best"):
        manifest = checkpoints.latest()
    else:
        manifest = next(iter(checkpoints.all(lambda each: str(each.step) == which)), None)
    if manifest is None:
        steps, problem = ", ".join(str(each.step) for each in checkpoints.all()), checkpoints.problem()
        without = f"{problem}; mend it" if problem else "train first"
        cure = f"use latest, best, or a step of {steps}" if steps else without
        raise UsageError(f"{run_dir} has no whole checkpoint {which}; {cure}")
    if problem := manifest.problem():
        raise CheckpointError(problem)
    where = manifest.path
    if changed := differences(configs.of_run(where, manifest.about)["deciding"], run["deciding"]):
        logging.warning("%s is of another configuration than the run (%s)", where, "; ".join(changed))
    return manifest


def _described(features) -> Any:
    """Returns the shapes and dtypes of one example's features, plain JSON."""
    if isinstance(features, dict):
        return {"dict": {name: _described(value) for name, value in features.items()}}
    if isinstance(features, (tuple, list)):
        return {"tuple": [_described(value) for value in features]}
    return {"shape": list(features.shape[1:]), "dtype": np.dtype(features.dtype).name}


def _zeros(described: dict[str, Any]) -> Any:
    if "dict" in described:
        return {name: _zeros(value) for name, value in described["dict"].items()}
    if "tuple" in described:
        return tuple(_zeros(value) for value in described["tuple"])
    return splits.zeros(Spec(tuple(described["shape"]), described["dtype"]))
