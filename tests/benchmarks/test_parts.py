"""A step's parts by themselves: what each does, on one device and on two replicas."""

import numpy as np
import pytest
import tensorflow as tf

from benchmarks import parts
from crankshaft.engine.metrics.sums import Sums
from crankshaft.engine.reduction import Reduction
from crankshaft.models import mlp

pytestmark = pytest.mark.thorough

BATCH, LEARNING_RATE = 8, 0.5


@pytest.fixture
def made(bench):
    """made(replicas, ...): an mlp of two layers with its data, ready to run."""

    def make(replicas, examples=20, units=16, **options):
        images = np.random.default_rng(0).random((examples, 4, 4), np.float32)
        labels = (np.arange(examples) % 3).astype(np.int64)
        options = {"optimizer": "sgd", "learning_rate": LEARNING_RATE, **options}
        model = mlp.Model(hidden_units=(units,))
        return bench(model, (images, labels), BATCH, replicas, num_classes=3, **options)

    return make


def run(made, part, steps):
    """Runs a part for so many steps; the mean of the metric that stands for what it computed."""
    sums, end = Sums(), made.state.step + steps
    while made.state.step < end:
        sums.add(made.strategy.run(part, end - made.state.step).sums)
    return sums.values()["loss"].value()


def test_update_applies_the_gradients_that_are_there(made):
    made = made(1)
    variables = parts.dense_variables(made.trainer)
    before = [made.copies(variable) for variable in variables]
    part = parts.update(made.strategy, made.state, made.strategy.training.feed, jit=False)
    ((gradients,), _, _) = part.feed.call_input(0, 1)
    run(made, part, 4)
    for variable, copies, gradient in zip(variables, before, gradients, strict=True):
        gradient = made.strategy.distribution.experimental_local_results(gradient)[0].numpy()
        for was, now in zip(copies, made.copies(variable), strict=True):
            # Four subtractions in float32, of which each rounds to 6e-8 of the value.
            np.testing.assert_allclose(now, was - 4 * LEARNING_RATE * gradient, rtol=1e-6, atol=1e-6)


def test_reduce_sums_what_replicas_hold(made):
    made = made(2)
    part = parts.reduce(made.strategy, made.state, made.strategy.training.feed)
    ((gradients,), _, _) = part.feed.call_input(0, 1)
    firsts = [made.strategy.distribution.experimental_local_results(g)[0].numpy().flat[0] for g in gradients]
    # Looked at are each sum's first value, and the count of the two replicas.
    assert run(made, part, 3) == pytest.approx(2 * sum(firsts) + 2, rel=1e-5)


def test_rates_of_a_sum_by_hand():
    # 1000 values of four bytes in 2 ms are 2 MB/s; of four replicas each link carries 2 x 3/4 of it.
    variables = [tf.Variable(tf.zeros([1000]))]
    found = parts.rates_of_sums(Reduction(), variables, 4, 2.0)
    assert found == {"bytes": 4000, "gb_per_sec": pytest.approx(2e-3), "bus_gb_per_sec": pytest.approx(3e-3)}
    # An all-gather: each link carries the three others' two bytes a value.
    found = parts.rates_of_sums(Reduction("bfloat16"), variables, 4, 2.0)
    assert found == {"bytes": 2000, "gb_per_sec": pytest.approx(1e-3), "bus_gb_per_sec": pytest.approx(3e-3)}


def test_shares_by_hand():
    ms = {"whole": 10.0, "step": 8.0, "input": 1.0, "reduce": 2.0, "update": 3.0}
    found = parts.shares({name: {"ms_per_step": value} for name, value in ms.items()})
    assert found == pytest.approx({"step": 0.3, "input": 0.1, "reduce": 0.2, "update": 0.3, "unexplained": 0.1})
    # Input that is read beside the step takes nothing from the whole.
    ms = {"whole": 10.0, "step": 10.0, "input": 4.0, "update": 3.0}
    found = parts.shares({name: {"ms_per_step": value} for name, value in ms.items()} | {"reduce": None})
    assert found == pytest.approx({"step": 0.7, "input": 0.4, "reduce": 0.0, "update": 0.3, "unexplained": -0.4})


def test_parts_are_timed_in_turn_and_leave_no_trace(made):
    made = made(1, optimizer="adam")
    before, step, feed = made.arrays(), made.state.step, made.strategy.training.feed
    with made.state.restoring():
        pieces = {make.__name__: make(made.strategy, made.state, feed, False) for make in (parts.whole, parts.update)}
        found = parts.timed(made.strategy, pieces, 0.06)
    assert set(found) == {"whole", "update"}
    for each in found.values():
        assert each["ms_per_step"] == pytest.approx(1e3 * each["seconds"] / each["repeats"])
        assert min(each["rounds_ms"]) <= each["ms_per_step"] <= max(each["rounds_ms"])
    assert made.state.step == step
    for same, now in zip(before, made.arrays(), strict=True):
        np.testing.assert_array_equal(now, same)
