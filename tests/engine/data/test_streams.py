"""A stream goes on exactly where a checkpoint was: by its iterator's state, or by reading its epoch again."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine import logging
from crankshaft.engine.data import streamed
from crankshaft.engine.data.streamed import DatasetStream, Stream, count, divide
from crankshaft.engine.errors import SourceError, StuckStreamError, UsageError
from crankshaft.engine.strategies import FeedOptions
from crankshaft.engine.strategies.base import Processes
from crankshaft.input.records import checksums
from tests.engine.data.test_feeds import Recorder, arrays, assert_each_once, dataset, in_files, seen

pytestmark = pytest.mark.thorough

EXAMPLES, BATCH = 46, 6  # eight steps an epoch, the last of four examples
SMALL = 9  # a shuffle's buffer that does not hold the epoch: what is before it has a state too


@pytest.fixture
def warnings(monkeypatch):
    """The lines that are logged as warnings."""
    found = []
    monkeypatch.setattr(logging, "warning", lambda line, *values: found.append(line % values))
    return found


class Watched:
    """What a `Watch` was shown: (what, total, the last number told)."""

    def __init__(self):
        self.shown = []

    @contextlib.contextmanager
    def __call__(self, what, total):
        told = [0]
        yield lambda done: told.append(done)
        self.shown.append((what, total, told[-1]))


def through_python(parts, number):
    return parts, tf.ensure_shape(tf.numpy_function(lambda x: x, [number], tf.int64), [])


def stateful(examples):
    return dataset(examples).map(through_python)


def kept_of(made):
    """What a checkpoint of this moment keeps of the input."""
    made.state.input.capture(made.state.step)
    return {name: variable.numpy() for name, variable in variables_of(made).items()}


def variables_of(made):
    position = made.state.input
    return {name: getattr(position, name) for name in ("step", "pipeline", "process_0")}


def resumed(made, kept, step):
    """The same, as after a resume at this step."""
    for name, variable in variables_of(made).items():
        variable.assign(kept[name])
    made.jump(step)
    return made


def check_resumed(make, step, until):
    """Asserts that a run restored at a step continues as the original; returns the saved state of its input."""
    made = make()
    put_back = made.state.make_restorer()
    made.train(step)
    kept = kept_of(made)
    made.train(until)
    expected = seen(made)[step:]
    put_back()
    made.strategy.close_feeds()
    resumed(made, kept, step).train(until)
    assert seen(made)[step:] == expected
    return kept


@pytest.mark.parametrize(
    ("step", "replicas"),
    [(3, 1), (8, 1), (7, 2), (13, 2)],  # within an epoch and at its end, of the first and of the second
)
def test_a_resumed_stream_goes_on_by_its_state_and_reads_nothing_again(bench, step, replicas):
    """Within an epoch, before its smaller batch, at its end."""
    watched = Watched()
    options = FeedOptions(watch=watched, shuffle_buffer=SMALL)
    kept = check_resumed(lambda: bench(Recorder(), dataset(EXAMPLES), BATCH, replicas, feed=options, seed=3), step, 20)
    assert len(kept["process_0"]) > 100
    assert watched.shown == []


def test_a_stream_that_was_resumed_twice_is_the_same_stream(bench):
    through = bench(Recorder(), dataset(EXAMPLES), BATCH, seed=3)
    through.train(30)
    made, at = bench(Recorder(), dataset(EXAMPLES), BATCH, seed=3), 0
    for step in (7, 18):
        made.train(step)
        made = resumed(bench(Recorder(), dataset(EXAMPLES), BATCH, seed=3), kept_of(made), step)
        at = step
    made.train(30)
    assert seen(made)[at:] == seen(through)[at:]


@pytest.mark.parametrize("source", ["a shuffle of its own", "files", "cached", "one example"])
def test_streams_of_many_kinds_have_a_state(bench, tmp_path, source):
    make = {
        "a shuffle of its own": lambda: dataset(EXAMPLES).shuffle(9, seed=1),
        "files": lambda: in_files(tmp_path, EXAMPLES, files=3).prefetch(2),
        "cached": lambda: dataset(EXAMPLES).cache().map(lambda *parts: parts, num_parallel_calls=2),
        "one example": lambda: dataset(1),
    }[source]
    assert check_resumed(lambda: bench(Recorder(), make(), BATCH, seed=3), 7, 15)["process_0"]


def test_a_shuffle_of_its_own_goes_back_to_what_was_kept_and_to_nothing_else(bench):
    """Its order depends on how often it was read: from the beginning it would be another, unnoticed."""

    def make():
        tf.random.set_seed(None)  # as in a new process: a global one would change the shuffles'
        shuffled = dataset(EXAMPLES).shuffle(9, seed=1).shuffle(7, seed=2).map(lambda *each: each)
        return bench(Recorder(), shuffled, BATCH, seed=3)

    made = make()
    kept = {0: kept_of(made)}
    for step in (7, 21):
        made.train(step)
        kept[step] = kept_of(made)
    made.train(40)
    ahead = seen(made)
    for step in kept:
        resumed(made, kept[step], step).train(40)
        assert seen(made) == ahead
        again = resumed(make(), kept[step], step)
        again.train(40)
        assert seen(again)[step:] == ahead[step:]
    made.jump(3)
    with pytest.raises(UsageError, match="can't be read again from step 3: no position is kept there"):
        made.train(5)


def noisy(parts, number):
    """Changes what the recorder does not read."""
    return {**parts, "noise": tf.random.uniform([])}, number


WITHOUT_POSITION = {
    "calls Python after": lambda _: dataset(EXAMPLES).shuffle(9, seed=1).shuffle(5, seed=2).map(through_python),
    "calls Python before, counted": lambda _: stateful(EXAMPLES).shuffle(9, seed=1).filter(lambda *_: True),
    "read twice": lambda _: dataset(EXAMPLES // 2).shuffle(9, seed=1).repeat(2).map(through_python),
    "writes": lambda folder: dataset(EXAMPLES).cache(f"{folder}/cache").shuffle(9, seed=1),
    "samples": lambda _: dataset(EXAMPLES).shuffle(9, seed=1).map(noisy),
}


@pytest.mark.parametrize(
    "kind",
    ["calls Python after", *(pytest.param(kind, marks=pytest.mark.slow) for kind in [*WITHOUT_POSITION][1:])],
)
def test_a_shuffled_stream_without_a_position_is_read_again_in_its_order(bench, tmp_path, warnings, kind):
    """By the seeds of its shuffles as the epoch began: in this process, and twice in others."""

    def make(saved_data=None):
        tf.random.set_seed(None)
        made = WITHOUT_POSITION[kind](tmp_path)
        return bench(Recorder(), made, BATCH, feed=FeedOptions(shuffle_buffer=SMALL), seed=3, saved_data=saved_data)

    made, kept = make(), {}
    for step in (0, 3, 19):
        made.train(step)
        kept[step] = kept_of(made)
    made.train(40)
    ahead = seen(made)
    assert ["reads the epoch again" in line for line in warnings] == [True]
    for step in (19, 3, 0):
        resumed(made, kept[step], step).train(22)
        assert seen(made) == ahead[:22]
    then = kept[19]
    for step, until in ((19, 29), (29, 40)):
        again = resumed(make({"by": "example", "counts": [EXAMPLES]}), then, step)
        again.train(until)
        assert seen(again)[step:] == ahead[step:until]
        then = kept_of(again)


def test_a_shuffled_stream_whose_order_is_lost_is_refused_within_an_epoch(bench):
    readings = itertools.count()

    def differing():
        return np.random.default_rng(next(readings)).permutation(EXAMPLES)

    def make(seed=1, shuffle=True, differs=False):
        tf.random.set_seed(None)
        numbers = tf.data.Dataset.range(EXAMPLES)
        if differs:
            generator = tf.data.Dataset.from_generator(differing, output_signature=numbers.element_spec)
            numbers = generator.apply(tf.data.experimental.assert_cardinality(EXAMPLES))
        shuffled, rows = numbers.shuffle(9, seed=seed) if shuffle else numbers, arrays(EXAMPLES)
        rows_of = shuffled.map(lambda i: tf.nest.map_structure(lambda x: tf.gather(x, i), rows))
        return bench(Recorder(), rows_of.map(through_python), BATCH, seed=3)

    def kept_at(step, **arguments):
        made = make(**arguments)
        made.train(step)
        return kept_of(made)

    older = {"process_0": b""}
    at_11, alike = kept_at(11), make()
    for kept, then, why in (
        (kept_at(11, seed=None), make(seed=None), "has no seed; give it one, or leave that shuffle out"),
        (at_11, make(seed=2), "has changed; leave that shuffle out, since the run shuffles"),
        (at_11, make(shuffle=False), "has changed; leave that shuffle out, since the run shuffles"),
        ({**at_11, **older}, alike, "has another order at each reading; leave that shuffle out"),
        ({**at_11, "process_0": at_11["process_0"][:-100]}, alike, "has another order at each reading; leave that"),
        (kept_at(11, differs=True), make(differs=True), "its first batch is another, since the dataset samples"),
    ):
        with pytest.raises(UsageError, match=f"can't be read again from step 11: .*{why}.* give a Source, and begin"):
            resumed(then, kept, 11).train(20)
    # At an epoch's end, and within the first one, which is read as it was.
    for step, kept in ((16, at_11), (3, at_11)):
        again = resumed(make(), {**kept, "step": step, **older}, step)
        again.train(20)


def test_a_stateful_stream_says_so_once_and_reads_its_epoch_again(bench, warnings):
    watched = Watched()
    options = FeedOptions(watch=watched, shuffle_buffer=SMALL)
    through = bench(Recorder(), stateful(EXAMPLES), BATCH, feed=options, seed=3)
    through.train(9)
    kept = kept_of(through)
    through.train(10)
    kept_of(through)
    assert len(warnings) == 1
    assert "stateful" in warnings[0]
    through.train(20)
    for position in (kept["process_0"], b""):  # a run of before kept nothing
        again = bench(Recorder(), stateful(EXAMPLES), BATCH, feed=options, seed=3)
        resumed(again, {**kept, "process_0": position}, 9).train(20)
        assert seen(again)[9:] == seen(through)[9:]
    assert watched.shown == 2 * [("reading the epoch again, batches", 1, 1)]
    assert len(warnings) == 1


def rows_of(generate):
    """The examples of the numbers that a function makes again at each reading."""
    rows = arrays(500)
    numbers = tf.data.Dataset.from_generator(generate, output_signature=tf.TensorSpec([], tf.int64))
    return numbers.map(lambda i: tf.nest.map_structure(lambda x: tf.gather(x, i), rows))


@pytest.mark.parametrize("differs", ["order", "features", "nothing"])
def test_an_epoch_that_is_read_again_in_another_order_is_a_line(bench, warnings, differs):
    readings = itertools.count()

    def numbers():
        reading = next(readings)
        return np.random.default_rng(reading if differs == "order" else 0).permutation(EXAMPLES)

    def noisy(parts, number):
        return {**parts, "value": parts["value"] + [0.0, tf.random.normal([])]}, number

    examples = rows_of(numbers).apply(tf.data.experimental.assert_cardinality(EXAMPLES))
    made = bench(Recorder(), examples.map(noisy) if differs == "features" else examples, BATCH, shuffle=False)
    made.train(11)
    kept = kept_of(made)
    made.strategy.close_feeds()
    resumed(made, kept, 11).train(20)
    lines = [line for line in warnings if "another when it is read again up to step 11: its epoch began with" in line]
    assert len(lines) == (differs == "order")
    assert len(seen(made)) == 20


@pytest.mark.parametrize("is_live", [True, False])
def test_steps_without_epochs_go_on_with_what_comes_next_unless_the_same_comes_again(bench, warnings, is_live):
    sent = itertools.count()

    def numbers():
        return iter(sent if is_live else range(400))

    made = bench(Recorder(), streamed.Endless(DatasetStream(rows_of(numbers)), EXAMPLES), BATCH, shuffle=False)
    made.train(3)
    kept = kept_of(made)
    made.strategy.close_feeds()
    resumed(made, kept, 3).train(6)
    before, after = np.split(np.ravel(seen(made)), [3 * BATCH])
    np.testing.assert_array_equal(before, np.arange(3 * BATCH) + 1)
    np.testing.assert_array_equal(after, np.arange(3 * BATCH) + after[0])
    assert (after[0] > 3 * BATCH + 1) if is_live else (after[0] == 3 * BATCH + 1)  # some were read ahead
    lines = [line for line in warnings if "this run goes on at step 3 with what comes next" in line]
    assert len(lines) == is_live


def test_steps_without_epochs_go_on_over_any_number_of_passes(bench):
    made = bench(Recorder(), streamed.Endless(DatasetStream(dataset(4)), 4), BATCH, shuffle=False)
    made.train(50)
    np.testing.assert_array_equal(np.ravel(seen(made)), np.arange(50 * BATCH) % 4 + 1)


class Pair(Processes):
    """This process and another, which has sent what `answer` makes of this one's value."""

    host_names = ("worker 0", "worker 1")

    def __init__(self, answer):
        self.answer = answer

    def exchange(self, value=None):
        return [value, self.answer(value)]


