"""Computes what a configuration's step needs, from its rehearsal: the planner's first half."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator

import tensorflow as tf

from ...engine.data.arrays import Mapped
from ...engine.data.feeds import combined
from ...engine.data.feeds.read_feed import ReadFeed
from ...engine.data.feeds.resident_feed import ResidentFeed
from ...engine.data.reader import example_bytes
from ...engine.data.run_data import Data
from ...engine.data.source import Split
from ...engine.internals.variables import tf_variable
from ...engine.mesh import sharded
from ...engine.optimizers.keras_adapter import KerasOptimizer
from ...runner.command_line.config import Config
from ...runner.failures import UsageError
from ...runner.restored.state import parallel_micro_batches
from . import cost
from .cost import variable_bytes
from .peak_memory import OUTSIDE, peak
from .quantities import Memory, Work
from .rehearsal import Layout, Rehearsal, rehearse
from .traced_ops import NotCountableError

_BLOCKS_AHEAD = 4  # that a feed holds: one in use, two prefetched, one being read
# See docs/plan.md. Above this fraction of the memory, the uncertainty is more than 15 % of all memory.
_UNCERTAIN_ON_CPUS = "activations and gradients, of which processes on CPUs took 0.8 to 1.8 times as much as is planned"
_UNCERTAIN_FRACTION = 0.25
_OPERATION_BYTES = 110_000  # that a program's operation takes of its host, in Python and TensorFlow: see docs/plan.md


def quantify(config: Config, hosts: int, devices: int = 1, kind: str = "cpu", data: Data | None = None) -> Work:
    """Computes what one step needs, without training and without the memory of its variables.

    Args:
      config: configuration of a run that trains, see `main.configured`.
      devices: number of devices of each host; one_device uses one, --num_virtual_devices others.
      kind: kind of the devices, "cpu", "gpu" or "tpu".
      data: data of the run; None loads it.

    Raises:
      UsageError: the replicas can't share the batch, or a step's needs are known only by running it.
    """
    micro_batches = parallel_micro_batches(config) if kind == "cpu" else 1
    has_one = config.strategy == "one_device"
    layout = Layout(config.strategy, hosts, 1 if has_one else config.num_virtual_devices or devices)
    rehearsal = rehearse(config, layout, micro_batches, data)
    try:
        products = cost.products(rehearsal.graph)
        operations, moved = cost.passes(rehearsal.graph)
    except NotCountableError as error:
        raise UsageError(f"{config.model_entry.name} can't be planned: {error}") from None
    moved += cost.update_bytes(rehearsal.state.trainer)[0]
    messages = Counter(rehearsal.messages)
    memory, uncertain = _memory(rehearsal, kind)
    feed, split = rehearsal.inputs.feeds["train"], combined.first(rehearsal.inputs.splits["train"])
    input_bytes = 0.0
    if not isinstance(feed, ResidentFeed) and not (split.by_index and split.as_arrays() is not None):
        # Each host reads the examples of its own replicas; where several hosts share a model, these are the same.
        readers = min(layout.hosts, rehearsal.batch_shards)
        input_bytes = float(example_bytes(split) * config.global_batch_size / readers)
    program = sum(op.type not in OUTSIDE for op, _ in cost.executed(rehearsal.graph))
    if kind == "cpu" and memory.activations + memory.gradients > _UNCERTAIN_FRACTION * memory.total:
        uncertain = (*uncertain, _UNCERTAIN_ON_CPUS)
    return Work(
        hosts=layout.hosts,
        replicas=layout.replicas,
        memory=memory,
        products=products,
        operations=operations,
        can_jit=not (config.no_jit_reason or rehearsal.strategy.no_jit_reason),
        moved_bytes=moved,
        messages=tuple(dataclasses.replace(one, count=one.count * number) for one, number in messages.items()),
        examples=config.global_batch_size,
        input_bytes=input_bytes,
        checkpoint_bytes=float(sum(tf_variable(v).dtype.size * sharded.size(v) for v in rehearsal.state.variables())),
        steps=rehearsal.steps,
        host_bytes=float(sum(map(_array_bytes, rehearsal.inputs.splits.values())) + _OPERATION_BYTES * program),
        uncertain=uncertain,
    )


def _memory(rehearsal: Rehearsal, kind: str) -> tuple[Memory, tuple[str, ...]]:
    """Computes the bytes on a replica's device: variables, and what a step holds, or a sync if that holds more.

    Returns:
      (memory, a line for each part of it that may differ much).
    """
    graphs = filter(None, (rehearsal.graph, rehearsal.sync))
    most = max((peak(graph, rehearsal.gradients, kind == "cpu") for graph in graphs), key=lambda found: found.total)
    slots = {id(v) for v in _slots(rehearsal)}
    optimizer = sum(variable_bytes(v) for v in rehearsal.variables if id(v) in slots)
    weights = sum(variable_bytes(v) for v in rehearsal.variables if id(v) not in slots)
    activations = most.total - most.gradients
    # Resident examples and a step's batch, or the blocks of batches that wait.
    feed, split = rehearsal.inputs.feeds["train"], combined.first(rehearsal.inputs.splits["train"])
    data = feed.order.batch_size / rehearsal.batch_shards * example_bytes(split)
    if isinstance(feed, ResidentFeed):
        data += example_bytes(split) * len(split)
    else:
        data *= _BLOCKS_AHEAD * (feed.order.block_steps if isinstance(feed, ReadFeed) else 1)
    return Memory(float(weights), float(optimizer), most.gradients, activations, float(data)), most.uncertain


def _slots(rehearsal: Rehearsal) -> Iterator[tf.Variable]:
    """Yields the variables that only updates use: those of optimizers, and of the reduction."""
    trainer = rehearsal.state.trainer
    for optimizer in trainer.inventory.optimizers.values():
        updated = {id(tf_variable(v)) for v in optimizer.updated_variables}
        variables = list(optimizer.variables)
        if isinstance(optimizer, KerasOptimizer):
            variables += optimizer.keras_optimizer.variables
        yield from (v for v in map(tf_variable, variables) if id(v) not in updated)
    yield from trainer.reduction.variables


def _array_bytes(split: Split) -> int:
    """Sums the bytes of a split's arrays in memory; 0 of what is in files."""
    arrays = combined.first(split).as_arrays() if split.by_index else ()
    return sum(array.nbytes for array in tf.nest.flatten(arrays) if not isinstance(array, (Mapped, type(None))))
