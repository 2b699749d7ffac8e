"""What tells a split from another: the number of examples, and a digest that any change of size changes."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.launch.run.saved import fingerprints
from tests.bench import split_of


def of(split, ids=None) -> dict[str, int]:
    split = split_of(split)
    return fingerprints.fingerprint(split, len(split) if split.by_index else split.length, ids)


def arrays(examples=3000):
    rng = np.random.default_rng(0)
    return {"ids": rng.integers(0, 9, (examples, 2)), "dense": rng.random((examples, 3))}, np.arange(examples)


def test_the_same_data_in_another_form_is_the_same():
    features, labels = arrays()
    turned = {"dense": np.asfortranarray(features["dense"]), "ids": features["ids"][::-1].copy()[::-1]}
    assert of((features, labels)) == of((turned, labels.copy()))
    assert of((features, labels))["examples"] == 3000


@pytest.mark.parametrize(
    "change",
    [
        lambda f, y: ({"ids": f["ids"], "thick": f["dense"]}, y),
        lambda f, y: ({"ids": f["ids"], "dense": f["dense"].astype("float32")}, y),
        lambda f, y: ({"ids": f["ids"], "dense": f["dense"][:, :2]}, y),
        lambda f, y: (f, y[::-1]),
        lambda f, y: ({"ids": f["ids"], "dense": f["dense"] * 2}, y),
        lambda f, y: (f, np.append(y[:-1], 7)),
        lambda f, y: (f, np.append(7, y[1:])),
    ],
    ids=["name", "type", "shape", "order", "scale", "last", "first"],
)
def test_other_data_of_as_many_examples_has_another_digest(change):
    before, after = of(arrays()), of(change(*arrays()))
    assert before["examples"] == after["examples"]
    assert before["digest"] != after["digest"]


def test_strings_are_digested_by_what_they_say():
    words = ["".join(["a", str(i)]) for i in range(5)]
    labels = np.zeros(5)
    assert of((np.array(words, object), labels)) == of((np.array([w + "" for w in words], object), labels))
    assert of((np.array(words, object), labels)) != of((np.array(words[::-1], object), labels))


def test_one_example_has_one_row():
    assert of((np.zeros((1, 2)), np.zeros(1)))["digest"] != of((np.ones((1, 2)), np.zeros(1)))["digest"]


def test_datasets_differ_by_their_elements_and_not_by_what_is_in_them():
    zeros, ones = (tf.data.Dataset.from_tensor_slices((make((6, 2)), make(6))) for make in (tf.zeros, tf.ones))
    assert of(zeros) == of(ones)
    assert of(zeros)["digest"] != of(zeros.map(lambda x, y: (tf.cast(x, tf.float16), y)))["digest"]


def test_ids_are_told_apart_where_they_are_said():
    split = arrays()
    assert "ids" not in of(split)
    assert of(split, "a b")["ids"] == of(split, "a b")["ids"] != of(split, "b a")["ids"]
