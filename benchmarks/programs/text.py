"""Prints a program as a script that stands alone: `python program.py '{}'` prints a checksum of each value.

Its function `values` runs one side of the relation, and returns arrays by name; only names that users import.
"""

from __future__ import annotations

import json

_MADE = {  # how examples are made: of a shape, in a dtype
    "vector": "rng.normal(size=(n, 4)).astype({x_dtype!r})",
    "image": "rng.normal(size=(n, 6, 6, 2)).astype({x_dtype!r})",
    "sequence": "rng.normal(size=(n, 5, 3)).astype({x_dtype!r})",
    "tokens": "rng.integers(0, 9, size=(n, 6)).astype('int32')",
    "counts": "rng.integers(0, 5, size=(n, 3)).astype('int64')",
    "flags": "rng.random((n, 3)) < 0.5",
    "text": "(np.array if 'crankshaft' in sys.modules else tf.constant)(rng.choice(['red', 'green', 'other'], (n, 2)))",
}
_SHAPES = {  # of an example, and the dtype that the model takes
    "vector": ([4], "float32"), "image": ([6, 6, 2], "float32"), "sequence": ([5, 3], "float32"),
    "tokens": ([6], "int32"), "counts": ([3], "int64"), "flags": ([3], "bool"), "text": ([2], "string"),
}  # fmt: skip
# From an input `x` to a vector `h`, by the input's kind and variant.
ENCODERS = {
    "vector": ["h = layers.Dense(5, 'tanh')(x)"],
    "image": ["h = layers.GlobalAveragePooling2D()(layers.Conv2D(3, 3, activation='tanh')(x))"],
    "image:pooled": ["h = layers.Flatten()(layers.AveragePooling2D(2)(layers.Conv2D(2, 3, padding='same')(x)))"],
    "sequence:gru": ["h = layers.GRU(4)(x)"],
    "sequence:lstm": ["h = layers.LSTM(4)(x)"],
    "sequence:rnn": ["h = layers.SimpleRNN(4, return_sequences=True)(x)", "h = layers.Flatten()(h)"],
    "sequence:attention": ["h = layers.GlobalAveragePooling1D()(layers.MultiHeadAttention(2, 3)(x, x))"],
    "sequence:conv": ["h = layers.GlobalAveragePooling1D()(layers.Conv1D(4, 3, activation='gelu')(x))"],
    "tokens": ["h = layers.Flatten()(layers.Embedding(9, 3)(x))"],
    "tokens:masked": ["h = layers.GlobalAveragePooling1D()(layers.Embedding(9, 3, mask_zero=True)(x))"],
    "tokens:gru": ["h = layers.GRU(4)(layers.Embedding(9, 3, mask_zero=True)(x))"],
    "counts": ["h = layers.Dense(4, 'tanh')(layers.Rescaling(0.25)(x))"],
    "flags": ["h = layers.Dense(4, 'sigmoid')(layers.Rescaling(1.0)(x))"],
    "text": ["h = layers.StringLookup(vocabulary=['red', 'green', 'blue'])(x)",
             "h = layers.Flatten()(layers.Embedding(4, 3)(h))"],
}  # fmt: skip
TRUNK = {  # from `h` to `h`
    "dense": ["h = layers.Dense(6, 'gelu')(h)"],
    "layer_norm": ["h = layers.LayerNormalization()(h)"],
    "shared": ["twice = layers.Dense(6, 'tanh')", "h = twice(twice(layers.Dense(6)(h)))"],
    "nested": ["h = keras.Sequential([layers.Dense(5, 'tanh'), layers.Dense(4)])(h)"],
    "residual": ["h = layers.Dense(6)(h)", "h = layers.Add()([h, layers.Dense(6, 'tanh')(h)])"],
    "penalty": ["h = layers.Dense(6, 'tanh', kernel_regularizer=keras.regularizers.L2(0.01))(h)"],
    "activity": ["h = layers.Dense(6, 'tanh', activity_regularizer=keras.regularizers.L2(0.01))(h)"],
    "adds_loss": ["h = AddsLoss()(layers.Dense(5)(h))"],
    "counter": ["h = Counter()(h)"],
    "frozen": ["h = layers.Dense(6, 'tanh', trainable=False)(h)"],
    "batch_norm": ["h = layers.BatchNormalization()(h)"],
    "synced_norm": ["h = layers.BatchNormalization(synchronized=True)(h)"],
    "dropout": ["h = layers.Dropout(0.3)(h)"],
    "noise": ["h = layers.GaussianNoise(0.1)(h)"],
}
# A head, the loss of `compile`, a metric, the labels, and a loss per example of TensorFlow's.
OUTPUTS = {
    "values": ("layers.Dense(2)", "'mse'", "'mae'", "rng.normal(size=(n, 2)).astype('float32')",
               "tf.reduce_mean(tf.square(outputs - labels), -1)"),
    "classes": ("layers.Dense(3, 'softmax')", "'sparse_categorical_crossentropy'", "'accuracy'",
                "rng.integers(0, 3, size=n)", "keras.losses.sparse_categorical_crossentropy(labels, outputs)"),
    "binary": ("layers.Dense(1, 'sigmoid')", "'binary_crossentropy'", "keras.metrics.BinaryAccuracy(name='right')",
               "rng.integers(0, 2, size=(n, 1)).astype('float32')",
               "keras.losses.binary_crossentropy(labels, outputs)"),
    "huber": ("layers.Dense(1)", "keras.losses.Huber(0.5)", "keras.metrics.RootMeanSquaredError(name='rmse')",
              "rng.normal(size=(n, 1)).astype('float32')",
              "keras.losses.huber(labels, outputs, delta=0.5)"),
    "one_hot": ("layers.Dense(3, 'softmax')", "'categorical_crossentropy'", "keras.metrics.Precision(name='hits')",
                "np.eye(3, dtype='float32')[rng.integers(0, 3, size=n)]",
                "keras.losses.categorical_crossentropy(labels, outputs)"),
    "positive": ("layers.Dense(1, 'softplus')", "'poisson'", "'mse'", "rng.integers(0, 4, size=(n, 1))",
                 "keras.losses.poisson(tf.cast(labels, 'float32'), outputs)"),
}  # fmt: skip
_LAYERS = {
    "adds_loss": """
class AddsLoss(layers.Layer):
    def call(self, x):
        self.add_loss(0.01 * keras.ops.mean(keras.ops.square(x)))
        return x
""",
    "counter": """
class Counter(layers.Layer):
    def build(self, shape):
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")

    def call(self, x, training=False):
        if training:
            self.count.assign_add(1.0)
        return x
""",
}
_SCHEDULES = {
    "exponential": "keras.optimizers.schedules.ExponentialDecay({rate}, 3, 0.7)",
    "cosine": "keras.optimizers.schedules.CosineDecay({rate}, 9)",
    "piecewise": "keras.optimizers.schedules.PiecewiseConstantDecay([2, 5], [{rate}, {rate} / 2, {rate} / 5])",
}
CALLBACKS = {
    "rates": "keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)",
    "plateau": "keras.callbacks.ReduceLROnPlateau(monitor='loss', factor=0.5, patience=1, min_delta=0.1)",
    "early": "keras.callbacks.EarlyStopping(monitor='loss', patience=1, min_delta=0.05, restore_best_weights=True)",
    "sets_weights": "SetsWeights()",
    "counts": "Counts()",
    "freezes": "Freezes()",
}
_CALLBACK_CLASSES = {
    "sets_weights": """
class SetsWeights(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.set_weights([0.9 * weight if weight.dtype == "float32" else weight
                                for weight in self.model.get_weights()])
""",
    "counts": """
class Counts(keras.callbacks.Callback):
    batches = epochs = 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1

    def on_epoch_end(self, epoch, logs=None):
        self.epochs += 1
""",
    "freezes": """
class Freezes(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.layers[-1].trainable = epoch % 2 == 0
""",
}
RATE, CLIP = 0.05, 0.1
# Whose later steps amplify rounding: the sign of a gradient near 0 decides.
ONE_STEP_OPTIMIZERS = ("adam", "adamw", "rmsprop", "adagrad", "adamax", "nadam", "lion", "adafactor")


