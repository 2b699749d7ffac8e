"""A run's model outside of the run, which predicts on all that the run does. Host code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from ...engine import Trainer
from ...engine.data import frames
from ...engine.data.source import Source, Split
from ...engine.data.streamed import Stream
from ...engine.internals import keras
from ...input.data import Data
from .. import explanations
from ..command_line import config as configs
from ..command_line.config import Config
from ..errors import UsageError
from . import prediction_files, predictions, weights
from .names import Names

_BATCH_SIZE = 32  # Keras's


def load(run_dir: str, which: str, trainer_class: type[Trainer] | None, name: str) -> tf.keras.Model:
    """Makes a Keras model of a run's checkpoint; see `crankshaft.load_model`."""
    model, saved = weights.load(run_dir, which, trainer_class, name), weights.about(run_dir)
    run = LoadedRun(run_dir, saved.known, saved.logits_of if name == weights.MODEL else None)
    own = keras.inputs_of(model)
    model.names, model.predict = run.names, run.predict_by(model, saved.features if own is None else own)
    return model


class LoadedRun:
    """What is known of a run whose model was loaded (`predictions.OfRun`), read where it is first needed.

    Args:
      run_dir: of the run.
      known: what its data says of itself.
      logits_of: see `weights.logits_of`.
    """

    def __init__(self, run_dir: str, known: Data, logits_of: str | None):
        self.known, self.names = known, Names(known)
        self._run_dir, self._logits_of = run_dir, logits_of

    @functools.cached_property
    def config(self) -> Config:
        """The run's configuration, of its data alone. Raises `UsageError`."""
        return configs.of_data(self._run_dir)

    @functools.cached_property
    def splits(self) -> Mapping[str, Source | Stream]:
        """The run's data, by "train" and "eval". Raises `UsageError`."""
        if self.config.input is None:
            raise UsageError(
                f"the data of {self._run_dir} was given by its program; give predict the examples, or an input's name"
            )
        return predictions.of_input(self, self.config.input)

    def predict_by(self, model: tf.keras.Model, features: Any) -> Callable[..., Any]:
        """Returns a `predict` of a model that takes what `Run.predict` takes, and all that Keras's own takes.

        Args:
          model: with Keras's own.
          features: nest of arrays or specs [examples, ...] that it takes.
        """
        of_keras = model.predict

        def predict(x=None, batch_size=None, *arguments, split=None, columns=False, **keywords):
            with explanations.as_lines():
                if columns or split or x is None or isinstance(x, (str, Split, tf.data.Dataset)) or frames.is_loader(x):
                    examples = predictions.examples(self, features, x, split)
                    read = predictions.features_of(self, examples, batch_size or _BATCH_SIZE)
                    parts = [model.predict_on_batch(batch) for batch in read]
                    outputs = tf.nest.map_structure(lambda *each: np.concatenate(each), *parts)
                    return prediction_files.columns(self, examples, outputs, self._logits_of) if columns else outputs
                if isinstance(features, dict):  # else a data frame is one array, as Keras has it
                    x = frames.as_arrays(x, may_lack=bool(self.known.treatments))
                x = self.names.ids(x)
            return of_keras(x, batch_size, *arguments, **keywords)

        return predict
