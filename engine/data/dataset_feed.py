"""The feed of a stream, such as a user's `tf.data.Dataset`: shuffled within a buffer, divided among workers.

Each process has one plain `tf.data` iterator over its share. Checkpoints keep its position (`engine.data.position`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf
from absl import logging

from ..internals.errors import reason
from ..internals.tensorflow import iterator_state, restore_iterator, shuffled
from ..mesh.mesh import Mesh
from ..randomness import epoch_seed
from .base import Feed, Run
from .feeds import untuned
from .order import Order, SharedOrder, replica_part
from .streamed import OfDataset, Stream
from .waiting import Patience

_COUNTED_AT_ONCE = 1024  # examples
_READING = "IteratorGetNext"  # the operation, which an error names
_MOST_STATE_BYTES = 1 << 30  # TensorFlow writes none of 2 GiB, and several checkpoints are kept

# (what is being done, how much there is to do or None) -> a context that yields a function of how much is done so far.
Watch = Callable[[str, int | None], contextlib.AbstractContextManager[Callable[[int], None]]]


def unwatched(what: str, total: int | None) -> contextlib.AbstractContextManager[Callable[[int], None]]:
    """Shows nothing: a `Watch` for runs that nobody looks at."""
    return contextlib.nullcontext(lambda done: None)


@dataclasses.dataclass(frozen=True)
class Share:
    """What one process reads of a stream.

    Attributes:
      stream: what it reads: its own files, or all files, taking its own rows of each batch.
      counts: examples in each process's stream; one number if all processes read all files.
      process: the index in `counts` of this process's stream.
    """

    stream: Stream
    counts: tuple[int, ...]
    process: int = 0

    @property
    def by_file(self) -> bool:
        """Whether each process reads files of its own."""
        return len(self.counts) > 1

    def order(self, batch_size: int, seed: int | None, drop_remainder: bool) -> Order:
        """Returns the order of all processes' examples."""
        if self.by_file:
            return SharedOrder(sum(self.counts), batch_size, 1, seed, shares=self.counts)
        return Order(sum(self.counts), batch_size, 1, seed, drop_remainder)

    def described(self) -> str:
        """Returns how the stream is divided, for people."""
        if self.by_file:
            return f"divided by files, {', '.join(f'{each:,}' for each in self.counts)}"
        return "divided by examples, each worker reads all and takes its rows of a batch"

    def about(self) -> dict[str, Any]:
        """Returns what a run's checkpoints keep of it: plain JSON, `divide` takes it as `known`."""
        return {"by": "file" if self.by_file else "example", "counts": list(self.counts)}


def divide(
    source: tf.data.Dataset | Stream,
    processes,
    policy: str = "AUTO",
    known: Mapping[str, Any] | None = None,
    watch: Watch = unwatched,
    timeout_seconds: float = 0.0,
) -> Share:
    """Divides a stream among the processes that train together: by files, or by the rows of each batch.

    By files each is read by one process. Otherwise every process reads all, in the same order, and takes its own rows,
    so batches are those of one process, however many there are.

    Args:
      source: of single examples.
      processes: `engine.strategies.base.Processes`.
      policy: AUTO: by files if there are as many as processes, FILE: by files, DATA, OFF: by rows.
      known: what an earlier process of the run has found, `Share.about`: it is not counted again.
      watch: shown what is counted.
      timeout_seconds: see `Patience`, of counting.

    Raises:
      ValueError: the stream never ends, or there are too few files for FILE.
      StuckStreamError: it hangs.
    """
    stream = source if isinstance(source, Stream) else OfDataset(source)
    known, workers = known or {}, processes.num_hosts
    if stream.length == tf.data.INFINITE_CARDINALITY:
        raise ValueError("the dataset never ends, so it has no epoch; cut it with dataset.take(examples in an epoch)")
    if workers > 1 and (policy == "FILE" or (policy == "AUTO" and known.get("by") != "example")):
        own = stream.of_files(workers, processes.host)
        if all(processes.exchange(int(own is not None))):
            if known.get("by") == "file" and len(known["counts"]) == workers:
                return Share(own, tuple(known["counts"]), processes.host)
            return Share(own, tuple(processes.exchange(count(own, watch))), processes.host)
        if policy == "FILE":
            raise ValueError(
                f"`auto_shard_policy`=file divides files among {workers} workers, and the dataset shows fewer; give "
                "more files, or `auto_shard_policy`=auto or data"
            )
    if stream.length == tf.data.UNKNOWN_CARDINALITY and known.get("by") == "example":
        return Share(stream, tuple(known["counts"]))
    return Share(stream, (count(stream, watch, timeout_seconds),))


