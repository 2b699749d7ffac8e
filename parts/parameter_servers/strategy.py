"""Parameter servers: variables on servers, workers that pull and push at their own pace. Coordinator code.

The interface is every strategy's, so the outer loop, the hooks and `Trainer` are the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from ...engine.checks import StepChecks
from ...engine.data.arrays import ArraySource
from ...engine.data.feeds.blocks import Devices
from ...engine.data.feeds.feed import Feed
from ...engine.data.lengths import source_order
from ...engine.data.source import Source, WithoutBadRecords
from ...engine.data.streamed import divide, unwatched
from ...engine.errors import CrankshaftError, LostPeerError, UsageError
from ...engine.internals.tensorflow import allow_compute_on_coordinator
from ...engine.mesh.layout import Mesh
from ...engine.metrics.sums import LoopSums, Sums, num_sums
from ...engine.reduction import Reduction
from ...engine.state import TrainState
from ...engine.step.runner import StepRunner
from ...engine.strategies.base import Interrupted, Prediction, Step, Strategy
from ...engine.strategies.loop_result import LoopResult, WorkerFigures
from ...engine.strategies.options import ClusterAddresses, StrategyOptions
from ...engine.strategies.pace import Pace
from ...engine.trainer import computes_metrics
from ..workers import hangs
from ..workers.peers import LastHeard
from . import server_probe, sources
from .coordinator import CompletedLease, Leases, explain_lost_server, lease_seconds, lease_steps, quiet_tensorflow
from .leases import LAGS, Lease, LeaseLoop, Pull, UpdateLoop
from .placement import Placement, variable_server
from .pulled import OnServers, check_added
from .worker_feeds import (
    CombinedOnWorkers,
    ExternalWorkersFeed,
    LeaseFeed,
    ReadByWorkersFeed,
    ResidentOnWorkers,
    SentFeed,
    Workers,
)

_CALL_SECONDS = 0.1  # shortest call of `run`
_WAIT_SECONDS = 1.0
_FIGURES = ("seconds", "input_seconds", "steps", "staleness")  # sums over a worker's completed leases of a call
_SENT = "the coordinator reads it, and sends each worker the examples of its steps"


class NoReduction(Reduction):
    """Sums nothing: a worker pushes the gradients of a whole batch."""


class _OneWorker(Mesh):
    def reduction(self, reduction: Reduction) -> Reduction:
        return NoReduction(reduction.reduce_dtype, reduction.bucket_bytes)


class ParameterServer(Strategy):
    """`tf.distribute.ParameterServerStrategy`, on the coordinator.

    One worker computes an update from a whole batch; batches are those of one device, in the order in which workers
    reach them. After `limit` steps of `run` nothing is in progress: hooks then find all updates applied.

    Args:
      options: options of a strategy, with `servers`.
    """

    name = "parameter_server"
    predicts = True
    num_replicas = 1  # that must be synchronized
    updates_here = False
    no_jit_reason = "XLA compiles no variable of another host"
    mesh = _OneWorker()

    def __init__(
        self,
        distribution: tf.distribute.ParameterServerStrategy,
        options: StrategyOptions,
    ):
        assert options.servers
        self.distribution, self.options, self._servers = distribution, options, options.servers
        self.cluster = cluster = options.servers.cluster
        self.placement = Placement(distribution, len(cluster.servers), options.servers.placement_rules)
        self._coordinator: Any = None
        self._leases: Leases | None = None
        self._updates = self._staleness = self._most_stale = 0  # so far: number; sum and maximum of staleness
        self._lags = np.zeros(LAGS, np.int64)  # staleness of the updates since the last `activity`
        self._answer_seconds: dict[int, float] = {}  # duration of each server's last answer
        servers = {f"ps {server}": address for server, address in enumerate(cluster.servers)}
        self._heard = LastHeard(servers | dict(zip(self.worker_names, cluster.workers, strict=True)))
        self._heard.note(servers)  # workers when they complete leases
        self._next_step = 0  # the first that is not scheduled
        self._lease_seconds = 0.0  # that workers wait: for this process's reading of a stream
        self._read_by_workers: list[Source] = []
        self._ending = False
        self._stream_lines: list[str] = []

    @property
    def num_servers(self) -> int:  # type: ignore[override]
        return len(self.cluster.servers)

    @property
    def replica_names(self) -> list[str]:
        return [f"worker {worker}" for worker in range(len(self.cluster.workers))]

    @property
    def worker_names(self) -> list[str]:
        return self.replica_names

    def describe(self) -> dict:
        return {
            "name": self.name,
            "replicas": len(self.cluster.workers),
            "devices": [f"/job:worker/task:{worker}" for worker in range(len(self.cluster.workers))],
            "hosts": len(self.cluster.workers),
            "servers": len(self.cluster.servers),
        }

    def summary_lines(self) -> list[str]:
        """Describes how streams reach workers, and the variables' placement, one line each."""
        return self._stream_lines + self.placement.lines()

    @property
    def staleness(self) -> dict[str, float]:
        """Staleness so far: how many updates of others came between the pull and push of each; {} before any."""
        if not self._updates:
            return {}
        return {"mean": self._staleness / self._updates, "max": float(self._most_stale)}

    @property
    def leases(self) -> Leases:
        """The leases, once `bind` has made them."""
        assert self._leases
        return self._leases

    def figures(self) -> dict[str, float]:
        """Returns figures for TensorBoard: the counts of leases, and the staleness of updates, so far."""
        leases = {f"leases/{name}": value for name, value in dataclasses.asdict(self.leases.ledger).items()}
        return leases | {f"staleness/{name}": value for name, value in self.staleness.items()}

    def activity(self) -> dict[str, Any]:
        lags, self._lags = self._lags, np.zeros(LAGS, np.int64)
        rows: list[dict[str, int]] = [{} for _ in self.cluster.servers]
        for table in self._inventory.tables.values():
            for shard in table.shards:
                there = rows[variable_server(shard)]
                there[table.name] = there.get(table.name, 0) + shard.shape[0]
        servers = [
            {"name": f"ps {server}", "seconds": self._answer_seconds.get(server), "bytes": size, "rows": rows[server]}
            for server, size in enumerate(self.placement.loads)
        ]
        return {"servers": servers, "staleness": {lag: int(count) for lag, count in enumerate(lags) if count}}

    def report(self) -> dict:
        """Returns its part of a run's result: leases, staleness in updates, bytes per server."""
        return {
            "leases": dataclasses.asdict(self.leases.ledger),
            "staleness": self.staleness,
            "server_bytes": list(self.placement.loads),
            "placement": [placed._asdict() for placed in self.placement.table],
        }

    def stop_new_work(self) -> None:
        self._ending = True

    def resume_work(self) -> None:
        self._ending = False

    def dismiss(self) -> None:
        """Notifies workers and servers that the run has succeeded, so that they end with this process, with code 0."""
        sources.dismiss(len(self.cluster.workers), len(self.cluster.servers))

    @contextlib.contextmanager
    def watch(self):
        try:
            # Two watchers: one for this process's own hang, one for servers, whose silence TensorFlow would wait
            # out.
            limit, addresses, end = self.options.step_timeout_seconds, self.cluster.servers, self.options.end_process
            with hangs.watched(2 * limit), server_probe.watched(addresses, limit, self._probe, end):
                yield
        except LostPeerError:
            raise
        except Exception as error:
            # The cause of a failed checkpoint: servers write their own files.
            for cause in filter(None, (error, error.__cause__)):
                if line := explain_lost_server(self.cluster, cause):
                    raise LostPeerError(line) from error
                if raised := sources.failure(cause):
                    raise raised from error
            raise

    def silent(self, seconds: float) -> list[str]:
        return self._heard.silent(seconds)

    def _probe(self, server: int) -> None:
        if self._coordinator is not None:
            before = time.monotonic()
            server_probe.probe("ps", server)
            self._answer_seconds[server] = time.monotonic() - before
            self._heard.note([f"ps {server}"])

    @property
    def coordinator(self) -> tf.distribute.coordinator.ClusterCoordinator:
        """TensorFlow's, which connects to workers and servers when first used."""
        if self._coordinator is None:
            self._coordinator = tf.distribute.coordinator.ClusterCoordinator(self.distribution)
            self.placement.build()
        return self._coordinator

    def build(self, make: Callable[[], TrainState]) -> TrainState:
        """Calls `make` with variables placed on servers, after a rehearsal that determines their sizes."""
        # Sizes decide where variables go, and a variable has one only once it is made: so all are made twice, at first
        # in a graph that is never run.
        self.placement.plan(make)
        with self.coordinator.strategy.scope(), tf.variable_creator_scope(self.placement.create):
            return make()

    def feed(self, split, global_batch_size: int, seed: int | None, saved_data=None) -> Feed:
        options = self.options.feed_options
        if not split.by_index:
            return self._stream_feed(split, global_batch_size, seed, saved_data)
        order, padding = source_order(
            split,
            global_batch_size,
            seed,
            options.shuffle_window,
            self,
            saved_data,
            watch=options.watch or unwatched,
        )
        self._stream_lines += padding.lines if padding else []
        if (arrays := split.as_arrays()) is not None:
            return ResidentOnWorkers(Workers(self.coordinator), ArraySource(arrays), order)
        # Leases are of any steps; a worker may be in the next epoch while another one ends this.
        if split.by_epoch:
            raise UsageError(
                f"strategy={self.name} has workers read leases that may be of two epochs at once, and the data has "
                "methods that are to be called between epochs (on_epoch_begin, on_epoch_end); leave them out, or give "
                "a tf.data.Dataset, which the coordinator reads"
            )
        # A source has one number, by which workers find theirs, however many feeds are made of it.
        numbers = [number for number, source in enumerate(self._read_by_workers) if source is split]
        if not numbers:
            numbers = [len(self._read_by_workers)]
            self._read_by_workers.append(split)
        return ReadByWorkersFeed(split, numbers[0], order, options.read_timeout_seconds, padding)

    def _stream_feed(self, stream, global_batch_size: int, seed: int | None, saved_data) -> SentFeed:
        options = self.options.feed_options
        watch, timeout, buffer = options.watch or unwatched, options.read_timeout_seconds, options.shuffle_buffer
        part = divide(stream, self, saved_counts=saved_data, watch=watch, timeout_seconds=timeout)
        order = part.order(global_batch_size, seed, drop_remainder=False).resumed(saved_data)
        self._stream_lines.append(f"a dataset of {order.num_examples:,} examples: {_SENT}")
        devices = Devices(self.distribution)
        return SentFeed(devices, part, order, shuffle_buffer=buffer, watch=watch, timeout_seconds=timeout)

    @property
    def computing_tasks(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*self.cluster.workers, *self.cluster.servers)

    @property
    def computes_on(self) -> tuple[str, int]:
        """A device that computes gradients (the first worker's), and how many such devices share the work."""
        first = "/job:worker/replica:0/task:0/"
        gpus = [gpu.name for gpu in tf.config.list_logical_devices("GPU") if gpu.name.startswith(first)]
        return (gpus or [f"{first}device:CPU:0"])[0], len(self.cluster.workers)

    def bind(self, state: TrainState, train_feed: Any = None, eval_feed: Any = None) -> None:
        """Sets the programs' state. Nothing may be in progress."""
        feeds = [train_feed, *(eval_feed.values() if isinstance(eval_feed, Mapping) else [eval_feed])]
        if read := [feed.read_by_workers for feed in feeds if feed and feed.read_by_workers]:
            sources.check(read, self.cluster.workers, self.options.step_timeout_seconds)
        if not self._leases:
            sources.compare_versions(len(self.cluster.workers), len(self.cluster.servers))
        self._leases = self._leases or Leases(
            self.coordinator,
            self.cluster,
            timeout_seconds=self.options.step_timeout_seconds,
            describe=_describe_lease,
            fault_of_data=self._fault_of_data,
        )
        self._inventory = inventory = state.trainer.inventory
        for optimizer in inventory.optimizers.values():
            optimizer.move_to(OnServers(state.trainer.reduction.reduce_dtype))
        for table in inventory.tables.values():
            table.reduce_dtype = state.trainer.reduction.reduce_dtype
        self._runner = StepRunner(state.trainer, counts_ids="GPU" in self.computes_on[0])
        super().bind(state, train_feed, eval_feed)

    def combined(self, feeds: Mapping[str, Feed]) -> CombinedOnWorkers:
        for name, feed in feeds.items():
            if not isinstance(feed, (ResidentOnWorkers, ExternalWorkersFeed)):
                raise UsageError(
                    f"train[{name!r}] is read as steps go, and with strategy={self.name} several inputs per step are "
                    "arrays in memory; load it, or use another strategy"
                )
        return CombinedOnWorkers(feeds, 1)

    def external_feed(self) -> ExternalWorkersFeed:
        return ExternalWorkersFeed()

    def program(self, step: Step, feed: LeaseFeed, jit: bool = False) -> LeaseLoop:  # type: ignore[override]
        """Returns a program. Replica code other than the trainer's pulls no variables.

        Its updates are not counted, and are repeated if a worker dies.
        """
        inventory, runner, state = self._inventory, self._runner, self.state
        if step == "eval" or isinstance(step, Prediction):
            pull = Pull(inventory.steady_variables, tf.float32, moved=inventory.moved_variables)
            compute = step.compute if isinstance(step, Prediction) else None
            predicts = bool(compute) or computes_metrics(state.trainer)

            def evaluate(batch, number, _, pulled):
                number, start_values = feed.batch_number(number), pull.start_values(pulled)
                return runner.evaluate_batch(batch, number, state, compute, predicts, start_values)

            checks = StepChecks(state, runner, trains=False)
            return LeaseLoop(self.distribution, evaluate, feed, pull, predicts=predicts, checks=checks)

        optimizers = list(inventory.optimizers.values())
        pace = Pace(self.options.steps_per_loop, target_seconds=lease_seconds(len(self.cluster.workers)))
        if step == "train":
            reduce_dtype = inventory.trainer.reduction.reduce_dtype
            moved, tables = inventory.moved_variables, inventory.tables.values()
            pull = Pull(inventory.steady_variables, reduce_dtype, optimizers, moved, tables)

            def update(batch, number, collect_norm, pulled):
                return runner.train_batch(batch, number, collect_norm, pull.start_values(pulled))

            def check_assigned(graph, contexts):
                shares_weights = len(self.cluster.workers) > 1
                check_added(state, graph, contexts[0].start_values if shares_weights else None)

            checks = StepChecks(state, runner, check_assigned=check_assigned)
            counters = self.leases.counters
            return UpdateLoop(self.distribution, update, feed, pull, counters, state=state, pace=pace, checks=checks)
        # A program's own code reads its variables where it uses them.
        pull = Pull((), tf.float32, optimizers, tables=inventory.tables.values())

        def with_progress(batch, number, collect_norm, pulled):
            with runner.training(number, collect_norm, start_values=pull.start_values(pulled)):
                return step(batch, number, collect_norm)

        checks = StepChecks(state, None)
        return LeaseLoop(self.distribution, with_progress, feed, pull, state=state, pace=pace, checks=checks)

    @property
    def in_step(self) -> bool:
        """Whether all requested updates are applied: only then may weights be read."""
        return not (self._leases and self._leases.num_open)

    def evaluate(self, program: Any = None, *arguments: Any, **keywords: Any) -> Sums:
        try:
            return super().evaluate(program, *arguments, **keywords)
        except Interrupted:
            while not self.in_step:
                self.run(program or self.evaluation, 1)  # completes the leases in progress
            raise

    def run(self, program: LeaseLoop, limit: int) -> LoopResult:
        """Executes at most `limit` steps, at least one, and returns the results after about 0.1 s.

        They need not be the next steps: all steps are done when it has reached `limit`. If more than these are in
        progress, as after an unforeseen request, it completes them and schedules no others.
        """
        self._inventory.captured.check()
        began = time.monotonic()
        step, trains = program.step, program.state is not None
        compiles, ending = program not in self.leases.built, self._ending and trains
        # Only then: leases in progress reach past the program's own step, and the next ones follow them.
        if self.in_step:
            self._next_step = step
        completed: list[CompletedLease] = []
        while True:
            if not (ending and not self.in_step):
                self._fill(program, step, limit)
            arrived = self.leases.collect(_WAIT_SECONDS)
            self._heard.note(self.worker_names[result.worker] for _, result, _ in arrived)
            completed += arrived
            all_done = self.in_step and (ending or self._next_step >= step + limit)
            is_due = sum(lease.steps for lease, *_ in completed) >= limit
            if completed and (all_done or (not is_due and time.monotonic() - began >= _CALL_SECONDS)):
                break
        stats = [result.input_stats for _, result, _ in completed]
        program.feed.count(stats)
        steps = sum(lease.steps for lease, *_ in completed)
        program.advance(steps)
        waited = sum(lease.seconds for lease in stats) / len(self.cluster.workers) + self._lease_seconds
        self._lease_seconds = 0.0
        figures = self._count_updates(program, completed) if trains else None
        predictions = [piece for lease in completed for piece in lease.predictions]
        sums, shared = [result.sums for _, result, _ in completed], num_sums(program.metric_specs)
        # Those of leases add up, and their scores follow each other.
        total = np.concatenate([np.sum([x[:shared] for x in sums], axis=0), *(x[shared:] for x in sums)])
        return LoopResult(LoopSums(program.metric_specs, total), steps, waited, figures, compiles, predictions)

    def _count_updates(self, program: LeaseLoop, completed: list[CompletedLease]) -> WorkerFigures:
        sums = np.zeros([len(self.cluster.workers), len(_FIGURES)])
        for lease, result, _ in completed:
            updates = lease.stop - result.first
            sums[result.worker] += (result.seconds, result.input_stats.seconds, updates, result.staleness[0])
            self._lags += result.staleness[2:]
            self._updates += updates
            self._staleness += result.staleness[0]
            self._most_stale = max(self._most_stale, result.staleness[1])
            # Leases of another length, the last ones or repeated ones, say little about this one.
            if (pace := program.pace) and updates == pace.steps:  # the present length
                pace.fit(updates, result.steps_seconds, result.seconds - result.steps_seconds)
        return WorkerFigures([*_FIGURES], sums)

    def _fill(self, program: LeaseLoop, step: int, limit: int) -> None:
        """Schedules steps from `step` while there is room; with bounded staleness, a round after all have completed."""
        bound, workers, pace = self._servers.max_staleness_steps, len(self.cluster.workers), program.pace
        leases, end = self.leases.room, step + limit
        # An evaluation has no pace: its steps are divided evenly, as two leases for each worker.
        most = pace.steps if pace else int(min(math.ceil(limit / (2 * workers)), program.steps_per_call))
        if bound is not None and pace:
            # In a round each worker has one lease, so at most its steps of each other worker come between a pull and
            # its push.
            leases, most = workers * self.in_step, min(most, bound + 1)
        for _ in range(leases):
            if (left := end - self._next_step) <= 0:
                return
            steps = lease_steps(left, workers, most, pace.step_seconds) if pace else min(most, left)
            before = time.perf_counter()
            call_input = program.feed.call_input(self._next_step, steps)
            # A stream is read here, by the coordinator, and workers wait for it.
            self._lease_seconds += time.perf_counter() - before
            self.leases.schedule(program, call_input)
            self._next_step = call_input.stop

    def bad_records(self, source: WithoutBadRecords) -> set[int]:
        index = next(index for index, held in enumerate(self._read_by_workers) if held is source)
        return {*source.bad} | sources.bad_records(index, len(self.cluster.workers))

    def _fault_of_data(self, error: BaseException) -> CrankshaftError | None:
        """Returns the problem of the data, if it made a worker fail."""
        return sources.failure(error) or (
            sources.undecodable(len(self.cluster.workers)) if self._read_by_workers else None
        )


def _describe_lease(program: LeaseLoop, lease: Lease, step: int) -> str:
    """Describes a lease for a message, with its present `step`, if it contains it."""
    order = program.feed.order
    steps = f"steps {lease.first} to {lease.stop - 1}"
    if lease.first <= step < lease.stop:
        epoch, batch = divmod(step + order.shift, order.steps_per_epoch)
        steps += f", at step {step} (batch {batch} of epoch {epoch}) or the next"
    return steps


def connect(cluster: ClusterAddresses) -> tf.distribute.ParameterServerStrategy:
    """Connects to all workers and servers, which must be running. Before any op runs."""
    spec = {"chief": [cluster.coordinator], "worker": list(cluster.workers), "ps": list(cluster.servers)}
    distribution = tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(spec), task_type="chief", task_id=0, rpc_layer="grpc"
        )
    )
    quiet_tensorflow()
    # TensorFlow would warn when the coordinator itself computes, to continue a text.
    allow_compute_on_coordinator(distribution)
    return distribution