def test_workers_that_read_all_of_a_stream_compare_the_batch_that_they_begin_with(bench):
    """Also where no iterator can be opened to look: its state can't be saved."""
    made = bench(Recorder(), stateful(EXAMPLES), BATCH, shuffle=False)
    feed = made.strategy.training.feed
    feed.processes = Pair(lambda first: [[checksum + 1, varies] for checksum, varies in first or []])
    with pytest.raises(UsageError, match=r"data at worker 1 differs from worker 0's.*consumer_index"):
        made.train(2)
    made = bench(Recorder(), stateful(EXAMPLES), BATCH, shuffle=False)
    made.strategy.training.feed.processes = Pair(lambda first: first)
    made.train(16)
    assert_each_once(made, EXAMPLES, BATCH)


def sampled(seed):
    parts = [dataset(EXAMPLES), dataset(EXAMPLES).shuffle(9, seed=seed, reshuffle_each_iteration=False)]
    return tf.data.Dataset.sample_from_datasets(parts, [0.5, 0.5], seed=seed, stop_on_empty_dataset=True).take(EXAMPLES)


@pytest.mark.parametrize("seed", [None, 5])
def test_a_stream_that_samples_goes_on_as_it_began_if_it_has_seeds(bench, warnings, monkeypatch, seed):
    """Otherwise a process makes them of the global one, or of none, and what is read again differs: a line."""
    monkeypatch.setattr(logging, "warning_once", logging.warning)

    def make(global_seed):
        tf.random.set_seed(global_seed if seed is None else None)
        return bench(Recorder(), sampled(seed), BATCH, seed=3)

    through = make(1)
    through.train(9)
    kept = kept_of(through)
    through.train(30)
    again = resumed(make(2), kept, 9)
    again.train(30)
    assert (seen(again)[9:] == seen(through)[9:]) == (seed is not None)
    assert ["with other seeds than those of the checkpoint" in line for line in warnings] == [True] * (seed is None)
    if seed is None:
        made = make(None)
        made.train(3)
        kept_of(made)
        assert "the dataset samples without a seed" in warnings[1]


