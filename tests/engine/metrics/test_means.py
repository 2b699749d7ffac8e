"""(total, count) pairs: exact on uneven and empty batches, merged on the host in float64."""

import json
import math

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import mean
from crankshaft.engine.metrics import ranking
from crankshaft.engine.metrics.means import as_losses, auc, root_mean_square
from crankshaft.engine.metrics.pairs import ExpMean, Mean, Outside, RootMean
from crankshaft.engine.metrics.sums import LoopSums, Sums, SumSpec, stack, sum_specs


def test_mean_of_values_and_of_an_empty_batch():
    pair = mean(tf.constant([1.0, 2.0, 6.0]))
    assert (pair.total.numpy(), pair.count.numpy()) == (9.0, 3.0)
    assert [x.numpy() for x in mean(tf.zeros([0]))] == [0.0, 0.0]
    assert [x.numpy() for x in mean(tf.constant([True, False, True]))] == [2.0, 3.0]


def test_one_number_for_a_batch_is_warned_of(monkeypatch):
    """Keras's loss objects give the batch's mean, which would weigh as much for 7 examples as for 64."""
    warned = []
    monkeypatch.setattr("crankshaft.engine.logging.warning_once", warned.append)
    mean(tf.constant([2.0]))
    mean(tf.constant(2.0), tf.constant(7.0))
    assert not warned
    assert mean(tf.constant(2.0)).count.numpy() == 1
    assert "reduction=None" in warned[0]


def test_weights_broadcast_and_padding_may_hold_anything():
    values = tf.constant([[1.0, 2.0], [np.nan, np.inf]])
    pair = mean(values, tf.constant([[2.0], [0.0]]))
    assert (pair.total.numpy(), pair.count.numpy()) == (6.0, 4.0)


def test_sixteen_bit_values_are_summed_in_float32():
    """4,097 ones: bfloat16 could not count past 256."""
    assert mean(tf.ones([4097], tf.bfloat16)).total.numpy() == 4097.0


def loop_sums(**pairs):
    metrics = {name: mean(tf.constant(values, tf.float32)) for name, values in pairs.items()}
    return LoopSums(sum_specs(metrics), stack(metrics, tf.float64))


def test_uneven_batches_weigh_by_their_examples():
    sums = Sums()
    sums.add(loop_sums(loss=[1.0, 1.0, 1.0], accuracy=[0.0, 1.0, 1.0]))
    sums.add(loop_sums(loss=[5.0], accuracy=[0.0]))
    assert sums.means() == {"loss": 2.0, "accuracy": 0.5}
    assert sums.values()["loss"][1] == 4


def test_the_mean_of_nothing_is_nan_and_a_norm_that_no_step_measured_is_left_out():
    sums = Sums()
    sums.add(loop_sums(loss=[1.0], share=[], gradient_norm=[]))
    np.testing.assert_equal(sums.means(), {"loss": 1.0, "share": np.nan})


def test_a_long_window_is_summed_exactly():
    sums = Sums()
    for _ in range(3 * Sums.COLLAPSE_AT + 1):
        sums.add(loop_sums(loss=[0.1, 0.7]))
    each = np.float64(np.float32(0.1) + np.float32(0.7))
    assert sums.values()["loss"] == (each * (3 * Sums.COLLAPSE_AT + 1), 2.0 * (3 * Sums.COLLAPSE_AT + 1))


def test_sums_do_not_depend_on_which_calls_are_merged_first():
    """Losses from 1 to 1e-12: their sums in float64 alone are not exact, and differ. An infinite one stays infinite."""
    rng = np.random.default_rng(0)
    calls = [loop_sums(loss=[value], wide=[1.0]) for value in 10 ** rng.uniform(-12, 0, 2000)]
    values = set()
    for length in (1, 7, 500):
        whole = Sums()
        for start in range(0, len(calls), length):
            part = Sums()
            for call in calls[start : start + length]:
                part.add(call)
            whole = Sums(json.loads(json.dumps(whole.host_state())))  # a run that was resumed
            whole.extend(part)
        values.add(whole.values()["loss"])
    assert values == {(math.fsum(call.read()["loss"].total for call in calls), 2000.0)}
    whole.add(loop_sums(loss=[np.inf]))
    whole.add(loop_sums(loss=[1.0]))
    assert whole.values()["loss"] == (np.inf, 2002.0)


