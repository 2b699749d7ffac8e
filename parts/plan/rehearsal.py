"""Rehearses a run's step: traces what one replica does, of any number, in a graph whose variables have no value.

Nothing is run. The engine's own code is traced, on a mesh whose axes record what they would send.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable

import tensorflow as tf

from ...engine.data import form
from ...engine.data.feeds.combined import CombinedFeed
from ...engine.data.feeds.feed import UntakenFeed
from ...engine.data.run_data import Data
from ...engine.data.source import unknown_dimensions
from ...engine.internals.tensorflow import elementwise_equality, variable_without_value
from ...engine.mesh import collectives
from ...engine.mesh.layout import Axis, Mesh
from ...engine.reduction import Reduction
from ...engine.state import TrainState
from ...engine.step.context import StepContext
from ...engine.strategies import FeedOptions, StrategyOptions
from ...engine.strategies.replicated import Replicated
from ...runner.command_line import checks, rules
from ...runner.command_line.config import Config
from ...runner.data import inputs as run_inputs
from ...runner.data import loading
from ...runner.failures import UsageError
from ...runner.restored import state as states
from ..parameter_servers.dry_run import shape_and_dtype
from ..sharding.mesh import ShardedMesh, model_axis
from .quantities import Message
from .traced_ops import tensor_bytes


@dataclasses.dataclass
class Layout:
    """Where replicas are: `devices` on each of `hosts`, of a strategy by its name."""

    strategy: str
    hosts: int
    devices: int

    @property
    def replicas(self) -> int:
        return self.hosts * self.devices


@dataclasses.dataclass
class Rehearsal:
    """One replica's step, traced.

    Attributes:
      batch_shards: number of shards of a batch, each computed by one replica, or by several with shards of the model.
      sync: the graph that syncs replicas after each `sync_period_steps`; None if they always are in sync.
      messages: messages that the step and the sync send.
      gradients: the `id`s of the tensors that are gradients of variables, and of the messages made of them.
    """

    layout: Layout
    strategy: _Replicas
    state: TrainState
    inputs: run_inputs.Inputs
    steps: int | None
    batch_shards: int
    graph: tf.Graph
    sync: tf.Graph | None
    messages: list[Message]
    gradients: set[int]
    variables: list[tf.Variable]


class _Record:
    """Messages that a replica sends in the code that is traced now, and the tensors that they are of, by `id`."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.tensors: set[int] = set()
        self.count = 1.0

    def add(self, kind: str, bytes: float, members: int, link: str) -> None:
        self.messages.append(Message(kind, float(bytes), members, link, self.count))  # type: ignore[arg-type]


