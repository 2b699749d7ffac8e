"""A mixture of experts that exchanges tokens by all_to_all (https://arxiv.org/abs/2101.03961)."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import crankshaft
from crankshaft.parts.sharding import Normal, add_weight, current_mesh
from tests import runs

EXPERTS, WIDTH, HIDDEN, RATE = 4, 3, 5, 0.1
RNG = np.random.default_rng(0)
X = RNG.normal(size=(18, WIDTH)).astype(np.float32)  # 9 along `data`, which do not divide over `model`
Y = np.sin(3 * X)


class Experts(tf.keras.layers.Layer):
    """Gives each token [tokens, width] to the expert that its router prefers; a replica has some of the experts."""

    def __init__(self, experts: int, hidden: int):
        super().__init__()
        self.mesh, self.experts, self.hidden = current_mesh(), experts, hidden

    def build(self, shape):
        up, down = (self.experts, shape[-1], self.hidden), (self.experts, self.hidden, shape[-1])
        self.router = add_weight(self, "router", (shape[-1], self.experts), Normal(1.0, seed=1))
        self.up = add_weight(self, "up", up, Normal(0.5, seed=2), sharded_axis=0)
        self.down = add_weight(self, "down", down, Normal(0.5, seed=3), sharded_axis=0)

    def call(self, x):
        model, width = self.mesh.model, x.shape[-1]
        gates = tf.nn.softmax(x @ tf.convert_to_tensor(self.router))  # its weight is a copy: before `enter`
        given = self.mine(tf.one_hot(tf.argmax(gates, -1), self.experts))
        sent = tf.einsum("te,tw->etw", given, self.mine(x))
        received = model.all_to_all(tf.reshape(sent, [model.size, -1, tf.shape(given)[0], width]))
        hidden = tf.nn.relu(tf.einsum("setw,ewh->seth", received, tf.convert_to_tensor(self.up)))
        returned = model.all_to_all(tf.einsum("seth,ehw->setw", hidden, tf.convert_to_tensor(self.down)))
        returned = tf.reshape(returned, [self.experts, -1, width])
        mixed = tf.einsum("te,te,etw->tw", given, self.mine(gates), returned)
        by_rank = tf.one_hot(model.rank, model.size)[:, tf.newaxis, tf.newaxis] * mixed
        return self.mesh.leave(tf.reshape(by_rank, [-1, width]))[: tf.shape(x)[0]]

    def mine(self, x):
        """This replica's tokens, of those that all replicas along `model` have."""
        model = self.mesh.model
        padded = tf.pad(self.mesh.enter(x), [[0, -tf.shape(x)[0] % model.size], [0, 0]])
        return tf.reshape(padded, [model.size, -1, x.shape[-1]])[model.rank]


class Mixture(crankshaft.Trainer):
    def build_model(self):
        return tf.keras.Sequential([Experts(EXPERTS, HIDDEN)])

    def loss(self, outputs, batch):
        return crankshaft.mean(tf.reduce_sum(tf.square(outputs - batch[1]), -1))


def _expected(steps: int) -> list[np.ndarray]:
    """The weights after steps of SGD, each token by its own expert's matrices."""
    shapes = (WIDTH, EXPERTS), (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)
    deviations = 1.0, 0.5, 0.5
    weights = [Normal(d, seed=n + 1)(shape) for n, (d, shape) in enumerate(zip(deviations, shapes, strict=True))]
    for _ in range(steps):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            router, up, down = weights
            gates = tf.nn.softmax(X @ router)
            outputs = []
            for token, expert in enumerate(np.argmax(gates, 1)):
                hidden = tf.nn.relu(X[token : token + 1] @ up[expert])
                outputs.append(gates[token, expert] * (hidden @ down[expert])[0])
            loss = tf.reduce_mean(tf.reduce_sum(tf.square(tf.stack(outputs) - Y), -1))
        gradients = tape.gradient(loss, weights)
        weights = [w - RATE * tf.convert_to_tensor(g) for w, g in zip(weights, gradients, strict=True)]
    return [w.numpy() for w in weights]


def test_exchanged_tokens_train_the_weights_of_one_device(trained, replicas, tmp_path):
    on_mesh = {"num_virtual_devices": 4, "mesh": "data:2,model:2", "shard_optimizer": True}
    trained(Mixture, (X, Y), global_batch_size=18, learning_rate=RATE, **(on_mesh if replicas > 1 else {}))
    found = runs.tensors(tmp_path / "1")
    for weight in _expected(6):
        assert any(v.shape == weight.shape and np.allclose(v, weight, rtol=1e-5, atol=1e-6) for v in found.values())
