"""The feed of a stream: one iterator per process, whose position checkpoints keep."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ... import logging
from ...errors import UsageError, reason
from ...internals import pipelines
from ...internals.tensorflow import (
    converted,
    iterator_state,
    remove_generated_files,
    restore_iterator,
    shuffled,
    unconverted,
)
from ...randomness import epoch_seed
from ..buckets import in_windows
from ..form import fields, zeros
from ..order import Order, even_range, replica_range
from ..source import Spec, unknown_dimensions
from ..streamed import StreamPart, Watch, batched, map_elements, naming_files, untuned, unwatched
from ..timeouts import StreamTimeout
from .blocks import Devices
from .feed import CallInput, Feed, FeedStats
from .replay import Replay, ReplayPosition, alike

_MOST_STATE_BYTES = 1 << 30  # TensorFlow's limit is 2 GiB, and several checkpoints are kept
_AHEAD = 4  # batches
_MOST_PASSES = 1 << 16  # finite: a stream that has become empty would be read for ever
_SEEDS = b"seeds"
_FEW = (
    "a batch is of fewer examples than the {0} replicas, or its arrays are of different numbers that these do not "
    "divide; make larger batches, of multiples of {0}, or use one device"
)
_OTHER_SAMPLES = (
    "the dataset samples %s (Dataset.sample_from_datasets, rejection_resample, random, or shuffle with "
    "reshuffle_each_iteration=False), so a run resumed in another process has other samples from its next epoch on; "
    "give each a seed"
)

_HOW_TO_RESUME = (
    "seed what the dataset shuffles and samples (with TensorFlow's data service, in `ids.repeat()` before distribute), "
    "or give a live stream to run.train(data=...) of an open_run"
)
_OTHER_WORKERS = (
    "the first batch of the train data at {} differs from {}'s, and each reads all of it and takes its rows: give all "
    "workers the same order, without what samples at random; from TensorFlow's data service, let each read batches of "
    "its own (consumer_index, num_consumers, or one job_name, of `ids.repeat()`), with auto_shard_policy=off"
)
_OTHER_EPOCH = (
    "the training data is another when it is read again up to step %d: its epoch began with another batch, so some of "
    f"its examples are trained on twice, and others not; {_HOW_TO_RESUME}"
)
_OTHER_STREAM = (
    "the training data is another when it is read again: this run goes on at step %d with what comes next, and what "
    f"was read ahead when it stopped is lost; {_HOW_TO_RESUME}"
)


class StreamedFeed(Feed):
    """A stream's epochs, each shuffled within a buffer and batched; divided among processes.

    Each process has one plain `tf.data` iterator over its part. Batches come in the order of steps. To start at
    another step, the feed restores the iterator's kept position (`engine.data.feeds.position`), or reads the step's
    epoch from its beginning: of a stream that shuffles, with the seeds kept for that (`engine.data.feeds.replay`).

    Args:
      order: order with the sizes of batches and the seed, from `part.order`.
      shuffle_buffer: size of the shuffle's buffer, in examples.
      distributes: whether TensorFlow splits batches, as for TPUs: such iterators have no state.
      takes_few: whether a stream's own batches may have fewer examples than replicas, some of which then have none.
    """

    part: StreamPart
    reads_in_loop = True

    def __init__(
        self,
        devices: Devices,
        part: StreamPart,
        order: Order,
        *,
        shuffle_buffer: int,
        watch: Watch = unwatched,
        timeout_seconds: float = 0.0,
        distributes: bool = False,
        takes_few: bool = False,
    ):
        self.order, self.part = order, part
        self._strategy, self._mesh = devices.strategy, devices.mesh
        if part.stream.buckets is not None:
            part.stream.buckets.check_stream(order)
        self._stream_timeout = StreamTimeout(part.stream.files(), timeout_seconds)
        self._shuffle_buffer, self._watch, self._distributes = shuffle_buffer, watch, distributes
        self._examples = converted(part.stream.examples)  # which may be of the user's class
        self._takes_few = takes_few
        self._iterator: Any = None
        self._next_step: int | None = None
        self._was_opened = False
        self._bytes_read = 0
        self._has_no_state = distributes
        self._replay: Replay | None = None
        seeds = [pipelines.seeds(shuffle) for shuffle in part.stream.shuffles]
        self._is_seeded = all(map(any, seeds))
        # Shuffles without seeds have others in each process.
        self._shuffles = [*seeds, *([] if self._is_seeded else [os.urandom(8).hex()])]
        sampled: list[Any] = [pipelines.seeds(sampler) for sampler in part.stream.samplers]
        self._has_seeds = all(map(any, sampled))
        listed = [*sampled, *([] if self._has_seeds else [os.urandom(8).hex()])]
        self._sampled = _SEEDS + json.dumps(listed).encode() + b"\n" if listed else b""  # beside a state
        # How many replicas' shards this process's batches have, and the number of the first of them.
        self._num_shards = self._mesh.batch_shard(0, self._strategy.num_replicas_in_sync)[1] // len(part.counts)
        self._first_shard = part.process * self._num_shards

    def stats(self) -> FeedStats:
        # Of the examples that steps have taken; text varies in length.
        return FeedStats(None if self._example_bytes is None else self._bytes_read)

    @property
    def batch_size(self) -> int | None:
        return None if self.part.stream.by_batch else super().batch_size

    @property
    def _example_bytes(self) -> int | None:
        specs = tf.nest.flatten(self.part.stream.element_spec)
        varies = any(spec.dtype == object or spec.unknown for spec in specs)
        return None if varies else sum(spec.nbytes for spec in specs)

    @property
    def pipeline(self) -> str:  # type: ignore[override]
        # TensorFlow would fill a smaller buffer past its end.
        spec = tf.nest.map_structure(
            lambda spec: f"{tf.as_dtype(spec.dtype).name} {spec.shape}", self.part.stream.element_spec
        )
        order, buckets = self.order, self.part.stream.buckets
        identity = [self.part.metadata(), order.batch_size, order.seed, self._shuffle_buffer, spec]
        identity += [dataclasses.asdict(buckets)] if buckets else []
        identity += ["by batch"] if self.part.stream.by_batch else []
        return json.dumps(identity, default=str)

    def max_steps_per_call(self, step: int, limit: int) -> int:
        # All steps of a call gather equally many examples, as TensorFlow's collectives require.
        stream = self.part.stream
        is_any_length = self._num_shards * len(self.part.counts) > 1 and (
            stream.by_batch or unknown_dimensions(stream.element_spec)
        )
        return 1 if is_any_length else int(min(limit, self.order.steps_of_equal_size(step)))

    def call_input(self, step: int, limit: int) -> CallInput:
        if step != self._next_step:
            self.close()  # the iterator may have a cache open that the next one will write
            self._iterator = self._open(step)
        limit = self.max_steps_per_call(step, limit)
        self._next_step = step + limit
        # The loop takes the batches itself, so what has been read is known by arithmetic alone.
        examples = self.order.examples_before(step + limit) - self.order.examples_before(step)
        self._bytes_read += (self._example_bytes or 0) * examples // len(self.part.counts)
        return CallInput((self._iterator,), 0, limit)

    def run_with_timeout(self, call: Callable[[], Any], progress: Callable[[], Any]) -> Any:
        with naming_files(self.part.stream):
            return self._stream_timeout.call(call, progress)

    @property
    def form(self) -> Any:
        return (self.part.stream.element_spec, self._unseeded_order) if self._num_shards == 1 else None

    def next_operands(self, operands, offset: tf.Tensor):
        (iterator,) = operands
        return (next(iterator),)

    def batch(self, batch):
        if self._num_shards == 1 or self._distributes:
            return batch
        by_batch = self.part.stream.by_batch  # whose arrays may have other numbers of examples
        shard_range = even_range if self.part.by_file or by_batch else replica_range
        number = self._mesh.data.rank - self._first_shard
        with tf.device("CPU:0"):  # with the batch: a GPU receives only its examples

            def shard(x: tf.Tensor) -> slice:
                size = tf.shape(x)[0] if x.shape[0] is None else x.shape[0]
                return slice(*shard_range(size, number, self._num_shards))

            first = shard(tf.nest.flatten(batch)[0])
            return tf.nest.map_structure(lambda x: x[shard(x) if by_batch else first], batch)

    def close(self) -> None:
        self._iterator = self._next_step = None

    def position(self, step: int) -> bytes | None:
        """Returns the iterator's state at this step; b"" if it can't be kept, None if it is at another step."""
        # A position before the first step is the seeds' state: without it a resumed first epoch would have another
        # order.
        if not self._was_opened and self.part.stream.shuffles:
            self._iterator, self._next_step = self._open(step), step  # to return to the first step, too
        if step != self._next_step and not self._distributes:
            return None
        if self._variables:
            logging.warning_once(
                "checkpoints have the variables that the dataset reads (%s) only if the trainer or a Keras callback "
                "holds them; set others again as a run resumes",
                self._variables,
            )
        if self._replay:
            self._warn_of_no_position(self._why_replayed)
            return self._replay.position(self.order.position(step)[0])
        if self._has_no_state:
            return b""
        why = self._why_written
        try:
            state = b"" if why else iterator_state(self._iterator)
            why = f"it has {len(state):,} bytes" if len(state) > _MOST_STATE_BYTES else why
        except (tf.errors.OpError, MemoryError) as error:
            why = reason(error).rstrip(" .")
        self._warn_of_no_position(why)
        if not self._has_seeds:
            logging.warning_once(_OTHER_SAMPLES, "without a seed")
        return b"" if why else self._sampled + state

    @property
    def _why_written(self) -> str:
        return "".join(f"the dataset writes {path} as it is read" for path in self.part.stream.files_written[:1])

    @functools.cached_property
    def _why_replayed(self) -> str:
        """Why the stream's position can't be saved; "" if it can, as far as the pipeline shows.

        It is decided once, from the pipeline's functions: saving fails only while an iterator calls one of them.
        """
        if self._distributes:
            return ""
        examples = self.part.stream.examples(self.order.seed, tf.constant(0, tf.int64))
        return self._why_written or pipelines.served(examples) or pipelines.stateful(examples)

    def _warn_of_no_position(self, why: str) -> None:
        """Warns, once and if there is a reason, that checkpoints can't keep the position."""
        if self._has_no_state or not why:
            return
        self._has_no_state = True
        logging.warning(
            "the input's position can't be kept in checkpoints (%s): a run resumed within an epoch %s, and what the "
            "dataset samples at random with a state of its own (Keras's augmentation layers, tf.image.random_*) "
            "differs from then on, also at an epoch's end; sample with tf.image.stateless_random_* by a number of the "
            "example, or in the model",
            why,
            "reads the epoch again up to its step" if self._is_seeded else "is refused, as Dataset.shuffle has no seed",
        )

    def _open(self, step: int):
        """Returns an iterator whose next batch is the one of `step`."""
        epoch, index = self.order.position(step)
        in_epoch = index // self.order.batch_size
        saved, is_again = self.saved_states(step), self._was_opened
        self._was_opened, self._replay = True, None
        state = saved[self.part.process] if saved else b""
        if state.startswith(_SEEDS):
            if not state.startswith(self._sampled):
                logging.warning(_OTHER_SAMPLES, "with other seeds than those of the checkpoint")
            state = state.partition(b"\n")[2]
        replayed = ReplayPosition.from_bytes(state)
        if state and not replayed:
            try:
                # Whichever epoch the pipeline begins with: the state has the epoch's number, too.
                iterator = iter(self._batches(0))
                restore_iterator(iterator, state)
                return iterator
            except tf.errors.OpError as error:
                logging.warning(
                    "the input's position in the checkpoint does not fit the dataset (%s): the epoch is read again, up "
                    "to step %d",
                    reason(error),
                    step,
                )
        seeds = replayed.seeds if replayed and replayed.shuffles == self._shuffles else b""
        if saved is not None and (seeds or self._why_replayed):
            self._replay = Replay(iter(self._batches(0)) if self._shuffles else None, self._shuffles)
        # Workers that each read all of it have to get the same, which only its first batch shows.
        compares = self._replay is not None and self._reads_alike and not is_again
        gives_first_twice = compares if not in_epoch else self._replay is not None and not self.order.has_epochs
        iterator = iter(self._batches(epoch, self._replay, gives_first_twice))
        has_order = self._replay is not None and self._replay.begin(epoch, seeds)
        if saved is not None and (index or is_again) and not has_order:
            self._check_order(step, replayed, is_first=not (epoch or is_again or state))
        if compares and not in_epoch:
            self.run_with_timeout(functools.partial(next, iterator), lambda: None)
            self._check_workers(epoch)
        if in_epoch:
            # This may take as long as the epoch has, so it is shown, and the watchdog is told.
            with self._watch("reading the epoch again, batches", in_epoch) as done:
                for number in range(in_epoch + gives_first_twice):
                    self.run_with_timeout(functools.partial(next, iterator), lambda: None)
                    done(number + 1)
                    if number == 0 and compares:
                        self._check_workers(epoch)
                    if number == 0 and self._replay and self._begins_otherwise(step, replayed) and gives_first_twice:
                        break  # the steps go on with what comes next, this batch first
        return iterator

    @property
    def _reads_alike(self) -> bool:
        """Whether several processes each read the whole stream."""
        return self.processes is not None and self.processes.num_hosts > 1 and not self.part.by_file

    def _check_workers(self, epoch: int) -> None:
        """Raises `UsageError`, in all processes, if they have read different first batches of an epoch."""
        assert self._replay is not None
        components, spec = self._replay.first_batch(epoch), self.part.stream.element_spec
        num_features = len(tf.nest.flatten(fields(spec).features))
        # Another CPU may round features otherwise.
        is_exact = [number >= num_features or x.dtype.kind != "f" for number, x in enumerate(tf.nest.flatten(spec))]
        firsts = self.processes.exchange([one for one, exact in zip(components, is_exact, strict=False) if exact])
        names = self.processes.host_names
        if others := [name for name, first in zip(names, firsts, strict=True) if not alike(first, firsts[0])]:
            with contextlib.suppress(tf.errors.OpError):  # no worker leaves while another still waits for its answer
                self.processes.exchange()
            raise UsageError(_OTHER_WORKERS.format(" and ".join(others), names[0]))

    def _begins_otherwise(self, step: int, replayed: ReplayPosition | None) -> bool:
        """Returns whether what is read again does not begin as it did, in any process; warns of it.

        Raises:
          UsageError: the stream shuffles, so the order is another.
        """
        epoch, _ = self.order.position(step)
        is_other = self._replay is not None and replayed is not None and not self._replay.agrees(epoch, replayed)
        if not any(self.processes.exchange(is_other)):
            return False
        why = "its first batch is another, since the dataset samples at random or has changed"
        if is_other and self._shuffles:
            raise _other_order(step, why, "give a Source")
        logging.warning(_OTHER_EPOCH if self.order.has_epochs else _OTHER_STREAM, step)
        return True

    def _check_order(self, step: int, replayed: ReplayPosition | None, is_first: bool) -> None:
        """Raises `UsageError` if a stream shuffles, whose seeds at the beginning of a step's epoch are unknown.

        `is_first`: whether the epoch is the run's first, and no other was read in this process.
        """
        stream = self.part.stream
        if not self._shuffles and not (replayed and replayed.shuffles):
            return
        was_counted = stream.length == tf.data.UNKNOWN_CARDINALITY  # which reads it
        if replayed is None and is_first and self._is_seeded and not was_counted:
            return
        why = "no position is kept there, and its Dataset.shuffle has another order at each reading"
        fix = "leave that shuffle out, since the run shuffles (shuffle_buffer), or give a Source"
        if not self._is_seeded:
            why, fix = "its Dataset.shuffle has no seed", f"give it one, or {fix}"
        elif replayed and replayed.shuffles != self._shuffles:
            why = "its Dataset.shuffle has changed"
        raise _other_order(step, why, fix)

    def _batches(self, first_epoch: int, replay: Replay | None = None, gives_first_twice: bool = False):
        """Returns endless epochs: an iterator for each epoch would be freed at its end (see `untuned`)."""
        is_ahead = self._is_constant or not self.order.has_epochs
        if not self.order.has_epochs:
            passes = tf.data.Dataset.range(_MOST_PASSES).flat_map(unconverted(self._shuffled))
            epochs = self._batched(passes, tf.constant(0, tf.int64), replay)
        else:
            epochs = _counted_from(first_epoch).flat_map(unconverted(functools.partial(self._epoch, replay)))
        epochs = _first_twice(epochs) if gives_first_twice else epochs
        options = tf.data.Options()
        if not self.part.by_file and self._strategy.num_replicas_in_sync > 1:  # those that read the same must agree
            options.deterministic = True
        epochs = self._with_shuffle_states(epochs)
        batches = untuned((epochs.prefetch(_AHEAD) if is_ahead else epochs).with_options(options))
        remove_generated_files()
        if not self._distributes:
            return batches
        # TensorFlow does not notice it. For a dataset that may end, replicas ask each other at each step.
        endless = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
        return self._strategy.experimental_distribute_dataset(batches.apply(endless))

    def _with_shuffle_states(self, epochs: tf.data.Dataset) -> tf.data.Dataset:
        """Adds the stream's shuffles to the epochs, so that an iterator's state has their seeds.

        An iterator's state has those only of a shuffle that it is reading: not before the first batch, nor once the
        epoch's examples are all in buffers. So an iterator of each is kept open, from which nothing is read.
        """
        if not self.part.stream.shuffles or self._distributes:
            return epochs
        specs = epochs.element_spec

        def nothing(*_) -> Any:
            return tf.nest.map_structure(lambda spec: tf.zeros([size or 0 for size in spec.shape], spec.dtype), specs)

        unread = [shuffle.map(unconverted(nothing)) for shuffle in self.part.stream.shuffles]
        return tf.data.Dataset.choose_from_datasets(
            [epochs, *unread], tf.data.Dataset.from_tensors(tf.constant(0, tf.int64)).repeat()
        )

    def _epoch(self, replay: Replay | None, epoch: tf.Tensor) -> tf.data.Dataset:
        order = self.order
        if replay:
            epoch = replay.note_epoch(epoch)
        batches = self._batched(self._shuffled(epoch), epoch, replay)
        if self.part.by_file:  # padded with empty batches to the length of the longest part
            steps = order.steps_per_epoch
            nothing = tf.data.Dataset.range(steps).map(
                lambda _: tf.nest.map_structure(_empty_batch, self.part.stream.element_spec)
            )
            batches = batches.concatenate(nothing).take(steps)
        return batches if self._is_constant else batches.prefetch(_AHEAD)

    @functools.cached_property
    def _variables(self) -> str:
        return ", ".join(pipelines.variables(self.part.stream.examples(self.order.seed, tf.constant(0, tf.int64))))

    @functools.cached_property
    def _is_constant(self) -> bool:
        """Whether epochs may be read ahead over the end of the one before: no hook changes what they read."""
        stream = self.part.stream
        examples = stream.examples(self.order.seed, tf.constant(0, tf.int64))
        # The files of an input are its data, which may not change while a run reads them.
        return pipelines.is_constant(examples, may_read_files=bool(stream.files()))

    def _batched(self, examples: tf.data.Dataset, epoch: tf.Tensor, replay: Replay | None) -> tf.data.Dataset:
        order, stream = self.order, self.part.stream
        if stream.buckets is not None:
            batches = in_windows(examples, stream.buckets, order.batch_size, order.seed, epoch)
        else:
            # Where all batches have one size, it is known as a step is traced.
            is_whole = order.has_epochs and not (order.remainder or self.part.by_file)
            batches = batched(stream, examples, order.local_batch_size, order.drop_remainder or is_whole)
            shards = self._num_shards * len(self.part.counts)
            if stream.by_batch and shards > 1:
                batches = map_elements(batches, functools.partial(_check_even, shards, self._takes_few))
        return replay.note_first(epoch, batches) if replay else batches

    def _shuffled(self, epoch: tf.Tensor) -> tf.data.Dataset:
        seed = self.order.seed
        dataset = self._examples(seed, epoch)
        if self.order.has_epochs:
            # A file that shrank or grew since it was counted would shift all later epochs unnoticed.
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(self.part.counts[self.part.process]))
        return dataset if seed is None else shuffled(dataset, self._shuffle_buffer, epoch_seed(seed, epoch))