def test_what_was_read_outlives_the_window():
    sums = Sums({"loss": ("mean", 3.0, 2.0)})
    sums.add(loop_sums(loss=[1.0]))
    values = sums.values()
    sums.add(loop_sums(loss=[2.0]))
    assert values == {"loss": (4.0, 3.0)}
    assert sums.values() == {"loss": (6.0, 4.0)}


def test_adding_never_reads_the_newest_sums():
    """They may be what a device is at work on; older ones are read now and then, so that a window stays small."""
    window, added = Sums(), []
    for _ in range(3 * Sums.COLLAPSE_AT):
        added.append(loop_sums(loss=[1.0]))
        window.add(added[-1])
        assert not any(sums.is_read for sums in added[-Sums.IN_FLIGHT :])
    assert sum(not sums.is_read for sums in added) < Sums.COLLAPSE_AT


def true_auc(scores, labels):
    """The share of (positive, negative) pairs in the right order, ties counting half."""
    positives, negatives = scores[labels == 1], np.sort(scores[labels == 0])
    below = sum(np.searchsorted(negatives, positives, side) for side in ("left", "right"))
    return np.mean(below) / 2 / len(negatives)


def values_of(metrics, keeps_scores=True):
    return LoopSums(sum_specs(metrics, keeps_scores), stack(metrics, tf.float64, keeps_scores)).read()


def auc_sums(*parts):
    sums = Sums()
    for logits, labels in parts:
        metrics = {"auc": auc(tf.constant(labels, tf.float32), tf.constant(logits, tf.float32)), "loss": mean([1.0])}
        sums.add(LoopSums(sum_specs(metrics), stack(metrics, tf.float64)))
    return sums


def drawn_at_odds(rng, logits, shift=0.0):
    return (rng.random(len(logits)) < 1 / (1 + np.exp(shift - logits))).astype(np.float32)


def scores_of(case, rng, examples=400_000):
    """(logits, labels)."""
    normal = rng.normal(size=examples)
    rare, sure = -6 + 0.6 * normal, 9.3 + rng.gamma(2, 1.5, examples)
    coin = (rng.random(examples) < 0.3).astype(np.float32)
    return {
        "rare positives": lambda: (rare, drawn_at_odds(rng, rare)),
        "probabilities over 0.9999": lambda: (sure, drawn_at_odds(rng, sure, shift=12.0)),
        "probabilities under 0.0001": lambda: (-sure, 1 - drawn_at_odds(rng, sure, shift=12.0)),
        "hardly trained": lambda: (0.02 * (normal + coin), coin),
        "far too sure": lambda: (40 * (normal + coin), coin),
        "tied": lambda: (np.round(normal + coin, 1), coin),
    }[case]()


@pytest.mark.parametrize(
    "case",
    [
        *("rare positives", "probabilities over 0.9999", "probabilities under 0.0001"),
        *("hardly trained", "far too sure", "tied"),
    ],
)
def test_auc_is_that_of_ranks_wherever_the_scores_are(case):
    logits, labels = scores_of(case, np.random.default_rng(0))
    logits = logits.astype(np.float32)
    assert abs(auc_sums((logits, labels)).means()["auc"] - true_auc(logits, labels)) < 1e-4


def test_auc_error_of_a_histogram_is_within_the_bound_it_states():
    """All in one bucket: every pair counts half, and the bound is half of all pairs."""
    close = 3 + np.array([0.0, 1e-4, 2e-4, 3e-4])
    assert auc_sums((close, np.array([0, 0, 1, 1]))).means() == {"auc": 0.5, "auc_error_bound": 0.5, "loss": 1.0}
    logits, labels = scores_of("hardly trained", np.random.default_rng(0))
    found = auc_sums((logits.astype(np.float32), labels)).means()
    assert 0 < abs(found["auc"] - true_auc(logits.astype(np.float32), labels)) < found["auc_error_bound"] < 0.03


CASES = {
    "near 5": lambda normal: 5 + 0.01 * normal,
    "tiny": lambda normal: 1e-4 * normal,
    "far": lambda normal: 3000 + normal,
    "tied": lambda normal: np.round(normal, 1),
    "negative zero": lambda normal: np.copysign(np.round(normal) * 0, normal),
}


