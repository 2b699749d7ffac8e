"""What a dataset's operations tell: whether its elements are batches, and what it writes as it is read."""

import functools
import tempfile

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.internals import pipelines

X, Y = np.ones([40, 3], np.float32), np.ones([40], np.float32)
SLICES, experimental = tf.data.Dataset.from_tensor_slices, tf.data.experimental


def batches(size=8):
    return SLICES((X, Y)).batch(size, drop_remainder=True)


def windows():
    return SLICES(np.arange(500)).batch(11, drop_remainder=True).map(lambda row: (row[:-1], row[1:]))


@functools.cache
def dispatcher():
    return tf.data.experimental.service.DispatchServer()


def in_function(make):
    return SLICES([0]).flat_map(lambda _: make())


def saved(dataset, called=lambda make: make()):
    with tempfile.TemporaryDirectory() as folder:
        dataset.save(folder)
        return called(lambda: tf.data.Dataset.load(folder))


def served(dataset, called=lambda make: make()):
    """A dataset of TensorFlow's data service, which is not read."""
    service, target = tf.data.experimental.service, dispatcher().target
    number = service.register_dataset(target, dataset)
    return called(lambda: service.from_dataset_id("parallel_epochs", target, number, dataset.element_spec))


def generated():
    spec = tf.TensorSpec([8, 3]), tf.TensorSpec([8])
    return tf.data.Dataset.from_generator(lambda: iter([(X[:8], Y[:8])]), output_signature=spec)


MADE = {
    "batches": (batches, True),
    "mapped": (lambda: batches().map(lambda x, y: (2 * x, y)).prefetch(2), True),
    "scanned": (lambda: batches().scan(0, lambda count, batch: (count, batch)), True),
    "repeated": (lambda: batches().shuffle(3).repeat(2).take(3).filter(lambda x, y: True), True),
    "parallel": (lambda: SLICES((X, Y)).batch(8, drop_remainder=True, num_parallel_calls=2), True),
    "padded": (lambda: SLICES((X, Y)).padded_batch(8, drop_remainder=True), True),
    "batched again": (lambda: batches().rebatch(4, drop_remainder=True), True),
    "side by side": (lambda: tf.data.Dataset.zip(batches(), batches()), True),
    "windows in batches": (lambda: windows().batch(4, drop_remainder=True), True),
    "examples": (lambda: SLICES((X, Y)), False),
    "taken apart": (lambda: batches().unbatch(), False),
    "of files": (lambda: SLICES([0, 1]).interleave(lambda _: SLICES((X, Y))), False),
    "numbered": (lambda: batches().enumerate().map(lambda number, batch: batch), True),
    "numbered examples": (lambda: SLICES((X, Y)).enumerate().map(lambda number, example: example), False),
    "snapshot": (lambda: batches().snapshot("/nowhere"), True),
    "listed": (lambda: tf.data.experimental.from_list([*X]), False),
    "random": (lambda: tf.data.Dataset.random(), False),
    "lines": (lambda: tf.data.TextLineDataset("none"), False),
    "records": (lambda: tf.data.TFRecordDataset(["none"]).map(lambda _: (X[:8], Y[:8])), False),
    "records of one length": (lambda: tf.data.FixedLengthRecordDataset("none", 4), False),
    "csv": (lambda: tf.data.experimental.CsvDataset("none", [tf.int32, tf.int32]), False),
    "sql": (lambda: tf.data.experimental.SqlDataset("sqlite", "none", "", (tf.int32,)), False),
    "saved": (lambda: saved(batches()), None),
    "saved examples": (lambda: saved(SLICES(X)), None),
    "saved numbers": (lambda: saved(SLICES(Y)), False),
    "saved, then batches": (lambda: saved(SLICES((X, Y))).shuffle(3).batch(8, drop_remainder=True), True),
    "saved, taken apart": (lambda: saved(batches()).map(lambda x, y: (x, y)).unbatch(), False),
    "saved in parts": (lambda: saved(batches(), in_function), None),
    "served": (lambda: served(batches()), None),
    "served in parts": (lambda: served(batches(), in_function), None),
    "served, taken apart": (lambda: served(batches()).unbatch(), False),
    "a variant": (lambda: experimental.from_variant(experimental.to_variant(batches()), batches().element_spec), None),
    "windows": (windows, None),
    "generated": (generated, None),
    "batches of files": (lambda: SLICES([0, 1]).flat_map(lambda _: batches()), None),
    "one element": (lambda: tf.data.Dataset.from_tensors((X, Y)).repeat(3), None),
    "mixed": (lambda: batches().concatenate(batches().unbatch().map(lambda x, y: (X[:8] * x, Y[:8] * y))), None),
}


@pytest.mark.parametrize("name", MADE)
def test_elements_are_batches_where_the_last_operation_that_tells_makes_them(name):
    make, expected = MADE[name]
    assert pipelines.is_batched(make()) is expected


