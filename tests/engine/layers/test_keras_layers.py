"""Layers that save work compute what Keras's own do."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.layers import BatchNormalization, Conv2DMaxPool, Dense
from crankshaft.engine.machine import cpus
from crankshaft.models.mlp import Model as Mlp
from crankshaft.parts.sharding import Dense as ParallelDense
from crankshaft.parts.sharding import Embedding as ParallelEmbedding

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("size", [12, 13])  # 10 and 11 after the convolution: pooled whole, and with one left over
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("activation", ["relu", None])
def test_a_convolution_pooled_in_one_layer_is_that_of_two(activation, size, dtype):
    """Outputs to the bit. Gradients are sums of the same terms in another order: a few roundings of the dtype."""
    images = tf.random.stateless_normal([5, size, size, 3], seed=[1, 2])
    weights = tf.random.stateless_normal([3, 3, 3, 8], seed=[3, 4]).numpy(), np.linspace(-1, 1, 8, dtype=np.float32)
    plain = tf.keras.Sequential(
        [
            tf.keras.layers.Conv2D(8, 3, activation=activation, dtype=dtype),
            tf.keras.layers.MaxPooling2D(2, dtype=dtype),
        ]
    )
    saving = tf.keras.Sequential([Conv2DMaxPool(8, 3, pool_size=2, activation=activation, dtype=dtype)])
    found = []
    for model in (plain, saving):
        model.build(images.shape)
        model.layers[0].set_weights(weights)
        with tf.GradientTape() as tape:
            outputs = tf.cast(model(images), tf.float32)
            total = tf.reduce_sum(outputs * outputs)
        found.append((outputs.numpy(), [g.numpy() for g in tape.gradient(total, model.trainable_variables)]))
        assert model.output_shape == outputs.shape
    (outputs, gradients), (others, other_gradients) = found
    np.testing.assert_array_equal(outputs, others)
    for gradient, other in zip(gradients, other_gradients, strict=True):
        rounding = 1e-5 if dtype == "float32" else 2e-2
        np.testing.assert_allclose(gradient, other, rtol=rounding, atol=rounding * np.abs(gradient).max())


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("total", [None, tf.identity], ids=["fused", "of all replicas"])
def test_batch_normalisation_is_that_of_keras(total, dtype, jit):
    """Outputs, gradients, moving statistics after two steps, and what inference then makes of an image."""
    images = 3 + 2 * tf.random.stateless_normal([5, 4, 3, 8], seed=[1, 2])
    weights = tf.random.stateless_uniform([2, 8], seed=[3, 4]).numpy()
    arguments = {"momentum": 0.8, "epsilon": 1e-5, "dtype": dtype}
    found = []
    for layer in (tf.keras.layers.BatchNormalization(**arguments), BatchNormalization(total, **arguments)):
        layer.build(images.shape)
        layer.gamma.assign(weights[0])
        layer.beta.assign(weights[1])

        @tf.function(jit_compile=jit)
        def step(layer=layer):
            with tf.GradientTape() as tape:
                tape.watch(images)
                outputs = tf.cast(layer(images, training=True), tf.float32)
                cubes = tf.reduce_sum(outputs**3)
            return outputs, tape.gradient(cubes, [images, layer.gamma.value, layer.beta.value])

        step()
        outputs, gradients = step()
        statistics = layer.moving_mean.numpy(), layer.moving_variance.numpy()
        found.append([outputs, *gradients, *statistics, tf.cast(layer(images), tf.float32)])
    rounding = 1e-5 if dtype == "float32" else 3e-2  # sums in another order; bfloat16 has 8 bits
    for keras, ours in zip(*found, strict=True):
        np.testing.assert_allclose(ours, keras, rtol=rounding, atol=rounding * np.abs(keras).max())


@pytest.fixture(params=[set(), {"amx_tile"}], ids=["any CPU", "CPU with AMX"])
def of_any_cpu(request, monkeypatch):
    """The kinds of products that are fastest on such a CPU; all can compute them."""
    monkeypatch.setattr(cpus, "features", lambda: request.param)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 1e-5), ("mixed_bfloat16", 2e-2)])
@pytest.mark.parametrize(("inputs", "units"), [(512, 512), (128, 2048)])  # the second's rows are 8 KiB apart
@pytest.mark.usefixtures("of_any_cpu")
def test_a_dense_layer_is_that_of_keras(inputs, units, dtype, rounding, jit):
    """Kernels of 2**18 values, from which on the layer has its own gradients; of the inputs too, and without them."""
    x = tf.random.stateless_normal([5, inputs], seed=[1, 2])
    weights = tf.random.stateless_normal([inputs, units], seed=[3, 4]).numpy() / inputs**0.5, np.linspace(-1, 1, units)
    found = []
    for layer in (tf.keras.layers.Dense(units, "relu", dtype=dtype), Dense(units, "relu", dtype=dtype)):
        layer.build(x.shape)
        layer.set_weights(weights)

        @tf.function(jit_compile=jit)
        def gradients(watched, layer=layer):
            with tf.GradientTape() as tape:
                if watched:
                    tape.watch(x)
                total = tf.reduce_sum(tf.cast(layer(x, training=True), tf.float32) ** 2)
            return tape.gradient(total, [layer.kernel.value, layer.bias.value] + [x] * watched)

        found.append([g.numpy() for watched in (False, True) for g in gradients(watched)])
    for ours, theirs in zip(found[1], found[0], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=rounding, atol=rounding * np.abs(theirs).max())


@pytest.mark.usefixtures("of_any_cpu")
def test_an_update_copies_no_large_kernel(bench):
    """An update of a kernel that is still being read would: the kernel would then lie elsewhere."""
    rng = np.random.default_rng(0)
    source = rng.normal(size=(64, 32)).astype(np.float32), rng.integers(0, 4, 64).astype(np.int32)
    made = bench(Mlp((512, 2048)), source, 32, num_classes=4)
    made.train(2)
    [kernel] = [v.value for v in made.trainer.trainable_variables if v.shape == (512, 2048)]

    def address():
        return np.asarray(memoryview(kernel.read_value())).ctypes.data

    before = address()
    for step in range(3, 23):
        made.train(step)
        assert address() == before


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
def test_sums_over_positions_accumulate_in_float32(dtype, jit):
    """Of 5,000 ones bfloat16 would count 256 and float16 2,048; the sum is then rounded once, to 8 or 11 bits."""
    layers = {
        "keras dense": (tf.keras.layers.Dense(3, dtype=dtype), [50, 100, 2]),
        "keras convolution": (tf.keras.layers.Conv2D(3, 1, dtype=dtype), [2, 50, 50, 2]),
        "keras embedding": (tf.keras.layers.Embedding(4, 3, dtype=dtype), [50, 100]),
        "dense": (ParallelDense(3, dtype=dtype), [50, 100, 2]),
        "embedding": (ParallelEmbedding(4, 3, dtype=dtype), [50, 100]),
        "pooled": (Conv2DMaxPool(3, 1, activation="relu", bias_initializer="ones", dtype=dtype), [2, 100, 100, 2]),
    }
    for name, (layer, shape) in layers.items():
        layer.build(shape)

        @tf.function(jit_compile=jit, autograph=False)
        def last_gradient(x, layer=layer):
            with tf.GradientTape() as tape:
                total = tf.reduce_sum(tf.cast(layer(x), tf.float32))
            return tf.convert_to_tensor(tape.gradient(total, layer.trainable_variables)[-1])

        gradient = last_gradient(tf.zeros(shape, tf.int32 if "embedding" in name else layer.compute_dtype))
        first = gradient[0].numpy() if gradient.shape.rank == 2 else gradient.numpy()
        np.testing.assert_allclose(first, 5000, rtol=2**-9, err_msg=name)
