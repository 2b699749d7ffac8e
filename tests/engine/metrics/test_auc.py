"""AUC over an evaluation, wherever its steps run: exact, each example once. Compared with all pairs, in NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Trainer, auc, mean
from crankshaft.engine.hooks import numerics
from crankshaft.engine.metrics.ranking import Ranking
from crankshaft.engine.metrics.sums import Sums

pytestmark = pytest.mark.thorough


class Scored(Trainer):
    """Logits near 5, a hundredth apart: one bucket of a histogram."""

    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])

    def loss(self, outputs, batch):
        return mean(tf.square(outputs[:, 0] - 5.0))

    def metrics(self, outputs, batch):
        return {"auc": auc(batch[1], outputs), "by_weight": auc(batch[1], outputs, weights=tf.square(batch[0][:, 0]))}


def scored(examples=45, weighted=False):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, examples)
    features = (5 + 0.01 * np.round(rng.normal(labels), 1)).astype(np.float32)[:, None]
    return (features, labels, rng.random(examples).astype(np.float32)) if weighted else (features, labels)


def by_pairs(features, labels, weights=None):
    weights = np.ones(len(labels)) if weights is None else weights.astype(np.float64)
    (above, w), (below, v) = ((features[labels == c, 0], weights[labels == c]) for c in (1, 0))
    in_order = (above[:, None] > below) + 0.5 * (above[:, None] == below)
    return (in_order * w[:, None] * v).sum() / (w.sum() * v.sum())


@pytest.mark.parametrize(
    ("replicas", "weighted", "form", "options"),
    [
        (1, True, tuple, {"parallel_micro_batches": 2, "eval_batch_size": 7}),
        (2, True, tuple, {}),  # a last batch of 1: both replicas have it, and one counts
        (3, False, tuple, {"parallel_micro_batches": 2}),
        (2, False, tf.data.Dataset.from_tensor_slices, {}),
    ],
)
def test_an_evaluation_is_exact(bench, replicas, weighted, form, options):
    data = scored(weighted=weighted)
    made = bench(Scored(), form(data), 4, replicas, learning_rate=0.0, eval_source=form(data), **options)
    expected = by_pairs(*data)
    for _ in range(2):
        found = made.strategy.evaluate().means()
        assert found["auc"] == pytest.approx(expected, abs=1e-12)
        assert found.keys() == {"loss", "auc", "by_weight"}
    assert 0.5 < expected < 1


@pytest.mark.parametrize(
    ("replicas", "options"),
    [(1, {"jit": True, "accumulate_steps": 2}), (2, {"accumulate_steps": 2, "precision": "float16"})],
)
def test_training_states_a_bound_and_keeps_it(bench, replicas, options):
    data = scored()
    made = bench(Scored(), data, 4, replicas, learning_rate=0.0, **options)
    sums = Sums()
    while made.state.step < 12:  # an epoch
        sums.add(made.run(5).sums)
    found = sums.means()
    assert abs(found["auc"] - by_pairs(*data)) <= found["auc_error_bound"] <= 0.5


def test_wrong_labels_of_a_step_are_named(bench):
    features, labels = scored()
    made = bench(Scored(), (features, labels + 1), 4)
    with pytest.raises(numerics.LabelError, match=r"^step 1: auc: \d labels are .* not 0 or 1"):
        numerics.check_labels(made.run(1).sums.read(), "step 1")


def test_equal_logits_take_one_entry_however_many_batches_have_them():
    scores = np.array([[0.5, 1, 1], [0.5, 0, 1], [-1, 0, 2]], np.float64)
    both = Ranking(scores) + Ranking(scores)
    assert len(both.to_bytes()) == len(Ranking(scores).to_bytes()) == 16 + 2 * 24
    assert Ranking.from_bytes(both.to_bytes()).area() == Ranking(scores).area() == (5 / 6, 0)
