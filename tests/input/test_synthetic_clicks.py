"""Synthetic clicks: a pure function of the seed, ids with a power law, learnable to the planted model's AUC."""

import numpy as np
import pytest

from crankshaft.input import synthetic_clicks
from crankshaft.input.checks import InputError
from crankshaft.input.synthetic_data.planted import auc, power_law_ids
from crankshaft.input.synthetic_data.randomness import mix


def load(seed=0, *, fields=3, rows=50, examples=2000, eval_examples=100, **arguments):
    return synthetic_clicks.load(
        None, seed, fields=fields, rows=rows, examples=examples, eval_examples=eval_examples, **arguments
    )


def arrays(splits):
    return [splits.train[0]["categories"], splits.train[1], splits.evaluation[0]["categories"], splits.evaluation[1]]


def test_same_seed_same_bits_another_seed_others():
    for mine, same, other in zip(*(arrays(load(seed)) for seed in (7, 7, -1)), strict=True):
        np.testing.assert_array_equal(mine, same)
        assert (mine != other).any()


@pytest.mark.parametrize("count", [1, 777, 1999])
def test_example_does_not_depend_on_how_many_are_asked_for(count):
    prefix = arrays(load(3, examples=count, eval_examples=1))
    for mine, theirs in zip(prefix, arrays(load(3)), strict=True):
        np.testing.assert_array_equal(mine, theirs[: len(mine)])
    assert [len(array) for array in prefix] == [count, count, 1, 1]


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
    splits = load(rows=10**12, examples=1000, exponent=0.0)
    assert splits.train[0]["categories"].max() > 10**11
    assert splits.vocabulary == {"categories": 10**12}


def logistic_regression(splits):
    """Scores of the evaluation split by one weight for each id, learnt by AdaGrad in two epochs."""
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
    splits = load(examples=100_000, **shape)
    planted = synthetic_clicks.planted_auc(0, **shape)
    learnt = auc(splits.evaluation[1], logistic_regression(splits))
    # The AUC of 50,000 examples has a standard error of 0.002, but both are of the same examples.
    assert planted - 0.01 < learnt < planted + 0.002
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fields": 0}, "fields=0 is too small; use at least 1"),
        ({"rows": 1}, "rows=1 is too small; use at least 2"),
        ({"examples": 0}, "^examples=0 is too small; use at least 1"),
        ({"eval_examples": 0}, "eval_examples=0 is too small; use at least 1"),
        ({"exponent": -1.0}, "exponent=-1 is not a falling power law"),
        ({"exponent": float("nan")}, "exponent=nan is not a falling power law"),
        ({"signal": -1.0}, "signal=-1 is not a standard deviation"),
        ({"noise": 1.5}, "noise=1.5 is not a share of the labels; use 0 to 1"),
        ({"examples": 10**17}, "100000000000000000 examples of 3 fields need .* GB"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        load(**arguments)


def test_folder_is_refused_as_clicks_read_none():
    with pytest.raises(InputError, match="data_dir=/data is not read by input=synthetic_clicks"):
        synthetic_clicks.load("/data", 0)
