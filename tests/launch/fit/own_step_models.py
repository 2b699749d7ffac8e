"""Compiled Keras models with a step of their own, of the kinds that people publish; each function makes one."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers

rng = np.random.default_rng(0)
X = rng.normal(size=(42, 6)).astype("float32")
KINDS = (X @ rng.normal(size=(6, 3))).argmax(1).astype("int32")
Y = (X @ rng.normal(size=(6, 2))).astype("float32")
WEIGHTS = rng.uniform(0.5, 2.0, 42).astype("float32")


def dense(*units, width=6, name=None):
    made = [layers.Dense(size, "tanh", name=f"{name or 'hidden'}_{i}") for i, size in enumerate(units[:-1])]
    return keras.Sequential([keras.Input([width]), *made, layers.Dense(units[-1], name=f"{name or 'last'}_out")])


class Guide(keras.Model):
    """The step of Keras's guide."""

    def train_step(self, data):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=weights)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred, sample_weight=weights)
        return {metric.name: metric.result() for metric in self.metrics}


def guide(optimizer=None):
    features = keras.Input([6])
    hidden = layers.Dense(8, "relu", kernel_regularizer=keras.regularizers.L2(0.01))(features)
    made = Guide(features, layers.Dense(3, "softmax")(layers.BatchNormalization(synchronized=True)(hidden)))
    made.compile(
        optimizer or keras.optimizers.Adam(0.01),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        weighted_metrics=[keras.metrics.SparseCategoricalCrossentropy()],
    )
    return made


class Gan(keras.Model):
    """Two optimizers in `compile`, metrics as a property, no call, noise from the data."""

    def __init__(self):
        super().__init__()
        self.critic, self.generator = dense(8, 1, name="critic"), dense(8, 6, width=2, name="generator")
        self.critic_loss = keras.metrics.Mean(name="critic_loss")
        self.generator_loss = keras.metrics.Mean(name="generator_loss")

    def compile(self, optimizers, loss):
        super().compile()
        self.optimizers, self.loss_function = optimizers, loss

    @property
    def metrics(self):
        return [self.critic_loss, self.generator_loss]

    def train_step(self, data):
        noise, ones = data[:, :2], tf.ones([tf.shape(data)[0], 1])
        with tf.GradientTape() as tape:
            both = tf.concat([self.critic(self.generator(noise)), self.critic(data)], 0)
            loss = self.loss_function(tf.concat([ones, 0 * ones], 0), both)
        weights = self.critic.trainable_weights
        self.optimizers["critic"].apply(tape.gradient(loss, weights), weights)
        self.critic_loss.update_state(loss)
        with tf.GradientTape() as tape:
            loss = self.loss_function(0 * ones, self.critic(self.generator(noise)))
        weights = self.generator.trainable_weights
        self.optimizers["generator"].apply(tape.gradient(loss, weights), weights)
        self.generator_loss.update_state(loss)
        return {"d": self.critic_loss.result(), "g": self.generator_loss.result()}


def gan():
    made = Gan()
    optimizers = {"critic": keras.optimizers.Adam(0.01), "generator": keras.optimizers.RMSprop(0.02, momentum=0.5)}
    made.compile(optimizers, keras.losses.BinaryCrossentropy(from_logits=True))
    return made


