"""Loops of TensorFlow's tutorials and the Model Garden, cut down, each beside the same as a `Trainer`.

  python -m benchmarks.moved [NAME ...] [--replicas=2]

prints for each the lines of code of the loop and of the `Trainer` with its run, without the models and the data, which
both have, and how far the weights of the two are apart after the last step.
"""

from __future__ import annotations

import argparse
import inspect
import tempfile
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

import crankshaft
from crankshaft import Mean, Trainer, gather, make_optimizer, mean, minimize

STEPS, BATCH = 8, 8
layers, optimizers = tf.keras.layers, tf.keras.optimizers
SHOWN = {"progress": "off", "jit": "off"}  # as nothing else runs beside it


def drawn(seed: int) -> dict:
    """The same weights wherever a layer is made."""
    return {"kernel_initializer": tf.keras.initializers.RandomNormal(0.0, 0.3, seed=seed)}


def embedding(rows: int, width: int, seed: int, **arguments):
    initializer = tf.keras.initializers.RandomNormal(0.0, 0.3, seed=seed)
    return layers.Embedding(rows, width, embeddings_initializer=initializer, **arguments)


def batches(*arrays) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def integers(seed: int, most: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, most, shape).astype("int32")


# --- tensorflow/docs: tutorials/generative/pix2pix


def pix2pix_models():
    image, target = tf.keras.Input([8, 8, 3]), tf.keras.Input([8, 8, 3])
    x = layers.Conv2D(6, 4, strides=2, padding="same", activation="relu", **drawn(0))(image)
    made = layers.Conv2DTranspose(3, 4, strides=2, padding="same", activation="tanh", **drawn(1))(x)
    y = layers.Conv2D(6, 4, strides=2, padding="same", **drawn(2))(layers.Concatenate()([image, target]))
    patches = layers.Conv2D(1, 2, **drawn(3))(layers.LeakyReLU()(y))
    return tf.keras.Model(image, made), tf.keras.Model([image, target], patches)


def pix2pix_data():
    return np.tanh(normal(0, 64, 8, 8, 3)), np.tanh(normal(1, 64, 8, 8, 3))


def pix2pix_loop(folder):
    generator, discriminator = pix2pix_models()
    entropy = tf.keras.losses.BinaryCrossentropy(from_logits=True)
    generator_optimizer, discriminator_optimizer = (optimizers.Adam(2e-3, beta_1=0.5) for _ in range(2))
    checkpoint = tf.train.Checkpoint(
        generator_optimizer=generator_optimizer,
        discriminator_optimizer=discriminator_optimizer,
        generator=generator,
        discriminator=discriminator,
    )
    manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=5)
    checkpoint.restore(manager.latest_checkpoint)

    @tf.function
    def train_step(image, target):
        with tf.GradientTape() as generator_tape, tf.GradientTape() as discriminator_tape:
            made = generator(image, training=True)
            of_real = discriminator([image, target], training=True)
            of_made = discriminator([image, made], training=True)
            adversarial = entropy(tf.ones_like(of_made), of_made)
            generator_loss = adversarial + 100 * tf.reduce_mean(tf.abs(target - made))
            of_all = entropy(tf.ones_like(of_real), of_real) + entropy(tf.zeros_like(of_made), of_made)
        gradients = generator_tape.gradient(generator_loss, generator.trainable_variables)
        generator_optimizer.apply_gradients(zip(gradients, generator.trainable_variables, strict=True))
        gradients = discriminator_tape.gradient(of_all, discriminator.trainable_variables)
        discriminator_optimizer.apply_gradients(zip(gradients, discriminator.trainable_variables, strict=True))
        return generator_loss, of_all

    for step, (image, target) in enumerate(batches(*pix2pix_data()).repeat().take(STEPS)):
        train_step(image, target)
        if (step + 1) % 4 == 0:
            manager.save()
    return generator, discriminator


