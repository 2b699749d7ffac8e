"""Walks over a graph end at once, however many paths it has, however long and however deep within branches."""

import functools
import types
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.checks.compiled import warn_of_step
from crankshaft.engine.checks.losses import check_losses
from crankshaft.engine.internals import graphs, pipelines
from crankshaft.engine.step.context import TracedLoss
from crankshaft.engine.step.diagnosis import warn_of_rounded
from crankshaft.parts.plan import cost, peak_memory


def nested(x, depth=60):
    return tf.cond(x[0] > depth, lambda: nested(2 * x, depth - 1), lambda: x - 1) if depth else x


SHAPES: dict[str, Callable] = {
    "a chain": lambda x: functools.reduce(lambda value, _: value + 1, range(1200), x),
    "doublings": lambda x: functools.reduce(lambda value, _: value + value, range(60), x),
    "branches": nested,
}


@functools.cache
def traced(shape):
    """Traces a step; returns its graph, what it computes from its examples and from a variable, and its mean."""
    variable, made = tf.Variable(tf.zeros([8])), []

    def step(x):
        made[:] = [SHAPES[shape](x), SHAPES[shape](variable.read_value())]
        made.append(tf.reduce_mean(made[0]))
        variable.assign(made[1])
        return made[2]

    graph = tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec([8])).graph
    return types.SimpleNamespace(
        graph=graph, x=graph.inputs[0], y=made[0], of_variable=made[1], mean=made[2], handle=variable.handle
    )


def copied(step):
    terms, compute = graphs.to_function(step.y, step.x)
    with step.graph.as_default():
        return compute(step.x, *terms)


def computed(step):
    with step.graph.as_default():
        return graphs.computation(step.of_variable, [step.handle])


WALKS = {
    "kinds": lambda step: graphs.kinds(step.graph),
    "another replica": lambda step: graphs.of_another_replica(step.graph),
    "what XLA lacks": lambda step: graphs.lacked_by_xla(step.graph),
    "shapes of penalties": lambda step: graphs.shapes_of_penalties(step.mean, [step.x]),
    "sums": lambda step: graphs.sums_by_name(step.graph),
    "what is written": lambda step: [*graphs.written(step.graph)],
    "what is assigned": lambda step: graphs.Assignments(step.graph, step.x).depend_on_batch(step.handle),
    "what adds": lambda step: graphs.Assignments(step.graph, step.x).only_add(step.handle),
    "custom gradients": lambda step: graphs.hidden_by_custom_gradients([step.mean], [step.x]),
    "comparisons": lambda step: graphs.compared_with([step.x]),
    "code": lambda step: graphs.computed_in(step.mean, "losses", __file__),
    "examples": lambda step: [*graphs.joined_examples(step.mean, [step.x], 1.0, 8)],
    "dependence": lambda step: graphs.dependence(step.y, [step.x]),
    "a copy": copied,
    "a computation": computed,
    "pairs": lambda step: check_losses(
        [types.SimpleNamespace(losses=[TracedLoss("Own.loss", step.y, (step.x, step.x), step.mean)])], "Own", True
    ),
    "warnings": lambda step: warn_of_step(step.graph, 2, is_resumed=True),
    "what is executed": lambda step: cost.executed(step.graph),
    "memory": lambda step: peak_memory.peak(step.graph),
}


# Only sums are copied.
@pytest.mark.parametrize(("shape", "walk"), [(x, y) for x in SHAPES for y in WALKS if (x, y) != ("branches", "a copy")])
def test_a_walk_follows_no_path_twice_and_is_as_deep_as_a_graph(shape, walk):
    WALKS[walk](traced(shape))


def test_large_ids_are_followed_through_doublings():
    class Doubling:
        def forward(self, x, training):
            return tf.cast(functools.reduce(lambda value, _: tf.concat([value, value], 0), range(40), x), tf.float32)

    warn_of_rounded(Doubling(), np.full([2, 1], 1 << 25))


def test_a_pipeline_of_many_parts_is_asked_without_recursion():
    dataset = more = tf.data.Dataset.range(8).batch(2)
    for _ in range(1100):
        dataset = dataset.concatenate(more)
    assert pipelines.is_batched(dataset)
    assert pipelines.batches_may_differ(dataset, if_unknown=True) == pipelines.batches_may_differ(dataset, False)
    assert not pipelines.may_pad(dataset, True)
    assert pipelines.ordered(dataset) == [dataset]
    assert pipelines.ends(dataset.filter(lambda _: True))
    assert pipelines.is_constant(dataset)
    assert not pipelines.shards(dataset)
