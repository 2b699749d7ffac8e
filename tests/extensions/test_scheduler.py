"""A scheduler of one's own, which tells each task of the others by variables; two tasks train one device's weights."""

from __future__ import annotations

import os

import numpy as np
import tensorflow as tf

import crankshaft
from crankshaft.runner.host.tasks import Tasks, register
from tests import runs
from tests.forked import PYTHON_PATH
from tests.processes import Program, free_ports

X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
Y = X.sum(1, keepdims=True)


def tasks(environment):
    return Tasks("mine", tuple(environment["MINE_TASKS"].split(",")), int(environment["MINE_RANK"]))


class Line(crankshaft.Trainer):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])

    def loss(self, outputs, batch):
        return crankshaft.mean(tf.square(outputs - batch[1])[:, 0])


def test_two_tasks_of_a_scheduler_train_and_resume(tmp_path):
    for steps in (2, 4):
        addresses, programs = ",".join(f"localhost:{port}" for port in free_ports(2)), []
        for rank in range(2):
            variables = {**os.environ, "PYTHONPATH": PYTHON_PATH, "MINE_TASKS": addresses, "MINE_RANK": str(rank)}
            flags = (f"--run_dir={tmp_path}/run", f"--train_steps={steps}", "--global_batch_size=16", "--optimizer=sgd")
            command = (__file__, *flags, "--learning_rate=0.1")
            programs.append(Program(command, tmp_path / f"{steps}-{rank}", variables))
        try:
            for program in programs:
                program.wait().ok()
        finally:
            for program in programs:
                program.end()
    assert runs.result(tmp_path / "run")["strategy"] == "multi_worker"
    weights = np.zeros([3, 1])
    for _ in range(4):
        weights -= 0.1 * 2 * X.T @ (X @ weights - Y) / len(X)
    found = [value for value in runs.tensors(tmp_path / "run").values() if value.shape == (3, 1)]
    assert any(np.allclose(value, weights, atol=1e-6) for value in found)


if __name__ == "__main__":  # as one of the tasks
    register("MINE_RANK", tasks)
    crankshaft.main(Line, data=lambda: ((X, Y), None))