class Vae(keras.Model):
    """Trackers as a property, no labels, samples by a generator of its own (of `scale` 0 none)."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.encoder, self.decoder, self.scale = (
            dense(8, 4, name="encoder"),
            dense(8, 6, width=2, name="decoder"),
            scale,
        )
        self.seeds = keras.random.SeedGenerator(3)
        self.trackers = [keras.metrics.Mean(name=name) for name in ("total", "reconstruction", "kl")]

    @property
    def metrics(self):
        return self.trackers

    def losses_of(self, data):
        mean, log_variance = keras.ops.split(self.encoder(data), 2, axis=-1)
        noise = keras.random.normal(keras.ops.shape(mean), seed=self.seeds)
        decoded = self.decoder(mean + self.scale * keras.ops.exp(0.5 * log_variance) * noise)
        reconstruction = keras.ops.mean(keras.ops.sum(keras.ops.square(data - decoded), -1))
        kl = -0.5 * (1 + log_variance - keras.ops.square(mean) - keras.ops.exp(log_variance))
        kl = keras.ops.mean(keras.ops.sum(kl, axis=1))
        return reconstruction + kl, reconstruction, kl

    def train_step(self, data):
        with tf.GradientTape() as tape:
            losses = self.losses_of(data)
        gradients = tape.gradient(losses[0], self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        for tracker, loss in zip(self.trackers, losses, strict=True):
            tracker.update_state(loss)
        return {**self.results(), **{t.name: t.result() for t in self.trackers[1:]}}

    def results(self):
        loss, _, kl = self.trackers
        return {"loss": loss.result(), "share": kl.total / loss.total, "perplexity": keras.ops.exp(loss.result())}

    def test_step(self, data):
        for tracker, loss in zip(self.trackers, self.losses_of(data), strict=True):
            tracker.update_state(loss, sample_weight=tf.shape(data)[0])
        return self.results()


def vae(scale=0.0):
    made = Vae(scale)
    made.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.5))
    return made


class Distiller(keras.Model):
    """A frozen teacher, a test step, and a loss of `compile`; a key that is not the metric's name."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = dense(4, 3, name="student"), dense(16, 3, name="teacher")
        self.teacher.trainable = False

    def call(self, x):
        return self.student(x)

    def train_step(self, data):
        x, y = data
        taught = self.teacher(x, training=False)
        with tf.GradientTape() as tape:
            y_pred = self.student(x, training=True)
            learnt = self.compute_loss(x=x, y=y, y_pred=y_pred)
            near = keras.ops.mean(
                keras.losses.kl_divergence(keras.ops.softmax(taught / 2), keras.ops.softmax(y_pred / 2))
            )
            loss = 0.1 * learnt + 0.9 * near
        weights = self.student.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        results = self.compute_metrics(x, y, y_pred)
        return {**results, "distilled": near, "rate": self.optimizer.learning_rate}

    def test_step(self, data):
        x, y = data
        y_pred = self(x)
        self.compute_loss(x=x, y=y, y_pred=y_pred)
        return self.compute_metrics(x, y, y_pred)


def distiller():
    made = Distiller()
    schedule = keras.optimizers.schedules.ExponentialDecay(0.02, 3, 0.9)
    made.compile(
        keras.optimizers.AdamW(schedule, weight_decay=0.01, clipvalue=0.05, use_ema=True, ema_overwrite_frequency=4),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="right")],
    )
    return made


class Follower(keras.Model):
    """A target that follows, a trained temperature, a counter, and the same optimizer twice in a step."""

    def __init__(self):
        super().__init__()
        self.online, self.target = dense(5, 2, name="online"), dense(5, 2, name="target")
        self.target.trainable = False
        self.temperature = self.add_weight(shape=(), initializer="ones", name="temperature")
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, dtype="int32", name="seen")

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            first = keras.ops.mean(keras.ops.square(self.online(x) - y) / self.temperature)
            second = keras.ops.mean(keras.ops.square(self.online(-x) - self.target(x)))
        gradients = tape.gradient(first, [*self.online.trainable_variables, self.temperature])
        self.optimizer.apply(gradients, [*self.online.trainable_variables, self.temperature])
        self.optimizer.apply(tape.gradient(second, self.online.trainable_variables), self.online.trainable_variables)
        for theirs, mine in zip(self.online.weights, self.target.weights, strict=True):
            mine.assign(0.9 * mine + 0.1 * theirs)
        self.seen.assign_add(1)
        return {"loss": first, "second": second}


def follower():
    made = Follower()
    made.compile(optimizer=keras.optimizers.Adam(0.01))
    return made