class Pix2Pix(Trainer):
    def build(self):
        self.generator, self.discriminator = pix2pix_models()
        self.optimizer, self.discriminator_optimizer = (
            make_optimizer(self, model.trainable_variables, optimizers.Adam(2e-3, beta_1=0.5))
            for model in (self.generator, self.discriminator)
        )

    def losses(self, batch):
        made = self.generator(batch[0], training=True)
        of_real, of_made = (self.discriminator([batch[0], each], training=True) for each in (batch[1], made))
        entropy = tf.nn.sigmoid_cross_entropy_with_logits
        of_all = entropy(tf.ones_like(of_real), of_real) + entropy(tf.zeros_like(of_made), of_made)
        adversarial = tf.reduce_mean(entropy(tf.ones_like(of_made), of_made), [1, 2, 3])
        loss = adversarial + 100 * tf.reduce_mean(tf.abs(batch[1] - made), [1, 2, 3])
        return {"loss": mean(loss), "discriminator_loss": mean(tf.reduce_mean(of_all, [1, 2, 3]))}

    def train_step(self, batch):
        losses = {"loss": self.optimizer, "discriminator_loss": self.discriminator_optimizer}
        return minimize(self, batch, self.losses, losses)


def pix2pix(folder, **flags):
    data = pix2pix_data(), None
    return crankshaft.run(Pix2Pix, data=data, run_dir=folder, checkpoint_every_steps=4, **flags)


# --- the Model Garden's official/nlp: BERT's masked words, by LAMB


def bert_model():
    inputs = tf.keras.Input([10], dtype="int32")
    x = embedding(50, 16, 0)(inputs)
    for block in range(2):
        # A key's bias has a gradient of rounding errors alone, which LAMB makes as long as others.
        attention = layers.MultiHeadAttention(2, 8, use_bias=False, **drawn(2 + block))
        x = layers.LayerNormalization(name=f"attended_{block}")(x + attention(x, x))
        hidden = layers.Dense(32, "gelu", **drawn(4 + block))(x)
        x = layers.LayerNormalization(name=f"normalized_{block}")(x + layers.Dense(16, **drawn(6 + block))(hidden))
    return tf.keras.Model(inputs, layers.Dense(50, **drawn(8))(x))


def bert_data():
    words, is_masked = integers(0, 49, 64, 10), integers(1, 4, 64, 10) == 0
    return np.where(is_masked, 49, words), (words, is_masked.astype("float32"))


def bert_optimizer():
    rate = optimizers.schedules.PolynomialDecay(0.003, STEPS, end_learning_rate=0.0)
    optimizer = optimizers.Lamb(rate, weight_decay=0.01, epsilon=1e-6)
    optimizer.exclude_from_weight_decay(var_names=["gamma", "beta", "bias"])
    return optimizer


def bert_loop(folder):
    model, optimizer = bert_model(), bert_optimizer()
    optimizer.build(model.trainable_variables)
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(model=model, optimizer=optimizer), folder, max_to_keep=5)
    manager.checkpoint.restore(manager.latest_checkpoint)

    @tf.function
    def train_step(words, labels):
        words_said, is_masked = labels
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(words_said, model(words, training=True))
            loss = tf.reduce_sum(losses * is_masked) / tf.reduce_sum(is_masked)
        gradients = map(tf.convert_to_tensor, tape.gradient(loss, model.trainable_variables))  # rows' norm is another
        gradients, _ = tf.clip_by_global_norm([*gradients], 1.0)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    for step, (words, labels) in enumerate(batches(*bert_data()).repeat().take(STEPS)):
        train_step(words, labels)
        if (step + 1) % 4 == 0:
            manager.save()
    return (model,)


class Bert(Trainer):
    def build_model(self):
        return bert_model()

    def build_optimizer(self):
        return bert_optimizer()

    def loss(self, outputs, batch):
        words, is_masked = batch[1]
        return mean(tf.nn.sparse_softmax_cross_entropy_with_logits(words, outputs), weights=is_masked)


def bert(folder, **flags):
    flags = {"clip_norm": 1.0, "run_dir": folder, "checkpoint_every_steps": 4, **flags}
    return crankshaft.run(Bert, data=(bert_data(), None), **flags)


# --- tensorflow/docs: tutorials/text/word2vec


