"""The bundled digits: a fixed split, whole, disjoint, and readable when scaled."""

import gzip
import os

import numpy as np
import pytest

import crankshaft.input
from crankshaft.input import digits
from crankshaft.input.checks import InputError
from tests.arrays import assert_same

pytestmark = pytest.mark.thorough

PATH = os.path.join(os.path.dirname(crankshaft.input.__file__), "data", "digits.csv.gz")


@pytest.fixture(scope="module")
def splits():
    return digits.load(None, 0)


def test_a_fixed_split_is_whole_disjoint_and_of_every_class_four_to_one(splits):
    assert splits.num_classes == 10
    other = digits.load(None, 12345)  # the same for every seed
    for split, theirs, count in [(splits.train, other.train, 1437), (splits.evaluation, other.evaluation, 360)]:
        (features, labels), kinds = split, (np.float32, np.int32)
        assert (features.shape, labels.shape) == ((count, 28, 28, 1), (count,))
        assert (features.dtype, labels.dtype) == kinds
        assert (features.min(), features.max(), labels.min(), labels.max()) == (0, 1, 0, 9)
        assert_same(split, theirs)
    train, evaluation = np.bincount(splits.train[1]), np.bincount(splits.evaluation[1])
    # Every fifth of a row of n holds n/5, rounded one way or the other.
    assert np.all(np.abs(evaluation - (train + evaluation) / 5) < 1)
    # No two of the file's scans are equal, so equal images would be one scan in both splits.
    images = np.concatenate([splits.train[0], splits.evaluation[0]])
    assert len({image.tobytes() for image in images}) == 1797


def test_scaling_is_bilinear_with_a_blank_margin(splits):
    images = np.concatenate([splits.train[0], splits.evaluation[0]])[..., 0]
    inner = images[:, 2:26, 2:26]
    # Inked pixels stand in the inner 24x24 only. Of three scaled pixels the middle one lies on a
    # scan's pixel, a number of sixteenths: exact in float32.
    assert images.sum(dtype=np.float64) == inner.sum(dtype=np.float64)
    centres = inner[:, 1::3, 1::3] * 16
    np.testing.assert_array_equal(centres, np.round(centres))
    # One third of the way to the next pixel, of float32 values near 1.
    between = (2 * inner[:, 1::3, 1:-3:3] + inner[:, 1::3, 4::3]) / 3
    np.testing.assert_allclose(inner[:, 1::3, 2:-2:3], between, atol=2e-7)


def test_images_tell_their_classes(splits):
    # The nearest training image has the same label for nearly all: labels belong to their images.
    train, evaluation = (s[0].reshape(len(s[0]), -1) for s in (splits.train, splits.evaluation))
    distances = (train**2).sum(1) - 2 * evaluation @ train.T
    nearest = splits.train[1][distances.argmin(1)]
    assert (nearest == splits.evaluation[1]).mean() > 0.97


def test_folder_is_refused_as_digits_read_none(tmp_path):
    with pytest.raises(InputError, match=f"data_dir={tmp_path} is not read by input=digits"):
        digits.load(str(tmp_path), 0)


def test_damaged_file_is_refused_in_one_line():
    with open(PATH, "rb") as file:
        whole = file.read()
    rows = gzip.decompress(whole).splitlines(keepends=True)
    damaged = [
        whole[:1000],
        b"version https://git-lfs.github.com/spec/v1\n",
        gzip.compress(b"".join(rows[:-1]), mtime=0),
        gzip.compress(b"1,2,x\n", mtime=0),
    ]
    for content in damaged:
        with pytest.raises(InputError) as caught:
            digits.read_scans(content)
        assert "data/digits.csv.gz: expected " in str(caught.value)
        assert "\n" not in str(caught.value)