def count(stream: Stream, watch: Watch = unwatched, timeout_seconds: float = 0.0) -> int:
    """Returns a stream's length; one that does not know it is read once from end to end. Arguments are `divide`'s."""
    if stream.length != tf.data.UNKNOWN_CARDINALITY:
        return stream.length
    ones = stream.examples(None, tf.constant(0, tf.int64)).map(lambda *_: tf.constant(1, tf.int64))
    batches = iter(untuned(ones.batch(_COUNTED_AT_ONCE).prefetch(2)))
    patience, found = Patience(stream.files(), timeout_seconds), 0
    with watch("counting examples", None) as done, _naming_files(stream):
        while (batch := patience.call(functools.partial(next, batches, None))) is not None:
            found += batch.shape[0]
            done(found)
    return found


class DatasetFeed(Feed):
    """A stream's epochs, each shuffled and batched.

    Batches come in the order of the steps. To begin at another step the feed restores a kept state of the iterator, or
    reads the step's epoch from its beginning.

    Args:
      strategy: the `tf.distribute.Strategy`.
      share: what this process reads.
      order: sizes and seed, `share.order`.
      shuffle_buffer: examples in the shuffle's buffer.
      watch: shown what is read again.
      mesh: how the strategy's replicas are laid out.
      timeout_seconds: see `Patience`.

    Attributes:
      kept: step -> the iterator's state at that step, as `state` found it, or b"".
    """

    reads_in_loop = True

    def __init__(
        self,
        strategy,
        share: Share,
        order: Order,
        *,
        shuffle_buffer=10_000,
        watch: Watch = unwatched,
        mesh: Mesh | None = None,
        timeout_seconds: float = 0.0,
    ):
        self.order = order
        self._mesh = mesh or Mesh()
        self.share = share
        self._patience = Patience(share.stream.files(), timeout_seconds)
        self.kept: Callable[[int], bytes] = lambda step: b""
        self._strategy = strategy
        self._shuffle_buffer = shuffle_buffer
        self._watch = watch
        self._iterator: Any = None
        self._next_step: int | None = None
        self._bytes_taken = 0
        self._never_kept = False
        # How many replicas' parts this process's batches have, and the number of the first of them.
        self._parts = self._mesh.part(0, strategy.num_replicas_in_sync)[1] // len(share.counts)
        self._first_part = share.process * self._parts

    def about(self) -> dict[str, Any]:
        return self.share.about()

    @property
    def bytes_read(self) -> int | None:
        """Bytes of the examples that steps have taken; None of text, whose length varies."""
        return None if self._example_bytes is None else self._bytes_taken

    @property
    def _example_bytes(self) -> int | None:
        parts = tf.nest.flatten(self.share.stream.element_spec)
        if any(part.dtype == tf.string for part in parts):
            return None
        return sum(part.dtype.size * part.shape.num_elements() for part in parts)

    @property
    def pipeline(self) -> str:
        """Identifies the pipeline that a kept state fits: TensorFlow would fill a smaller buffer past its end."""
        spec = tf.nest.map_structure(lambda part: f"{part.dtype.name} {part.shape}", self.share.stream.element_spec)
        order = self.order
        return json.dumps([self.share.about(), order.batch_size, order.seed, self._shuffle_buffer, spec], default=str)

    def reach(self, step: int, limit: int) -> int:
        # Replicas gather as many rows at each step of a call, as TensorFlow's collectives require.
        return int(min(limit, self.order.steps_alike(step)))

    def take(self, step: int, limit: int) -> Run:
        if step != self._next_step:
            self._iterator = self._opened(step)
        limit = self.reach(step, limit)
        self._next_step = step + limit
        examples = self.order.examples_before(step + limit) - self.order.examples_before(step)
        self._bytes_taken += (self._example_bytes or 0) * examples // len(self.share.counts)
        return Run((self._iterator,), 0, limit)

    def awaited(self, call: Callable[[], Any], moved: Callable[[], Any]) -> Any:
        with _naming_files(self.share.stream):
            return self._patience.call(call, moved)

    def look(self, step: int) -> Run:
        return Run((self._opened(step),), 0, 1)

    def most_steps(self, operands) -> float:
        return math.inf

    def next_operands(self, operands, offset: tf.Tensor):
        (iterator,) = operands
        return (next(iterator),)

    def batch(self, batch):
        if self._parts == 1:
            return batch
        part = self._mesh.data.rank - self._first_part
        with tf.device("CPU:0"):  # where the batch is: a GPU is sent its rows alone
            start, stop = replica_part(tf.shape(tf.nest.flatten(batch)[0])[0], part, self._parts)
            return tf.nest.map_structure(lambda x: x[start:stop], batch)

    def close(self) -> None:
        self._iterator = self._next_step = None

    def state(self, step: int) -> bytes | None:
        """Returns the iterator's state at this step; b"" if its state can't be kept, None if it is at another step."""
        if step != self._next_step:
            return None
        if self._never_kept:
            return b""
        try:
            found = iterator_state(self._iterator)
            why = f"it has {len(found):,} bytes" if len(found) > _MOST_STATE_BYTES else ""
        except (tf.errors.OpError, MemoryError) as error:
            why = reason(error).rstrip(" .")
        if why:
            self._never_kept = True
            logging.warning(
                "the input's place can't be kept in checkpoints (%s): a run that is resumed within an epoch reads the "
                "epoch again up to its step",
                why,
            )
            return b""
        return found

    def _opened(self, step: int):
        """Returns an iterator that gives the batch of `step` next."""
        epoch, in_epoch = divmod(step, self.order.steps_per_epoch)
        if state := self.kept(step):
            try:
                iterator = iter(self._batches(0))
                restore_iterator(iterator, state)
                return iterator
            except tf.errors.OpError as error:
                logging.warning(
                    "the input's place in the checkpoint does not fit the dataset (%s): the epoch is read again up to "
                    "step %d",
                    *(reason(error), step),
                )
        iterator = iter(self._batches(epoch))
        if in_epoch:
            self._pass(iterator, in_epoch)
        return iterator

    def _pass(self, iterator, steps: int) -> None:
        """Reads and discards the batches of so many steps."""
        with self._watch("reading the epoch again, batches", steps) as done:
            for number in range(steps):
                self.awaited(functools.partial(next, iterator), lambda: None)
                done(number + 1)

    def _batches(self, first_epoch: int):
        """Returns endless epochs: an iterator for each epoch would be freed at its end (see `untuned`)."""
        epochs = tf.data.Dataset.counter(first_epoch).flat_map(self._epoch)
        options = tf.data.Options()
        if not self.share.by_file and self._strategy.num_replicas_in_sync > 1:  # who reads the same has to find it
            options.deterministic = True
        return untuned(epochs.prefetch(4).with_options(options))

    def _epoch(self, epoch: tf.Tensor) -> tf.data.Dataset:
        order, examples = self.order, self._shuffled(epoch)
        if not isinstance(order, SharedOrder):
            return examples.batch(order.batch_size, drop_remainder=order.drop_remainder)
        # Filled up with empty batches to the length of the longest share.
        steps = order.steps_per_epoch
        batches = examples.batch(order.share_size)
        nothing = tf.data.Dataset.range(steps).map(
            lambda _: tf.nest.map_structure(_no_example, self.share.stream.element_spec)
        )
        return batches.concatenate(nothing).take(steps)

    def _shuffled(self, epoch: tf.Tensor) -> tf.data.Dataset:
        seed = self.order.seed
        dataset = self.share.stream.examples(seed, epoch)
        # What a file lost or gained since it was counted would go unnoticed, and shift all epochs after.
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(self.share.counts[self.share.process]))
        return dataset if seed is None else shuffled(dataset, self._shuffle_buffer, epoch_seed(seed, epoch))


class DistributedFeed(DatasetFeed):
    """A stream by `experimental_distribute_dataset`, whose iterators have no state: for TPUs, which it feeds."""

    def batch(self, batch):
        return batch

    def state(self, step: int) -> bytes:
        return b""

    def _batches(self, first_epoch: int):
        batches = super()._batches(first_epoch)
        # TensorFlow does not notice it. For a dataset that may end, replicas ask each other at each step whether it
        # has.
        batches = batches.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
        return self._strategy.experimental_distribute_dataset(batches)


@contextlib.contextmanager
def _naming_files(stream: Stream) -> Iterator[None]:
    """Raises what is wrong with a stream's files, where TensorFlow's error of reading them names none."""
    try:
        yield
    except tf.errors.OpError as error:
        if _READING in str(error) and (found := stream.fault()):
            raise found from None
        raise


def _no_example(spec: tf.TensorSpec) -> tf.Tensor:
    """Returns a batch without any example of this kind."""
    return tf.zeros([0, *(size or 0 for size in spec.shape)], spec.dtype)
