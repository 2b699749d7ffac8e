"""A task of a plain loop in the way of TensorFlow's own tutorials: a worker, or a coordinator, worker or server.

"Custom training loop with Keras and MultiWorkerMirroredStrategy",
https://www.tensorflow.org/tutorials/distribute/multi_worker_with_ctl: one step a call, each input pipeline's share of a
shuffled dataset. "Parameter server training with ParameterServerStrategy",
https://www.tensorflow.org/tutorials/distribute/parameter_server_training: one step a closure, a shuffled dataset for
each worker, a join at the end of each epoch. Both have a Keras optimizer and an accuracy metric in the step.
`TF_CONFIG` says which task this is; with servers `GRPC_FAIL_FAST=use_caller` has to be set.
"""

from __future__ import annotations

import os
import time

import numpy as np
import tensorflow as tf

from crankshaft.input.synthetic_data.planted import auc
from crankshaft.parts.clusters.rendezvous import answers

from .. import keras_models
from ..peer import TIMED, parse_arguments, timed, write_result
from ..workloads import WORKLOADS

POLL_SECONDS = 0.2


class Task:
    """What a workload's loop is made of, in the strategy's scope: the model, its loss, its optimizer and its metric."""

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

    def make_step(self, strategy, global_batch_size: int):
        @tf.function
        def step(iterator):
            def replica_step(inputs):
                x, y = inputs
                with tf.GradientTape() as tape:
                    outputs = self.model(x, training=True)
                    loss = tf.nn.compute_average_loss(self.losses(y, outputs), global_batch_size=global_batch_size)
                gradients = tape.gradient(loss, self.model.trainable_variables)
                # Keras 3 sums over replicas in here.
                self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
                predicted = tf.cast(outputs > 0, tf.int64) if self.clicks else tf.argmax(outputs, axis=-1)
                self.accuracy.update_state(y, predicted)
                return loss

            losses = strategy.run(replica_step, args=(next(iterator),))
            return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

        return step

    def evaluate(self) -> dict:
        """On this task alone, which the tutorial calls direct evaluation."""
        x, y = self.data.evaluation
        batches = tf.data.Dataset.from_tensor_slices(x).batch(512)
        outputs = np.concatenate([self.model(batch, training=False) for batch in batches])
        loss = float(np.mean(self.losses(y[:, None] if self.clicks else y, outputs)))
        if self.clicks:
            return {"loss": loss, "auc": auc(y, outputs[:, 0])}
        return {"loss": loss, "accuracy": float(np.mean(outputs.argmax(-1) == y))}


def train_as_worker(arguments, batch: int) -> None:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    data = WORKLOADS[arguments.workload].load()
    tf.keras.utils.set_random_seed(0)
    with strategy.scope():
        task = Task(arguments.workload, data)
    global_batch_size = batch * strategy.num_replicas_in_sync
    step = task.make_step(strategy, global_batch_size)

    def dataset_fn(context):
        dataset = tf.data.Dataset.from_tensor_slices(task.examples).shuffle(len(data.train[1]))
        dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        return dataset.repeat().batch(context.get_per_replica_batch_size(global_batch_size))

    iterator = iter(strategy.distribute_datasets_from_function(dataset_fn))

    def train(steps: int) -> float:
        total_loss = 0.0
        for _ in range(steps):
            total_loss += step(iterator)
        return float(total_loss) / steps

    is_chief = strategy.cluster_resolver.task_id == 0

    @tf.function
    def chiefs(steps):
        mine = strategy.run(lambda: steps if is_chief else tf.zeros_like(steps))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, mine, axis=None)

    measure(arguments, task, train, global_batch_size, lambda steps: int(chiefs(tf.constant(steps))), is_chief)


def coordinate(resolver, arguments, batch: int) -> None:
    addresses = [address for job in ("worker", "ps") for address in resolver.cluster_spec().job_tasks(job)]
    while not all(map(answers, addresses)):  # a call to a server that is not there yet would fail at once
        time.sleep(POLL_SECONDS)
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    data = WORKLOADS[arguments.workload].load()
    tf.keras.utils.set_random_seed(0)
    with strategy.scope():
        task = Task(arguments.workload, data)
    step = task.make_step(strategy, batch)
    steps_per_epoch = len(data.train[1]) // batch

    def dataset_fn(_):
        examples = tf.data.Dataset.from_tensor_slices(task.examples)
        return examples.shuffle(len(data.train[1])).batch(batch, drop_remainder=True).repeat()

    @tf.function
    def per_worker_dataset_fn():
        return strategy.distribute_datasets_from_function(dataset_fn)

    iterator = iter(coordinator.create_per_worker_dataset(per_worker_dataset_fn))

    def train(steps: int) -> float:
        for first in range(0, steps, steps_per_epoch):
            task.accuracy.reset_state()
            for _ in range(min(steps_per_epoch, steps - first)):
                loss = coordinator.schedule(step, args=(iterator,))
            coordinator.join()
        return float(loss.fetch())

    measure(arguments, task, train, batch)


def measure(arguments, task: Task, train, batch: int, agree=int, is_chief: bool = True) -> None:
    quality = {}
    if arguments.quality_steps:
        train(arguments.quality_steps)
        quality = task.evaluate()
    rate = timed(train, arguments.seconds, agree)
    if is_chief:
        write_result(arguments.result_json, {"steps_per_sec": rate, "examples_per_sec": rate * batch, **quality})


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
    arguments = parse_arguments(__doc__, WORKLOADS, **TIMED)
    batch = WORKLOADS[arguments.workload].batch
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if "ps" not in resolver.cluster_spec().jobs:
        train_as_worker(arguments, batch)
    elif resolver.task_type == "chief":
        coordinate(resolver, arguments, batch)
    else:
        serve(resolver)


if __name__ == "__main__":
    main()
