"""Strategies by name, including a script's own, and their options. Does not start TensorFlow."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from ..errors import UsageError
from .feed_options import FeedOptions

if TYPE_CHECKING:
    import tensorflow as tf

    from .base import Strategy
    from .multi_worker import WorkerTask
    from .parameter_server.strategy import ServerOptions

BUILT_IN = ("one_device", "mirrored", "multi_worker", "parameter_server", "tpu")
CLUSTERED = ("multi_worker", "parameter_server")  # those of several processes, which connect before TensorFlow starts


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
      step_timeout_seconds: limit on waiting for other workers, see `MultiWorker`.
      end_process: called by a stuck process with the reason, a line whose settings are marked (`errors.setting`); None
        prints the line and the stacks.
      steps_per_loop: steps per compiled call; 0 fits them.
      parallel_micro_batches: number that one_device computes in parallel, see `devices.set_threads_per_micro_batch`.
      gpus: the GPUs to use, see `gpus.use_only`. By default one_device takes the first, and parameter_server's
        coordinator none, since others compute.
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
    deterministic: bool = True
    owns_process: bool = True


Maker = Callable[[StrategyOptions], "Strategy"]
_registered: dict[str, Maker] = {}


def register(name: str, maker: Maker) -> None:
    """Registers a strategy of a script's own under a name; before the script calls `crankshaft.main` or `run`.

    Args:
      name: lower-case letters, digits and _; not a built-in's. Your own may be registered again.
      maker: creates the `engine.strategies.base.Strategy`, before anything else uses a device.

    Raises:
      UsageError: the name is not allowed.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UsageError(f"{name!r} is not a name of a strategy; use lower-case letters, digits and _")
    if name in BUILT_IN:
        raise UsageError(f"the strategy {name} comes with Crankshaft; register yours by another name")
    _registered[name] = maker


def registered() -> Mapping[str, Maker]:
    """Returns the makers of a script's own strategies, by name."""
    return MappingProxyType(_registered)


def names() -> tuple[str, ...]:
    """Returns the names of all strategies."""
    return (*BUILT_IN, *_registered)
