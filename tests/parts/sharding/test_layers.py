"""Layers sharded over a mesh compute what those of one device do, with the gradients of the whole."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine import layers
from crankshaft.engine.mesh import sharded
from crankshaft.parts.sharding import Attention, Dense, Dropout, Embedding, cross_entropy
from crankshaft.parts.sharding.layers import Normal, RMSNorm
from tests.parts.sharding.test_mesh import on_replicas

WIDTH, VOCABULARY = 16, 11  # 11 words do not divide over 2 or 4
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (3, 5))
LABELS = np.where(np.arange(15).reshape(3, 5) % 7 == 3, -1, np.roll(TOKENS, 1))


class Decoder(tf.keras.layers.Layer):
    """Each layer once: as somebody's own composite layer, without a `build`."""

    def __init__(self, **arguments):
        super().__init__()
        self.embedding = Embedding(VOCABULARY, WIDTH, split="vocabulary", stddev=0.5)
        self.norm = RMSNorm()
        self.attention = Attention(4, use_bias=True, **arguments)
        self.up = Dense(20, "columns", activation="gelu")
        self.down = Dense(WIDTH, "rows")
        self.plain = Dense(WIDTH)

    def call(self, tokens):
        x = self.embedding(tokens)
        x += self.attention(self.norm(x))
        x += self.down(self.up(x))
        return self.embedding.logits(self.plain(x))


def functional(**arguments):
    inputs = tf.keras.Input([5], dtype="int32")
    return tf.keras.Model(inputs, Decoder(**arguments)(inputs))


def loss_and_gradients(model, mesh):
    with tf.GradientTape() as tape:
        losses = cross_entropy(model(TOKENS), LABELS, VOCABULARY, mesh)
        loss = tf.reduce_sum(tf.where(LABELS >= 0, losses, 0.0))
    gradients = tape.gradient(loss, model.trainable_variables)
    return [tf.stack([loss, tf.reduce_sum(losses)]), *gradients]


def made(mesh, strategy=None, **arguments):
    tf.keras.utils.set_random_seed(3)
    if strategy is None:
        return functional(**arguments)
    with strategy.scope(), mesh.scope():
        return functional(**arguments)


def on_each(strategy, step):
    """As `on_replicas`, of a list of tensors."""

    def flat():
        return tf.concat([tf.reshape(tf.cast(x, tf.float32), [-1]) for x in step()], 0)

    return on_replicas(strategy, flat)


@pytest.mark.thorough
@pytest.mark.parametrize(("shape", "kv_heads"), [pytest.param((1, 2), None, marks=pytest.mark.slow), ((2, 2), 2)])
def test_a_decoder_on_a_mesh_has_the_values_and_gradients_of_one_device(meshes, shape, kv_heads):
    one = made(None, kv_heads=kv_heads)
    expected = [x.numpy() for x in tf.function(lambda: loss_and_gradients(one, None), autograph=False)()]
    strategy, mesh = meshes(*shape)
    model = made(mesh, strategy, kv_heads=kv_heads)
    held = [dict(sharded.local_shards(v)) for v in model.trainable_variables]
    shardings = [sharded.variable_sharding(v) for v in model.trainable_variables]
    assert sum(each is not None for each in shardings) == 7  # the table, four kernels, two biases of columns
    for replica, found in enumerate(on_each(strategy, lambda: loss_and_gradients(model, mesh))):
        sizes = [2, *(int(np.prod(each[replica].shape)) for each in held)]
        gradients = np.split(found, np.cumsum(sizes)[:-1])
        np.testing.assert_allclose(gradients[0], expected[0], rtol=1e-6)
        for variable, whole, gradient, shard, sharding in zip(
            one.trainable_variables, expected[1:], gradients[1:], held, shardings, strict=True
        ):
            gradient, value, box = gradient.reshape(shard[replica].shape), shard[replica].numpy(), ...
            if sharding is not None:
                box = sharding.box(replica).slices
                inside = tuple(slice(0, n) for n in sharding.box(replica).size)
                assert np.abs(gradient).sum() == pytest.approx(np.abs(gradient[inside]).sum())  # none to padding
                gradient, value = gradient[inside], value[inside]
            np.testing.assert_array_equal(value, variable.numpy()[box], err_msg=variable.path)
            np.testing.assert_allclose(gradient, whole[box], rtol=1e-5, atol=1e-6, err_msg=variable.path)


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["mixed_bfloat16", pytest.param("mixed_float16", marks=pytest.mark.slow)])
def test_in_16_bits_a_decoder_on_a_mesh_is_that_of_one_device_within_their_rounding(meshes, precision):
    tf.keras.config.set_dtype_policy(precision)
    try:
        one = made(None)
        strategy, mesh = meshes(1, 2)
        model = made(mesh, strategy)
    finally:
        tf.keras.config.set_dtype_policy("float32")
    assert {v.dtype for v in model.trainable_variables} == {"float32"}
    logits, expected = one(TOKENS), float(loss_and_gradients(one, None)[0][0])
    assert logits.dtype == precision.removeprefix("mixed_")
    # Sums of some twenty products in 8 and 11 bits, in another order.
    tolerance = 2.0**-7 if precision == "mixed_bfloat16" else 2.0**-10
    for found in on_each(strategy, lambda: loss_and_gradients(model, mesh)[:1]):
        np.testing.assert_allclose(found[0], expected, rtol=tolerance)


