"""A run on disk, and Keras models of its checkpoints or of a trainer, which predict as the run does."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from ...engine import logging, optimizers
from ...engine.build import make_optimizer, prepare
from ...engine.checkpoints import Checkpoints, Manifest
from ...engine.checkpoints.run_dir import NAMES, RunDir
from ...engine.data import form, frames
from ...engine.data.entry import user_data
from ...engine.data.source import Source
from ...engine.data.streamed import Stream
from ...engine.internals import keras, keras_calls, keras_state
from ...engine.step.options import RunContext, StepOptions
from ...engine.trainer import Trainer
from .. import explanations
from ..command_line import config as configs
from ..command_line import registry, saved_config, user_files
from ..command_line.config import Config
from ..command_line.values import differences, plain
from ..failures import UsageError
from ..host.isolation import Isolation
from ..restored import restoring, weights
from ..saved import architecture as architectures
from ..saved import model_file
from ..saved.preprocessor import Names, check_names
from . import predicting, prediction_files
from .predicting import RunView

_BATCH_SIZE = 32  # Keras's
_MODEL_FLAGS = ("model", "precision", "ema_decay")  # of a run, that its model depends on


class SavedRun:
    """A run on disk, read where it is first needed.

    Raises:
      UsageError: the folder has no run, or no description of its model.
    """

    def __init__(self, run_dir: str):
        if (run := saved_config.load(run_dir)) is None:
            raise UsageError(f"{run_dir} holds no run (no {NAMES.config}); give the folder of a run")
        self.run_dir, self._deciding = run_dir, run["deciding"]

    @functools.cached_property
    def description(self) -> model_file.ModelDescription:
        """The run's description of its model. Raises `UsageError`."""
        return model_file.read(self.run_dir)

    @functools.cached_property
    def view(self) -> RunView:
        """The run as predictions see it. Raises `UsageError`."""
        saved, names = self.description, Names(self.description.data_info)
        get_config = functools.cache(functools.partial(configs.data_config, self.run_dir))
        get_splits = functools.cache(self._splits)
        return RunView(saved.data_info, names, saved.features, saved.logits_kind, get_config, get_splits)

    def _splits(self) -> Mapping[str, Source | Stream]:
        config = self.view.get_config()
        if config.input is None:
            raise UsageError(
                f"the data of {self.run_dir} was passed by its program; pass predict the examples, or an input's name"
            )
        return predicting.input_splits(self.view, config.input)

    def model(self, which: str, trainer_class: type[Trainer] | None, name: str | None) -> tf.keras.Model:
        """Makes a Keras model of a checkpoint; see `crankshaft.load_model`."""
        environment = Isolation(Config(run_dir=self.run_dir, mode="predict").keras_defaults)
        with environment.entered():
            trainer = self.trainer(which, functools.partial(self._build_trainer, trainer_class, name))
        return model_of_trainer(trainer, self.view, environment, name)

    def _build_trainer(self, trainer_class: type[Trainer] | None, name: str | None, manifest: Manifest) -> Trainer:
        """Builds the trainer of a checkpoint's model, with initial weights.

        Raises:
          UsageError: it takes the trainer's class to make it.
        """
        saved, path = self.description, manifest.path
        about = saved_config.check(path, manifest.about)
        flags, deciding = saved_config.typed_values(path, about, _MODEL_FLAGS), about["deciding"]
        ema_decay = flags.get("ema_decay", 0.0)
        if trainer_class is None and (architecture := self._architecture(name, flags, deciding, manifest)) is not None:
            trainer: Trainer = _ArchitectureTrainer(name or weights.MODEL, json.dumps(architecture))
        else:
            trainer_class = trainer_class or registry.find("model", flags["model"]).make
            user_data = registry.class_entry(trainer_class)
            defaults = plain(user_data.defaults)
            given = {name: value for name, value in deciding["model_arg"].items() if value != defaults.get(name, ...)}
            try:
                trainer = trainer_class(**registry.coerce_arguments("model_arg", given, user_data))
            except UsageError as error:
                raise UsageError(f"{path}: {error.message}; restore it from a copy") from None
        options = StepOptions(precision=flags.get("precision", "float32"), ema_decay=ema_decay)
        num_servers, example = manifest.table_shards or 1, (saved.features, None)
        context = RunContext(options, saved.data_info.num_classes, saved.data_info.vocabulary, num_servers, example)
        prepared = prepare(trainer, context)
        if changed := trainer_class and architectures.changes(saved.content, prepared):
            logging.warning("%s is of a model of other layers than this trainer's (%s)", path, changed)
        return prepared

    def _architecture(
        self, name: str | None, flags: Mapping[str, Any], deciding: Mapping[str, Any], manifest: Manifest
    ) -> dict[str, Any] | None:
        """Finds Keras's configuration of a checkpoint's model; None if its trainer is one of Crankshaft's.

        Raises:
          UsageError: it takes the trainer's class to make it.
        """
        saved = self.description
        architecture = saved.architectures.get(name or weights.MODEL)
        has_average = bool(flags.get("ema_decay"))
        if name not in (None, weights.MODEL) and (architecture is None or has_average):
            others = ", ".join(saved.architectures) or "no model"
            why = "an average of its weights" if architecture else f"{others} alone"
            raise UsageError(
                f"load_model(name={name!r}): {self.run_dir}/{NAMES.model} has {why}; give load_model its "
                "trainer_class, which defines the model"
            )
        if architecture is not None and (name or saved.model_is_forward):
            return architecture
        user_files.refuse_unnamed_code(manifest.path, flags, fix="load_model its trainer_class")
        if not flags.get("model"):
            owner = kind = deciding["model"]
            more = "" if saved.model_is_forward else ", whose forward computes the predictions"
            alone = f', or name="{weights.MODEL}" for its Keras model alone' if architecture and more else ""
            if "compile" in manifest.about:  # the class, or a function, of a compiled model
                kind, more = "KerasTrainer.for_model(make)", f"{more}, which Keras can't make from its configuration"
                alone = ", where make is the function that makes and compiles it"
            raise UsageError(f"this run's model is {owner}'s{more}; give load_model(..., trainer_class={kind}){alone}")
        return None

    def trainer(self, which: str, build: Callable[[Manifest], Trainer]) -> Trainer:
        """Returns a trainer with the weights of a checkpoint that evaluations use.

        Args:
          which: "latest", "best", or a step.
          build: builds the trainer of a checkpoint, with initial weights.

        Raises:
          UsageError: there is no such checkpoint.
        """
        folder = RunDir(self.run_dir).folder(which)
        checkpoints = Checkpoints(folder, tf.train.Checkpoint(), keep=None, about={}, writes=False)
        built: tuple[Any, Trainer] | None = None

        def read(manifest: Manifest) -> list[Trainer]:
            # Building takes longer than a live run may keep a checkpoint. So where one is gone by then, the next is
            # read into the same trainer, if it is of the same configuration.
            nonlocal built
            key = manifest.about.get("flags"), manifest.about.get("deciding"), manifest.variables
            if built is None or built[0] != key:
                built = key, build(manifest)
            trainer = weights.load_for_prediction(built[1], manifest.prefix, final=which == "latest")
            path = manifest.path
            if changed := differences(saved_config.check(path, manifest.about)["deciding"], self._deciding):
                logging.warning("%s is of another configuration than the run (%s)", path, "; ".join(changed))
            return [trainer]

        if trainers := checkpoints.read(read, lambda manifest: which in ("latest", "best", str(manifest.step))):
            return trainers[0]
        raise restoring.missing(self.run_dir, checkpoints, which)


