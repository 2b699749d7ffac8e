"""A worker of a plain loop on MultiWorkerMirroredStrategy, in the way of TensorFlow's own tutorial. Runs in a worker.

"Custom training loop with Keras and MultiWorkerMirroredStrategy",
https://www.tensorflow.org/tutorials/distribute/multi_worker_with_ctl: a Keras optimizer, one step a call, each input
pipeline's share of a shuffled dataset, an accuracy metric in the step. `TF_CONFIG` says which worker this is.
"""

from __future__ import annotations

import time

import tensorflow as tf

from .. import keras_models
from ..race import parse_peer_arguments, write_result
from ..workloads import BATCH_SIZE, WORKLOADS


def make_dataset(strategy, examples, global_batch_size: int):
    """Each pipeline's share of `examples`, for ever: the timed steps are not a multiple of an epoch."""

    def dataset_fn(context):
        dataset = tf.data.Dataset.from_tensor_slices(examples).shuffle(len(examples[1]))
        dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        return dataset.repeat().batch(context.get_per_replica_batch_size(global_batch_size))

    return strategy.distribute_datasets_from_function(dataset_fn)


def make_train_step(strategy, model, optimizer, accuracy, global_batch_size: int):
    @tf.function
    def train_step(iterator):
        def step_fn(inputs):
            x, y = inputs
            with tf.GradientTape() as tape:
                predictions = model(x, training=True)
                losses = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")(
                    y, predictions
                )
                loss = tf.nn.compute_average_loss(losses, global_batch_size=global_batch_size)
            gradients = tape.gradient(loss, model.trainable_variables)
            # Keras 3 sums over replicas in here.
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            accuracy.update_state(y, predictions)
            return loss

        losses = strategy.run(step_fn, args=(next(iterator),))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    return train_step


def evaluate(model, examples) -> dict:
    """On this worker alone."""
    x, y = examples
    logits = tf.concat([model(x[i : i + 512], training=False) for i in range(0, len(x), 512)], axis=0)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
    right = tf.equal(tf.argmax(logits, axis=-1, output_type=tf.int32), y)
    return {"loss": float(tf.reduce_mean(losses)), "accuracy": float(tf.reduce_mean(tf.cast(right, tf.float32)))}


def main() -> None:
    arguments = parse_peer_arguments(__doc__)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    data = WORKLOADS[arguments.workload].load()
    tf.keras.utils.set_random_seed(0)
    global_batch_size = BATCH_SIZE * strategy.num_replicas_in_sync
    with strategy.scope():
        model = keras_models.build(arguments.workload, data)
        optimizer = tf.keras.optimizers.Adam(learning_rate=0.001)
        optimizer.build(model.trainable_variables)  # Keras 3 fails if the first compiled step has to
        accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
    iterator = iter(make_dataset(strategy, data.train, global_batch_size))
    train_step = make_train_step(strategy, model, optimizer, accuracy, global_batch_size)

    def train(steps: int) -> float:
        total_loss = 0.0
        for _ in range(steps):
            total_loss += train_step(iterator)
        return float(total_loss) / steps

    train(arguments.quality_steps)  # compiles
    quality = evaluate(model, data.evaluation)
    train(arguments.warm_up_steps)
    before = time.perf_counter()
    loss = train(arguments.steps)
    rate = arguments.steps / (time.perf_counter() - before)
    if strategy.cluster_resolver.task_id == 0:
        versions = {"tensorflow": tf.__version__, "keras": tf.keras.__version__}
        write_result(arguments.result_json, {"steps_per_sec": rate, "train": loss, **quality, "versions": versions})


if __name__ == "__main__":
    main()
