"""What a batch is, and a split of the data, which has the same form: features, labels and weights of examples.

One of three forms: `(features, labels)`, `(features, labels, weights)`, or features alone. Features and labels are
each an array, or dictionaries and tuples of arrays (lists are taken as tuples, as Keras takes them); weights are one
number an example. Features alone are `(features,)` if they are a tuple, and else as they are. With weights and without
labels, labels are `()`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf


class Parts(NamedTuple):
    """A batch's or a split's parts; None is one that it does not have."""

    features: Any
    labels: Any = None
    weights: Any = None

    def named(self) -> Iterator[tuple[str, Any]]:
        """Yields each array with its name for messages: `features['city']`, `labels`, `weights`."""
        for name, part in self._asdict().items():
            if part is not None:
                yield from _named(name, part)


def parts(batch) -> Parts:
    """Returns the parts of a batch, of a split or of what has their structure."""
    if not isinstance(batch, tuple):
        return Parts(batch)
    features, labels, weights = (*batch, None, None)[:3]
    return Parts(features, None if isinstance(labels, tuple) and not labels else labels, weights)


def features(batch):
    """Returns the features of a batch, of a split or of what has their structure."""
    return parts(batch).features


def without_weights(batch):
    """Returns a batch as losses and metrics see it: (features, labels), or the features alone."""
    found = parts(batch)
    if found.labels is None:
        return found.features
    return batch if found.weights is None else (found.features, found.labels)


def text_parts(batch) -> list[str]:
    """Returns the names of the features and labels that are strings, which XLA does not take."""
    return [name for name, array in parts(batch).named() if tf.as_dtype(array.dtype) == tf.string]


def check_looked_up(features, trainer) -> None:
    """Raises ValueError where a forward pass, which was traced in this graph, takes text for numbers."""
    text = text_parts((features,))
    if text and _casts_text():
        raise ValueError(
            f"{', '.join(text)} holds strings, and {type(trainer).__name__} computes with them as with numbers; look "
            "them up before, by tf.keras.layers.StringLookup, Hashing or TextVectorization"
        )


def _casts_text() -> bool:
    if tf.executing_eagerly():
        return False
    operations = tf.compat.v1.get_default_graph().get_operations()
    return any(each.type == "Cast" and each.get_attr("SrcT") == tf.string for each in operations)


@contextlib.contextmanager
def labels_as_numbers(batch, trainer) -> Iterator[None]:
    """Raises ValueError where a loss that is traced within takes labels that are text for numbers."""
    names = [name for name in text_parts(batch) if name.startswith("labels")]
    cause = None
    try:
        yield
    except (TypeError, ValueError) as error:
        if not names:
            raise
        cause = error
    if cause or (names and _casts_text()):
        raise ValueError(
            f"{', '.join(names)} holds strings, and {type(trainer).__name__}.loss computes with them as with numbers; "
            "number them before, by np.unique(labels, return_inverse=True), or look them up by "
            "tf.keras.layers.StringLookup"
        ) from cause


def build(model, features, trainer) -> None:
    """Makes a model's variables for features of the shapes and dtypes of `features`, for batches of any size.

    Raises TypeError or ValueError, which say what to give, for what is no model, or takes no such features.
    """
    whose = type(trainer).__name__
    if not isinstance(model, tf.keras.layers.Layer):
        raise TypeError(f"{whose}.build_model returned a {type(model).__name__}; return a Keras model")
    if model.built:
        return
    inputs = tf.nest.map_structure(lambda x: tf.keras.Input(x.shape[1:], dtype=tf.as_dtype(x.dtype)), features)
    try:
        model(inputs)
    except ValueError as error:
        if isinstance(model, tf.keras.Sequential) and isinstance(features, (dict, tuple)):
            names = ", ".join(name for name, _ in parts((features,)).named())
            raise ValueError(
                f"{whose}'s model is a tf.keras.Sequential, which takes one array, and features are several: {names}; "
                "return a tf.keras.Model with an input for each, or give (features, labels) if labels are among them"
            ) from error
        raise


def with_stand_in(batch):
    """Returns (batch, whether it holds examples): an empty batch becomes one of a single example of zeros.

    Kernels do not bear empty batches: TensorFlow 2.21's convolutions by oneDNN give them a wrong shape, and batch
    normalisation takes the mean of nothing, which is NaN.

    Args:
      batch: nest of tensors whose first axis is examples.

    Returns:
      The batch, and a scalar bool tensor, or None where a batch cannot be empty.
    """
    first = tf.nest.flatten(batch)[0]
    if tf.distribute.get_replica_context().num_replicas_in_sync == 1 or (first.shape[0] or 0) > 0:
        return batch, None
    present = tf.shape(first)[0] > 0
    missing = tf.where(present, 0, 1)

    def pad(x: tf.Tensor) -> tf.Tensor:
        return tf.concat([x, tf.zeros(tf.concat([[missing], tf.shape(x)[1:]], 0), x.dtype)], 0)

    return tf.nest.map_structure(pad, batch), present


def only_if(present: tf.Tensor | None, metrics: dict) -> dict:
    """Returns the metrics where examples were present; otherwise zeros, even for what is not finite."""
    if present is None:
        return metrics
    return tf.nest.map_structure(lambda x: tf.where(present, x, tf.zeros_like(x)), metrics)


def check_weighed(metrics: dict, batch, trainer) -> dict:
    """Returns the metrics; raises ValueError where a user's own step does not count the examples' weights."""
    forgotten = [n for n, pair in metrics.items() if getattr(pair, "weigh", None) and not pair.has_weights]
    if forgotten and parts(batch).weights is not None:
        raise ValueError(
            f"{type(trainer).__name__}: the data has weights, and {forgotten[0]!r} of its step does not count them; "
            "use self.checked_loss(outputs, batch) in place of self.loss, or crankshaft.mean(values, weights=batch[2])"
        )
    return metrics


def _named(name: str, part) -> Iterator[tuple[str, Any]]:
    if isinstance(part, dict):
        for key, each in part.items():
            yield from _named(f"{name}[{key!r}]", each)
    elif isinstance(part, tuple):
        for place, each in enumerate(part):
            yield from _named(f"{name}[{place}]", each)
    else:
        yield name, part
