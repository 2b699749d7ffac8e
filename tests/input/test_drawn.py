"""Sampled inputs: pure functions of the seed and the position, with a signal that a model finds, and no more."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.input import criteo, synthetic, synthetic_clicks
from crankshaft.input.checks import InputError
from crankshaft.input.synthetic_data.philox import mix
from crankshaft.input.synthetic_data.planted import auc, power_law_ids
from tests.arrays import assert_same


def images(seed=0, *, shape=(4, 3), classes=5, examples=2500, eval_examples=40):
    return synthetic.load(None, seed, shape=shape, classes=classes, examples=examples, eval_examples=eval_examples)


def clicks(seed=0, *, fields=3, rows=50, examples=2500, eval_examples=40, **arguments):
    arguments |= {"fields": fields, "rows": rows, "examples": examples, "eval_examples": eval_examples}
    return synthetic_clicks.load(None, seed, **arguments)


def logs(seed=0, *, examples=2500, eval_examples=0):
    return criteo.load(None, seed, examples=examples)


DRAWN = {"synthetic": images, "synthetic_clicks": clicks, "criteo": logs}


def arrays(data) -> list[np.ndarray]:
    """Of both splits; those of `criteo`, which divides its examples, joined."""
    train, evaluation = tf.nest.flatten(data.train), tf.nest.flatten(data.evaluation)
    return (
        [np.concatenate(pair) for pair in zip(train, evaluation, strict=True)] if len(train) > 2 else train + evaluation
    )


@pytest.mark.parametrize("name", DRAWN)
def test_the_same_seed_samples_the_same_bits_and_another_other_examples(name):
    mine = arrays(DRAWN[name](7))
    assert_same(mine, arrays(DRAWN[name](7)))
    for seed in (1, -1, 2**32, 2**63):
        for one, other in zip(mine, arrays(DRAWN[name](seed)), strict=True):
            assert (one != other).any()


# 1024 is the chunk: just below, on and just above one and two of them, and far from all.
@pytest.mark.parametrize("count", [2, 777, 1023, 1024, 1025, 2048, 2049])
@pytest.mark.parametrize("name", DRAWN)
def test_an_example_does_not_depend_on_how_many_are_asked_for(name, count):
    whole, prefix = arrays(DRAWN[name](3)), arrays(DRAWN[name](3, examples=count, eval_examples=1))
    assert {len(array) for array in prefix} == {count} | ({1} if len(prefix) > 3 else set())
    assert_same(prefix, [array[: len(mine)] for array, mine in zip(whole, prefix, strict=True)])


def test_no_image_comes_twice_and_labels_of_seeds_are_independent():
    data, other = images(eval_examples=2500), images(1)
    rows = np.concatenate([data.train[0], data.evaluation[0]]).reshape(5000, -1)
    assert len(np.unique(rows, axis=0)) == 5000
    # Independent labels of five classes agree on a fifth; 5 standard deviations of 2500 samples.
    assert abs((data.train[1] == other.train[1]).mean() - 0.2) < 0.04


def test_images_are_mnist_shaped_by_default():
    data = synthetic.load(None, 0)
    assert data.num_classes == 10
    for (features, labels), count in [(data.train, 60000), (data.evaluation, 10000)]:
        assert (features.shape, features.dtype) == ((count, 28, 28, 1), np.float32)
        assert (labels.shape, labels.dtype) == ((count,), np.int32)
        # Even samples: each class within 6 standard deviations of a tenth.
        deviation = np.sqrt(count * 0.1 * 0.9)
        assert np.all(np.abs(np.bincount(labels, minlength=10) - count / 10) < 6 * deviation)
        # Noise of variance 1, and prototypes of variance 50/784 on top.
        assert abs(features[:5000].std() - np.sqrt(1 + 50 / 784)) < 0.01


def test_larger_images_are_fewer_unless_asked_for(monkeypatch):
    """600 kB each: 60,000 of them would take 36 GB; of an eighth of the bytes there are an eighth."""
    for name in ("_BYTES", "_EVAL_BYTES"):
        monkeypatch.setattr(synthetic, name, getattr(synthetic, name) // 8)
    few = synthetic.load(None, 0, shape=(224, 224, 3), classes=2)
    assert 125 < len(few.train[0]) < 188
    assert 25 < len(few.evaluation[0]) < 32
    more = synthetic.load(None, 0, shape=(224, 224, 3), classes=2, examples=10, eval_examples=40)
    assert [len(split[1]) for split in (more.train, more.evaluation)] == [10, 40]
    np.testing.assert_array_equal(more.train[0], few.train[0][:10])


@pytest.mark.parametrize("shape", [(784,), (28, 28, 1)])
def test_labels_of_images_can_be_learned_and_carry_over_to_evaluation(shape):
    data = images(1, shape=shape, classes=10, examples=2000, eval_examples=500)
    train, evaluation = (s[0].reshape(len(s[0]), -1) for s in (data.train, data.evaluation))
    means = np.stack([train[data.train[1] == c].mean(0) for c in range(10)])
    distances = (means**2).sum(1) - 2 * evaluation @ means.T
    # Half the distance of two prototypes is 5 standard deviations; estimated means cost some.
    assert (distances.argmin(1) == data.evaluation[1]).mean() > 0.98


def test_defaults_have_the_documented_shapes_and_some_clicks():
    splits = synthetic_clicks.load(None, 0)
    ids, labels, eval_ids, eval_labels = arrays(splits)
    assert (ids.shape, ids.dtype, labels.dtype) == ((400_000, 8), np.int64, np.float32)
    assert (eval_ids.shape, eval_labels.shape) == ((50_000, 8), (50_000,))
    assert (ids.min(), ids.max()) == (1, 499)
    assert set(labels) == {0.0, 1.0}
    assert 0.1 < labels.mean() < 0.6
    assert splits.num_classes == 2
    assert splits.vocabulary == {"categories": 500}


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.1, 2.0])
def test_ids_follow_the_power_law(exponent):
    rows, count = 101, 100_000
    sampled = np.bincount(power_law_ids((np.arange(count) + 0.5) / count, rows, exponent), minlength=rows)
    assert sampled[0] == 0
    # The integral of x**-exponent from k to k + 1; even samples on a grid miss it by one at each end.
    grid = np.linspace(1, rows, 100 * (rows - 1) + 1)
    density = ((grid[1:] + grid[:-1]) / 2) ** -exponent
    expected = density.reshape(rows - 1, 100).sum(1) / density.sum() * count
    np.testing.assert_allclose(sampled[1:], expected, rtol=2e-4, atol=2.5)


@pytest.mark.parametrize("exponent", [0.0, 1.0, 1.1, 50.0])
@pytest.mark.parametrize("rows", [2, 3, 10**9])
def test_ids_stay_in_the_table_at_both_ends_of_the_sample(exponent, rows):
    ids = power_law_ids(np.array([0.0, 0.5, 1 - 2.0**-53]), rows, exponent)
    assert ids.min() >= 1
    assert ids.max() <= rows - 1


def test_a_table_of_any_size_needs_no_memory():
    splits = clicks(rows=10**12, examples=1000, exponent=0.0)
    assert splits.train[0]["categories"].max() > 10**11
    assert splits.vocabulary == {"categories": 10**12}


def logistic_regression(splits):
    """Scores of the evaluation split by one weight for each id, learned by AdaGrad in two epochs."""
    ids, labels, eval_ids, _ = arrays(splits)
    rows, fields = splits.vocabulary["categories"], ids.shape[1]
    columns = np.arange(fields) * rows
    weights, squares, bias = np.zeros(fields * rows), np.full(fields * rows, 1e-8), 0.0
    for rate in (0.2, 0.1):
        for start in range(0, len(ids), 250):
            batch = ids[start : start + 250] + columns
            errors = 1 / (1 + np.exp(-weights[batch].sum(1) - bias)) - labels[start : start + 250]
            gradient = np.bincount(batch.ravel(), np.repeat(errors, fields), minlength=len(weights))
            squares += gradient**2
            weights -= rate * gradient / np.sqrt(squares)
            bias -= rate * errors.mean()
    return weights[eval_ids + columns].sum(1) + bias


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_a_logistic_model_comes_within_a_hundredth_of_the_planted_auc_and_not_above(noise):
    shape = {"fields": 4, "rows": 100, "eval_examples": 50_000, "noise": noise}
    splits = clicks(examples=100_000, **shape)
    planted = synthetic_clicks.planted_auc(0, **shape)
    learned = auc(splits.evaluation[1], logistic_regression(splits))
    # The AUC of 50,000 examples has a standard error of 0.002, but both are of the same examples.
    assert planted - 0.01 < learned < planted + 0.002
    assert planted > 0.7


def test_without_signal_or_with_noise_alone_there_is_nothing_to_learn():
    assert synthetic_clicks.planted_auc(0, noise=1.0) == pytest.approx(0.5, abs=0.01)
    assert synthetic_clicks.planted_auc(0, signal=0.0) == 0.5  # all scores are equal


def test_auc_counts_pairs_and_halves_ties():
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 6, 200), rng.integers(0, 2, 200)
    clicked, others = scores[labels == 1][:, None], scores[labels == 0]
    assert auc(labels, scores) == pytest.approx(((clicked > others) + 0.5 * (clicked == others)).mean(), abs=1e-12)
    assert np.isnan(auc(np.ones(200), scores))


def test_the_hash_is_splitmix64():
    # The reference implementation's first two outputs from state 0; the second state is its increment.
    states = np.array([0, 0x9E3779B97F4A7C15], np.uint64)
    assert mix(states).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


MISTAKES = [
    (images, {"examples": -3}, "examples=-3 is too small; use at least 1"),
    (images, {"eval_examples": -1}, "eval_examples=-1 is too small; use at least 1"),
    (images, {"classes": 1}, "classes=1 is too small; use at least 2"),
    (images, {"shape": ()}, "shape=: every axis needs at least 1"),
    (images, {"shape": (28, 0, 1)}, "shape=28,0,1: every axis needs at least 1"),
    (images, {"examples": 10**17}, "examples=100000000000000000 of this shape need .* GB"),
    (clicks, {"fields": 0}, "fields=0 is too small; use at least 1"),
    (clicks, {"rows": 1}, "rows=1 is too small; use at least 2"),
    (clicks, {"examples": 0}, "^examples=0 is too small; use at least 1"),
    (clicks, {"eval_examples": 0}, "eval_examples=0 is too small; use at least 1"),
    (clicks, {"exponent": -1.0}, "exponent=-1 is not a falling power law"),
    (clicks, {"exponent": float("nan")}, "exponent=nan is not a falling power law"),
    (clicks, {"signal": -1.0}, "signal=-1 is not a standard deviation"),
    (clicks, {"noise": 1.5}, "noise=1.5 is not a share of the labels; use 0 to 1"),
    (clicks, {"examples": 10**17}, "100000000000000000 examples of 3 fields need .* GB"),
]


@pytest.mark.parametrize(("load", "arguments", "message"), MISTAKES)
def test_arguments_out_of_range_are_refused(load, arguments, message):
    with pytest.raises(InputError, match=message):
        load(**arguments)


@pytest.mark.parametrize("module", [synthetic, synthetic_clicks])
def test_a_folder_is_refused(module):
    with pytest.raises(InputError, match=f"data_dir=/data is not read by input={module.__name__.split('.')[-1]}"):
        module.load("/data", 0)
