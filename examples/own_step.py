"""A training step of one's own, made of the engine's functions: python own_step.py

Trains the model of minimal.py, to the same weights, on two replicas and on one device.
"""

import numpy as np
import tensorflow as tf

from crankshaft import Trainer, Update, mean, run

EXAMPLES, BATCH_SIZE, EPOCHS = 999, 64, 10  # the last batch of an epoch has 39 examples: 19 and 20 on two replicas


def data():
    """Returns ((features, labels) to train on, (features, labels) to evaluate on): points and whether they are near."""
    random = np.random.default_rng(0)
    points = random.normal(size=(EXAMPLES + 200, 2)).astype("float32")
    near = (np.linalg.norm(points, axis=1, keepdims=True) < 1).astype("float32")
    return (points[:EXAMPLES], near[:EXAMPLES]), (points[EXAMPLES:], near[EXAMPLES:])


class Near(Trainer):
    """Tells near points from far ones.

    All is written for one device. What differs on several replicas is in one place, `self.reduction.sum`.
    """

    def build_model(self):
        # Called once, after the run's seed is set: each run begins with the same weights.
        return tf.keras.Sequential([tf.keras.layers.Dense(16, activation="tanh"), tf.keras.layers.Dense(1)])

    def loss(self, outputs, batch):
        # One loss per example. `mean` makes of them a pair, (their sum, their count), which is divided only after both
        # were summed over all replicas: an average of replicas' averages is wrong as soon as they differ in size.
        return mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=batch[1], logits=outputs))

    def metrics(self, outputs, batch):
        return {"accuracy": mean((outputs > 0) == (batch[1] > 0.5), direction="max")}

    def train_step(self, batch):
        """Makes one update of this replica's part of the global batch. This is `Trainer.train_step`, as it stands.

        It is compiled, with the loop around it: one call of the host executes many steps.
        """
        variables = self.trainable_variables

        # 1. A tape around `forward` and `loss`: gradients of the *sum* of this replica's losses, not of their mean.
        gradients, metrics = self.compute_gradients(batch)

        # 2. The all-reduce, with the count in the same message. On one device it returns what it was given.
        gradients, count = self.reduction.sum(gradients, metrics["loss"].count, variables=variables)

        # 3. The division by the number of examples in the global batch; then, with float16, by the loss scale.
        gradients = gradients.over(count).unscaled()

        # 4. Clipping comes after the sum, so that every replica clips by the same norm, and decides alike whether a
        #    step that is not finite is skipped.
        update = Update(self, gradients, variables)

        # 5. TensorFlow's fused kernel of the optimizer, on each replica's copy of the variables.
        update.apply(self.optimizer, variables)

        # 6. The metrics, still pairs. They are summed over the steps of a call, and once over the replicas.
        return update.end(metrics)


def train(**where):
    """Trains, and returns the weights and the result of the last evaluation."""
    done = run(
        Near,
        data=data,
        train_epochs=EPOCHS,
        global_batch_size=BATCH_SIZE,
        optimizer="adam",
        learning_rate=0.01,
        clip_norm=0.1,
        progress="off",
        **where,
    )
    return done.model.get_weights(), done.result["eval"]


if __name__ == "__main__":
    # The order of the examples is a function of the seed, the epoch and the step: both runs see the same batches.
    # Two devices out of one CPU must be asked for before TensorFlow starts, so that run is the first.
    two, on_two = train(strategy="mirrored", num_virtual_devices=2)
    one, on_one = train()
    print(f"two replicas: {on_two}")
    print(f"one device:   {on_one}")
    largest = max(np.abs(a - b).max() for a, b in zip(one, two, strict=True))
    # Sums in another order round otherwise, by 1e-7 of a weight in each of the 160 updates.
    assert largest < 1e-5, largest
    print(f"the weights agree: they differ by at most {largest:.1e}")
