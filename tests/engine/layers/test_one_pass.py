"""Functions that XLA computes in one pass give TensorFlow's values and gradients."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.layers.one_pass import gelu, swiglu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("function", [gelu, lambda x, compiled: swiglu(x, x * x - 1, compiled)])
def test_values_and_gradients_are_those_of_plain_operations(function, dtype):
    x = tf.cast(tf.concat([tf.linspace(-8.0, 8.0, 999), [-60.0, 0.0, 60.0]], 0), dtype)
    found = []
    for given, compiled in ((x, True), (tf.cast(x, tf.float64), False)):
        with tf.GradientTape() as tape:
            tape.watch(given)
            y = function(given, compiled)
        found += [y, tape.gradient(y, given)]
    assert {each.dtype for each in found[:2]} == {x.dtype}
    # Ten roundings of float32; in bfloat16 the composed function's square is rounded to 2^-9 before it comes in.
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == "float32" else {"rtol": 0.04, "atol": 0.02}
    for ours, theirs in zip(found[:2], found[2:], strict=True):
        np.testing.assert_allclose(tf.cast(ours, tf.float32), tf.cast(theirs, tf.float32), **tolerance)
