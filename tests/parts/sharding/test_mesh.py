"""What replicas of a mesh sum with whom, and which shard of an array each holds."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.mesh import sharded
from crankshaft.engine.mesh.sharded import Sharding


def on_replicas(strategy, step):
    """Runs `step` in a compiled loop of two rounds, as trainers do; returns each replica's last result."""

    def loop():
        def body(i, _):
            return i + 1, [tf.nest.map_structure(tf.identity, x) for x in run()]

        def run():
            return strategy.experimental_local_results(strategy.run(step))

        first = run()
        return tf.while_loop(lambda i, _: i < 2, body, (tf.constant(0), list(first)))[1]

    return [x.numpy() for x in tf.function(loop, autograph=False)()]


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (2, 2)])
def test_each_axis_sums_over_its_own_replicas(meshes, shape):
    data, model = shape
    strategy, mesh = meshes(data, model)

    def step():
        r = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
        one_hot = tf.one_hot(tf.cast(r, tf.int32), data * model)
        return tf.stack([axis.all_reduce(one_hot) for axis in (mesh.data, mesh.model, mesh.all_replicas)])

    ids = np.arange(data * model)
    for r, found in enumerate(on_replicas(strategy, step)):
        np.testing.assert_array_equal(found[0], ids % model == r % model)
        np.testing.assert_array_equal(found[1], ids // model == r // model)
        np.testing.assert_array_equal(found[2], 1)


@pytest.mark.parametrize("shape", [(1, 2), (2, 2)])
def test_gathers_and_scatters_are_in_the_order_of_the_coordinate(meshes, shape):
    strategy, mesh = meshes(*shape)

    def step():
        r = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
        piece = mesh.model.reduce_scatter(tf.range(4.0) + 10.0 * r)
        return tf.concat([tf.reshape(mesh.model.all_gather(tf.reshape(r, [1])), [-1]), piece], 0)

    for r, found in enumerate(on_replicas(strategy, step)):
        neighbours = np.arange(2) + r // 2 * 2
        whole = sum(np.arange(4.0) + 10 * n for n in neighbours)
        np.testing.assert_array_equal(found, [*neighbours, *whole.reshape(2, 2)[r % 2]])


def test_the_gradient_of_exchanged_values_is_that_of_finite_differences(meshes):
    strategy, mesh = meshes(1, 2)
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 2, 2, 3)), rng.normal(size=(2, 2, 2, 3))  # by replica, by receiver, [2, 3]

    def loss(x):  # of both replicas: each weighs what it received
        return np.sum(w * np.swapaxes(x, 0, 1) ** 3)

    def step():
        mine = tf.constant(x)[mesh.model.rank]
        with tf.GradientTape() as tape:
            tape.watch(mine)
            weighed = tf.constant(w)[mesh.model.rank] * mesh.model.all_to_all(mine) ** 3
        return tape.gradient(weighed, mine)

    found, h = np.stack(on_replicas(strategy, step)), 1e-5
    shifts = h * np.eye(x.size).reshape(x.size, *x.shape)
    expected = np.array([loss(x + shift) - loss(x - shift) for shift in shifts]).reshape(x.shape) / (2 * h)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-8)


def test_a_product_cut_by_columns_then_rows_has_the_gradients_of_the_whole(meshes):
    """Megatron's block: x -> enter -> columns -> rows -> leave."""
    strategy, mesh = meshes(1, 2)
    rng = np.random.default_rng(0)
    x, a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((3, 4), (4, 6), (6, 4)))

    def step():
        rank = mesh.model.rank
        mine = tf.constant(a[:, 3 * rank : 3 * rank + 3]), tf.constant(b[3 * rank : 3 * rank + 3])
        given = tf.constant(x)
        with tf.GradientTape() as tape:
            tape.watch([given, *mine])
            out = mesh.leave(tf.tanh(mesh.enter(given) @ mine[0]) @ mine[1])
            loss = tf.reduce_sum(out**2)
        dx, da, db = tape.gradient(loss, [given, *mine])
        return tf.concat([tf.reshape(v, [-1]) for v in (out, dx, da, db)], 0)

    given, whole_a, whole_b = map(tf.constant, (x, a, b))
    with tf.GradientTape() as tape:
        tape.watch([given, whole_a, whole_b])
        out = tf.tanh(given @ whole_a) @ whole_b
        loss = tf.reduce_sum(out**2)
    dx, da, db = tape.gradient(loss, [given, whole_a, whole_b])
    for rank, found in enumerate(on_replicas(strategy, step)):
        mine = slice(3 * rank, 3 * rank + 3)
        expected = np.concatenate([np.ravel(v) for v in (out, dx, da.numpy()[:, mine], db.numpy()[mine])])
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6)  # some eight additions in another order


def test_shards_tile_the_whole_and_padding_belongs_to_nobody():
    sizes = (("data", 2), ("model", 3))
    for axes in [((0, "model"),), ((0, "model"), (1, "data")), ((0, "model"), (0, "data"))]:
        sharding = Sharding((7, 4), axes, sizes)
        count = np.zeros((7, 4), int)
        for replica in range(6):
            if sharding.is_first_holder(replica):
                count[sharding.box(replica).slices] += 1
        np.testing.assert_array_equal(count, 1)
    assert Sharding((7, 4), ((0, "model"),), sizes).local_shape == (3, 4)
    assert Sharding((7, 4), ((0, "model"),), sizes).box(2).spec((7, 4)) == "7 4 6,1:0,4"


def test_a_variable_is_filled_by_position_on_any_mesh(meshes):
    whole = np.arange(35, dtype=np.float32).reshape(7, 5)
    for shape in [(1, 2), (2, 2)]:
        strategy, mesh = meshes(*shape)
        for axis in (0, 1):
            sharding = Sharding.over(mesh, whole.shape, {axis: "model"})
            with strategy.scope():
                variable = tf.Variable(tf.zeros(sharding.local_shape))
            sharded.mark(variable, sharding)
            sharded.fill(variable, lambda box: tf.constant(whole[box.slices]))
            for replica, shard in sharded.local_shards(variable):
                box = sharding.box(replica)
                held = shard.numpy()[tuple(slice(0, n) for n in box.size)]
                np.testing.assert_array_equal(held, whole[box.slices])
                assert shard.numpy().sum() == held.sum()


def test_a_filled_variable_is_read_without_a_copy(meshes):
    """As any other: scattering into a variable would make each read of it, in steps and in checkpoints, a copy."""
    strategy, mesh = meshes(1, 2)
    sharding = Sharding.over(mesh, (6, 4), {0: "model"})
    with strategy.scope():
        variable = tf.Variable(tf.zeros(sharding.local_shape))
    sharded.mark(variable, sharding)
    sharded.fill(variable, lambda box: tf.ones(box.size))
    for _, shard in sharded.local_shards(variable):
        reads = [shard.read_value() for _ in range(2)]
        first, second = (np.asarray(each).__array_interface__["data"] for each in reads)
        assert first == second