class Word2Vec(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.target, self.context = embedding(40, 8, 0), embedding(40, 8, 1)
        for each in (self.target, self.context):
            each.build(None)

    def call(self, pair):
        target, context = pair
        return tf.einsum("be,bce->bc", self.target(target), self.context(context))


def word2vec_data():
    """A word, and four of which the first is near it."""
    return (integers(0, 40, 64), integers(1, 40, 64, 4)), np.eye(4, dtype="float32")[np.zeros(64, int)]


def word2vec_loop(folder):
    model, optimizer = Word2Vec(), optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(model=model, optimizer=optimizer), folder, max_to_keep=5)
    manager.checkpoint.restore(manager.latest_checkpoint)

    @tf.function
    def train_step(pair, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels, model(pair)))
        # Of slices Keras's Adam squares each by itself, where several are of one row.
        gradients = map(tf.convert_to_tensor, tape.gradient(loss, model.trainable_variables))
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    for step, (pair, labels) in enumerate(batches(*word2vec_data()).repeat().take(STEPS)):
        train_step(pair, labels)
        if (step + 1) % 4 == 0:
            manager.save()
    return (model,)


class SkipGram(Trainer):
    def build_model(self):
        return Word2Vec()

    def build_optimizer(self):
        return optimizers.Adam(0.01)

    def loss(self, outputs, batch):
        return mean(tf.nn.softmax_cross_entropy_with_logits(batch[1], outputs))


def word2vec(folder, **flags):
    return crankshaft.run(SkipGram, data=(word2vec_data(), None), run_dir=folder, checkpoint_every_steps=4, **flags)


# --- tensorflow/docs: tutorials/generative/..., WGAN-GP: a new batch for each update of the critic


def wgan_models():
    generator = tf.keras.Sequential(
        [layers.Input([3]), layers.Dense(8, "relu", **drawn(0)), layers.Dense(2, **drawn(1))]
    )
    critic = tf.keras.Sequential([layers.Input([2]), layers.Dense(8, "tanh", **drawn(2)), layers.Dense(1, **drawn(3))])
    return generator, critic


def wgan_data():
    """Real examples, and the noise and the shares, so that both programs draw the same."""
    return {"real": normal(0, 64, 3, 2), "noise": normal(1, 64, 3, 3), "share": abs(normal(2, 64, 3, 1)) % 1}


def wgan_loop(folder):
    generator, critic = wgan_models()
    generator_optimizer, critic_optimizer = (optimizers.Adam(0.002, 0.0, 0.9) for _ in range(2))

    @tf.function
    def critic_step(real, noise, share):
        with tf.GradientTape() as tape:
            made = generator(noise, training=True)
            between = share * real + (1 - share) * made
            with tf.GradientTape() as inner:
                inner.watch(between)
                heights = critic(between, training=True)
            slopes = tf.norm(inner.gradient(heights, between), axis=1)
            loss = tf.reduce_mean(critic(made) - critic(real)) + 10 * tf.reduce_mean(tf.square(slopes - 1))
        gradients = tape.gradient(loss, critic.trainable_variables)
        critic_optimizer.apply_gradients(zip(gradients, critic.trainable_variables, strict=True))

    @tf.function
    def generator_step(noise):
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(critic(generator(noise, training=True)))
        gradients = tape.gradient(loss, generator.trainable_variables)
        generator_optimizer.apply_gradients(zip(gradients, generator.trainable_variables, strict=True))

    checkpoint = tf.train.Checkpoint(
        generator=generator, critic=critic, first=generator_optimizer, second=critic_optimizer
    )
    manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=5)
    checkpoint.restore(manager.latest_checkpoint)
    for step, (batch,) in enumerate(batches(wgan_data()).repeat().take(STEPS)):
        for update in range(3):
            critic_step(*(batch[name][:, update] for name in ("real", "noise", "share")))
        generator_step(batch["noise"][:, 0])
        if (step + 1) % 4 == 0:
            manager.save()
    return generator, critic


