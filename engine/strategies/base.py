"""The contract of a strategy: `Strategy`, and the `Program` that it compiles.

The outer loop, the hooks and the launcher use only these names. A strategy of your own is a subclass of `Strategy`,
registered by `engine.strategies.register`. `Processes` is for several processes, with defaults for one.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import tensorflow as tf

from ..data.feeds import combined
from ..data.feeds.combined import CombinedFeed
from ..data.feeds.external_feed import ExternalFeed
from ..data.feeds.feed import Feed
from ..data.source import WithoutBadRecords
from ..errors import UsageError, free_frames
from ..machine.threads import TRACING
from ..mesh.layout import Mesh
from ..metrics.predictions import in_order
from ..metrics.sums import Sums, SumSpec
from ..state import TrainState
from ..trainer import Trainer, computes_metrics
from .loop_result import LoopResult
from .program import Program


class Stop(NamedTuple):
    """Why a run stops, which worker requested it ("" for a single process), and the exit code that this calls for."""

    reason: str
    worker: str = ""
    exit_code: int = 0

    def __str__(self) -> str:
        return f"{self.reason} at {self.worker}" if self.worker else self.reason


class Interrupted(Exception):
    """An evaluation ends between two calls, in all processes, since the run is to end; `args`: this one's reason."""


class Processes:
    """The communication of the training processes; this base class is for a single one.

    Attributes:
      host_names: names of the processes, for messages, in order.
      host: this process's index.
    """

    host_names: Sequence[str] = ("this process",)
    host: int = 0

    @property
    def worker_names(self) -> Sequence[str]:
        """Names, for messages, of the processes that compute: the training processes, or others that work for them."""
        return self.host_names

    @property
    def num_hosts(self) -> int:
        """The number of training processes."""
        return len(self.host_names)

    @property
    def is_chief(self) -> bool:
        """Whether this training process writes files and reports."""
        return self.host == 0

    def exchange(self, value: Any = None) -> list:
        """Returns every process's value, plain JSON or NumPy scalars, in order; every training process must call it."""
        return [value]

    def bad_records(self, source: WithoutBadRecords) -> set[int]:
        """Returns the records of a source that any process has skipped; every training process must call it."""
        return {record for records in self.exchange([*source.bad]) for record in records}

    def exchange_bytes(self, value: bytes) -> list[bytes]:
        """Exchanges bytes, like `exchange`; also megabytes."""
        return [value]

    def silent(self, seconds: float) -> list[str]:
        """Returns the processes that have been silent for so many seconds, since they are stopped or unreachable."""
        return []

    def has_lost_first(self, error: BaseException) -> bool:
        """Returns whether an error reports that the first process is lost; the others are informed."""
        return False

    def watch(self) -> contextlib.AbstractContextManager:
        """Returns a context for all collective work; it ends a process whose peers will never answer.

        Raises:
          LostPeerError: another process is lost.
        """
        return contextlib.nullcontext()

    def agree_to_stop(self, stop: Stop | str | None, together: bool = False) -> Stop | None:
        """Returns why the run ends, the same in all processes at the same step; None to continue.

        A reason, once agreed, stays.

        Args:
          stop: why this process wants the run to end, or None.
          together: whether all processes make this call at this step. Reasons are then exchanged at once; otherwise
            with the next call of the inner loop.
        """
        return stop if stop is None or isinstance(stop, Stop) else Stop(stop)

    def agree_on_requests(self, requests: int, mask: int) -> int:
        """Returns the requests of all processes, a bit each, the same in all at the same step; each request once.

        Call it after each call of the inner loop, except while agreed requests are pending.

        Args:
          requests: requests of this process, a bit each.
          mask: the bits of all requests that the caller may make; others' stay.
        """
        return requests


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The step that computes each example's outputs: `compute` maps features to a nest of tensors [examples, ...]."""

    compute: Callable[[Any], Any]


# The trainer's own training or evaluation step, a prediction, or replica code: (batch, step, collect_norm) ->
# metrics; `step` is a scalar int64, `collect_norm` a scalar bool, true at steps at which something is due.
Step = Literal["train", "eval"] | Prediction | Callable[[Any, tf.Tensor, tf.Tensor], dict]


