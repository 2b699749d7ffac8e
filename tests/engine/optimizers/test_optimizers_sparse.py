"""Sparse updates of tables against plain NumPy, row by row, those of other variables against dense ones, and both under
XLA."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Trainer, mean
from crankshaft.engine import optimizers
from crankshaft.engine.internals.variables import mark_shard

# Of a table of 6 rows, row 4 is never touched, and row 1 twice in one batch.
INDICES = [[1, 3, 1], [0, 5, 0], [2, 1, 1], [3, 3, 3]]


def make_table():
    value = np.random.default_rng(1).normal(size=(6, 2))
    table = tf.Variable(value, dtype=tf.float32, name="table")
    mark_shard(table, table)
    return [table]


def sparse_gradients(step):
    rng = np.random.default_rng(step)
    return INDICES[step % len(INDICES)], rng.normal(size=(3, 2)).astype("float32")


def rule_sgd(w, slots, g, t):
    return w - 0.1 * g


def rule_momentum(w, slots, g, t):
    slots["a"] = 0.9 * slots["a"] - 0.1 * g
    return w + 0.9 * slots["a"] - 0.1 * g


def rule_adam(w, slots, g, t):
    slots["m"] = 0.9 * slots["m"] + 0.1 * g
    slots["v"] = 0.999 * slots["v"] + 0.001 * g**2
    alpha = 0.1 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    return w - alpha * slots["m"] / (np.sqrt(slots["v"]) + 1e-7)


def rule_adamw(w, slots, g, t):
    return rule_adam(w - 0.1 * 0.05 * w, slots, g, t)


def rule_adagrad(w, slots, g, t):
    slots["a"] = slots["a"] + g**2
    return w - 0.1 * g / np.sqrt(0.1 + slots["a"] + 1e-7)


def rule_rmsprop(w, slots, g, t):
    slots["ms"] = 0.9 * slots["ms"] + 0.1 * g**2
    slots["mg"] = 0.9 * slots["mg"] + 0.1 * g
    slots["mom"] = 0.5 * slots["mom"] + 0.1 * g / np.sqrt(slots["ms"] - slots["mg"] ** 2 + 1e-3)
    return w - slots["mom"]


def rule_ftrl(w, slots, g, t):
    before = np.sqrt(0.1 + slots["n"])
    slots["n"] = slots["n"] + g**2
    after = np.sqrt(0.1 + slots["n"])
    slots["z"] = slots["z"] + g - (after - before) / 0.1 * w
    clipped = np.clip(slots["z"], -0.01, 0.01)
    return (clipped - slots["z"]) / (after / 0.1 + 2 * 0.02)


SPARSE = {
    "sgd": (rule_sgd, {}),
    "momentum": (rule_momentum, {"nesterov": True}),
    "adam": (rule_adam, {}),
    "adamw": (rule_adamw, {"weight_decay": 0.05}),
    "adagrad": (rule_adagrad, {}),
    "rmsprop": (rule_rmsprop, {"centered": True, "momentum": 0.5, "epsilon": 1e-3}),
    "ftrl": (
        rule_ftrl,
        {"l1_regularization_strength": 0.01, "l2_regularization_strength": 0.02},
    ),
}


@pytest.mark.parametrize("name", optimizers.NAMES)
def test_sparse_updates_touch_their_rows_only_and_sum_duplicates(name):
    rule, arguments = SPARSE[name]
    [table] = variables = make_table()
    optimizer = optimizers.build(name, 0.1, **arguments)
    optimizer.build(variables)

    @tf.function
    def apply(values, indices):
        optimizer.apply([tf.IndexedSlices(values, indices, (6, 2))], variables)

    start = table.numpy()
    rows = dict(enumerate(start.astype("float64")))
    slots = {row: dict.fromkeys(["a", "m", "v", "ms", "mg", "mom", "n", "z"], 0.0) for row in rows}
    for step in range(20):
        indices, values = sparse_gradients(step)
        apply(tf.constant(values), tf.constant(indices))
        for row in set(indices):
            gradient = values[np.equal(indices, row)].astype("float64").sum(axis=0)
            rows[row] = rule(rows[row], slots[row], gradient, step + 1)

    # NumPy counts in float64: twenty updates' float32 roundings.
    np.testing.assert_allclose(table.numpy(), list(rows.values()), rtol=2e-6, atol=1e-6)
    np.testing.assert_array_equal(table.numpy()[4], start[4])


def update(optimizer, variable, gradient_of, jit=False):
    """The value of a variable of no table after eight updates by what `gradient_of` makes of slices."""
    optimizer.build([variable])

    @tf.function(jit_compile=jit)
    def apply(values, indices):
        optimizer.apply([gradient_of(tf.IndexedSlices(values, indices, (6, 2)))], [variable])

    for step in range(8):
        indices, values = sparse_gradients(step)
        apply(tf.constant(values), tf.constant(indices))
    return variable.numpy()


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", ["momentum", "adam", "rmsprop"])
def test_all_rows_of_a_layers_variable_move_as_its_rule_says(name, jit):
    """As in Keras: a row that an earlier batch had goes on by its moments. Padding adds nothing."""
    arguments = {"momentum": 0.5, "centered": True, "epsilon": 1e-3} if name == "rmsprop" else {}

    def padded(slices):
        return tf.IndexedSlices(tf.pad(slices.values, [[0, 1], [0, 0]]), tf.concat([slices.indices, [-1]], 0))

    sparse, dense = (
        update(optimizers.build(name, 0.1, **arguments), tf.Variable(tf.ones([6, 2]), name="embeddings"), each, jit)
        for each in (padded, tf.convert_to_tensor)
    )
    np.testing.assert_allclose(sparse, dense, rtol=1e-6)  # sums in another order
    [table] = make_table()
    by_rows = update(optimizers.build(name, 0.1, **arguments), table, lambda x: x) if not jit else sparse + 1
    assert np.abs(by_rows - sparse).max() > 0.1


def test_ftrl_leaves_rows_that_no_batch_has_as_they_began():
    """Its dense rule would make them 0."""
    value = update(optimizers.build("ftrl", 0.1), tf.Variable(tf.ones([6, 2]), name="embeddings"), lambda x: x)
    np.testing.assert_array_equal(value[4], 1)


class Words(Trainer):
    """A layer's embedding."""

    def build_model(self):
        layers = tf.keras.layers
        return tf.keras.Sequential([layers.Input([], dtype="int64"), layers.Embedding(600, 2000), layers.Dense(1)])

    def loss(self, outputs, batch):
        return mean(tf.square(outputs[:, 0] - batch[1]))


