"""Each example of an epoch reaches replica code exactly once, whichever way the data goes, on any replicas.

Examples are their own ids, from 1 on; replica code writes the ids that it sees into a variable, which is read back.
"""

import collections
import time
import weakref

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from crankshaft import Trainer, mean, step_context
from crankshaft.engine.data import arrays as host_arrays
from crankshaft.engine.data.arrays import ArraySource, on_each_device
from crankshaft.engine.data.feeds import external_feed
from crankshaft.engine.data.feeds.external_feed import ExternalFeed
from crankshaft.engine.data.lengths import source_order
from crankshaft.engine.data.order import ChunkedOrder, Order
from crankshaft.engine.data.reader import Chunks, Reads
from crankshaft.engine.data.source import Source, Spec
from crankshaft.engine.data.streamed import DatasetStream, count, divide, unwatched
from crankshaft.engine.internals import pipelines
from crankshaft.engine.mesh.layout import Mesh
from crankshaft.engine.strategies import FeedOptions
from crankshaft.engine.strategies.base import Processes
from crankshaft.engine.strategies.replicated import Replicated
from tests.bench import split_of
from tests.waiting import wait_until

LONGEST = 128  # steps of a test at most
RESIDENT, READ = FeedOptions(), FeedOptions(resident_bytes=0)
OPTIONS = dict.fromkeys(("resident", "dataset"), RESIDENT) | dict.fromkeys(("read", "source", "chunks"), READ)


class Recorder(Trainer):
    """Trains nothing: notes which ids each replica was given at which step."""

    def build(self):
        kind = {"trainable": False, "dtype": tf.int64, "synchronization": tf.VariableSynchronization.ON_READ}
        self.seen = tf.Variable(-tf.ones([LONGEST, 16], tf.int64), **kind)

    def train_step(self, batch):
        features, ids = batch
        # What goes together stays together: all features and the label are of one example.
        tf.debugging.assert_equal(tf.cast(features["value"][:, 0], tf.int64), ids)
        tf.debugging.assert_equal(tf.cast(tf.reshape(features["image"][:, 0, 1, 0], [-1]), tf.int64), -ids)
        tf.debugging.assert_equal(features["id"], ids)
        row = tf.pad(ids, [[0, 16 - tf.shape(ids)[0]]], constant_values=-1)[tf.newaxis]
        indices = tf.reshape(step_context().step, [1])
        tf.raw_ops.ResourceScatterUpdate(resource=self.seen.handle, indices=indices, updates=row)
        return {"loss": mean(ids)}

    def eval_step(self, batch):
        _, ids = batch
        return {"loss": mean(ids), "square": mean(ids * ids)}


def arrays(examples):
    ids = np.arange(1, examples + 1, dtype=np.int64)
    values = np.stack([ids, -ids], 1).astype(np.float32)
    return {"id": ids, "value": values, "image": values.reshape(examples, 1, 2, 1)}, ids


def dataset(examples):
    return tf.data.Dataset.from_tensor_slices(arrays(examples))


class Indexed(Source):
    """The same, read by their indices."""

    def __init__(self, examples, chunk_examples=1):
        self.arrays, self.chunk_examples = ArraySource(arrays(examples)), chunk_examples
        self.element_spec = self.arrays.element_spec

    def __len__(self):
        return len(self.arrays)

    def read(self, indices):
        return self.arrays.read(indices)


FORMS = {
    "resident": arrays,
    "read": arrays,
    "source": Indexed,
    "chunks": lambda examples: Indexed(examples, 4),
    "dataset": dataset,
}


def seen(bench):
    """[steps][replicas] lists of ids, in the order in which they came."""
    copies = bench.copies(bench.trainer.seen)
    return [[row[row > 0].tolist() for row in (copy[step] for copy in copies)] for step in range(bench.state.step)]


def joined(steps):
    """[steps] the global batches: replicas' shares one after the other; all of a batch too small to be divided."""
    return [parts[0] if _is_shared(parts) else [i for part in parts for i in part] for parts in steps]


def _is_shared(parts):
    """Whether each replica has all of a batch, which has fewer examples than there are replicas."""
    return len(parts[0]) < len(parts) and all(part == parts[0] for part in parts)


