"""Clicks on items that change, read in order: rows of items no longer seen go to others, and a second table only counts
examples. --hold=FOLDER: a worker at step 40 has looked up its rows, and waits for FOLDER/go before it updates them.
"""

from crankshaft import Trainer  # isort: skip  # first: it imports TensorFlow more quickly than TensorFlow itself does


import numpy as np
import tensorflow as tf
from absl import flags

from crankshaft import Embedding, main, mean, step_context
from crankshaft.engine.hooks import every_steps

BATCH, STEPS, EVICT_AFTER, ROWS, HELD = 16, 3000, 64, 600, 40
FLAGS = flags.FLAGS  # only the script defines its own: a test that imports this file has none of them


class Clicks(Trainer):
    def build_model(self):
        shards = self.run_context.num_servers
        self.items = Embedding("items", ROWS, 4, admit_after=1, evict_after=EVICT_AFTER, num_shards=shards)
        self.examples = Embedding("examples", 40_000, 1, admit_after=255)
        return tf.keras.Sequential([tf.keras.layers.Input([5]), tf.keras.layers.Dense(1)])

    def forward(self, features, training):
        rows = self.items(features["item"], training=training)
        if training and FLAGS.hold:
            rows = _held(rows)
        counted = self.examples(features["example"], training=training)
        return self.model(tf.concat([rows, counted], 1), training=training)[:, 0]

    def loss(self, outputs, batch):
        return mean(tf.nn.sigmoid_cross_entropy_with_logits(batch[1], outputs))


def _held(rows):
    def path(text, value):
        """Returns the text, by an operation that depends on `value`: TensorFlow can't compute it once, in advance."""
        return tf.strings.join([text, tf.strings.substr(tf.strings.as_string(value), 0, 0)])

    def wait():
        process = tf.io.read_file(path("/proc/self/stat", rows[0, 0]))
        with tf.control_dependencies([tf.io.write_file(f"{FLAGS.hold}/held", process)]):
            start = tf.constant(0)
        looks = tf.while_loop(
            lambda i: tf.equal(tf.size(tf.io.matching_files(path(f"{FLAGS.hold}/go", i))), 0),
            lambda i: [i + 1],
            [start],
        )
        with tf.control_dependencies(looks):
            return tf.identity(rows)

    return tf.cond(tf.equal(step_context().step, HELD), wait, lambda: rows)


def data():
    """300 items are alive at a time, and one leaves at each step."""
    rng = np.random.default_rng(0)
    items = rng.choice(2**40, STEPS + 300, replace=False)
    alive = np.repeat(np.arange(STEPS), BATCH) + rng.integers(0, 300, STEPS * BATCH)
    features = {"item": items[alive], "example": np.arange(STEPS * BATCH)}
    return (features, (items[alive] % 3 == 0).astype(np.float32)), None


def say(status, _):
    figures = status.state.trainer.items.figures()
    print(f"items at step {status.step}:", *(f"{name} {int(value)}" for name, value in figures.items()), flush=True)


if __name__ == "__main__":
    flags.DEFINE_string("hold", None, "Where a worker says that it waits, and waits.")
    main(Clicks, data=data, hooks=[every_steps(EVICT_AFTER // 4, say)])
