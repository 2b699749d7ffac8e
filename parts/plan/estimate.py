"""From the quantities of a step and the figures of a machine to seconds, hours, cost and goodput.

A step's operations on one device run one after another, so the seconds of products, of passes over memory and of
starting operations add up. Messages travel during the backward pass, as far as the machine can overlap them, and the
next batches are read during the step (`engine/reduction`, `engine/strategies/inner_loop.py`).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from .hardware import Hardware
from .quantities import Message, Work

# Of a step's products and passes: two products for each one of the forward pass.
_BACKWARD_FRACTION = 2 / 3
_SNAPSHOTS = 2  # snapshots in memory per process
# Of a process that has started TensorFlow: 690 MiB of one that trains a model of a few bytes, and 44 MiB of code and
# threads' memory that larger ones touch; with CUDA's libraries on GPUs.
_PROCESS_BYTES = {"cpu": 0.78e9, "gpu": 3e9, "tpu": 3e9}


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of one worker, without failures.

    Attributes:
      flops: operations of one device.
      wire_bytes: bytes that a host or a device sends.
      seconds: seconds of the whole step; bound: what takes most of them.
      compute_seconds, memory_seconds: seconds in products that the rate of operations limits, and in all else.
      dispatch_seconds: seconds in which the host starts operations, and the loop's own.
      network_seconds: seconds of messages that are not sent during the backward pass.
      input_seconds: seconds to read the step's examples from files.
    """

    flops: float
    wire_bytes: float
    seconds: float
    bound: Literal["compute", "memory", "network", "input", "dispatch"]
    compute_seconds: float
    memory_seconds: float
    dispatch_seconds: float
    network_seconds: float
    input_seconds: float


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: its bytes, the seconds to write it and of the wait for it, and the best interval between two."""

    bytes: float
    seconds: float
    stall_seconds: float
    interval_seconds: float


@dataclasses.dataclass(frozen=True)
class Failures:
    """The failures per hour of all hosts, and what one costs in seconds if the hosts stay, and if one is lost.

    A failure costs the recovery and the repeated steps.
    """

    per_hour: float
    seconds: float
    lost_host_seconds: float


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Time, memory and cost of a run on some hardware.

    Attributes:
      fits: whether the devices' and the hosts' memory suffices.
      host_bytes: bytes that a worker's task needs on its host.
      step, checkpoint, failures: parts of a plan's JSON.
      snapshot_interval_seconds: seconds between snapshots in memory; infinite without snapshots.
      snapshots_survive: whether other hosts have all of them if one is lost.
      goodput: the fraction of the time in which steps are made that count.
      hours: hours of the whole run; None if its length is unknown.
      cost: cost of the whole run, in the price's currency; None without a price or a length.
    """

    work: Work
    fits: bool
    host_bytes: float
    step: Step
    checkpoint: Checkpoint
    failures: Failures
    snapshot_interval_seconds: float
    snapshots_survive: bool
    goodput: float
    hours: float | None
    cost: float | None

    @property
    def examples_per_sec(self) -> float:
        """Of the run, without failures."""
        return self.work.examples / self.step.seconds


def estimate(work: Work, hardware: Hardware, snapshot_seconds: float | None = None) -> Estimate:
    """Estimates a run.

    Args:
      snapshot_seconds: value of `--snapshot_seconds`; None is auto, 0 no snapshots.

    Raises:
      UsageError: the hardware lacks a figure that the work needs.
    """
    step, saved = _step(work, hardware), _failures(work, hardware, snapshot_seconds)
    hours = None if work.steps is None else work.steps * step.seconds / saved["goodput"] / 3600
    price = hardware.price_per_host_hour
    cost = None if price is None or hours is None else hours * price * work.hosts
    # A worker's task on its host: the process, snapshots in memory, and on CPUs the replicas.
    local = work.replicas / work.hosts
    host_bytes = _PROCESS_BYTES[hardware.kind] + work.host_bytes
    if snapshot_seconds != 0:
        state = min(work.checkpoint_bytes, local * (work.memory.weights + work.memory.optimizer))
        host_bytes += _SNAPSHOTS * state
    if hardware.kind == "cpu":
        host_bytes += work.memory.data + local * (work.memory.total - work.memory.data)
    fits = work.memory.total <= device_bytes(work, hardware) and host_bytes <= 1e9 * hardware.host_memory_gb
    return Estimate(work=work, fits=fits, host_bytes=host_bytes, step=step, hours=hours, cost=cost, **saved)


def device_bytes(work: Work, hardware: Hardware) -> float:
    """Computes the memory that each replica may take."""
    return 1e9 * hardware.device_memory_gb / _replicas_per_device(work, hardware)


def _replicas_per_device(work: Work, hardware: Hardware) -> float:
    """Counts the replicas that share a device, as virtual ones do; 1 or more."""
    return max(1.0, work.replicas / work.hosts / hardware.devices_per_host)


