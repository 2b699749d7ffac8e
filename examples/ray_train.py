"""Trains on two nodes of Ray's, and reports each epoch to it: python ray_train.py /shared/runs/ray

Ray Train places the workers, and restarts them if one or its node is lost; the run resumes from its newest
checkpoint. Connects to the cluster of RAY_ADDRESS, else starts one here. Needs `pip install 'ray[train,tune]'`.
"""

import os
import pathlib
import sys
import tempfile

import ray.train
import tensorflow as tf
from ray.train.tensorflow import TensorflowTrainer

import crankshaft
from crankshaft.input import digits
from crankshaft.models.classification import Classifier


class Small(Classifier):
    """A small network for images of 28 x 28."""

    def build_model(self):
        layers = tf.keras.layers
        return tf.keras.Sequential([layers.Flatten(), layers.Dense(64, "relu"), layers.Dense(10)])


def loop(config: dict) -> None:
    """Runs in each worker, whose role is in TF_CONFIG, which Ray sets."""
    os.environ.pop("TF_USE_LEGACY_KERAS", None)  # Ray selects Keras 2
    data = digits.load(None, seed=0)
    flags = {"strategy": "multi_worker", "checkpoint_every_steps": 100, "jit": "off", "progress": "plain"}
    with crankshaft.open_run(Small, data=data, **config | flags) as run:
        while run.stop is None:
            run.train(epochs=1)
            report({"step": run.step, **run.evaluate()}, config["run_dir"])


def report(metrics: dict, run_dir: str) -> None:
    """Reports metrics to Ray, which keeps them only with a checkpoint: here a file that names the run's run_dir."""
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "run_dir").write_text(run_dir)
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


def train(run_dir: str, epochs: int) -> ray.train.Result:
    """Trains two workers, each on a node of its own if there are two, and returns their last report."""
    trainer = TensorflowTrainer(
        loop,
        train_loop_config={"run_dir": run_dir, "train_epochs": epochs},
        scaling_config=ray.train.ScalingConfig(num_workers=2, placement_strategy="SPREAD"),
        run_config=ray.train.RunConfig(
            name="ray",
            storage_path=f"{run_dir}-reports",
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=1),
            failure_config=ray.train.FailureConfig(max_failures=3),
        ),
    )
    return trainer.fit()


if __name__ == "__main__":
    ray.init()
    reported = train(os.path.abspath(sys.argv[1]), epochs=int((*sys.argv, "20")[2])).metrics
    print(f"step {reported['step']}: loss {reported['loss']:.6f}, accuracy {reported['accuracy']:.4f}")
