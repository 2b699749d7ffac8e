"""The loops that recipes replace, in plain TensorFlow: a function for each kind of program, on the recipe's data.

A function's arguments are names of the recipe's program. It trains on one device as the recipe does by default, prints
nothing and saves nothing, and returns what the recipe is compared by: the metrics of its last evaluation, and the
weights. `python -m tests.recipes` prints the lines of both.
"""

import collections

import keras
import numpy as np
import tensorflow as tf


def batches(arrays, size):
    """Returns the batches of arrays in their order."""
    return tf.data.Dataset.from_tensor_slices(arrays).batch(size)


def examples(source):
    """Returns a source's examples as a dataset."""
    specs = tf.nest.map_structure(lambda spec: tf.TensorSpec(spec.shape, spec.dtype), source.element_spec)

    def each():
        for i in range(len(source)):
            features, labels = source.read(np.array([i]))
            first = {name: x[0] for name, x in labels.items()} if isinstance(labels, dict) else labels[0]
            yield features[0], first

    return tf.data.Dataset.from_generator(each, output_signature=specs)


def forecasting(parts, HORIZONS):
    model = keras.Sequential([keras.layers.Dense(32, "relu"), keras.layers.Dense(len(HORIZONS))])
    optimizer = keras.optimizers.Adam(0.005)
    errors = {hours: keras.metrics.RootMeanSquaredError() for hours in HORIZONS}

    @tf.function
    def train_step(past, future):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(past, training=True) - future))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function
    def test_step(past, future):
        outputs = model(past, training=False)
        for i, error in enumerate(errors.values()):
            error.update_state(future[:, i], outputs[:, i])

    for _ in range(5):
        for past, future in batches(parts[0], 50):
            train_step(past, future)
        for error in errors.values():
            error.reset_state()
        for past, future in batches(parts[1], 50):
            test_step(past, future)
    return {f"error_{hours}": float(error.result()) for hours, error in errors.items()}, model.get_weights()


