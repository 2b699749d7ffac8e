"""Residual networks (He et al. 2016): depth 20 to 110 for images of about 32x32, 50 to 152 for about 224x224."""

from __future__ import annotations

import tensorflow as tf

from ..engine.data import form
from ..engine.errors import UsageError
from ..engine.layers import BatchNormalization
from .classification import Classifier

_FORMAT = "channels_last"  # the form of inputs' images, whatever Keras's setting is
# Blocks in each stage.
_SMALL = {6 * n + 2: (n, n, n) for n in (3, 5, 7, 9, 18)}
_LARGE = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


class Model(Classifier):
    """He et al., "Deep residual learning for image recognition", https://arxiv.org/abs/1512.03385.

    20, 32, 44, 56, 110: section 4.2. 3x3 convolutions in pairs, 16, 32 and 64 filters; at a change of filters and
    pixels, the shortcut takes every second pixel, and zeros for new channels (option A).

    50, 101, 152: table 1. A 7x7 convolution and a max-pool, then bottlenecks of 1x1, 3x3 and 1x1, with projections as
    shortcuts if shapes differ (option B). The bottleneck's 3x3 halves the pixels, not its first 1x1 as in the paper:
    the usual "v1.5", slightly more accurate for slightly more work.

    Both: batch normalisation after each convolution, ReLU after it and after the sum, the mean over all pixels, one
    dense layer. Initial weights are those of He et al. 2015.

    Args:
      depth: one of the above: the number of layers with weights, as in the paper.
      sync_batch_norm: normalise over the global batch in training, all replicas' examples, instead of each replica's.
      batch_norm_momentum: fraction of the moving statistics that each step keeps.
      class_weight: see `Classifier`.
    """

    def __init__(
        self,
        depth: int = 20,
        sync_batch_norm: bool = False,
        batch_norm_momentum: float = 0.9,
        **arguments,
    ):
        super().__init__(**arguments)
        if depth not in _SMALL | _LARGE:
            raise UsageError(f"depth={depth} is unknown; use one of {', '.join(map(str, _SMALL | _LARGE))}")
        self.depth = depth
        self.sync_batch_norm = sync_batch_norm
        self.batch_norm_momentum = batch_norm_momentum

    def build_model(self) -> tf.keras.Model:
        features = form.features(self.run_context.example)
        if len(getattr(features, "shape", ())) != 4:
            raise UsageError("resnet takes images, [height, width, channels]; use another model for this input")
        if self.sync_batch_norm and (steps := self.run_context.options.accumulate_steps) > 1:
            raise UsageError(f"sync_batch_norm=true needs whole batches, and accumulate_steps={steps}; use one of them")
        images = tf.keras.Input(features.shape[1:], dtype=features.dtype)
        if self.depth in _SMALL:
            add_block, filters = self._pair, 16
            x = _relu(self._convolution(images, filters, 3, "first"))
        else:
            add_block, filters = self._bottleneck, 64
            x = _relu(self._convolution(images, filters, 7, "first", strides=2))
            x = tf.keras.layers.MaxPooling2D(3, strides=2, padding="same", data_format=_FORMAT)(x)
        for stage, blocks in enumerate((_SMALL | _LARGE)[self.depth]):
            for block in range(blocks):
                strides = 2 if stage and not block else 1
                x = add_block(x, filters << stage, strides, f"stage{stage}_block{block}")
        x = tf.keras.layers.GlobalAveragePooling2D(_FORMAT)(x)
        logits = tf.keras.layers.Dense(self.run_context.num_classes, kernel_initializer="he_normal", name="logits")
        return tf.keras.Model(images, logits(x), name=f"resnet{self.depth}")

    def _pair(self, x, filters: int, strides: int, name: str):
        y = _relu(self._convolution(x, filters, 3, f"{name}_a", strides))
        y = self._convolution(y, filters, 3, f"{name}_b")
        if strides > 1:
            x = tf.keras.ops.pad(x[:, ::strides, ::strides], [[0, 0], [0, 0], [0, 0], [0, filters - x.shape[-1]]])
        return _relu(y + x)

    def _bottleneck(self, x, filters: int, strides: int, name: str):
        y = _relu(self._convolution(x, filters, 1, f"{name}_a"))
        y = _relu(self._convolution(y, filters, 3, f"{name}_b", strides))
        y = self._convolution(y, 4 * filters, 1, f"{name}_c")
        if x.shape[-1] != 4 * filters:
            x = self._convolution(x, 4 * filters, 1, f"{name}_shortcut", strides)
        return _relu(y + x)

    def _convolution(self, x, filters: int, size: int, name: str, strides: int = 1):
        options = {"padding": "same", "use_bias": False, "kernel_initializer": "he_normal", "data_format": _FORMAT}
        x = tf.keras.layers.Conv2D(filters, size, strides, name=name, **options)(x)
        return BatchNormalization(
            total=self.reduction.sum_statistics if self.sync_batch_norm else None,
            momentum=self.batch_norm_momentum,
            epsilon=1e-5,
            name=f"{name}_norm",
        )(x)


def _relu(x):
    return tf.keras.layers.ReLU()(x)
