"""What is found in a function's graph, however deep."""

import pytest
import tensorflow as tf
from tensorflow.core.framework import op_def_pb2
from tensorflow.python.client import pywrap_tf_session

from crankshaft.engine.internals import graphs


def test_kinds_are_found_in_branches_loops_and_functions_within_them():
    def body(i, x):
        return i + 1, tf.cond(x[0, 0] > 0, lambda: tf.linalg.inv(x), lambda: tf.function(tf.sin)(x))

    @tf.function
    def outer(x):
        _, x = tf.while_loop(lambda i, _: i < 3, body, (0, x))
        return tf.switch_case(tf.cast(x[0, 0], tf.int32), [lambda: tf.cos(x), lambda: tf.map_fn(tf.math.erf, x)])

    graph = outer.get_concrete_function(tf.TensorSpec([2, 2])).graph
    assert {"MatrixInverse", "Sin", "Cos", "Erf"} <= graphs.kinds(graph).keys()
    assert "MatMul" not in graphs.kinds(graph)
    assert not {"MatrixInverse", "Sin", "Cos", "Erf"} & {op.type for op in graph.get_operations()}


IMAGES, ONE = tf.ones([2, 8, 8, 1]), tf.zeros([1, 1], tf.int64)
SAMPLERS = {
    "normal": lambda: tf.random.normal([]),
    "shuffle": lambda: tf.random.shuffle(tf.range(5)),
    "candidates": lambda: tf.random.log_uniform_candidate_sampler(ONE, 1, 5, True, 500),
    "candidates by a seed": lambda: tf.random.uniform_candidate_sampler(ONE, 1, 5, True, 500, seed=3),
    "box": lambda: tf.raw_ops.SampleDistortedBoundingBoxV2(
        image_size=[9, 9, 3], bounding_boxes=[[[0.0, 0.0, 1.0, 1.0]]], min_object_covered=0.1
    ),
    "pool": lambda: tf.nn.fractional_max_pool(IMAGES, [1.0, 1.6, 1.6, 1.0]),
}
OTHERS = {
    "stateless": lambda: tf.random.stateless_normal([], [1, 2]),
    "indices": lambda: tf.random.experimental.index_shuffle(1, [1, 2], 9),
    "pool by a seed": lambda: tf.nn.fractional_max_pool(IMAGES, [1.0, 1.6, 1.6, 1.0], seed=1),
    "hits": lambda: tf.nn.compute_accidental_hits(ONE, tf.zeros([3], tf.int64), 1),
}


@pytest.mark.parametrize("kind", [*SAMPLERS, *OTHERS])
def test_ops_that_sample_by_a_state_of_the_process_are_found(kind):
    graph = tf.function({**SAMPLERS, **OTHERS}[kind]).get_concrete_function().graph
    assert any(map(graphs.samples, graphs.operations(graph))) == (kind in SAMPLERS)


def test_tensorflow_marks_all_other_samplers_as_stateful():
    """Those of its registry that have seeds and are not marked are decided one by one."""
    registered = op_def_pb2.OpList.FromString(
        bytes(pywrap_tf_session.TF_GetBuffer(pywrap_tf_session.TF_GetAllOpList()))
    )
    unmarked = {op.name for op in registered.op if graphs.has_two_seeds(op.name) and not op.is_stateful}
    plain = {name for name in unmarked if not name.startswith("CudnnRNN")}
    assert plain == {"ComputeAccidentalHits", "FractionalAvgPool", "FractionalMaxPool", "SnapshotDataset"}
