"""Tokens that follow a row: the same with a cache and without, from one seed, on replicas, and served."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.generation import Generates, choose, generate, signatures
from crankshaft.models import generation
from tests.logical_cpus import make_four

CONTEXT, WIDTH, VOCABULARY = 8, 16, 11


class Sums(tf.Module):
    """Tells the next token by a sum over all before, each by its position: whoever misplaces one says another."""

    context = CONTEXT

    def __init__(self):
        super().__init__()
        rng = np.random.default_rng(0)
        self.tokens = tf.constant(rng.normal(size=(VOCABULARY, WIDTH)), tf.float32)
        self.positions = tf.constant(rng.normal(size=(CONTEXT, WIDTH)), tf.float32)

    def empty_cache(self, batch):
        return [tf.fill([batch, CONTEXT, WIDTH], float("nan"))]  # what is left there counts for nothing

    def next_logits(self, tokens, cache, position):
        count = tf.shape(tokens)[1]
        new = tf.gather(self.tokens, tokens) * tf.gather(self.positions, position + tf.range(count))
        kept = tf.concat([cache[0][:, :position], new, cache[0][:, position + count :]], 1)
        told = tf.sin(tf.reduce_sum(kept[:, : position + count], 1))
        return tf.matmul(told, self.tokens, transpose_b=True), [tf.ensure_shape(kept, [None, CONTEXT, WIDTH])]


@pytest.fixture(scope="module")
def model():
    made = Sums()
    assert isinstance(made, Generates)
    return made


def first(count, model, row, distribution=None, **arguments):
    found = generate(distribution or tf.distribute.get_strategy(), model, row, **arguments)
    return list(itertools.islice(found, count))


def without_cache(model, row, count):
    """The likeliest tokens, each told by reading again all that is within the context then."""
    row, begin = list(row), max(0, len(row) - CONTEXT)
    for _ in range(count):
        if len(row) - begin > CONTEXT:
            begin = len(row) - CONTEXT // 2
        logits, _ = model.next_logits(tf.constant([row[begin:]]), model.empty_cache(1), tf.constant(0))
        row.append(int(tf.argmax(logits[0])))
    return row[-count:]


@pytest.mark.parametrize("row", [[7], [1, 2, 3], [*range(8)], [*range(9)], [*range(11)] * 3])
def test_cached_tokens_are_those_without_a_cache(model, row):
    expected = without_cache(model, row, 30)
    assert first(30, model, row, temperature=0) == expected
    assert len(set(expected)) > 5  # and not one token all the time


def test_what_is_sampled_depends_on_the_seed_and_the_position_alone(model):
    sampled = first(40, model, [1, 2], seed=3)
    assert sampled == first(40, model, [1, 2], seed=3)
    assert sampled != first(40, model, [1, 2], seed=4)
    # Begun again in the middle, while the context is not full: the rest is what it was.
    assert first(3, model, [1, 2, *sampled[:3]], seed=3) == sampled[3:6]
    assert first(20, model, [1, 2], seed=3, temperature=5.0) != sampled[:20]


def test_the_likeliest_are_sampled_as_often_as_they_are_likely():
    rows = tf.repeat(tf.math.log(tf.constant([[0.1, 0.4, 0.2, 0.3]])), 4000, 0)

    def shares(temperature, top_k):
        sampled = choose(rows, tf.constant(temperature), tf.constant(top_k), tf.constant([7, 1], tf.int64))
        return np.bincount(sampled.numpy(), minlength=4) / 4000

    close = {"atol": 0.03, "rtol": 0}  # four standard deviations of a share of 4,000
    np.testing.assert_allclose(shares(1.0, 0), [0.1, 0.4, 0.2, 0.3], **close)
    np.testing.assert_allclose(shares(1.0, 2), [0, 4 / 7, 0, 3 / 7], **close)
    np.testing.assert_allclose(shares(0.5, 100), np.square([1, 4, 2, 3]) / 30, **close)
    assert shares(0.0, 0)[1] == shares(1.0, 1)[1] == 1


def test_replicas_tell_what_one_device_tells(model):
    make_four()
    mirrored = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    for temperature in (0.0, 1.0):
        arguments = {"temperature": temperature, "top_k": 5, "seed": 1}
        assert first(20, model, [5], mirrored, **arguments) == first(20, model, [5], **arguments)


def test_served_tokens_are_those_of_the_host(model):
    served = signatures(model)
    rows = [[1, 2, 3], [3, 2, 1]]
    tokens = served["generate"](tf.constant(rows), 25, 0.0, 0, tf.constant(0, tf.int64))["tokens"].numpy()
    assert tokens.tolist() == [row + without_cache(model, row, 25) for row in rows]
    sampled = served["generate"](tf.constant(rows[:1]), 25, 0.7, 4, tf.constant(6, tf.int64))["tokens"].numpy()
    assert sampled[0, 3:].tolist() == first(25, model, rows[0], temperature=0.7, top_k=4, seed=6)
    logits = served["next_token_logits"](tf.constant([[*range(11)]]))["logits"]
    assert int(tf.argmax(logits[0])) == without_cache(model, range(11), 1)[0]
    with pytest.raises(tf.errors.InvalidArgumentError, match="pass at least one token"):
        served["next_token_logits"](tf.zeros([1, 0], tf.int32))


def test_a_model_without_next_logits_does_not_generate():
    assert not isinstance(tf.keras.Sequential(), generation.Generates)