class _ArchitectureTrainer(Trainer):
    """The trainer of a model that Keras makes from its configuration, for a run whose own class is not needed.

    Args:
      name: the attribute that has the model.
      architecture: configuration of the model, JSON as text.
    """

    def __init__(self, name: str, architecture: str):
        self._name, self._architecture = name, architecture

    def build(self) -> None:
        from ...engine import layers  # noqa: F401 - so that Keras knows them by name

        try:
            loaded = [] if keras_state.loads_anything() else [*keras_state.loaded_files(json.loads(self._architecture))]
            if loaded:
                raise UsageError(
                    "this run's model has a layer {} that loads the file {}, as whoever made the run's folder chose; "
                    "look what it is, and call keras.config.enable_unsafe_deserialization() first, or give "
                    "load_model(..., trainer_class=)".format(*loaded[0])
                )
            # A layer that Keras builds by its own entry has a path without the model's name, which the run's has.
            unbuilt = json.loads(
                self._architecture, object_pairs_hook=lambda x: {k: v for k, v in x if k != "build_config"}
            )
            model = tf.keras.models.model_from_json(json.dumps(unbuilt))
            if not all(layer.built for layer in keras.layers_in(model)):
                model = tf.keras.models.model_from_json(self._architecture)
        except (TypeError, ValueError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(
                f"Keras can't make this run's model from its configuration ({' '.join(str(error).split())[:200]}); "
                "register its layers with keras.saving.register_keras_serializable, or give "
                "load_model(..., trainer_class=)"
            ) from None
        setattr(self, self._name, model)
        if self.run_context.options.ema_decay:  # the weights' average is its optimizer's
            self.optimizer = make_optimizer(self, model.trainable_variables, optimizers.SGD())


class ForwardModel(tf.keras.Model):
    """A Keras model that computes a trainer's `forward`: where that is more than calling `Trainer.model`.

    It has the trainer's layers, without averages of models, and looks up ids in its tables. It can't be trained, or
    saved as a `.keras` file.

    Args:
      trainer: trainer, built, with the weights to predict with.
    """

    def __init__(self, trainer: Trainer):
        super().__init__(name=type(trainer).__name__.lower(), dtype="float32", autocast=False)
        self.trainer_layers = trainer.inventory.layers_without_averages
        self.trainer = trainer
        self._forward = tf.autograph.experimental.do_not_convert(trainer.forward)
        self.built = True  # its layers are

    def call(self, features, training=False):
        return tf.nest.map_structure(keras_calls.in_float32, self._forward(features, training=bool(training)))

    def fit(self, *_, **__):
        raise UsageError(f"fit: this model computes {type(self.trainer).__name__}.forward; train it by crankshaft.run")

    def save(self, *_, **__):
        raise UsageError(
            f"save: a .keras file can't hold {type(self.trainer).__name__}.forward; export a SavedModel by "
            f'run(..., mode="export"), or save the Keras model alone, load_model(..., name="{weights.MODEL}")'
        )


def model_of_trainer(trainer: Trainer, run: RunView, environment: Isolation, name: str | None = None) -> tf.keras.Model:
    """Returns a Keras model that predicts as a trainer does, on all that `Run.predict` takes.

    Args:
      trainer: trainer, built, with the weights to predict with.
      name: name of the attribute of the trainer whose model predicts alone; None is `Trainer.forward`.

    Raises:
      UsageError: the trainer has no such model.
    """
    if name is None and type(trainer).forward is not Trainer.forward:
        model: tf.keras.Model = ForwardModel(trainer)
    else:
        model = weights.keras_model(trainer, name or weights.MODEL)
    features = predicting.forward_and_features(trainer, trainer.run_context.example, name)[1]
    return _with_predict(model, run, environment, features, name)


def _with_predict(
    model: tf.keras.Model, run: RunView, environment: Isolation, features: Any, name: str | None
) -> tf.keras.Model:
    """Gives a model `names`, and a `predict` that takes what `Run.predict` takes, and all that Keras's own takes.

    Args:
      features: features that the model takes, a nest of arrays or specs [examples, ...], if it does not define them.
      name: name of the trainer's attribute that is the model; None is `Trainer.forward`.
    """
    inputs = keras_calls.symbolic_inputs(model)
    features = features if inputs is None else inputs
    keras_predict, padded = functools.partial(type(model).predict, model), list[form.Padded]()
    form.map_padded(padded.append, features)
    needs_lengths = any(type(batch) is form.Padded for batch in padded)

    def checked(x: Any) -> Any:
        if isinstance(x, dict) and isinstance(features, dict):
            unused = run.features if isinstance(run.features, dict) else {}  # of the data, that the model does not take
            check_names("the data", features, [name for name in x if name in features or name not in unused])
            for name, spec in features.items():
                if is_text(x[name]) and not is_text(spec):
                    raise UsageError(f"column {name!r} is text, and the model takes numbers there; make numbers of it")
        return x

    def is_text(x: Any) -> bool:
        return hasattr(x, "dtype") and tf.as_dtype(x.dtype) == tf.string

    def to_tensor(x: Any) -> Any:  # of text, which Keras takes in any form as a tensor
        return tf.constant(x) if isinstance(x, np.ndarray) and x.dtype.kind in "SUO" else x

    # Made where a call first needs it: the `predict` of Keras does without.
    predictor = functools.cache(functools.partial(predicting.model_predictor, model, checked))

    @explanations.explained
    def predict(x=None, batch_size=None, *arguments, split=None, columns=False, **keywords):
        with environment.defaults():
            is_ours = columns or split or x is None or isinstance(x, str) or needs_lengths
            if is_ours or user_data.has_whole_examples(x):
                examples = predicting.prediction_split(run, features, x, split)
                outputs = predictor()(examples, batch_size or _BATCH_SIZE)
                return prediction_files.prediction_columns(run, examples, outputs, name) if columns else outputs
            preprocessing = run.data_info.preprocessing
            if isinstance(features, dict) or preprocessing.array:  # else a frame is one array, as Keras has it
                x = frames.as_arrays(x, may_lack=preprocessing.may_lack or not isinstance(features, dict))
            elif isinstance(x, (list, tuple)):
                x = frames.as_arrays(x, as_one=True)
            x = tf.nest.map_structure(to_tensor, checked(run.names.ids(x)))
        with environment.defaults():
            return keras_predict(x, batch_size, *arguments, **keywords)

    model.names, model.predict = run.names, predict
    return model
