"""Synthetic examples: a pure function of seed and index, and learnable."""

import numpy as np
import pytest

from crankshaft.input import synthetic
from crankshaft.input.checks import InputError


def load(seed=0, *, shape=(4, 3), classes=5, examples=2500, eval_examples=40):
    return synthetic.load(None, seed, shape=shape, classes=classes, examples=examples, eval_examples=eval_examples)


def test_same_seed_same_bits():
    one, two = load(7), load(7)
    for mine, theirs in [(one.train, two.train), (one.evaluation, two.evaluation)]:
        np.testing.assert_array_equal(mine[0], theirs[0])
        np.testing.assert_array_equal(mine[1], theirs[1])


@pytest.mark.parametrize("other_seed", [1, -1, 2**32, 2**63])
def test_another_seed_gives_other_examples(other_seed):
    (mine, labels), (theirs, other_labels) = load(0).train, load(other_seed).train
    assert not np.any(np.all(mine == theirs, axis=(1, 2)))
    # Independent labels of five classes agree on a fifth; 5 standard deviations of 2500 samples.
    assert abs((labels == other_labels).mean() - 0.2) < 0.04


# 1024 is the chunk: just below, on and just above one and two of them, and far from all.
@pytest.mark.parametrize("count", [1, 2, 777, 1023, 1024, 1025, 2048, 2049])
def test_example_does_not_depend_on_how_many_are_asked_for(count):
    whole, prefix = load(3), load(3, examples=count, eval_examples=1)
    assert prefix.train[0].shape == (count, 4, 3)
    assert prefix.evaluation[0].shape == (1, 4, 3)
    for split in ("train", "evaluation"):
        features, labels = getattr(prefix, split)
        whole_features, whole_labels = getattr(whole, split)
        np.testing.assert_array_equal(features, whole_features[: len(features)])
        np.testing.assert_array_equal(labels, whole_labels[: len(labels)])


def test_no_example_comes_twice():
    splits = load(eval_examples=2500)
    rows = np.concatenate([splits.train[0], splits.evaluation[0]]).reshape(5000, -1)
    assert len(np.unique(rows, axis=0)) == 5000


def test_defaults_are_mnist_shaped():
    splits = synthetic.load(None, 0)
    assert splits.num_classes == 10
    for (features, labels), count in [(splits.train, 60000), (splits.evaluation, 10000)]:
        assert features.shape == (count, 28, 28, 1)
        assert features.dtype == np.float32
        assert labels.shape == (count,)
        assert labels.dtype == np.int32
        # Even samples: each class within 6 standard deviations of a tenth.
        deviation = np.sqrt(count * 0.1 * 0.9)
        assert np.all(np.abs(np.bincount(labels, minlength=10) - count / 10) < 6 * deviation)
        # Noise of variance 1, and prototypes of variance 50/784 on top.
        assert abs(features.std() - np.sqrt(1 + 50 / 784)) < 0.01


def test_larger_images_are_fewer_unless_asked_for():
    """600 kB each: 60,000 of them would take 36 GB."""
    few = synthetic.load(None, 0, shape=(224, 224, 3), classes=2)
    assert 1000 < len(few.train[0]) < 1500
    assert 200 < len(few.evaluation[0]) < 250
    more = synthetic.load(None, 0, shape=(224, 224, 3), classes=2, examples=10, eval_examples=30)
    assert [len(split[1]) for split in (more.train, more.evaluation)] == [10, 30]
    np.testing.assert_array_equal(more.train[0], few.train[0][:10])


@pytest.mark.parametrize("shape", [(784,), (28, 28, 1)])
def test_labels_can_be_learned_and_carry_over_to_evaluation(shape):
    splits = load(1, shape=shape, classes=10, examples=2000, eval_examples=500)
    train, evaluation = (s[0].reshape(len(s[0]), -1) for s in (splits.train, splits.evaluation))
    means = np.stack([train[splits.train[1] == c].mean(0) for c in range(10)])
    distances = (means**2).sum(1) - 2 * evaluation @ means.T
    # Half the distance of two prototypes is 5 standard deviations; estimated means cost some.
    assert (distances.argmin(1) == splits.evaluation[1]).mean() > 0.98


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"examples": -3}, "examples=-3 is too small; use at least 1"),
        ({"eval_examples": -1}, "eval_examples=-1 is too small; use at least 1"),
        ({"classes": 1}, "classes=1 is too small; use at least 2"),
        ({"shape": ()}, "shape=: every axis needs at least 1"),
        ({"shape": (28, 0, 1)}, "shape=28,0,1: every axis needs at least 1"),
        ({"examples": 10**17}, "examples=100000000000000000 of this shape need .* GB"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        load(**arguments)


def test_folder_is_refused_as_synthetic_reads_none():
    with pytest.raises(InputError, match="data_dir=/data is not read by input=synthetic"):
        synthetic.load("/data", 0)
