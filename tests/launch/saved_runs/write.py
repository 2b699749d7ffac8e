"""Trains the runs that tests/launch/test_saved_runs.py resumes, one folder a version: `make saved-runs` writes its own.

Each was stopped at step 12; `expected.json` has the result at step 20 of the same run without a stop. Optimizers, hooks
and layers are those that keep state. `make saved-runs ARGS="fit one_device"` writes some.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import keras
import numpy as np
import tensorflow as tf

import crankshaft
from tests.logical_cpus import make_four

HERE = pathlib.Path(__file__).resolve().parent
ROOT, NEW = HERE.parents[2], HERE / crankshaft.__version__
SAVED, END, PER_EPOCH = 12, 20, 4  # steps
RESULTS = "train", "eval"


def examples():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(48, 5)).astype(np.float32)
    labels = (features[:, :3].argmax(1)).astype(np.int32)
    return (features[:32], labels[:32]), (features[32:], labels[32:])


def model() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input([5]),
            layers.Dense(6, "relu"),
            layers.BatchNormalization(synchronized=True),
            layers.Dropout(0.25),
            layers.Dense(3),
        ]
    )


class Classifier(crankshaft.Trainer):
    """Trains the small model."""

    def build_model(self):
        return model()

    def loss(self, outputs, batch):
        return crankshaft.mean(tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], outputs))


def of_dataset():
    (features, labels), evaluated = examples()
    return tf.data.Dataset.from_tensor_slices((features, labels)), evaluated


COMMON = {
    "global_batch_size": 8,
    "eval_every_steps": PER_EPOCH,
    "checkpoint_every_steps": PER_EPOCH,
    "keep_checkpoints": 1,
    "summary_every_steps": 2,
    "learning_rate": 0.02,
    "jit": "off",
    "progress": "off",
}
MONITORS = {"reduce_lr": {"factor": 0.5, "patience": 1}, "early_stopping": {"patience": 50}, "restore_best": True}


def one_device(run_dir, steps: int) -> dict:
    """Trains with Adam, the weights' average, monitors and a stream of examples."""
    how = {"optimizer": "adam", "ema_decay": 0.9, "warmup_steps": 3, "shuffle_buffer": 16, **MONITORS, **COMMON}
    return crankshaft.run(Classifier, data=of_dataset, train_steps=steps, run_dir=run_dir, **how).result


def two_replicas(run_dir, steps: int) -> dict:
    """Trains in float16 with a loss scale, on two replicas that send gradients in bfloat16."""
    place = {"strategy": "mirrored", "num_virtual_devices": 2, "precision": "float16", "reduce_dtype": "bfloat16"}
    how = {"optimizer": "momentum", **place, **COMMON}
    return crankshaft.run(Classifier, data=examples, train_steps=steps, run_dir=run_dir, **how).result


def fit(run_dir, steps: int) -> dict:
    """Trains as Keras's fit does, with callbacks and metrics that keep state."""
    keras.utils.set_random_seed(1)
    compiled = model()
    compiled.compile(
        keras.optimizers.RMSprop(0.02, momentum=0.5),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    )
    (x, y), evaluated = examples()
    callbacks = [
        keras.callbacks.ReduceLROnPlateau(factor=0.5, patience=1, min_delta=0.1),
        keras.callbacks.EarlyStopping(patience=50),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate if epoch % 2 else 0.9 * rate),
    ]
    how = {name: COMMON[name] for name in ("keep_checkpoints", "summary_every_steps", "jit")}
    where = {"batch_size": 8, "epochs": steps // PER_EPOCH, "verbose": 0, "run_dir": run_dir}
    run = crankshaft.fit(compiled, x, y, validation_data=evaluated, callbacks=callbacks, **where, **how)
    return run.result


def parameter_servers(run_dir, steps: int) -> dict:
    """Trains around two servers, with one worker, so that the order of updates is known."""
    local = [sys.executable, "-m", "crankshaft", "local", "--workers=1", "--ps=2", "--", __file__]
    how = {**COMMON, "optimizer": "adam", "train_steps": steps, "run_dir": run_dir}
    flags = [f"--{name}={value}" for name, value in how.items()]
    here = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*local, *flags], env=here, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads((pathlib.Path(run_dir) / "result.json").read_text())


RUNS = {each.__name__: each for each in (one_device, two_replicas, fit, parameter_servers)}


def write(name: str) -> None:
    """Trains one of the runs and puts what of it a resumed run reads here."""
    unread = shutil.ignore_patterns("tensorboard", "logs", ".lock", "result.json")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        RUNS[name](name, SAVED)  # a relative run_dir: no path of this machine is saved
        shutil.rmtree(NEW / name, ignore_errors=True)
        shutil.copytree(name, NEW / name, ignore=unread)
        record = NEW / name / "events.jsonl"  # which has the command
        record.write_text(record.read_text().replace(str(ROOT), "/home/me/crankshaft"))
        result = RUNS[name]("whole", END)
        os.chdir(HERE)
    expected = {split: result[split] for split in RESULTS}
    (NEW / name / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("--"):
        crankshaft.main(Classifier, data=examples)
    make_four()  # before the first run: `two_replicas` needs two
    for each in sys.argv[1:] or RUNS:
        write(each)