class Scaled(keras.Model):
    """float16's loss scale, by hand, with a metric whose result is a dictionary."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(self(x, training=True) - y))
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.both.update_state(y, self(x))
        return {"loss": loss, **self.both.result()}


class Both(keras.metrics.Metric):
    def __init__(self, name="both"):
        super().__init__(name=name)
        self.total = self.add_weight(shape=(2,), initializer="zeros", name="total")
        self.count = self.add_weight(shape=(), initializer="zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        off = keras.ops.mean(keras.ops.cast(y_pred, "float32") - y_true, -1)
        self.total.assign_add(keras.ops.stack([keras.ops.sum(off), keras.ops.sum(keras.ops.abs(off))]))
        self.count.assign_add(keras.ops.cast(keras.ops.shape(off)[0], "float32"))

    def result(self):
        mean = self.total / self.count
        return {"bias": mean[0], "mae": mean[1]}


def scaled():
    made = Scaled(inputs=(x := keras.Input([6])), outputs=layers.Dense(2)(layers.Dense(4, "tanh")(x)))
    made.both = Both()
    # Grows twice, then overflows.
    made.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), 2.0**8, 4))
    return made


class Measured(keras.Sequential):
    """Keras's train step, with metrics of its own computation."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        self.largest.update_state(keras.ops.max(keras.ops.abs(y - y_pred), -1))
        return {**results, "largest": self.largest.result(), "shape": results["mae"] / self.largest.result()}


def measured():
    made = Measured([keras.Input([6]), layers.Dense(2)])
    made.largest = keras.metrics.Mean(name="largest")
    made.compile("sgd", "mse", metrics=["mae"], weighted_metrics=["mse"])
    return made


class Slow(keras.Model):
    """Accumulates gradients by hand, and applies them every second step."""

    def __init__(self):
        super().__init__()
        self.net = dense(3, 2)
        self.held = [self.add_weight(shape=w.shape, initializer="zeros", trainable=False) for w in self.net.weights]
        self.turn = self.add_weight(shape=(), initializer="zeros", trainable=False, dtype="int32")

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self.net(x))
        for held, gradient in zip(self.held, tape.gradient(loss, self.net.trainable_weights), strict=True):
            held.assign_add(gradient)
        self.turn.assign_add(1)
        tf.cond(tf.equal(self.turn % 2, 0), self.update, lambda: None)
        return {"loss": loss}

    def update(self):
        self.optimizer.apply([0.5 * held for held in self.held], self.net.trainable_weights)
        for held in self.held:
            held.assign(keras.ops.zeros_like(held))


def slow():
    made = Slow()
    made.compile(keras.optimizers.Adam(0.02), "mse")
    return made


class Lion(keras.optimizers.Optimizer):
    """A rule of one's own."""

    def build(self, variables):
        super().build(variables)
        self.momenta = self.add_optimizer_variables(variables, "momentum")

    def update_step(self, gradient, variable, learning_rate):
        momentum = self.momenta[self._get_variable_index(variable)]
        self.assign_sub(variable, learning_rate * keras.ops.sign(0.9 * momentum + 0.1 * gradient))
        self.assign(momentum, 0.99 * momentum + 0.01 * gradient)


def lion():
    return guide(Lion(0.003))


class Stops(keras.callbacks.Callback):
    """Ends the training after the second batch of the second epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training |= (self.epoch, batch) == (1, 1)


# Each model with its data, and whether it trains on several replicas.
CASES = {
    "guide": (guide, (X, KINDS), True),
    "lion": (lion, (X, KINDS), True),
    "gan": (gan, (X,), True),
    "vae": (vae, (X,), True),
    "distiller": (distiller, (X, KINDS), True),
    "follower": (follower, (X, Y), True),
    "scaled": (scaled, (X, Y), True),
    "measured": (measured, (X, Y), True),
    "slow": (slow, (X, Y), False),
}
