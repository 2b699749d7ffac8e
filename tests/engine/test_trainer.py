"""Steps as users write them: clipping, decay, steps left out."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import StepOptions, Trainer, make_optimizer, mean, step_context
from crankshaft.engine import logging
from crankshaft.engine.build import prepare
from crankshaft.engine.errors import UsageError
from crankshaft.engine.inventory import Inventory
from crankshaft.engine.step.options import RunContext
from crankshaft.models.cnn import Model as Cnn
from crankshaft.models.mlp import Model as Mlp
from crankshaft.parts.tables import Embedding
from tests.arrays import assert_close, assert_same
from tests.engine.trainers import Squares

pytestmark = pytest.mark.thorough


class Linear(Trainer):
    """outputs = features @ w; the loss is their sum, so the gradient of w is the mean feature."""

    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="zeros")])

    def loss(self, outputs, batch):
        return mean(outputs[:, 0])


@pytest.mark.parametrize(("clip_norm", "replicas", "jit"), [(0.5, 1, True), (0.5, 2, False), (1000.0, 1, False)])
def test_gradients_are_clipped_by_their_global_norm(bench, clip_norm, replicas, jit):
    features = np.random.default_rng(0).normal(2, 1, size=(6, 3)).astype(np.float32)
    source = features, np.zeros(6, np.int32)
    made = bench(Linear(), source, 6, replicas, jit=jit, optimizer="sgd", learning_rate=1.0, clip_norm=clip_norm)
    total, count = made.train(1)["gradient_norm"]
    gradient = np.append(features.mean(0), 1.0)  # kernel and bias
    norm = np.linalg.norm(gradient)
    np.testing.assert_allclose(total / count, norm, rtol=1e-6)
    kernel, bias = (v.numpy() for v in made.trainer.model.trainable_variables)
    np.testing.assert_allclose(-np.append(kernel, bias), gradient * min(1, clip_norm / norm), rtol=1e-6)


class Penalised(Trainer):
    """A kernel's regularizer, and a layer that adds the mean of its inputs' squares times its weight to the loss."""

    class Adds(tf.keras.layers.Layer):
        def build(self, shape):
            self.weight = self.add_weight(shape=(), initializer="ones", name="weight")

        def call(self, x):
            self.add_loss(0.3 * self.weight * tf.reduce_mean(tf.square(x)))
            return x

    def build_model(self):
        start = tf.keras.initializers.Constant(0.5)
        dense = tf.keras.layers.Dense(
            1, kernel_initializer=start, use_bias=False, kernel_regularizer=tf.keras.regularizers.L2(0.1)
        )
        return tf.keras.Sequential([self.Adds(), dense])

    def loss(self, outputs, batch):
        return mean(tf.square(outputs[:, 0] - 1))


class PenalisedBeside(Penalised):
    """The same in an encoder beside the model, and a model, with a regularizer, that another step would train."""

    def build(self):
        self.encoder, self.model = (tf.keras.Sequential([layer]) for layer in super().build_model().layers)
        self.judge = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_regularizer=tf.keras.regularizers.L2(9.0))])
        self.judge(self.model(self.encoder(self.run_context.example[0])))
        self.optimizer = make_optimizer(self, self.trainable_variables)

    @property
    def trainable_variables(self):
        return [*self.encoder.trainable_variables, *self.model.trainable_variables]

    def forward(self, features, training):
        return self.model(self.encoder(features, training=training), training=training)


@pytest.mark.parametrize(
    ("trainer", "replicas", "options"),
    [
        pytest.param(Penalised, 1, {"accumulate_steps": 2}, marks=pytest.mark.slow),
        pytest.param(Penalised, 2, {}, marks=pytest.mark.slow),
        (Penalised, 3, {"accumulate_steps": 2, "clip_norm": 1e3}),
        (PenalisedBeside, 2, {}),
    ],
)
def test_what_layers_add_to_the_loss_is_in_the_gradient_once(bench, trainer, replicas, options):
    """7 examples: uneven shares. The added mean is each share's own, weighted by its examples: the whole batch's."""
    features = np.random.default_rng(0).normal(1, 1, size=(7, 3)).astype(np.float32)
    source = features, np.zeros(7, np.int32)
    made = bench(trainer(), source, 7, replicas, optimizer="sgd", learning_rate=1.0, eval_source=source, **options)
    evaluated, values = made.strategy.evaluate().values(), made.train(1)
    kernel = np.full(3, 0.5)
    wrong = features @ kernel - 1
    by_name = {v.path.split("/")[-1]: v.numpy() for v in made.trainer.trainable_variables}
    gradient = 2 * features.T @ wrong / 7 + 2 * 0.1 * kernel
    np.testing.assert_allclose(kernel - by_name["kernel"][:, 0], gradient, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(1 - by_name["weight"], 0.3 * np.mean(features**2), rtol=1e-5)
    penalties = 0.1 * np.sum(kernel**2) + 0.3 * np.mean(features**2)
    for found in (values, evaluated):
        np.testing.assert_allclose(found["loss"], [np.sum(wrong**2), 7], rtol=1e-5)  # of the data alone
        totals, counts = found["loss_with_penalties"]  # of two means: the loss's, and what the layer adds
        np.testing.assert_allclose(np.sum(totals / counts), np.mean(wrong**2) + penalties, rtol=1e-5)


class Nested(Squares):
    """Two towers of layers, held as `kind` says."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def build(self):
        tf.keras.utils.set_random_seed(1)
        layers = tf.keras.layers
        towers = [
            [layers.Dense(3, kernel_regularizer="l2"), layers.BatchNormalization(momentum=0.5), layers.Dropout(0.5)]
            for _ in range(2)
        ]
        for dense, norm, _ in towers:
            dense.build([None, 3])
            norm.build([None, 3])
        self.all = lambda: towers  # which nothing looks into
        if self.kind == "attributes":
            self.left, self.right = towers
        elif self.kind == "deep":
            self.towers = {"left": tf.Module(), "right": {"body": tuple(towers[1])}}
            self.towers["left"].parts = [tf.Module()]
            self.towers["left"].parts[0].layers = towers[0]
        self.optimizer = make_optimizer(self, self.trainable_variables)

    @property
    def trainable_variables(self):
        return [v for tower in self.all() for layer in tower for v in layer.trainable_variables]

    def forward(self, features, training):
        outputs = []
        for dense, norm, drop in self.all():
            outputs.append(drop(norm(dense(features), training=training), training=training))
        return tf.reduce_sum(outputs[0] * outputs[1], 1, keepdims=True)