def assert_each_once(bench, examples, batch_size, epochs=2):
    steps = -(-examples // batch_size)
    bench.train(epochs * steps)
    batches = joined(seen(bench))
    for epoch in range(epochs):
        of_epoch = batches[epoch * steps : (epoch + 1) * steps]
        counts = collections.Counter(i for batch in of_epoch for i in batch)
        assert counts == dict.fromkeys(range(1, examples + 1), 1)
        assert [len(batch) for batch in of_epoch[:-1]] == [batch_size] * (steps - 1)


@pytest.fixture
def recorder(bench, compiled):
    """recorder(kind, examples, batch_size, replicas): such a run from its beginning, of seed 3 and blocks of three."""

    def get(kind, examples=26, batch_size=6, replicas=1):
        options = {"feed": OPTIONS[kind], "block_steps": 3, "seed": 3, "eval_source": FORMS[kind](25)}
        sizes = (FORMS[kind](examples), batch_size, replicas)
        own = (kind, examples, batch_size, replicas)
        made = compiled(own, lambda: bench(Recorder(), *sizes, eval_batch_size=8, **options))
        made.strategy.close_feeds()
        return made

    return get


# Whole batches; a remainder; one smaller than the replicas, each of which computes it; one example; a batch larger than
# the data; a batch that does not divide over replicas.
SIZES = [(24, 6), (26, 6), (25, 6), (1, 6), (5, 12), (20, 10)]


@pytest.mark.parametrize(
    ("kind", "examples", "batch_size", "replicas"),
    [("resident", *size, 3) for size in SIZES]
    + [(kind, *size, 3) for kind in ("read", "dataset") for size in SIZES[1:4]]
    + [(kind, 26, 6, 2) for kind in ("resident", "read", "dataset")]
    + [pytest.param(kind, 26, 6, 1, marks=pytest.mark.slow) for kind in ("resident", "read", "dataset")]
    + [("source", 26, 6, 2), ("chunks", 26, 6, 1), ("chunks", 26, 6, 3)],
)
def test_each_example_once_an_epoch(recorder, kind, examples, batch_size, replicas):
    assert_each_once(recorder(kind, examples, batch_size, replicas), examples, batch_size)


def in_files(folder, examples, files):
    """A dataset that reads text files, so that it can be divided by them; its length is not known beforehand."""
    paths = []
    for i in range(files):
        paths.append(str(folder / f"{i}.txt"))
        with open(paths[-1], "w") as file:
            file.writelines(f"{n}\n" for n in range(i + 1, examples + 1, files))

    def parse(line):
        number = tf.strings.to_number(line, tf.int64)
        value = tf.cast(tf.stack([number, -number]), tf.float32)
        return {"id": number, "value": value, "image": tf.reshape(value, [1, 2, 1])}, number

    return tf.data.TextLineDataset(paths).map(parse)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("policy", "replicas", "shard_files"),
    [pytest.param(policy, 1, True, marks=pytest.mark.slow) for policy in ("AUTO", "FILE", "DATA", "OFF")]
    + [(policy, 2, True) for policy in ("AUTO", "FILE", "DATA", "OFF")]
    + [(policy, 2, False) for policy in ("AUTO", "DATA", "OFF")],
)
def test_each_example_once_by_every_shard_policy(bench, tmp_path, policy, replicas, shard_files):
    source = in_files(tmp_path, 23, files=3) if shard_files else dataset(23)
    assert (source.cardinality() == tf.data.UNKNOWN_CARDINALITY) == shard_files
    assert_each_once(bench(Recorder(), source, 6, replicas, feed=FeedOptions(auto_shard=policy)), 23, 6)


def test_length_of_a_dataset_is_counted_where_it_is_not_known():
    assert count(DatasetStream(dataset(7))) == 7
    assert count(DatasetStream(dataset(7).filter(lambda _, i: i != 3))) == 6
    with pytest.raises(ValueError, match="never ends"):
        divide(DatasetStream(dataset(7).repeat()), Processes())


def run_of(made, until=30, calls_of=None):
    made.train(until, calls_of)
    return joined(seen(made))


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("kind", ["resident", "read"])
def test_order_is_the_same_on_any_replicas_blocks_and_cuts(bench, recorder, kind, replicas):
    """Of 26 examples by 6."""
    reference = run_of(recorder("resident"))
    assert run_of(recorder(kind, replicas=replicas), calls_of=2) == reference
    if kind == "resident" and replicas == 3:
        for block_steps, calls_of in ((1, 1), (64, 7)):
            made = bench(Recorder(), arrays(26), 6, replicas, block_steps=block_steps, seed=3)
            assert run_of(made, calls_of=calls_of) == reference


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("kind", ["resident", "read", "dataset"])
def test_starting_at_any_step_gives_the_batch_of_running_to_it(recorder, kind, replicas):
    """Though the feed was closed on the way there."""
    through = recorder(kind, replicas=replicas)
    through.train(9)
    through.strategy.close_feeds()
    through.train(20)
    expected = seen(through)
    resumed = recorder(kind, replicas=replicas)
    put_back = resumed.state.make_restorer()
    for start in (4, 13):
        put_back()
        resumed.jump(start)
        resumed.train(20)
        assert seen(resumed)[start:] == expected[start:]
        resumed.strategy.close_feeds()


