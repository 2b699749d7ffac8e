"""Strategies by name, those of a script among them, and what they are made with. Nothing here starts TensorFlow."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from ..errors import UsageError
from .feed_options import FeedOptions

if TYPE_CHECKING:
    from .base import Strategy
    from .multi_worker import WorkerTask
    from .parameter_server.strategy import ServerOptions

BUILT_IN = ("one_device", "mirrored", "multi_worker", "parameter_server", "tpu")


@dataclasses.dataclass(frozen=True)
class StrategyOptions:
    """What a run asks of its strategy. Each takes what it can use.

    Attributes:
      num_virtual_devices: split the CPU, or the one GPU, into so many logical devices first; 0 leaves it whole.
      mesh: sizes of the mesh's axes, "data" and "model", by name; without model it is 1, without data what is left.
      shard_optimizer: whether replicas share out slots and updates, see `Mesh`.
      tpu_address: the TPU's name or grpc:// address; empty for the local one.
      task: of this process among the workers of multi_worker.
      servers: of parameter_server, where its tasks are and what is peculiar to it.
      communication: how workers' sums travel, see `multi_worker.connect`.
      step_timeout_seconds: how long a worker may wait for others, see `MultiWorker`.
      end_process: called by a process that stands still, with the line that says why, in which parameters stand in
        backquotes; None prints the line and the stacks.
      steps_per_loop: steps in one compiled call; 0 fits them.
      feed_options: how data reaches the devices.
      parallel_micro_batches: that one_device computes in parallel, see `devices.set_threads_per_micro_batch`.
      gpus: which GPUs, see `gpus.take`. Of all, one_device takes the
        first, and the coordinator of parameter_server none, since others compute.
      owns_process: whether threads may be set for the whole process, and GPUs that this run does not use be hidden from
        it; else they stay what they are.
    """

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
    owns_process: bool = True


Maker = Callable[[StrategyOptions], "Strategy"]
_own: dict[str, Maker] = {}


def register(name: str, maker: Maker) -> None:
    """Registers a strategy of a script's own under a name; before the script calls `crankshaft.main` or `run`.

    Args:
      name: lower-case letters, digits and _; of none that comes with Crankshaft. One's own may be registered again.
      maker: makes the `engine.strategies.base.Strategy`, before anything else touches a device.

    Raises:
      UsageError: the name can't be had.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UsageError(f"{name!r} is not a name of a strategy; use lower-case letters, digits and _")
    if name in BUILT_IN:
        raise UsageError(f"the strategy {name} comes with Crankshaft; register yours by another name")
    _own[name] = maker


def registered() -> Mapping[str, Maker]:
    """Returns the makers of a script's own strategies, by name."""
    return MappingProxyType(_own)


def names() -> tuple[str, ...]:
    """Returns the names of all strategies."""
    return (*BUILT_IN, *_own)
