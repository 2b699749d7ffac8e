"""Workers' exchange: every call of the inner loop ends in one sum across workers, of its metrics and workers' figures.

All workers read the same figures of the same call, so they decide alike (to stop, the number of steps), without another
exchange.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import tensorflow as tf

from ...engine.data.arrays import is_on_gpus
from ...engine.internals.tensorflow import seconds_since, timestamp
from ...engine.mesh import collectives
from ...engine.metrics.sums import LoopSums, SumSpec, num_sums
from ...engine.strategies.arrivals import Arrivals
from ...engine.strategies.base import Processes
from ...engine.strategies.inner_loop import InnerLoop, StepTrace
from ...engine.strategies.loop_result import LoopResult, WorkerFigures
from . import comparison
from .watchdog import FIRST_CALL_FACTOR, Watchdog

LOCAL = "worker/"  # prefix of a step's metrics that are not summed across workers, but are figures of the worker
# From the host; the rest is measured in the call.
FROM_HOST = ("requests", "next_steps")  # the first: 1 to stop, plus 2 times the other requests, a bit each
_MEASURED = ("seconds", "input_seconds", "steps")


class WorkersLoop(InnerLoop):
    """An inner loop whose results are summed across workers, and in which workers exchange their figures.

    Its scores are this worker's own.

    Args:
      processes: all workers, which compare their steps before they run.
      watchdog: notified at each call's start and end.
      The rest is `InnerLoop`'s.

    Attributes:
      agreed_steps: approximate number of steps for the next call on all workers.
    """

    _arrivals: Arrivals

    def __init__(self, *arguments, processes: Processes, arrivals: Arrivals, watchdog: Watchdog, **keywords):
        self._processes = processes
        self._worker = processes.host
        self._num_workers = processes.num_hosts
        self._watchdog = watchdog
        self._timeout_factor = FIRST_CALL_FACTOR
        self._defaults = tf.zeros([len(FROM_HOST)], tf.float64)
        super().__init__(*arguments, arrivals=arrivals, **keywords)
        self.agreed_steps = self.pace.steps if self.pace else 0
        # On GPUs the time between two control edges is that of queueing work, not of its execution.
        self._measured = tuple(name for name in _MEASURED if name != "seconds" or not is_on_gpus(self._strategy))

    def __call__(self, step: int, limit: int, *loop_inputs, due: int | None = None) -> LoopResult:
        self._watchdog.beat(step if self.state else None, self._timeout_factor)
        result = super().__call__(step, limit, *(loop_inputs or (self._defaults,)), due=due)
        self._timeout_factor = 1.0
        self._watchdog.beat(step + result.steps if self.state else None)
        return result

    def trace(self, *loop_inputs) -> Sequence[SumSpec]:
        return super().trace(*(loop_inputs or (self._defaults,)))

    def _compile(self, trace: StepTrace, variant: tuple, arguments: tuple) -> Callable:
        compile_own = functools.partial(super()._compile, trace, variant, arguments)
        # Workers compile a variant of the step at the same call, but a share of another size each at its own.
        if any((known[0], known[2]) == (variant[0], trace.replicates_batch) for known in self.programs):
            return compile_own()
        kind, processes = "training" if self.state else "evaluation", self._processes
        program, steps = comparison.made_by_all(
            f"the {kind} step", compile_own, lambda _: [trace.digest.value, sorted(trace.batch_shapes)], processes
        )
        if all(shapes == steps[0][1] for _, shapes in steps):  # which decide the step's own
            comparison.check_step(kind, trace.digest, [value for value, _ in steps], processes)
        return program

    def _result(self, tensors, steps: int, input_seconds: float) -> LoopResult:
        sums, figures, predictions = tensors
        shared = [spec for spec in self.metric_specs if not spec.name.startswith(LOCAL)]
        local = [spec.name.removeprefix(LOCAL) for spec in self.metric_specs if spec.name.startswith(LOCAL)]
        workers = WorkerFigures([*FROM_HOST, *self._measured, *local], figures)
        return LoopResult(LoopSums(shared, sums), steps, input_seconds, workers, predictions=predictions)

    def _loop(self, trace: StepTrace, operands, numbers, from_host):  # type: ignore[override]
        began = timestamp()
        # All steps depend on the numbers, so none begins before the clock is read.
        with tf.control_dependencies([began]):
            numbers = tf.identity(numbers)
        sums, predictions = super()._loop(trace, operands, numbers)
        sums, scores = sums[: num_sums(trace.metric_specs)], sums[num_sums(trace.metric_specs) :]
        with tf.control_dependencies([sums]):
            seconds, waited = seconds_since(began), self._arrivals.take_seconds()
        is_local = tf.constant(
            [spec.name.startswith(LOCAL) for spec in trace.metric_specs for _ in range(spec.size)], tf.bool
        )
        measured = {"seconds": seconds, "input_seconds": waited, "steps": tf.cast(numbers[2] - numbers[1], tf.float64)}
        mine = tf.concat(
            [from_host, [measured[name] for name in self._measured], tf.boolean_mask(sums, is_local)[:, 0]], 0
        )
        sums, figures = self._sum_over_workers(trace.metric_specs, tf.boolean_mask(sums, ~is_local), mine)
        if any(spec.keeps_scores for spec in trace.metric_specs):
            sums = tf.concat([sums, scores], 0)
        return sums, figures, predictions

    def _sum_over_workers(self, specs: Sequence[SumSpec], sums: tf.Tensor, mine: tf.Tensor):
        """Returns ([metrics, 2] summed across workers, [workers, figures])."""
        # The mask has lost the shape, and only values of a static one are gathered, which is faster than a ring.
        sums.set_shape([num_sums([spec for spec in specs if not spec.name.startswith(LOCAL)]), 2])
        # Padded, not multiplied by zero: another worker's NaN is not mine.
        figures = tf.pad(mine[tf.newaxis], [[self._worker, self._num_workers - 1 - self._worker], [0, 0]])
        figures.set_shape([self._num_workers, len(FROM_HOST) + len(self._measured) + num_sums(specs) - sums.shape[0]])
        values = tf.concat([tf.reshape(sums, [-1]), tf.reshape(figures, [-1])], 0)

        def replica():
            context = tf.distribute.get_replica_context()
            # One of this worker's replicas contributes the sums over all of them.
            local = context.replica_id_in_sync_group % (context.num_replicas_in_sync // self._num_workers)
            return collectives.all_reduce(context, tf.where(tf.equal(local, 0), values, 0.0))

        merged = self._strategy.experimental_local_results(self._strategy.run(replica))[0]
        size = sums.shape.num_elements()
        return tf.reshape(merged[:size], sums.shape), tf.reshape(merged[size:], figures.shape)