def test_layers_are_found_at_any_depth(bench):
    """Their penalties count, their dropout samples by the step, their moving statistics are equal on all replicas."""
    features = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
    found = {}
    for kind in ("attributes", "deep"):
        made = bench(Nested(kind), (features, features[:, 0]), 8, 2, optimizer="sgd", learning_rate=0.01)
        sums = made.train(3)
        statistics = [made.copies(v) for tower in made.trainer.all() for v in tower[1].non_trainable_variables]
        assert all(np.array_equal(copies[0], copies[-1]) for copies in statistics)
        found[kind] = sums["loss_with_penalties"], [copies[0] for copies in statistics]
    assert found["deep"][0] == pytest.approx(found["attributes"][0], rel=1e-6)
    np.testing.assert_allclose(found["deep"][1], found["attributes"][1], rtol=1e-6)


def test_a_trained_variable_that_no_attribute_holds_is_refused(bench):
    made = bench(Nested("nowhere"), (np.ones((4, 3), np.float32), np.zeros(4, np.float32)), 4)
    with pytest.raises(ValueError, match=r"uses a trainable variable, batch_norm.*/beta \[3\], that is in none of its"):
        made.train(1)


@pytest.mark.parametrize("name", ["inventory", "reduction", "run_context"])
def test_an_attribute_with_a_name_that_the_engine_sets_is_refused(bench, name):
    mine = Linear()
    setattr(mine, name, {"items": 3})
    with pytest.raises(UsageError, match=rf"Linear\.{name} is of .*; give yours another name"):
        bench(mine, (np.ones((4, 3), np.float32), np.zeros(4, np.float32)), 4)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_loss_and_metrics_get_outputs_in_float32(bench, precision):
    class Precise(Linear):
        def loss(self, outputs, batch):
            return mean(tf.square(outputs[:, 0] - batch[1]))

        def metrics(self, outputs, batch):
            return {"error": mean(tf.abs(outputs[:, 0] - batch[1]))}

    source = np.ones((4, 3), np.float32), np.zeros(4, np.float32)
    made = bench(Precise(), source, 4, precision=precision, eval_source=source)
    assert made.train(1)["error"][1] == 4
    assert made.strategy.evaluate().means().keys() == {"loss", "error"}


