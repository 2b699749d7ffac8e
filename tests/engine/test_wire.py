"""What travels between a worker and a parameter server arrives as it was, or rounded as was asked."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine import wire
from crankshaft.engine.pull import PROGRESS


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16, tf.float16])
def test_exact_values_keep_all_bits_beside_rounded_ones(dtype):
    exact = [tf.constant(1 / 3), tf.constant([-0.0, 1e-45, 3e38])]
    rounded = [tf.constant([[1 / 3, -2.5], [70.1, 0.0]]), tf.zeros([0]), tf.constant(0.1)]

    @tf.function
    def there_and_apart():
        return wire.send(exact[:1], rounded, [x.shape for x in rounded], "CPU:0", dtype)

    scalars, tensors = there_and_apart()
    assert scalars[0].numpy() == exact[0].numpy()
    for found, sent in zip(tensors, rounded, strict=True):
        np.testing.assert_array_equal(found, tf.cast(tf.cast(sent, dtype), tf.float32))
        assert found.shape == sent.shape
    flat = wire.pack(exact, rounded, dtype)
    kept, _ = wire.unpack(flat, [x.shape for x in exact], [x.shape for x in rounded], dtype)
    for found, sent in zip(kept, exact, strict=True):
        assert found.numpy().tobytes() == sent.numpy().tobytes()


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_an_optimizers_progress_travels_exactly(dtype):
    """More updates than float32 can count, as `Pull` packs them beside variables."""
    progress = tf.constant([2.0**40 + 1, 0.1], tf.float64)
    flat = wire.pack([tf.bitcast(progress, tf.float32)], [tf.constant([1.5, -2.0])], dtype)
    (lanes,), (values,) = wire.unpack(flat, [PROGRESS], [tf.TensorShape([2])], dtype)
    np.testing.assert_array_equal(tf.bitcast(lanes, tf.float64), progress)
    np.testing.assert_array_equal(values, [1.5, -2.0])
