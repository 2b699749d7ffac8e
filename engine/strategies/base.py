"""The contract of a strategy: `Strategy`, and `Measured` for one that benchmark mode can measure. Host code.

The outer loop, the hooks and the launcher know these names only. A strategy of your own is a subclass of `Strategy`,
registered by `engine.strategies.register`. `Processes` is what several processes have; it has answers for one process.
"""

from __future__ import annotations

import abc
import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from ..data.feed import Feed
from ..data.lent_feed import LentFeed
from ..data.order import Order
from ..data.source import WithoutBadRecords
from ..internals.errors import UsageError, free_frames, setting
from ..mesh.mesh import Mesh
from ..metrics.sums import RowSpec, Sums
from ..state import TrainState

if TYPE_CHECKING:
    from .inner_loop import LoopResult


class Stop(NamedTuple):
    """Why a run is to stop, and which worker asked for it; "" if there is one process only."""

    reason: str
    worker: str = ""

    def __str__(self) -> str:
        return f"{self.reason} at {self.worker}" if self.worker else self.reason


class Processes:
    """What the processes that train together do with each other. This class is for one process.

    Attributes:
      host_names: what messages call them, in their order.
      host: which of them this process is.
    """

    host_names: Sequence[str] = ("this process",)
    host: int = 0

    @property
    def worker_names(self) -> Sequence[str]:
        """What messages call those that compute: these processes, or others that do so for them."""
        return self.host_names

    @property
    def num_hosts(self) -> int:
        """How many processes train together."""
        return len(self.host_names)

    @property
    def is_chief(self) -> bool:
        """Whether this process is the one, of those that train together, that writes files and speaks to people."""
        return self.host == 0

    def exchange(self, value: int) -> list[int]:
        """Returns every process's value, in their order; every process that trains has to call it."""
        return [value]

    def exchange_text(self, text: str) -> list[str]:
        """Exchanges texts, as `exchange` does numbers."""
        return [text]

    def bad_records(self, source: WithoutBadRecords) -> set[int]:
        """Returns the records of a source that any process has left out; every process that trains has to call it."""
        return {record for each in self.exchange_text(json.dumps([*source.bad])) for record in json.loads(each)}

    def exchange_bytes(self, value: bytes) -> list[bytes]:
        """Exchanges bytes, as `exchange` does numbers; of megabytes."""
        return [value]

    def silent(self, seconds: float) -> list[str]:
        """Returns which of them have not been heard of for so many seconds: those that are stopped, or cut off."""
        return []

    def watch(self) -> contextlib.AbstractContextManager:
        """Returns a context for all that processes do together; it ends a process whose peers will never answer.

        Raises:
          LostPeerError: another process is lost.
        """
        return contextlib.nullcontext()

    def agree_to_stop(self, reason: str | None, together: bool = False) -> Stop | None:
        """Returns why the run is to end, the same in all processes at the same step; None while it is to go on.

        Once given, a reason stays.

        Args:
          reason: why this process wants the run to end, or None.
          together: whether all processes make this very call at this step. Reasons are then exchanged at once;
            otherwise they travel with the next call of the inner loop.
        """
        return Stop(reason) if reason else None

    def agree_to_do(self, wishes: int) -> int:
        """Returns what any process wishes done, a bit each, the same in all at the same step; each wish once.

        To be called after each call of the inner loop, but while what was agreed on is not done.
        """
        return wishes