@pytest.mark.parametrize("damage", ["cut", "another's", "of another buffer"])
def test_a_state_that_does_not_fit_is_one_line_and_the_epoch_is_read_again(bench, warnings, damage):
    options = FeedOptions(shuffle_buffer=SMALL)
    through = bench(Recorder(), dataset(EXAMPLES), BATCH, feed=options, seed=3)
    through.train(9)
    kept = kept_of(through)
    if damage == "cut":
        kept["process_0"] = kept["process_0"][:100]
    if damage == "another's":
        other = bench(Recorder(), dataset(EXAMPLES).filter(lambda *_: True), BATCH, feed=options, seed=3)
        other.train(9)
        kept["process_0"] = kept_of(other)["process_0"]
    if damage == "of another buffer":
        options = FeedOptions(shuffle_buffer=SMALL - 1)
        through = bench(Recorder(), dataset(EXAMPLES), BATCH, feed=options, seed=3)
    through.train(20)
    again = bench(Recorder(), dataset(EXAMPLES), BATCH, feed=options, seed=3)
    resumed(again, kept, 9).train(20)
    assert seen(again)[9:] == seen(through)[9:]
    if damage != "of another buffer":
        assert len(warnings) == 1
        assert "does not fit the dataset" in warnings[0]


@pytest.mark.parametrize("change", [-1, 1])
def test_a_stream_of_another_length_than_was_counted_ends_the_run(bench, change):
    """As of a file that shrinks or grows: no epoch begins early, or late, in silence."""
    source = DatasetStream(dataset(EXAMPLES).filter(lambda *_: True))
    made = bench(Recorder(), source, BATCH, seed=3)
    known = {"by": "example", "counts": [EXAMPLES + change]}
    made.strategy.bind(made.state, made.strategy.feed(source, BATCH, 3, known))
    with pytest.raises(tf.errors.FailedPreconditionError, match=f"expected to contain {EXAMPLES + change} elements"):
        made.train(20)


