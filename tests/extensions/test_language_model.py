"""A language model of one's own, on tokens of one's own, which generates by its three members."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import crankshaft

TOKENS, RATE = 5, 2.0
BATCH = np.random.default_rng(2).integers(0, TOKENS, [8, 31]).astype(np.int32)


class Bigrams(tf.keras.Model):
    context = 4

    def __init__(self):
        super().__init__()
        self.table = self.add_weight(shape=[TOKENS, TOKENS], initializer="zeros", name="table")

    def call(self, tokens):
        return tf.gather(tf.convert_to_tensor(self.table), tokens)

    def empty_cache(self, batch):
        return tf.zeros([batch, 1])  # it attends to no token but the last

    def next_logits(self, tokens, cache, position):
        return self(tokens[:, -1]), cache


class Line(crankshaft.Trainer):
    def build_model(self):
        return Bigrams()

    def loss(self, outputs, batch):
        return crankshaft.mean(tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], outputs))


def _expected(steps: int) -> np.ndarray:
    table, (before, after) = np.zeros([TOKENS, TOKENS]), (BATCH[:, :-1].ravel(), BATCH[:, 1:].ravel())
    for _ in range(steps):
        gradient, odds = np.zeros_like(table), np.exp(table[before])
        np.add.at(gradient, before, odds / odds.sum(1, keepdims=True) - np.eye(TOKENS)[after])
        table -= RATE * gradient / len(before)
    return table


def test_it_trains_and_generates_what_numpy_computes(trained, tmp_path):
    weights, _ = trained(Line, (BATCH[:, :-1], BATCH[:, 1:]), steps=6, learning_rate=RATE)
    table = _expected(6)
    np.testing.assert_allclose(weights[0], table, rtol=1e-4, atol=1e-6)
    found = [1]
    for _ in range(6):
        found.append(int(table[found[-1]].argmax()))
    flags = {"data": ((BATCH[:, :-1], BATCH[:, 1:]),) * 2, "run_dir": tmp_path / "1", "mode": "eval"}
    with crankshaft.open_run(Line, **flags) as run:
        assert run.generate([1], tokens=6, temperature=0) == found[1:]


def test_a_tokenizer_of_its_own_is_refused_as_it_is_given():
    data = crankshaft.Data((BATCH[:, :-1], BATCH[:, 1:]), tokens=Bigrams())
    with pytest.raises(crankshaft.UsageError, match=r"Data.tokens is a Bigrams, .*give Bytes or a Vocabulary of crank"):
        crankshaft.run(Line, data=data, global_batch_size=8, train_steps=1)
