"""The same run however it is made: on 1, 2 or 4 replicas, by any feed, with XLA or without."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Mean
from crankshaft.engine.strategies import FeedOptions
from crankshaft.models.cnn import Model as Cnn
from crankshaft.models.mlp import Model as Mlp
from tests.engine.trainers import stripes


@pytest.fixture
def curves(bench):
    def run(trainer, source, steps=100, replicas=1, **options):
        # 338 by 16: 21 whole batches and one of 2, which each of four replicas computes.
        return bench(trainer, source, 16, replicas, num_classes=4, **options).curve(steps)

    return run


@pytest.fixture(scope="module")
def on_one_device(bench):
    return bench(Mlp((32,)), stripes(338), 16, num_classes=4).curve(100)


@pytest.mark.parametrize(("model", "others"), [("mlp", (2, 4)), pytest.param("cnn", (4,), marks=pytest.mark.slow)])
def test_replicas_learn_what_one_device_learns(curves, on_one_device, model, others):
    """100 steps of Adam at its usual rate, within 1e-5: float32 sums in another order, 1e-7 a step."""

    def run(replicas):
        return curves(Mlp((32,)) if model == "mlp" else Cnn(), stripes(338), replicas=replicas)

    one = on_one_device if model == "mlp" else run(1)
    assert np.mean(one[-10:]) < 0.7 * np.mean(one[:10])
    for replicas in others:
        np.testing.assert_allclose(run(replicas), one, rtol=1e-5)


@pytest.mark.parametrize(
    ("trainer", "options", "traces"),
    [
        (Mlp((8,)), {}, 5),
        (Mlp((8,)), {"jit": True}, 1),
        (Mlp((8,)), {"replicas": 2}, 2),
        (Cnn(), {}, 1),
        (Mlp((8,)), {"block_steps": 3}, 1),
        (Mlp((8,)), {"block_steps": 3, "feed": FeedOptions(resident_bytes=0)}, 1),
    ],
)
def test_small_steps_alone_are_unrolled(bench, trainer, options, traces):
    """Four in the loop's body and one for what is left, which the executor runs on one replica, if calls have four."""
    made = bench(trainer, stripes(64), 16, num_classes=4, unrolls=True, **options)
    times = _times_traced(trainer)
    made.train(4)
    assert len(times) == traces


@pytest.mark.parametrize(
    ("replicas", "unrolls", "options"),
    [(1, False, {}), (1, True, {}), (2, False, {}), (2, False, {"feed": FeedOptions(resident_bytes=0)})],
)
def test_a_step_gets_its_number_and_the_last_one_that_it_is_due(bench, replicas, unrolls, options):
    """However calls are cut: a block has 64 steps."""
    made = bench(Mlp((8,)), stripes(64), 16, replicas, num_classes=4, **options)

    def step(batch, number, due):
        number, due = tf.cast(number, tf.float32), tf.cast(due, tf.float32)
        return {"sum": Mean(number, 1.0), "squares": Mean(number**2, 1.0), "due": Mean(due * number, due)}

    program = made.strategy.program(step, made.strategy.training.feed)
    program.unrolls = unrolls
    first = 0
    for limit in (5, 1, 11):
        sums, steps = made.strategy.run(program, limit).sums.read(), np.arange(first, first + limit)
        found = {name: np.array(pair) / replicas for name, pair in sums.items()}
        expected = {"sum": (steps.sum(), limit), "squares": ((steps**2).sum(), limit), "due": (steps[-1], 1)}
        np.testing.assert_equal({name: tuple(pair) for name, pair in found.items()}, expected)
        first += limit
        assert made.state.step == int(made.state.step_variable.numpy()) == first


@pytest.mark.parametrize("feed", [None, FeedOptions(resident_bytes=0)], ids=["resident", "streamed"])
def test_an_epochs_smaller_last_batch_is_traced_once(bench, feed):
    trainer = Mlp((8,))
    made = bench(trainer, stripes(72), 16, num_classes=4, feed=feed, unrolls=True)
    times = _times_traced(trainer)
    made.train(10)
    assert len(times) == 5 + 1


def _times_traced(trainer):
    """A list that grows with each trace of the trainer's loss from here on."""
    times, plain_loss = [], trainer.loss
    trainer.loss = lambda outputs, batch: (times.append(1), plain_loss(outputs, batch))[1]
    return times


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_feeds_give_the_same_run(curves, replicas):
    """To the bit on one device: the same examples in the same order, whichever way they went."""
    resident = curves(Mlp((8,)), stripes(338), 30, replicas, shuffle=False)
    streamed = curves(Mlp((8,)), stripes(338), 30, replicas, shuffle=False, feed=FeedOptions(resident_bytes=0))
    dataset = curves(Mlp((8,)), tf.data.Dataset.from_tensor_slices(stripes(338)), 30, replicas, shuffle=False)
    if replicas == 1:
        np.testing.assert_array_equal(streamed, resident)
        np.testing.assert_array_equal(dataset, resident)
    else:  # an uneven batch is divided otherwise by TensorFlow's own splitting, and summed in another order
        np.testing.assert_array_equal(streamed, resident)
        np.testing.assert_allclose(dataset, resident, rtol=1e-5)


def test_xla_learns_what_the_executor_learns(curves, on_one_device):
    """Fused multiply-adds and another order of sums: as for replicas, 1e-7 a step; 1e-5 after 100."""
    np.testing.assert_allclose(curves(Mlp((32,)), stripes(338), jit=True), on_one_device, rtol=1e-5)