def diffusion(ring, shares):
    dense, generator = keras.layers.Dense, tf.random.Generator.from_seed(0)
    model = keras.Sequential([keras.layers.Input([3]), dense(64, "relu"), dense(64, "relu"), dense(2)])
    optimizer, test_loss = keras.optimizers.Adam(0.003), keras.metrics.Mean()

    def losses(features, training):
        time = tf.random.stateless_uniform([tf.shape(features)[0], 1], generator.make_seeds()[:, 0])
        noise = tf.random.stateless_normal(tf.shape(features), generator.make_seeds()[:, 0])
        of_data, of_noise = shares(time)
        predicted = model(tf.concat([of_data * features + of_noise * noise, time], -1), training=training)
        return tf.reduce_sum(tf.square(predicted - noise), -1)

    @tf.function
    def train_step(features):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(losses(features, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function
    def test_step(features):
        test_loss.update_state(losses(features, training=False))

    for _ in range(60):
        for features in batches(ring[:512], 64):
            train_step(features)
        test_loss.reset_state()
        for features in batches(ring[512:], 128):
            test_step(features)
    return {"loss": float(test_loss.result())}, model.get_weights()


def mean_teacher(data):
    layers = keras.layers
    model = keras.Sequential([layers.Dense(16, "relu"), layers.Dropout(0.2), layers.Dense(2)])
    model.build([None, 4])
    teacher = keras.models.clone_model(model)
    teacher.set_weights(model.get_weights())
    optimizer, test_loss = keras.optimizers.Adam(0.02), keras.metrics.Mean()

    def losses(features, labels, training):
        outputs, targets = model(features, training=training), teacher(features, training=True)
        consistency = tf.reduce_mean(tf.square(outputs - tf.stop_gradient(targets)), -1)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs) + consistency

    @tf.function
    def train_step(features, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(losses(features, labels, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        for average, weight in zip(teacher.variables, model.variables, strict=True):
            if weight.dtype == "float32":  # Dropout has a state too
                average.assign(0.9 * average + 0.1 * weight)

    @tf.function
    def test_step(features, labels):
        test_loss.update_state(losses(features, labels, training=False))

    for _ in range(10):
        for features, labels in batches(data[0], 64):
            train_step(features, labels)
        test_loss.reset_state()
        for features, labels in batches(data[1], 64):
            test_step(features, labels)
    return {"loss": float(test_loss.result())}, model.get_weights() + teacher.get_weights()


def graph_network(graphs, halves):
    layers, ops = keras.layers, keras.ops
    inputs = {name: layers.Input(graphs[name].shape[1:], name=name) for name in graphs}
    state = layers.Dense(16)(inputs["nodes"])
    for _ in range(2):
        messages = ops.matmul(inputs["joined"], state)
        state = layers.Dense(16, "relu")(layers.Concatenate()([state, messages]))
    model = keras.Model(inputs, layers.Dense(1)(ops.einsum("gn,gnf->gf", inputs["real"], state)))
    optimizer, test_loss = keras.optimizers.Adam(0.005), keras.metrics.Mean()

    @tf.function
    def train_step(features, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(features, training=True)[:, 0] - labels))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function
    def test_step(features, labels):
        test_loss.update_state(tf.square(model(features, training=False)[:, 0] - labels))

    for _ in range(20):
        for features, labels in batches(halves[0], 32):
            train_step(features, labels)
        test_loss.reset_state()
        for features, labels in batches(halves[1], 32):
            test_step(features, labels)
    return {"loss": float(test_loss.result())}, model.get_weights()


def multi_task(tasks):
    model = keras.Sequential([keras.layers.Dense(16, "relu"), keras.layers.Dense(2)])
    model.build([None, 4])
    uncertainty = tf.Variable(tf.zeros([2]))
    optimizer = keras.optimizers.Adam(0.001)
    errors = {name: keras.metrics.Mean() for name in ("height", "sum")}

    @tf.function
    def train_step(features, labels):
        with tf.GradientTape() as tape:
            wrong = labels["known"] * tf.square(model(features, training=True) - labels["values"])
            means = tf.math.divide_no_nan(tf.reduce_sum(wrong, 0), tf.reduce_sum(labels["known"], 0))
            loss = tf.reduce_sum(tf.exp(-uncertainty) * means + uncertainty)
        variables = [*model.trainable_variables, uncertainty]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    @tf.function
    def test_step(features, labels):
        wrong = tf.square(model(features, training=False) - labels["values"])
        for i, error in enumerate(errors.values()):
            error.update_state(wrong[:, i], sample_weight=labels["known"][:, i])

    for _ in range(2):
        for features, labels in batches(tasks, 64):
            train_step(features, labels)
        for error in errors.values():
            error.reset_state()
        for features, labels in batches(tasks, 64):
            test_step(features, labels)
    return {name: float(error.result()) for name, error in errors.items()}, model.get_weights()


def physics(inside, ends):
    dense = keras.layers.Dense
    model = keras.Sequential([keras.layers.Input([1]), dense(32, "tanh"), dense(32, "tanh"), dense(1)])
    optimizer, test_loss = keras.optimizers.Adam(0.003), keras.metrics.Mean()

    @tf.function
    def train_step(x, ends, heights):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as outer, tf.GradientTape() as inner:
                outer.watch(x)
                inner.watch(x)
                u = model(x, training=True)
                slope = inner.gradient(u, x)
            wrong = outer.gradient(slope, x) + np.pi**2 * tf.sin(np.pi * x)
            at_ends = tf.square(model(ends, training=True) - heights)
            loss = tf.reduce_mean(tf.square(wrong)) + 10 * tf.reduce_mean(at_ends)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function
    def test_step(x):
        test_loss.update_state(tf.square(model(x, training=False) - tf.sin(np.pi * x)))

    for _ in range(40):
        for x in batches(inside, 128):
            train_step(x, *ends)
        test_loss.reset_state()
        for x in batches(inside, 128):
            test_step(x)
    return {"loss": float(test_loss.result())}, model.get_weights()


def speech(Speech, vocabulary):
    read = keras.layers.Bidirectional(keras.layers.GRU(16, return_sequences=True))
    model = keras.Sequential([read, keras.layers.Dense(vocabulary + 1)])
    optimizer, test_loss = keras.optimizers.Adam(0.01), keras.metrics.Mean()

    def with_lengths(heard, said):
        return heard, said, tf.shape(heard)[0], tf.shape(said)[0]

    def losses(heard, said, frames, symbols, training):
        outputs = model(heard, mask=tf.sequence_mask(frames), training=training)
        of_each = tf.nn.ctc_loss(said, outputs, symbols, frames, logits_time_major=False, blank_index=vocabulary)
        return of_each / tf.cast(symbols, tf.float32)

    @tf.function(reduce_retracing=True)
    def train_step(heard, said, frames, symbols):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(losses(heard, said, frames, symbols, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function(reduce_retracing=True)
    def test_step(heard, said, frames, symbols):
        test_loss.update_state(losses(heard, said, frames, symbols, training=False))

    padded = examples(Speech()).map(with_lengths).padded_batch(64)
    for _ in range(5):
        for batch in padded:
            train_step(*batch)
        test_loss.reset_state()
        for batch in padded:
            test_step(*batch)
    return {"loss": float(test_loss.result())}, model.get_weights()


def detection(Scenes):
    layers = [keras.layers.Conv2D(8, 3, strides=2, activation="relu"), keras.layers.Flatten()]
    model = keras.Sequential([*layers, keras.layers.Dense(4 * 4), keras.layers.Reshape([4, 4])])
    optimizer, test_loss = keras.optimizers.Adam(0.005), keras.metrics.Mean()

    def nearest(images, labels, training):
        outputs = model(images, training=training)
        distance = tf.reduce_sum(tf.abs(outputs[:, :, None] - labels["boxes"][:, None]), -1)
        return tf.reduce_min(distance, 1), tf.cast(labels["classes"] >= 0, tf.float32)

    @tf.function(reduce_retracing=True)
    def train_step(images, labels):
        with tf.GradientTape() as tape:
            wrong, real = nearest(images, labels, training=True)
            loss = tf.reduce_sum(wrong * real) / tf.reduce_sum(real)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function(reduce_retracing=True)
    def test_step(images, labels):
        wrong, real = nearest(images, labels, training=False)
        test_loss.update_state(wrong, sample_weight=real)

    padding = 0.0, {"boxes": 0.0, "classes": -1}
    padded = examples(Scenes()).padded_batch(64, padding_values=padding)
    for _ in range(10):
        for images, labels in padded:
            train_step(images, labels)
        test_loss.reset_state()
        for images, labels in padded:
            test_step(images, labels)
    return {"loss": float(test_loss.result())}, model.get_weights()


def translation(pairs):
    source, target = (keras.Input([None], dtype="int32", name=name) for name in ("from", "to"))
    embed = keras.layers.Embedding(12, 32, mask_zero=True)
    read, *state = keras.layers.GRU(32, return_sequences=True, return_state=True)(embed(source))
    said = keras.layers.GRU(32, return_sequences=True)(embed(target), initial_state=state)
    said = keras.layers.Concatenate()([said, keras.layers.Attention()([said, read])])
    model = keras.Model({"from": source, "to": target}, keras.layers.Dense(12)(said))
    optimizer, test_loss = keras.optimizers.Adam(0.01), keras.metrics.Mean()

    def losses(features, words, training):
        outputs = model(features, training=training)
        wrong = tf.nn.sparse_softmax_cross_entropy_with_logits(words, outputs)
        return wrong, tf.cast(words > 0, tf.float32)

    @tf.function(reduce_retracing=True)
    def train_step(features, words):
        with tf.GradientTape() as tape:
            wrong, real = losses(features, words, training=True)
            loss = tf.reduce_sum(wrong * real) / tf.reduce_sum(real)
        # Dense, since Keras's Adam squares each of a repeated word's gradients alone.
        gradients = [tf.convert_to_tensor(each) for each in tape.gradient(loss, model.trainable_variables)]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function(reduce_retracing=True)
    def test_step(features, words):
        wrong, real = losses(features, words, training=False)
        test_loss.update_state(wrong, sample_weight=real)

    padded = pairs.unbatch().padded_batch(64)
    for _ in range(5):
        for features, words in padded:
            train_step(features, words)
        test_loss.reset_state()
        for features, words in padded:
            test_step(features, words)
    return {"loss": float(test_loss.result())}, model.get_weights()


def ranking(Lists):
    model = keras.Sequential([keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])
    optimizer, first = keras.optimizers.Adam(0.02), keras.metrics.Mean()

    def with_length(documents, clicked):
        return documents, clicked, tf.shape(documents)[0]

    def scores_of(documents, length, training):
        return tf.where(tf.sequence_mask(length), model(documents, training=training)[..., 0], -1e9)

    @tf.function(reduce_retracing=True)
    def train_step(documents, clicked, length):
        with tf.GradientTape() as tape:
            scores = scores_of(documents, length, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(clicked, scores))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function(reduce_retracing=True)
    def test_step(documents, clicked, length):
        first.update_state(tf.argmax(scores_of(documents, length, training=False), 1, tf.int32) == clicked)

    padded = examples(Lists()).map(with_length).padded_batch(64)
    for _ in range(5):
        for batch in padded:
            train_step(*batch)
        first.reset_state()
        for batch in padded:
            test_step(*batch)
    return {"first": float(first.result())}, model.get_weights()


def scheduler(plane):
    train, test = plane()
    trials = {}

    def started(rate):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.layers.Dense(1)])
        model.build([None, 4])
        optimizer = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(rate, decay_steps=80))
        optimizer.build(model.trainable_variables)

        @tf.function
        def train_step(features, labels):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(features, training=True) - labels))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        return model, optimizer, train_step, iter(batches(train, 64).repeat())

    def loss_at(step, rate):
        if rate not in trials:
            trials[rate] = started(rate)
        model, optimizer, train_step, data = trials[rate]
        while optimizer.iterations < step:
            train_step(*next(data))
        return float(tf.reduce_mean(tf.square(model(test[0], training=False) - test[1])))

    rates, step = [1.0, 0.1, 0.01, 0.001], 20
    while len(rates) > 1:
        rates = sorted(rates, key=lambda rate: loss_at(step, rate))[: len(rates) // 2]
        step *= 2
    return {"loss": loss_at(step, *rates), "rate": rates[0]}, []


def click_logs():
    rows_of = collections.defaultdict(dict)
    tables = [tf.Variable(tf.random.uniform([500, 17], -0.05, 0.05)) for _ in range(2)]
    crosses = tf.Variable(tf.zeros([5000, 1]))
    deep = keras.Sequential([keras.layers.Dense(128, "relu"), keras.layers.Dense(64, "relu"), keras.layers.Dense(1)])
    deep.build([None, 32])
    variables = [*tables, crosses, *deep.trainable_variables]
    optimizer, auc = keras.optimizers.Adam(0.02), keras.metrics.AUC(from_logits=True)

    def admitted(field, ids, training):
        rows = rows_of[field]
        return [rows.setdefault(i, len(rows) + 1) if training else rows.get(i, 0) for i in ids]

    def columns_of(lines, training):
        user, item, clicked = lines.T.tolist()
        ids = {"user": user, "item": item, "pair": [*zip(user, item, strict=True)]}
        rows = [admitted(field, of_field, training) for field, of_field in ids.items()]
        return np.stack(rows, 1), np.float32(clicked)

    def outputs_of(rows, training):
        found = [tf.gather(table, rows[:, i]) for i, table in enumerate(tables)]
        wide = tf.gather(crosses, rows[:, 2]) + tf.add_n([each[:, 16:] for each in found])
        return (deep(tf.concat([each[:, :16] for each in found], 1), training=training) + wide)[:, 0]

    @tf.function
    def train_step(rows, clicked):
        with tf.GradientTape() as tape:
            losses = tf.nn.sigmoid_cross_entropy_with_logits(clicked, outputs_of(rows, training=True))
            loss = tf.reduce_mean(losses)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    @tf.function
    def test_step(rows, clicked):
        auc.update_state(clicked, outputs_of(rows, training=False))

    for day in ("monday", "tuesday", "wednesday"):
        lines = np.loadtxt(f"{day}.csv", int, delimiter=",", skiprows=1)
        held_out = len(lines) // 10
        train, test = columns_of(lines[:-held_out], training=True), columns_of(lines[-held_out:], training=False)
        for _ in range(2):
            for rows, clicked in batches(train, 64).shuffle(100):
                train_step(rows, clicked)
        auc.reset_state()
        for rows, clicked in batches(test, 64):
            test_step(rows, clicked)
    return {"auc": float(auc.result())}, []


def ppo(play, gymnasium, GAMES, STEPS, EPOCHS, CLIP):
    x = keras.Input([4])
    hidden = [keras.layers.Dense(64, "tanh")(x) for _ in range(2)]
    model = keras.Model(x, tuple(keras.layers.Dense(size)(h) for size, h in zip((2, 1), hidden, strict=True)))
    model.predict = lambda x: [each.numpy() for each in model(x, training=False)]
    optimizer = keras.optimizers.Adam(0.002, global_clipnorm=0.5)

    @tf.function
    def train_step(seen, labels):
        actions, before, advantages, returns = labels
        with tf.GradientTape() as tape:
            logits, values = model(seen, training=True)
            entropies = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=actions, logits=logits)
            ratio = tf.exp(-entropies - before)
            gains = tf.minimum(ratio * advantages, tf.clip_by_value(ratio, 1 - CLIP, 1 + CLIP) * advantages)
            entropy = -tf.reduce_sum(tf.nn.softmax(logits) * tf.nn.log_softmax(logits), -1)
            loss = tf.reduce_mean(0.5 * tf.square(values[:, 0] - returns) - gains - 0.01 * entropy)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    rng, games = np.random.default_rng(0), [gymnasium.make("CartPole-v1") for _ in range(GAMES)]
    now = np.stack([game.reset(seed=number)[0] for number, game in enumerate(games)])
    lasted = [0.0, 0.0]
    while np.mean(lasted[-2:]) < 475 and len(lasted) < 80:
        collected, ends = play(model, games, now, rng)
        flat = tf.nest.map_structure(lambda x: x.reshape(-1, *x.shape[2:]), collected)
        for _ in range(EPOCHS):
            for seen, labels in batches(flat, 256):
                train_step(seen, labels)
        lasted.append(STEPS * GAMES / max(1.0, ends.sum()))
        if len(lasted) % 5 == 0:
            print(f"round {len(lasted)}: games last {lasted[-1]:.0f} steps", flush=True)
    return {"lasted": float(np.mean(lasted[-2:]))}, []
