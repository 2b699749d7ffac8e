"""Whole models under AdamW beside the same training in float64: TensorFlow's plain operations and NumPy's update."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.input import synthetic_clicks
from crankshaft.models import cnn, wide_deep

STEPS = 40
RATE, DECAY, BETA_1, BETA_2, EPSILON = (float(np.float32(x)) for x in (1e-3, 0.004, 0.9, 0.999, 1e-7))


class Exact:
    """Weights, their AdamW (Kingma & Ba 2015, algorithm 1, epsilon as at the end of section 2) and what decides.

    A ReLU whose input is 0 within rounding, and two values of a pooling's window that are equal within it, let the
    gradient pass in float64 where they do not in float32. Adam makes a whole step of it, however small it is: so
    `margin` says how near the nearest was.
    """

    def __init__(self, variables):
        self.weights = [tf.Variable(variable.numpy().astype(np.float64)) for variable in variables]
        self.decays = [0.0 if "bias" in getattr(variable, "path", "") else DECAY for variable in variables]
        self.m = [np.zeros(weight.shape) for weight in self.weights]
        self.v = [np.zeros(weight.shape) for weight in self.weights]
        self.margin = np.inf

    def update(self, gradients, margin, t, rows):
        """Moves all weights; of a table, the last, the rows that the step has looked up."""
        self.margin = min(self.margin, float(margin))
        indices = [np.s_[:]] * len(self.weights)
        if rows is not None:
            indices[-1] = np.unique(rows)
        for weight, m, v, gradient, decay, at in zip(
            self.weights, self.m, self.v, gradients, self.decays, indices, strict=True
        ):
            g, w = tf.convert_to_tensor(gradient).numpy()[at], weight.numpy()
            m[at] = BETA_1 * m[at] + (1 - BETA_1) * g
            v[at] = BETA_2 * v[at] + (1 - BETA_2) * g**2
            step = np.sqrt(1 - BETA_2**t) / (1 - BETA_1**t) * m[at] / (np.sqrt(v[at]) + EPSILON)
            w[at] -= RATE * (step + decay * w[at])
            weight.assign(w)


def relu(x, margins):
    margins.append(tf.reduce_min(tf.abs(x)))
    return tf.nn.relu(x)


def pooled(x, margins):
    windows = tf.nn.space_to_depth(x[:, : x.shape[1] // 2 * 2, : x.shape[2] // 2 * 2], 2)
    four = tf.sort(tf.reshape(windows, [*windows.shape[:3], 4, x.shape[-1]]), axis=3)
    above = tf.where(four[:, :, :, 3] > 0, four[:, :, :, 3] - four[:, :, :, 2], np.inf)
    margins.append(tf.reduce_min(above))
    return four[:, :, :, 3]


def loss_of_cnn(weights, images, labels, margins):
    x = images
    for kernel, bias in zip(weights[:4:2], weights[1:4:2], strict=True):
        x = pooled(relu(tf.nn.conv2d(x, kernel, 1, "VALID") + bias, margins), margins)
    x = relu(tf.reshape(x, [len(x), -1]) @ weights[4] + weights[5], margins)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, x @ weights[6] + weights[7])


def loss_of_wide_deep(weights, rows, labels, margins):
    *dense, table = weights
    found = tf.gather(table, rows)
    x = tf.reshape(found[:, :, :-1], [len(rows), -1])
    for kernel, bias in zip(dense[:-2:2], dense[1:-2:2], strict=True):
        x = relu(x @ kernel + bias, margins)
    outputs = (x @ dense[-2] + dense[-1])[:, 0] + tf.reduce_sum(found[:, :, -1], 1)
    return tf.nn.sigmoid_cross_entropy_with_logits(tf.cast(labels, tf.float64), outputs)


def distance(made, variables, loss_of, features, labels, batch_size, rows=None):
    """(the distance of the weights from float64's after so many steps, by their norm; the margin)."""
    exact = Exact(variables)

    @tf.function
    def gradients_of(features, labels):
        margins = []
        with tf.GradientTape() as tape:
            weights = [tf.convert_to_tensor(weight) for weight in exact.weights]
            loss = tf.reduce_mean(loss_of(weights, features, labels, margins))
        return tape.gradient(loss, exact.weights), tf.reduce_min(tf.stack(margins))

    for t in range(1, STEPS + 1):
        mine = slice((t - 1) * batch_size, t * batch_size)
        gradients, margin = gradients_of(features[mine], labels[mine])
        exact.update(gradients, margin, t, None if rows is None else rows[mine])
    made.train(STEPS)
    ours = np.concatenate([variable.numpy().ravel() for variable in variables])
    theirs = np.concatenate([weight.numpy().ravel() for weight in exact.weights])
    return np.linalg.norm(ours - theirs) / np.linalg.norm(theirs), exact.margin


def of_cnn(bench, seed):
    batch_size, rng = 4, np.random.default_rng(seed)
    x = rng.normal(size=(STEPS * batch_size, 10, 10, 1)).astype(np.float32)
    y = rng.integers(0, 10, len(x)).astype(np.int32)
    made = bench(cnn.Model(), (x, y), batch_size, num_classes=10, shuffle=False, optimizer="adamw", seed=seed)
    return distance(made, made.trainer.model.trainable_variables, loss_of_cnn, x.astype(np.float64), y, batch_size)


def of_wide_deep(bench, seed):
    batch_size, ids = 8, 50
    data = synthetic_clicks.load(None, seed, fields=4, rows=ids, examples=STEPS * batch_size, eval_examples=1)
    features, labels = data.train
    options = {"vocabulary": data.vocabulary, "shuffle": False, "optimizer": "adamw", "seed": seed}
    options["num_classes"] = data.num_classes
    made = bench(wide_deep.Model(), (features, labels), batch_size, **options)
    rows = features["categories"] + ids * np.arange(4)  # each field has rows of its own
    variables = made.trainer.trainable_variables
    return distance(made, variables, loss_of_wide_deep, rows, labels, batch_size, rows)


@pytest.mark.parametrize(("model", "seed"), [(of_cnn, 20), (of_wide_deep, 11)])
def test_a_model_under_adamw_stays_with_float64(bench, model, seed):
    """Within 2e-6, which is what float32's gradients cost; the update's own share is tested in `test_optimizers`.

    Of seeds 0 to 29 the CNN's 40 steps end 0.8e-6 to 1.7e-6 from float64, and wide_deep's 0.9e-6 to 2.1e-6 wherever
    the margin is 5e-7 or more; below, rounding may decide, and eight seeds end at 4e-6 to 2e-3. Inputs of ReLUs are
    about 0.1 here, and off by 1e-8 at first, by 1e-7 at last: these two seeds are clear of that.
    """
    error, margin = model(bench, seed)
    assert margin > 1e-6
    assert error < 2e-6