class Noisy(Linear):
    def forward(self, features, training):
        return self.model(features + tf.random.normal([1]))


class NoisyBySeed(Linear):
    def forward(self, features, training):
        return self.model(features + tf.random.stateless_normal([1], step_context().seed()))


class Summing(Linear):
    dtype = "bfloat16"

    def forward(self, features, training):
        messages = tf.gather(tf.cast(features, self.dtype), tf.zeros([8], tf.int32))
        nodes = tf.math.unsorted_segment_sum(messages, tf.zeros([8], tf.int32), tf.shape(features)[0], name="nodes")
        return self.model(tf.cast(nodes, tf.float32))


class SummingInFloat32(Summing):
    dtype = "float32"


DRAWN = "differ in a resumed run, also with a seed (RandomStandardNormal)"
ROUNDED = "accumulate 16-bit values in 16 bits, which loses digits: nodes"


@pytest.mark.parametrize(
    ("trainer", "line", "is_warned"),
    [
        (Noisy, DRAWN, True),
        (NoisyBySeed, DRAWN, False),
        (Summing, ROUNDED, True),
        (SummingInFloat32, ROUNDED, False),
    ],
)
def test_what_a_step_should_not_do_is_warned_of(bench, caplog, monkeypatch, trainer, line, is_warned):
    # Which counts over the life of the process.
    monkeypatch.setattr(logging, "warning_once", logging.warning)
    stream = tf.data.Dataset.from_tensor_slices((np.ones((5, 3), np.float32), np.zeros(5, np.int32)))
    bench(trainer(), stream, 4).train(2)
    assert (line in caplog.text) == is_warned


class Summarized(Linear):
    def loss(self, outputs, batch):
        tf.summary.scalar("sum", tf.reduce_sum(batch[0]), step=0)
        return super().loss(outputs, batch)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_summary_in_a_step_on_replicas_is_said_to_be_of_one(bench, caplog, monkeypatch, tmp_path, replicas):
    monkeypatch.setattr(logging, "warning_once", logging.warning)
    made = bench(Summarized(), (np.ones((4, 3), np.float32), np.zeros(4, np.int32)), 4, replicas)
    with tf.summary.create_file_writer(str(tmp_path)).as_default():
        made.run(1)
    assert ("what one of 2 replicas computes" in caplog.text) == (replicas == 2)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (lambda x: (tf.reduce_sum(x), tf.constant(-2.0)), "its count is negative or not finite"),
        (lambda x: (tf.reduce_sum(x), tf.reduce_sum(x) / 0.0), "its count is negative or not finite"),
        (lambda x: (x, tf.constant(4.0)), r"total and count are of shape \(4,\) and \(\), not scalars"),
    ],
    ids=["negative", "infinite", "vector"],
)
def test_debug_checks_the_pair_that_any_loss_returns(bench, pair, message):
    class Wrong(Linear):
        def loss(self, outputs, batch):
            return pair(tf.abs(outputs[:, 0]) + 1)

    made = bench(Wrong(), (np.ones((4, 3), np.float32), np.zeros(4, np.int32)), 4, debug=True)
    with pytest.raises((TypeError, ValueError, tf.errors.InvalidArgumentError), match=f"Wrong.loss: {message}"):
        made.train(1)


