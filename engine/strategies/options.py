"""Options for a run's strategy, with its processes' addresses. Does not start TensorFlow."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import tensorflow as tf

DEFAULT_TIMEOUT_SECONDS = 600.0  # without progress


def default_timeout_seconds() -> float:
    """Returns 0 (off) under a debugger, else `DEFAULT_TIMEOUT_SECONDS`."""
    monitoring = getattr(sys, "monitoring", None)  # Python 3.12 or later
    is_debugged = sys.gettrace() is not None or (monitoring and monitoring.get_tool(monitoring.DEBUGGER_ID))
    return 0.0 if is_debugged else DEFAULT_TIMEOUT_SECONDS


@dataclasses.dataclass(frozen=True)
class FeedOptions:
    """Options for how data reaches the devices.

    Attributes:
      resident_bytes: arrays up to this size are cached on each device.
      shuffle_buffer: examples in the shuffle buffer of a stream.
      auto_shard: name of a `tf.data.experimental.AutoShardPolicy`.
      shuffle_window: see `engine.data.lengths.source_order`.
      read_timeout_seconds: limit on a source's reads without progress; 0 waits for ever.
      watch: shows progress of reading besides training, an `engine.data.streamed.Watch`; None shows nothing.
    """

    resident_bytes: int = 1 << 30
    shuffle_buffer: int = 10_000
    auto_shard: str = "AUTO"
    shuffle_window: int = 0
    read_timeout_seconds: float = 0.0
    watch: Callable | None = None


@dataclasses.dataclass(frozen=True)
class WorkerTask:
    """This process's index among the workers: `worker`, from 0 (the chief) on.

    `names`, for messages, and `addresses`, host:port, are in the workers' order. The job's `secret` authenticates the
    workers to each other; without one they trust their network. `bind` is the address of this host at which the
    watchdog listens; empty: this worker's in `addresses`.
    """

    worker: int
    names: tuple[str, ...]
    addresses: tuple[str, ...]
    secret: bytes = dataclasses.field(default=b"", repr=False)
    bind: str = ""


class ClusterAddresses(NamedTuple):
    """The tasks' addresses, host:port: the coordinator's, the workers' and the parameter servers', in order."""

    coordinator: str
    workers: tuple[str, ...]
    servers: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """Options of parameter servers.

    Attributes:
      max_staleness_steps: workers run in rounds of leases of at most this plus one steps, so none is more than this
        many updates ahead of the slowest in the round (as in Ho et al. 2013, More effective distributed ML via a stale
        synchronous parallel parameter server); None has no rounds.
      placement_rules: pairs of a regular expression and the number of the server that has the variables whose paths
        it matches.
    """

    cluster: ClusterAddresses
    max_staleness_steps: int | None = None
    placement_rules: tuple[tuple[str, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class StrategyOptions:
    """Options for a run's strategy. Each strategy uses those that apply.

    Attributes:
      distribution: `tf.distribute.Strategy` in whose scope the model was made: mirrored trains it there, unless it is
        to have other devices.
      num_virtual_devices: split the CPU, or the only GPU, into so many logical devices first; 0 does not.
      mesh: sizes of the mesh's axes "data" and "model"; by default model is 1, and data the remaining replicas.
      shard_optimizer: whether replicas share optimizer state and updates, see `Mesh`.
      tpu_address: the TPU's name or grpc:// address; empty for the local one.
      communication: how workers exchange sums, see `multi_worker.connect`.
      step_timeout_seconds: time without progress, or any update on parameter servers, until this process names who is
        stuck and ends; 0 waits for ever.
      end_process: called by a stuck process with the reason, in a line; None prints it and stacks.
      steps_per_loop: steps per compiled call, or per lease; 0 fits them to about a quarter of a second.
      parallel_micro_batches: number that one_device computes in parallel, see `devices.set_threads_per_micro_batch`.
      gpus: the GPUs to use, see `gpus.use_only`. By default one_device takes the first, and parameter_server's
        coordinator none, since others compute.
      run_eagerly: whether training steps are executed op by op, as `print` and a debugger in them need; on one device.
      deterministic: whether GPUs compute the same bits each time, by slower kernels; a few operations have none.
      owns_process: whether to set the whole process's threads, and hide GPUs that this run does not use.
    """

    distribution: tf.distribute.Strategy | None = None
    num_virtual_devices: int = 0
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
    shard_optimizer: bool = False
    tpu_address: str = ""
    task: WorkerTask | None = None
    servers: ServerOptions | None = None
    communication: str = "auto"
    step_timeout_seconds: float = 0.0
    end_process: Callable[[str], None] | None = None
    steps_per_loop: int = 0
    feed_options: FeedOptions = dataclasses.field(default_factory=FeedOptions)
    parallel_micro_batches: int = 1
    gpus: Sequence[int] | None = None
    run_eagerly: bool = False
    deterministic: bool = True
    owns_process: bool = True
