"""A trainer's Keras models are had by their names: while it trains, and of its checkpoints."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Trainer, UsageError, load_model, mean, open_run


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
        with pytest.raises(
            UsageError, match=r"^name='coder': Vae has no Keras model of that name; it has decoder, model"
        ):
            run.predict(codes, name="coder")
    for trainer_class in (None, Vae):
        loaded = load_model(tmp_path / "run", trainer_class=trainer_class, name="decoder")
        np.testing.assert_array_equal(loaded(codes), run.models["decoder"](codes))
        with pytest.raises(UsageError, match=r"name='coder'"):
            load_model(tmp_path / "run", trainer_class=trainer_class, name="coder")
