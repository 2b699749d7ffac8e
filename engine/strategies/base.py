"""The contract of a strategy: `Strategy`, and `Program`, what it compiles. Host code.

The outer loop, the hooks and the launcher know these names only. A strategy of your own is a subclass of `Strategy`,
registered by `engine.strategies.register`. `Processes` is what several processes have; it has answers for one process.
"""

from __future__ import annotations

import abc
import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import tensorflow as tf

from ..data.external_feed import ExternalFeed
from ..data.feed import Feed
from ..data.source import WithoutBadRecords
from ..errors import UsageError, free_frames, setting
from ..mesh.mesh import Mesh
from ..metrics.sums import LoopSums, RowSpec, Sums
from ..state import TrainState


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


class LoopResult(NamedTuple):
    """The result of one call: its metrics (unread), its number of steps, the seconds that they waited for input.

    And, if there are several workers, what each of them reported (`engine.strategies.workers.WorkerRows`), and whether
    a program was compiled for it.
    """

    sums: LoopSums
    steps: int
    input_seconds: float
    workers: Any = None
    compiles: bool = False


# The trainer's own step of training or of evaluation, or replica code: (batch, step, observed) -> metrics, where `step`
# is a scalar int64, and `observed` a scalar bool, true at a step at which something is due.
Step = Literal["train", "eval"] | Callable[[Any, tf.Tensor, tf.Tensor], dict]


class Program:
    """A compiled step on a feed: `Strategy.program` makes it, `Strategy.run` executes it.

    Args:
      feed: where steps get their batches.
      state: what steps change, whose step they advance; None of an evaluation, which counts its own.

    Attributes:
      step: the next one.
      jit: whether XLA compiles a whole call.
    """

    jit = False

    def __init__(self, feed: Feed, state: TrainState | None = None):
        self.feed, self.state = feed, state
        self._done = 0

    @property
    def step(self) -> int:
        return self.state.step if self.state else self._done

    def restart(self) -> None:
        """Makes the next step of an evaluation its first."""
        self._done = 0

    def advance(self, steps: int) -> None:
        """Counts steps that no compiled call has counted."""
        if self.state:
            self.state.advance(steps)
        self._done += steps

    @contextlib.contextmanager
    def moving_to(self, step: int) -> Iterator[None]:
        """Moves on to a step by a compiled call within, which counts the steps of a state itself."""
        with self.state.moving_to(step) if self.state else contextlib.nullcontext():
            yield
        self._done = step

    def trace(self) -> Sequence[RowSpec]:
        """Traces its step, if it can be had before its first call, and describes its rows of metrics."""
        return ()

    def close(self) -> None:
        """Frees what the feed has read ahead; running the program again opens it again."""
        self.feed.close()


