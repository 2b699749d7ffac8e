"""What TensorBoard shows is of small runs, of which this is one."""

from __future__ import annotations

import pytest

from crankshaft.models.mlp import Model as Mlp
from tests.parts.tensorboard.boards import BATCH, data


@pytest.fixture
def made(bench, compiled):
    def make(trainer, replicas, **options):
        return bench(trainer, data(), BATCH, replicas, num_classes=3, eval_source=data(1), **options)

    def get(trainer=None, replicas=1, **options):
        if trainer is not None:
            return make(trainer, replicas, **options)
        own = (replicas, *options.items())
        return compiled(own, lambda: make(Mlp(hidden_units=(8,), dropout=0.5), replicas, **options))

    return get
