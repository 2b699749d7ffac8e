"""Computes a finished run's outputs and metrics on new data, in the process that trained it. Host code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from ...engine import Trainer
from ...engine.data.arrays import ArraySource
from ...engine.data.source import Split
from ...engine.hooks import evaluation
from ...engine.hooks.evaluation import averaged_weights
from ...engine.internals import keras
from ...engine.step import batches
from ...engine.strategies.base import closing_feeds
from ..errors import UsageError
from . import splits, weights
from .session import Session


def forward(session: Session) -> Callable[[Any], Any]:
    """Returns a function from features of any number of examples to NumPy outputs, with evaluation's weights."""
    trainer, size = weights.alone(session), session.config.eval_batch_size
    taken = features_taken(trainer, session.example)
    wanted = tf.nest.map_structure(lambda x: tf.TensorSpec(x.shape[1:], x.dtype), taken)

    @tf.function(input_signature=[taken], autograph=False)
    def compute(features):
        outputs = trainer.forward(features, training=False)
        return tf.nest.map_structure(lambda x: tf.cast(x, tf.float32) if x.dtype.is_floating else x, outputs)

    def predict(features):
        if isinstance(features, (Split, tf.data.Dataset)):
            raise UsageError(
                f"predict was given a {type(features).__name__}; give features alone, as arrays: of a tf.data.Dataset "
                "np.stack([features for features, *_ in dataset]), of a Source what its read returns"
            )
        features = tf.nest.map_structure(np.asarray, splits.as_arrays(session.names.ids(features)))
        _check_like("features", wanted, ArraySource(features).element_spec)
        count = len(tf.nest.flatten(features)[0])
        with averaged_weights(trainer):
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

    def specs(features):
        return tf.nest.map_structure(lambda x: tf.TensorSpec([None, *x.shape[1:]], x.dtype), features)

    of_data, own = specs(batches.features(example)), keras.inputs_of(trainer.model)
    if own is None or type(trainer).forward is not Trainer.forward:
        return of_data
    shapes, own_shapes = ([tuple(each.shape) for each in tf.nest.flatten(x)] for x in (of_data, own))
    if shapes == own_shapes:
        return of_data
    try:
        tf.function(trainer.forward, autograph=False).get_concrete_function(of_data, training=False)
    except (TypeError, ValueError):  # as Keras has it of other features
        return specs(own)
    return of_data


def evaluate(session: Session, split) -> dict[str, float]:
    """Computes the metrics' means over a split. Training can't go on afterwards: the strategy is bound to this data."""
    split = splits.checked("evaluate", split, [])
    example = ArraySource(session.example)
    _check_like("data", *(batches.without_weights(each.element_spec) for each in (example, split)))
    strategy = session.strategy
    with strategy.watch():
        feed = strategy.feed(split, session.config.eval_batch_size, None)
        strategy.bind(session.state, strategy.train_feed, feed)
        with closing_feeds(strategy):
            return evaluation.evaluate(strategy, session.state)


def _check_like(name: str, wanted, found) -> None:
    """Raises `UsageError` where one example, a nest of specs, is not what the run takes."""

    def described(specs) -> str:
        return str(tf.nest.map_structure(lambda x: f"{tf.as_dtype(x.dtype).name}{[*x.shape]}", specs))

    def fits(x, y) -> bool:
        return tf.as_dtype(x.dtype) == tf.as_dtype(y.dtype) and tf.TensorShape(x.shape).is_compatible_with(y.shape)

    try:
        alike = all(tf.nest.flatten(tf.nest.map_structure(fits, wanted, found)))
    except (TypeError, ValueError):  # other structures
        alike = False
    if not alike:
        line = f"{name} are {described(found)} an example; this run's are {described(wanted)}"
        if isinstance(found, tuple) and not isinstance(wanted, (tuple, dict)):
            line += "; a list or tuple is several inputs: give one array, as np.array(list) makes of numbers or text"
        raise UsageError(line)
