"""Models with a `train_step` of their own, as people write them for Keras's `fit`, sized like the small mlp.

Starts Keras's backend, TensorFlow. `crankshaft train --model=benchmarks/keras_steps.py --model_arg=kind=gan`
"""

from __future__ import annotations

import keras
import tensorflow as tf

_layers = keras.layers
_NOISE = 32


def _dense(*units: int, inputs: int) -> keras.Sequential:
    hidden = [_layers.Dense(size, activation="relu") for size in units[:-1]]
    return keras.Sequential([keras.Input([inputs]), *hidden, _layers.Dense(units[-1])])


def _flat(data) -> tf.Tensor:
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    return tf.reshape(x, [-1, 784])


class Gan(keras.Model):
    """A generator and a critic, each with an optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.critic, self.generator = _dense(128, 1, inputs=784), _dense(128, 784, inputs=_NOISE)
        self.seeds = keras.random.SeedGenerator(0)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.critic_tracker = keras.metrics.Mean(name="critic_loss")

    def compile(self, optimizer, critic_optimizer, **settings):
        super().compile(optimizer=optimizer, **settings)
        self.critic_optimizer = critic_optimizer
        self.loss_function = keras.losses.BinaryCrossentropy(from_logits=True)

    def train_step(self, data):
        real = _flat(data)
        examples = tf.shape(real)[0]
        ones, zeros = tf.ones([examples, 1]), tf.zeros([examples, 1])
        generated = self.generator(keras.random.normal([examples, _NOISE], seed=self.seeds))
        with tf.GradientTape() as tape:
            logits = self.critic(tf.concat([generated, real], 0))
            critic_loss = self.loss_function(tf.concat([ones, zeros], 0), logits)
        weights = self.critic.trainable_weights
        self.critic_optimizer.apply_gradients(zip(tape.gradient(critic_loss, weights), weights, strict=True))
        noise = keras.random.normal([examples, _NOISE], seed=self.seeds)
        with tf.GradientTape() as tape:
            loss = self.loss_function(zeros, self.critic(self.generator(noise)))
        weights = self.generator.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.loss_tracker.update_state(loss)
        self.critic_tracker.update_state(critic_loss)
        return {"loss": self.loss_tracker.result(), "critic_loss": self.critic_tracker.result()}


class Vae(keras.Model):
    """A variational autoencoder."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = _dense(128, 16, inputs=784), _dense(128, 784, inputs=8)
        self.seeds = keras.random.SeedGenerator(0)
        self.loss_tracker, self.kl_tracker = keras.metrics.Mean(name="loss"), keras.metrics.Mean(name="kl")

    def train_step(self, data):
        x = _flat(data)
        with tf.GradientTape() as tape:
            mean, log_variance = keras.ops.split(self.encoder(x), 2, axis=1)
            noise = keras.random.normal(keras.ops.shape(mean), seed=self.seeds)
            decoded = self.decoder(mean + keras.ops.exp(log_variance / 2) * noise)
            kl = (keras.ops.square(mean) + keras.ops.exp(log_variance) - 1 - log_variance) / 2
            kl = keras.ops.mean(keras.ops.sum(kl, axis=1))
            loss = keras.ops.mean(keras.ops.sum(keras.ops.square(x - decoded), axis=1)) + kl
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.loss_tracker.update_state(loss)
        self.kl_tracker.update_state(kl)
        return {"loss": self.loss_tracker.result(), "kl": self.kl_tracker.result()}


class Distiller(keras.Model):
    """A student that learns from labels and from a frozen teacher."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = _dense(128, 10, inputs=784), _dense(256, 10, inputs=784)
        self.teacher.trainable = False
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")

    def train_step(self, data):
        x, y = _flat(data), data[1]
        taught = keras.ops.softmax(self.teacher(x, training=False) / 3)
        with tf.GradientTape() as tape:
            outputs = self.student(x, training=True)
            near = keras.ops.mean(keras.losses.kl_divergence(taught, keras.ops.softmax(outputs / 3)))
            right = keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)
            loss = 0.1 * keras.ops.mean(right) + 0.9 * near
        weights = self.student.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.loss_tracker.update_state(loss)
        self.accuracy.update_state(y, outputs)
        return {"loss": self.loss_tracker.result(), "accuracy": self.accuracy.result()}


KINDS = {"gan": Gan, "vae": Vae, "distiller": Distiller}


def model(kind: str = "gan", **settings) -> keras.Model:
    """Makes and compiles a model of a kind; `settings` are those of `Model.compile`."""
    made = KINDS[kind]()
    critics = {"critic_optimizer": keras.optimizers.Adam()} if kind == "gan" else {}
    made.compile(optimizer=keras.optimizers.Adam(), **critics, **settings)
    return made