def _other_order(step: int, why: str, fix: str) -> UsageError:
    return UsageError(
        f"the training data can't be read again from step {step}: {why}; {fix}, and begin in another run_dir, with "
        "init_from to keep the weights"
    )


@functools.cache  # TensorFlow traces a function for it
def _counted_from(first: int) -> tf.data.Dataset:
    return tf.data.Dataset.counter(first)


def _first_twice(batches: tf.data.Dataset) -> tf.data.Dataset:
    """Returns batches after another reading of the first, without another reading of what they come from."""

    def repeated(number: tf.Tensor, batch: Any) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors(batch).repeat(tf.where(number == 0, tf.constant(2, tf.int64), 1))

    return batches.enumerate().flat_map(unconverted(repeated))


def _check_even(shards: int, takes_few: bool, batch: Any) -> Any:
    """Makes reading fail where a batch can't be divided among replicas."""
    sizes = tf.stack([tf.shape(x)[0] for x in tf.nest.flatten(batch)])
    divides = tf.reduce_all(sizes == sizes[0]) | tf.reduce_all(sizes % shards == 0)
    is_enough = tf.reduce_all(sizes >= (0 if takes_few else shards))
    with tf.control_dependencies([tf.debugging.Assert(divides & is_enough, [_FEW.format(shards), sizes])]):
        return tf.nest.map_structure(tf.identity, batch)


def _empty_batch(spec: Spec) -> tf.Tensor:
    return tf.convert_to_tensor(zeros(spec)[:0], tf.as_dtype(spec.dtype))