def _step(work: Work, hardware: Hardware) -> Step:
    compute = memory = 0.0
    for product in work.products:
        by_rate = hardware.matmul_seconds(product.dtype, product.flops)
        by_memory = hardware.memory_seconds(product.bytes, work.memory.total)
        if by_rate >= by_memory:
            compute += product.count * by_rate
        else:
            memory += product.count * by_memory
    others = work.moved_bytes - sum(product.count * product.bytes for product in work.products)
    memory += hardware.memory_seconds(max(0.0, others), work.memory.total)
    sharing = _replicas_per_device(work, hardware)
    compute, memory = sharing * compute, sharing * memory
    dispatch = hardware.step_seconds + sharing * work.operations * hardware.operation_seconds
    network = sum(message_seconds(message, hardware) for message in work.messages)
    reading = work.input_bytes / (1e9 * hardware.read_gb_per_sec)
    device = compute + memory + dispatch
    exposed = max(0.0, network - hardware.network_overlap * _BACKWARD_FRACTION * (compute + memory))
    parts: dict[Any, float] = {"compute": compute, "memory": memory, "network": exposed, "dispatch": dispatch}
    return Step(
        flops=sum(work.flops.values()),
        wire_bytes=sum(message.wire_bytes for message in work.messages),
        seconds=max(device + exposed, reading),
        bound="input" if reading > device + exposed else max(parts, key=parts.__getitem__),
        compute_seconds=compute,
        memory_seconds=memory,
        dispatch_seconds=dispatch,
        network_seconds=exposed,
        input_seconds=reading,
    )


def message_seconds(message: Message, hardware: Hardware) -> float:
    """Computes the seconds that a step's collectives of one kind and size take.

    A ring of n members passes n - 1 messages in turn, twice for an all-reduce, each of 1/n of the bytes, which for an
    all-gather are of the tensor after it is gathered. All members send at once. Of GPUs, NCCL reduces by two binary
    trees where that is faster, in 2 log2(n) turns through which all bytes pass twice
    (https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4/).
    """
    turns = (message.members - 1) * (2 if message.kind == "all_reduce" else 1)
    seconds = turns * hardware.message_seconds(message.link, message.bytes / message.members)
    if message.kind == "all_reduce" and hardware.kind == "gpu":
        latency = hardware.message_seconds(message.link, 0)
        passing = hardware.message_seconds(message.link, 2 * message.bytes) - latency
        seconds = min(seconds, 2 * math.ceil(math.log2(message.members)) * latency + passing)
    return message.count * seconds


def _failures(work: Work, hardware: Hardware, snapshot_seconds: float | None) -> dict:
    from ..memory_snapshots.snapshots import COST, LEAST_SECONDS  # which imports TensorFlow

    rate = work.hosts / (3600 * hardware.hours_between_failures)  # per second
    lost = hardware.lost_host_share * rate
    stays = (1 - hardware.lost_host_share) * rate
    local = work.replicas / work.hosts * (work.memory.weights + work.memory.optimizer)
    saved = min(work.checkpoint_bytes, local)  # by one host: all of a checkpoint, or its shards
    stall, write = saved / (1e9 * hardware.copy_gb_per_sec), saved / (1e9 * hardware.write_gb_per_sec)
    restore = saved / (1e9 * hardware.read_gb_per_sec)
    snapshots = max(LEAST_SECONDS, stall / COST) if snapshot_seconds is None else snapshot_seconds
    snapshots = snapshots or math.inf  # 0 is none
    # One checkpoint is written before the next begins.
    interval = max(best_interval(stall, 1 / (lost or rate if snapshots < math.inf else rate)), write)
    # Without one in memory, the newest state is a checkpoint that was written whole, from which all are restored.
    from_file = (interval + stall, restore + write)
    repeats, on_failure = (snapshots, 0.0) if snapshots < interval else from_file
    survives = work.hosts > 1 and saved == work.checkpoint_bytes  # each host has a whole one
    on_loss, restored = (repeats, on_failure) if survives else from_file
    stays_down, lost_down = hardware.recovery_seconds + on_failure, hardware.lost_host_seconds + restored
    saving = 1 + stall / interval + stall / snapshots
    factor = saving * slowdown(repeats, stays_down, stays) * slowdown(on_loss, lost_down, lost)
    return {
        "checkpoint": Checkpoint(work.checkpoint_bytes, write, stall, interval),
        "failures": Failures(3600 * rate, stays_down + repeats / 2, lost_down + on_loss / 2),
        "snapshot_interval_seconds": snapshots,
        "snapshots_survive": survives,
        "goodput": 1 / factor,
    }


def best_interval(stall_seconds: float, seconds_between_failures: float) -> float:
    """Computes the seconds between two checkpoints that make a run shortest.

    Young 1974, A first order approximation to the optimum checkpoint interval (https://doi.org/10.1145/361147.361115):
    sqrt(2 d M). Daly 2006, A higher order estimate of the optimum checkpoint interval for restart dumps
    (https://doi.org/10.1016/j.future.2004.11.016), equation 37, which is used here.

    Args:
      stall_seconds: seconds d for which training waits while a checkpoint is taken.
      seconds_between_failures: mean seconds M between failures.
    """
    d, mean = stall_seconds, seconds_between_failures
    if d >= 2 * mean:
        return mean
    root = math.sqrt(d / (2 * mean))
    return math.sqrt(2 * d * mean) * (1 + root / 3 + root**2 / 9) - d


def slowdown(interval: float, recovery_seconds: float, failures_per_sec: float) -> float:
    """Computes the mean seconds that a second of work takes with failures: Daly 2006, equation 20.

    Args:
      interval: seconds between two saves, saving included; a failure repeats the work since the last one.
      recovery_seconds: seconds from a failure to the next step.
      failures_per_sec: mean rate of failures, independent of one another.
    """
    if not failures_per_sec:
        return 1.0
    mean = 1 / failures_per_sec
    try:
        return mean / interval * math.exp(recovery_seconds / mean) * math.expm1(interval / mean)
    except OverflowError:  # it fails before it has recovered
        return math.inf
