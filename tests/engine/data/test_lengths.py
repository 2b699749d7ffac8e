"""Examples of varying length: padded alike on all replicas, in buckets, each once per epoch, resumed exactly.

Example i has the id i + 1, in each of its values, and a length of its own.
"""

import collections
import contextlib
import functools
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from crankshaft import Padded, Source, Spec, Trainer, UsageError, mean
from crankshaft.engine.data import buckets, form, lengths
from crankshaft.engine.data.entry import user_data
from crankshaft.engine.data.order import Origin
from crankshaft.engine.data.source import WithoutBadRecords
from crankshaft.engine.data.streamed import Endless, batched
from crankshaft.engine.errors import BadRecordError, SourceError
from crankshaft.engine.step.context import step_context
from crankshaft.engine.strategies.base import Processes
from tests.bench import assert_same_bits

EXAMPLES, BATCH = 29, 6
LENGTHS = np.random.default_rng(5).integers(1, 13, EXAMPLES)
BOUNDARIES = (3, 7, 12)
LONGEST = 64  # steps of a test at most
PLAIN, BOUND = buckets.LengthBuckets(0, BOUNDARIES), buckets.LengthBuckets(0, BOUNDARIES, 24)  # batches of 6, 3 and 2


class Walks(Source):
    """Arrays [length, 2] of an example's id, and its id; counts the examples that are read."""

    element_spec = (Spec([None, 2], "float32"), Spec([], "int64"))
    read_so_far = 0

    def __init__(self, chunk_examples=1):
        self.chunk_examples = chunk_examples

    def __len__(self):
        return EXAMPLES

    def read(self, indices):
        self.read_so_far += len(indices)
        return [np.full([LENGTHS[i], 2], i + 1, np.float32) for i in indices], indices + 1


def stream():
    numbers = tf.data.Dataset.range(EXAMPLES)
    of_number = functools.partial(tf.gather, tf.constant(LENGTHS))

    def example(i):
        return tf.fill([of_number(i), 2], tf.cast(i + 1, tf.float32)), i + 1

    return numbers.map(example)


MADE = {"source": Walks, "chunks": lambda: Walks(4), "dataset": stream}
KINDS = [
    ("source", None),
    pytest.param("source", PLAIN, marks=pytest.mark.thorough),
    ("source", BOUND),
    pytest.param("chunks", None, marks=pytest.mark.slow),
    pytest.param("dataset", None, marks=pytest.mark.thorough),
    ("dataset", PLAIN),
]


class Recorder(Trainer):
    """Notes each replica's ids and the length that they are padded to; trains on what depends on padding."""

    def build(self):
        own = {"trainable": False, "dtype": tf.int64, "synchronization": tf.VariableSynchronization.ON_READ}
        self.seen = tf.Variable(-tf.ones([LONGEST, 16], tf.int64), **own)
        self.weight = tf.Variable(0.5)
        self.optimizer = self.build_optimizer()
        self.optimizer.build([self.weight])

    def loss(self, outputs, batch):
        walks, _ = batch
        of_all = tf.reduce_mean(walks.values, [1, 2])  # over padding, too: the padded length shows in the loss
        own = tf.cast(walks.lengths, tf.float32)
        return mean(tf.square(self.weight * own - of_all / 10))

    def forward(self, features, training):
        return features

    @property
    def trainable_variables(self):
        return [self.weight]

    def train_step(self, batch):
        walks, ids = batch
        # The mask has an example's own values, and all others are padding.
        expected = tf.where(walks.mask[..., tf.newaxis], tf.cast(ids, tf.float32)[:, None, None], 0.0)
        tf.debugging.assert_equal(walks.values, tf.broadcast_to(expected, tf.shape(walks.values)))
        tf.debugging.assert_equal(walks.lengths, tf.gather(tf.constant(LENGTHS, tf.int32), ids - 1))
        row = tf.concat([tf.shape(walks.values, tf.int64)[1:2], ids], 0)
        row = tf.pad(row, [[0, 16 - tf.shape(row)[0]]], constant_values=-1)[tf.newaxis]
        indices = tf.reshape(step_context().step, [1])
        tf.raw_ops.ResourceScatterUpdate(resource=self.seen.handle, indices=indices, updates=row)
        return super().train_step(batch)