def test_batches_may_differ_where_those_that_are_not_whole_are_moved_and_where_others_follow():
    for made, expected in (
        (SLICES(X).batch(16), False),
        (SLICES(X).shuffle(3).repeat().batch(16).map(lambda x: 2 * x).filter(lambda x: True).take(3), False),
        (SLICES(X).batch(16).repeat(), True),
        (SLICES(X).batch(8).repeat(), False),  # all are whole
        (SLICES(X).batch(16, drop_remainder=True).repeat(), False),
        (SLICES(X).filter(lambda x: True).batch(8).map(lambda x: 2 * x).shuffle(3), True),
        (SLICES(X).batch(16).concatenate(SLICES(X).batch(16)).prefetch(2), True),
        (tf.data.Dataset.zip(SLICES(X).batch(16), SLICES(Y).batch(16)), False),
        (tf.data.Dataset.zip(SLICES(X).batch(16), SLICES(Y).batch(16)).repeat(), True),
        (SLICES(X).batch(8).concatenate(SLICES(X).batch(4)), True),  # each whole
        (SLICES(X).batch(8, drop_remainder=True).concatenate(SLICES(X).batch(4)), True),
        (tf.data.Dataset.zip(SLICES(X).batch(8), SLICES(Y).batch(4)).repeat(), False),
    ):
        for if_unknown in (False, True):
            assert pipelines.batches_may_differ(made, if_unknown) is expected
    spec = tf.TensorSpec([None, 3])
    of_generator = tf.data.Dataset.from_generator(lambda: iter([X]), output_signature=spec).map(lambda x: 2 * x)
    for unknown in (of_generator, SLICES([0]).flat_map(lambda _: SLICES(X).batch(3))):
        assert [pipelines.batches_may_differ(unknown, if_unknown) for if_unknown in (False, True)] == [False, True]


def test_the_form_of_batches_is_that_of_the_operation_that_made_them():
    for made, form in (
        (SLICES(X).batch(16).shuffle(3).prefetch(2), (16, 40)),
        (SLICES(X).padded_batch(16, drop_remainder=True).cache(), (16, 32)),
        (SLICES(X).repeat().batch(7), (7, tf.data.INFINITE_CARDINALITY)),
        (SLICES(X).filter(lambda x: True).batch(7), (7, tf.data.UNKNOWN_CARDINALITY)),
        (SLICES(X).batch(8).repeat(2).shuffle(3).repeat(3), (8, 240)),
        (SLICES(X).batch(16, drop_remainder=True).repeat(2), (16, 64)),
        (SLICES(X).batch(16).repeat(2), None),
        (SLICES(X).batch(8).repeat(), None),
        (SLICES(X).filter(lambda x: True).batch(8).repeat(2), None),
        (SLICES(X).batch(8).take(2), None),
        (SLICES(X).batch(8).rebatch(5), None),
    ):
        assert pipelines.batch_and_examples(made) == form


def test_the_variables_that_functions_read_are_found():
    level = tf.Variable(1.0, name="level")
    made = SLICES(Y).map(lambda y: tf.cond(y > 0, lambda: y * level, lambda: y)).batch(2)
    assert pipelines.variables(made) == ["level:0"]
    assert pipelines.variables(batches()) == []


def test_a_pipeline_is_constant_if_nothing_outside_it_decides_its_examples(tmp_path):
    level = tf.Variable(1.0)
    constant = SLICES((X, Y)).shuffle(4, seed=1).map(lambda x, y: (x + tf.constant(X[0]), y)).batch(2).cache()
    inner = SLICES([0, 1]).flat_map(lambda _: tf.data.Dataset.range(3).map(lambda i: i + 1))
    for made in (constant, inner, tf.data.Dataset.zip(constant, inner.repeat())):
        assert pipelines.is_constant(made)
    path = f"{tmp_path}/a"
    for made in (
        generated(),
        SLICES(Y).map(lambda y: y * level),
        SLICES(Y).flat_map(lambda y: SLICES(Y).map(lambda y: y * level)),
        SLICES(Y).map(lambda y: tf.numpy_function(lambda y: y, [y], tf.float32)),
        constant.concatenate(generated()),
        tf.data.TFRecordDataset(path),
        SLICES(Y).snapshot(path),
    ):
        assert not pipelines.is_constant(made)
    for made in (SLICES([path]).map(tf.io.read_file), SLICES([path]).interleave(tf.data.TFRecordDataset)):
        assert not pipelines.is_constant(made)
        assert pipelines.is_constant(made, may_read_files=True)


def test_caches_and_snapshots_are_found_below_other_operations(tmp_path):
    cached = SLICES(X).cache(f"{tmp_path}/cache").map(lambda x: x)
    both = tf.data.Dataset.zip(cached, SLICES(Y).snapshot(f"{tmp_path}/snapshot")).batch(2)
    assert pipelines.files_written(both) == [f"{tmp_path}/cache", f"{tmp_path}/snapshot"]
    assert pipelines.files_written(SLICES(X).cache()) == []


def test_a_function_with_a_state_of_its_own_is_found_before_it_is_called():
    def of_python(x):
        return tf.numpy_function(lambda x: x, [x], tf.float32)

    def checked(x):
        tf.debugging.Assert(tf.reduce_all(x >= 0), [x])
        return 2 * x

    stateless = SLICES(X).map(checked).shuffle(3, seed=1).filter(lambda x: x[0] > 0)
    assert pipelines.stateful(stateless.concatenate(stateless).batch(2)) == ""
    for made in (
        stateless.map(of_python).batch(2),
        stateless.concatenate(stateless.map(lambda x: of_python(x))),
        SLICES(X).flat_map(lambda x: SLICES(x).map(of_python)),
        generated().shuffle(3),
    ):
        assert "stateful" in pipelines.stateful(made)


def test_a_dataset_ends_where_what_it_is_made_of_does():
    assert pipelines.ends(batches().unbatch().filter(lambda x, y: True).map(lambda x, y: x).batch(3))
    assert not pipelines.ends(SLICES(X).repeat())
    assert not pipelines.ends(generated())
    assert not pipelines.ends(SLICES([0, 1]).flat_map(lambda _: SLICES(X).repeat()))