class Wgan(Trainer):
    def build(self):
        self.generator, self.critic = wgan_models()
        self.optimizer, self.critic_optimizer = (
            make_optimizer(self, model.trainable_variables, optimizers.Adam(0.002, 0.0, 0.9))
            for model in (self.generator, self.critic)
        )

    def critic_losses(self, batch):
        made = self.generator(batch["noise"], training=True)
        between = batch["share"] * batch["real"] + (1 - batch["share"]) * made
        with tf.GradientTape() as tape:
            tape.watch(between)
            heights = self.critic(between, training=True)
        slopes = tf.norm(tape.gradient(heights, between), axis=1)
        losses = (self.critic(made) - self.critic(batch["real"]))[:, 0] + 10 * tf.square(slopes - 1)
        return {"critic_loss": mean(losses)}

    def losses(self, batch):
        return {"loss": mean(-self.critic(self.generator(batch["noise"], training=True))[:, 0])}

    def train_step(self, batch):
        for update in range(3):
            part = {name: values[:, update] for name, values in batch.items()}
            metrics = minimize(self, part, self.critic_losses, {"critic_loss": self.critic_optimizer})
        part = {name: values[:, 0] for name, values in batch.items()}
        return {**metrics, **minimize(self, part, self.losses, {"loss": self.optimizer})}


def wgan(folder, **flags):
    return crankshaft.run(Wgan, data=((wgan_data(),), None), run_dir=folder, checkpoint_every_steps=4, **flags)


# --- the Model Garden's official/vision: RetinaNet, whose losses are over the positive anchors of the global batch


def retinanet_model():
    image = tf.keras.Input([8, 8, 3])
    x = layers.Conv2D(8, 3, strides=2, padding="same", activation="relu", **drawn(0))(image)
    heads = [layers.Conv2D(width, 3, padding="same", **drawn(width))(x) for width in (3, 4)]
    return tf.keras.Model(image, [layers.Reshape([16, 3])(heads[0]), layers.Reshape([16, 4])(heads[1])])


def retinanet_data():
    classes = np.where(integers(1, 5, 64, 16) == 0, integers(2, 3, 64, 16), -1).astype("int32")
    return normal(0, 64, 8, 8, 3), {"classes": classes, "boxes": normal(3, 64, 16, 4)}


def focal(labels, logits):
    entropy = tf.nn.sigmoid_cross_entropy_with_logits(labels, logits)
    wrong = tf.where(labels > 0, 1 - tf.sigmoid(logits), tf.sigmoid(logits))
    return tf.where(labels > 0, 0.25, 0.75) * wrong**2 * entropy


def retinanet_loop(folder):
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        model, optimizer = retinanet_model(), optimizers.SGD(0.05, momentum=0.9)
        optimizer.build(model.trainable_variables)
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(model=model, optimizer=optimizer), folder, max_to_keep=5)
    manager.checkpoint.restore(manager.latest_checkpoint)

    def train_step(image, labels):
        context = tf.distribute.get_replica_context()
        is_positive = tf.cast(labels["classes"] >= 0, tf.float32)
        positives = context.all_reduce("sum", tf.reduce_sum(is_positive))
        with tf.GradientTape() as tape:
            classes, boxes = model(image, training=True)
            class_loss = tf.reduce_sum(focal(tf.one_hot(labels["classes"], 3), classes)) / positives
            distance = tf.reduce_sum(tf.abs(boxes - labels["boxes"]), -1)
            loss = class_loss + 0.5 * tf.reduce_sum(distance * is_positive) / positives
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def distributed_train_step(image, labels):
        return strategy.reduce("SUM", strategy.run(train_step, args=(image, labels)), axis=None)

    data = strategy.experimental_distribute_dataset(batches(*retinanet_data()).repeat())
    for step, (image, labels) in enumerate(data):
        distributed_train_step(image, labels)
        if (step + 1) % 4 == 0:
            manager.save()
        if step + 1 == STEPS:
            break
    return (model,)


class RetinaNet(Trainer):
    def build_model(self):
        return retinanet_model()

    def build_optimizer(self):
        return optimizers.SGD(0.05, momentum=0.9)

    def loss(self, outputs, batch):
        (classes, boxes), labels = outputs, batch[1]
        is_positive = tf.cast(labels["classes"] >= 0, tf.float32)
        class_loss = tf.reduce_sum(focal(tf.one_hot(labels["classes"], 3), classes))
        distance = tf.reduce_sum(tf.abs(boxes - labels["boxes"]), -1)
        return Mean(class_loss + 0.5 * tf.reduce_sum(distance * is_positive), tf.reduce_sum(is_positive))