def test_gradient_norm_is_taken_only_where_something_is_due_unless_it_is_needed(bench):
    source = np.ones((24, 3), np.float32), np.zeros(24, np.int32)
    assert bench(Linear(), source, 4).train(6, calls_of=3)["gradient_norm"][1] == 2
    assert bench(Linear(), source, 4, clip_norm=1.0).train(6, calls_of=3)["gradient_norm"][1] == 6


def poisoned_images():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(12, 12, 12, 1)).astype(np.float32)
    features[5] = np.nan  # in the second batch of four; on two replicas, the first's
    return features, rng.integers(0, 3, 12).astype(np.int32)


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_batch_that_is_not_finite_leaves_no_trace_when_skipped(bench, replicas):
    made = bench(
        Cnn(batch_norm=True), poisoned_images(), 4, replicas,
        num_classes=3, shuffle=False, on_nonfinite="skip", ema_decay=0.9,
    )  # fmt: skip
    assert made.train(1)["skipped"] == (0, replicas)
    step = made.state.step_variable
    before = made.arrays()
    values = made.train(2)
    assert values["skipped"] == (replicas, replicas)
    assert "gradient_norm" not in values or values["gradient_norm"] == (0, 0)
    step.assign(1)
    assert_same(made.arrays(), before)
    assert made.train(3)["skipped"] == (0, replicas)
    assert all(np.all(np.isfinite(array)) for array in made.arrays())


class Towers(Trainer):
    """Two models in a list, optimizers in a dictionary, and a layer by itself; each is there a second time."""

    def build(self):
        layers = tf.keras.layers
        self.drop = layers.Dropout(0.5, seed=1)
        self.towers = [tf.keras.Sequential([layers.Dense(3), layers.Dropout(0.5)]) for _ in range(2)]
        for tower in self.towers:
            tower.build([None, 2])
        self.zero = self.towers[0]
        self.by_name = {
            name: make_optimizer(self, tower.trainable_variables) for name, tower in zip("ab", self.towers, strict=True)
        }


def test_models_and_optimizers_in_lists_and_dictionaries_are_found_once():
    trainer = Towers()
    example = np.zeros([1, 2], np.float32), np.zeros(1, np.int32)
    prepare(trainer, RunContext(num_classes=3, example=example))
    found = Inventory(trainer)
    assert found.models == trainer.towers
    assert list(found.optimizers) == ["by_name.a", "by_name.b"]
    assert len(found.all_weights) == 4
    sampled = [trainer.drop.seed_generator, *(tower.layers[-1].seed_generator for tower in trainer.towers)]
    assert {id(generator) for generator, _ in found.seed_generators} == {id(generator) for generator in sampled}


def test_what_must_be_overridden_says_so():
    with pytest.raises(UsageError, match="Trainer has no build_model"):
        Trainer().build_model()
    with pytest.raises(UsageError, match="Trainer has no loss"):
        Trainer().loss(None, None)


class Table(Squares):
    """Two ids an example, whose rows are the model's only weights but a bias."""

    def __init__(self, num_shards=1):
        super().__init__()
        self.table = Embedding("rows", 12, 3, num_shards=num_shards)

    def build_model(self):
        return tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(1)])

    def forward(self, features, training):
        return self.model(tf.reduce_sum(self.table(features, training=training), 1))


KERAS_CLIPS = {"clip_value": "clipvalue", "clip_variable_norm": "clipnorm", "clip_norm": "global_clipnorm"}


@pytest.mark.parametrize(
    "clip", ["clip_value", "clip_variable_norm", pytest.param("clip_norm", marks=pytest.mark.slow)]
)
def test_clipped_updates_are_keras_ones(bench, clip):
    """One update of 7 examples, uneven shares, beside Keras's on the whole batch: 1e-5, the rounding of its sums."""
    rng = np.random.default_rng(1)
    features, labels = rng.normal(size=(7, 3)).astype(np.float32), rng.normal(size=7).astype(np.float32)

    class Plane(Linear):
        def loss(self, outputs, batch):
            return mean(tf.square(outputs[:, 0] - batch[1]))

    how = {"accumulate_steps": 2, "optimizer": "sgd", "learning_rate": 1.0, clip: 0.3}
    made = bench(Plane(), (features, labels), 7, 3, **how)
    made.train(1)
    theirs = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="zeros")])
    theirs.compile(tf.keras.optimizers.SGD(1.0, **{KERAS_CLIPS[clip]: 0.3}), "mse")
    theirs.train_on_batch(features, labels)
    assert_close(made.trainer.model.weights, theirs.weights, rtol=1e-5, atol=1e-7)
    assert np.abs(made.trainer.model.weights[0]).max() > 0.1