class Strategy(Processes, abc.ABC):
    """Computes the steps of a run.

    A run calls `build`, `feed` and `bind` once, then `run` and `evaluate` alternately, and `close_feeds` at its end.

    Attributes:
      distribution: the `tf.distribute.Strategy` of variables and replica code.
      num_replicas: number of synchronous replicas.
      mesh: layout of the replicas; a global batch is divided along its data axis.
      parallel_micro_batches: number of micro-batches of a replica's batch that are computed in parallel, a thread each.
      num_servers: number of parameter servers that hold the variables.
      updates_here: whether the devices that compute gradients also apply them.
      predicts: whether its programs can return outputs of each example, for `compute_metrics` and predictions.
      trains_in_place: whether it can train variables created outside its scope, as one device can.
      computing_tasks: host:port of the tasks that compute for this process.
      sync_period_steps: replicas are synchronized at multiples of this; 1 if they always are.
      state: training state that the programs use, once bound.
      evaluations: the programs of its evaluation data: of one set by "", of several by name.

    Example:
      >>> from crankshaft.engine.strategies.replicated import Replicated  # a Strategy with feed, program and run
      >>> class OnCpu(Replicated):
      ...     def __init__(self, options):
      ...         super().__init__("on_cpu", tf.distribute.OneDeviceStrategy("CPU:0"), options)
    """

    name: str
    distribution: tf.distribute.Strategy
    parallel_micro_batches: int = 1
    num_servers: int = 1
    updates_here: bool = True
    predicts: bool = False
    trains_in_place: bool = False
    computing_tasks: Sequence[str] = ()
    state: TrainState
    training: Any = None
    evaluations: Mapping[str, Any] = types.MappingProxyType({})
    mesh: Mesh = Mesh()
    _external: Mapping[Any, Program] = {}

    # The start of a run.

    def build(self, make: Callable[[], TrainState]) -> TrainState:
        """Calls `make`, which creates all variables, in their places."""
        with self.scope():
            return make()

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Enters the context for creating variables: that of `distribution` and of the mesh."""
        with self.distribution.scope(), self.mesh.scope():
            yield

    @abc.abstractmethod
    def feed(
        self, split: Any, global_batch_size: int, seed: int | None, saved_data: Mapping[str, Any] | None = None
    ) -> Feed:
        """Returns the feed (`engine.data.feeds.feed.Feed`) of a split of the data.

        Args:
          split: a `Source` or a `Stream`.
          global_batch_size: examples per step, across all replicas.
          seed: seed of each epoch's shuffle; None keeps the examples' own order.
          saved_data: the `metadata()` of the feed's part in the run's newest checkpoint, which need not be determined
            again. With "resumed" if the batches have changed, for `Order.resumed`. Passed only if it is not {}: a
            strategy whose feeds have no metadata need not accept it.
        """

    def eval_feed(self, split: Any, batch_size: int, saved_data: Mapping[str, Any] | None = None) -> Feed:
        """Returns the feed of evaluation data, in the examples' own order; see `feed`."""
        return self.feed(split, batch_size, None, **({"saved_data": saved_data} if saved_data else {}))

    def bind(
        self,
        state: TrainState,
        train_feed: Feed | None = None,
        eval_feed: Feed | Mapping[str, Feed] | None = None,
    ) -> None:
        """Sets the programs' state, and makes the programs of the run's own data. Compiles nothing yet.

        Args:
          eval_feed: the evaluation data's; of several sets by name.
        """
        if eval_feed and computes_metrics(state.trainer):
            self._check_predictions(type(state.trainer))
        self.state, self._external = state, {}
        state.input.set_feed(train_feed, self)
        self.training = train_feed and self.program("train", train_feed, bool(state.jit))
        eval_feeds = eval_feed if isinstance(eval_feed, Mapping) else {"": eval_feed} if eval_feed else {}
        self.evaluations = {name: self.program("eval", feed) for name, feed in eval_feeds.items()}

    @property
    def evaluation(self) -> Any:
        """The program of the run's own evaluation, of several sets the first's; None without evaluation data."""
        return next(iter(self.evaluations.values()), None)

    def traced_evaluations(self) -> list[SumSpec]:
        """Traces the run's own evaluations, and describes their metrics; of several sets as NAME/METRIC."""
        specs = ((name, spec) for name, program in self.evaluations.items() for spec in program.trace())
        return [spec._replace(name=f"{name}/{spec.name}" if name else spec.name) for name, spec in specs]

    def _check_predictions(self, trainer: type[Trainer]) -> None:
        if not self.predicts:
            raise UsageError(
                f"{trainer.__name__}.compute_metrics: strategy={self.name} returns no outputs of single examples; "
                "leave it out, or use another strategy"
            )
        if self.mesh.is_sharded and trainer.predictions is Trainer.predictions:
            raise UsageError(
                f"{trainer.__name__}.predictions: with a model sharded over a mesh, outputs may be shards; override it "
                "and return whole values of each example"
            )

    # Programs.

    @abc.abstractmethod
    def program(self, step: Step, feed: Feed, jit: bool = False) -> Program:
        """Returns the program of a step on a feed, for the bound state.

        Args:
          step: "train" or "eval", the trainer's own; a `Prediction`; or replica code, whose steps count as training's.
          jit: whether XLA compiles a whole call; see `no_jit_reason`.
        """

    @abc.abstractmethod
    def run(self, program: Any, limit: int) -> LoopResult:
        """Executes at most `limit` steps of a program, at least one, and advances its step accordingly.

        After `limit` steps the strategy is `in_step`, since something is due.
        """

    def external(
        self,
        step: Literal["train", "eval"] | Prediction,
        split: Any,
        batch_size: int,
        seed: int | None = None,
        steps: int | None = None,
        is_own: bool = False,
    ) -> Program:
        """Returns the program of a step on external data, for one call, after which it is closed.

        Calls of several threads may be in progress at once. It is compiled once for all.

        Args:
          step: step of the program: "train", "eval" for a new evaluation, or a new `Prediction`.
          split: a `Source` or a `Stream`.
          batch_size, seed, steps: see `ExternalFeed.reading`.
          is_own: whether each process gives examples of its own, as many as the others; then a `Prediction` returns
            outputs of these.
        """
        key = step, is_own
        with TRACING:
            if key not in self._external:
                external = self.program(step, combined.external_feed(split, self))
                self._external = {**self._external, key: external}
        program: Any = self._external[key]
        first_step, parts = self.state.step if program.state else 0, self.num_hosts if is_own else 1
        program = program.on(program.feed.reading(split, first_step, batch_size, seed, steps, parts))
        counts = {*self.exchange(program.feed.order.num_examples)} if is_own and steps is None else {}
        if len(counts) > 1:
            raise UsageError(
                f"workers give {', '.join(map(str, sorted(counts)))} examples of their own (auto_shard_policy=off); "
                "give as many on each, or steps, for which a dataset is read again"
            )
        program.returns_own_predictions = is_own and isinstance(step, Prediction)
        return program

    def external_feed(self) -> ExternalFeed:
        """Returns a feed of external data."""
        raise UsageError(f"strategy={self.name} works only on the run's own data")

    def combined(self, feeds: Mapping[str, Feed]) -> CombinedFeed:
        """Returns the feed of several inputs, by name, each with its own of this strategy."""
        return CombinedFeed(feeds, self.mesh.batch_shard(0, self.num_replicas)[1])

    @property
    def in_step(self) -> bool:
        """Whether all updates are applied, and all replicas have the same weights.

        Only then may weights be read, or the run end.
        """
        return True

    def stop_new_work(self) -> None:
        """Starts no further work, so that the strategy is in step, and the run can end, soon."""

    def resume_work(self) -> None:
        """Reverts `stop_new_work` and agreed stops: the run continues, in all processes."""

    def evaluate(
        self,
        program: Program | None = None,
        between: Callable[[int, int, Sums], int | None] = lambda *_: None,
        batches: int | None = None,
        keep: Callable[[Any], None] = lambda predictions: None,
        ends: Callable[[], str | None] = lambda: None,
    ) -> Sums:
        """Sums the metrics over an evaluation set, each example once. Every training process must call it.

        Each call of the compiled loop takes about half a second, so that a signal is answered soon.

        Args:
          program: program of an evaluation or a prediction; None is the run's own evaluation.
          between: called before each call of the compiled loop, and after the last, with the numbers of batches done
            and in all, and the sums so far; returns the most batches of the next call, or None for all.
          batches: how many of the first batches to evaluate; None is all.
          keep: receives predictions, if the program makes any, in the examples' order, in every process, several times:
            a nest of arrays [n, ...] of the next n examples.
          ends: returns why this process wants to end the run, or None. It is called before each call of the loop.

        Raises:
          Interrupted: a process has a reason to end the run.
        """
        program = program or self.evaluation
        # Evaluations follow each other like epochs, so the feed continues without being reopened.
        epoch = program.feed.order.steps_per_epoch
        sums, done, total = Sums(), 0, epoch if batches is None else min(batches, epoch)
        if total and program.step % epoch:  # the previous one was of some batches, or an error interrupted it
            program.restart()
        while done < total:
            # Processes exchange the predictions of several calls at once, after the same number of batches on each.
            collected_at, pieces = int(min(total, done + program.steps_per_collection)), list[Sequence[Any]]()
            while done < collected_at:
                most = min(collected_at - done, between(done, total, sums) or total)
                result = self._run_briefly(program, most, ends())
                sums.add(result.sums)
                pieces += result.predictions
                done += result.steps
            if pieces:
                is_shared = self.num_hosts > 1 and not program.returns_own_predictions
                columns = in_order(pieces, self.exchange_bytes if is_shared else None)
                keep(tf.nest.pack_sequence_as(program.prediction_specs, columns))
        between(done, total, sums)
        if self.num_hosts > 1:
            sums.exchange_scores(self.exchange_bytes)
        return sums

    def _run_briefly(self, program: Any, most: int, reason: str | None) -> LoopResult:
        """Runs some steps of an evaluation, unless a process has a reason to end the run; waits for them."""
        pace, workers = program.evaluation_pace, len(self.worker_names) // self.num_hosts
        # The pace and whether to end are one number, since each exchange is a collective of its own.
        answers = self.exchange(2 * workers * pace.steps + bool(reason))
        if any(answer % 2 for answer in answers):
            raise Interrupted(reason)
        began = time.perf_counter()
        result = self.run(program, min(most, answers[0] // 2))  # the chief's clock sets the pace
        result.sums.read()
        if not result.compiles:  # its time says nothing of the next call's
            pace.fit(result.steps / workers, time.perf_counter() - began)
        return result

    def close_feeds(self) -> None:
        """Frees the feeds' read-ahead; running a program again reopens its feed."""
        for program in filter(None, (self.training, *self.evaluations.values())):
            program.close()

    # Descriptions.

    @property
    def num_replicas(self) -> int:
        return self.distribution.num_replicas_in_sync

    @property
    def replica_names(self) -> list[str]:
        """The replicas' names after their numbers, for messages."""
        return list(self.distribution.extended.worker_devices)

    @property
    def computes_on(self) -> tuple[str, int]:
        """A device that computes gradients, and how many such devices share the work."""
        devices = self.distribution.extended.worker_devices
        physical = tf.config.get_visible_devices(tf.DeviceSpec.from_string(devices[0]).device_type)
        return devices[0], min(len(devices), len(physical)) * self.num_hosts

    @property
    def sync_period_steps(self) -> int:
        return 1

    @property
    def no_jit_reason(self) -> str | None:
        """Why the training loop cannot be one XLA program, or None if it can."""
        return f"strategy={self.name} does not define how its steps are compiled"

    def describe(self) -> dict:
        """Returns the name, replicas, devices and hosts, for a run's first line and its result."""
        return {
            "name": self.name,
            "replicas": self.num_replicas,
            **({"mesh": self.mesh.shape} if self.mesh.is_sharded else {}),
            "devices": list(self.distribution.extended.worker_devices),
            "hosts": self.num_hosts,
        }

    def summary_lines(self) -> list[str]:
        """Lines at a run's start about the strategy's decisions."""
        return []

    def figures(self) -> dict[str, float]:
        """Returns the strategy's own figures for TensorBoard, by name."""
        return {}

    def activity(self) -> dict[str, Any]:
        """Returns its tasks' activity since the last call of this, for the windows of the run's record."""
        return {}

    def report(self) -> dict:
        """Returns the strategy's part of a run's result, plain JSON."""
        return {}


@contextlib.contextmanager
def closing_feeds(strategy: Strategy) -> Iterator[None]:
    """Closes a strategy's feeds at the context's end, also after an error, whose traceback then has no iterator."""
    try:
        yield
    except BaseException as error:
        free_frames(error)
        raise
    finally:
        strategy.close_feeds()