@pytest.mark.parametrize("kind", ["resident", "read", "dataset"])
def test_a_feed_says_how_far_a_call_can_go(recorder, kind):
    """Of epochs of four whole batches and one of two examples; blocks of three."""
    feed = recorder(kind).strategy.training.feed
    steps, gone = 0, []
    while steps < 10:
        reached = feed.max_steps_per_call(steps, 100)
        run = feed.call_input(steps, 100)
        assert run.stop - run.start == reached
        assert feed.max_steps_per_call(steps, 1) == 1
        steps += reached
        gone.append(reached)
    assert gone == ([4, 1, 4, 1] if kind == "dataset" else [3, 1, 1, 3, 1, 1])


@pytest.mark.parametrize("kind", [pytest.param("resident", marks=pytest.mark.slow), "dataset"])
def test_seeds_have_no_epoch_in_common(bench, kind):
    found = []
    for seed in (0, 1, 2, 2**31 - 1):
        made = bench(Recorder(), FORMS[kind](26), 6, seed=seed)
        made.train(15)
        batches = joined(seen(made))
        found += [batches[:5], batches[5:10], batches[10:]]
    assert all(found.count(epoch) == 1 for epoch in found)


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("kind", ["resident", "read", "dataset"])
def test_evaluation_is_exact_and_repeats(recorder, kind, replicas):
    made, ids = recorder(kind, replicas=replicas), np.arange(1, 26)
    for _ in range(3):
        assert made.strategy.evaluate().values() == {"loss": (ids.sum(), 25), "square": ((ids**2).sum(), 25)}


def _images(examples, dtype):
    return np.random.default_rng(0).integers(0, 2, [examples, 8, 8, 4]).astype(dtype)


@pytest.mark.parametrize(
    "array",
    [
        _images(1 << 12, np.float32),
        _images(1 << 12, np.float32).transpose(0, 3, 1, 2),
        _images(1 << 13, np.uint8),
        _images(1 << 13, bool),
        _images(3, np.float32),
    ],
    ids=["images", "not in one piece", "bytes", "bool", "small"],
)
def test_cpus_share_one_copy_of_an_array(distribution, array):
    on_cpus = distribution(2)
    copies = on_cpus.experimental_local_results(on_each_device(on_cpus, array))
    for copy in copies:
        np.testing.assert_array_equal(copy.numpy(), array)
    assert len({np.asarray(memoryview(copy)).ctypes.data for copy in copies}) == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ">f4", np.int32, bool])
def test_a_file_s_array_becomes_a_tensor_as_it_is(tmp_path, dtype):
    path = tmp_path / "images.npy"
    np.save(path, _images(5, dtype))
    mapped = host_arrays.wrap(np.load(path, mmap_mode="r"))
    np.testing.assert_array_equal(host_arrays.as_tensor(mapped).numpy(), _images(5, dtype))


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [1, 2])
def test_streamed_arrays_are_in_no_graph(bench, replicas):
    """An array in a graph is a copy of it, and a graph takes none of 2 GiB; this one has 8 MB."""
    features, ids = arrays(1 << 18)
    made = bench(Recorder(), (features, ids), 4, replicas, feed=READ)
    functions = context.context()  # of this process, datasets' too
    before = set(functions.list_function_names())
    made.train(1)
    found = {name: functions.get_function_def(name) for name in set(functions.list_function_names()) - before}
    assert any("Dataset_map" in name for name in found), found.keys()
    assert max(graph.ByteSize() for graph in found.values()) < 1 << 20


class Levels(Trainer):
    """Trains nothing: its loss is the mean of the labels."""

    def build(self):
        pass

    def train_step(self, batch):
        return {"loss": mean(batch[1])}