def script(program: dict, sides: dict[str, dict]) -> str:
    """Returns the text of a program, whose first lines say what its seed, relation and sides are."""
    kind = program["kind"]
    uses = [*program["trunk"], *program["callbacks"]]
    classes = [text for name, text in {**_LAYERS, **_CALLBACK_CLASSES}.items() if name in uses]
    head = [f'r"""Seed {program["seed"]}: {kind}, {program["relation"]}. Sides, an argument of this script:', ""]
    head += [f"{name}: '{json.dumps(how)}'" for name, how in sides.items()]
    head += ['"""', "", "import json", "import sys", "import tempfile", "", "if '\"oracle\"' not in str(sys.argv):",
             "    import crankshaft  # first: keeps TensorFlow's startup log off the screen", "import keras",
             "import numpy as np", "import tensorflow as tf", "from keras import layers", "",
             f"SEED, EXAMPLES, BATCH, EPOCHS = {program['seed']}, {program['examples']}, {program['batch']}, "
             f"{program['epochs']}"]  # fmt: skip
    parts = ["\n".join(head), *classes, _data(program), _model(program)]
    if kind == "trainer":
        parts += [_FORMS, _trainer(program), _oracle(program), _trainer_values(program)]
    else:
        parts += [_FORMS, _compiled_values(program)]
    return "\n\n\n".join(part.strip("\n") for part in [*parts, _MAIN]) + "\n"