def test_losses_of_cut_logits_are_exact_where_logits_are_large(meshes):
    strategy, mesh = meshes(1, 2)
    logits = np.float32([[-1e4, 0, 3], [1e4, 1e4 - 1, 0], [-200, -201, -202]])
    labels = np.int32([2, 1, 0])
    expected = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    padded = np.pad(logits, [[0, 0], [0, 1]], constant_values=1e9)  # the last column is nobody's

    def step():
        mine = tf.constant(padded[:, 2 * mesh.model.rank :][:, :2])
        with tf.GradientTape() as tape:
            tape.watch(mine)
            losses = cross_entropy(mine, labels, 3, mesh)
        return [losses, tape.gradient(losses, mine)]

    shares = np.pad(tf.nn.softmax(logits) - tf.one_hot(labels, 3), [[0, 0], [0, 1]])
    for rank, found in enumerate(on_each(strategy, step)):
        np.testing.assert_allclose(found[:3], expected, rtol=1e-6)
        np.testing.assert_allclose(found[3:].reshape(3, 2), shares[:, 2 * rank :][:, :2], atol=1e-6)


def test_initial_weights_are_those_of_their_position_whoever_samples_them():
    normal = Normal(0.02, seed=7)
    whole = normal((301, 77)).numpy()
    np.testing.assert_array_equal(normal.sample(sharded.Box((100, 31), (201, 46))), whole[100:, 31:])
    for rank, axes in enumerate([(), (9,), (4, 9), (3, 4, 9), (2, 3, 4, 9)]):
        every = normal(axes).numpy()
        part = sharded.Box((1,) * rank, tuple(n - 1 for n in axes))
        np.testing.assert_array_equal(normal.sample(part), every[part.slices])
        assert len(np.unique(every)) == every.size
    np.testing.assert_array_equal(normal((4, 9)), whole[:4, :9])
    assert abs(whole.std() / 0.02 - 1) < 0.01
    assert abs(whole.mean()) < 0.0005
    assert (Normal(0.02, seed=8)((301, 77)).numpy() != whole).all()


@pytest.mark.parametrize("kv_heads", [None, 2])
def test_attention_by_a_cache_is_attention_to_all_at_once(kv_heads):
    attention = Attention(4, kv_heads=kv_heads)
    x = tf.random.stateless_normal([2, 7, 16], [0, 1])
    expected = attention(x)
    cache, found = attention.empty_cache(2, positions=9), []
    for first, last in ((0, 4), (4, 5), (5, 7)):
        outputs, cache = attention(x[:, first:last], cache=cache, position=first)
        found.append(outputs)
    np.testing.assert_allclose(tf.concat(found, 1), expected, atol=1e-6)


def test_attention_looks_at_nothing_that_comes_later():
    attention = Attention(2)
    x = tf.random.stateless_normal([1, 6, 16], [0, 1])
    changed = tf.concat([x[:, :4], 5 - x[:, 4:]], 1)
    np.testing.assert_array_equal(attention(x)[:, :4], attention(changed)[:, :4])
    assert (attention(x)[:, 4:] != attention(changed)[:, 4:]).numpy().all()


def test_rotary_positions_count_by_their_distance():
    """Moved on by any number of positions, queries and keys give the same scores."""
    attention = Attention(2)
    x = tf.random.stateless_normal([1, 3, 16], [0, 1])
    attention(x)
    far = attention(x, cache=attention.empty_cache(1, 3), position=0)[0]
    np.testing.assert_allclose(far, attention(x), atol=1e-6)
    unturned = Attention(2, rotary=False)
    unturned(x)
    unturned.set_weights(attention.get_weights())
    assert np.abs(unturned(x) - attention(x)).max() > 1e-3


def test_dropout_within_shards_is_marked_on_a_mesh_alone(meshes):
    assert not hasattr(Dropout(0.5).seed_generator, "within_shard")
    strategy, mesh = meshes(1, 2)
    with strategy.scope(), mesh.scope():
        assert Dropout(0.5).seed_generator.within_shard


def test_what_does_not_divide_is_one_line_with_what_does(meshes):
    strategy, mesh = meshes(1, 2)
    with strategy.scope(), mesh.scope():
        with pytest.raises(ValueError, match="units=7 does not divide over the mesh's model:2; use 6 or 8"):
            Dense(7, "columns")
        with pytest.raises(ValueError, match="kv_heads=1 does not divide over the mesh's model:2; use 2"):
            Attention(4, kv_heads=1)
    with pytest.raises(ValueError, match="kv_heads=3 does not divide heads=4"):
        Attention(4, kv_heads=3)
    with pytest.raises(ValueError, match="heads=3 does not divide the width, 16"):
        Attention(3).build((None, 4, 16))


def test_layers_are_made_again_from_their_configuration():
    for layer in (
        Dense(4, "columns", activation="gelu", use_bias=False, stddev=0.1),
        Embedding(7, 4, "vocabulary"),
        Attention(4, kv_heads=2, dropout=0.1, rotary=False),
        RMSNorm(1e-6),
    ):
        again = tf.keras.layers.deserialize(tf.keras.layers.serialize(layer))
        assert again.get_config() == layer.get_config()


def test_layers_of_one_name_are_told_apart_in_a_saved_model():
    """Those that are sharded and those that are not: a file of either is read as what it was."""
    for kind in (Dense, layers.Dense):
        assert tf.keras.utils.get_registered_object(tf.keras.utils.get_registered_name(kind)) is kind
