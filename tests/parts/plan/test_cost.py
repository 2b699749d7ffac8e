"""What a step computes and moves, and what that allows: by hand-computed values."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Embedding, Trainer, mean
from crankshaft.models import cnn, mlp
from crankshaft.parts.plan import cost
from crankshaft.parts.plan.cost import Cost
from crankshaft.parts.plan.quantities import flops_by_dtype
from crankshaft.parts.plan.traced_ops import NotCountableError
from crankshaft.parts.sharding import Dense

pytestmark = pytest.mark.thorough

BATCH = 64
MLP_VALUES = 784 * 128 + 128 + 128 * 10 + 10
# Forward, the same for the weights' gradients, and the inputs' gradient of all layers but the first.
MLP_FLOPS = 2 * (2 * BATCH * (784 * 128 + 128 * 10)) + 2 * BATCH * 128 * 10
# An output of a convolution is a sum over 3x3 of the channels below: 26x26x32 from 1, 11x11x64 from 32.
FIRST, SECOND, DENSE, LOGITS = 26 * 26 * 32 * 9, 11 * 11 * 64 * 9 * 32, 1600 * 64, 64 * 10
CNN_FLOPS = 2 * BATCH * (2 * FIRST + 3 * SECOND + 3 * DENSE + 3 * LOGITS)


def images(examples=BATCH):
    return np.zeros([examples, 28, 28, 1], np.float32), np.zeros([examples], np.int64)


def cost_of(bench, trainer, source, batch_size=BATCH, replicas=1, **options):
    made = bench(trainer, source, batch_size, replicas, num_classes=10, **options)
    return cost.step_cost(made.strategy, made.state, batch_size)


@pytest.mark.parametrize(("model", "flops", "replicas"), [(mlp.Model, MLP_FLOPS, 2), (cnn.Model, CNN_FLOPS, 1)])
def test_operations_of_the_reference_models_are_those_by_hand(bench, model, flops, replicas):
    assert cost_of(bench, model(), images(), replicas=replicas).flops == {"float32": flops}


def test_a_mesh_computes_what_one_device_does(bench):
    """The replicas of a model axis share the examples as well as the work."""

    class Sharded(Trainer):
        def build_model(self):
            return tf.keras.Sequential([Dense(16, split="columns", activation="tanh"), Dense(4, split="rows")])

        def loss(self, outputs, batch):
            return mean(outputs[:, 0] - tf.cast(batch[1], tf.float32))

    arrays = np.zeros([8, 6], np.float32), np.zeros([8], np.int64)
    flops = 2 * (2 * 8 * (6 * 16 + 16 * 4)) + 2 * 8 * 16 * 4
    assert cost_of(bench, Sharded(), arrays, 8, replicas=4, model=2).flops == {"float32": flops}


def test_micro_batches_compute_as_much_as_one_batch(bench):
    assert cost_of(bench, mlp.Model(), images(), accumulate_steps=4).flops == {"float32": MLP_FLOPS}


def test_operations_are_told_by_the_dtype_that_they_are_in(bench):
    assert cost_of(bench, mlp.Model(), images(), precision="bfloat16").flops == {"bfloat16": MLP_FLOPS}


def test_bytes_of_a_step_are_those_of_its_products_and_its_update(bench):
    x, w1, h, w2, y = BATCH * 784, 784 * 128, BATCH * 128, 128 * 10, BATCH * 10
    # x w1 = h; h w2 = y; h' y' = w2'; y' w2 = h'; x h' = w1'
    products = (x + w1 + h) + 3 * (h + w2 + y) + (x + h + w1)
    # SGD reads the gradient, and reads and writes the variable; it counts its updates, and scales its rate.
    update = 3 * MLP_VALUES
    found = cost_of(bench, mlp.Model(), images(), optimizer="sgd")
    assert found.bytes == pytest.approx(4 * (products + update), abs=100)
    # Adam reads and writes two slots more.
    with_slots = cost_of(bench, mlp.Model(), images(), optimizer="adam")
    assert with_slots.bytes - found.bytes == pytest.approx(4 * 4 * MLP_VALUES, abs=100)


def test_a_keras_optimizers_slots_are_moved_as_the_engines_own(bench):
    found = [cost_of(bench, mlp.Model(), images(), optimizer=name).bytes for name in ("adam", "nadam")]
    assert found[1] == pytest.approx(found[0], abs=200)


class Rows(Trainer):
    """A table, and a layer's embedding of its size."""

    def build_model(self):
        self.table, self.embedding = Embedding("rows", 50, 20), tf.keras.layers.Embedding(50, 20)
        return self.embedding

    def forward(self, features, training):
        return self.table(features, training=training) + self.embedding(features)

    def loss(self, outputs, batch):
        return mean(outputs[:, 0])


def test_an_update_moves_all_rows_of_a_layer_and_of_a_table_only_if_it_is_keras(bench):
    for name, arrays in (("adam", 1), ("nadam", 2)):
        made = bench(Rows(), (np.arange(8), np.zeros(8, np.float32)), 8, optimizer=name)
        moved, _ = cost.update_bytes(made.trainer)  # the gradient is read, and a variable and two slots, and written
        assert moved == pytest.approx(arrays * 4 * 50 * 20 * (3 + 2 * 2), abs=200)


class Recurrent(Trainer):
    """A product in a loop of seven turns."""

    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.SimpleRNN(5, kernel_initializer="zeros"), tf.keras.layers.Dense(1)])

    def loss(self, outputs, batch):
        return mean(tf.square(outputs[:, 0] - tf.cast(batch[1], tf.float32)))