def _names(program: dict) -> list[str]:
    return [f"{chr(97 + i)}_{each.partition(':')[0]}" for i, each in enumerate(program["inputs"])]


def _output_names(program: dict) -> list[str]:
    return [f"{each}_{i}" for i, each in enumerate(program["outputs"])]


def _structure(values: list[str], names: list[str], form: str) -> str:
    """Python's text of one value, or of a tuple or a dictionary of several."""
    if len(values) == 1 and form == "tuple":
        return values[0]
    return f"({', '.join(values)})" if form == "tuple" else dict_text(dict(zip(names, values, strict=True)))


def dict_text(items: dict[str, str]) -> str:
    return "{" + ", ".join(f"{name!r}: {value}" for name, value in items.items()) + "}"


def _data(program: dict) -> str:
    inputs = [_MADE[each.partition(":")[0]].format(**program) for each in program["inputs"]]
    labels = [OUTPUTS[each][3] for each in program["outputs"]]
    drawn = "rng.uniform(0.5, 2.0, n).astype('float32')"
    weights = {"none": "None", "random": drawn, "zeros": f"{drawn} * ((rng.random(n) < 0.7) | (np.arange(n) == 0))"}
    return f'''
def arrays(first, n):
    """Examples, labels and weights, of a seed."""
    rng = np.random.default_rng([SEED, first])
    x = {_structure(inputs, _names(program), program["input_form"])}
    y = {_structure(labels, _output_names(program), program["output_form"])}
    return x, y, {weights[program["weights"]]}


def rows(tree, index):
    return None if tree is None else keras.tree.map_structure(lambda array: array[index], tree)
'''


def _model(program: dict) -> str:
    lines = []
    for name, kind in zip(_names(program), program["inputs"], strict=True):
        shape, dtype = _SHAPES[kind.partition(":")[0]]
        lines.append(f"x = {name} = keras.Input({shape}, dtype={dtype!r}, name=prefix + {name!r})")
        lines += [*ENCODERS[kind], "vectors.append(h)"]
    lines.append("h = layers.Concatenate()(vectors) if len(vectors) > 1 else vectors[0]")
    for each in program["trunk"]:
        lines += TRUNK[each]
    heads = _output_names(program)
    for name, kind in zip(heads, program["outputs"], strict=True):
        lines.append(f"{name} = {OUTPUTS[kind][0][:-1]}, name=prefix + {name!r})(h)")
    inputs = _structure(_names(program), _names(program), program["input_form"])
    outputs = _structure(heads, heads, program["output_form"])
    body = "\n    ".join(lines)
    text = f'''
def network(prefix=""):
    """The model, not compiled."""
    keras.utils.set_random_seed(SEED % 1000)
    vectors = []
    {body}
    return keras.Model({inputs}, {outputs})
'''
    if program["model_form"] == "subclass":
        text += """

class Wrapped(keras.Model):
    def __init__(self, prefix=""):
        super().__init__()
        self.body = network(prefix)

    def call(self, x, training=False):
        return self.body(x, training=training)
"""
    made = "Wrapped(prefix)" if program["model_form"] == "subclass" else "network(prefix)"
    if program["kind"] == "own_step":
        text += f"\n{_OWN}\n\nclass OwnStep(Own):{_STEPS[program['own_step']]}"
        made = "OwnStep(network(prefix))"
    if program["kind"] == "trainer":
        return text + f"\n\ndef model(prefix=''):\n    return {made}\n"
    names = _output_names(program)
    losses = _structure([OUTPUTS[each][1] for each in program["outputs"]], names, program["output_form"])
    compiled = [_optimizer(program), f"loss={losses}"]
    if program["metrics"]:
        metrics = [f"[{OUTPUTS[each][2]}]" for each in program["outputs"]]
        compiled.append(f"metrics={_structure(metrics, names, program['output_form'])}")
        compiled.append(f"weighted_metrics={_structure(metrics, names, program['output_form'])}")
    if program["loss_weights"] and len(names) > 1:
        weights = _structure([str(0.5 + i) for i in range(len(names))], names, program["output_form"])
        compiled.append(f"loss_weights={weights.translate(str.maketrans('()', '[]'))}")
    if program["steps_per_execution"] > 1:
        compiled.append(f"steps_per_execution={program['steps_per_execution']}")
    text += f"""

def model(prefix=""):
    made = {made}
    made.compile({", ".join(compiled)})
    return made
"""
    return text


