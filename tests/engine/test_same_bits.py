"""A run has the same bits in calls of any length, after a resume, and on each replica, whatever it trains."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.optimizers import outer
from crankshaft.engine.reduction.local_sgd import LocalSgd
from crankshaft.input import synthetic_clicks
from crankshaft.models import dlrm, transformer_lm, wide_deep
from crankshaft.models.mlp import Model as Mlp
from crankshaft.parts import sharding as parallel
from tests.bench import assert_same_bits
from tests.engine.optimizers import test_averaging
from tests.engine.reduction.noisy_points import four_classes
from tests.engine.reduction.test_aggregation import Recurrent, Replay
from tests.engine.reduction.test_local_sgd import Normalized
from tests.engine.test_gan import Gan, points
from tests.parts.sharding import test_shard_optimizer
from tests.parts.tables.test_admission import figures, power_law, pull

AT, UNTIL = 8, 20  # in the second and third epoch, whose last batches are smaller; periods of local SGD end there
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 37, (50, 9)).astype(np.int32)
ROWS = RNG.normal(size=(28, 3)).astype(np.float32), np.ones(28, np.float32)


class Halves(Mlp):
    """In 16 bits; Grappler may fuse the product with the bias in one graph of the step, and not in another."""

    def build_model(self):
        layers = [parallel.Dense(16, "columns", "relu"), parallel.Dense(8), tf.keras.layers.Dropout(0.2)]
        return tf.keras.Sequential([*layers, parallel.Dense(4)])


def mlp():
    return Mlp((16,), dropout=0.2)


def language_model():
    return transformer_lm.Model(layers=1, width=16, heads=2, dropout=0.2)


def residuals():
    return transformer_lm.Model(layers=1, width=16, heads=2, tied=False)


def clicks():
    return tuple(synthetic_clicks.load(None, 0, fields=4, rows=20, examples=98).train)


PAIR = {"replicas": 2}
MLP = mlp, lambda: four_classes(98), {"batch_size": 16, "num_classes": 4}  # six whole batches an epoch, and one of 2
LOCAL = Normalized, MLP[1], {**MLP[2], "block_steps": 5}  # calls end within periods of 4 steps
TABLES = {"batch_size": 16, "num_classes": 2, "vocabulary": {"categories": 20}}
LANGUAGE = language_model, lambda: (TOKENS[:, :-1], TOKENS[:, 1:]), {"batch_size": 8, "num_classes": 37}
STATE = lambda: ROWS, {"batch_size": 4, "optimizer": "adam", "shuffle": False, **PAIR}
ADMISSION = lambda: power_law(200), {"batch_size": 30, "optimizer": "adam", "learning_rate": 0.1}

# What trains, its data, what makes the case of them; those with "by" in their names are slow.
CASES = {
    "averaged weights": (*MLP, {"ema_decay": 0.99, "unrolls": True}),
    "averaged weights by xla": (*MLP, {"ema_decay": 0.99, "jit": True}),
    "16 bits": (Halves, *MLP[1:], {"precision": "bfloat16", "unrolls": True}),
    "float16 by a loss scale": (*MLP, {"precision": "float16"}),
    "clipped": (*MLP, {"clip_norm": 1.0, "unrolls": True, **PAIR}),
    "a batch of one": (mlp, lambda: four_classes(3), MLP[2], {"batch_size": 2, "clip_norm": 1.0, **PAIR}),
    "local SGD": (*LOCAL, {"reduction": lambda: LocalSgd(4, outer()), **PAIR}),
    "local SGD by Nadam": (*LOCAL, {"reduction": lambda: LocalSgd(4, outer()), "optimizer": "nadam", **PAIR}),
    "local SGD by xla": (*LOCAL, {"reduction": lambda: LocalSgd(4, outer()), "jit": True}),
    "tables": (lambda: dlrm.Model(width=4, bottom_units=(8,), top_units=(16,)), clicks, TABLES, {"unrolls": True}),
    "tables by micro-batches": (
        lambda: wide_deep.Model(width=4, hidden_units=(16,), crosses=("all",)),
        clicks,
        TABLES,
        {"parallel_micro_batches": 3},
    ),
    "admission": (lambda: pull(admit_after=3), *ADMISSION, PAIR),
    "admission by shards": (lambda: pull(admit_after=3, shards=2), *ADMISSION, {}),
    "averaged model": (test_averaging.MeanTeacher, test_averaging.data, {"batch_size": 16}, PAIR),
    "GAN": (Gan, points, {"batch_size": 16, "learning_rate": 0.01, "ema_decay": 0.9}, PAIR),
    "each replica's state": (Replay, *STATE),
    "recurrent state": (Recurrent, *STATE),
    "recompute": (*LANGUAGE, {"recompute": True}),
    "sums of three gradients": (residuals, *LANGUAGE[1:], {"unrolls": True}),
    "shard_optimizer": (test_shard_optimizer.Model, *STATE, {"shard_optimizer": True}),
}


# A kind of state each, at its cheapest.
CHEAPEST = ("GAN", "each replica's state", "recurrent state", "shard_optimizer")


def _marks(case):
    return [pytest.mark.slow] * (" by " in case) + [pytest.mark.thorough] * (case not in CHEAPEST)


@pytest.mark.parametrize("case", [pytest.param(name, marks=_marks(name)) for name in CASES])
def test_a_run_has_the_same_bits_in_any_calls_and_after_a_resume(bench, tmp_path, case):
    trainer, source, *options = CASES[case]
    options = {name: value for each in options for name, value in each.items()}
    if "reduction" in options:
        options["reduction"] = options["reduction"]()
    made = bench(trainer(), source(), **options)
    assert_same_bits(made, tmp_path, AT, UNTIL, (4, 8) if case.startswith("local") else (1, 7))
    if case.startswith("admission"):
        saved = made.checkpoints(tmp_path).latest().variables
        shards = len(made.trainer.table.shards)
        assert f"trainer/table/admissions/{shards - 1}/counts/.ATTRIBUTES/VARIABLE_VALUE" in saved
        assert 0 < figures(made.trainer.table)[0] < 32
    if case.endswith("state"):
        state = made.trainer.recurrent.states[0] if trainer is Recurrent else made.trainer.ring
        assert not np.array_equal(*made.copies(state))
