"""A task of a plain loop on parameter servers, in the way of TensorFlow's own tutorial. Coordinator, worker or server.

"Parameter server training with ParameterServerStrategy",
https://www.tensorflow.org/tutorials/distribute/parameter_server_training: a Keras optimizer, one step a closure, a
shuffled dataset for each worker, an accuracy metric in the step, a join at the end of each epoch. `TF_CONFIG` says
which task this is, and `GRPC_FAIL_FAST=use_caller` has to be set.
"""

from __future__ import annotations

import os
import time

import numpy as np
import tensorflow as tf

from crankshaft.input.synthetic_data.planted import auc
from crankshaft.launch.cluster.rendezvous import answers

from .. import keras_models
from ..race import parse_peer_arguments, write_result
from ..workloads import BATCH_SIZE, WORKLOADS

POLL_SECONDS = 0.2
SHUFFLED = 60_032


class Task:
    """What a workload's loop is made of, in the strategy's scope: the model, its loss and what it predicts."""

    def __init__(self, name: str, data):
        self.clicks = WORKLOADS[name].metric == "auc"
        self.data = data
        self.model = keras_models.build(name, data)
        if self.clicks:
            self.losses = tf.keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")
        else:
            self.losses = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        self.optimizer = tf.keras.optimizers.Adam(learning_rate=0.001)
        self.optimizer.build(self.model.trainable_variables)  # Keras 3 fails if the first compiled step has to
        self.accuracy = tf.keras.metrics.Accuracy()

    @property
    def examples(self):
        """Features and labels, of clicks [examples, 1] as the outputs are."""
        features, labels = self.data.train
        return features, labels[:, None] if self.clicks else labels

    def predictions(self, outputs):
        return tf.cast(outputs > 0, tf.int64) if self.clicks else tf.argmax(outputs, axis=-1)

    def evaluate(self) -> dict:
        """On the coordinator, which the tutorial calls direct evaluation."""
        x, y = self.data.evaluation
        batches = tf.data.Dataset.from_tensor_slices(x).batch(512)
        outputs = np.concatenate([self.model(batch, training=False) for batch in batches])
        loss = float(np.mean(self.losses(y[:, None] if self.clicks else y, outputs)))
        if self.clicks:
            return {"loss": loss, "auc": auc(y, outputs[:, 0])}
        return {"loss": loss, "accuracy": float(np.mean(outputs.argmax(-1) == y))}


def make_iterator(strategy, coordinator, examples):
    """Each worker's, without end."""

    def dataset_fn(_):
        return tf.data.Dataset.from_tensor_slices(examples).shuffle(SHUFFLED).batch(BATCH_SIZE).repeat()

    @tf.function
    def per_worker_dataset_fn():
        return strategy.distribute_datasets_from_function(dataset_fn)

    return iter(coordinator.create_per_worker_dataset(per_worker_dataset_fn))


def make_step(strategy, task: Task):
    @tf.function
    def step_fn(iterator):
        def replica_fn(x, y):
            with tf.GradientTape() as tape:
                outputs = task.model(x, training=True)
                loss = tf.nn.compute_average_loss(task.losses(y, outputs))
            gradients = tape.gradient(loss, task.model.trainable_variables)
            task.optimizer.apply_gradients(zip(gradients, task.model.trainable_variables, strict=True))
            task.accuracy.update_state(y, task.predictions(outputs))
            return loss

        losses = strategy.run(replica_fn, args=next(iterator))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    return step_fn


def coordinate(resolver, arguments) -> None:
    addresses = [address for job in ("worker", "ps") for address in resolver.cluster_spec().job_tasks(job)]
    while not all(map(answers, addresses)):  # a call to a server that is not there yet would fail at once
        time.sleep(POLL_SECONDS)
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    data = WORKLOADS[arguments.workload].load()
    tf.keras.utils.set_random_seed(0)
    with strategy.scope():
        task = Task(arguments.workload, data)
    iterator = make_iterator(strategy, coordinator, task.examples)
    step_fn = make_step(strategy, task)
    steps_per_epoch = len(data.train[1]) // BATCH_SIZE

    def train(steps: int) -> float:
        for first in range(0, steps, steps_per_epoch):
            task.accuracy.reset_state()
            for _ in range(min(steps_per_epoch, steps - first)):
                loss = coordinator.schedule(step_fn, args=(iterator,))
            coordinator.join()
        return float(loss.fetch())

    train(arguments.quality_steps)  # compiles
    quality = task.evaluate()
    train(arguments.warm_up_steps)
    before = time.perf_counter()
    loss = train(arguments.steps)
    rate = arguments.steps / (time.perf_counter() - before)
    versions = {"tensorflow": tf.__version__, "keras": tf.keras.__version__}
    write_result(arguments.result_json, {"steps_per_sec": rate, "train": loss, **quality, "versions": versions})


def serve(resolver) -> None:
    """Until it is ended, or nobody is left who would do that: `join`, which the tutorial has here, goes on for ever."""
    parent = os.getppid()
    server = tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol=resolver.rpc_layer or "grpc",
    )
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    del server
    os._exit(1)


def main() -> None:
    arguments = parse_peer_arguments(__doc__)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        serve(resolver)
    else:
        coordinate(resolver, arguments)


if __name__ == "__main__":
    main()