def _optimizer(program: dict) -> str:
    name, more = program["optimizer"], []
    rate = _SCHEDULES.get(program["schedule"], "{rate}").format(rate=RATE)
    if name in ("momentum", "nesterov"):
        more.append("momentum=0.9" + (", nesterov=True" if name == "nesterov" else ""))
    if name in ONE_STEP_OPTIMIZERS and name not in ("lion", "adafactor"):
        more.append("epsilon=1e-3")
    if program["clip"] != "none":
        more.append(f"{program['clip']}=0.1")
    if program["weight_decay"]:
        more.append(f"weight_decay={program['weight_decay']}")
    if program["average"]:
        more.append("use_ema=True, ema_momentum=0.8")
    kinds = {"sgd": "SGD", "momentum": "SGD", "nesterov": "SGD", "adamw": "AdamW", "rmsprop": "RMSprop"}
    return f"keras.optimizers.{kinds.get(name, name.capitalize())}({', '.join([rate, *more])})"


_OWN = """
class Own(keras.Model):
    \"\"\"A model around another one, with a metric of its loss, by example.\"\"\"

    def __init__(self, body):
        super().__init__()
        self.body, self.tracked = body, keras.metrics.Mean(name="tracked")

    def call(self, x, training=False):
        return self.body(x, training=training)

    def losses_of(self, data, training):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        outputs = self(x, training=training)
        return outputs, self.compute_loss(x=x, y=y, y_pred=outputs, sample_weight=weights)

    def track(self, outputs, loss):
        self.tracked.update_state(loss, sample_weight=tf.shape(outputs)[0])
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data):
        return self.track(*self.losses_of(data, False))
"""
_STEPS = {
    "guide": """
    def train_step(self, data):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            outputs, loss = self.losses_of(data, True)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        for metric in self.metrics:
            if metric.name in ("loss", "tracked"):
                metric.update_state(loss)
            else:
                metric.update_state(y, outputs, sample_weight=weights)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data):
        return keras.Model.test_step(self, data)
""",
    "trackers": """
    def __init__(self, body):
        super().__init__(body)
        self.size = keras.metrics.Mean(name="size")

    def train_step(self, data):
        with tf.GradientTape() as tape:
            outputs, loss = self.losses_of(data, True)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.size.update_state(tf.reduce_mean(tf.square(outputs), -1))
        return self.track(outputs, loss)

    @property
    def metrics(self):
        return [self.tracked, self.size]
""",
    "two_optimizers": """
    def __init__(self, body):
        super().__init__(body)
        self.second = keras.optimizers.SGD(0.02)

    def train_step(self, data):
        first, second = self.trainable_variables[:-2], self.trainable_variables[-2:]
        with tf.GradientTape(persistent=True) as tape:
            outputs, loss = self.losses_of(data, True)
            other = loss + 0.1 * tf.reduce_mean(tf.reduce_mean(tf.square(outputs), -1))
        self.optimizer.apply_gradients(zip(tape.gradient(loss, first), first))
        self.second.apply_gradients(zip(tape.gradient(other, second), second))
        return self.track(outputs, loss)

    @property
    def metrics(self):
        return [self.tracked]
""",
    "follower": """
    def __init__(self, body):
        super().__init__(body)
        self.target = keras.models.clone_model(body)
        self.target.trainable = False
        self.target.set_weights(body.get_weights())

    def train_step(self, data):
        with tf.GradientTape() as tape:
            outputs, loss = self.losses_of(data, True)
            far = tf.square(outputs - self.target(data[0], training=False))
            loss += 0.1 * tf.reduce_mean(tf.reduce_mean(far, -1))
        variables = self.body.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        for its, of_body in zip(self.target.weights, self.body.weights):
            if "float" in its.dtype:
                its.assign(0.9 * its + 0.1 * of_body)
        return self.track(outputs, loss)

    @property
    def metrics(self):
        return [self.tracked]
""",
}