class Strategy(Processes, abc.ABC):
    """Where the steps of a run are computed, and on which data.

    A run calls `build`, `feed` and `bind` once, then `run_train_steps` and `evaluate` in turn, and at its end
    `close_feeds`.

    Attributes:
      name: what the user calls it.
      distribution: the `tf.distribute.Strategy` in which variables are made and replica code runs.
      num_replicas: replicas that train in step.
      mesh: how they are laid out; a global batch is divided along its data axis.
      batch_parts: parts of a replica's batch that are computed side by side, a thread each.
      num_servers: parameter servers that hold the variables.
      updates_here: whether the devices that compute gradients apply them too.
      computing_tasks: host:port of the tasks that compute for this process.
      sync_period_steps: replicas are in step at each multiple of so many steps; 1 where they always are.
      train_feed: what `bind` was given, and has to keep here.
      eval_feed: likewise; None where there is no evaluation data.
      without_jit: this process trains without XLA, whatever `TrainState.jit`, the run's own choice, says.
    """

    name: str
    distribution: tf.distribute.Strategy
    batch_parts: int = 1
    num_servers: int = 1
    updates_here: bool = True
    computing_tasks: Sequence[str] = ()
    train_feed: Feed | None = None
    eval_feed: Feed | None = None
    without_jit: bool = False
    mesh: Mesh = Mesh()

    # What a run begins with.

    def build(self, make: Callable[[], TrainState]) -> TrainState:
        """Calls `make`, which makes all variables, where they are to be."""
        with self.scope():
            return make()

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Enters the context in which variables are made: that of `distribution`, and of the mesh."""
        with self.distribution.scope(), self.mesh.scope():
            yield

    @abc.abstractmethod
    def feed(self, split, global_batch_size: int, seed: int | None, known: Mapping[str, Any] | None = None) -> Feed:
        """Makes the feed (`engine.data.feed.Feed`) for a split of the data.

        Args:
          split: a `Source` or a `Stream`.
          global_batch_size: examples a step, over all replicas.
          seed: shuffles each epoch again; None keeps the examples' own order.
          known: what an earlier process of the run found of this data, its feed's `about()`; it need not look again.
            With "resumed" if the batch size has changed, for `Order.after`. Is given where that is not {}: a strategy
            without feeds that say something need not take it.
        """

    @abc.abstractmethod
    def bind(self, state: TrainState, train_feed: Feed | None = None, eval_feed: Feed | None = None) -> None:
        """Sets what `run_train_steps` and `evaluate` work on. Nothing is compiled before their first call."""

    # What a program hands to its run.

    def lent_feed(self) -> LentFeed:
        """Makes the feed of data that a program hands to its run, for `lent`."""
        raise UsageError(f"{setting('strategy', self.name)} works on the run's own data alone")

    def lent(self, feed: LentFeed, trains: bool) -> contextlib.AbstractContextManager[None]:
        """Makes `run_train_steps`, or else `evaluate`, use another feed within, by a loop that is compiled once."""
        raise UsageError(f"{setting('strategy', self.name)} works on the run's own data alone")

    # What the outer loop calls.

    @property
    def train_order(self) -> Order:
        """Sizes of the bound training data: batch, epoch."""
        return self.train_feed.order

    @abc.abstractmethod
    def run_train_steps(self, limit: int) -> LoopResult:
        """Trains for at most `limit` steps, and at least one, and advances the state's step by as many.

        After `limit` steps all is `in_step`, since something is due.
        """

    @property
    def in_step(self) -> bool:
        """Whether all updates are applied, and all replicas hold the same weights.

        Only then may anybody read them, or end the run.
        """
        return True

    def wind_up(self) -> None:
        """Starts no further work, so that all is in step, and the run can end, as soon as possible."""

    def go_on(self) -> None:
        """Undoes `wind_up`, and forgets why the run was to stop: it goes on, in all processes alike."""

    @abc.abstractmethod
    def evaluate(self) -> Sums:
        """Sums the metrics over the whole evaluation set, each example once."""

    def trace_evaluation(self) -> Sequence[RowSpec]:
        """Traces a step of the evaluation, if it can be had before, and describes its rows of metrics."""
        return ()

    def on_parts(
        self, compute: Callable[[Any], Any], batch, batch_number: tf.Tensor, is_shared: bool = False
    ) -> tuple[tf.Tensor, Any]:
        """Runs replica code on a batch that each process has whole, each replica on its part. TensorFlow code.

        Args:
          compute: makes outputs of a batch of any size.
          batch: nest of tensors whose first axis is examples.
          batch_number: scalar int64, by which the code draws random numbers.
          is_shared: whether the batch has fewer examples than there are replicas: each then computes all of it.

        Returns:
          Which of the examples this process has computed, int32 [n], and their outputs, in that order.
        """
        return tf.range(tf.shape(tf.nest.flatten(batch)[0])[0]), compute(batch)

    def close_feeds(self) -> None:
        """Frees what the bound feeds have read ahead; training or evaluating again opens them again."""
        for feed in (self.train_feed, self.eval_feed):
            if feed is not None:
                feed.close()

    # What it says of itself.

    @property
    def num_replicas(self) -> int:
        return self.distribution.num_replicas_in_sync

    @property
    def replica_names(self) -> list[str]:
        """What messages call each replica, after its number."""
        return list(self.distribution.extended.worker_devices)

    @property
    def computes_on(self) -> tuple[str, int]:
        """A device that computes gradients, and how many like it share the work."""
        own = self.distribution.extended.worker_devices
        there = tf.config.get_visible_devices(tf.DeviceSpec.from_string(own[0]).device_type)
        return own[0], min(len(own), len(there)) * self.num_hosts

    @property
    def sync_period_steps(self) -> int:
        return 1

    @property
    def why_no_jit(self) -> str | None:
        """Why the training loop cannot be one XLA program, or None if it can."""
        return f"{setting('strategy', self.name)} does not say how its steps are compiled"

    def describe(self) -> dict:
        """Returns name, replicas, devices and hosts, for a run's first line and its result."""
        return {
            "name": self.name,
            "replicas": self.num_replicas,
            **({"mesh": self.mesh.shape} if self.mesh.is_cut else {}),
            "devices": list(self.distribution.extended.worker_devices),
            "hosts": self.num_hosts,
        }

    def about(self) -> list[str]:
        """Lines that a run begins with, of what the strategy has decided."""
        return []

    def figures(self) -> dict[str, float]:
        """Returns the strategy's own figures for TensorBoard, by name."""
        return {}

    def activity(self) -> dict[str, Any]:
        """Returns what its tasks did since this was called last, for the run's record, as its windows have it."""
        return {}

    def report(self) -> dict:
        """Returns what a run's result says of the strategy: plain JSON."""
        return {}


