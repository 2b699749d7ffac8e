"""Several inputs per step: splits side by side, each with its own batch size, order and position.

The batch of a step is a dictionary, by name, of a batch of each. The first input defines epochs.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from ...errors import UsageError
from ...randomness import derived_seed
from ..form import Batches
from ..order import Order
from ..source import Split
from ..streamed import Endless, Stream, StreamPart
from .feed import CallInput, Feed, FeedStats


class Combined(Split):
    """Splits of which each step takes a batch.

    Args:
      members: the `Source` or `Stream` of each name, in order.
      batch_sizes: examples per step, by name, where other than the run's global batch size; not of the first.

    Raises:
      UsageError: a batch size is not a whole number above 0, or of another name.
    """

    def __init__(self, members: Mapping[str, Any], batch_sizes: Mapping[str, int]):
        # Each replica has examples of each input at every step, so workers do not divide a stream by files.
        self.members = {
            name: member.undivided if isinstance(member, Stream) and not isinstance(member, Endless) else member
            for name, member in members.items()
        }
        self.batch_sizes = dict(batch_sizes)
        self.element_spec = {name: member.element_spec for name, member in self.members.items()}
        self.by_index = all(member.by_index for member in self.members.values())
        first, *others = self.members
        for name, size in self.batch_sizes.items():
            if name == first:
                raise UsageError(
                    f"batch_sizes[{name!r}]={size}: the batch size of the first input is the run's, global_batch_size; "
                    "leave it out"
                )
            if name not in others:
                raise UsageError(f"batch_sizes[{name!r}]: the train data has no such input; use {', '.join(others)}")
            if type(size) is not int or size < 1:
                raise UsageError(f"batch_sizes[{name!r}]={size!r} is not a batch size; use a whole number of 1 or more")

    def mapped(self, function: Callable[[str, Any], Any]) -> Combined:
        """Returns the members' results of `function(name, member)`, side by side."""
        return Combined({name: function(name, member) for name, member in self.members.items()}, self.batch_sizes)

    def sizes(self, batch_size: int) -> dict[str, int]:
        """Returns the examples per step of each member; `batch_size` is the run's."""
        return {name: self.batch_sizes.get(name, batch_size) for name in self.members}

    def as_arrays(self) -> Any:
        arrays = {name: member.as_arrays() for name, member in self.members.items()}
        return None if any(nest is None for nest in arrays.values()) else arrays

    def identity(self) -> str:
        return json.dumps({name: member.identity() for name, member in self.members.items()})

    def files(self) -> Sequence[str]:
        return [path for member in self.members.values() for path in member.files()]


def first(split: Any) -> Any:
    """Returns the split that defines epochs: of several inputs the first."""
    return next(iter(split.members.values())) if isinstance(split, Combined) else split


def feed(split: Split, batch_size: int, seed: int | None, saved_data: Mapping[str, Any], strategy) -> Feed:
    """Returns a strategy's feed of a split; of several, their feeds side by side.

    Each member but the first has a shuffle's seed of its own, that depends on `seed`.
    """
    if not isinstance(split, Combined):
        return strategy.feed(split, batch_size, seed, **({"saved_data": saved_data} if saved_data else {}))
    saved_members = saved_data.get("members", {})
    feeds = {}
    for number, (name, size) in enumerate(split.sizes(batch_size).items()):
        saved_member = dict(saved_members.get(name, {}))
        # Only the first input's batch size is the run's, which may change as it is resumed.
        if "resumed" in saved_data and not number:
            saved_member["resumed"] = saved_data["resumed"]
        feeds[name] = feed(split.members[name], size, member_seed(seed, name, number), saved_member, strategy)
    combined = strategy.combined(feeds)
    for name, member in feeds.items():
        _check_sizes(name, member.order, combined.shards)
    return combined


def external_feed(split: Split, strategy) -> Any:
    """Returns a strategy's feed of external data of the form of a split."""
    if not isinstance(split, Combined):
        return strategy.external_feed()
    return strategy.combined({name: strategy.external_feed() for name in split.members})


def member_seed(seed: int | None, name: str, number: int) -> int | None:
    """Returns the seed of a member's shuffle, by its number: members of equal length are shuffled differently."""
    if seed is None or not number:
        return seed
    return derived_seed(seed, name)


@dataclasses.dataclass(frozen=True)
class CombinedPart(StreamPart):
    """The parts of several feeds, which all processes read alike; `stream` and `counts` are the first one's."""

    feeds: Mapping[str, Feed] = dataclasses.field(default_factory=dict)

    def metadata(self) -> dict[str, Any]:
        members: dict[str, dict[str, Any]] = {
            name: feed.part.metadata() if feed.part else {"by": "index", "counts": [feed.order.num_examples]}
            for name, feed in self.feeds.items()
        }
        for name in [*members][1:]:  # the first one's may change (`Order.resumed`)
            members[name]["batch_size"] = self.feeds[name].order.batch_size
        return {"by": "example", "counts": list(self.counts), "members": members}