_FORMS = """
def mapped(array):
    file = tempfile.NamedTemporaryFile(suffix=".npy", delete=False)
    np.save(file, array)
    file.close()
    return np.load(file.name, mmap_mode="r")


def form(examples, data):
    \"\"\"Examples, labels and perhaps weights in one of the forms of data.\"\"\"
    examples = tuple(each for each in examples if each is not None)
    n = len(examples[1] if not isinstance(examples[1], (dict, tuple)) else keras.tree.flatten(examples[1])[0])
    if data == "mapped":  # arrays in files
        return keras.tree.map_structure(mapped, examples)
    if data == "source":
        class Rows(crankshaft.Source):
            element_spec = keras.tree.map_structure(lambda rows: crankshaft.Spec(rows.shape[1:], rows.dtype), examples)

            def __len__(self):
                return n

            def read(self, indices):
                return rows(examples, indices)
        return Rows()
    if data == "generator":
        def generate():
            while True:
                for first in range(0, n, BATCH):
                    yield rows(examples, slice(first, first + BATCH))
        return generate()
    if data in ("dataset", "unknown_length"):
        dataset = tf.data.Dataset.from_tensor_slices(examples).batch(BATCH)
        return dataset if data == "dataset" else dataset.filter(lambda *batch: True)
    return examples
"""


