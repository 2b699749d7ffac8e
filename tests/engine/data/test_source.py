"""Sources: what is read by indices gives, in each order and by each feed, every example once an epoch."""

import dataclasses
import errno
import os

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine.data.order import ChunkedOrder, Order, plain_order
from crankshaft.engine.data.reader import Reader, in_memory, raising_source_error
from crankshaft.engine.data.source import Source, SourceSlice, Spec, WithoutBadRecords, is_transient
from crankshaft.engine.errors import BadRecordError, SourceError


class Counted(Source):
    """Examples whose feature is their index; counts what is read, and can't read some."""

    element_spec = (Spec((2,), np.int64), Spec((), object))

    def __init__(self, examples: int, chunk_examples: int | None = None, bad=()):
        if chunk_examples:
            self.chunk_examples = chunk_examples
        self._examples, self._bad = examples, set(bad)
        self.read_at: list[np.ndarray] = []

    def __len__(self) -> int:
        return self._examples

    def read(self, indices):
        if found := sorted(self._bad & set(indices.tolist())):
            raise BadRecordError(found[0], f"example {found[0]} is bad")
        assert indices.min() >= 0
        assert indices.max() < self._examples
        self.read_at.append(indices)
        return np.stack([indices, indices * 2], 1), np.array([b"%d" % each for each in indices], object)


def blocks_of_epoch(order: Order, epoch: int):
    """Yields (block, its first and last row in this epoch)."""
    step = epoch * order.steps_per_epoch
    end = step + order.steps_per_epoch
    while step < end:
        block, offset, length = order.block_at(step)
        rows = min(length - offset, end - step)
        yield tf.constant(block, tf.int64), offset, offset + rows
        step += rows


@pytest.mark.parametrize("window_chunks", [1, 3])
@pytest.mark.parametrize("chunk_examples", [2, 16])
@pytest.mark.parametrize("examples", [1, 2, 17, 64, 100])
def test_an_order_by_chunks_has_each_example_once_an_epoch(examples, chunk_examples, window_chunks):
    order = ChunkedOrder(examples, 7, 3, 5, chunk_examples=chunk_examples, window_chunks=window_chunks)
    epochs = []
    for epoch in (0, 1):
        found = []
        for block, first, stop in blocks_of_epoch(order, epoch):
            found += order.examples(block)[first:stop].numpy().ravel().tolist()
            assert set(order.epochs(block)[first:stop].numpy()) == {epoch}
        assert sorted(found) == [*range(examples)]
        epochs.append(found)
    assert epochs[0] != epochs[1] or examples <= 2


