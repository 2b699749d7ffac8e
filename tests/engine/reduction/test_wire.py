"""What travels between a worker and a parameter server arrives as it was, or rounded as was asked."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.reduction import wire


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
    layout = wire.WireLayout([x.shape for x in exact], [x.shape for x in rounded], dtype)
    kept, _ = layout.split(layout.join(exact, rounded))
    for found, sent in zip(kept, exact, strict=True):
        assert found.numpy().tobytes() == sent.numpy().tobytes()


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_an_optimizers_progress_travels_exactly(dtype):
    """More updates than float32 can count, as `Pull` puts them beside variables."""
    progress = tf.constant([2.0**40 + 1, 0.1], tf.float64)
    layout = wire.WireLayout([tf.TensorShape([2, 2])], [tf.TensorShape([2])], dtype)
    (lanes,), (values,) = layout.split(layout.join([tf.bitcast(progress, tf.float32)], [tf.constant([1.5, -2.0])]))
    np.testing.assert_array_equal(tf.bitcast(lanes, tf.float64), progress)
    np.testing.assert_array_equal(values, [1.5, -2.0])


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [4, 8, 12, 16, 40, 64])
def test_buckets_end_where_a_message_does_and_change_no_bit(dtype, bucket_bytes):
    """Tensors larger than a bucket are cut; rows whose number only the step knows travel where they come."""
    exact = [tf.constant(1 / 3), tf.constant([-0.0, 1e-45, 3e38])]
    rounded = [tf.constant(np.arange(14, dtype=np.float32).reshape(7, 2) / 3), tf.zeros([0]), tf.constant([[1.5, 2.5]])]
    shapes = [x.shape for x in rounded]

    def there_and_apart(bucket_bytes):
        @tf.function
        def apart(rows):
            known = [*shapes, tf.concat([tf.shape(rows)[:1], [2]], 0)]
            layout = wire.WireLayout([x.shape for x in exact], known, dtype, bucket_bytes)
            buckets = layout.join(exact, [*rounded, rows])
            assert len(buckets) == layout.num_buckets
            sizes = [bucket.shape[0] * bucket.dtype.size for bucket in buckets[:-1]]
            return [layout.split(buckets)], sizes

        found, sizes = apart(tf.constant([[1.0, 2.0]] * 3))
        return tf.nest.flatten(found), tf.nest.flatten(sizes)

    (whole, one), (cut, sizes) = there_and_apart(wire.BUCKET_BYTES), there_and_apart(bucket_bytes)
    assert one == []
    assert len(sizes) >= (4 * 4 + (14 + 2) * dtype.size) // (2 * bucket_bytes) - 1
    assert all(bucket_bytes <= size < 2 * bucket_bytes for size in sizes)
    for a, b in zip(whole, cut, strict=True):
        assert a.numpy().tobytes() == b.numpy().tobytes()
