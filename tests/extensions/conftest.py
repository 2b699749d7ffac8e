"""What the tests of extensions share: `trained`, a run on one device or two replicas, stopped and resumed."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

import crankshaft
from tests.arrays import assert_same
from tests.launch.conftest import crank
from tests.logical_cpus import make_four

make_four()
_ = crank  # the fixture

FLAGS = {"optimizer": "sgd", "learning_rate": 0.1, "global_batch_size": 8, "shuffle_buffer": 0, "jit": "off"}
ON = {1: {}, 2: {"strategy": "mirrored", "num_virtual_devices": 2}}


def pytest_collection_modifyitems(items):
    """All of them are for `make test-rest`."""
    for item in items:
        if "/extensions/" in item.nodeid:
            item.add_marker("thorough")


@pytest.fixture(params=ON, ids="{} replicas".format)
def replicas(request) -> int:
    return request.param


@pytest.fixture
def trained(replicas, tmp_path):
    """trained(trainer, data, steps, **flags): the model's weights after so many steps, and the run's result.

    Half of them, and the rest in another run that resumes there, train the same bits.
    """

    def train(trainer, data, steps: int = 6, **flags) -> tuple[list[np.ndarray], dict]:
        flags, folders = {**FLAGS, **ON[replicas], "train_steps": steps, **flags}, [tmp_path / "1", tmp_path / "2"]
        with crankshaft.open_run(trainer, data=(data, None), run_dir=folders[0], **flags) as run:
            run.train(steps=steps // 2)
            run.save()
            shutil.copytree(*folders)
            run.train()
            weights, result = run.model.get_weights(), run.result
        with crankshaft.open_run(trainer, data=(data, None), run_dir=folders[1], **flags) as run:
            assert run.step == steps // 2
            run.train()
            assert_same(run.model.get_weights(), weights)
        return weights, result

    return train