class Changing(Source):
    element_spec = Spec([1], np.float32), Spec([], np.float32)
    varies = True

    def __init__(self, level):
        self.level = level

    def __len__(self):
        return 24

    def read(self, indices):
        return np.ones([len(indices), 1], np.float32), np.full(len(indices), self.level.numpy())


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("kind", ["source", "dataset"])
def test_data_that_changes_between_epochs_is_read_after_the_change(bench, kind, replicas):
    level = tf.Variable(0.0, trainable=False)
    examples = tf.data.Dataset.from_tensor_slices(np.ones([24, 1], np.float32))
    data = Changing(level) if kind == "source" else examples.map(lambda x: (x, level.read_value()))
    made, found = bench(Levels(), data, 4, replicas), []
    for epoch in range(3):
        level.assign(epoch)
        found.append(made.curve(6 * (epoch + 1)).tolist())
    assert found == [[0] * 6, [1] * 6, [2] * 6]


class Alone(Levels):
    def train_step(self, batch):
        ((ids, others),) = batch
        return {"loss": mean(ids + others)}


@pytest.mark.parametrize("replicas", [1, 2])
def test_features_alone_in_a_tuple_stay_so_in_batches_of_any_size(bench, replicas):
    ids = np.arange(8, dtype=np.float32)
    data = tf.data.Dataset.from_tensor_slices(((ids, 2 * ids),))
    batches = DatasetStream(data.take(4).batch(4).concatenate(data.skip(4).batch(2)), by_batch=True)
    assert bench(Alone(), batches, 4, replicas, shuffle=False).curve(3).tolist() == [4.5, 13.5, 19.5]


def test_variables_that_a_dataset_reads_are_named_as_its_position_is_saved(bench, caplog):
    level = tf.Variable(0.0, trainable=False, name="level")
    examples = tf.data.Dataset.from_tensor_slices(np.ones([24, 1], np.float32))
    made = bench(Levels(), examples.map(lambda x: (x, level.read_value())), 4)
    made.run(2)
    made.strategy.training.feed.position(2)
    assert "the variables that the dataset reads (level:0) only if the trainer" in caplog.text


def test_what_no_hook_can_change_is_read_ahead_over_an_epochs_end(bench, monkeypatch):
    """As a variable would show, if it were none."""
    monkeypatch.setattr(pipelines, "is_constant", lambda dataset, **_: True)
    level = tf.Variable(0.0, trainable=False)
    examples = tf.data.Dataset.from_tensor_slices(np.ones([24, 1], np.float32))
    made = bench(Levels(), examples.map(lambda x: (x, level.read_value())), 4)
    made.curve(6)
    time.sleep(0.2)
    level.assign(1.0)
    assert made.curve(12)[0] == 0


@pytest.mark.parametrize(
    ("examples", "drop_remainder", "varies", "block_steps"),
    [(12, False, False, 64), (14, False, False, 3), (14, True, False, 64), (3, False, False, 1), (12, False, True, 3)],
)
def test_a_block_is_within_an_epoch_unless_whole_ones_fit_it(examples, drop_remainder, varies, block_steps):
    source, options = Indexed(examples), {"block_steps": 64, "drop_remainder": drop_remainder}
    source.varies = varies
    order, _ = source_order(source, 4, 3, 0, Processes(), None, watch=unwatched, **options)
    assert order == Order(examples, 4, block_steps, 3, drop_remainder)


def of_calls(feed, first, steps):
    """The ids of each batch of a call's steps, and how many steps were read at once."""
    batches, at_once, step = [], [], first
    while step < first + steps:
        assert feed.max_steps_per_call(step, 1) == 1
        call = feed.call_input(step, first + steps - step)
        ids, size = call.operands[0][1].numpy(), int(call.operands[1])
        assert len(ids) == size * (call.stop - call.start)
        batches += np.split(ids, call.stop - call.start)
        at_once.append(call.stop - call.start)
        step += at_once[-1]
    return [batch.tolist() for batch in batches], at_once


@pytest.mark.parametrize(
    ("form", "most", "at_once"),
    [
        (Indexed, 8 << 20, [3, 1, 3, 1, 2]),
        (Indexed, 150, [2, 1, 1, 2, 1, 1, 2]),
        (Indexed, 1, [1] * 10),
        (lambda examples: DatasetStream(dataset(examples)), 8 << 20, [1] * 10),
    ],
)
def test_data_of_a_call_begins_an_epoch_and_ends_with_a_smaller_batch(monkeypatch, form, most, at_once):
    """Of seven examples by two, of 32 bytes each: four steps an epoch, the last of one."""
    monkeypatch.setattr(external_feed, "_BLOCK_BYTES", most)
    feed = ExternalFeed(1, Mesh()).reading(form(7), 5, 2)
    epoch = [[1, 2], [3, 4], [5, 6], [7]]
    assert of_calls(feed, 5, 10) == ([*epoch, *epoch, *epoch[:2]], at_once)
    assert [feed.order.examples_before(step) for step in (5, 6, 8, 9, 12)] == [0, 2, 6, 7, 13]