@pytest.fixture
def recorder(bench, compiled):
    def get(kind, of=None, replicas=1, **options):
        def make():
            split = user_data.split("train", MADE[kind]())
            split.buckets = of
            return bench(Recorder(), split, BATCH, replicas, block_steps=3, seed=3, optimizer="sgd", **options)

        made = compiled((kind, of, replicas), make)
        made.strategy.close_feeds()
        return made

    return get


def batches(made):
    """[steps] (padded length, ids) of the global batches; all replicas have one length."""
    copies, found = made.copies(made.trainer.seen), []
    for step in range(made.state.step):
        rows = [copy[step][copy[step] >= 0] for copy in copies]
        padded = {int(row[0]) for row in rows if len(row) > 1}
        assert len(padded) == 1
        ids = [row[1:].tolist() for row in rows]
        is_shared = len(ids) > 1 and len(ids[0]) < len(ids) and all(each == ids[0] for each in ids)
        found.append((padded.pop(), ids[0] if is_shared else [i for each in ids for i in each]))
    return found


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize(("kind", "of"), KINDS)
def test_each_example_once_an_epoch_padded_alike_on_all_replicas(recorder, kind, of, replicas):
    made = recorder(kind, of, replicas)
    steps = made.strategy.training.feed.order.steps_per_epoch
    made.train(2 * steps)
    seen = batches(made)
    for epoch in (seen[:steps], seen[steps:]):
        counts = collections.Counter(i for _, ids in epoch for i in ids)
        assert counts == dict.fromkeys(range(1, EXAMPLES + 1), 1)
    assert seen[:steps] != seen[steps:]
    for padded, ids in seen:
        longest = max(LENGTHS[i - 1] for i in ids)
        assert padded == (longest if of is None else min(each for each in BOUNDARIES if each >= longest))