@pytest.mark.parametrize("clip", [pytest.param("clip_value", marks=pytest.mark.slow), "clip_variable_norm"])
def test_a_table_is_clipped_as_one_variable_whose_rows_occur_once(bench, clip):
    """Ids that repeat are summed before they are clipped, and shards have one norm: as many as there are, as one."""
    ids = np.int64([[3, 3], [3, 4], [7, 1]])
    labels = np.float32([9, 9, 9])
    found = []
    for shards, replicas in ((1, 1), (3, 1), (1, 2)):
        made = bench(Table(shards), (ids, labels), 3, replicas, optimizer="sgd", learning_rate=1.0, **{clip: 0.2})
        before = made.trainer.table(ids).numpy()
        made.train(1)
        found.append(made.trainer.table(ids).numpy() - before)
    for other in found[1:]:
        np.testing.assert_allclose(found[0], other, rtol=1e-5, atol=1e-7)
    rows = {int(i): row for i, row in zip(ids.ravel(), found[0].reshape(-1, 3), strict=True)}
    size = np.sqrt(sum(np.square(row).sum() for row in rows.values()))
    # A step of a learning rate of 1 is the clipped gradient; rows of 0.05 lose some digits where it is taken off them.
    limit = size if clip == "clip_variable_norm" else np.abs(list(rows.values())).max()
    assert limit == pytest.approx(0.2, rel=1e-5)


def test_a_precision_is_that_of_the_trainer_s_layers_alone():
    trainer = Mlp((4,))
    example = np.zeros([1, 2], np.float32), np.zeros(1, np.int32)
    prepare(trainer, RunContext(StepOptions(precision="bfloat16"), 3, example=example))
    assert trainer.model.layers[-1].compute_dtype == "bfloat16"
    assert tf.keras.config.dtype_policy().name == "float32"
    with pytest.raises(ValueError, match="optimizer"):
        prepare(Mlp((4,)), RunContext(StepOptions(precision="float16", optimizer="none such"), 3, example=example))
    assert tf.keras.config.dtype_policy().name == "float32"


class Annealed(Linear):
    power = 1

    def __init__(self):
        super().__init__()
        self.beta, self.traced, self.shares = 0.0, 0, {"a": 1.0}
        self.best, self.shown = None, 0.0  # which no step reads
        self.limit = None

    def loss(self, outputs, batch):
        self.traced += 1
        scale = 1.0 if self.limit is None else 2.0
        return mean(scale * self.shares["a"] * tf.square(outputs[:, 0]) * (1 + self.beta) ** self.power)


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_plain_attribute_that_changes_after_the_trace_is_named_once(bench, caplog, evaluates):
    data = (np.ones((8, 3), np.float32), np.zeros(8, np.float32))
    made = bench(Annealed(), data, 4, eval_source=data, optimizer="sgd", learning_rate=0.0)

    def call():
        if evaluates:
            made.strategy.evaluate()
        else:
            made.run(1)

    for _ in range(2):
        call()
    assert "as it was traced" not in caplog.text
    for step in range(2):
        made.trainer.beta += 1.0
        made.trainer.shares["a"], made.trainer.power = 2.0 + step, 2
        made.trainer.best, made.trainer.shown, made.trainer.limit = 0.5 + step, "line", 1.0
        call()
    lines = [record.getMessage() for record in caplog.records if "as it was traced" in record.getMessage()]
    assert len(lines) == 4
    assert any("Annealed.beta: a step that reads it keeps 0.0, as it was traced, and it is 1.0 now" in x for x in lines)