class _RehearsedAxis(Axis):
    """An axis of replicas of which the first alone is traced.

    Args:
      size: number of replicas in each of the axis's groups.
      groups: number of the axis's groups on one host.
      gathers_small: whether small values are summed by a gather between hosts, as `collectives.all_reduce` does.
    """

    size, rank = 1, 0

    def __init__(self, name: str, size: int, groups: int, layout: Layout, gathers_small: bool, record: _Record):
        super().__init__(name)
        self.size, self._groups, self._layout, self._record = size, groups, layout, record
        self._gathers_small = gathers_small
        self._is_local = size * groups <= layout.devices

    def all_reduce(self, value):
        if self.size == 1:
            return value
        if self._gathers_small and self._layout.hosts > 1 and collectives.is_small(value, self.size):
            return tf.add_n(tf.unstack(self.all_gather(value)))
        return self._sent("all_reduce", value, tf.identity(value))

    def all_gather(self, value):
        if self.size == 1:
            return value[tf.newaxis]
        return self._sent("all_gather", value, tf.broadcast_to(value[tf.newaxis], [self.size, *value.shape]))

    def concatenate(self, values):
        return values if self.size == 1 else [tf.concat(tf.unstack(self.all_gather(value)), 0) for value in values]

    def reduce_scatter(self, value):
        return value if self.size == 1 else self.all_to_all(value)[: value.shape[0] // self.size]

    def all_to_all(self, value):
        # A copy, since what is received has memory of its own; a plan counts an identity as the same memory.
        if self.size == 1:
            return value
        copy = tf.custom_gradient(lambda x: (tf.raw_ops.DeepCopy(x=x), self.all_to_all))(value)
        return self._sent("reduce_scatter", value, copy)

    def _sent(self, kind: str, value: tf.Tensor, result: tf.Tensor) -> tf.Tensor:
        size = tensor_bytes(result if kind == "all_gather" else value)
        if self._is_local:
            self._record.add(kind, size, self.size, "devices")
        elif kind == "reduce_scatter":  # each device of a host sends to all others
            self._record.add(kind, size * self._layout.devices, self._layout.hosts, "hosts")
        else:  # by rings, each through a host once
            self._record.add(kind, size * self._groups, self.size, "hosts")
        self._record.tensors |= {id(value), id(result)}
        return result


class _Replicas(Replicated):
    """The first replica of several."""

    def __init__(self, layout: Layout, micro_batches: int, options: StrategyOptions, mesh: Mesh):
        super().__init__(layout.strategy, tf.distribute.OneDeviceStrategy("CPU:0"), options, mesh, micro_batches)
        self._layout = layout

    @property
    def num_replicas(self) -> int:
        return self._layout.replicas


def rehearse(config: Config, layout: Layout, micro_batches: int, data: Data | None) -> Rehearsal:
    """Traces a step of a run's configuration. Allocates no variable.

    Args:
      micro_batches: number of parts of a replica's batch, computed in parallel.
      data: data of the run; None loads it.

    Raises:
      UsageError: the strategy has no such layout, a step's cost differs by step, or a Keras model has been made.
    """
    if config.trainer_class.is_built:
        raise UsageError(
            f"the model {config.model_entry.name} exists, and a plan needs the function that makes it; pass that to "
            "KerasTrainer.for_model"
        )
    config = dataclasses.replace(config, run_dir=None)  # a plan neither reads a run nor writes one
    record = _Record()
    feed_options = FeedOptions(
        config.resident_data_mb << 20, config.shuffle_buffer, config.auto_shard_policy, config.shuffle_window
    )
    options = StrategyOptions(feed_options=feed_options, steps_per_loop=config.steps_per_loop)
    model = model_axis(rules.mesh_shape(config.mesh), layout.replicas)
    gathers_small = model == 1 and not config.shard_optimizer  # else collectives are the mesh's own, without gathers
    mesh = Mesh() if gathers_small else ShardedMesh(None, model, config.shard_optimizer)
    # By name: the size of an axis's groups, and how many of these a host has.
    axes = {"data": (layout.replicas // model, min(model, layout.devices))}
    axes |= {"model": (model, 1), "all_replicas": (layout.replicas, 1)}
    for name, (size, groups) in axes.items():
        setattr(mesh, name, _RehearsedAxis(name, size, groups, layout, gathers_small, record))
    strategy = _Replicas(layout, micro_batches, options, mesh)
    batch_shards = strategy.mesh.batch_shard(0, strategy.num_replicas)[1]
    checks.check_batch(config, batch_shards)
    inputs = run_inputs.build(config, data or loading.load(config), strategy)
    if unknown_dimensions(form.element_spec(inputs.example)):
        raise UsageError("examples differ in length, and so does what a step needs; pad them to one length to plan")
    if isinstance(inputs.feeds["train"], CombinedFeed):
        raise UsageError("a step takes a batch of each of several inputs; plan each of them alone")
    steps, variables = states.train_steps(config, inputs.feeds["train"], ()), list[tf.Variable]()

    def create(_, **keywords):
        shape, dtype = shape_and_dtype(keywords)
        variable = variable_without_value(shape, dtype, keywords.get("name"), keywords.get("trainable"))
        if not shape.rank:  # Keras reads an optimizer's rate on the host
            variable.numpy = functools.partial(tf.get_static_value, keywords.get("initial_value"))
        variables.append(variable)
        return variable

    def trace() -> Rehearsal:
        state = states.build_state(config, strategy, inputs, steps)
        gradients = _record_gradients(state.trainer.reduction)
        local_batch = config.global_batch_size // batch_shards
        specs = tf.nest.map_structure(lambda x: tf.TensorSpec([local_batch, *x.shape[1:]], x.dtype), inputs.example)
        strategy.bind(state, UntakenFeed(specs, config.global_batch_size))
        record.messages.clear()  # those of building are none of a step's
        graph, sync = strategy.training.one_step(0).graph, None
        if period := state.trainer.reduction.sync_every_steps:
            record.count = 1.0 / period  # the messages of a sync, of which each step has a part

            def sync_replicas() -> None:
                with StepContext(mesh=mesh):
                    state.trainer.reduction.sync()

            synced = tf.function(lambda: strategy.distribution.run(sync_replicas), autograph=False)
            sync = synced.get_concrete_function().graph
        sent = record.messages
        gradients |= record.tensors
        return Rehearsal(layout, strategy, state, inputs, steps, batch_shards, graph, sync, sent, gradients, variables)

    return _in_graph(trace, create)


def _record_gradients(reduction: Reduction) -> set[int]:
    """Has a reduction add the `id`s of gradients that it sums, or applies unsummed, to the set that is returned."""
    ids, original_sum = set[int](), reduction.sum

    def recording_sum(gradients, count, *arguments, **named):
        total, examples = original_sum(gradients, count, *arguments, **named)
        for gradient in (*gradients, *total.values):
            ids.add(id(gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient))
        return total, examples

    reduction.sum = recording_sum  # type: ignore[method-assign]
    return ids


def _in_graph(trace: Callable[[], Rehearsal], create: Callable) -> Rehearsal:
    """Calls `trace` in a graph, whose variables `create` makes, in its own thread: Keras numbers layers there."""
    results: list[Rehearsal | BaseException] = []

    def run() -> None:
        try:
            with tf.Graph().as_default(), tf.variable_creator_scope(create), elementwise_equality():
                results.append(trace())
        except BaseException as error:  # raised again by the caller's thread
            results.append(error)

    thread = threading.Thread(target=run, name="rehearsal")
    thread.start()
    thread.join()
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]