def test_what_was_counted_is_not_counted_again(tmp_path):
    watched = Watched()
    source = DatasetStream(in_files(tmp_path, 23, files=3))
    share = divide(source, Processes(), watch=watched)
    assert share.counts == (23,)
    assert [(what, told) for what, _, told in watched.shown] == [("counting examples", 23)]
    assert divide(source, Processes(), saved_counts=share.metadata(), watch=watched).counts == (23,)
    knows_its_own = DatasetStream(dataset(7))
    assert divide(knows_its_own, Processes(), saved_counts=share.metadata(), watch=watched).counts == (7,)
    assert len(watched.shown) == 1


def test_only_what_may_never_end_is_counted_for_no_longer_than_a_limit(monkeypatch, warnings):
    """Files end, however long that takes."""
    monkeypatch.setattr(streamed, "_COUNTED_AT_ONCE", 1)

    def wait(number):
        time.sleep(0.02)
        return number

    slow = calling(12, wait).filter(lambda *_: True)
    assert count(streamed.FileStream(["a file"], lambda path: slow), timeout_seconds=0.15) == 12
    with pytest.raises(
        SourceError, match=r"are being counted for 0.\d+ s, [1-9]\d? so far, and it may never end; give t"
    ):
        count(DatasetStream(slow), timeout_seconds=0.15)
    assert not warnings  # which come after ten seconds


