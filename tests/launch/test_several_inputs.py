"""Several inputs per step: each has its own batch size, order and position, and each mean its own count."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Data, Trainer, UsageError, mean, open_run
from crankshaft.engine.step.gradients import Gradients, Update
from tests import logical_cpus
from tests.arrays import assert_same

RATE, NEAR, FAR = 0.05, 4, 7  # 10 examples in batches of 4, 4, 2; 25 of 7, 7, 7, 4
rng = np.random.default_rng(0)
X, U = rng.normal(size=(10, 3)).astype("float32"), rng.normal(size=(25, 3)).astype("float32")
Y = (X @ np.float32([[1.0], [-2.0], [0.5]])).astype("float32")
ASKED = {"global_batch_size": NEAR, "learning_rate": RATE, "optimizer": "sgd", "jit": "off", "progress": "off"}
TWO = {"strategy": "mirrored", "num_virtual_devices": 2}


class Both(Trainer):
    """A plane near labels, which is low elsewhere: the gradient of the sum of two means."""

    def build_model(self):
        return tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(1, kernel_initializer="zeros")])

    def loss(self, outputs, batch):
        return mean(tf.square(outputs - batch[1])[:, 0])

    def train_step(self, batch):
        (x, y), u, variables = batch["near"], batch["far"], self.trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            near = mean(tf.square(self.model(x) - y)[:, 0])
            far = mean(tf.square(self.model(u))[:, 0])
        sums = [
            self.reduction.sum(tape.gradient(each.total, variables), each.count, variables=variables)
            for each in (near, far)
        ]
        means = [gradients.over(count) for gradients, count in sums]
        update = Update(self, Gradients([a + b for a, b in zip(*means, strict=True)]), variables)
        update.apply(self.optimizer, variables)
        return update.end({"loss": near, "far": far, "examples": mean(tf.cast(tf.shape(u)[:1], tf.float32))})


def arrays(**sizes):
    return Data({"near": (X, Y), "far": (U,)}, (X, Y), batch_sizes={"far": FAR, **sizes})


def streams():
    far = tf.data.Dataset.from_tensor_slices(U)
    return Data({"near": tf.data.Dataset.from_tensor_slices((X, Y)), "far": far}, (X, Y), batch_sizes={"far": FAR})


FORMS = {"arrays": (arrays, {}), "read": (arrays, {"resident_data_mb": 0}), "streams": (streams, {})}


def by_hand(steps: int, x=X, y=Y, u=U, near: int = NEAR, far: int = FAR) -> list[np.ndarray]:
    """The weights after so many steps on batches in the examples' own order."""
    w, b, at = np.zeros((3, 1)), 0.0, [0, 0]
    for _ in range(steps):
        batch, unlabelled = x[at[0] : at[0] + near], u[at[1] : at[1] + far]
        wrong, height = batch @ w + b - y[at[0] : at[0] + near], unlabelled @ w + b
        gradient = 2 * batch.T @ wrong / len(batch) + 2 * unlabelled.T @ height / len(unlabelled)
        w, b = w - RATE * gradient, b - RATE * (2 * wrong.mean() + 2 * height.mean())
        at = [(at[0] + near) % (-(-len(x) // near) * near), (at[1] + far) % (-(-len(u) // far) * far)]
    return [w, np.array([b])]


def weights(run) -> list[np.ndarray]:
    return [each.numpy() for each in run.trainer.model.weights]


def assert_close(run, expected):
    for mine, theirs in zip(weights(run), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-6)  # float32 beside float64


@pytest.mark.parametrize(
    ("form", "where"),
    [
        *((form, TWO) for form in FORMS),
        *(pytest.param(form, {}, marks=pytest.mark.slow) for form in FORMS),
        *(("arrays", {"jit": "on"}), pytest.param("read", {"jit": "on"}, marks=pytest.mark.slow)),
    ],
)
def test_each_mean_is_over_its_own_batch_also_where_epochs_end(form, where):
    logical_cpus.make_four()
    data, more = FORMS[form]
    with open_run(Both, data=data, shuffle_buffer=0, **{**ASKED, **where, **more}) as run:
        run.train(steps=5)
        means = run.train(steps=4)
        assert means["loss"] > 0
        assert_close(run, by_hand(9))
        run.train(data={"near": (X[:4], Y[:4]), "far": (U[:14],)}, steps=1)
        assert run.evaluate()["loss"] == pytest.approx(run.evaluate((X, Y))["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("form", "where"), [("streams", TWO), ("read", {}), pytest.param("arrays", TWO, marks=pytest.mark.slow)]
)
def test_a_run_that_is_resumed_in_the_middle_of_both_epochs_ends_on_the_same_bits(form, where, tmp_path):
    logical_cpus.make_four()
    data, more = FORMS[form]
    asked = {**ASKED, **where, **more, "run_dir": tmp_path / "parts"}
    with open_run(Both, data=data, **{**asked, "run_dir": tmp_path / "whole"}) as whole:
        whole.train(steps=11)
    for steps in (2, 3, 6):  # 2: in the first epoch of both; 5: in the second of both
        with open_run(Both, data=data, **asked) as run:
            run.train(steps=steps)
    assert run.step == 11
    assert_same(weights(run), weights(whole))
    assert max(abs(a - b).max() for a, b in zip(weights(whole), by_hand(11), strict=True)) > 1e-4  # it is shuffled


def test_the_others_are_shuffled_by_seeds_of_their_own_and_may_be_endless():
    same = {"a": (np.arange(12, dtype="float32"),), "b": (np.arange(12, dtype="float32"),)}

    class Seen(Trainer):
        def build_model(self):
            return tf.keras.Sequential([tf.keras.Input([1]), tf.keras.layers.Dense(1)])

        def forward(self, features, training):
            return self.model(tf.reshape(tf.concat([features["a"], features["b"]], 0), [-1, 1]))

        def loss(self, outputs, batch):
            return mean(tf.square(outputs[:, 0]))

        def metrics(self, outputs, batch):
            squares = {name: mean(tf.square(each)) for name, each in batch.items()}  # of sizes of their own
            apart = tf.abs(batch["a"][: tf.shape(batch["b"])[0]] - batch["b"])
            return {**squares, "apart": mean(apart)}

    asked = {**ASKED, "global_batch_size": 12}
    with open_run(Seen, data=Data(same, batch_sizes={}), **asked) as run:
        assert run.train(steps=1)["apart"] > 1
    squares = []
    for micro_batches in (1, 3):
        asked_too = {**asked, "accumulate_steps": micro_batches}
        with open_run(Seen, data=Data(same, batch_sizes={"b": 5}), **asked_too) as run:
            means = run.train(steps=3)  # an epoch of "b", and three of "a"
            squares.append([means["a"], means["b"]])
    np.testing.assert_allclose(squares, np.full([2, 2], np.mean(np.arange(12) ** 2)), rtol=1e-6)
    endless = tf.data.Dataset.from_tensor_slices(same["b"][0]).repeat()
    with open_run(Seen, data=Data({**same, "b": endless}), **asked) as run:
        assert run.train(epochs=3)["apart"] > 0
        assert run.step == 3


def test_inputs_that_are_not_clear_are_errors_of_one_line(tmp_path):
    logical_cpus.make_four()
    near, far = (X, Y), (U,)
    for data, where, why in [
        (Data({"near": near, "far": far}), {}, r"dictionary of tuples \(near, far\): several inputs per step, or"),
        (Data({"near": near, "far": U}, batch_sizes={}), {}, "'far' is a ndarray; give"),
        (Data(near, batch_sizes={"far": 7}), {}, "batch_sizes is for several inputs per step"),
        (arrays(near=3), {}, r"batch_sizes\['near'\]=3: the batch size of the first input is the run's"),
        (arrays(fra=3), {}, r"batch_sizes\['fra'\]: the train data has no such input; use far"),
        (arrays(far=0), {}, r"batch_sizes\['far'\]=0 is not a batch size"),
        (arrays(far=24), TWO, r"'far'\] has a batch of 1 examples, and each of 2 replicas .*; use a batch size of 23"),
        (Data({"near": near, "far": far}, {"near": near, "far": far}, batch_sizes={}), {}, "eval data"),
    ]:
        with pytest.raises(UsageError, match=why), open_run(Both, data=data, **ASKED, **where):
            pass
    with open_run(Both, data=arrays, run_dir=tmp_path, **ASKED) as run:
        with pytest.raises(UsageError, match="give a dictionary of near, far"):
            run.train(data=near, steps=1)
        run.train(steps=1)
    with pytest.raises(UsageError, match="far batch_size: 7 -> 8"):
        open_run(Both, data=lambda: arrays(far=8), run_dir=tmp_path, **ASKED)
