"""A small run that counts, on the servers, how often each example was trained on. --poison: one example is refused.
--enough: a hook that is never due ends the run after so many steps.
"""

import numpy as np
import tensorflow as tf
from absl import flags

import crankshaft
from crankshaft.engine.hooks import Hook
from crankshaft.launch import train

EXAMPLES = 1000
flags.DEFINE_bool("poison", False, "One example raises.")
flags.DEFINE_integer("enough", None, "Steps after which a hook ends the run.")


class Counting(crankshaft.Trainer):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(32, activation="relu"), tf.keras.layers.Dense(3)])

    def build(self):
        super().build()
        self.seen = tf.Variable(tf.zeros([EXAMPLES], tf.int64), trainable=False, name="seen")

    def loss(self, outputs, batch):
        labels = batch[1][:, 0]
        return crankshaft.mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs))

    def train_step(self, batch):
        with tf.control_dependencies([tf.debugging.assert_less(batch[0], 50.0, message="a feature is over 50")]):
            found = super().train_step(batch)
        count = tf.math.bincount(tf.cast(batch[1][:, 1], tf.int32), minlength=EXAMPLES, dtype=tf.int64)
        tf.raw_ops.AssignAddVariableOp(resource=self.seen.handle, value=count)
        return found


class Enough(Hook):
    name = "enough"

    def __call__(self, moment):
        if flags.FLAGS.enough and moment.step >= flags.FLAGS.enough:
            moment.stop = "it is enough"


def data():
    random = np.random.RandomState(0)
    features = random.rand(EXAMPLES, 20).astype(np.float32)
    labels = np.stack([features[:, :3].argmax(1), np.arange(EXAMPLES)], 1)
    if flags.FLAGS.poison:
        features[432, 3] = 99
    return (features, labels), (features[:200] % 50, labels[:200]), 3


if __name__ == "__main__":
    train.main(Counting, data=data, hooks=[Enough()])