@pytest.mark.parametrize("case", CASES)
def test_auc_of_kept_scores_is_exact(case):
    """Whatever batches they come in, and though another metric's scores travel with them."""
    rng = np.random.default_rng(3)
    normal, labels = rng.normal(size=2000), (rng.random(2000) < 0.3).astype(np.float32)
    logits, sums = CASES[case](normal + labels).astype(np.float32), Sums()
    for batch in (slice(0, 700), slice(700, 700), slice(700, 2000)):
        metrics = {
            "auc": auc(labels[batch], logits[batch]),
            "loss": mean(tf.constant(labels[batch])),
            "other": auc(labels[batch], -logits[batch]),
        }
        sums.add(LoopSums(sum_specs(metrics, True), stack(metrics, tf.float64, True)))
    expected = true_auc(logits, labels)
    found = sums.means()
    assert found == {
        "auc": pytest.approx(expected, abs=1e-12),
        "loss": pytest.approx(labels.mean()),
        "other": pytest.approx(1 - expected, abs=1e-12),
    }


def test_auc_of_weighed_scores_counts_each_pair_by_both_weights():
    rng = np.random.default_rng(4)
    labels, weights = rng.integers(0, 2, 800), rng.random(800).astype(np.float32)
    logits = np.round(rng.normal(labels, 1), 1).astype(np.float32)
    found = values_of({"auc": auc(labels, logits, weights)})["auc"]
    (above, w), (below, v) = ((logits[labels == c], weights[labels == c].astype(np.float64)) for c in (1, 0))
    in_order = (above[:, None] > below) + 0.5 * (above[:, None] == below)
    assert found.value() == pytest.approx((in_order * w[:, None] * v).sum() / (w.sum() * v.sum()), abs=1e-12)
    assert found.error_bound() == 0
    by_histogram = values_of({"auc": auc(labels, logits, weights)}, keeps_scores=False)["auc"]
    assert abs(by_histogram.value() - found.value()) <= by_histogram.error_bound() < 0.03


def test_auc_of_more_scores_than_are_kept_is_within_the_bound_it_states(monkeypatch):
    monkeypatch.setattr(ranking, "_KEPT", 2000)
    monkeypatch.setattr(ranking, "_JOINED", 100)
    rng = np.random.default_rng(5)
    labels = rng.integers(0, 2, 20_000).astype(np.float32)
    logits = (5 + 0.01 * rng.normal(labels)).astype(np.float32)
    workers, parts = [Sums(), Sums()], np.array_split(np.arange(20_000), 40)
    for number, part in enumerate(parts):
        metrics = {"auc": auc(labels[part], logits[part])}
        workers[number % 2].add(LoopSums(sum_specs(metrics, True), stack(metrics, tf.float64, True)))
    everyones = [worker.values()["auc"].total.to_bytes() for worker in workers]
    workers[0].exchange_scores(lambda own: everyones)
    found = workers[0].means()
    assert abs(found["auc"] - true_auc(logits, labels)) < found["auc_error_bound"] < 0.03


@pytest.mark.parametrize("keeps_scores", [False, True])
def test_labels_that_are_not_0_or_1_are_a_mistake_that_auc_names(keeps_scores):
    def found(labels, logits, weights=None):
        return values_of({"auc": auc(labels, logits, weights)}, keeps_scores)["auc"]

    swapped = found([0.3, -1.5, 2.2], [1, 0, 1])
    assert swapped.mistake().startswith("3 labels are 0.333333 on average, not 0 or 1;")
    assert "auc(labels, logits)" in swapped.mistake()
    assert np.isnan(swapped.value())
    assert found([0, 1, 4], [1.0, 2.0, 3.0]).mistake().startswith("a label is 4, not 0 or 1;")
    ignored = found([0, 1, -1], [1.0, 2.0, 3.0], [1.0, 1.0, 0.0])
    assert (ignored.mistake(), ignored.value()) == (None, 1.0)


def test_auc_of_one_class_is_nan_and_perfect_order_is_one():
    assert np.isnan(auc_sums(([1.0, 2.0], [1, 1])).means()["auc"])
    assert np.isnan(auc_sums(([], [])).means()["auc"])
    assert auc_sums(([-50.0, 50.0], [0, 1])).means()["auc"] == 1.0
    assert auc_sums(([-50.0, 50.0, np.nan], [1, 0, 1])).means()["auc"] == 0.0