class Strategy(Processes, abc.ABC):
    """Where the steps of a run are computed.

    A run calls `build`, `feed` and `bind` once, then `run` and `evaluate` in turn, and at its end `close_feeds`.

    Attributes:
      name: what the user calls it.
      distribution: the `tf.distribute.Strategy` in which variables are made and replica code runs.
      num_replicas: replicas that train in step.
      mesh: how they are laid out; a global batch is divided along its data axis.
      parallel_micro_batches: of a replica's batch: how many are computed in parallel, a thread each.
      num_servers: parameter servers that hold the variables.
      updates_here: whether the devices that compute gradients apply them too.
      computing_tasks: host:port of the tasks that compute for this process.
      sync_period_steps: replicas are in step at each multiple of so many steps; 1 where they always are.
      state: what programs work on, once it is bound.
      training: the program of the run's own training data.
      evaluation: that of its evaluation data; None without any.
    """

    name: str
    distribution: tf.distribute.Strategy
    parallel_micro_batches: int = 1
    num_servers: int = 1
    updates_here: bool = True
    computing_tasks: Sequence[str] = ()
    state: TrainState
    training: Any = None
    evaluation: Any = None
    mesh: Mesh = Mesh()
    _external: Mapping[str, tuple[Program, ExternalFeed]] = {}

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
          known: what an earlier process of the run found of this data, its feed's `metadata()`; it need not look again.
            With "resumed" if the batch size has changed, for `Order.after`. Is given where that is not {}: a strategy
            without feeds that say something need not take it.
        """

    def bind(self, state: TrainState, train_feed: Feed | None = None, eval_feed: Feed | None = None) -> None:
        """Sets what programs work on, and makes those of the run's own data. Nothing is compiled before they run."""
        self.state, self._external = state, {}
        state.input.follow(train_feed, self)
        self.training = train_feed and self.program("train", train_feed, bool(state.jit))
        self.evaluation = eval_feed and self.program("eval", eval_feed)

    # What it compiles, and executes.

    @abc.abstractmethod
    def program(self, step: Step, feed: Feed, jit: bool = False) -> Program:
        """Makes the program of a step on a feed, for the state that is bound.

        Args:
          step: "train" and "eval" are the trainer's own; else replica code, whose steps count as training's.
          feed: of this strategy.
          jit: whether XLA compiles a whole call; see `no_jit_reason`.
        """

    @abc.abstractmethod
    def run(self, program: Any, limit: int) -> LoopResult:
        """Executes at most `limit` steps of a program, and at least one, and advances its step by as many.

        After `limit` steps all is `in_step`, since something is due.
        """

    def external(self, step: Literal["train", "eval"], split, *options) -> Program:
        """Returns the program of a step on data that a call brings. It is made once, and to be closed after the call.

        Args:
          step: of training, or of an evaluation, which begins.
          split: a `Source` or a `Stream`.
          *options: the batch size, the seed and the number of steps, see `ExternalFeed.hold`.
        """
        if step not in self._external:
            feed = self.external_feed()
            self._external = {**self._external, step: (self.program(step, feed), feed)}
        program, feed = self._external[step]
        program.restart()
        feed.set_data(split, program.step, *options)
        return program

    def external_feed(self) -> ExternalFeed:
        """Makes a feed of data that calls bring."""
        raise UsageError(f"{setting('strategy', self.name)} works on the run's own data alone")

    def repeated(self, arrays, batch_size: int) -> Feed:
        """Makes a feed that gives each step the same nest of arrays, on each replica; `batch_size` examples in all."""
        raise NotImplementedError(f"the strategy {self.name} has no feed that repeats a batch")

    def repeated_batch(self, feed: Feed) -> Feed:
        """Makes a feed that gives each step one batch of another: its last, or if it keeps none, its next epoch's."""
        raise NotImplementedError(f"the strategy {self.name} has no feed that repeats a batch")

    @property
    def in_step(self) -> bool:
        """Whether all updates are applied, and all replicas hold the same weights.

        Only then may anybody read them, or end the run.
        """
        return True

    def stop_new_work(self) -> None:
        """Starts no further work, so that all is in step, and the run can end, as soon as possible."""

    def resume_work(self) -> None:
        """Undoes `stop_new_work`, and forgets why the run was to stop: it goes on, in all processes alike."""

    def evaluate(self, program: Program | None = None) -> Sums:
        """Sums the metrics over a whole evaluation set, each example once.

        Args:
          program: of an evaluation; None is that of the run's own data.
        """
        program = program or self.evaluation
        # Evaluations follow one another as epochs do, so that the feed goes on and need not be opened again.
        sums, left = Sums(), program.feed.order.steps_per_epoch
        if left and program.step % left:  # an error has ended the one before in the middle
            program.restart()
        while left:
            result = self.run(program, left)
            sums.add(result.sums)
            left -= result.steps
        if self.num_hosts > 1:
            sums.exchange_scores(self.exchange_bytes)
        return sums

    def on_replicas(
        self, compute: Callable[[Any], Any], batch, batch_number: tf.Tensor, is_shared: bool = False
    ) -> tuple[tf.Tensor, Any]:
        """Runs replica code on a batch that each process has whole, each replica on its share. TensorFlow code.

        Args:
          compute: makes outputs of a batch of any size.
          batch: nest of tensors whose first axis is examples.
          batch_number: scalar int64, by which the code samples random numbers.
          is_shared: whether the batch has fewer examples than there are replicas: each then computes all of it.

        Returns:
          Which of the examples this process has computed, int32 [n], and their outputs, in that order.
        """
        return tf.range(tf.shape(tf.nest.flatten(batch)[0])[0]), compute(batch)

    def close_feeds(self) -> None:
        """Frees what the programs' feeds have read ahead; running a program again opens its feed again."""
        external = [program for program, _ in self._external.values()]
        for program in filter(None, (self.training, self.evaluation, *external)):
            program.close()

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
    def no_jit_reason(self) -> str | None:
        """Why the training loop cannot be one XLA program, or None if it can."""
        return f"{setting('strategy', self.name)} does not say how its steps are compiled"

    def describe(self) -> dict:
        """Returns name, replicas, devices and hosts, for a run's first line and its result."""
        return {
            "name": self.name,
            "replicas": self.num_replicas,
            **({"mesh": self.mesh.shape} if self.mesh.is_sharded else {}),
            "devices": list(self.distribution.extended.worker_devices),
            "hosts": self.num_hosts,
        }

    def summary_lines(self) -> list[str]:
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