def _compiled_values(program: dict) -> str:
    callbacks = f"[{', '.join(CALLBACKS[each] for each in dict.fromkeys(program['callbacks']))}]"
    how = ["epochs=EPOCHS, verbose=0"]
    if program["class_weight"]:
        how.append("class_weight={0: 0.5, 2: 3.0}")
    if program["validation"] == "split":
        how.append("validation_split=0.3")
    validation = "how['validation_data'] = called(arrays(1, 7))" if program["validation"] == "data" else "pass"
    return f"""
def values(flags=None, data={program["data"]!r}, stops=(), renamed=False, before=False, predicts="run", oracle=False):
    \"\"\"Trains on one side of the relation; returns all that it leaves, by name.\"\"\"
    _ = before and values()
    flags, prefix = {{"jit": {program["jit"]!r}, **(flags or {{}})}}, "z_" if renamed else ""
    replicated = "strategy" in flags
    called = (lambda value: lambda: value) if replicated else lambda value: value
    how = dict({", ".join(how)})
    {validation}
    if data in ("arrays", "mapped", "source"):
        how.update(batch_size=BATCH, shuffle={program["shuffle"]} and data != "source")
    elif "validation_data" in how:
        how["validation_batch_size"] = BATCH
    if data == "generator":
        how["steps_per_epoch"] = -(-EXAMPLES // BATCH)

    def given(seed):
        known = {{"source": "arrays", "unknown_length": "dataset"}} if oracle else {{}}  # one more update, of no batch
        if replicated:
            return {{"x": lambda: form(arrays(seed, EXAMPLES), data)}}
        examples = form(arrays(seed, EXAMPLES), known.get(data, data))
        return dict(zip(("x", "y", "sample_weight"), examples if isinstance(examples, tuple) else [examples]))

    test = tuple(each for each in arrays(2, 9) if each is not None)
    callbacks, folder = {callbacks}, tempfile.mkdtemp()
    if oracle:
        made = model()
        update = made.optimizer.apply  # of rows that occur twice summed, as the engine has them
        made.optimizer.apply = lambda gradients, *more: update([*map(tf.convert_to_tensor, gradients)], *more)
        history = made.fit(**given(0), **how, callbacks=callbacks).history
        if {program["again"]}:
            made.fit(**given(3), **how)
        tested = made.evaluate(*test[:2], BATCH, 0, *test[2:], return_dict=True)
        predicted = made.predict(test[0], BATCH, 0)
    else:
        if stops or predicts != "run":
            flags["run_dir"] = folder
        made = (lambda: model(prefix)) if replicated else model(prefix)
        for stop in (*stops, None):
            if stops:
                made, callbacks = model(), {callbacks}
            run = crankshaft.fit(made, **given(0), **how, callbacks=callbacks, **flags,
                                 **({{"stop_at_step": stop}} if stop else {{}}))
        history = run.history.history
        if {program["again"]}:
            run = crankshaft.fit(made, **given(3), **how, **flags)
        made, tested = run.model, dict(run.evaluate(test))
        if "loss_with_penalties" in tested:  # Keras's loss
            tested["loss"] = tested.pop("loss_with_penalties")
        if predicts.startswith("loaded"):
            loads = None if predicts == "loaded" else crankshaft.KerasTrainer.for_model(model)
            predicted = crankshaft.load_model(folder, trainer_class=loads).predict(test[0])
        elif predicts == "exported":
            made.save(folder + "/model.keras")
            predicted = keras.models.load_model(folder + "/model.keras")(test[0], training=False)
        else:
            predicted = run.predict(test[0])
    found = {{f"history/{{name}}": rows for name, rows in history.items() if not name.startswith("learning")}}
    found |= {{f"metrics/{{name}}": value for name, value in tested.items()}}
    found |= {{f"weights/{{i}}": each for i, each in enumerate(made.get_weights())}}
    if not replicated:
        found |= {{f"optimizer/{{i}}": each for i, each in enumerate(made.optimizer.variables)}}
    found |= {{"calls": [each.batches, each.epochs] for each in callbacks if hasattr(each, "batches")}}
    found |= {{f"predicted/{{i}}": each for i, each in enumerate(keras.tree.flatten(predicted))}}
    return {{name: np.array(value) for name, value in found.items()}}
"""


def _trainer(program: dict) -> str:
    names = _output_names(program)
    flat = sorted(names) if program["output_form"] == "dict" else names  # as keras.tree flattens them
    losses = [
        f"{name!r}: {OUTPUTS[kind][4].replace('labels', f'labels[{i}]').replace('outputs', f'outputs[{i}]')}"
        for name, kind in zip(names, program["outputs"], strict=True)
        if (i := flat.index(name)) >= 0
    ]
    masks = program["loss_form"] == "masked"
    return f"""
FACTORS = {dict_text({name: str(1.0 / (i + 1)) for i, name in enumerate(names)})}
STEPS = -(-EXAMPLES // BATCH) * EPOCHS


def losses(outputs, labels):
    \"\"\"By name a loss per example, and which examples it counts, of TensorFlow's operations alone.\"\"\"
    outputs, labels = keras.tree.flatten(outputs), keras.tree.flatten(labels)
    values = {{{", ".join(losses)}}}
    counts = {{name: tf.ones_like(each) for name, each in values.items()}}
    if {masks}:  # the first output's examples without a label, which differ in number from batch to batch
        first = tf.reshape(tf.cast(labels[0], "float32"), [tf.shape(labels[0])[0], -1])[:, 0]
        counts[{flat[0]!r}] = tf.cast(tf.abs(first) > 0.5, "float32")
    return values, counts


def squares(outputs):
    return tf.reduce_mean(tf.square(keras.tree.flatten(outputs)[0]), -1)


def split(variables):
    return variables[: len(variables) // 2], variables[len(variables) // 2 :]
"""


