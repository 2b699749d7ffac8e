"""Keras layers with the same mathematics and less work, above all on CPUs. Replica code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from ..errors import UsageError
from ..internals.patches import bias_gradient
from ..machine import cpus

# Smaller kernels gain nothing: their products take microseconds anyway.
_LARGE = 1 << 18


@tf.keras.utils.register_keras_serializable("crankshaft")
class Dense(tf.keras.layers.Dense):
    """`tf.keras.layers.Dense` with faster gradients for large kernels. The values differ by rounding.

    On CPUs only. The inputs' gradient, dy W^T, is computed as a batch of one product: TensorFlow's plain product reads
    W across its rows, which takes two to three times as long. The kernel's gradient is computed after it, since
    updating W while it is being read would first copy it. The outputs are a batched product, too, if the CPU and the
    width make the plain one slow (`machine.cpus`): bits depend on the CPU, as for any kernel.
    """

    def call(self, inputs, training=None):
        kernel = tf.convert_to_tensor(self.kernel)
        is_large = kernel.shape.num_elements() >= _LARGE and inputs.shape.rank == 2
        if not (training and is_large) or tf.config.get_visible_devices("GPU"):
            return super().call(inputs, training=training)
        outputs = _matmul(inputs, kernel)
        if self.bias is not None:
            outputs = tf.nn.bias_add(outputs, tf.convert_to_tensor(self.bias))
        return outputs if self.activation is None else self.activation(outputs)


@tf.keras.utils.register_keras_serializable("crankshaft")
class Conv2DMaxPool(tf.keras.layers.Conv2D):
    """`Conv2D` followed by `MaxPooling2D`, with fewer passes over the values between them.

    A maximum commutes with adding a bias per channel and with any non-decreasing activation such as ReLU, including
    rounding: the values equal those of the two layers to the bit. So the gradients of bias and activation are computed
    after the pooling, on a fraction of the values, since these passes are memory-bound. In the forward pass ReLU stays
    before the pooling, where TensorFlow fuses it with the convolution; any other activation follows it.

    Args:
      filters: the filters, as for `Conv2D`.
      kernel_size: the kernel's size, as for `Conv2D`.
      pool_size: side and stride of the pooled squares.
      **arguments: `Conv2D`'s others; its activation must be non-decreasing and elementwise, and images have their
        channels last, whatever Keras's default is.

    Raises:
      UsageError: the channels are to be first.
    """

    def __init__(self, filters: int, kernel_size: int, pool_size: int = 2, **arguments: Any):
        super().__init__(filters, kernel_size, **{"data_format": "channels_last", **arguments})
        if self.data_format != "channels_last":
            raise UsageError("Conv2DMaxPool(data_format='channels_first'): give images with their channels last")
        self.pool_size = pool_size

    def call(self, inputs):
        outputs = self.convolution_op(inputs, self.kernel)
        if self.use_bias and self.activation is tf.keras.activations.relu:
            return _relu_max_pool(outputs, tf.cast(self.bias, outputs.dtype), self.pool_size)
        outputs = tf.nn.max_pool2d(outputs, self.pool_size, self.pool_size, "VALID")
        if self.use_bias:
            outputs = tf.nn.bias_add(outputs, tf.cast(self.bias, outputs.dtype))
        return outputs if self.activation is None else self.activation(outputs)

    def compute_output_shape(self, input_shape):
        batch, height, width, channels = super().compute_output_shape(input_shape)
        return batch, *(size and size // self.pool_size for size in (height, width)), channels

    def get_config(self):
        return {**super().get_config(), "pool_size": self.pool_size}


@tf.keras.utils.register_keras_serializable("crankshaft")
class BatchNormalization(tf.keras.layers.BatchNormalization):
    """`tf.keras.layers.BatchNormalization` (Ioffe, Szegedy 2015) of images [batch, height, width, channels].

    Uses TensorFlow's fused kernel, while Keras's layer computes moments and normalization in separate passes, in
    float32 for any inputs. Moving statistics are Keras's: the variance is the batch's, not its unbiased estimate.

    Args:
      total: sums a float32 tensor and its gradient across replicas: `Reduction.sum_statistics`. The statistics are then
        those of all replicas' examples, as on one device; None uses this replica's own.
      **arguments: as Keras's; `axis` is the last, and `total` replaces `synchronized`.
    """

    def __init__(self, total: Callable[[tf.Tensor], tf.Tensor] | None = None, **arguments: Any):
        super().__init__(**arguments)
        self.total = total

    def call(self, inputs, training=None):
        if not (training and self.trainable):
            return self._fused(inputs, tf.identity(self.moving_mean), tf.identity(self.moving_variance), False)[0]
        if self.total is None:
            # In training the kernel takes no statistics, in this form.
            none = tf.zeros([0])
            outputs, mean, variance = self._fused(inputs, none, none, True)
            values = tf.cast(tf.size(inputs) // inputs.shape[-1], tf.float32)
            variance *= (values - 1) / values  # the kernel returns the unbiased estimate
        else:
            outputs, mean, variance = self._normalize_across_replicas(inputs, self.total)
        for moving, new in ((self.moving_mean, mean), (self.moving_variance, variance)):
            moving.assign(moving * self.momentum + new * (1 - self.momentum))
        return outputs

    def _fused(self, inputs: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor, training: bool) -> tuple:
        kernel = tf.raw_ops.FusedBatchNormV3(
            x=inputs,
            scale=tf.convert_to_tensor(self.gamma),
            offset=tf.convert_to_tensor(self.beta),
            mean=mean,
            variance=variance,
            epsilon=self.epsilon,
            is_training=training,
        )
        return kernel.y, kernel.batch_mean, kernel.batch_variance

    def _normalize_across_replicas(self, inputs: tf.Tensor, total: Callable[[tf.Tensor], tf.Tensor]) -> tuple:
        x = tf.cast(inputs, tf.float32)
        # One sum yields both moments, around the moving mean, which is equal on all replicas: otherwise the difference
        # of squares below would lose digits.
        shift = tf.identity(self.moving_mean)
        shifted = x - shift
        moments = [tf.reduce_sum(power, [0, 1, 2]) for power in (tf.ones_like(x), shifted, tf.square(shifted))]
        values, first, second = tf.unstack(total(tf.stack(moments)))
        mean = first / values
        variance = tf.maximum(second / values - tf.square(mean), 0.0)
        outputs = tf.nn.batch_normalization(shifted, mean, variance, self.beta, self.gamma, self.epsilon)
        return tf.cast(outputs, inputs.dtype), mean + shift, variance


@tf.keras.utils.register_keras_serializable("crankshaft")
class Products(tf.keras.layers.Layer):
    """Maps [batch, n, width] to [batch, n (n-1) / 2]: the dot products of all pairs of different vectors."""

    def call(self, inputs):
        return _products(inputs)

    def compute_output_shape(self, input_shape):
        n = input_shape[1]
        return (input_shape[0], n * (n - 1) // 2)


def _relu_max_pool(x: tf.Tensor, bias: tf.Tensor, size: int) -> tf.Tensor:
    """Computes max_pool(relu(x + bias)); its gradient finds ReLU's active values from the pooled outputs."""
    window = {"ksize": [1, size, size, 1], "strides": [1, size, size, 1], "padding": "VALID"}

    @tf.custom_gradient
    def pooled(x, bias):
        active = tf.nn.relu(tf.nn.bias_add(x, bias))  # TensorFlow fuses these with the convolution
        outputs = tf.raw_ops.MaxPool(input=active, **window)

        def gradient(dy):
            dy = tf.raw_ops.ReluGrad(gradients=dy, features=outputs)
            dx = tf.raw_ops.MaxPoolGrad(orig_input=active, orig_output=outputs, grad=dy, **window)
            return dx, bias_gradient(dy)

        return outputs, gradient

    return pooled(x, bias)


