"""What TensorBoard shows is of small runs, of which this is one."""

from __future__ import annotations

import pytest

from crankshaft.models.mlp import Model as Mlp
from tests.engine.hooks.tensorboard.boards import BATCH, data


@pytest.fixture
def made(bench):
    def make(trainer=None, replicas=1, **options):
        trainer = trainer or Mlp(hidden_units=(8,), dropout=0.5)
        return bench(trainer, data(), BATCH, replicas, num_classes=3, eval_source=data(1), **options)

    return make