class CombinedFeed(Feed):
    """Feeds side by side: each step takes a batch of each, by name.

    Args:
      feeds: the feed of each name; the first defines epochs.
      shards: number of shards into which each batch is divided, for replicas. Each needs an example of each input: the
        mean over one of them would otherwise count made-up ones.
    """

    batch_size = None

    def __init__(self, feeds: Mapping[str, Feed], shards: int):
        self.feeds, self.shards = dict(feeds), shards
        self._members = list(self.feeds.values())
        self.compilable = all(feed.compilable for feed in self._members)
        self.reads_in_loop = any(feed.reads_in_loop for feed in self._members)
        for number, member in enumerate(self._members):
            member.saved_states = functools.partial(self._member_position, number)

    @property
    def part(self) -> CombinedPart:  # type: ignore[override]
        first = self._members[0].part or StreamPart(None, (self.order.num_examples,))  # type: ignore[arg-type]
        return CombinedPart(first.stream, first.counts, feeds=self.feeds)

    @property
    def order(self) -> Order:  # type: ignore[override]
        return self._members[0].order

    @property
    def last_step(self) -> int | None:  # type: ignore[override]
        return self._members[0].last_step

    @last_step.setter
    def last_step(self, step: int | None) -> None:
        for member in self._members:
            member.last_step = step

    @property
    def pipeline(self) -> str:  # type: ignore[override]
        return json.dumps({name: feed.pipeline for name, feed in self.feeds.items()})

    def max_steps_per_call(self, step: int, limit: int) -> int:
        return min(feed.max_steps_per_call(step, limit) for feed in self._members)

    def call_input(self, step: int, limit: int) -> CallInput:
        steps = self.max_steps_per_call(step, limit)
        inputs = [feed.call_input(step, steps) for feed in self._members]
        for name, member in self.feeds.items():  # a stream that is not counted shows only now how many it has
            if member.order.replicates_batch(step, self.shards):
                raise UsageError(_too_few(name, member.order.batch_size_at(step), self.shards))
        (_, start, stop), *_ = inputs
        # Each member's operands, and where its steps begin in them, from the first member's on.
        operands = [(member.operands, tf.constant(member.start - start, tf.int32)) for member in inputs]
        return CallInput(operands, start, stop)

    def run_with_timeout(self, call: Callable[[], Any], progress: Callable[[], Any]) -> Any:
        for feed in self._members:
            call = functools.partial(feed.run_with_timeout, call, progress)
        return call()

    def position(self, step: int) -> bytes | None:
        states = [feed.position(step) if feed.part else b"" for feed in self._members]
        if None in states:
            return None
        return json.dumps([len(state) for state in states]).encode() + b"\n" + b"".join(states)  # type: ignore[arg-type]

    def _member_position(self, number: int, step: int) -> Sequence[bytes] | None:
        """Slices a member's position out of the checkpoint's, as `Feed.saved_states`."""
        if not (saved := self.saved_states(step)):
            return saved
        lengths, _, states = saved[0].partition(b"\n")
        sizes = json.loads(lengths)
        return [states[sum(sizes[:number]) : sum(sizes[: number + 1])]]

    def close(self) -> None:
        for feed in self._members:
            feed.close()

    def stats(self) -> FeedStats:
        stats = [feed.stats() for feed in self._members]
        read = [member.bytes_read for member in stats if member.bytes_read is not None]
        ahead = [member.steps_ahead for member in stats if member.steps_ahead is not None]
        return FeedStats(sum(read) if read else None, min(ahead, default=None))

    def traced(self, operands) -> Any:
        return [(feed.traced(inputs), shift) for feed, (inputs, shift) in zip(self._members, operands, strict=True)]

    def most_steps(self, operands) -> float:
        return min(feed.most_steps(inputs) for feed, (inputs, _) in zip(self._members, operands, strict=True))

    def batch_number(self, step: tf.Tensor) -> tf.Tensor:
        return self._members[0].batch_number(step)

    def next_operands(self, operands, offset: tf.Tensor) -> tuple:
        # An int32 is on the host, as the loop's counter is if replicas are on GPUs.
        return tuple(
            feed.next_operands(inputs, offset + tf.cast(shift, offset.dtype))
            for feed, (inputs, shift) in zip(self._members, operands, strict=True)
        )

    def batch(self, *operands) -> Batches:
        pairs = zip(self.feeds.items(), operands, strict=True)
        return Batches({name: feed.batch(*inputs) for (name, feed), inputs in pairs})

    def reading(
        self, split: Combined, first_step: int, batch_size: int, seed=None, steps=None, parts=1
    ) -> CombinedFeed:
        """Returns the feed of one call's data; see `ExternalFeed.reading`, of which all feeds are."""
        feeds: dict[str, Any] = {}
        for number, (name, size) in enumerate(split.sizes(batch_size).items()):
            first = [split.members[name], first_step, size, member_seed(seed, name, number)]
            feeds[name] = self.feeds[name].reading(*first, steps, parts)  # type: ignore[attr-defined]
            # Others are read for as many steps as the first.
            steps = feeds[name].order.steps_per_epoch if steps is None else steps
        return type(self)(feeds, self.shards)


def _check_sizes(name: str, order: Order, shards: int) -> None:
    """Raises `UsageError` unless all batches of an epoch have an example for each shard."""
    last = order.epoch_from(order.origin.step + 1) - 1
    if (least := min(map(order.batch_size_at, (order.origin.step, last)))) >= shards:
        return
    fitting = [size for size in range(order.batch_size, shards - 1, -1) if not 0 < order.num_examples % size < shards]
    fix = f"use a batch size of {fitting[0]}" if fitting else f"give at least {shards} examples"
    raise UsageError(f"{_too_few(name, least, shards)}; {fix}")


def _too_few(name: str, examples: int, shards: int) -> str:
    return f"train[{name!r}] has a batch of {examples} examples, and each of {shards} replicas needs one of each input"
