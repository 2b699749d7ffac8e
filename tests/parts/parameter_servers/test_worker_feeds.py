"""Arrays and streams on their way to workers: what arrives is what was sent, in pieces or whole."""

import contextlib
import itertools

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.data import arrays as host_arrays
from crankshaft.engine.data.arrays import ArraySource
from crankshaft.engine.data.feeds.blocks import Devices
from crankshaft.engine.data.feeds.feed import CallInput
from crankshaft.engine.data.feeds.streamed_feed import StreamedFeed
from crankshaft.engine.data.order import Order, Origin
from crankshaft.engine.data.streamed import DatasetStream, divide
from crankshaft.engine.strategies.base import Processes
from crankshaft.parts.parameter_servers import worker_feeds
from crankshaft.parts.parameter_servers.sources import Sources, difference


@pytest.fixture
def arrived(monkeypatch):
    """arrived(array): what a worker has of it that stands in this process, and the spec that it was told before."""
    monkeypatch.setattr(worker_feeds, "on_each_worker", lambda coordinator, make, specs: (make(), specs))

    return worker_feeds.Workers(None).put_arrays


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "uint8", "bool", "object"])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (10, 3), (0, 3), (9, 2, 2)], ids=str)
def test_what_is_sent_in_pieces_arrives_as_it_is(arrived, monkeypatch, dtype, shape):
    monkeypatch.setattr(worker_feeds, "_PIECE_BYTES", 8)
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    if dtype == "object":
        array = np.vectorize(str, otypes=[object])(array) if array.size else array.astype(str)
    found, spec = arrived(array)
    assert (found.shape, found.dtype) == (spec.shape, spec.dtype)
    expected = np.vectorize(str.encode, otypes=[object])(array) if found.dtype == "string" else array
    np.testing.assert_array_equal(found.numpy(), expected)


def test_of_a_map_what_is_sent_is_read_piece_by_piece(arrived, monkeypatch, tmp_path):
    np.save(tmp_path / "a.npy", np.arange(30.0).reshape(10, 3))
    mapped = host_arrays.wrap(np.load(tmp_path / "a.npy", mmap_mode="r")).astype("float32")
    asked = []
    read = host_arrays.Mapped.__getitem__
    monkeypatch.setattr(host_arrays.Mapped, "__getitem__", lambda self, at: asked.append(at) or read(self, at))
    monkeypatch.setattr(worker_feeds, "_PIECE_BYTES", 4 * 3 * 4)
    np.testing.assert_array_equal(arrived(mapped)[0], np.arange(30, dtype=np.float32).reshape(10, 3))
    assert max(len(range(*at.indices(10))) for at in asked) == 4


EXAMPLES, BATCH, STEPS = 46, 6, 8  # an epoch; the last batch is of four


def sent(kind=worker_feeds.SentFeed, examples: int = EXAMPLES, batch: int = BATCH, known: dict | None = None):
    names = tf.data.Dataset.range(examples).map(lambda number: {"number": number, "name": tf.strings.as_string(number)})
    share = divide(DatasetStream(names), Processes())
    order = share.order(batch, 7, drop_remainder=False).resumed(known)
    return kind(Devices(tf.distribute.get_strategy()), share, order, shuffle_buffer=9)


def batches_of(made: worker_feeds.SentFeed, run: CallInput) -> list[list[int]]:
    """The numbers of a lease's steps, as a worker computes them from what it is sent."""
    step_spec, given = tf.TensorSpec([], tf.int64), (made.lease_specs, run.operands)
    assert all(tf.nest.flatten(tf.nest.map_structure(lambda spec, x: spec.is_compatible_with(x), *given)))
    compute = tf.function(
        lambda operands, step: made.batch(*made.next_operands(operands, step)),
        input_signature=(made.operand_specs, step_spec),
    )
    found = [compute(run.operands, tf.constant(step, tf.int64)) for step in range(run.start, run.stop)]
    assert all([int(name) for name in each["name"].numpy()] == each["number"].numpy().tolist() for each in found)
    return [each["number"].numpy().tolist() for each in found]


@pytest.mark.parametrize("steps", [1, 3, 20])
def test_leases_of_a_stream_have_the_batches_of_one_device(steps):
    made, alone = sent(), sent(StreamedFeed)
    found, step = [], 0
    while step < 3 * STEPS:
        run = made.call_input(step, min(steps, 3 * STEPS - step))
        assert (run.start, run.stop) == (step, min(step + steps, 3 * STEPS))
        found += batches_of(made, run)
        step = run.stop
    expected = [
        alone.next_operands(*alone.call_input(step, 1)[:2])[0]["number"].numpy().tolist() for step in range(step)
    ]
    assert found == expected
    for epoch in range(3):
        assert sorted(itertools.chain(*found[epoch * STEPS : (epoch + 1) * STEPS])) == list(range(EXAMPLES))
    assert found[:STEPS] != found[STEPS : 2 * STEPS]