def test_a_run_begun_by_rows_alone_goes_on_so(bench, tmp_path, caplog):
    """Its checkpoints do not say which rows move. A line says it; another one that all rows of a large one move."""
    source = np.arange(8), np.ones(8, np.float32)
    made = bench(Words(), source, 2, optimizer="adam", learning_rate=0.1, shuffle=False)
    put_back = made.state.make_restorer()

    def first_rows(step):
        made.train(step)
        return made.trainer.model.layers[0].embeddings.numpy()[:2]

    assert np.abs(first_rows(1) - first_rows(4)).min() > 0.05
    assert "adam moves all rows of sequential/embedding/embeddings (600, 2000)" in caplog.text
    put_back()
    former = {name: value for name, value in made.state.host_state().items() if name != "by_rows"}
    made.checkpoints(tmp_path).save(0, {"state": former}, wait=True)
    used = made.restore(tmp_path) and first_rows(1)
    made.save(tmp_path)
    np.testing.assert_array_equal(made.restore(tmp_path) and first_rows(4), used)
    assert "adam moves only the rows of sequential/embedding/embeddings that a batch uses, as this run" in caplog.text


@pytest.mark.parametrize("name", ["sgd", "adamw", "lion"])
def test_all_rows_of_a_weight_of_no_table_decay(name):
    """As in Keras, of a layer's Embedding: rows that no batch has decay like any other value."""
    weight = tf.Variable(tf.ones([6, 2]), name="embeddings")
    optimizer = optimizers.build(name, 0.1, weight_decay=0.3)
    optimizer.build([weight])
    for _ in range(3):
        optimizer.apply([tf.IndexedSlices(tf.ones([2, 2]), [1, 1], [6, 2])], [weight])
    np.testing.assert_allclose(np.delete(weight, 1, 0), np.full([5, 2], 0.97**3), rtol=1e-6)
    assert (weight.numpy()[1] < 0.9).all()


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", ["nadam", "adamax", "lion"])
def test_keras_own_rules_sum_duplicates(name, jit):
    """Two occurrences of a row are one of their sum, as in the gradient that is dense."""
    tables = []
    for is_dense in (False, True):
        [table] = variables = make_table()
        optimizer = optimizers.build(name, 0.1)
        optimizer.build(variables)

        @tf.function(jit_compile=jit)
        def apply(values, indices, is_dense=is_dense, optimizer=optimizer, variables=variables):
            gradient = tf.IndexedSlices(values, indices, (6, 2))
            optimizer.apply([tf.convert_to_tensor(gradient) if is_dense else gradient], variables)

        for step in range(8):
            indices, values = sparse_gradients(step)
            apply(tf.constant(values), tf.constant(indices))
        tables.append(table.numpy())
    np.testing.assert_allclose(*tables, rtol=1e-6, atol=1e-6)  # sums in another order


@pytest.mark.parametrize("name", optimizers.NAMES)
def test_a_sparse_gradient_without_rows_changes_nothing(name):
    [table] = variables = make_table()
    optimizer = optimizers.build(name, 0.1, weight_decay=0.1)
    optimizer.build(variables)
    before = table.numpy()
    nothing = tf.IndexedSlices(tf.zeros((0, 2)), tf.zeros((0,), tf.int64), (6, 2))
    optimizer.apply([nothing], variables)
    np.testing.assert_array_equal(table.numpy(), before)


@pytest.mark.parametrize("name", ["sgd", "adamw", "rmsprop"])
def test_sparse_updates_without_a_sparse_kernel_compile_under_xla(name):
    def train_table(jit):
        [table] = variables = make_table()
        optimizer = optimizers.build(name, 0.1, weight_decay=0.01)
        optimizer.build(variables)

        @tf.function(jit_compile=jit)
        def apply(values, indices):
            optimizer.apply([tf.IndexedSlices(values, indices, (6, 2))], variables)

        for step in range(8):
            indices, values = sparse_gradients(step)
            apply(tf.constant(values), tf.constant(indices))
        return table.numpy()

    np.testing.assert_allclose(train_table(True), train_table(False), rtol=1e-5, atol=1e-6)