def test_a_loops_products_count_as_often_as_it_runs(bench):
    steps, features, units, batch = 7, 3, 5, 4
    source = np.zeros([batch, steps, features], np.float32), np.zeros([batch], np.int64)
    found = cost_of(bench, Recurrent(), source, batch)
    # A turn: 4x3 by 3x5 and 4x5 by 5x5; backward the weights' gradients of both, and the state's. Then 4x5 by 5x1.
    turn = 2 * 2 * batch * features * units + 3 * 2 * batch * units * units
    at_most = steps * (turn + 2 * batch * features * units) + 3 * 2 * batch * units
    assert steps * turn + 3 * 2 * batch * units <= found.flops["float32"] <= at_most  # inputs' gradients may be pruned


def _flops(graph):
    return sum(flops_by_dtype(cost.products(graph)).values())


def operations(function, *shapes):
    specs = [tf.TensorSpec(shape) for shape in shapes]
    return _flops(tf.function(function).get_concrete_function(*specs).graph)


def test_products_by_hand():
    assert operations(lambda a, b: tf.matmul(a, b, transpose_a=True), [3, 5], [3, 7]) == 2 * 5 * 3 * 7
    assert operations(tf.matmul, [2, 5, 3], [2, 3, 7]) == 2 * 2 * 5 * 3 * 7
    assert operations(lambda a, b: tf.einsum("bij,bjk->bik", a, b), [2, 5, 3], [2, 3, 7]) == 2 * 2 * 5 * 3 * 7
    assert operations(lambda a, b: tf.einsum("...j,jk->...k", a, b), [2, 5, 3], [3, 7]) == 2 * 2 * 5 * 3 * 7
    assert operations(lambda a: tf.einsum("ij->ji", a), [2, 5]) == 0
    assert operations(lambda a, k: tf.nn.conv2d(a, k, 2, "SAME"), [2, 8, 8, 3], [3, 3, 3, 5]) == 2 * 2 * 16 * 5 * 27
    assert operations(lambda a, k: tf.nn.depthwise_conv2d(a, k, [1, 1, 1, 1], "SAME"), [2, 8, 8, 3], [3, 3, 3, 2]) == (
        2 * 2 * 64 * 6 * 9
    )


def test_what_nothing_needs_is_not_counted():
    def function(a):
        tf.matmul(a, a)
        return a + 1.0

    assert operations(function, [4, 4]) == 0


def test_a_length_that_only_running_tells_is_refused():
    def function(a, n):
        return tf.while_loop(lambda i, _: i < n, lambda i, x: (i + 1.0, tf.matmul(x, a)), (0.0, a))[1]

    with pytest.raises(NotCountableError, match="a loop whose length is not in its graph"):
        operations(function, [4, 4], [])
    with pytest.raises(NotCountableError, match="known only by running it"):
        operations(tf.matmul, [None, 4], [4, 4])


# -- the roofline -----------------------------------------------------------------------------------------------------

MACHINE = {
    "matmul_gflops": {"float32": 100.0, "bfloat16": 400.0},
    "memory_gb_per_sec": 10.0,
    "cache_gb_per_sec": 50.0,
    "cache_mb": 32.0,
}
MEGA, GIGA = 1e6, 1e9


def described(flops, bytes, resident=64e6, rate=5.0, **more):
    return cost.roofline(Cost(flops, bytes, resident), MACHINE, rate, **more)


def test_the_slower_of_operations_and_bytes_bounds():
    # 2 GFLOP at 100 GFLOP/s are 20 ms, 1 GB at 10 GB/s 100 ms: 10 steps/s at most.
    found = described({"float32": 2 * GIGA}, 1 * GIGA)
    assert (found["bound"], found["bandwidth"], found["matmul_dtype"]) == ("memory", "memory", "float32")
    assert found["limit_steps_per_sec"] == pytest.approx(10.0)
    assert found["share_of_limit"] == pytest.approx(0.5)
    assert found["intensity_flops_per_byte"] == pytest.approx(2.0)
    # 20 GFLOP are 200 ms.
    found = described({"float32": 20 * GIGA}, 1 * GIGA)
    assert (found["bound"], found["limit_steps_per_sec"]) == ("compute", pytest.approx(5.0))
    assert found["share_of_limit"] == pytest.approx(1.0)


def test_each_dtype_has_its_own_peak():
    # 20 GFLOP in bfloat16 are 50 ms, 1 in float32 10 ms.
    found = described({"bfloat16": 20 * GIGA, "float32": 1 * GIGA}, 1 * MEGA)
    assert found["limit_steps_per_sec"] == pytest.approx(1 / 0.060)
    assert found["matmul_dtype"] == "bfloat16"


def test_what_fits_the_cache_is_not_bound_by_memory():
    # 1 GB at 50 GB/s: 20 ms.
    found = described({"float32": 1 * GIGA}, 1 * GIGA, resident=32 * 2**20)
    assert (found["bandwidth"], found["limit_steps_per_sec"]) == ("cache", pytest.approx(50.0))


def test_devices_share_the_work():
    assert described({"float32": 2 * GIGA}, 1 * GIGA, 640e6, devices=4)["limit_steps_per_sec"] == pytest.approx(40.0)


def test_a_step_without_products_or_in_an_unmeasured_dtype_has_no_roofline():
    assert described({}, 1.0) is None
    assert described({"float64": 1.0}, 1.0) is None


def test_a_product_that_others_only_come_after_is_not_counted():
    @tf.function
    def function(x, w):
        unused = tf.matmul(x, w)[0]
        with tf.control_dependencies([unused]):
            return tf.matmul(w, x)

    specs = tf.TensorSpec([3, 5]), tf.TensorSpec([5, 3])
    assert _flops(function.get_concrete_function(*specs).graph) == 2 * 5 * 3 * 5