def retinanet(folder, **flags):
    return crankshaft.run(RetinaNet, data=(retinanet_data(), None), run_dir=folder, checkpoint_every_steps=4, **flags)


# --- TensorFlow Recommenders: two towers, each example's candidates those of the whole batch


def tower_models():
    return tuple(tf.keras.Sequential([embedding(30, 8, n), layers.Dense(8, **drawn(2 + n))]) for n in range(2))


def towers_data():
    return {"user": integers(0, 30, 64), "item": integers(1, 30, 64)}


def towers_loop(folder):
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        users, items = tower_models()
        for tower in (users, items):
            tower.build([None])
        variables, optimizer = [*users.trainable_variables, *items.trainable_variables], optimizers.SGD(0.5)
        optimizer.build(variables)
    checkpoint = tf.train.Checkpoint(users=users, items=items, optimizer=optimizer)
    manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=5)
    checkpoint.restore(manager.latest_checkpoint)

    def train_step(batch):
        context = tf.distribute.get_replica_context()
        with tf.GradientTape() as tape:
            user, item = users(batch["user"], training=True), items(batch["item"], training=True)
            all_items = context.all_gather(item, axis=0)
            first = context.replica_id_in_sync_group * tf.shape(item)[0]
            own = first + tf.range(tf.shape(item)[0])
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(own, tf.matmul(user, all_items, transpose_b=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    @tf.function
    def distributed_train_step(batch):
        return strategy.reduce("SUM", strategy.run(train_step, args=(batch,)), axis=None)

    for step, (batch,) in enumerate(strategy.experimental_distribute_dataset(batches(towers_data()).repeat())):
        distributed_train_step(batch)
        if (step + 1) % 4 == 0:
            manager.save()
        if step + 1 == STEPS:
            break
    return users, items


class Towers(Trainer):
    def build(self):
        self.users, self.items = tower_models()
        for tower in (self.users, self.items):
            tower.build([None])
        self.optimizer = make_optimizer(self, self.trainable_variables, optimizers.SGD(0.5))

    @property
    def trainable_variables(self):
        return [*self.users.trainable_variables, *self.items.trainable_variables]

    def forward(self, features, training):
        return self.users(features["user"], training=training), self.items(features["item"], training=training)

    def loss(self, outputs, batch):
        all_items, first = gather(self, outputs[1])
        own = first + tf.range(tf.shape(outputs[1])[0])
        similar = tf.matmul(outputs[0], all_items, transpose_b=True)
        return mean(tf.nn.sparse_softmax_cross_entropy_with_logits(own, similar))


def towers(folder, **flags):
    return crankshaft.run(Towers, data=((towers_data(),), None), run_dir=folder, checkpoint_every_steps=4, **flags)


# --- the Model Garden's official/recommendation: DLRM


def dlrm_model():
    inputs = {"numbers": tf.keras.Input([4], name="numbers"), "ids": tf.keras.Input([3], dtype="int32", name="ids")}
    vectors = [embedding(20, 4, n)(inputs["ids"][:, n]) for n in range(3)]
    vectors.append(layers.Dense(4, "relu", **drawn(3))(inputs["numbers"]))
    stacked = tf.keras.ops.stack(vectors, 1)
    products = tf.keras.ops.matmul(stacked, tf.keras.ops.transpose(stacked, [0, 2, 1]))
    top = layers.Dense(8, "relu", **drawn(4))(layers.Concatenate()([layers.Flatten()(products), vectors[-1]]))
    return tf.keras.Model(inputs, layers.Dense(1, **drawn(5))(top))


def dlrm_data():
    return {"numbers": normal(0, 64, 4), "ids": integers(1, 20, 64, 3)}, integers(2, 2, 64).astype("float32")


def dlrm_loop(folder):
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        model, optimizer = dlrm_model(), optimizers.Adagrad(0.1)
        optimizer.build(model.trainable_variables)
        auc = tf.keras.metrics.Mean()
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(model=model, optimizer=optimizer), folder, max_to_keep=5)
    manager.checkpoint.restore(manager.latest_checkpoint)

    def train_step(features, clicked):
        with tf.GradientTape() as tape:
            logits = model(features, training=True)[:, 0]
            losses = tf.nn.sigmoid_cross_entropy_with_logits(clicked, logits)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH)
        gradients = map(tf.convert_to_tensor, tape.gradient(loss, model.trainable_variables))
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        auc.update_state(losses)

    @tf.function
    def distributed_train_step(features, clicked):
        strategy.run(train_step, args=(features, clicked))

    data = strategy.experimental_distribute_dataset(batches(*dlrm_data()).repeat())
    for step, (features, clicked) in enumerate(data):
        distributed_train_step(features, clicked)
        if (step + 1) % 4 == 0:
            manager.save()
        if step + 1 == STEPS:
            break
    return (model,)


