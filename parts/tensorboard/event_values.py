"""Creates TensorBoard's values, `tf.summary`'s `Summary.Value` protocol buffers. `histogram` is replica code."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from tensorboard.plugins.hparams import summary_v2 as hparams_plugin
from tensorflow.core.framework.summary_pb2 import DATA_CLASS_BLOB_SEQUENCE, DATA_CLASS_SCALAR, DATA_CLASS_TENSOR
from tensorflow.core.framework.tensor_pb2 import TensorProto

from ...engine.metrics import by_class
from ...engine.metrics.computed import Computed

Summary = tf.compat.v1.Summary
_BUCKETS = 30  # TensorBoard's own default


def _metadata(plugin: str, data_class: int) -> tf.compat.v1.SummaryMetadata:
    kind = tf.compat.v1.SummaryMetadata
    return kind(plugin_data=kind.PluginData(plugin_name=plugin), data_class=data_class)


_SCALARS = _metadata("scalars", DATA_CLASS_SCALAR)
_HISTOGRAMS = _metadata("histograms", DATA_CLASS_TENSOR)
_IMAGES = _metadata("images", DATA_CLASS_BLOB_SEQUENCE)
_TEXT = _metadata("text", DATA_CLASS_TENSOR)
_FLOAT = tf.float32.as_datatype_enum


def scalars(values: dict[str, float]) -> list[tf.compat.v1.Summary.Value]:
    """Returns one value per name."""
    made = []
    for tag, value in values.items():
        tensor = TensorProto(dtype=_FLOAT, float_val=[value])
        tensor.tensor_shape.SetInParent()  # a scalar's shape, unlike none
        made.append(Summary.Value(tag=tag, metadata=_SCALARS, tensor=tensor))
    return made


class Histogram(NamedTuple):
    """counts: [30] int32, of the finite entries; low, high: scalar float32, the range of the 30 buckets."""

    counts: tf.Tensor
    low: tf.Tensor
    high: tf.Tensor


def histogram(values: tf.Tensor) -> Histogram:
    """Counts a tensor's entries on its device, except inf and NaN, by ops of static shapes, which XLA can compile."""
    values = tf.cast(tf.reshape(values, [-1]), tf.float32)
    finite = tf.math.is_finite(values)
    low = tf.reduce_min(tf.where(finite, values, values.dtype.max))
    high = tf.reduce_max(tf.where(finite, values, values.dtype.min))
    low, high = tf.where(high >= low, low, 0.0), tf.where(high >= low, high, 0.0)
    # Equal entries are in one bucket of a range around them, as in TensorBoard's own histograms.
    low, high = tf.where(high > low, low, low - 0.5), tf.where(high > low, high, high + 0.5)
    # Halves first, since float32's whole range overflows float32.
    fraction = (values * 0.5 - low * 0.5) / (high * 0.5 - low * 0.5)
    bucket = tf.cast(tf.clip_by_value(tf.where(finite, fraction, 0.0), 0.0, 1.0) * _BUCKETS, tf.int32)
    bucket = tf.minimum(bucket, _BUCKETS - 1)
    return Histogram(tf.math.unsorted_segment_sum(tf.cast(finite, tf.int32), bucket, _BUCKETS), low, high)


def histograms(named: dict[str, Histogram]) -> list[tf.compat.v1.Summary.Value]:
    """Returns one value per name: [30, 3] float64 of left edge, right edge, count."""
    values = []
    for tag, (counts, low, high) in named.items():
        edges = np.linspace(float(low), float(high), _BUCKETS + 1)
        table = np.stack([edges[:-1], edges[1:], np.asarray(counts, np.float64)], axis=1)
        values.append(Summary.Value(tag=tag, metadata=_HISTOGRAMS, tensor=tf.make_tensor_proto(table)))
    return values


def looks_like_images(features) -> bool:
    """Returns whether a tensor is [batch, height, width, 1 or 3]."""
    shape: Sequence[int | None] = getattr(features, "shape", ())
    return len(shape) == 4 and shape[-1] in (1, 3)


def images(tag: str, pictures: np.ndarray) -> list[tf.compat.v1.Summary.Value]:
    """Returns one value of pictures [n, height, width, 1, 3 or 4].

    uint8 is unchanged; other numbers in [0, 1] are shades from black to white; those outside are clipped, NaN is black.
    """
    pictures = np.asarray(pictures)
    if pictures.dtype != np.uint8:
        clipped = np.clip(np.nan_to_num(pictures.astype(np.float32)), 0, 1)
        pictures = np.rint(clipped * 255).astype(np.uint8)
    _, height, width, _ = pictures.shape
    with tf.device("CPU:0"):
        encoded = [tf.io.encode_png(picture).numpy() for picture in pictures]
    tensor = tf.make_tensor_proto([str(width).encode(), str(height).encode(), *encoded])
    return [Summary.Value(tag=tag, metadata=_IMAGES, tensor=tensor)]


def shades(features: np.ndarray) -> np.ndarray:
    """Returns features as pictures: numbers of a larger range than [0, 1], such as standardized ones, scaled to it."""
    finite = features[np.isfinite(features)].astype(np.float32)
    if features.dtype == np.uint8 or not finite.size or (finite.min() >= 0 and finite.max() <= 1):
        return features
    return (features.astype(np.float32) - finite.min()) / max(finite.max() - finite.min(), 1e-12)


def evaluation(means: dict[str, float]) -> list[tf.compat.v1.Summary.Value]:
    """Returns the values of an `Evaluated`: its metrics, texts and images, and a picture of each confusion matrix."""
    confusion = {name: by_class.picture(counts)[np.newaxis] for name, counts in getattr(means, "confusion", {}).items()}
    shown = getattr(means, "shown", Computed())
    pictures = (images(name, pixels) for name, pixels in {**confusion, **shown.images}.items())
    texts = (text(name, content) for name, content in shown.texts.items())
    return [*scalars({**means, **getattr(means, "batches", {})}), *itertools.chain(*pictures, *texts)]


def text(tag: str, markdown: str) -> list[tf.compat.v1.Summary.Value]:
    """Returns one text, shown as Markdown."""
    return [Summary.Value(tag=tag, metadata=_TEXT, tensor=tf.make_tensor_proto(markdown.encode()))]


def hyper_parameters(config: dict) -> list[tf.compat.v1.Summary.Value]:
    """Returns a run's configuration for the HParams tab, which shows it beside the scalars below its folder."""
    plain = {key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in config.items()}
    session = hparams_plugin.hparams_pb(plain)
    return list(Summary.FromString(session.SerializeToString()).value)


def table(tag: str, config: dict) -> list[tf.compat.v1.Summary.Value]:
    """Returns a configuration for the Text tab."""
    cells = {key: str(value).replace("|", "\\|").replace("\n", " ") for key, value in config.items()}
    return text(tag, "| name | value |\n|---|---|\n" + "".join(f"| {key} | {cells[key]} |\n" for key in cells))
