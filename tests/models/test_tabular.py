"""wide_deep and dlrm: what they compute against NumPy, and that they learn what was planted."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine import StepOptions
from crankshaft.engine.build import prepare
from crankshaft.engine.data import form
from crankshaft.engine.hooks import numerics
from crankshaft.engine.hooks.evaluation import evaluate
from crankshaft.engine.layers import Products
from crankshaft.engine.metrics.sums import Sums
from crankshaft.engine.reduction import Reduction
from crankshaft.engine.state import TrainState
from crankshaft.engine.strategies.replicated import Replicated
from crankshaft.models import dlrm, wide_deep
from tests.bench import split_of

EXAMPLES, FIELDS, ROWS = 3000, 4, 20


def planted(seed=0):
    """Clicks whose log-odds are the sum of a hidden weight for each id of each field, and of one number."""
    rng = np.random.default_rng(seed)
    weights = np.random.default_rng(99).normal(size=[FIELDS, ROWS])
    ids, dense = rng.integers(0, ROWS, [EXAMPLES, FIELDS]), rng.normal(size=[EXAMPLES, 2]).astype(np.float32)
    logits = weights[np.arange(FIELDS), ids].sum(1) + 2 * dense[:, 0]
    labels = (rng.random(EXAMPLES) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    return {"categories": ids, "dense": dense}, labels


def ratings(seed=0):
    rng = np.random.default_rng(seed)
    users, items = np.random.default_rng(99).normal(size=[2, ROWS])
    user, item = rng.integers(0, ROWS, [2, EXAMPLES])
    return {"user": user, "item": item}, (3.5 + users[user] + items[item]).astype(np.float32)


def prepared(trainer, source, vocabulary, eval_source=None, batch=100, shuffle=True, num_classes=None, **options):
    strategy = Replicated("test", tf.distribute.OneDeviceStrategy("CPU:0"), steps_per_loop=50)
    options = StepOptions(**options)
    with strategy.scope():
        state = TrainState(trainer)
        arrays = next(source.batch(1).as_numpy_iterator()) if isinstance(source, tf.data.Dataset) else source
        example = tf.nest.map_structure(lambda array: np.zeros_like(array[:1]), arrays)
        if num_classes is None:
            num_classes = form.num_classes(split_of(source))
        prepare(trainer, options, Reduction(), example, num_classes, vocabulary)
        state.build()
    eval_feed = None if eval_source is None else strategy.feed(split_of(eval_source), 700, None)
    strategy.bind(state, strategy.feed(split_of(source), batch, 0 if shuffle else None), eval_feed)
    return strategy, state


def learn(trainer, data, vocabulary, steps=200, **options):
    strategy, state = prepared(trainer, data(0), vocabulary, data(1), optimizer="adam", learning_rate=0.01, **options)
    before = strategy.evaluate().means()
    sums = Sums()
    while state.step < steps:
        sums.add(strategy.run(strategy.training, steps - state.step).sums)
    return before, strategy.evaluate().means()


MODELS = {
    "wide_deep": lambda **arguments: wide_deep.Model(width=4, hidden_units=(16,), **arguments),
    "dlrm": lambda **arguments: dlrm.Model(width=4, bottom_units=(8,), top_units=(16,), **arguments),
}


@pytest.mark.parametrize(("name", "hash_buckets"), [("wide_deep", 4000), ("dlrm", 0)])
def test_clicks_are_learned(name, hash_buckets):
    """The planted odds themselves have an AUC of 0.906 here; before it learns, chance decides."""
    vocabulary = None if hash_buckets else {"categories": ROWS}
    before, after = learn(MODELS[name](hash_buckets=hash_buckets), planted, vocabulary)
    assert set(after) == {"loss", "auc", "log_loss"}
    assert after["log_loss"] == after["loss"] < 0.5 < before["loss"]
    assert before["auc"] < 0.8
    assert after["auc"] > 0.85


@pytest.mark.parametrize("name", MODELS)
def test_ratings_are_learned(name):
    """Labels have a standard deviation of about 1.4 around 3.5."""
    before, after = learn(MODELS[name](), ratings, {"user": ROWS, "item": ROWS})
    assert set(after) == {"loss", "rmse", "mae"}
    assert after["rmse"] == pytest.approx(np.sqrt(after["loss"]), rel=1e-6)
    assert before["rmse"] > 3
    assert 0 < after["mae"] < after["rmse"] < 0.5


def outputs_of(trainer, features):
    return trainer.forward(tf.nest.map_structure(tf.constant, features), training=False).numpy()


def test_dlrm_is_the_papers_products_of_all_pairs():
    features, labels = planted()
    features = {name: x[:50] for name, x in features.items()}
    trainer = MODELS["dlrm"]()
    prepared(trainer, (features, labels[:50]), {"categories": ROWS}, batch=10)
    table = trainer.embedding.shards[0].numpy()
    weights = {v.path: v.numpy() for v in trainer.model.trainable_variables}

    def layer(name, x):
        return x @ weights[f"{name}/kernel"] + weights[f"{name}/bias"]

    x = np.maximum(layer("bottom_0", features["dense"]), 0)
    x = np.maximum(layer("bottom_1", x), 0)
    vectors = [x] + [table[i * ROWS + features["categories"][:, i]] for i in range(FIELDS)]
    pairs = [(vectors[i] * vectors[j]).sum(1) for i in range(FIELDS + 1) for j in range(i)]
    x = np.concatenate([x, np.stack(pairs, 1)], 1)
    x = layer("output", np.maximum(layer("top_0", x), 0))[:, 0]
    np.testing.assert_allclose(outputs_of(trainer, features), x, rtol=1e-4, atol=1e-6)


def trained(name, source, steps, micro_batches=1, calls=(60,)):
    """All that was trained, after so many steps of Adam by batches of 64; once for each length of calls."""
    trainer = MODELS[name](**({"crosses": ("all",)} if name == "wide_deep" else {}))
    arguments = {
        "batch": 64,
        "optimizer": "adam",
        "parallel_micro_batches": micro_batches,
        "shuffle": False,
        "num_classes": 2,
    }
    strategy, state = prepared(trainer, source, {"categories": ROWS}, **arguments)
    put_back, found = state.copied(), []
    for calls_of in calls:
        put_back()
        while state.step < steps:
            strategy.run(strategy.training, min(calls_of, steps - state.step))
        found.append([variable.numpy() for variable in state.trainer.trainable_variables])
    return found


@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param("wide_deep", tf.data.Dataset.from_tensor_slices, marks=pytest.mark.slow),
        ("dlrm", lambda arrays: arrays),
    ],
)
def test_micro_batches_learn_what_whole_batches_teach(name, form):
    """Many rows are in several micro-batches, for the lazy Adam. The last batch has fewer examples than micro-batches.

    float32 sums in another order: 1e-7 a step of what a gradient is made of, more where its terms cancel.
    """
    source = tf.nest.map_structure(lambda array: array[: 64 * 20 + 2], planted())
    (whole,) = trained(name, source, 60)
    (split,) = trained(name, form(source), 60, micro_batches=3)
    for one, other in zip(whole, split, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "micro_batches"), [("wide_deep", 3), ("dlrm", 1)])
def test_where_calls_are_cut_changes_no_bit(name, micro_batches):
    for a, b in zip(*trained(name, planted(), 12, micro_batches, calls=(12, 1)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_features_may_have_any_kind_of_integers():
    rng = np.random.default_rng(4)
    features = {"item": rng.integers(0, 9, 50), "tags": rng.integers(0, 9, [50, 2]), "user": rng.integers(0, 9, 50)}
    mixed = {
        "item": features["item"],
        "tags": features["tags"].astype("uint8"),
        "user": features["user"].astype("int32"),
    }
    found = []
    for given in (features, mixed):
        trainer = MODELS["dlrm"]()
        prepared(trainer, (given, np.zeros(50, np.float32)), dict.fromkeys(features, 9), batch=10)
        found.append(trainer.ids(tf.nest.map_structure(tf.constant, given)).numpy())
    np.testing.assert_array_equal(*found)
    expected = [features["item"], 9 + features["tags"][:, 0], 18 + features["tags"][:, 1], 27 + features["user"]]
    np.testing.assert_array_equal(found[0], np.stack(expected, 1))


@pytest.mark.parametrize("n", [1, 2, 4])
def test_gradient_of_products_is_each_vectors_sum_over_its_pairs(n):
    rng = np.random.default_rng(3)
    pairs = [(i, j) for i in range(n) for j in range(i)]
    x, dy = rng.normal(size=[6, n, 3]), rng.normal(size=[6, len(pairs)])
    expected = np.zeros_like(x)
    for k, (i, j) in enumerate(pairs):
        expected[:, i] += dy[:, k, None] * x[:, j]
        expected[:, j] += dy[:, k, None] * x[:, i]
    vectors = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(vectors)
        products = Products(dtype="float64")(vectors)
    found = tape.gradient(products, vectors, tf.constant(dy))
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_wide_part_is_a_weight_for_each_id_and_cross():
    features, labels = ratings()
    features = {name: x[:50] for name, x in features.items()}
    trainer = MODELS["wide_deep"](crosses=("user:item",), cross_buckets=97)
    prepared(trainer, (features, labels[:50]), {"user": ROWS, "item": ROWS}, batch=10)
    deep = outputs_of(trainer, features)  # the wide weights are zeros at first
    rng = np.random.default_rng(5)
    wide, crosses = rng.normal(size=[2 * ROWS, 1]), rng.normal(size=[97, 1])
    rows = trainer.embedding.shards[0].numpy()
    assert not rows[:, -1].any()
    assert rows[:, :-1].all()
    trainer.embedding.shards[0].assign(np.concatenate([rows[:, :-1], wide], 1).astype(np.float32))
    trainer.cross_table.shards[0].assign(crosses.astype(np.float32))
    rows = trainer.cross_table.rows_of(tf.constant(features["item"] * ROWS + features["user"])).numpy()
    assert trainer.fields[0].name == "item"
    cross_rows = trainer.cross_table.rows_of(tf.constant(features["user"] * ROWS + features["item"])).numpy()
    expected = deep + wide[features["item"], 0] + wide[ROWS + features["user"], 0] + crosses[cross_rows, 0]
    np.testing.assert_allclose(outputs_of(trainer, features), expected, rtol=1e-4, atol=1e-5)
    assert not np.array_equal(rows, cross_rows)  # which field comes first matters


def test_a_cross_learns_what_no_sum_can():
    """Exclusive or of two ids: the hidden layer is too narrow to help."""

    def exclusive(seed):
        rng = np.random.default_rng(seed)
        a, b = rng.integers(0, 2, [2, EXAMPLES])
        return {"a": a, "b": b}, (a ^ b).astype(np.float32)

    def model(**arguments):
        return wide_deep.Model(width=1, hidden_units=(), **arguments)

    counts = {"a": 2, "b": 2}
    assert learn(model(), exclusive, counts)[1]["auc"] < 0.6
    assert learn(model(crosses=("all",)), exclusive, counts)[1]["auc"] == 1.0


def test_ids_out_of_range_are_taken_for_0():
    features, labels = ratings()
    trainer = MODELS["dlrm"]()
    prepared(trainer, (features, labels), {"user": ROWS, "item": ROWS})
    bad = {"user": np.array([-1, ROWS, 3]), "item": np.array([4, 4, ROWS + 7])}
    good = {"user": np.array([0, 0, 3]), "item": np.array([4, 4, 0])}
    np.testing.assert_array_equal(outputs_of(trainer, bad), outputs_of(trainer, good))


@pytest.mark.parametrize(
    ("trainer", "source", "vocabulary", "message"),
    [
        (dlrm.Model, planted, None, "hash_buckets=100000"),
        (wide_deep.Model, lambda: (np.zeros([3, 2]), np.zeros(3)), None, "the data has one array"),
        (lambda: wide_deep.Model(crosses=("user:shop",)), ratings, {"user": 20, "item": 20}, "crosses=user:shop"),
        (lambda: wide_deep.Model(task="sales"), ratings, {"user": 20, "item": 20}, "task=sales is unknown"),
        (dlrm.Model, lambda: ({"x": np.zeros([3, 2], np.float32)}, np.zeros(3)), {"y": 3}, "no feature is an id"),
    ],
)
def test_mistakes_are_one_line(trainer, source, vocabulary, message):
    with pytest.raises(ValueError, match=message) as raised:
        prepared(trainer(), source(), vocabulary, batch=3)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("labels", "arguments", "clicks"),
    [
        (np.float32([0.5, 1.0, 0.0]), {}, False),
        (np.float32([0.0, 1.0, 0.0]), {}, True),
        (np.array([0, 1, 0]), {}, True),
        (np.array([0, 4, 1]), {"task": "ratings"}, False),
        (np.array([-1, 1, 1]), {}, True),  # refused by its values as it trains
        (np.float32([0.5, 1.0, 0.0]), {"task": "clicks"}, True),
    ],
)
def test_labels_say_the_task(labels, arguments, clicks):
    trainer = MODELS["dlrm"](**arguments)
    prepared(trainer, ({"id": np.array([0, 1, 2])}, labels), {"id": 3}, batch=3)
    assert trainer.predicts_clicks == clicks


def test_user_and_item_are_rated_in_whole_stars_too():
    trainer = MODELS["dlrm"]()
    features, stars = ratings()
    prepared(trainer, (features, np.clip(np.round(stars), 1, 5).astype(np.int64)), {"user": ROWS, "item": ROWS})
    assert not trainer.predicts_clicks


@pytest.mark.parametrize("arguments", [{}, {"task": "clicks"}])
def test_more_classes_than_two_are_refused_by_name(arguments):
    with pytest.raises(ValueError, match=r"labels are classes 0 to 4, and .*dlrm predicts clicks.*task=ratings"):
        prepared(MODELS["dlrm"](**arguments), ({"id": np.arange(3)}, np.array([0, 4, 1])), {"id": 3}, batch=3)


@pytest.mark.parametrize("weighed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_labels_that_are_not_0_or_1_end_training_and_evaluation_by_name(weighed):
    """Those of padding, which weigh nothing, may be anything."""
    features, labels = {"id": np.arange(6) % 3}, np.float32([0, 1, 0, 4, 1, 4])
    split = (features, labels, np.float32([1, 1, 1, 0, 1, 0])) if weighed else (features, labels)
    strategy, state = prepared(MODELS["dlrm"](task="clicks"), split, {"id": 3}, split, batch=3, shuffle=False)
    sums = strategy.run(strategy.training, 2).sums.read()
    if weighed:
        numerics.check_labels(sums, "here")
        assert np.isfinite([sums["loss"].total, evaluate(strategy, state)["loss"]]).all()
        return
    assert np.isnan(sums["loss"].total)
    assert numerics.first_nonfinite_variable(state) is None
    with pytest.raises(numerics.LabelError, match=r"^here: auc: 2 labels are 4 on average, not 0 or 1"):
        numerics.check_labels(sums, "here")
    with pytest.raises(numerics.LabelError, match=r"^evaluation at step 2: auc: 2 labels are 4 on average"):
        evaluate(strategy, state)
