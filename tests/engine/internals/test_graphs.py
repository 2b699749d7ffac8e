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


def test_what_may_be_written_is_found_through_functions_branches_and_loops():
    """Each writes one variable and reads the others; and another only reads."""
    names = (
        "at once",
        "by another handle",
        "function",
        "branch",
        "other branch",
        "loop",
        "function of a branch",
        "none",
    )
    variables = {name: tf.Variable(1.0) for name in names}

    def reads(but=None):
        return tf.add_n([variable.read_value() for name, variable in variables.items() if name != but])

    def writes(name):
        value = reads(name)
        variables[name].assign_add(value)
        return value + reads()

    def outer(x):
        writes("at once")
        handle = tf.identity(variables["by another handle"].handle)
        tf.raw_ops.AssignVariableOp(resource=handle, value=reads())
        inner = tf.function(lambda: writes("function"), autograph=False)()
        inner += tf.cond(x > 0, lambda: writes("branch"), lambda: writes("other branch"))
        in_branch = tf.function(lambda: writes("function of a branch"), autograph=False)
        inner += tf.cond(x > 1, lambda: in_branch(), reads)
        return inner + tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y + writes("loop")), (0, reads()))[1]

    graph = tf.function(outer, autograph=False).get_concrete_function(tf.TensorSpec([])).graph
    by_handle = {id(variable.handle): name for name, variable in variables.items()}
    found = [(by_handle[id(handle)], op.type) for handle, op in graphs.written(graph)]
    kinds = dict.fromkeys(names[:-1], "AssignAddVariableOp") | {"by another handle": "AssignVariableOp"}
    assert sorted(found) == sorted(kinds.items())


def test_values_depend_on_a_batch_that_a_variable_was_assigned_before_it_was_read():
    names = ("own", "before", "after", "in a function", "twice", "constant")
    variables = {name: tf.Variable(1.0) for name in names}

    def step(x):
        own = variables["own"]
        variables["before"].assign(own.read_value())
        own.assign(tf.reduce_sum(x))
        variables["after"].assign(own.read_value() + 1.0)
        tf.function(lambda: variables["in a function"].assign(own.read_value()), autograph=False)()
        variables["twice"].assign(variables["after"].read_value())
        variables["constant"].assign(3.0)

    graph = tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec([5])).graph
    assignments = graphs.Assignments(graph, graph.inputs[0])
    found = {name for name, variable in variables.items() if assignments.depend_on_batch(variable.handle)}
    assert found == {"own", "after", "in a function", "twice"}


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