@tf.custom_gradient
def _matmul(x: tf.Tensor, w: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    """Computes x [batch, in] times w [in, out]."""

    def gradient(dy: tf.Tensor) -> Any:
        dx = _batched(dy, w, transpose_b=True)
        with tf.control_dependencies([dx]):  # an unused dx is still pruned
            dw = tf.matmul(x, dy, transpose_a=True)
        return dx, dw

    in_batches = w.dtype == tf.float32 and cpus.prefers_batched_matmul(w.shape[1] * w.dtype.size)
    return (_batched if in_batches else tf.matmul)(x, w), gradient


def _batched(a: tf.Tensor, b: tf.Tensor, transpose_b: bool = False) -> tf.Tensor:
    """Multiplies two matrices as a batch of one, for which TensorFlow uses another oneDNN kernel."""
    return tf.matmul(a[tf.newaxis], b[tf.newaxis], transpose_b=transpose_b)[0]


@tf.custom_gradient
def _products(x: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    n = x.shape[1]
    rows, columns = np.tril_indices(n, -1)
    products = tf.reshape(tf.matmul(x, x, transpose_b=True), [-1, n * n])

    def gradient(dy: tf.Tensor) -> Any:
        # A symmetric matrix with the upstream gradients of all pairs; zeros for a vector with itself.
        indices = np.full([n, n], len(rows))
        indices[rows, columns] = indices[columns, rows] = np.arange(len(rows))
        return tf.matmul(tf.gather(tf.pad(dy, [[0, 0], [0, 1]]), indices, axis=1), x)

    return tf.gather(products, rows * n + columns, axis=1), gradient