@pytest.mark.parametrize(
    ("sizes", "chunk_examples", "window_chunks"),
    [
        *[((96, 16, 1, 5), 8, 2), ((96, 8, 3, 5), 8, 5), ((50, 4, 2, 5), 4, 2), ((50, 4, 2, None), 4, 2)],
        *[((8, 3, 1, 5), 8, 2), ((24, 4, 20, 5), 4, 2), ((24, 4, 20, 5), 4, 6)],  # the last ones three epochs a block
    ],
)
def test_as_a_block_begins_the_next_windows_chunks_are_said(sizes, chunk_examples, window_chunks):
    order = ChunkedOrder(*sizes, chunk_examples=chunk_examples, window_chunks=window_chunks)
    examples, window = sizes[0], chunk_examples * window_chunks
    one_by_one = dataclasses.replace(order, batch_size=1, block_steps=1)
    for block, first, _ in blocks_of_epoch(order, 0):
        after = (first + int(block) * sizes[2]) * sizes[1] // window + 1  # of this epoch, or the next one's first
        epoch, start = (0, after * window) if after * window < examples else (1, 0)
        stop = min(start + window, examples)
        steps = [tf.constant(epoch * examples + offset, tf.int64) for offset in (start, stop)]
        chunks = {*(one_by_one.examples_between(*steps)[0].numpy() // chunk_examples)}
        # One more if a smaller one is among them.
        assert len(chunks) - -(-(stop - start) // chunk_examples) in range(1 + bool(examples % chunk_examples))
        found = order.chunks_ahead(block)
        assert found[0] == epoch
        assert {*found[1].numpy()} <= chunks
        # A chunk that a smaller one divides may be left out.
        assert len(found[1]) >= len(chunks) - bool(examples % chunk_examples)


@pytest.mark.parametrize(
    ("chunk_examples", "window", "chunks"),
    [(1, {}, None), (1, {"shuffle_window": 3}, (1024, 3)), (8, {}, (8, 64)), (8, {"shuffle_window": 3}, (8, 3))],
)
def test_an_order_is_by_chunks_if_these_are_read_better_or_asked_for(chunk_examples, window, chunks):
    order = plain_order(Counted(100, chunk_examples), 20, 2, 5, drop_remainder=True, **window)
    sizes = (100, 20, 2, 5, True)
    by_chunks = chunks and ChunkedOrder(*sizes, chunk_examples=chunks[0], window_chunks=chunks[1])
    assert order == (by_chunks or Order(*sizes))


@pytest.mark.parametrize(
    ("examples", "chunk_examples", "batch", "window_chunks", "seed"),
    [(200, 10, 20, 5, 1), (68, 2, 4, 2, 3), (41, 2, 7, 3, 5)],  # where two windows and a chunk more are too few
)
def test_each_chunk_is_read_once_a_window(examples, chunk_examples, batch, window_chunks, seed):
    source = Counted(examples, chunk_examples)
    order = plain_order(source, batch, 1, seed, window_chunks)
    reader = Reader(source, order)
    for epoch in range(2):
        for block, _, _ in blocks_of_epoch(order, epoch):
            features, labels = reader.read(order.examples(block), block)
            np.testing.assert_array_equal(features[..., 0], order.examples(block))
            assert labels.numpy().ravel()[0] == b"%d" % int(features[0, 0, 0])
    # Of the next epoch's first window, too, which is read ahead.
    assert len(source.read_at) <= 2 * -(-examples // chunk_examples) + window_chunks
    assert len({int(each[0]) for each in source.read_at}) == -(-examples // chunk_examples)


def test_a_source_is_shuffled_by_examples_unless_it_or_the_run_says_by_chunks():
    sizes = (20_000, 32, 4, 1, True)
    assert plain_order(Counted(20_000), *sizes[1:4], 0, True) == Order(*sizes)
    for source, window, chunks in (
        (Counted(20_000, 8), 0, {"chunk_examples": 8, "window_chunks": 64}),
        (Counted(20_000, 8), 5, {"chunk_examples": 8, "window_chunks": 5}),
        (Counted(20_000), 5, {"chunk_examples": 1024, "window_chunks": 5}),
    ):
        assert plain_order(source, *sizes[1:4], window, True) == ChunkedOrder(*sizes, **chunks)


@pytest.mark.parametrize("chunk_examples", [1, 8])
def test_what_is_read_whole_is_in_order_without_a_warning(chunk_examples, caplog):
    for _ in range(6):  # of functions that are traced again and again TensorFlow warns
        features, labels = in_memory(Counted(50, chunk_examples)).as_arrays()
    assert "retracing" not in caplog.text
    np.testing.assert_array_equal(features[:, 1], np.arange(50) * 2)
    assert labels.tolist() == [b"%d" % each for each in range(50)]


def test_bad_records_are_replaced_by_the_next_good_ones_and_said_once():
    said: list[str] = []
    source = WithoutBadRecords(Counted(10, bad=(3, 4, 9)), 3, said.append)
    for _ in range(2):
        np.testing.assert_array_equal(source.read(np.array([2, 3, 4, 9]))[0][:, 0], [2, 5, 5, 0])
    assert [line.split(";")[0] for line in said] == ["example 3 is bad", "example 4 is bad", "example 9 is bad"]


def test_one_bad_record_too_many_is_an_error():
    source = WithoutBadRecords(Counted(10, bad=(3, 4)), 1, lambda line: None)
    with pytest.raises(SourceError, match="example 4 is bad"):
        source.read(np.arange(10))


def test_a_part_counts_from_its_own_first_example():
    part = SourceSlice(Counted(10, bad=(9,)), 4, 10)
    assert len(part) == 6
    np.testing.assert_array_equal(part.read(np.array([0, 3]))[0][:, 0], [4, 7])
    with pytest.raises(BadRecordError) as caught:
        part.read(np.array([5]))
    assert caught.value.example == 5


class Augmented(Counted):
    """Whose examples differ in each epoch of a training."""

    is_random = varies = True

    def for_evaluation(self):
        return Counted(len(self), 8)


def test_what_wraps_a_source_is_evaluated_as_that_is():
    for wrapped in (SourceSlice(Augmented(10), 4, 10), WithoutBadRecords(Augmented(10), 1, print)):
        evaluated = wrapped.for_evaluation()
        assert (evaluated.is_random, evaluated.varies, evaluated.chunk_examples) == (False, False, 8)
        assert (wrapped.is_random, wrapped.varies, wrapped.chunk_examples) == (True, True, 1)
        assert len(evaluated) == len(wrapped)
        np.testing.assert_array_equal(evaluated.read(np.array([1]))[0], wrapped.read(np.array([1]))[0])


def test_what_a_source_raises_is_raised_as_it_is():
    source = Counted(10, bad=(3,))
    order = plain_order(source, 5, 1, seed=None)
    reader = Reader(source, order)
    with pytest.raises(BadRecordError, match=r"^example 3 is bad$"), raising_source_error(reader):
        reader.read(order.examples(tf.constant(0, tf.int64)), tf.constant(0, tf.int64))


def test_an_error_of_a_disk_or_network_may_be_temporary_by_its_number_or_else_by_its_text():
    text = f"read failed: {os.strerror(errno.ETIMEDOUT)}"
    for error in (
        OSError(errno.ESTALE, "x"),
        OSError(text),
        RuntimeError(text),
        ValueError("Could not resolve host"),
    ):
        assert is_transient(error)
    for error in (OSError(errno.ENOENT, text), OSError("x"), RuntimeError("x")):
        assert not is_transient(error)