class Dlrm(Trainer):
    def build_model(self):
        return dlrm_model()

    def build_optimizer(self):
        return optimizers.Adagrad(0.1)

    def loss(self, outputs, batch):
        return mean(tf.nn.sigmoid_cross_entropy_with_logits(batch[1], outputs[:, 0]))


def dlrm(folder, **flags):
    return crankshaft.run(Dlrm, data=(dlrm_data(), None), run_dir=folder, checkpoint_every_steps=4, **flags)


# --- the Model Garden's YOLO: micro-batches, and a moving average of the weights


def yolo_model():
    image = tf.keras.Input([8, 8, 3])
    x = layers.Conv2D(6, 3, strides=2, padding="same", activation="relu", **drawn(0))(image)
    return tf.keras.Model(image, layers.Conv2D(5, 3, strides=2, padding="same", **drawn(1))(x))


def yolo_data():
    return normal(0, 64, 8, 8, 3), normal(1, 64, 2, 2, 5)


def yolo_loop(folder):
    model, optimizer = yolo_model(), optimizers.SGD(0.05, momentum=0.9)
    optimizer.build(model.trainable_variables)
    averages = [tf.Variable(variable, trainable=False) for variable in model.trainable_variables]
    sums = [tf.Variable(tf.zeros(variable.shape), trainable=False) for variable in model.trainable_variables]
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, averages=averages)
    manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=5)
    checkpoint.restore(manager.latest_checkpoint)

    @tf.function
    def accumulate(image, boxes):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(image, training=True) - boxes)) / 2
        for total, gradient in zip(sums, tape.gradient(loss, model.trainable_variables), strict=True):
            total.assign_add(gradient)

    @tf.function
    def update():
        gradients, _ = tf.clip_by_global_norm([tf.identity(total) for total in sums], 0.5)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        for total, average, variable in zip(sums, averages, model.trainable_variables, strict=True):
            total.assign(tf.zeros(total.shape))
            average.assign(0.9 * average + 0.1 * variable)

    for step, (image, boxes) in enumerate(batches(*yolo_data()).repeat().take(STEPS)):
        for half in (slice(0, BATCH // 2), slice(BATCH // 2, BATCH)):
            accumulate(image[half], boxes[half])
        update()
        if (step + 1) % 4 == 0:
            manager.save()
    for average, variable in zip(averages, model.trainable_variables, strict=True):
        variable.assign(average)
    return (model,)


class Yolo(Trainer):
    def build_model(self):
        return yolo_model()

    def build_optimizer(self):
        return optimizers.SGD(0.05, momentum=0.9)

    def loss(self, outputs, batch):
        return mean(tf.reduce_mean(tf.square(outputs - batch[1]), [1, 2, 3]))


def yolo(folder, **flags):
    flags = {"accumulate_steps": 2, "clip_norm": 0.5, "ema_decay": 0.9, "checkpoint_every_steps": 4, **flags}
    flags["optimizer_arg"] = {"ema_warmup": False}
    return crankshaft.run(Yolo, data=(yolo_data(), None), run_dir=folder, **flags)


# --- tensorflow/docs: tutorials/text/nmt_with_attention, whose loss is a mean over words


def translation_model():
    source, target = (tf.keras.Input([6], dtype="int32", name=name) for name in ("source", "target"))
    words = embedding(20, 8, 0, mask_zero=True)
    gru = {"return_sequences": True, "recurrent_initializer": tf.keras.initializers.Orthogonal(seed=0)}
    read, state = layers.GRU(8, return_state=True, **gru, **drawn(1))(words(source))
    said = layers.GRU(8, **gru, **drawn(2))(words(target), initial_state=state)
    said = layers.Concatenate()([said, layers.Attention()([said, read])])
    return tf.keras.Model({"source": source, "target": target}, layers.Dense(20, **drawn(3))(said))


def translation_data():
    lengths = integers(3, 4, 64, 1) + 3
    source, target, said = (np.where(np.arange(6) < lengths, integers(n, 19, 64, 6) + 1, 0) for n in range(3))
    return {"source": source.astype("int32"), "target": target.astype("int32")}, said.astype("int32")


def translation_loop(folder):
    model, optimizer = translation_model(), optimizers.Adam(0.01, clipnorm=1.0)
    optimizer.build(model.trainable_variables)
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(model=model, optimizer=optimizer), folder, max_to_keep=5)
    manager.checkpoint.restore(manager.latest_checkpoint)

    @tf.function
    def train_step(sentences, said):
        with tf.GradientTape() as tape:
            logits = model(sentences, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(said, logits)
            is_word = tf.cast(said != 0, tf.float32)
            loss = tf.reduce_sum(losses * is_word) / tf.reduce_sum(is_word)
        gradients = map(tf.convert_to_tensor, tape.gradient(loss, model.trainable_variables))
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    for step, (sentences, said) in enumerate(batches(*translation_data()).repeat().take(STEPS)):
        train_step(sentences, said)
        if (step + 1) % 4 == 0:
            manager.save()
    return (model,)


class Translation(Trainer):
    def build_model(self):
        return translation_model()

    def build_optimizer(self):
        return optimizers.Adam(0.01)

    def loss(self, outputs, batch):
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], outputs)
        return mean(losses, weights=batch[1] != 0)