def test_root_mean_square_is_the_root_of_the_mean_over_all_batches():
    sums = Sums()
    for values in ([3.0, 4.0], [5.0], []):
        metrics = {"rmse": root_mean_square(tf.constant(values))}
        sums.add(LoopSums(sum_specs(metrics), stack(metrics, tf.float64)))
    assert sums.means()["rmse"] == pytest.approx(np.sqrt(50 / 3))


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [([1.0, 3.0], [5.0], 7.0), ([1.0, 3.0], [], 2.0), ([], [5.0], 5.0), ([], [], np.nan)],
)
def test_a_sum_of_means_is_of_those_of_something(first, second, expected):
    losses = as_losses({"a": mean(tf.constant(first)), "b": mean(tf.constant(second))}, "Trainer.loss")
    parts = {"loss": expected, "a": np.mean(first) if first else np.nan, "b": np.mean(second) if second else np.nan}
    sums = Sums()
    for _ in range(2):
        sums.add(LoopSums(sum_specs(losses), stack(losses, tf.float64)))
    np.testing.assert_equal(sums.means(), parts)
    more = {"loss": losses["loss"].plus(tf.constant(8.0), tf.constant(2.0))}
    assert values_of(more)["loss"].value() == np.nansum([expected, 4.0])
    assert float(more["loss"].count) == len(first) + len(second)


def test_what_is_added_to_a_mean_is_over_its_own_count_unless_that_is_the_means():
    pair = mean(tf.constant([1.0, 3.0]))
    assert values_of({"loss": pair.plus(tf.constant(6.0), pair.count)}) == {"loss": Mean(10.0, 2.0)}
    both = values_of({"loss": pair.plus(tf.constant(6.0), tf.constant(3.0))})["loss"]
    assert (both.value(), *map(list, both)) == (4.0, [4.0, 6.0], [2.0, 3.0])


def test_the_perplexity_of_large_losses_is_finite_and_of_nothing_none():
    assert ExpMean(3.0, 2.0).value() == pytest.approx(math.exp(1.5), rel=1e-15)
    assert ExpMean(1e6, 1.0).value() == pytest.approx(math.exp(709), rel=1e-15)
    assert [kind(0.0, 0.0).value() for kind in (ExpMean, RootMean, Mean)] == [None] * 3


@pytest.mark.parametrize(
    ("totals", "batches", "line"),
    [
        ((0.0, 0.0), (0, 0), None),
        ((7.2, 0.0), (1, 0), "a number is 8"),
        ((0.0, -6.0), (0, 2), "the least number is at most -3"),
        ((15.0, -5.0), (2, 1), "the largest number is at least 8 and a number is -5"),
    ],
)
def test_numbers_out_of_a_range_are_told_by_the_mean_of_the_batches_farthest(totals, batches, line):
    cure = line and f"{line}, out of that range; correct the data, or allow for more"
    assert Outside(np.array(totals), np.array(batches)).mistake() == cure


def test_a_window_of_every_kind_survives_json():
    window = auc_sums(([-1.0, 0.0, 1.0], [0, 1, 1]))
    metrics = {"rmse": root_mean_square(tf.constant([3.0]))}
    window.add(LoopSums(sum_specs(metrics), stack(metrics, tf.float64)))
    again = Sums(json.loads(json.dumps(window.host_state())))
    assert again.means() == window.means() == {"auc": 1.0, "loss": 1.0, "rmse": 3.0}
    again.add(LoopSums(sum_specs(metrics), stack(metrics, tf.float64)))
    assert again.values()["rmse"] == (18.0, 2.0)


def test_a_mean_may_be_called_as_a_kind_is_and_keeps_its_name_in_json():
    found = {"auc": (3.0, 2.0), "root_mean": (7.0, 2.0), "auc:error": (1.0, 1.0)}
    sums = loop_sums(**{"auc": (1.0, 2.0), "root_mean": (3.0, 4.0), "auc:error": (1.0,)})
    assert sums.read() == found
    window = Sums()
    window.add(sums)
    assert Sums(json.loads(json.dumps(window.host_state()))).values() == found


def test_a_keras_metric_has_the_value_that_a_checkpoint_has_until_a_step_adds_to_it():
    state = json.loads(json.dumps({"curve": ["own", [1.0, 2.0], [3.0, 3.0], {"value": 0.25}]}))
    sums = Sums(state)
    assert sums.means() == {"curve": 0.25}
    assert sums.host_state() == state
    assert Sums({"curve": ["keras", *state["curve"][1:-1]]}).means() == {}  # the metric is no longer known


def test_rows_of_means_are_described_in_the_order_of_their_names():
    metrics = {"loss": mean([1.0]), "top:5": mean([0.0]), "accuracy": mean([1.0])}
    assert sum_specs(metrics) == [SumSpec(name, Mean) for name in ("accuracy", "loss", "top:5")]
    assert LoopSums(sum_specs(metrics), stack(metrics, tf.float64)).read()["top:5"] == (0.0, 1.0)
