"""Synchronous replicas, each with a copy of every variable: one device, mirrored devices, a TPU's cores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from .. import logging
from ..checks import StepChecks, updates_explained
from ..data.buckets import BucketedOrder
from ..data.feeds.blocks import Devices
from ..data.feeds.external_feed import ExternalFeed
from ..data.feeds.feed import Feed
from ..data.feeds.read_feed import ReadFeed
from ..data.feeds.resident_feed import ResidentFeed
from ..data.form import element_spec, text_fields
from ..data.lengths import source_order
from ..data.reader import example_bytes, in_memory
from ..data.source import unknown_dimensions
from ..data.streamed import Stream, divide, is_part, unwatched
from ..errors import UsageError
from ..mesh.layout import Mesh
from ..state import TrainState
from ..step.context import StepContext
from ..step.runner import StepRunner
from ..trainer import computes_metrics
from .base import Prediction, Step, Strategy
from .inner_loop import InnerLoop
from .loop_result import LoopResult
from .options import StrategyOptions
from .pace import Pace
from .syncs import Syncs

# Size of a streamed block, by device. On a CPU larger ones leave the last-level cache before they are used. A GPU
# receives each as a whole, and a call ends with it, so it must last: at PCIe's 10 GB/s, 64 MiB take 7 ms.
_BLOCK_BYTES = {"CPU": 8 << 20, "GPU": 64 << 20}
_BLOCK_INDICES = 1 << 18  # in a resident block of small batches: 2 MiB, half a second of the smallest steps


class Replicated(Strategy):
    """A `tf.distribute` strategy with synchronous replicas.

    Args:
      name: name of the strategy: one_device, mirrored or tpu.
      mesh: the replicas' layout; None is along data only.

    Attributes:
      static_shapes: whether all batches have one shape, as TPUs need.
    """

    BLOCK_STEPS = 1000  # indices of this many steps, or more, are copied at once; a call may use a part of them

    def __init__(
        self,
        name: str,
        distribution: tf.distribute.Strategy,
        options: StrategyOptions | None = None,
        mesh: Mesh | None = None,
        parallel_micro_batches: int = 1,
    ):
        self.options = options or StrategyOptions()
        self.name = name
        self.trains_in_place = isinstance(distribution, tf.distribute.OneDeviceStrategy)
        self.distribution = distribution
        self.mesh = mesh or Mesh()
        self._devices = Devices(distribution, self.mesh)
        self.parallel_micro_batches = parallel_micro_batches
        self.static_shapes = isinstance(distribution, tf.distribute.TPUStrategy)
        self.predicts = not self.static_shapes
        self._lines: list[str] = []

    def feed(
        self,
        split: Any,
        global_batch_size: int,
        seed: int | None,
        saved_data: Mapping[str, Any] | None = None,
        is_evaluation: bool = False,
    ) -> Feed:
        options, batch_size = self.options.feed_options, global_batch_size
        watch, varies = options.watch or unwatched, unknown_dimensions(split.element_spec) > 0
        if varies and self.static_shapes:
            raise UsageError(
                f"strategy={self.name} takes batches of one shape, and examples differ in length; pad them to one "
                "shape, or use another strategy"
            )
        if not split.by_index:
            return self._stream_feed(split, batch_size, seed, saved_data, is_evaluation)
        if self.static_shapes and is_evaluation:
            batch_size = eval_batch_size(len(split), batch_size, self.num_replicas)
        num_bytes = example_bytes(split)
        is_once = not (varies or split.is_random or split.varies)
        is_resident = is_once and num_bytes * len(split) <= options.resident_bytes
        if varies:
            block_steps = 1  # padded alike on all replicas
        elif is_resident:
            # Indices alone are sent, 8 bytes an example, so a block of them may last long.
            block_steps = self.options.steps_per_loop or max(self.BLOCK_STEPS, _BLOCK_INDICES // batch_size)
        else:
            block_bytes = _BLOCK_BYTES["GPU" if self._devices.on_gpus else "CPU"]
            most_steps = min(self.BLOCK_STEPS, block_bytes // max(1, num_bytes * batch_size))
            block_steps = self.options.steps_per_loop or max(1, most_steps)
        order, padding = source_order(
            split,
            batch_size,
            seed,
            options.shuffle_window,
            self,
            saved_data,
            block_steps=block_steps,
            drop_remainder=self.static_shapes,
            shards=self._batch_shards,
            watch=watch,
        )
        self._lines += padding.lines if padding else []
        if is_resident:
            return ResidentFeed(self._devices, in_memory(split, options.read_timeout_seconds), order)
        return ReadFeed(self._devices, split, order, options.read_timeout_seconds, padding)

    def eval_feed(self, split: Any, batch_size: int, saved_data: Mapping[str, Any] | None = None) -> Feed:
        return self.feed(split, batch_size, None, saved_data, is_evaluation=True)

    def _stream_feed(self, stream: Stream, batch_size: int, seed: int | None, saved_data, is_evaluation: bool) -> Feed:
        from ..data.feeds.streamed_feed import StreamedFeed

        options = self.options.feed_options
        watch, policy = options.watch or unwatched, options.auto_shard.upper()
        # Processes with shards of one copy of the model read the same examples, so they don't divide files.
        # If a copy of the model spans processes, its shards need the same examples at the same time.
        reads_alike = len(self.distribution.extended.worker_devices) % self.mesh.model.size > 0
        timeout_seconds = options.read_timeout_seconds if self.num_hosts == 1 else 0.0  # several have a watchdog
        if reads_alike and is_part(stream, policy):
            raise UsageError(
                "with a mesh workers share copies of the model and read the same examples, and each worker's dataset "
                "is a part (AutoShardPolicy.OFF); give each the whole dataset, without OFF"
            )
        part = divide(stream, self, "DATA" if reads_alike else policy, saved_data, watch, timeout_seconds)
        examples = sum(part.counts)
        if self.num_hosts > 1:
            title = f"a dataset of {examples:,} examples" if examples >= 0 else "a dataset"
            self._lines.append(f"{title}, {self.num_hosts} workers: {part.describe()}")
        if self.static_shapes and is_evaluation:
            batch_size = eval_batch_size(examples, batch_size, self.num_replicas)
        if stream.by_batch:  # whose sizes only reading shows: replicas share out each
            batch_size = max(batch_size, self._batch_shards)
        order = part.order(batch_size, seed, drop_remainder=self.static_shapes).resumed(saved_data)
        return StreamedFeed(
            self._devices,
            part,
            order,
            shuffle_buffer=options.shuffle_buffer,
            watch=watch,
            timeout_seconds=timeout_seconds,
            distributes=self.static_shapes,
            takes_few=is_evaluation,
        )

    def summary_lines(self) -> list[str]:
        """Describes how streams are divided among workers, and examples among buckets, one line each."""
        return self._lines

    def bind(
        self,
        state: TrainState,
        train_feed: Feed | None = None,
        eval_feed: Feed | Mapping[str, Feed] | None = None,
    ) -> None:
        self._inventory = state.trainer.inventory
        # Only the kernels of CPUs raise for ids out of range; elsewhere they are counted, and end the run as a metric.
        self._runner = StepRunner(state.trainer, self.mesh, counts_ids=self.static_shapes or self._devices.on_gpus)
        reduction = state.trainer.reduction
        self._syncs = Syncs(self.distribution, reduction) if reduction.sync_every_steps else None
        # Replicas differentiate sums of losses, larger than the mean by the number of all examples, which float16 would
        # overflow on.
        if train_feed and self.num_replicas > 1 and self._inventory.loss_scale:  # a single one takes the mean
            self._inventory.loss_scale.expect_sums(train_feed.order.batch_size)
        super().bind(state, train_feed, eval_feed)

    def external_feed(self) -> ExternalFeed:
        if self.static_shapes:
            raise UsageError(f"strategy={self.name} takes batches of one shape, and external data may have any")
        return ExternalFeed(self.num_replicas, self.mesh)

    @property
    def no_jit_reason(self) -> str | None:
        if self.num_replicas > 1:
            return f"one XLA program is for one replica, and there are {self.num_replicas}"
        if self._inventory.tables:
            return "the updates of embeddings touch a few rows, and XLA has no kernels for that"
        if text := text_fields(self.state.trainer.run_context.example):
            return f"{text[0]} holds strings, for which XLA has no kernels"
        if self.parallel_micro_batches > 1:
            return (
                f"each batch is computed in {self.parallel_micro_batches} micro-batches in parallel, a thread each, "
                "and XLA would use one thread"
            )
        if not self.training.feed.compilable:
            return "a tf.data.Dataset cannot be read within an XLA program"
        if unknown_dimensions(element_spec(self.state.trainer.run_context.example)) and not isinstance(
            self.training.feed.order, BucketedOrder
        ):
            return "examples differ in length, and XLA compiles each length; bucket_by has few"
        return None

    def program(self, step: Step, feed: Feed, jit: bool = False) -> InnerLoop:
        runner, state, replicas, batch_size = self._runner, self.state, self.num_replicas, feed.batch_size
        if step == "eval" or isinstance(step, Prediction):
            compute = step.compute if isinstance(step, Prediction) else None
            predicts = bool(compute) or computes_metrics(state.trainer)

            def evaluate(batch, number, _):
                return runner.evaluate_batch(batch, number, state, compute, predicts, batch_size=batch_size)

            # Keras traces each step so. Replicas' shards and parallel micro-batches are of sizes that a trace knows.
            takes_any = getattr(state.trainer, "evaluates_any_size", False)
            takes_any &= step == "eval" and replicas == self.parallel_micro_batches == 1
            feed.any_size |= takes_any
            checks = StepChecks(state, runner, trains=False, replicas=replicas)
            return self._inner_loop(evaluate, feed, predicts=predicts, checks=checks)

        is_eager = self.options.run_eagerly
        checks = StepChecks(state, None if callable(step) else runner, replicas=replicas, jit=jit, run_eagerly=is_eager)

        def train(batch, number, collect_norm):
            if callable(step):
                # A step of a program's own has no trainer to make a context from, and collectives look for the mesh in
                # one.
                with StepContext(mesh=self.mesh):
                    return {**step(batch, number, collect_norm), **self._local_figures()}
            with updates_explained(replicas):
                examples = checks.second_trace.examples(batch)
                metrics = runner.train_batch(examples, number, collect_norm, jit=jit, batch_size=batch_size)
            return {**metrics, **self._local_figures()}

        # Only training lets replicas differ; external steps see synchronized ones.
        syncs = self._syncs if step == "train" else None
        return self._inner_loop(
            train,
            feed,
            jit=jit,
            syncs=syncs,
            checks=checks,
            run_eagerly=is_eager,
            state=state,
            pace=Pace(self.options.steps_per_loop, state.trainer.reduction.sync_every_steps or 1),
        )

    def _inner_loop(self, step: Callable[..., dict], feed: Feed, **more: Any) -> InnerLoop:
        return InnerLoop(self.distribution, step, feed, batch_shards=self._batch_shards, **more)

    def _local_figures(self) -> dict:
        """Returns a step's figures of this worker alone, which are not summed across workers. Replica code."""
        return {}

    def run(self, program: InnerLoop, limit: int, *loop_inputs: Any) -> LoopResult:
        self._inventory.captured.check()
        if (pace := program.pace) is None:
            return program(program.step, limit)
        if self._syncs:
            self._syncs.before_call()
        step, began = program.step, pace.clock()
        steps = pace.next_steps(step, program.feed.max_steps_per_call(step, limit), limit)
        with tf.profiler.experimental.Trace("train", step_num=step, _r=1) as event:  # nothing unless one profiles
            result = program(step, steps, *loop_inputs, due=step + limit)
            event.set_metadata(steps=result.steps)
        # It waits for the call before this one, so at most two are in flight and the clock measures the device, not the
        # queue.
        pace.add_call(result, began)
        if self._syncs:
            self._syncs.after_call(program.step, due=result.steps == limit)
        return result

    @property
    def in_step(self) -> bool:
        return not self._syncs or self._syncs.in_step

    @property
    def sync_period_steps(self) -> int:
        return self._syncs.period_steps if self._syncs else 1

    @property
    def _batch_shards(self) -> int:
        """The number of shards of a batch, each computed by one replica, or by several with shards of the model."""
        return self.mesh.batch_shard(0, self.num_replicas)[1]


def eval_batch_size(examples: int, limit: int, replicas: int) -> int:
    """Returns a batch size for an evaluation on devices that need one shape for all batches.

    It is the largest up to `limit` that divides among the replicas and leaves no smaller last batch. If there is none,
    the largest that divides among the replicas: then the last, smaller batch is omitted, with a warning.
    """
    limit = max(replicas, limit // replicas * replicas)
    for batch in range(limit, 0, -replicas):
        if examples % batch == 0:
            return batch
    logging.warning(
        "evaluation leaves out %d of %d examples: no batch up to %d divides them over %d replicas",
        examples % limit,
        examples,
        limit,
        replicas,
    )
    return limit