def _oracle(program: dict) -> str:
    undecayed = () if program["schedule"] != "none" else ("bias", "gamma", "beta")  # by a run's `weight_decay`
    groups = "split(trained)" if program["step"] == "two_optimizers" else "(trained,)"
    return f"""
def oracle(x, y, weights, test):
    \"\"\"The same training by a tape, counts of NumPy's, and an update that is written out.\"\"\"
    made = model()
    trained = made.trainable_variables
    groups, velocities, step = {groups}, {{}}, 0
    tensors = lambda x: keras.tree.map_structure(tf.convert_to_tensor, x)
    rate = {_SCHEDULES.get(program["schedule"], "{rate}").format(rate=RATE)}

    def mean(values, factors):
        return tf.reduce_sum(values * factors) / factors.sum() if factors.sum() else 0.0 * tf.reduce_sum(values)

    def measured(outputs, labels, weigh):
        values, counts = losses(outputs, labels)
        means = [FACTORS[name] * mean(values[name], counts[name].numpy() * weigh) for name in values]
        return tf.add_n(means), mean(squares(outputs), weigh), sum(each.numpy() @ weigh for each in counts.values())

    def ones(labels, weigh):
        return np.ones(len(keras.tree.flatten(labels)[0]), "float32") if weigh is None else weigh

    for first in [*range(0, EXAMPLES, BATCH)] * EPOCHS:
        batch = [rows(each, slice(first, first + BATCH)) for each in (x, y, weights)]
        with tf.GradientTape(persistent=True) as tape:
            outputs = made(tensors(batch[0]), training=True)
            loss, second, count = measured(outputs, batch[1], ones(*batch[1:]))
            loss += sum(made.losses) if count else 0.0
        gradients = [0.0 if (gradient := tape.gradient(each, v)) is None else np.array(tf.convert_to_tensor(gradient))
                     for each, group in zip((loss, second), groups) for v in group]
        norm = np.sqrt(sum(np.square(each, dtype="float64").sum() for each in gradients))
        now = float(rate(step)) if callable(rate) else rate
        for i, (variable, gradient) in enumerate(zip(trained, gradients)):
            decays = type(gradient) is not float and not any(each in variable.path for each in {undecayed})
            gradient = gradient * min(1.0, {CLIP if program["clip"] != "none" else "np.inf"} / max(norm, 1e-30))
            velocities[i] = {0.9 * (program["optimizer"] == "momentum")} * velocities.get(i, 0.0) - now * gradient
            variable.assign(variable * (1 - now * {program["weight_decay"]} * decays) + velocities[i])
        step += 1
    outputs = made(tensors(test[0]), training=False)
    loss, second, _ = measured(outputs, test[1], ones(*test[1:]))
    return made, {{"loss": loss, "squares": second}}, made(tensors(x), training=False)
"""