def test_data_of_a_call_is_shuffled_in_each_epoch_by_the_calls_first_step():
    def epochs(seed, first):
        feed = ExternalFeed(1, Mesh()).reading(Indexed(7), first, 2, seed)
        ids = [i for batch in of_calls(feed, first, 8)[0] for i in batch]
        assert sorted(ids[:7]) == sorted(ids[7:]) == [*range(1, 8)]
        return [tuple(ids[:7]), tuple(ids[7:])]

    found = [each for seed, first in ((1, 0), (1, 4), (2, 0)) for each in epochs(seed, first)]
    assert len({*found}) == 6
    assert epochs(1, 4) == found[2:4]


def test_chunks_of_an_earlier_epoch_are_released():
    read = []

    class Counted(Changing):
        def read(self, indices):
            features = np.ones([len(indices), 1], np.float32)
            read.append(weakref.ref(features))
            return features, np.zeros(len(indices), np.float32)

    order = ChunkedOrder(24, 4, 1, chunk_examples=4, window_chunks=6)
    chunks = Chunks(Reads(Counted(None)), order)
    for epoch in range(3):
        chunks.read(np.arange(24), epoch, epoch, np.zeros(0, np.int64))
    wait_until(lambda: sum(features() is not None for features in read) == 6)
    assert len(read) == 18


def test_evaluation_keeps_the_examples_own_order(bench):
    made = bench(Recorder(), arrays(13), 4, 2, shuffle=False)
    made.train(8)
    assert joined(seen(made)) == 2 * [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13]]


@pytest.mark.thorough
@pytest.mark.parametrize("options", [RESIDENT, READ], ids=["resident", "read"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_files_that_are_mapped_are_read_as_arrays_are(bench, tmp_path, monkeypatch, options, replicas):
    """Views of maps too, as a split is; in pieces of three examples."""
    monkeypatch.setattr(host_arrays, "_PIECE_BYTES", 7 << 20)  # Linux may map 2 MiB around each

    def mapped(array):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.npy"
        np.save(path, np.concatenate([array[:3], array]))
        return host_arrays.wrap(np.load(path, mmap_mode="r")[3:])

    source = tf.nest.map_structure(mapped, arrays(26))
    assert all(isinstance(array, host_arrays.Mapped) for array in tf.nest.flatten(source))
    assert_each_once(bench(Recorder(), source, 6, replicas, feed=options, block_steps=3), 26, 6)


def test_a_map_whose_changes_are_its_own_keeps_them(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(4))
    changed = np.load(tmp_path / "a.npy", mmap_mode="c")
    changed[1] = 7.0
    np.testing.assert_array_equal(host_arrays.wrap(changed), changed)
    assert not isinstance(host_arrays.wrap(changed), host_arrays.Mapped)
    shared = np.load(tmp_path / "a.npy", mmap_mode="r+")
    shared[1] = 7.0
    found = host_arrays.wrap(shared).astype(np.float32)
    for examples, values in ((slice(None), [0, 7, 0, 0]), ([[1, 0], [3, 1]], [[7, 0], [0, 7]]), (1, 7)):
        np.testing.assert_array_equal(found[examples], np.array(values, np.float32))
        assert found[examples].dtype == np.float32
    np.testing.assert_array_equal(np.asarray(found), [0, 7, 0, 0])


def test_bytes_are_known_where_examples_have_as_many(distribution):
    strategy = Replicated("test", distribution(1))
    for labels, bytes_read in ((np.arange(8), 0), (np.array(["a"] * 8), None)):
        stream = DatasetStream(tf.data.Dataset.from_tensor_slices((np.arange(8), labels)))
        assert strategy.feed(stream, 4, None).stats().bytes_read == bytes_read


@pytest.mark.parametrize("data", [arrays, dataset])
def test_where_batches_have_one_shape_only_an_evaluation_changes_their_size(distribution, data):
    strategy = Replicated("test", distribution(2))
    strategy.static_shapes = True  # as on TPUs
    split = split_of(data(20))
    assert strategy.feed(split, 8, None).order.batch_size == 8
    assert strategy.eval_feed(split, 8).order.batch_size == 4
