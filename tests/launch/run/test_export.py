"""What was trained is served: exports and loaded models give what `run.predict` gives."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import crankshaft
from crankshaft import load_model, run
from crankshaft.engine.keras_trainer import KerasTrainer

L = tf.keras.layers
QUIET = {"jit": "off", "progress": "off"}
rng = np.random.default_rng(0)
LENGTHS = np.array([3, 1, 5, 2] * 4, np.int32)
LABELS = rng.normal(size=(16, 1)).astype(np.float32)


class MeanOfWords(tf.keras.Model):
    """Computes something else of dense rows of words than of ragged ones."""

    def __init__(self):
        super().__init__()
        self.rows, self.dense = L.Embedding(10, 4), L.Dense(1)

    def call(self, words):
        if not isinstance(words, tf.RaggedTensor):
            return self.dense(9.0 * self.rows(words[:, 0]))
        rows = self.rows(words.values)
        return self.dense(tf.math.unsorted_segment_mean(rows, words.value_rowids(), words.nrows()))


def compiled_model():
    model = MeanOfWords()
    model.compile("adam", "mse", metrics=["mae"])
    return model


def served(folder, **features):
    """The outputs of an exported model by name, NumPy arrays."""
    serve = tf.saved_model.load(folder).signatures["serving_default"]
    return {name: x.numpy() for name, x in serve(**{name: tf.constant(x) for name, x in features.items()}).items()}


def test_a_compiled_model_is_loaded_and_exported_as_it_was_trained(tmp_path):
    words = tf.RaggedTensor.from_row_lengths(rng.integers(1, 9, sum(LENGTHS)), LENGTHS)
    done = crankshaft.fit(compiled_model, words, LABELS, batch_size=8, epochs=2, verbose=0, run_dir=tmp_path / "run")
    expected, trainer_class = done.predict(words), KerasTrainer.for_model(compiled_model)
    loaded = load_model(tmp_path / "run", trainer_class=trainer_class)
    np.testing.assert_allclose(loaded.predict(words, verbose=0), expected, rtol=1e-5)
    how = {"data": ((words, LABELS), None), "run_dir": tmp_path / "run", **QUIET}
    folder = run(trainer_class, mode="export", **how).result["export"]
    outputs = served(folder, features_0=words.to_tensor(), features_1=LENGTHS)["outputs"]
    np.testing.assert_allclose(outputs, expected, rtol=1e-5)
