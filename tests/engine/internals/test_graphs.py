"""What is found in a function's graph, however deep."""

import tensorflow as tf

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