def write_records(folder, examples, files):
    paths = []
    for number in range(files):
        paths.append(str(folder / f"{number}.tfrecord.gz"))
        with tf.io.TFRecordWriter(paths[-1], "GZIP") as writer:
            for i in range(number + 1, examples + 1, files):
                writer.write(str(i).encode())
    return paths


def parse(serialized):
    ids = tf.strings.to_number(serialized, tf.int64)
    values = tf.cast(tf.stack([ids, -ids], 1), tf.float32)
    return {"id": ids, "value": values, "image": tf.reshape(values, [-1, 1, 2, 1])}, ids


@pytest.mark.parametrize(
    ("files", "replicas"),
    [pytest.param(1, 1, marks=pytest.mark.slow), pytest.param(7, 1, marks=pytest.mark.slow), (7, 2)],
)
def test_compressed_records_are_a_stream(bench, tmp_path, files, replicas):
    source = streamed.records(write_records(tmp_path, EXAMPLES, files), parse, files_at_once=3)
    assert_each_once(bench(Recorder(), source, BATCH, replicas), EXAMPLES, BATCH)
    check_resumed(lambda: bench(Recorder(), source, BATCH, replicas, seed=3), 8, 15)


def with_condition(features, ids):
    if tf.reduce_all(ids > 0):  # which AutoGraph makes an operation
        return features, ids
    return features, -ids


def parse_with_condition(serialized):
    return with_condition(*parse(serialized))


def read_with_condition(path):
    if tf.strings.length(path) > 0:
        path = tf.strings.join([path])
    return tf.data.TFRecordDataset(path, "GZIP").batch(1).map(parse_with_condition).unbatch()


class Made(Stream):
    """Makes its examples where an epoch begins, by a condition on the epoch."""

    element_spec, length = DatasetStream(dataset(1)).element_spec, EXAMPLES

    def examples(self, seed, epoch):
        with_condition({}, epoch)
        return dataset(EXAMPLES).map(with_condition)


def made_by_conditions(kind, paths):
    if kind == "examples":
        return Made()
    if kind == "read":
        return streamed.FileStream(paths, read_with_condition)
    return streamed.records(paths, parse_with_condition)


@pytest.mark.parametrize("kind", ["examples", "read", "parse"])
def test_functions_of_a_stream_may_have_conditions_on_tensors(bench, tmp_path, kind):
    source = made_by_conditions(kind, write_records(tmp_path, EXAMPLES, 2))
    assert_each_once(bench(Recorder(), source, BATCH), EXAMPLES, BATCH)


