"""Several synchronous hosts: `Replicated` on MultiWorkerMirroredStrategy, and its processes' agreements."""

from __future__ import annotations

import contextlib
import functools
import json
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from ...engine.data.arrays import is_on_gpus
from ...engine.errors import LostPeerError, UsageError
from ...engine.internals.tensorflow import broadcast_from_first_worker, own_initial_values, receive_in_chunks
from ...engine.mesh.layout import Mesh
from ...engine.mesh.sharded import variable_sharding
from ...engine.metrics.pairs import Mean
from ...engine.state import TrainState
from ...engine.strategies.arrivals import Arrivals
from ...engine.strategies.base import Stop
from ...engine.strategies.inner_loop import InnerLoop
from ...engine.strategies.loop_result import LoopResult
from ...engine.strategies.options import StrategyOptions, WorkerTask
from ...engine.strategies.replicated import Replicated
from . import comparison
from .watchdog import Watchdog
from .workers_loop import LOCAL, WorkersLoop

_WIRE_CHUNK = 1 << 16  # bytes
_WORD = 8  # bytes of the numbers that are exchanged


class MultiWorker(Replicated):
    """Synchronous replicas on several hosts, one process (worker) each.

    All workers make the same calls in the same order, with the same number of steps. Knowledge of a single one (a
    signal, the duration of a call) is exchanged in the figures that end each call, and all act on it one call later.

    Args:
      options: has this process's `task`.
    """

    def __init__(
        self,
        distribution: tf.distribute.MultiWorkerMirroredStrategy,
        options: StrategyOptions,
        mesh: Mesh | None = None,
    ):
        super().__init__("multi_worker", distribution, options, mesh)
        task = options.task
        assert task
        self.host, self.host_names = task.worker, task.names
        self._stop: Stop | None = None  # that all have agreed on
        self._own_stop: Stop | None = None  # why this worker wants to stop
        self._stop_requested = False  # whether any worker wants to stop, once all know
        self._requests = self._published = self._agreed = 0  # this worker's new ones, its sent ones, and any worker's
        self._before: tuple[WorkersLoop, LoopResult] | None = None
        self._exchange: Any = None  # a tf.function
        self._arrivals = Arrivals()
        self._watchdog = Watchdog(
            task.worker,
            task.names,
            task.addresses,
            options.step_timeout_seconds,
            secret=task.secret,
            bind=task.bind,
            arrived=self._arrivals.count,
            end=options.end_process,
        )

    @property
    def replica_names(self) -> list[str]:
        return [name for name in self.host_names for _ in range(self.num_replicas // self.num_hosts)]

    @property
    def no_jit_reason(self) -> str | None:
        return "XLA compiles no sum over workers on a CPU, nor one in a loop"

    def build(self, make: Callable[[], TrainState]) -> TrainState:
        """Calls `make`, as `Strategy.build`; all workers then have the first one's values.

        Workers that build from the same seed make the same values, which one exchange shows. If a program draws numbers
        of its own, the first worker's are sent to the others, variable by variable.

        Raises:
          UsageError: workers have made other variables, or one of them has failed to.
        """
        variables, digest = list[tf.Variable](), 0

        def note(value: tf.Tensor) -> None:
            nonlocal digest
            has_text = value.dtype == tf.string
            data = tf.io.serialize_tensor(value).numpy() if has_text else value.numpy().reshape(-1).view(np.uint8)
            digest = zlib.crc32(data, digest)

        def create(next_creator: Callable, **keywords: Any) -> tf.Variable:
            variables.append(next_creator(**keywords))
            return variables[-1]

        def build() -> TrainState:
            with self.scope(), tf.variable_creator_scope(create), own_initial_values(self.distribution, note):
                return make()

        def describe(state: TrainState) -> list:
            return [state.variable_specs(), digest, [f"{v.dtype.name} {v.shape}" for v in variables]]

        state, made = comparison.made_by_all("the model", build, describe, self)
        if any(specs != made[0][0] for specs, *_ in made):
            comparison.refuse_variables(state.variable_specs(), self)
        if any(values != made[0][1] for _, values, _ in made):
            # One worker may have made others besides, which are not the state's.
            for variable in variables if all(made_ones == made[0][2] for *_, made_ones in made) else state.variables():
                if variable_sharding(variable) is None:  # shards differ by replica, and are filled by position alone
                    first, *_ = copies = self.distribution.experimental_local_results(variable)
                    value = broadcast_from_first_worker(self.distribution, first.read_value())
                    for copy in copies:
                        copy.assign(value)
        return state

    def exchange(self, value: Any = None) -> list:
        text = json.dumps(value, default=lambda scalar: scalar.item())
        return [json.loads(message) for message in self.exchange_bytes(text.encode())]

    def exchange_bytes(self, value: bytes) -> list[bytes]:
        if self._exchange is None:

            def gather(words):
                context = tf.distribute.get_replica_context()
                # One replica of each process sends its words; the others send none.
                is_first = tf.equal(context.replica_id_in_sync_group % (self.num_replicas // self.num_hosts), 0)
                return context.all_gather(words[: tf.where(is_first, tf.size(words), 0)], axis=0)

            @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)], autograph=False)
            def exchange(words):
                return self.distribution.run(gather, args=(words,))

            self._exchange = exchange.get_concrete_function()
        # The values differ in length, and arrive joined: each begins with its own.
        sized = len(value).to_bytes(_WORD, "little") + value
        words = tf.constant(np.frombuffer(sized.ljust(-(-len(sized) // _WORD) * _WORD, b"\0"), np.int64))
        joined = self.distribution.experimental_local_results(self._exchange(words))[0].numpy().tobytes()
        messages = list[bytes]()
        while joined:
            stop = _WORD + int.from_bytes(joined[:_WORD], "little")
            messages.append(joined[_WORD:stop])
            joined = joined[-(-stop // _WORD) * _WORD :]
        return messages

    def silent(self, seconds: float) -> list[str]:
        return [self.host_names[worker] for worker in self._watchdog.silent(seconds)]

    def has_lost_first(self, error: BaseException) -> bool:
        return self._watchdog.explain_lost_peer(error) is not None and self._watchdog.lost == 0

    @contextlib.contextmanager
    def watch(self):
        with self._watchdog:
            try:
                yield
            except Exception as error:
                if line := self._watchdog.explain_lost_peer(error):
                    raise LostPeerError(line) from error
                raise

    def agree_to_stop(self, stop: Stop | str | None, together: bool = False) -> Stop | None:
        self._own_stop = self._own_stop or super().agree_to_stop(stop)
        if self._stop is None and (together or self._stop_requested):
            stops = [Stop(*values) if values else None for values in self.exchange(self._own_stop)]
            if first := next(filter(None, stops), None):
                is_agreed = len(set(stops)) == 1
                self._stop = first._replace(worker="" if is_agreed else self.host_names[stops.index(first)])
        return self._stop

    def resume_work(self) -> None:
        self._own_stop, self._stop_requested, self._stop = None, False, None

    def agree_on_requests(self, requests: int, mask: int) -> int:
        self._requests |= requests & ~self._published
        self._published |= requests
        agreed = self._agreed & mask
        self._agreed &= ~agreed
        self._published &= ~agreed
        return agreed

    def run(self, program: WorkersLoop, limit: int) -> LoopResult:  # type: ignore[override]
        if (pace := program.pace) is None:
            return super().run(program, limit)
        from_host = tf.constant([bool(self._own_stop) + 2 * self._requests, pace.steps], tf.float64)
        self._requests = 0
        # This process's own pace is only sent: all have to take as many steps, or their collectives would not meet.
        pace.steps = program.agreed_steps
        result = super().run(program, limit, from_host)
        if self._before is not None:
            # Not of this call, for which the host would have to wait.
            earlier, its_result = self._before
            assert its_result.workers
            figures = its_result.workers.read()
            earlier.agreed_steps = int(figures[0]["next_steps"])  # the chief's clock sets the pace
            for requests in (int(worker["requests"]) for worker in figures):
                self._stop_requested |= bool(requests & 1)
                self._agreed |= requests >> 1
        self._before = program, result
        return result

    def bind(self, state: TrainState, train_feed: Any = None, eval_feed: Any = None) -> None:
        super().bind(state, train_feed, eval_feed)
        self._before = None
        self.resume_work()
        self._requests = self._published = self._agreed = 0
        state.trainer.reduction.watched = watched_figures(self.distribution)

    def _local_figures(self) -> dict:
        # The mean of this worker's replicas, whose sums the loop adds up.
        fraction = self.num_hosts / self.num_replicas
        figures = self.state.trainer.reduction.pop_figures()
        return {f"{LOCAL}{name}": Mean(fraction * value, tf.constant(1.0)) for name, value in figures.items()}

    def _inner_loop(self, step: Callable[..., Any], feed: Any, **more: Any) -> InnerLoop:
        return WorkersLoop(
            self.distribution,
            step,
            feed,
            batch_shards=self._batch_shards,
            processes=self,
            arrivals=self._arrivals,
            watchdog=self._watchdog,
            **more,
        )


def watched_figures(distribution: tf.distribute.Strategy) -> tuple[str, ...]:
    """Names the figures that each replica reports per step, see `Reduction.pop_figures`.

    GPUs have no times: the host's clock sees when sums are requested, not when they complete.
    """
    return ("gradient_norm",) if is_on_gpus(distribution) else ("reduce_seconds", "gradient_norm")


@functools.cache  # a process has one server
def connect(task: WorkerTask, communication: str = "auto") -> tf.distribute.MultiWorkerMirroredStrategy:
    """Starts this worker's server and waits for all workers'. Before any op runs.

    A later run of the process has the same server.

    Args:
      communication: "auto", "ring" (TensorFlow's own, over gRPC) or "nccl" (GPUs).
    """
    # TensorFlow sends buffers in pieces of 4 KiB; larger ones double the rate of a ring over gRPC.
    receive_in_chunks(_WIRE_CHUNK)
    implementation = tf.distribute.experimental.CommunicationImplementation[communication.upper()]
    try:
        return tf.distribute.MultiWorkerMirroredStrategy(
            resolver(task, len(tf.config.get_visible_devices("GPU"))),
            tf.distribute.experimental.CommunicationOptions(implementation=implementation),
        )
    except RuntimeError as error:
        if "must be configured at program startup" not in str(error):
            raise
        raise UsageError(
            "this process has used TensorFlow before its run could join the other workers; make tensors and datasets "
            "in the data function, or once the run is open"
        ) from error


def resolver(task: WorkerTask, gpus: int) -> tf.distribute.cluster_resolver.ClusterResolver:
    """Returns the workers as TensorFlow takes them, with the number of GPUs that this one computes on.

    Without a number TensorFlow takes none, and the CPU computes.
    """
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": list(task.addresses)}),
        task_type="worker",
        task_id=task.worker,
        num_accelerators={"GPU": gpus},
    )