@pytest.mark.parametrize("of", [PLAIN, BOUND])
def test_a_bucket_has_one_batch_size_and_a_smaller_last_batch(recorder, of):
    made = recorder("source", of)
    steps = made.strategy.training.feed.order.steps_per_epoch
    made.train(steps)
    sizes, all_padded = collections.defaultdict(list), [padded for padded, _ in batches(made)]
    assert all_padded != sorted(all_padded)  # all buckets' batches are permuted together
    for padded, ids in batches(made):
        assert all(LENGTHS[i - 1] > {3: 0, 7: 3, 12: 7}[padded] for i in ids)
        sizes[padded].append(len(ids))
    for boundary, each in sizes.items():
        size = BATCH if of is PLAIN else min(BATCH, 24 // boundary)
        assert sorted(each)[1:] == [size] * (len(each) - 1)
        assert len(each) == -(-sum(each) // size)
    order = made.strategy.training.feed.order
    assert order.examples_before(steps) == EXAMPLES
    assert [order.batch_size_at(step) for step in range(steps)] == [len(ids) for _, ids in batches(made)]


@pytest.mark.parametrize(("kind", "of"), KINDS)
def test_replicas_give_what_one_device_gives(recorder, kind, of):
    one, three = recorder(kind, of), recorder(kind, of, 3)
    # Sums of a few float32 in another order.
    np.testing.assert_allclose(one.curve(12), three.curve(12), rtol=1e-5)


@pytest.mark.parametrize(("kind", "of"), [("source", None), ("source", BOUND), ("dataset", None), ("dataset", PLAIN)])
def test_a_run_resumed_within_an_epoch_has_the_same_bits(recorder, kind, of, tmp_path):
    assert_same_bits(recorder(kind, of), tmp_path, at=8, until=13)


@pytest.mark.thorough
def test_xla_compiles_one_program_for_each_shape(recorder, bench):
    split = user_data.split("train", Walks())
    split.buckets = PLAIN
    made = bench(Recorder(), split, BATCH, block_steps=3, seed=3, optimizer="sgd", jit=True)
    other = recorder("source", PLAIN)
    # XLA adds in another order.
    np.testing.assert_allclose(made.curve(9), other.curve(9), rtol=1e-5)
    order = made.strategy.training.feed.order
    shapes = {(order.batch_size_at(step), made_of) for step, (made_of, _) in enumerate(batches(made))}
    assert len(made.strategy.training.programs) == len(shapes) <= order.num_shapes


def test_lengths_are_read_once_and_stored_beside_the_data(tmp_path):
    (tmp_path / "walks.bin").write_bytes(b"")

    class OfFile(Walks):
        def files(self):
            return [str(tmp_path / "walks.bin")]

        def identity(self):
            return "walks"

    told: list[int] = []
    for read in (EXAMPLES, 0):
        source = OfFile()
        found = lengths.measured(
            user_data.split("train", source), Processes(), lambda *_: contextlib.nullcontext(told.append)
        )
        np.testing.assert_array_equal(found, LENGTHS[:, None])
        assert source.read_so_far == read
    assert told == [EXAMPLES]
    (stored,) = (tmp_path / ".crankshaft").glob("*.lengths")
    stored.write_bytes(stored.read_bytes()[:-4])  # damaged: read again
    assert len(lengths.measured(user_data.split("train", OfFile()), Processes())) == EXAMPLES
    half = user_data.split("train", OfFile()).between(20, 29)
    np.testing.assert_array_equal(lengths.measured(half, Processes()), LENGTHS[20:, None])


def test_a_slice_of_a_source_without_identity_stores_no_lengths(tmp_path):
    class OfFile(Walks):
        def files(self):
            return [str(tmp_path / "walks.bin")]

    lengths.measured(user_data.split("train", OfFile()).between(0, 9), Processes())
    assert not [*tmp_path.iterdir()]


@pytest.mark.thorough
@pytest.mark.parametrize("of", [None, PLAIN])
def test_an_example_longer_than_its_length_was_is_not_cut(bench, of):
    class Grown(Walks):
        def lengths(self, indices):
            return np.maximum(LENGTHS[indices, None] - 4, 1)

    split = user_data.split("train", Grown())
    split.buckets = of
    made = bench(Recorder(), split, BATCH, replicas=3, seed=3, optimizer="sgd")
    with pytest.raises(tf.errors.InvalidArgumentError, match="an example is not of the length that was read for it"):
        made.train(6)


def test_a_source_that_decodes_states_its_lengths():
    class Encoded(Walks):
        @property
        def stored_spec(self):
            return Spec([], "int64")

        def read(self, indices):
            return indices

        def decode(self, stored, seeds):
            of_each = tf.gather(tf.constant(LENGTHS), stored)
            mask = tf.sequence_mask(of_each)
            values = tf.where(mask, tf.cast(stored + 1, tf.float32)[:, None], 0.0)
            return tf.tile(values[..., None], [1, 1, 2]), stored + 1

    with pytest.raises(SourceError, match=r"decode makes arrays of unknown length; define lengths\(indices\)"):
        user_data.split("train", Encoded()).read(np.arange(3))
    Encoded.lengths = lambda self, indices: LENGTHS[indices][:, None]
    source = user_data.split("train", Encoded())
    walks, ids = source.decode(source.read(np.array([4, 2])), None)
    assert walks.lengths.numpy().tolist() == LENGTHS[[4, 2]].tolist()
    np.testing.assert_array_equal(ids, [5, 3])
    Encoded.lengths = lambda self, indices: LENGTHS[indices]
    with pytest.raises(SourceError, match=r"return whole numbers \[2, 1\], one for each unknown dimension"):
        source.read(np.array([4, 2]))


def test_two_unknown_dimensions_and_words_have_lengths_and_masks():
    class Mixed(Source):
        element_spec = ({"image": Spec([None, None, 1], "uint8"), "words": Spec([None], object)},)

        def __len__(self):
            return 2

        def read(self, indices):
            images = [np.ones([2 + i, 4 - i, 1], np.uint8) for i in indices]
            return ({"words": [np.array(["a"] * (i + 1), object) for i in indices], "image": images},)

    source = user_data.split("train", Mixed())
    stored = tf.nest.map_structure(tf.constant, source.read(np.arange(2)))
    (features,) = source.decode(stored, None)
    assert features["image"].lengths.numpy().tolist() == [[2, 4], [3, 3]]
    np.testing.assert_array_equal(features["image"].mask, features["image"].values[..., 0] == 1)
    assert features["words"].values.numpy().tolist() == [[b"a", b""], [b"a", b"a"]]
    assert features["words"].lengths.numpy().tolist() == [1, 2]
    np.testing.assert_array_equal(lengths.measured(source, Processes()), [[2, 4, 1], [3, 3, 2]])


def test_a_bad_record_is_replaced_with_its_length():
    class Bad(Walks):
        def read(self, indices):
            if 7 in indices:
                raise BadRecordError(7, "record 7 is bad")
            return super().read(indices)

    source = WithoutBadRecords(user_data.split("train", Bad()), 1, lambda line: None)
    assert lengths.measured(source, Processes())[7] == LENGTHS[8]


@pytest.mark.parametrize(
    ("shape", "rows", "message"),
    [
        ([2, None], [[[1.0], [2.0]]], "has unknown dimensions after known ones; transpose it"),
        ([None, 2], [np.zeros([3, 1]), np.zeros([4, 1])], r"returned an example of shape \[3, 1\], and .* \[None, 2\]"),
        ([None, 2], [np.zeros([3]), np.zeros([4])], r"returned an example of shape \[3\], and .* \[None, 2\]"),
        ([None, 2], [np.zeros([3, 2])], "was called for 2 examples and returned 1 examples"),
    ],
)
def test_a_mistake_of_a_source_is_one_line(shape, rows, message):
    class Wrong(Source):
        element_spec = (Spec(shape, "float32"),)

        def __len__(self):
            return 2

        def read(self, indices):
            return (rows,)

    with pytest.raises((UsageError, SourceError), match=message):
        user_data.split("train", Wrong()).read(np.arange(2))


def test_buckets_that_can_not_hold_the_data_are_one_line(bench):
    for split, of, message in [
        (
            "source",
            buckets.LengthBuckets(0, (3, 7)),
            "longest example is of length 12, and bucket_by has no boundary that",
        ),
        ("dataset", BOUND, "24 positions in a batch, and a stream's batches have one size: 6 x 12 are more"),
    ]:
        data = user_data.split("train", MADE[split]())
        data.buckets = of
        with pytest.raises(UsageError, match=message):
            bench(Recorder(), data, BATCH, seed=3, optimizer="sgd")
    with pytest.raises(UsageError, match="names axis 1, counted from 0, and an example of the data has 1 unknown"):
        lengths.bucketed(user_data.split("train", Walks()), buckets.LengthBuckets(1, (3,)))


@pytest.mark.parametrize("axis", [0, 2])
def test_buckets_pad_whatever_has_the_measured_length_in_every_example(axis):
    """A label per word is padded as the words are; boxes of another number are padded to their longest."""
    words = LENGTHS
    boxes = 1 + (words + 1) % 5  # in some batches as many as words
    sizes = np.stack([words, boxes, words], 1)
    order = buckets.BucketedOrder(EXAMPLES, BATCH, 1, 3, buckets=buckets.LengthBuckets(axis, BOUNDARIES), lengths=sizes)
    in_bucket = [
        boxes[(words > low) & (words <= high)].max() for low, high in zip((0, *BOUNDARIES), BOUNDARIES, strict=False)
    ]
    assert order.shapes.tolist() == [[high, most, high] for high, most in zip(BOUNDARIES, in_bucket, strict=True)]

    def example(i):
        of_words, of_boxes = (tf.gather(tf.constant(each), i) for each in (words, boxes))
        return tf.ones([of_words]), (tf.ones([of_boxes]), tf.ones([of_words]))

    split = user_data.split("train", tf.data.Dataset.range(EXAMPLES).map(example))
    examples, epoch = split.examples(None, tf.constant(0, tf.int64)), tf.constant(0, tf.int64)
    for batch in buckets.in_windows(examples, buckets.LengthBuckets(axis, BOUNDARIES), BATCH, 3, epoch):
        of_words, of_boxes, of_labels = (each.shape[1] for each in tf.nest.flatten(form.values(batch)))
        assert of_labels == of_words in BOUNDARIES
        assert of_boxes in (of_words, batch[1][0].lengths.numpy().max())


@pytest.mark.parametrize("steps", [0, 1, 2, 15, 16, 33, 1 << 42])
def test_after_another_batch_size_the_rate_goes_on_by_examples(steps):
    """A step has two examples, of which ten million were 312,500 steps of the rate; also where products are large."""
    limits, sizes = buckets.LengthBuckets(0, (1, 2)), np.repeat([[1], [2]], 4, 0)
    order = buckets.BucketedOrder(
        8, 2, 1, buckets=limits, lengths=sizes, origin=Origin(100, 0, 50, 312_500, 10_000_000)
    )
    assert order.rate_step(100 + steps) == 50 + steps // 16
    assert order.rate_step(tf.constant(100 + steps, tf.int64)) == 50 + steps // 16


def test_batches_after_another_batch_size_are_those_of_a_run_that_always_had_this_one():
    sizes, begin = LENGTHS[:, np.newaxis], Origin(7, 2, 3, 10, EXAMPLES)
    always, resumed = (
        buckets.BucketedOrder(EXAMPLES, BATCH, 1, 3, buckets=PLAIN, lengths=sizes, origin=origin)
        for origin in (Origin(), begin)
    )
    for step in range(2 * always.steps_per_epoch):
        then = 2 * always.steps_per_epoch + step
        assert resumed.position(7 + step) == always.position(then)
        assert resumed.examples_before(7 + step) == always.examples_before(then)


def test_after_another_batch_size_and_other_data_the_rate_fits_int64():
    """Epochs whose examples have no common divisor: 10,000,019 in 625,001 steps, before that 9,999,991 in 312,499."""
    sizes = np.ones([10_000_019, 1], np.int32)
    begin = Origin(100, 0, 50, 312_499, 9_999_991)
    order = buckets.BucketedOrder(10_000_019, 16, 1, buckets=PLAIN, lengths=sizes, origin=begin)
    assert order.steps_per_epoch == 625_002
    for steps in (0, 1, 2, 3, 999_999, 3_000_000, 1 << 40):
        expected = 50 + steps * 312_499 * 10_000_019 // (625_002 * 9_999_991)
        found = order.rate_step(100 + steps)
        assert abs(found - expected) <= -(-steps >> 20)
        assert order.rate_step(tf.constant(100 + steps, tf.int64)) == found


def test_a_stream_that_is_not_counted_keeps_its_buckets():
    bucketed = lengths.bucketed(user_data.split("train", stream()), PLAIN)
    assert Endless(bucketed, EXAMPLES).buckets is PLAIN


def test_values_keep_the_nest_that_has_them():
    class Words(NamedTuple):
        ids: Any
        of: Any

    given = Words({"b": form.Padded(1, 2), "a": 3}, (4, form.Unmeasured(5, 6)))
    found = form.values(given)
    assert found == Words({"b": 1, "a": 3}, (4, 5))
    assert type(found) is Words


def test_ragged_rows_and_ragged_batches_are_examples_of_any_length():
    rows = tf.data.Dataset.from_tensor_slices((tf.ragged.constant([[1.0], [1.0, 2.0]]), [1.0, 2.0]))
    for dataset in (rows, rows.batch(2)):
        split = user_data.split("train", dataset)
        assert split.element_spec[0] == form.Ragged(Spec([None], "float32", is_ragged=True), Spec([], "int32"))
        elements = [features for features, _ in split.examples(None, tf.constant(0, tf.int64))]
        assert [(each.values.numpy().tolist(), int(each.lengths)) for each in elements] == [([1.0], 1), ([1.0, 2.0], 2)]


WORDS = tf.ragged.constant([[1, 2, 0], [3], [6], [4, 5]], tf.int64)


def words():
    """Rows of ragged tensors, as examples of a dataset without a static length."""
    return tf.data.Dataset.range(4).map(lambda i: WORDS[i])


def parsed(many):
    """Records, the last one empty, parsed by the batch: their words are sparse."""

    def record(row):
        feature = tf.train.Feature(int64_list=tf.train.Int64List(value=row))
        return tf.train.Example(features=tf.train.Features(feature={"words": feature})).SerializeToString()

    records = tf.data.Dataset.from_tensor_slices([record(row) for row in (*WORDS.to_list(), [])])
    return records.batch(many).map(
        lambda each: tf.io.parse_example(each, {"words": tf.io.VarLenFeature(tf.int64)})["words"]
    )


class PaddedBatches(tf.keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, number):
        return (WORDS[2 * number : 2 * number + 2].to_tensor().numpy(),)


LENGTHS_OF_WORDS, LENGTHS_OF_BATCHES = [3, 1, 1, 2], [3, 3, 2, 2]
ONES = {
    "padded": (lambda: words().padded_batch(2), LENGTHS_OF_BATCHES),
    "one by one": (lambda: words().padded_batch(1).map(lambda x: -x), LENGTHS_OF_WORDS),
    "padded, taken apart": (lambda: words().padded_batch(2).unbatch().prefetch(1), LENGTHS_OF_BATCHES),
    "cut by the user": (lambda: words().padded_batch(2).unbatch().map(lambda x: x[:1]), [1, 1, 1, 1]),
    "beside others": (
        lambda: tf.data.Dataset.zip((words().padded_batch(2), tf.data.Dataset.range(4).batch(2))),
        LENGTHS_OF_BATCHES,
    ),
    "sparse": (lambda: parsed(2), [*LENGTHS_OF_WORDS, 0]),
    "sparse, taken apart": (lambda: parsed(5).unbatch(), [*LENGTHS_OF_WORDS, 0]),
    "made dense": (lambda: parsed(2).take(2).map(tf.sparse.to_dense), LENGTHS_OF_BATCHES),
    "by length": (
        lambda: words().bucket_by_sequence_length(lambda x: tf.shape(x)[0], [9], [2, 2]),
        LENGTHS_OF_BATCHES,
    ),
    "of one length each": (lambda: words().take(1).repeat(4).batch(2).prefetch(1), [3, 3, 3, 3]),
    "PyDataset": (PaddedBatches, LENGTHS_OF_BATCHES),
}
PADDED = {name for name, (_, found) in ONES.items() if found == LENGTHS_OF_BATCHES}


@pytest.mark.parametrize("name", ONES)
def test_padding_of_batches_is_no_length_and_rows_of_sparse_tensors_have_theirs(name, caplog):
    make, expected = ONES[name]
    split = user_data.split("train", make())
    padded = form.features(split.element_spec)
    padded = padded[0] if type(padded) is tuple else padded
    assert type(padded) is (form.Unmeasured if name in PADDED else form.Padded)
    assert [("lengths are unknown" in each.message) for each in caplog.records] == [True] * (name in PADDED)
    if not split.by_index:
        elements = [form.features(each) for each in split.examples(None, tf.constant(0, tf.int64))]
        assert [int(each.lengths) for each in elements] == expected
    given = form.measured((padded, padded))
    assert given == ((padded.values, padded.values) if name in PADDED else (padded, padded))
    if name in PADDED:
        with pytest.raises(UsageError, match="lengths are unknown; give ragged tensors"):
            lengths.bucketed(split, PLAIN)


def test_a_sparse_row_with_gaps_is_one_line():
    rows = tf.data.Dataset.range(3, 4).map(lambda size: tf.SparseTensor([[0], [2]], [1, 2], [size]))
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="a sparse example of the dataset lacks values before its last"
    ):
        list(user_data.split("train", rows).examples(None, tf.constant(0, tf.int64)))


@pytest.mark.parametrize("of", [None, buckets.LengthBuckets(2, (1, 5))], ids=["plain", "buckets"])
def test_empty_examples_of_a_stream_are_padded_as_a_source_s(of):
    """To 1, in each dimension, so that layers and pooling have something to compute with."""

    def example(i):
        return {"image": tf.ones([i // 3, i % 1, 1]), "words": tf.repeat("a", i % 3)}, i

    split = user_data.split("train", tf.data.Dataset.range(3, 5).map(example))
    split = lengths.bucketed(split, of) if of else split
    taken = split.examples(None, tf.constant(0, tf.int64))
    for count in (1, 2):
        batches = (
            buckets.in_windows(taken, of, count, None, tf.constant(0, tf.int64)) if of else batched(split, taken, count)
        )
        features, _ = next(iter(batches))
        assert features["image"].values.shape == [count, 1, 1, 1]
        assert features["image"].lengths.numpy().tolist() == [[1, 0]] * count
        assert features["words"].values.numpy().tolist() == ([[b""]] if count == 1 else [[b""], [b"a"]])
        assert features["words"].lengths.numpy().tolist() == [0, 1][:count]
        assert not tf.reduce_any(features["image"].mask)


def test_padding_is_exact_where_a_batch_is_longer_or_shorter():
    padded = Padded(tf.constant([[1, 2, 0], [3, 0, 0]]), tf.constant([2, 1]))
    for length, expected in ((2, [[1, 2], [3, 0]]), (4, [[1, 2, 0, 0], [3, 0, 0, 0]])):
        (fitted,) = form.padded_to(tf.constant([length], tf.int64), (padded,))
        assert fitted.values.numpy().tolist() == expected
