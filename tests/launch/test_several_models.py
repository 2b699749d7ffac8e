"""A trainer's Keras models are had by their names: while it trains, and of its checkpoints."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Trainer, UsageError, load_model, make_optimizer, mean, minimize, open_run
from crankshaft import run as run_
from crankshaft.engine import Averaged


class Vae(Trainer):
    """An encoder, which is called `model`, and a decoder."""

    def build_model(self):
        layers = tf.keras.layers
        self.decoder = tf.keras.Sequential([layers.Input([2]), layers.Dense(4)])
        return tf.keras.Sequential([layers.Input([4]), layers.Dense(2)])

    @property
    def trainable_variables(self):
        return [*self.model.trainable_variables, *self.decoder.trainable_variables]

    def forward(self, features, training=False):
        return self.decoder(self.model(features, training=training), training=training)

    def loss(self, outputs, batch):
        return mean(tf.reduce_sum(tf.square(outputs - batch), axis=-1))


def test_a_model_is_had_by_its_name(tmp_path):
    points, codes = np.ones((8, 4), np.float32), np.ones((3, 2), np.float32)
    with open_run(Vae, data=(points,), run_dir=tmp_path / "run", jit="off", progress="off", mode="train") as run:
        run.train(steps=3)
        assert sorted(run.models) == ["decoder", "model"]
        decoded = run.predict(codes, name="decoder")
        np.testing.assert_allclose(decoded, run.models["decoder"](codes), rtol=1e-6)  # compiled, and not
        np.testing.assert_allclose(run.predict(run.predict(points, name="model"), "decoder"), run.predict(points), 1e-6)
        with pytest.raises(UsageError, match=r"^name='coder': Vae has no Keras model of that name; it has decoder, m"):
            run.predict(codes, name="coder")
    for trainer_class in (None, Vae):
        loaded = load_model(tmp_path / "run", trainer_class=trainer_class, name="decoder")
        np.testing.assert_array_equal(loaded(codes), run.models["decoder"](codes))
        with pytest.raises(UsageError, match=r"name='coder'"):
            load_model(tmp_path / "run", trainer_class=trainer_class, name="coder")


class Gan(Trainer):
    """Two models, neither of which is called `model`, and an average of the generator's weights."""

    def build(self):
        layers = tf.keras.layers
        self.generator = tf.keras.Sequential([layers.Input([3]), layers.Dense(2)])
        self.critic = tf.keras.Sequential([layers.Input([2]), layers.Dense(1)])
        self.optimizer = make_optimizer(self, self.generator.trainable_variables)

    def train_step(self, batch):
        return minimize(self, batch, self.eval_step, {"loss": self.optimizer})

    def eval_step(self, batch):
        return {"loss": mean(self.critic(self.generator(tf.concat([batch, batch[:, :1]], 1)))[:, 0])}


def test_one_of_several_models_is_exported_by_its_name(tmp_path):
    replicas = {"strategy": "mirrored", "num_virtual_devices": 2}
    noise = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    asked = {"data": (noise[:, :2],), "run_dir": tmp_path / "run", "jit": "off", "progress": "off", **replicas}
    expected = run_(Gan, train_steps=1, ema_decay=0.5, **asked).predict(noise, "generator")
    export = {**asked, "mode": "export"}
    path = run_(Gan, **export, export_model="generator").result["export"]
    served = tf.saved_model.load(path)
    outputs = served.signatures["serving_default"](features=tf.constant(noise))["outputs"]
    np.testing.assert_allclose(outputs, expected, rtol=1e-6)
    saved = tf.train.load_checkpoint(f"{path}/variables/variables").get_variable_to_shape_map()
    weights = sorted(shape for name, shape in saved.items() if name.endswith("VARIABLE_VALUE"))
    assert weights == [[2], [3, 2]]  # the generator's alone
    path = run_(Gan, **export, export_model="generator", output=tmp_path / "made.keras").result["export"]
    np.testing.assert_allclose(tf.keras.models.load_model(path)(noise), expected, rtol=1e-6)
    run_(Gan, **{**asked, "mode": "predict"}, export_model="critic", output=tmp_path / "said.npz")
    with np.load(tmp_path / "said.npz") as arrays:
        assert arrays["prediction"].shape == (5,)
    with pytest.raises(UsageError, match=r"^name='maker': Gan has no Keras model of that name; it has critic, gener"):
        run_(Gan, **export, export_model="maker", output=tmp_path / "b")
    with pytest.raises(UsageError, match=r"which is missing; .* or give export_model=critic, generator$"):
        run_(Gan, **export, output=tmp_path / "c")


class Taught(Vae):
    def build(self):
        super().build()
        self.teacher = Averaged(self.model, 0.5)


@pytest.mark.parametrize("where", [{}, {"strategy": "mirrored", "num_virtual_devices": 2}], ids=["one", "two"])
def test_a_run_s_model_is_the_one_to_predict_with_and_has_no_teacher(where):
    points = np.ones((8, 4), np.float32)
    with open_run(Taught, data=(points,), jit="off", progress="off", mode="train", **where) as run:
        run.train(steps=3)
        assert [each.shape for each in run.model.weights] == [(2, 4), (4,), (4, 2), (2,)]  # by the layers' names
        assert len(run.models["teacher"].weights) == 2
        run.set_weights([np.zeros_like(each) for each in run.model.get_weights()])
        assert not run.predict(points).any()
        assert run.models["teacher"].get_weights()[0].any()
