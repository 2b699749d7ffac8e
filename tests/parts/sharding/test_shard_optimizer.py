"""Replicas that share updates out (ZeRO, stage 1) beside one device: losses, equal weights, and the slots' bytes."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine import optimizers
from crankshaft.engine.errors import CheckpointError
from crankshaft.engine.hooks.evaluation import evaluate
from crankshaft.engine.mesh import sharded
from crankshaft.engine.reduction import Reduction
from crankshaft.parts.sharding import Dense
from tests.engine.trainers import Pull, Squares

WIDTH, HIDDEN, EXAMPLES = 96, 128, 60


class Model(Squares):
    """Whose weights are sharded by model and share updates along either axis; some are too small, or of an odd length.

    Args:
      normalises: whether there is a batch normalisation, whose moments differ by how a batch is divided.
    """

    def __init__(self, normalises=False):
        super().__init__()
        self.normalises = normalises

    def build_model(self):
        def dense(units):
            return tf.keras.layers.Dense(units, "tanh", kernel_initializer=tf.keras.initializers.GlorotUniform(1))

        layers = [dense(WIDTH), Dense(HIDDEN, "columns", "tanh"), Dense(WIDTH, "rows", "tanh"), dense(1)]
        if self.normalises:
            layers.insert(1, tf.keras.layers.BatchNormalization(momentum=0.5))
        return tf.keras.Sequential(layers)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(EXAMPLES, 27)).astype(np.float32), rng.normal(size=EXAMPLES).astype(np.float32)


OPTIONS = {
    "adam": {"optimizer": "adam", "accumulate_steps": 2},
    "adamw": {"optimizer": "adamw", "clip_norm": 0.3, "ema_decay": 0.9},
    "momentum": {"optimizer": "momentum", "clip_variable_norm": 0.1, "weight_decay": 0.01},
    "ftrl": {"optimizer": "ftrl", "clip_value": 0.01, "optimizer_arg": {"initial_accumulator_value": 1.0}},
    "rmsprop": {"optimizer": "rmsprop", "on_nonfinite": "skip"},
}
RUNS = [
    ("adam", (2, 1)),
    *(pytest.param(name, (2, 2), marks=pytest.mark.slow) for name in ("adamw", "rmsprop")),
    *(pytest.param(name, (2, 1), marks=pytest.mark.slow) for name in ("ftrl", "momentum")),
]


def check_copies(run, model):
    """Of each variable, those that hold the same shard hold the same bits."""
    averages = [run.trainer.optimizer.weight_average] if run.trainer.optimizer.weight_average else []
    for variable in [*run.trainer.model.trainable_variables, *(s for a in averages for s in a.shadows)]:
        held = run.copies(variable)
        alike = held if sharded.variable_sharding(variable) is None else held[::model]
        for other in alike[1:]:
            np.testing.assert_array_equal(alike[0], other)


@pytest.mark.parametrize(("options", "shape"), RUNS)
def test_losses_are_those_of_one_device(bench, data, shape, options):
    """Twenty steps; the last batch of an epoch leaves replicas uneven shares, and one step may be left out."""
    shared = {"batch_size": 8, "learning_rate": 1e-3, **OPTIONS[options]}
    if "on_nonfinite" in shared:
        data = (data[0].copy(), data[1])
        data[0][7, 3] = np.inf
    one = bench(Model(), data, eval_source=data, **shared)
    replicas = shape[0] * shape[1]
    many = bench(Model(), data, eval_source=data, replicas=replicas, model=shape[1], shard_optimizer=True, **shared)
    expected = one.curve(20)
    assert len(expected) == (17 if "on_nonfinite" in shared else 20)
    np.testing.assert_allclose(many.curve(20), expected, rtol=1e-6)
    check_copies(many, shape[1])
    if "ema_decay" in shared:
        assert evaluate(many.strategy, many.state) == pytest.approx(evaluate(one.strategy, one.state), rel=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("wire", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_sums_are_those_of_an_all_reduce(bench, data, wire):
    """Beside replicas that each update all: the same gradients, rounded once before they travel, and statistics."""
    runs = [
        bench(Model(normalises=True), data, 8, 2, reduction=Reduction(wire, bucket), optimizer="sgd", **options)
        for bucket, options in ((4 << 20, {}), (4096, {"shard_optimizer": True}))
    ]
    expected, found = (run.curve(12) for run in runs)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    for statistics in runs[1].trainer.model.layers[1].non_trainable_variables:
        runs[1].held(statistics)


@pytest.mark.thorough
def test_a_step_that_names_no_variables_sums_them_whole(bench, data):
    class Own(Model):
        def train_step(self, batch):
            gradients, metrics = self.compute_gradients(batch)
            gradients, count = self.reduction.sum(gradients, metrics["loss"].count)
            self.optimizer.apply(gradients.over(count), self.trainable_variables)
            return metrics

    runs = [bench(kind(), data, 8, 2, shard_optimizer=True, optimizer="adam") for kind in (Model, Own)]
    np.testing.assert_allclose(runs[1].curve(10), runs[0].curve(10), rtol=1e-6)


class Normalised(optimizers.SGD):
    """Whose rule looks at all of a variable."""

    is_elementwise = False


@pytest.mark.parametrize("optimizer", ["normalised", "nadam"])
@pytest.mark.parametrize(
    ("mesh", "line"),
    [
        ({"shard_optimizer": True}, "shard_optimizer has each replica update a shard of .*, and the rule of"),
        ({"model": 2}, "a mesh's model axis has each replica update a shard of .*, and the rule of"),
    ],
)
def test_rules_that_look_at_whole_variables_are_refused(bench, data, optimizer, mesh, line):
    class Own(Model):
        def build_optimizer(self):
            return Normalised(0.1) if optimizer == "normalised" else super().build_optimizer()

    with pytest.raises(ValueError, match=line):
        bench(Own(), data, 8, 2, optimizer="sgd" if optimizer == "normalised" else optimizer, **mesh)


@pytest.mark.parametrize("shape", [(2, 1), (2, 2)])
def test_each_replica_has_its_part_of_the_slots(bench, data, shape):
    def slot_bytes(run):
        slots = [slot for of_one in run.trainer.optimizer.slots.values() for slot in of_one.values()]
        return [sum(held) for held in zip(*([copy.nbytes for copy in run.copies(s)] for s in slots), strict=True)]

    (whole,) = slot_bytes(bench(Model(), data, batch_size=8, optimizer="adam"))
    replicas = shape[0] * shape[1]
    many = bench(Model(), data, batch_size=8, replicas=replicas, model=shape[1], optimizer="adam", shard_optimizer=True)
    assert all(each <= (0.51 if shape == (2, 1) else 0.28) * whole for each in slot_bytes(many))


def test_slots_that_a_table_had_in_other_shards_begin_again(bench, tmp_path):
    """On one device it had two, of which a replica's piece of a slot of all rows can't be read."""
    ids = np.arange(180)

    def made(replicas):
        trainer = Pull(1200, num_shards=3 - replicas)
        options = {"optimizer": "adam", "shard_optimizer": replicas > 1}
        return bench(trainer, (ids, ids.astype(np.float32)), 30, replicas, **options)

    first, run = made(1), made(2)
    first.train(2)
    kept = first.checkpoints(tmp_path, about={"updated": first.state.updated()})
    kept.save(2, {"state": first.state.host_state()}, wait=True)
    with pytest.raises(CheckpointError, match=r"\.m: \[1200, 3\] float32 here, \[1200, 3\] float32 in 2 shards in the"):
        run.restore(tmp_path)
    run.restore(tmp_path, allow_changed=True)
    for shard, values in enumerate(first.trainer.table.shards):
        np.testing.assert_array_equal(run.held(run.trainer.table.shards[0])[shard::2], values)
    (slots,) = run.trainer.optimizer.slots.values()
    assert not any(part.any() for slot in slots.values() for part in run.copies(slot))
    assert run.held(run.trainer.optimizer.update_counts).tolist() == [0]