def test_files_come_in_another_order_in_each_epoch_and_always_the_same(tmp_path):
    source = streamed.records(write_records(tmp_path, 8, 8), parse, files_at_once=1)

    def epoch(seed, number):
        return [int(i) for _, i in source.examples(seed, tf.constant(number, tf.int64))]

    assert epoch(None, 0) == epoch(None, 1) == list(range(1, 9))
    orders = [epoch(seed, number) for seed in (0, 1) for number in (0, 1)]
    assert orders == [epoch(seed, number) for seed in (0, 1) for number in (0, 1)]
    assert all(sorted(order) == list(range(1, 9)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


def test_streams_of_other_files_have_another_identity(tmp_path):
    """By their names, sizes and what is known of their contents, wherever they are."""
    paths = [str(tmp_path / name) for name in "abc"]
    for path in paths:
        with open(path, "w") as file:
            file.write("some")
    found = [streamed.records(paths, parse, contents=contents).identity() for contents in ("", "", " of a day")]
    found.append(streamed.records(paths[1:], parse).identity())
    with open(paths[2], "a") as file:
        file.write("more")
    found.append(streamed.records(paths, parse).identity())
    assert found[0] == found[1]
    assert len({*found}) == 4
    assert str(tmp_path) not in found[0]


def test_a_workers_files_are_its_own(tmp_path):
    source = streamed.records(write_records(tmp_path, 23, 7), parse)
    parts = [[int(i) for _, i in source.shard_files(3, worker).examples(None, 0)] for worker in range(3)]
    assert sorted(i for part in parts for i in part) == list(range(1, 24))
    assert source.shard_files(8, 0) is None
    assert [count(source.shard_files(3, worker)) for worker in range(3)] == [len(part) for part in parts]


def flip(plain: bytes) -> bytes:
    return plain[:30] + bytes([plain[30] ^ 1]) + plain[31:]


DAMAGES = {
    "flipped": (flip, "corrupted record at "),
    "cut": (lambda plain: plain[:-3], "truncated record at "),
    "other": (lambda plain: record_of(b"word"), "StringToNumberOp could not correctly convert string: word"),
}


def record_of(data: bytes) -> bytes:
    length = np.array([len(data)])
    checks = checksums.length_checksums(length).astype("<u4"), checksums.record_checksums([data]).astype("<u4")
    return length.astype("<u8").tobytes() + checks[0].tobytes() + data + checks[1].tobytes()


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("length", [None, EXAMPLES], ids=["as it is counted", "in an epoch"])
def test_what_is_wrong_with_a_file_ends_the_run_and_names_it(bench, tmp_path, damage, length):
    """TensorFlow compares both checksums, and says nothing of the file."""
    change, said = DAMAGES[damage]
    paths = write_records(tmp_path, EXAMPLES, 3)
    with gzip.open(paths[1]) as file:
        plain = file.read()
    with gzip.open(paths[1], "wb") as file:
        file.write(change(plain))
    with pytest.raises(SourceError, match=rf"^{paths[1]}, after 0 examples: {said}.*; restore the file, and resume"):
        bench(Recorder(), streamed.records(paths, parse, length=length), BATCH, seed=3).train(8)


def calling(examples, function):
    """A stream that calls a function for each example."""
    return dataset(examples).map(
        lambda parts, number: (parts, tf.ensure_shape(tf.numpy_function(function, [number], tf.int64), []))
    )


@pytest.fixture
def hangs():
    """A function that returns its numbers below 30, and no other before the test ends."""
    over = threading.Event()

    def numbers(number):
        if number >= 30:
            over.wait()
        return number

    yield numbers
    over.set()


HUNG = r"the data is a stream without data or computation for \S+ s; see .* raise step_timeout_seconds"


@pytest.mark.parametrize("place", ["in an epoch", "as it is read again", "as it is counted", "in an evaluation"])
def test_a_stream_that_hangs_ends_the_run(bench, hangs, place):
    options = FeedOptions(shuffle_buffer=1, read_timeout_seconds=1.0)
    hung = calling(EXAMPLES, hangs)
    made = bench(Recorder(), hung, BATCH, eval_source=hung, feed=options, seed=3)
    if place == "as it is read again":
        made.jump(7)
    does = {
        "as it is counted": lambda: count(streamed.DatasetStream(hung.filter(lambda *_: True)), timeout_seconds=1.0),
        "in an evaluation": made.strategy.evaluate,
    }
    with pytest.raises(StuckStreamError, match=HUNG):
        does.get(place, lambda: made.train(8))()


def test_a_stream_that_takes_long_and_computes_is_waited_for(bench):
    """As a shuffle's buffer that fills: nothing comes for longer than it may."""

    def compute(number):
        end = time.thread_time() + 0.03
        while time.thread_time() < end:
            pass
        return number

    options = FeedOptions(read_timeout_seconds=0.4)
    made = bench(Recorder(), calling(EXAMPLES, compute), BATCH, feed=options, seed=3)
    began = time.monotonic()
    made.train(1)
    assert time.monotonic() - began > 3 * options.read_timeout_seconds