def _trainer_values(program: dict) -> str:
    several = len(program["outputs"]) > 1 or program["loss_form"] == "means"
    steps = {
        "default": "",
        "parts": """
        def train_step(self, batch):
            variables = self.trainable_variables
            gradients, metrics = self.compute_gradients(batch)
            gradients, count = self.reduction.sum(gradients, metrics["loss"].count, variables=variables)
            update = crankshaft.Update(self, gradients.over(count).unscaled(), variables)
            update.apply(self.optimizer, variables)
            return update.end(metrics)
""",
        "minimize": """
        def train_step(self, batch):
            return crankshaft.minimize(self, batch, self.all_losses, {"loss": self.optimizer})

        def all_losses(self, batch):
            return {"loss": crankshaft.weighed(self.loss, self.forward(batch[0], training=True), batch)}
""",
        "two_optimizers": """
        def build(self):
            self.model = self.build_model()
            crankshaft.build_layers(self, self.model)
            first, second = split(self.model.trainable_variables)
            self.optimizer = crankshaft.make_optimizer(self, first, self.build_optimizer())
            self.second = crankshaft.make_optimizer(self, second, self.build_optimizer())

        def train_step(self, batch):
            return crankshaft.minimize(self, batch, self.all_losses, {"loss": self.optimizer, "second": self.second})

        def all_losses(self, batch):
            outputs = self.forward(batch[0], training=True)
            second = crankshaft.weighed(lambda outputs, batch: crankshaft.mean(squares(outputs)), outputs, batch)
            return {"loss": crankshaft.weighed(self.loss, outputs, batch), "second": second}
""",
    }
    flags = {"global_batch_size": "BATCH", "seed": "SEED % 1000", "progress": "'off'", "learning_rate": str(RATE)}
    optimizer = ""
    if program["schedule"] != "none":
        optimizer = f"""
        def build_optimizer(self):
            return {_optimizer({**program, "clip": "none"})}
"""
        del flags["learning_rate"]
    else:
        flags |= {"optimizer": repr(program["optimizer"]), "weight_decay": str(program["weight_decay"])}
    if program["clip"] != "none":
        flags["clip_norm"] = str(CLIP)
    if not program["shuffle"]:
        flags["shuffle_buffer"] = "0"
    given = ", ".join(f"{name}={value}" for name, value in flags.items())
    frozen = _output_names(program)[0]
    return f"""
def trainer(prefix, multiplier):
    class Mine(crankshaft.Trainer):
        def build_model(self):
            return model(prefix)

        def learning_rate_multiplier(self, variable):
            return 0.0 if multiplier and {frozen!r} in variable.path else 1.0
{optimizer}
        def loss(self, outputs, batch):
            values, counts = losses(outputs, batch[1])
            means = {{name: FACTORS[name] * crankshaft.mean(values[name], weights=counts[name]) for name in values}}
            return means if {several} else means.popitem()[1]

        def metrics(self, outputs, batch):
            return {{"squares": crankshaft.mean(squares(outputs))}}
{steps[program["step"]]}
    return Mine


def weighed_rows(examples, kind):
    \"\"\"Some examples left out, or of weight 0; or each twice, of half the weight.\"\"\"
    x, y, _ = examples
    random = np.random.default_rng(SEED)
    weights, keep = random.uniform(0.5, 2.0, EXAMPLES).astype("float32"), random.random(EXAMPLES) < 0.7
    keep[0] = True
    if kind == "halves":
        twice = np.repeat(np.arange(EXAMPLES), 2)
        return rows(x, twice), rows(y, twice), weights[twice] / 2
    if kind == "left_out":
        return rows(x, keep), rows(y, keep), weights[keep]
    return x, y, weights * keep if kind == "zero" else weights


def values(flags=None, data={program["data"]!r}, stops=(), parts=(), between=(), kind=None, renamed=False, before=False,
           predicts="run", multiplier=False, oracle=False):
    \"\"\"Trains on one side of the relation; returns all that it leaves, by name.\"\"\"
    if before:
        values()
    examples, test, folder = arrays(0, EXAMPLES), arrays(1, 7), tempfile.mkdtemp()
    if kind:
        examples = weighed_rows(examples, kind)
    if oracle:
        made, tested, predicted = globals()["oracle"](*examples, test)
    else:
        how = dict({given})
        how.update(flags or {{}}, jit={program["jit"]!r})
        if kind:
            how["global_batch_size"] = len(examples[2])
        if stops or predicts != "run" or "save" in between:
            how["run_dir"] = folder
        for stop in (*stops, STEPS):
            splits = lambda: (form(examples, data), form(test, "arrays"))
            with crankshaft.open_run(trainer("z_" if renamed else "", multiplier), data=splits, **how) as run:
                for part in (*parts, stop):
                    run.train(steps=part - run.step)
                    for action in between:
                        {{"evaluate": run.evaluate, "predict": lambda: run.predict(test[0]), "save": run.save,
                          "other_data": lambda: run.evaluate(form(arrays(4, 5), "arrays"))}}[action]()
                tested = {{name: value for name, value in run.evaluate().items() if name in ("loss", "squares")}}
                made, predicted = run.model, run.predict(examples[0]) if predicts == "run" else None
        if predicts.startswith("loaded"):
            loads = None if predicts == "loaded" else trainer("", False)
            predicted = crankshaft.load_model(folder, trainer_class=loads).predict(examples[0])
        elif predicts == "exported":
            made.save(folder + "/model.keras")
            predicted = keras.models.load_model(folder + "/model.keras")(examples[0], training=False)
    found = {{f"metrics/{{name}}": value for name, value in tested.items()}}
    found |= {{f"weights/{{i}}": each for i, each in enumerate(made.get_weights())}}
    if not kind:
        found |= {{f"predicted/{{i}}": each for i, each in enumerate(keras.tree.flatten(predicted))}}
    return {{name: np.array(value) for name, value in found.items()}}
"""


_MAIN = """
if __name__ == "__main__":
    for name, value in values(**json.loads(sys.argv[1] if len(sys.argv) > 1 else "{}")).items():
        print(f"{name:20}", list(value.shape), float(np.sum(np.abs(value.astype("float64")))))
"""
