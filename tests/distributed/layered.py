"""A small run whose layers hold all that layers can: statistics, counters, penalties, a table, constraints, frozen
weights. --one_by_one: each variable is read by itself. --bucket_bytes: messages hold no more."""

import numpy as np
import tensorflow as tf
from absl import flags

import crankshaft
from crankshaft.engine.reduction import wire
from crankshaft.launch import train

EXAMPLES = 600
flags.DEFINE_bool("one_by_one", False, "Nothing is pulled in buckets.")
flags.DEFINE_integer("bucket_bytes", 0, "What a message holds at most; 0 is the engine's own limit.")


class AddsToTheLoss(tf.keras.layers.Layer):
    def build(self, shape):
        self.weight = self.add_weight(shape=(), initializer="ones", name="weight")

    def call(self, x):
        self.add_loss(0.01 * self.weight * tf.reduce_mean(tf.square(x)))
        return x


class Layered(crankshaft.Trainer):
    def build_model(self):
        wire.BUCKET_BYTES = flags.FLAGS.bucket_bytes or wire.BUCKET_BYTES
        layers = tf.keras.layers
        numbers, ids = tf.keras.Input([6], name="numbers"), tf.keras.Input([3], dtype="int64", name="ids")
        with tf.device("/job:ps/task:1" if self.run_context.num_servers > 1 else None):
            found = layers.Embedding(20, 4, embeddings_regularizer="l2")(ids)
        x = layers.Concatenate()([numbers, layers.Flatten()(found)])
        x = layers.Dense(16, kernel_regularizer="l2", kernel_constraint=tf.keras.constraints.MaxNorm(0.9))(x)
        x = layers.BatchNormalization()(x)
        x = layers.Dense(16, activation="relu", trainable=False, name="frozen")(x)
        x = layers.Dropout(0.3)(AddsToTheLoss()(x))
        return tf.keras.Model({"numbers": numbers, "ids": ids}, layers.Dense(3)(x))

    @property
    def steady_variables(self):
        return [] if flags.FLAGS.one_by_one else super().steady_variables

    def loss(self, outputs, batch):
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], tf.cast(outputs, tf.float32))
        return crankshaft.mean(losses)


def data():
    random = np.random.RandomState(0)
    numbers = random.rand(EXAMPLES, 6).astype(np.float32)
    features = {"numbers": numbers, "ids": random.randint(0, 20, (EXAMPLES, 3))}
    labels = numbers[:, :3].argmax(1).astype(np.int32)
    return (features, labels), (tf.nest.map_structure(lambda x: x[:100], features), labels[:100]), 3


if __name__ == "__main__":
    train.main(Layered, data=data)