@contextlib.contextmanager
def closing_feeds(strategy: Strategy) -> Iterator[None]:
    """Closes a strategy's feeds as the context ends; after an error too, whose traceback then holds no iterator."""
    try:
        yield
    except BaseException as error:
        free_frames(error)
        raise
    finally:
        strategy.close_feeds()


class Measured(Strategy):
    """A strategy whose steps benchmark mode can time: compiled with or without XLA, and taken apart.

    A loop is called with (step, limit) and returns a `LoopResult`.
    """

    _train_loop: Any = None

    @abc.abstractmethod
    def train_loop(self, jit: bool) -> Any:
        """Makes a training loop over the bound feed, as `run_train_steps` makes one for itself."""

    @abc.abstractmethod
    def loop(self, step: Callable, jit: bool = False) -> Any:
        """Makes a loop over the bound feed of any replica code, (batch, step, observed) -> metrics."""

    def use_loop(self, loop: Any) -> None:
        """Makes `run_train_steps` run a loop that `train_loop` or `loop` has made, until something else is bound."""
        self._train_loop = loop

    @abc.abstractmethod
    def repeated(self, arrays, batch_size: int) -> Feed:
        """Makes a feed that gives each step the same nest of arrays, on each replica; `batch_size` examples in all."""

    @abc.abstractmethod
    def trained_batch(self) -> Feed | None:
        """Makes a feed that gives each step the batch that was trained on last; None where no batch is kept."""

    @abc.abstractmethod
    def repeated_batch(self) -> Feed:
        """Makes a feed that gives each step one batch of the bound data, of full size."""
