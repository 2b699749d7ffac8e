"""Computes a run's outputs and metrics, in the process that trains it. Host code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from ...engine import Trainer
from ...engine.data import frames
from ...engine.data.arrays import ArraySource
from ...engine.data.source import Split
from ...engine.holdings import Holdings
from ...engine.hooks import evaluation
from ...engine.hooks.evaluation import averaged_weights
from ...engine.internals import keras
from ...engine.step import batches
from ..errors import UsageError
from . import lent, splits, weights
from .session import Session


def forward(session: Session, name: str | None = None) -> Callable[[Any], Any]:
    """Returns a function from features of any number of examples to NumPy outputs, with evaluation's weights.

    Args:
      session: of the run.
      name: of a Keras model that the trainer holds; None is `Trainer.forward`.
    """
    trainer, size = weights.alone(session), session.config.eval_batch_size
    if name is None:
        taken, run = features_taken(trainer, session.example), trainer.forward
    else:
        run = weights.named(trainer, name)
        taken = (
            _any_size(own)
            if (own := keras.inputs_of(run)) is not None
            else _any_size(batches.features(session.example))
        )
    has_average = any(each.weight_average is not None for each in Holdings(trainer).optimizers.values())
    wanted = tf.nest.map_structure(lambda x: tf.TensorSpec(x.shape[1:], x.dtype), taken)

    @tf.function(input_signature=[taken], autograph=False)
    def compute(features):
        outputs = run(features, training=False)
        return tf.nest.map_structure(lambda x: tf.cast(x, tf.float32) if x.dtype.is_floating else x, outputs)

    def predict(features):
        if isinstance(features, (Split, tf.data.Dataset)):
            raise UsageError(
                f"predict was given a {type(features).__name__}; give features alone, as arrays: of a tf.data.Dataset "
                "np.stack([features for features, *_ in dataset]), of a Source what its read returns"
            )
        features = frames.as_arrays(features, may_lack=bool(session.known.treatments))
        features = tf.nest.map_structure(np.asarray, splits.as_arrays(session.names.ids(features)))
        lent.check_like("features", wanted, ArraySource(features).element_spec)
        count = len(tf.nest.flatten(features)[0])
        with averaged_weights(trainer) if has_average else contextlib.nullcontext():
            parts = [
                compute(tf.nest.map_structure(lambda x, at=at: tf.constant(x[at : at + size]), features))
                for at in range(0, max(count, 1), size)
            ]
        return tf.nest.map_structure(lambda *pieces: np.concatenate([piece.numpy() for piece in pieces]), *parts)

    return predict


def features_taken(trainer: Trainer, example) -> Any:
    """Returns specs of the features that `forward` takes, of batches of any size.

    They are the data's, or those of the model's own inputs where it takes no others, as of a GAN's noise.
    """
    of_data, own = _any_size(batches.features(example)), keras.inputs_of(trainer.model)
    if own is None or type(trainer).forward is not Trainer.forward:
        return of_data
    shapes, own_shapes = ([tuple(each.shape) for each in tf.nest.flatten(x)] for x in (of_data, own))
    if shapes == own_shapes:
        return of_data
    try:
        tf.function(trainer.forward, autograph=False).get_concrete_function(of_data, training=False)
    except (TypeError, ValueError):  # as Keras has it of other features
        return _any_size(own)
    return of_data


def _any_size(features) -> Any:
    """Returns specs of batches of any size."""
    return tf.nest.map_structure(lambda x: tf.TensorSpec([None, *x.shape[1:]], x.dtype), features)


def evaluate(session: Session, split=None) -> dict[str, float]:
    """Computes the metrics' means over a split; None is the run's own evaluation data.

    Raises:
      UsageError: the split is not of the run's form, or the run has no evaluation data.
    """
    if split is None:
        if not session.has_evaluation:
            raise UsageError("evaluate(): the run has no evaluation data; give evaluate a split")
        return evaluation.evaluate(session.strategy, session.state)
    with lent.lending(session, split, trains=False):
        return evaluation.evaluate(session.strategy, session.state)
