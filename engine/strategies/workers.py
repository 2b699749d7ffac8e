"""What workers exchange: every call of the inner loop ends in one sum over them, of its metrics and of these rows.

A row holds one worker's figures of the call. All workers read the same rows of the same call, so whatever is decided
by them (to stop, how many steps to take) is decided alike, without a further exchange.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from ..data.arrays import is_on_gpus
from ..health.watchdog import FIRST_CALL_FACTOR, Arrivals, Watchdog
from ..mesh import collectives
from ..metrics.sums import LoopSums, total_rows
from .inner_loop import InnerLoop, LoopResult

OWN = "worker/"  # metrics of a step with this prefix are not summed over workers: they are part of the row
# What the host gives with the call; the rest is measured in it.
FROM_HOST = ("asked", "next_steps")  # the first: 1 to stop, and 2 times what else is wished, a bit each
_MEASURED = ("seconds", "input_seconds", "steps")


class WorkerRows:
    """The rows of one call, unread. Reading waits for the devices."""

    def __init__(self, names: list[str], tensor: tf.Tensor | np.ndarray):
        self._names = names
        self._tensor = tensor
        self._rows: list[dict[str, float]] | None = None

    def read(self) -> list[dict[str, float]]:
        """Returns a dictionary for each worker, in their order.

        It has `FROM_HOST`; `seconds` (but on GPUs, which work behind the clock's back) and `steps` of the call;
        `input_seconds`, spent waiting for data, on the host before it and in it; and, in training, what
        `engine.reduction.Reduction.take_figures` holds, over its steps.
        """
        if self._rows is None:
            array = np.asarray(self._tensor, np.float64)
            self._rows = [dict(zip(self._names, map(float, row), strict=True)) for row in array]
        return self._rows


class WorkerWindow:
    """The rows of some calls of the inner loop, added up by worker."""

    IN_FLIGHT = 2  # calls that a device may be at work on yet: their rows are left unread

    def __init__(self):
        self._unread: list[WorkerRows] = []
        self._sums: list[dict[str, float]] = []
        self._norms: list[float] = []

    def add(self, rows: WorkerRows) -> None:
        self._unread.append(rows)
        self._read_all_but(self.IN_FLIGHT)

    def _read_all_but(self, newest: int) -> None:
        done = len(self._unread) - newest
        for rows in self._unread[: max(0, done)]:
            figures = rows.read()
            self._sums = self._sums or [dict.fromkeys(row, 0.0) for row in figures]
            self._sums = [
                {name: before[name] + row[name] for name in row}
                for before, row in zip(self._sums, figures, strict=True)
            ]
            norms = [row.get("gradient_norm", 0.0) for row in figures]  # 0 of a call at whose end nobody looks
            self._norms = [new or old for new, old in zip(norms, self._norms or norms, strict=True)]
        del self._unread[: max(0, done)]

    def take(self) -> list[dict[str, float]]:
        """Returns what the window holds; it is empty afterwards. Waits for the calls that were added.

        Returns:
          A dictionary for each worker, none if no call was added: milliseconds a step `step_ms` (all of it), `own_ms`
          (without waiting for other workers), `reduce_wait_ms`, these three not of GPUs; `input_wait_ms`; and
          `gradient_norm`, of the newest call at whose end somebody looked, if there was one. Around parameter servers
          without these two, and of a worker that has done nothing without times, but with `steps`, `lag` (the steps
          that the fastest did more) and `staleness`: how many updates of others came between its pull and its push, on
          average.
        """
        self._read_all_but(0)
        sums, norms, self._sums, self._norms = self._sums, self._norms, [], []
        most = max((row["steps"] for row in sums), default=0.0)
        return [_figures(row, norm, most) for row, norm in zip(sums, norms, strict=True)]


def _figures(sums: dict[str, float], norm: float, most_steps: float) -> dict[str, float]:
    a_step = 1e3 / max(1.0, sums["steps"])
    figures = {"input_wait_ms": a_step * sums["input_seconds"]}
    if norm:
        figures["gradient_norm"] = norm
    if "seconds" in sums and sums["steps"]:
        figures["step_ms"] = a_step * sums["seconds"]
        figures["own_ms"] = a_step * (sums["seconds"] - sums.get("reduce_seconds", 0.0))
    if "reduce_seconds" in sums:
        figures["reduce_wait_ms"] = a_step * sums["reduce_seconds"]
    if "staleness" in sums:
        figures |= {"steps": sums["steps"], "lag": most_steps - sums["steps"]}
        figures["staleness"] = sums["staleness"] / max(1.0, sums["steps"])
    return figures


class WorkersLoop(InnerLoop):
    """An inner loop whose results are summed over workers, and in which each gives the others its row.

    Scores that it keeps are this worker's own.

    Args:
      worker, num_workers: which of how many this process is.
      arrivals: counts the steps whose data this worker has.
      watchdog: learns where each call begins and ends.
      The rest is `InnerLoop`'s.
    """

    def __init__(self, *arguments, worker: int, num_workers: int, arrivals: Arrivals, watchdog: Watchdog, **keywords):
        self._worker = worker
        self._num_workers = num_workers
        self._watchdog = watchdog
        self._patience = FIRST_CALL_FACTOR
        self._defaults = tf.zeros([len(FROM_HOST)], tf.float64)
        super().__init__(*arguments, arrivals=arrivals, **keywords)
        # On GPUs the time between two control edges is that in which work is handed out, not done.
        self._measured = tuple(name for name in _MEASURED if name != "seconds" or not is_on_gpus(self._strategy))

    def __call__(self, step: int, limit: int, *from_host, due: int | None = None) -> LoopResult:
        self._watchdog.beat(step, self._patience)
        result = super().__call__(step, limit, *(from_host or (self._defaults,)), due=due)
        self._patience = 1.0
        self._watchdog.beat(step + result.steps)
        return result

    def trace(self, step: int, limit: int, *from_host) -> None:
        super().trace(step, limit, *(from_host or (self._defaults,)))

    def _result(self, tensors, steps: int, input_seconds: float) -> LoopResult:
        sums, rows = tensors
        shared = [spec for spec in self._specs if not spec.name.startswith(OWN)]
        own = [spec.name.removeprefix(OWN) for spec in self._specs if spec.name.startswith(OWN)]
        rows = WorkerRows([*FROM_HOST, *self._measured, *own], rows)
        return LoopResult(LoopSums(shared, sums), steps, input_seconds, rows)

    def _loop(self, operands, numbers, from_host):  # type: ignore[override]
        began = tf.timestamp()
        with tf.control_dependencies([began]):
            numbers = tf.identity(numbers)
        sums = super()._loop(operands, numbers)
        sums, scores = sums[: total_rows(self._specs)], sums[total_rows(self._specs) :]
        with tf.control_dependencies([sums]):
            seconds, waited = tf.timestamp() - began, self._arrivals.take_seconds()
        own = tf.constant([spec.name.startswith(OWN) for spec in self._specs for _ in range(spec.rows)])
        measured = {"seconds": seconds, "input_seconds": waited, "steps": tf.cast(numbers[2] - numbers[1], tf.float64)}
        row = tf.concat([from_host, [measured[name] for name in self._measured], tf.boolean_mask(sums, own)[:, 0]], 0)
        sums, rows = self._over_workers(tf.boolean_mask(sums, ~own), row)
        return tf.concat([sums, scores], 0) if any(spec.keeps_scores for spec in self._specs) else sums, rows

    def _over_workers(self, sums: tf.Tensor, row: tf.Tensor):
        """Returns ([metrics, 2] summed over workers, [workers, figures])."""
        sums.set_shape([total_rows([spec for spec in self._specs if not spec.name.startswith(OWN)]), 2])
        # Padded, not multiplied by zero: another worker's NaN is not mine.
        rows = tf.pad(row[tf.newaxis], [[self._worker, self._num_workers - 1 - self._worker], [0, 0]])
        rows.set_shape(
            [self._num_workers, len(FROM_HOST) + len(self._measured) + total_rows(self._specs) - sums.shape[0]]
        )
        mine = tf.concat([tf.reshape(sums, [-1]), tf.reshape(rows, [-1])], 0)

        def replica():
            context = tf.distribute.get_replica_context()
            # One of this worker's replicas brings what the loop has summed over all of them.
            local = context.replica_id_in_sync_group % (context.num_replicas_in_sync // self._num_workers)
            return collectives.all_reduce(context, tf.where(tf.equal(local, 0), mine, 0.0))

        merged = self._strategy.experimental_local_results(self._strategy.run(replica))[0]
        size = sums.shape.num_elements()
        return tf.reshape(merged[:size], sums.shape), tf.reshape(merged[size:], rows.shape)
