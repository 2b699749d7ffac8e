"""A distributed training loop in TensorFlow alone: python minimal.py

Trains a small model on two replicas and on one device, and compares the weights. The files that comments name are
where Crankshaft does the same for any model, data and number of hosts.
"""

import numpy as np
import tensorflow as tf

SEED, EXAMPLES, BATCH_SIZE, EPOCHS, STEPS_PER_CALL = 0, 999, 64, 10, 50
STEPS_PER_EPOCH = -(-EXAMPLES // BATCH_SIZE)  # the last batch has 39 examples: 19 and 20 on two replicas
LEARNING_RATE, CLIP_NORM, EPSILON = 0.01, 0.1, 1e-7
BETA_1, BETA_2 = float(np.float32(0.9)), float(np.float32(0.999))  # rounded as in the float32 kernel


def data():
    """Returns points [EXAMPLES, 2], and for each whether it is near the origin [EXAMPLES, 1]; both float32."""
    points = np.random.default_rng(SEED).normal(size=(EXAMPLES, 2)).astype("float32")
    return points, (np.linalg.norm(points, axis=1, keepdims=True) < 1).astype("float32")


def examples_of(step, replica, num_replicas):
    """Returns the indices of the examples on which a replica trains in a step; all int64.

    They are a function of seed, step and replica: a resumed run needs no position in its data but the step, and
    replicas agree without a message. `engine/data/order.py`
    """
    epoch, start = step // STEPS_PER_EPOCH, step % STEPS_PER_EPOCH * BATCH_SIZE
    size = tf.minimum(EXAMPLES - start, BATCH_SIZE)  # of the global batch; an epoch's last is smaller
    positions = tf.range(start + size * replica // num_replicas, start + size * (replica + 1) // num_replicas)
    # The shuffle needs no buffer: a keyed permutation of an epoch's positions, evaluated at these. The key has random
    # bits, and the cipher 8 rounds, not 4: otherwise epochs' orders repeat or are similar. `engine/randomness.py`
    key = tf.random.stateless_uniform([3], (SEED, epoch), None, None, tf.int64, alg="philox")  # type: ignore[arg-type]
    return tf.raw_ops.RandomIndexShuffle(index=positions, seed=key, max_index=EXAMPLES - 1, rounds=8)


def train(strategy):
    """Trains a new model on the replicas of a tf.distribute strategy; returns its weights as arrays."""
    with strategy.scope():  # each replica has its own copy of the variables made here
        tf.keras.utils.set_random_seed(SEED)
        layers = [tf.keras.Input([2]), tf.keras.layers.Dense(16, activation="tanh"), tf.keras.layers.Dense(1)]
        model = tf.keras.Sequential(layers)
        variables = [weight.value for weight in model.trainable_variables]  # the tf.Variable in each of Keras's
        first_moments, second_moments = (
            [tf.Variable(tf.zeros(variable.shape), trainable=False) for variable in variables] for _ in range(2)
        )
    # All examples stay in memory, and a step gathers its own. `engine/data/feeds/resident_feed.py`
    points, near = map(tf.constant, data())

    def update(step):
        """Makes one update; runs on each replica. Returns [sum of the losses, number of examples] of all replicas."""
        replica = tf.distribute.get_replica_context()
        number = tf.cast(replica.replica_id_in_sync_group, tf.int64)
        examples = examples_of(step, number, replica.num_replicas_in_sync)

        # Gradients of the sum of this replica's losses, not of their mean: replicas' shares of a batch may differ in
        # size, and a mean of their means would weigh examples unequally. `engine/step/gradients.py`
        with tf.GradientTape() as tape:
            logits = model(tf.gather(points, examples), training=True)
            losses = tf.nn.sigmoid_cross_entropy_with_logits(labels=tf.gather(near, examples), logits=logits)
            loss = tf.reduce_sum(losses)
        gradients = tape.gradient(loss, variables)

        # One all-reduce sums the gradients and the number of examples. `engine/reduction/all_reduce.py`
        count = tf.cast(tf.size(examples), tf.float32)
        *gradients, loss, count = replica.all_reduce(tf.distribute.ReduceOp.SUM, [*gradients, loss, count])

        # Clipping comes after the sum: all replicas clip the global gradient, by the same norm, and stay identical.
        # `engine/step/gradients.py`
        gradients, _ = tf.clip_by_global_norm([gradient / count for gradient in gradients], CLIP_NORM)

        # Adam, by a fused kernel on this replica's copy of each variable. The bias correction is computed here, in
        # float64, as part of the learning rate. The kernel's own, which powers of 0 turn off, is in float32, where
        # 1 - 0.999 has four digits. `engine/optimizers/rules.py`
        updates = tf.cast(step + 1, tf.float64)
        rate = LEARNING_RATE * tf.sqrt(1 - BETA_2**updates) / (1 - BETA_1**updates)
        scalars = {"lr": tf.cast(rate, tf.float32), "beta1": BETA_1, "beta2": BETA_2, "epsilon": EPSILON}
        scalars |= {"beta1_power": 0.0, "beta2_power": 0.0}
        for variable, m, v, gradient in zip(variables, first_moments, second_moments, gradients, strict=True):
            tf.raw_ops.ResourceApplyAdam(var=variable.handle, m=m.handle, v=v.handle, grad=gradient, **scalars)
        return tf.stack([loss, count])

    # Many steps per call, so that no step waits for Python. The loop becomes a tf.while_loop, and is around
    # strategy.run since an all-reduce can't be in a loop within it. `engine/strategies/inner_loop.py`
    @tf.function
    def run_steps(first, stop):
        sums = tf.zeros([2])
        for step in tf.range(first, stop):
            on_replicas = strategy.run(update, args=(step,))
            sums += strategy.experimental_local_results(on_replicas)[0]  # all replicas have the same
        return sums[0] / sums[1]

    # Between calls the host does what is due: evaluate, save, stop; here it prints. `engine/loop.py`
    for first in range(0, EPOCHS * STEPS_PER_EPOCH, STEPS_PER_CALL):
        stop = min(first + STEPS_PER_CALL, EPOCHS * STEPS_PER_EPOCH)
        loss = run_steps(tf.constant(first, tf.int64), tf.constant(stop, tf.int64))
        print(f"step {stop}: loss {loss:.4f}")
    return model.get_weights()


if __name__ == "__main__":
    # Two devices out of one CPU must be asked for before TensorFlow uses it. `engine/devices.py`
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    two = train(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]))
    one = train(tf.distribute.OneDeviceStrategy("CPU:0"))
    largest = max(np.abs(a - b).max() for a, b in zip(one, two, strict=True))
    assert largest < 1e-5, largest  # replicas add in another order, which rounds otherwise, by 1e-7 of a sum
    print(f"the weights agree: they differ by at most {largest:.1e}")
