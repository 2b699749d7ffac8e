"""wide_deep and dlrm: what they compute against NumPy, and that they learn what was planted."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.data import form
from crankshaft.engine.layers import Products
from crankshaft.models import dlrm, wide_deep
from tests.bench import split_of

pytestmark = pytest.mark.thorough

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


@pytest.fixture
def prepared(bench):
    """prepared(trainer, source, vocabulary, ...): a run of tables."""

    def make(trainer, source, vocabulary, eval_source=None, batch=100, **options):
        known = {"vocabulary": vocabulary, "num_classes": form.num_classes(split_of(source)), "eval_batch_size": 700}
        return bench(trainer, source, batch, eval_source=eval_source, block_steps=50, **{**known, **options})

    return make


@pytest.fixture
def learn(prepared):
    """learn(trainer, data, vocabulary): what is measured before 200 steps, and after."""

    def make(trainer, data, vocabulary):
        made = prepared(trainer, data(0), vocabulary, data(1), optimizer="adam", learning_rate=0.01)
        before = made.strategy.evaluate().means()
        made.train(200)
        return before, made.strategy.evaluate().means()

    return make


MODELS = {
    "wide_deep": lambda **arguments: wide_deep.Model(width=4, hidden_units=(16,), **arguments),
    "dlrm": lambda **arguments: dlrm.Model(width=4, bottom_units=(8,), top_units=(16,), **arguments),
}


@pytest.mark.parametrize(("name", "hash_buckets"), [("wide_deep", 4000), ("dlrm", 0)])
def test_clicks_are_learned(learn, name, hash_buckets):
    """The planted odds themselves have an AUC of 0.906 here; before it learns, chance decides."""
    vocabulary = None if hash_buckets else {"categories": ROWS}
    before, after = learn(MODELS[name](hash_buckets=hash_buckets), planted, vocabulary)
    assert set(after) == {"loss", "auc", "log_loss"}
    assert after["log_loss"] == after["loss"] < 0.5 < before["loss"]
    assert before["auc"] < 0.8
    assert after["auc"] > 0.85


@pytest.mark.parametrize("name", MODELS)
def test_ratings_are_learned(learn, name):
    """Labels have a standard deviation of about 1.4 around 3.5."""
    before, after = learn(MODELS[name](), ratings, {"user": ROWS, "item": ROWS})
    assert set(after) == {"loss", "rmse", "mae"}
    assert after["rmse"] == pytest.approx(np.sqrt(after["loss"]), rel=1e-6)
    assert before["rmse"] > 3
    assert 0 < after["mae"] < after["rmse"] < 0.5


def outputs_of(trainer, features):
    return trainer.forward(tf.nest.map_structure(tf.constant, features), training=False).numpy()


def test_dlrm_is_the_papers_products_of_all_pairs(prepared):
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


def test_features_may_have_any_kind_of_integers(prepared):
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


def test_wide_part_is_a_weight_for_each_id_and_cross(prepared):
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
    rows = trainer.cross_table.lookup_rows(tf.constant(features["item"] * ROWS + features["user"])).numpy()
    assert trainer.fields[0].name == "item"
    cross_rows = trainer.cross_table.lookup_rows(tf.constant(features["user"] * ROWS + features["item"])).numpy()
    expected = deep + wide[features["item"], 0] + wide[ROWS + features["user"], 0] + crosses[cross_rows, 0]
    np.testing.assert_allclose(outputs_of(trainer, features), expected, rtol=1e-4, atol=1e-5)
    assert not np.array_equal(rows, cross_rows)  # which field comes first matters


def test_a_cross_learns_what_no_sum_can(learn):
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
def test_mistakes_are_one_line(prepared, trainer, source, vocabulary, message):
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
def test_labels_say_the_task(prepared, labels, arguments, clicks):
    trainer = MODELS["dlrm"](**arguments)
    prepared(trainer, ({"id": np.array([0, 1, 2])}, labels), {"id": 3}, batch=3)
    assert trainer.predicts_clicks == clicks


def test_user_and_item_are_rated_in_whole_stars_too(prepared):
    trainer = MODELS["dlrm"]()
    features, stars = ratings()
    prepared(trainer, (features, np.clip(np.round(stars), 1, 5).astype(np.int64)), {"user": ROWS, "item": ROWS})
    assert not trainer.predicts_clicks


@pytest.mark.parametrize("arguments", [{}, {"task": "clicks"}])
def test_more_classes_than_two_are_refused_by_name(prepared, arguments):
    with pytest.raises(ValueError, match=r"labels are classes 0 to 4, and .*dlrm predicts clicks.*task=ratings"):
        prepared(MODELS["dlrm"](**arguments), ({"id": np.arange(3)}, np.array([0, 4, 1])), {"id": 3}, batch=3)