def test_leases_of_another_batch_size_go_on_where_an_epoch_ends():
    known = {"resumed": {"step": STEPS, "batch_size": BATCH, "origin": Origin()}}
    made = sent(batch=8, known=known)
    leases = [made.call_input(8, 4), made.call_input(12, 2)]
    assert [(run.start, run.stop) for run in leases] == [(8, 12), (12, 14)]
    of_leases = [*itertools.chain(*(batches_of(made, run) for run in leases))]
    assert [len(each) for each in of_leases] == [8, 8, 8, 8, 8, 6]
    alone = sent()
    expected = [*itertools.chain(*batches_of(alone, alone.call_input(0, 2 * STEPS)))][EXAMPLES:]
    assert [*itertools.chain(*of_leases)] == expected
    order = made.order
    held = [
        worker_feeds.StepIndices(order).replica_indices((), tf.constant(step, tf.int64)).numpy().tolist()
        for step in range(8, 14)
    ]
    one_by_one = [
        worker_feeds.StepIndices(alone.order).replica_indices((), tf.constant(step, tf.int64)) for step in range(16)
    ]
    assert [*itertools.chain(*held)] == np.concatenate(one_by_one)[EXAMPLES:].tolist()


def test_a_lease_of_large_examples_has_fewer_steps_than_were_asked_for(monkeypatch):
    expected = batches_of(sent(), sent().call_input(0, 4))
    monkeypatch.setattr(worker_feeds, "_READ_BYTES", 2 * 6 * (8 + 1))  # two batches of numbers and their digits
    made = sent()
    run = made.call_input(0, 100)
    assert run.stop in (2, 3)  # digits are one or two
    assert batches_of(made, run) + batches_of(made, made.call_input(run.stop, 1)) == expected[: run.stop + 1]


@pytest.mark.parametrize(("first", "stop"), [(0, 3), (6, 9), (8, 8), (3, 3)])
def test_a_lease_read_by_its_worker_has_the_steps_that_are_not_done_if_any(monkeypatch, first, stop):
    """Those of a shuffled source; a lease of no step is one whose answer alone was lost with its worker."""
    monkeypatch.setattr(tf, "device", lambda _: contextlib.nullcontext())  # a worker's, which this process is not
    source = ArraySource(np.arange(EXAMPLES))
    registered = Sources(lambda: [source], "here").answer()
    order = Order(EXAMPLES, BATCH, block_steps=1, seed=3)
    made = worker_feeds.ReadByWorkersFeed(source, 0, order)

    def run(operands, stop, state):
        def step(number, steps_of):
            (batch,) = made.next_operands(operands, number)
            return number + 1, tf.tensor_scatter_nd_add(steps_of, batch[:, None], tf.fill(tf.shape(batch), number))

        return tf.while_loop(lambda number, _: number < stop, step, state), tf.timestamp()

    @tf.function(input_signature=(tf.TensorSpec([], tf.int64),) * 2, autograph=False)
    def lease(first, stop):
        return made.through((), first, stop, run, (first, tf.zeros([EXAMPLES], tf.int64)))[0]

    number, steps_of = lease(first, stop)
    expected = np.zeros(EXAMPLES, np.int64)
    for step in range(first, stop):
        expected[order.examples_between(tf.constant(step, tf.int64), step + 1)[0]] += step
    assert number == stop
    np.testing.assert_array_equal(steps_of, expected)
    assert not registered.dismissed.is_set()  # and kept until here, as its functions are


@pytest.mark.parametrize(
    ("own", "what"),
    [
        ([], "its data is in memory, and the coordinator's in files"),
        ([(998, "a", 1), (9, "a", 1)], "its files have 998 and 9 examples, and the coordinator's 1,000"),
        ([(9, "a", 1), (1000, "b", 1)], "its examples are b, and the coordinator's a"),
        ([(1000, "a", 2)], "its files have as many examples as the coordinator's, and other contents"),
    ],
)
def test_how_a_workers_files_differ_is_named_with_a_cure(own, what):
    wanted, *others = (
        {"examples": n, "layout": layout, "files": f, "preprocessing": 0} for n, layout, f in [(1000, "a", 1), *own]
    )
    assert difference(wanted, others) == f"{what}; give all tasks the same files, and the same command line"
    refitted = difference(wanted, [*others, {**wanted, "preprocessing": 1}])
    assert refitted.endswith("those of the run; give all tasks a run_dir that they see, and the same command line")