def translation(folder, **flags):
    flags = {"optimizer_arg": {"clipnorm": 1.0}, "run_dir": folder, "checkpoint_every_steps": 4, **flags}
    return crankshaft.run(Translation, data=(translation_data(), None), **flags)


# --- tensorflow/docs: tutorials/distribute/multi_worker_with_ctl


def digits_model():
    net = [layers.Conv2D(4, 3, activation="relu", **drawn(0)), layers.Flatten(), layers.Dense(10, **drawn(1))]
    return tf.keras.Sequential([layers.Input([8, 8, 1]), *net])


def digits_data():
    return normal(0, 64, 8, 8, 1), integers(1, 10, 64)


def digits_loop(folder):
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        model, optimizer = digits_model(), optimizers.RMSprop(0.01)
        optimizer.build(model.trainable_variables)
        accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
        epoch, step_in_epoch = tf.Variable(0), tf.Variable(0)

    def dataset_fn(context):
        data = tf.data.Dataset.from_tensor_slices(digits_data()).repeat()
        data = data.shard(context.num_input_pipelines, context.input_pipeline_id)
        return data.batch(context.get_per_replica_batch_size(BATCH))

    iterator = iter(strategy.distribute_datasets_from_function(dataset_fn))
    checkpoint = tf.train.Checkpoint(model=model, epoch=epoch, step_in_epoch=step_in_epoch, optimizer=optimizer)
    manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=1)
    checkpoint.restore(manager.latest_checkpoint)

    @tf.function
    def train_step(iterator):
        def step(batch):
            image, label = batch
            with tf.GradientTape() as tape:
                logits = model(image, training=True)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(label, logits)
                loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            accuracy.update_state(label, logits)
            return loss

        return strategy.reduce("SUM", strategy.run(step, args=(next(iterator),)), axis=None)

    while epoch.numpy() < 2:
        total = 0.0
        while step_in_epoch.numpy() < STEPS // 2:
            total += train_step(iterator)
            step_in_epoch.assign_add(1)
        print(
            f"epoch {int(epoch.numpy())}: accuracy {float(accuracy.result()):.3f}, loss {float(total) * 2 / STEPS:.3f}"
        )
        accuracy.reset_state()
        epoch.assign_add(1)
        step_in_epoch.assign(0)
        manager.save()
    return (model,)


