"""Computes a finished run's outputs and metrics on new data, in the process that trained it. Host code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from ...engine.data.streamed import is_stream
from ...engine.hooks import evaluation
from ...engine.hooks.evaluation import averaged_weights
from ...engine.step import batches
from ...engine.strategies.base import closing_feeds
from ..errors import UsageError
from . import splits, weights
from .session import Session


def forward(session: Session) -> Callable[[Any], Any]:
    """Returns a function from features of any number of examples to NumPy outputs, with evaluation's weights."""
    trainer, size = weights.alone(session), session.config.eval_batch_size
    example = batches.features(session.example)
    signature = tf.nest.map_structure(lambda x: tf.TensorSpec([None, *x.shape[1:]], x.dtype), example)

    @tf.function(input_signature=[signature], autograph=False)
    def compute(features):
        outputs = trainer.forward(features, training=False)
        return tf.nest.map_structure(lambda x: tf.cast(x, tf.float32) if x.dtype.is_floating else x, outputs)

    def predict(features):
        features = splits.as_arrays(session.names.ids(features))
        _check_like("features", example, features)
        count = len(tf.nest.flatten(features)[0])
        with averaged_weights(trainer):
            parts = [
                compute(tf.nest.map_structure(lambda x, at=at: tf.constant(x[at : at + size]), features))
                for at in range(0, max(count, 1), size)
            ]
        return tf.nest.map_structure(lambda *pieces: np.concatenate([piece.numpy() for piece in pieces]), *parts)

    return predict


def evaluate(session: Session, split) -> dict[str, float]:
    """Computes the metrics' means over a split. Training can't go on afterwards: the strategy is bound to this data."""
    split = splits.checked("evaluate", split, [])
    if not is_stream(split):
        _check_like("data", *(batches.without_weights(each) for each in (session.example, split)))
    strategy = session.strategy
    with strategy.watch():
        feed = strategy.feed(split, session.config.eval_batch_size, None)
        strategy.bind(session.state, strategy.train_feed, feed)
        with closing_feeds(strategy):
            return evaluation.evaluate(strategy, session.trainer)


def _check_like(name: str, example, given) -> None:
    """Raises `UsageError` where arrays differ in shape or type from those that the run was trained on."""

    def described(arrays) -> str:
        return str(
            tf.nest.map_structure(lambda x: f"{tf.as_dtype(np.asarray(x).dtype).name}{list(np.shape(x)[1:])}", arrays)
        )

    if described(example) != described(given):
        line = f"{name} are {described(given)} an example; this run's are {described(example)}"
        if isinstance(given, tuple) and not isinstance(example, (tuple, dict)):
            line += "; a list or tuple is several inputs: give one array, as np.array(list) makes of numbers or text"
        raise UsageError(line)