class Digits(Trainer):
    def build_model(self):
        return digits_model()

    def build_optimizer(self):
        return optimizers.RMSprop(0.01)

    def loss(self, outputs, batch):
        return mean(tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], outputs))

    def metrics(self, outputs, batch):
        return {"accuracy": mean(tf.argmax(outputs, 1, tf.int32) == batch[1], direction="max")}


def digits(folder, **flags):
    return crankshaft.run(Digits, data=(digits_data(), None), run_dir=folder, checkpoint_every_steps=4, **flags)


class Moved(NamedTuple):
    """A loop, and what takes its place.

    Attributes:
      source: where the loop is from.
      loop: trains, writing checkpoints to a folder; returns its models.
      run: the same by Crankshaft.
      trainer: the class that it trains.
      models: the names of its models, in the loop's order; () for its only one.
    """

    source: str
    loop: Callable[[str], Sequence[tf.keras.Model]]
    run: Callable[..., crankshaft.RunResult]
    trainer: type[Trainer]
    models: tuple[str, ...] = ()

    @property
    def lines(self) -> tuple[int, int]:
        """The lines of code before and after."""
        return _lines(self.loop), _lines(self.trainer, self.run)


PROGRAMS = {
    "pix2pix": Moved("tutorial: pix2pix", pix2pix_loop, pix2pix, Pix2Pix, ("generator", "discriminator")),
    "wgan": Moved("WGAN-GP, a new batch for each critic update", wgan_loop, wgan, Wgan, ("generator", "critic")),
    "bert": Moved("Model Garden: BERT with LAMB", bert_loop, bert, Bert),
    "word2vec": Moved("tutorial: word2vec", word2vec_loop, word2vec, SkipGram),
    "retinanet": Moved("Model Garden: RetinaNet", retinanet_loop, retinanet, RetinaNet),
    "towers": Moved("Recommenders: two towers", towers_loop, towers, Towers, ("users", "items")),
    "dlrm": Moved("Model Garden: DLRM", dlrm_loop, dlrm, Dlrm),
    "yolo": Moved("Model Garden: YOLO, micro-batches and averaged weights", yolo_loop, yolo, Yolo),
    "translation": Moved("tutorial: translation with attention", translation_loop, translation, Translation),
    "digits": Moved("tutorial: several workers", digits_loop, digits, Digits),
}


def _lines(*objects: Callable) -> int:
    """Counts the lines of code of functions and classes, without comments and docstrings."""
    lines = [line.strip() for each in objects for line in inspect.getsource(each).splitlines()]
    return sum(bool(line) and not line.startswith(("#", '"""')) for line in lines)


def difference(moved: Moved, **flags) -> float:
    """Trains both ways, and returns the largest difference of a weight."""
    with tempfile.TemporaryDirectory() as folder:  # the run is first, as it may split the CPU
        flags = {**SHOWN, "train_steps": STEPS, "global_batch_size": BATCH, "shuffle_buffer": 0, **flags}
        done = moved.run(f"{folder}/run", **flags)
        models = [done.models[name] for name in moved.models] or [done.model]  # this with its average
        after = [weight for model in models for weight in model.get_weights()]
        before = [weight for model in moved.loop(f"{folder}/loop") for weight in model.get_weights()]
    return max(float(np.abs(a - b).max()) for a, b in zip(after, before, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[*PROGRAMS])
    parser.add_argument("--replicas", type=int, default=1)
    arguments = parser.parse_args()
    several = {"strategy": "mirrored", "num_virtual_devices": arguments.replicas} if arguments.replicas > 1 else {}
    for name in arguments.names:
        before, after = PROGRAMS[name].lines
        apart = difference(PROGRAMS[name], **several)
        print(f"{PROGRAMS[name].source}: {before} lines, {after} with a Trainer; weights {apart:.1e} apart", flush=True)


if __name__ == "__main__":
    main()
